"""FedAsync: every update changes the model at once, the less the older it is.

Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", OPT 2020 (arXiv 1903.03934).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.technique import RoundView, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.errors import UsageError
from fedstrata.techniques.staleness import CAVEAT, parse_staleness

PAPERS = (
    Paper(
        "Cong Xie and Sanmi Koyejo and Indranil Gupta",
        "Asynchronous Federated Optimization",
        "OPT",
        2020,
    ),
)

NO_DIRECTION = "fedasync mixes two models, and the other moves along the clients' change"
"""Why optimisers of the server are refused."""


def mix(received: Tensors, delta: Tensors, current: Tensors, alpha: float) -> Tensors:
    """The change that takes w to (1 − α)w + α(w_τ + Δ): α(w_τ + Δ − w), for what travelled."""
    return {n: alpha * (received[n] + d - current[n]) for n, d in delta.items()}


@dataclass(frozen=True, kw_only=True)
class FedAsync(Technique):
    """One update at a time: w ← (1 − α_t)w + α_t·w_new with α_t = α·s(t − τ), w_new trained from the model w_τ.

    Clients train `participation` at the same time; when one is done another begins, with the newest model. A round of
    the run is one change of the model. The order is that of simulated time, which needs a fleet.

    Args:
        alpha: α.
        staleness: s: `poly(a)` is (1 + t − τ)^−a, `hinge(a, b)` is 1 up to b, then 1/(a(t − τ − b) + 1), `constant` 1.

    The paper's regulariser ρ/2·‖w − w_τ‖² is `fedprox(mu=ρ)` beside it.

    Deviations: with `fedavg(server_lr=η)` w_new is w_τ + ηΔ. Running statistics are those of the update, unmixed; under
    `buffers='local'` clients keep them. A client begins once per model.
    """

    name: ClassVar[str] = "fedasync"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    caveat: ClassVar[str] = CAVEAT
    refuses: ClassVar[dict[str, str]] = {
        "fedbuff": "each says when the model changes",
        **dict.fromkeys(("fedavgm", "fedadagrad", "fedadam", "fedyogi"), NO_DIRECTION),
    }
    alpha: float = 0.6
    staleness: str = "poly(0.5)"

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise UsageError(f"fedasync's alpha must be above 0 and at most 1, not {self.alpha}")
        parse_staleness(self.staleness)

    @property
    def arrivals(self) -> int:
        """Every update changes the model."""
        return 1

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """α_t(w_τ + Δ − w)."""
        (asked,) = round.asked
        alpha = self.alpha * parse_staleness(self.staleness)(asked.staleness)
        return mix(asked.params, delta, round.params, alpha), state
