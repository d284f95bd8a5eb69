"""FedBuff: updates are taken as they arrive, and every K of them change the model.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek and Huba, "Federated Learning with Buffered Asynchronous Aggregation",
AISTATS 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.technique import Technique
from fedstrata.core.types import Assignment, Update, replace_fields
from fedstrata.errors import whole_number
from fedstrata.techniques.staleness import CAVEAT, parse_staleness

PAPERS = (
    Paper(
        "John Nguyen and Kshitiz Malik and Hongyuan Zhan and Ashkan Yousefpour and Mike Rabbat and Mani Malek and "
        "Dzmitry Huba",
        "Federated Learning with Buffered Asynchronous Aggregation",
        "AISTATS",
        2022,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FedBuff(Technique):
    """A buffer of updates, in the order of arrival: w ← w + η_g · (1/K) Σ s(τ_i) Δ_i after every K.

    Δ_i is a client's change of the model that it began with, and τ_i how often the model has changed since. When a
    client is done another one begins, with the newest model, so `participation` is M, how many train at the same time;
    a round of the run is one change of the model. The order is that of simulated time, which needs a fleet.

    Args:
        buffer: K.
        staleness: s: `poly(a)` is (1 + τ)^−a, the paper's with a = 0.5; `constant` is 1; `hinge(a, b)` is 1 up to b.

    η_g is `fedavg(server_lr=…)`. Clients are weighted alike, and with `fedavg(weight='examples')` by n_i.

    Deviations: a client whose update is in the open buffer does not begin again before the model has changed. Running
    statistics are the plain mean of the K. With all clients training, K = N and s = 1 this is FedAvg.
    """

    name: ClassVar[str] = "fedbuff"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    caveat: ClassVar[str] = CAVEAT
    defaults: ClassVar[dict[str, str]] = {"weight": "uniform"}
    refuses: ClassVar[dict[str, str]] = {"fedasync": "each says when the model changes"}
    buffer: int = 10
    staleness: str = "poly(0.5)"

    def __post_init__(self) -> None:
        whole_number("fedbuff", 1, buffer=self.buffer)
        parse_staleness(self.staleness)

    @property
    def arrivals(self) -> int:
        """K updates change the model."""
        return self.buffer

    def rescale(
        self, updates: Sequence[Update], weights: Sequence[float], asked: Sequence[Assignment]
    ) -> Sequence[Update]:
        """Each Δ_i times s(τ_i)."""
        s = parse_staleness(self.staleness)
        factors = [s(own.staleness) for own in asked]
        return [
            update if factor == 1 else replace_fields(update, delta={n: d * factor for n, d in update.delta.items()})
            for update, factor in zip(updates, factors, strict=True)
        ]

    def rescale_guarded(
        self, updates: Sequence[Update], weights: Sequence[float], asked: Sequence[Assignment]
    ) -> Sequence[Update]:
        """The same: the server knows how old an update is, whatever its client says."""
        return self.rescale(updates, weights, asked)
