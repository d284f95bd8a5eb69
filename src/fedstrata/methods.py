"""How techniques become a Method: on top of a mean, in an order, each other's company accepted or refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, get_args

from fedstrata.core import Buffers, Technique, Weight, changed, overrides
from fedstrata.errors import UsageError
from fedstrata.reducers import BY_NAME, Reducer, build_reducer
from fedstrata.spec import bind, parse_sum, text_of


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

    def __post_init__(self) -> None:
        for name, choices in (("weight", Weight), ("buffers", Buffers)):
            value = getattr(self, name)
            if value is not None and value not in get_args(choices):
                raise UsageError(f"fedavg's {name} is one of {', '.join(get_args(choices))}, not {value!r}")
        if self.server_lr is not None and not 0 < self.server_lr < float("inf"):
            raise UsageError(f"fedavg's server_lr must be positive, not {self.server_lr}")
        build_reducer("mean" if self.reduce is None else self.reduce)

    def __str__(self) -> str:
        return text_of(self.name, changed(self))


@dataclass(frozen=True)
class Method:
    """Techniques on top of a mean; made by `chain` or read from a string by `fedstrata.method`."""

    techniques: tuple[Technique, ...] = ()
    base: FedAvg = field(default_factory=FedAvg)

    def __post_init__(self) -> None:
        seen: dict[str, Technique] = {}
        for technique in self.techniques:
            if technique.name in seen:
                raise UsageError(f"the method names '{technique.name}' twice")
            seen[technique.name] = technique
        for one in self.techniques:
            others = [name for name in seen if name != one.name]
            for other, why in [*one.refuses.items(), *((other, one.alone) for other in others if one.alone)]:
                if other in seen:
                    raise UsageError(f"'{one.name}' and '{other}' cannot be combined: {why}")
        for key in ("weight", "buffers", "server_lr"):
            self._setting(key, None)
        for one in (t for t in self.techniques if t.alone):
            for key, value in changed(self.base).items():
                if key in ("server_lr", "reduce") or (one.personal and value == "average"):
                    raise UsageError(f"'{one.name}' and fedavg({key}={value!r}) cannot be combined: {one.alone}")
        for technique in self.techniques if self.reducer is not None else ():
            if technique.branches and not isinstance(self.reducer, BY_NAME):
                raise UsageError(
                    f"'{technique.name}' and reduce={self.base.reduce!r} cannot be combined: it chooses among all "
                    "clients, and groups would no longer be apart"
                )
            if overrides(technique, "fold") or overrides(technique, "gather") or technique.needs_deltas:
                raise UsageError(
                    f"'{technique.name}' and reduce={self.base.reduce!r} cannot be combined: what '{technique.name}' "
                    "takes from the clients does not pass through the mean, so nothing guards it"
                )

    def _setting(self, key: str, otherwise: Any) -> Any:
        chosen = getattr(self.base, key)
        if chosen is not None:
            return chosen
        wishes = {t.name: t.defaults[key] for t in self.techniques if key in t.defaults}
        if len(set(wishes.values())) > 1:
            said = ", ".join(f"{name} {value!r}" for name, value in wishes.items())
            raise UsageError(f"the techniques want different values of '{key}' ({said}); say fedavg({key}=…)")
        return next(iter(wishes.values()), otherwise)

    @cached_property
    def weight(self) -> Weight:
        """How the mean weighs clients: all alike where some may lie, for they would claim many examples."""
        weight: Weight = self._setting("weight", "examples" if self.reducer is None else "uniform")
        return weight

    @cached_property
    def buffers(self) -> Buffers:
        """What happens to running statistics."""
        buffers: Buffers = self._setting("buffers", "average")
        return buffers

    @cached_property
    def server_lr(self) -> float:
        """How far the server moves along the mean."""
        return float(self._setting("server_lr", 1.0))

    @cached_property
    def reducer(self) -> Reducer | None:
        """What takes the mean's place; None for the mean itself."""
        return build_reducer("mean" if self.base.reduce is None else self.base.reduce)

    @property
    def epilogue(self) -> int:
        """Rounds after the last one, in which nobody trains."""
        return max((t.epilogue for t in self.techniques), default=0)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the results must know."""
        return tuple(t.note for t in self.techniques if t.note)

    @property
    def pools(self) -> bool:
        """True if one party holds everybody's examples."""
        return any(t.pools for t in self.techniques)

    @property
    def branches(self) -> bool:
        """True if clients of one architecture share their parameters with nobody else."""
        return any(t.branches for t in self.techniques)

    @property
    def personal(self) -> bool:
        """True if every client has a model of its own."""
        return any(t.personal for t in self.techniques)

    def at(self, door: str) -> Iterator[Technique]:
        """The techniques that do something at this door, left to right."""
        return (t for t in self.techniques if overrides(t, door))

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits that identify the method on the wire."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def with_buffers(self, buffers: Buffers | None) -> Method:
        """The same method under another buffer policy; None, and the policy that it has, change nothing."""
        return self if buffers in (None, self.buffers) else replace(self, base=replace(self.base, buffers=buffers))

    def __str__(self) -> str:
        shown = [str(t) for t in self.techniques]
        if changed(self.base) or not shown:
            shown.insert(0, str(self.base))
        return " + ".join(shown)


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
