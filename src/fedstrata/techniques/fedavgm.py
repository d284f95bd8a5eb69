"""FedAvgM: momentum on the server.

Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.technique import RoundView, Setting, Technique
from fedstrata.core.tensors import Tensors, add, scale, zeros_like
from fedstrata.errors import UsageError, positive

PAPERS = (
    Paper(
        "Tzu-Ming Harry Hsu and Hang Qi and Matthew Brown",
        "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
        "arXiv",
        2019,
        arxiv="1909.06335",
    ),
)


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Technique):
    """Momentum on the server: v ← β·v + Δ; w ← w + lr·v, with Δ the mean of the clients' changes.

    Args:
        beta: β, from 0 to below 1; with 0 and lr = 1 this is FedAvg.
        lr: the server's learning rate.

    What did not travel in a round keeps its velocity and does not move.
    """

    name: ClassVar[str] = "fedavgm"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    beta: float = 0.9
    lr: float = 1.0

    def __post_init__(self) -> None:
        positive("fedavgm", lr=self.lr)
        if not 0 <= self.beta < 1:
            raise UsageError(f"fedavgm's beta must lie between 0 and 1, not {self.beta}")

    def init(self, params: Tensors, setting: Setting) -> Tensors:
        """A velocity of zero."""
        return zeros_like(params) if self.beta else {}

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """v ← β·v + Δ; w ← w + lr·v, for what travelled."""
        arrived = {n: d for n, d in delta.items() if n in round.arrived}
        if self.beta:
            arrived = add(arrived, state, alpha=self.beta)
            state = {**state, **arrived}
        return {**delta, **(arrived if self.lr == 1 else scale(arrived, self.lr))}, state
