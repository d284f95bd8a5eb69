"""FedNova: clients that take more steps no longer count for more.

Wang, Liu, Liang, Joshi and Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.optim import Sgd, build_optimizer
from fedstrata.core.technique import Technique
from fedstrata.core.types import Assignment, Update, replace_fields

PAPERS = (
    Paper(
        "Jianyu Wang and Qinghua Liu and Hao Liang and Gauri Joshi and H. Vincent Poor",
        "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
        "NeurIPS",
        2020,
    ),
)


def accumulation(steps: int, momentum: float = 0.0, nesterov: bool = False) -> float:
    """‖a‖₁: the sum of the weights with which the gradients of so many steps enter the change of the model.

    τ for SGD; [τ − ρ(1 − ρ^τ)/(1 − ρ)]/(1 − ρ) with momentum ρ, and with ρ² in place of the first ρ by Nesterov: step s
    adds (1 − ρ^s)/(1 − ρ), or (1 − ρ^(s+1))/(1 − ρ).
    """
    if momentum == 1:
        return steps * (steps + (3 if nesterov else 1)) / 2
    tail = momentum ** (2 if nesterov else 1) * (1 - momentum**steps) / (1 - momentum)
    return (steps - tail) / (1 - momentum)


def _accumulation_of(update: Update, asked: Assignment) -> float:
    optimizer = build_optimizer(asked.work.optimizer)
    if isinstance(optimizer, Sgd):
        return accumulation(update.steps, optimizer.momentum, optimizer.nesterov)
    return float(update.steps)


def _accumulations_of(updates: Sequence[Update], asked: Sequence[Assignment]) -> list[float]:
    return [_accumulation_of(update, own) for update, own in zip(updates, asked, strict=True)]


@dataclass(frozen=True, kw_only=True)
class FedNova(Technique):
    """Clients that take more steps no longer count for more: w ← w + (Σ p_k a_k) Σ p_k Δ_k/a_k.

    a_k = ‖a‖₁ is τ_k for SGD and [τ_k − ρ(1 − ρ^τ_k)/(1 − ρ)]/(1 − ρ) with momentum ρ; p_k = n_k/Σn over the clients
    that hold the parameter in this round, so that layers that train alone and clients of different depth come out
    right. Equal a_k give FedAvg, bit for bit.

    Deviations: weight decay, and the pull of fedprox or feddyn beside it, are taken as part of the gradient (the paper
    has another a_k for proximal steps); adaptive optimisers (Adam) count steps, a_k = τ_k. Beside a robust reducer the
    median of the a_k takes the place of Σ p_k a_k, for a client may lie about its steps, and claim very many.
    """

    name: ClassVar[str] = "fednova"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS

    def rescale(
        self, updates: Sequence[Update], weights: Sequence[float], asked: Sequence[Assignment]
    ) -> Sequence[Update]:
        """Δ_k times (Σ p_k a_k)/a_k, name by name."""
        moves = _accumulations_of(updates, asked)
        if len(set(moves)) == 1:
            return updates
        sums: dict[str, tuple[float, float]] = {}
        for update, weight, move in zip(updates, weights, moves, strict=True):
            for name in update.delta:
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + weight * move, before[1] + weight
        return [
            replace_fields(u, delta={n: d * (sums[n][0] / sums[n][1] / move) for n, d in u.delta.items()})
            for u, move in zip(updates, moves, strict=True)
        ]

    def rescale_guarded(
        self, updates: Sequence[Update], weights: Sequence[float], asked: Sequence[Assignment]
    ) -> Sequence[Update]:
        """Δ_k times a/a_k, a the median of the a_k: how many steps a client took is only what it says."""
        moves = _accumulations_of(updates, asked)
        middle = median(moves)
        return [
            u if move == middle else replace_fields(u, delta={n: d * (middle / move) for n, d in u.delta.items()})
            for u, move in zip(updates, moves, strict=True)
        ]
