"""FedAvg: the mean of the clients' updates, which every other technique stands on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, get_args

from fedstrata.aggregation.rules import build_reducer
from fedstrata.core.citation import Paper
from fedstrata.core.method import Method
from fedstrata.core.spec import bind, non_default_fields, parse_sum, text_of
from fedstrata.core.technique import Buffers, Technique
from fedstrata.core.types import Reducer, Weight
from fedstrata.errors import UsageError

PAPERS = (
    Paper(
        "H. Brendan McMahan and Eider Moore and Daniel Ramage and Seth Hampson and Blaise Agüera~y~Arcas",
        "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        "AISTATS",
        2017,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """The mean of the clients' updates, the base of every method: w ← w + server_lr · Σ n_k Δ_k / Σ n_k.

    McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", AISTATS 2017. With Δ_k = w_k − w and server_lr = 1 this is the paper's Σ n_k w_k / Σ n_k.
    Every name is averaged over the updates that hold it. An argument left at None takes what the techniques of the
    method ask for, or else the first value below.

    Args:
        weight: `examples` (n_k is the client's number of examples) or `uniform` (n_k = 1).
        buffers: what happens to running statistics: `average` (their values are averaged and sent), `local` (each
            client keeps its own; the server averages a copy for evaluation only) or `drop` (nobody keeps any:
            normalisation by the batch at hand, in evaluation too).
        server_lr: how far the server moves along the mean.
        reduce: what takes the mean's place, such as `median` or `krum(share=0.3)`, where clients may be broken or lie.
    """

    weight: Weight | None = None
    buffers: Buffers | None = None
    server_lr: float | None = None
    reduce: str | None = None

    name: ClassVar[str] = "fedavg"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS

    def __post_init__(self) -> None:
        for name, choices in (("weight", Weight), ("buffers", Buffers)):
            value = getattr(self, name)
            if value is not None and value not in get_args(choices):
                raise UsageError(f"fedavg's {name} is one of {', '.join(get_args(choices))}, not {value!r}")
        if self.server_lr is not None and not 0 < self.server_lr < float("inf"):
            raise UsageError(f"fedavg's server_lr must be positive, not {self.server_lr}")
        _ = self.reducer  # refuses an unknown one

    @cached_property
    def reducer(self) -> Reducer | None:
        """What takes the mean's place; None for the mean itself."""
        return build_reducer("mean" if self.reduce is None else self.reduce)

    def with_buffers(self, buffers: Buffers) -> FedAvg:
        """The same under another policy for running statistics."""
        return replace(self, buffers=buffers)

    def with_reducer(self, reduce: str) -> FedAvg:
        """The same with another rule in the mean's place."""
        return replace(self, reduce=reduce)

    def __str__(self) -> str:
        return text_of(self.name, non_default_fields(self))


def chain(
    *techniques: Technique,
    weight: Weight | None = None,
    buffers: Buffers | None = None,
    server_lr: float | None = None,
    reduce: str | None = None,
) -> Method:
    """Put techniques together into a Method; the keyword arguments are FedAvg's (see there)."""
    return Method(techniques, FedAvg(weight=weight, buffers=buffers, server_lr=server_lr, reduce=reduce))


def parse(text: str, table: Mapping[str, Callable[..., Any]]) -> Method:
    """Read a method as papers write it, `"feddyn(alpha=0.1) + fedlc"`, with the techniques of a table."""
    techniques: list[Technique] = []
    bases: list[FedAvg] = []
    for call in parse_sum(text):
        target, kwargs = bind("method", table, call)
        part = target(**kwargs)
        (bases if isinstance(part, FedAvg) else techniques).append(part)
    if len(bases) > 1:
        raise UsageError(f"the method '{text}' names 'fedavg' twice")
    return Method(tuple(techniques), bases[0] if bases else FedAvg())
