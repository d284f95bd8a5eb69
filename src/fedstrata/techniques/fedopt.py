"""FedAdagrad, FedAdam and FedYogi: adaptive optimisers on the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive Federated Optimization", ICLR 2021,
Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.technique import RoundView, Setting, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.errors import UsageError, positive

if TYPE_CHECKING:
    from torch import Tensor

PAPERS = (
    Paper(
        "Sashank J. Reddi and Zachary Charles and Manzil Zaheer and Zachary Garrett and Keith Rush and Jakub "
        "Konečný and Sanjiv Kumar and H. Brendan McMahan",
        "Adaptive Federated Optimization",
        "ICLR",
        2021,
    ),
)

_TWO = "both are optimisers of the server, and only one can move the model"


def _start(params: Tensors, tau: float) -> Tensors:
    """m = 0 and v = τ², the least that the paper allows."""
    return {
        f"{kind}/{n}": torch.full_like(p, at) for kind, at in (("m", 0.0), ("v", tau**2)) for n, p in params.items()
    }


def _step(
    state: Tensors,
    delta: Tensors,
    round: RoundView,
    lr: float,
    beta1: float,
    tau: float,
    second: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensors, Tensors]:
    """m ← β₁m + (1 − β₁)Δ; v ← second(v, Δ²); w ← w + lr·m/(√v + τ), for what travelled; the rest stays."""
    moved, after = dict(delta), dict(state)
    for name in (n for n in delta if n in round.arrived):
        change = delta[name]
        m = beta1 * state[f"m/{name}"] + (1 - beta1) * change
        v = second(state[f"v/{name}"], change.square())
        moved[name], after[f"m/{name}"], after[f"v/{name}"] = lr * m / (v.sqrt() + tau), m, v
    return moved, after


def _check(name: str, lr: float, tau: float, **betas: float) -> None:
    positive(name, lr=lr, tau=tau)
    for key, value in betas.items():
        if not 0 <= value < 1:
            raise UsageError(f"{name}'s {key} must lie between 0 and 1, not {value}")


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(Technique):
    """Adagrad on the server: v ← v + Δ²; w ← w + lr·m/(√v + τ), m ← β₁m + (1 − β₁)Δ.

    Args:
        lr: the server's learning rate η, which the paper tunes for every task.
        beta1: β₁, momentum; none in the paper.
        tau: τ, how adaptive the step is.

    Δ is FedAvg's mean, weighted by examples; the paper's plain mean is `fedavg(weight='uniform')`.
    """

    name: ClassVar[str] = "fedadagrad"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    refuses: ClassVar[dict[str, str]] = {"fedavgm": _TWO, "fedadam": _TWO, "fedyogi": _TWO}
    lr: float = 0.1
    beta1: float = 0.0
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check(self.name, self.lr, self.tau, beta1=self.beta1)

    def init(self, params: Tensors, setting: Setting) -> Tensors:
        """m = 0, v = τ²."""
        return _start(params, self.tau)

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """v ← v + Δ²."""
        return _step(state, delta, round, self.lr, self.beta1, self.tau, lambda v, square: v + square)


@dataclass(frozen=True, kw_only=True)
class _TwoMoments(Technique):
    """What Adam and Yogi have in common: all but how v follows the squares."""

    lr: float = 0.03
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check(self.name, self.lr, self.tau, beta1=self.beta1, beta2=self.beta2)

    def init(self, params: Tensors, setting: Setting) -> Tensors:
        """m = 0, v = τ²."""
        return _start(params, self.tau)

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """v ← second(v, Δ²); w ← w + lr·m/(√v + τ)."""
        return _step(state, delta, round, self.lr, self.beta1, self.tau, self._second)

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FedAdam(_TwoMoments):
    """Adam on the server: v ← β₂v + (1 − β₂)Δ²; w ← w + lr·m/(√v + τ), m ← β₁m + (1 − β₁)Δ.

    Args:
        lr: the server's learning rate η, which the paper tunes for every task.
        beta1: β₁, momentum.
        beta2: β₂, memory of the squares.
        tau: τ, how adaptive the step is.

    As in the paper, without bias correction.
    """

    name: ClassVar[str] = "fedadam"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    refuses: ClassVar[dict[str, str]] = {"fedavgm": _TWO, "fedyogi": _TWO}

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True, kw_only=True)
class FedYogi(_TwoMoments):
    """Yogi on the server: v ← v − (1 − β₂)Δ²·sign(v − Δ²); w ← w + lr·m/(√v + τ), m ← β₁m + (1 − β₁)Δ.

    Args:
        lr: the server's learning rate η, which the paper tunes for every task.
        beta1: β₁, momentum.
        beta2: β₂, how fast v follows the squares.
        tau: τ, how adaptive the step is.
    """

    name: ClassVar[str] = "fedyogi"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    refuses: ClassVar[dict[str, str]] = {"fedavgm": _TWO}

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
