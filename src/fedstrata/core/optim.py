"""Local optimisers and learning-rate schedules, by name.

Every visit makes a new optimiser. The optimisers compute a direction d, multiply it by the techniques' `scale`, and
move w ← w − lr·d, so that a scale means the same under SGD and under Adam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from fedstrata.core.lazy import torch
from fedstrata.core.spec import Registry, bind
from fedstrata.core.tensors import each
from fedstrata.errors import UsageError, not_negative

if TYPE_CHECKING:
    from torch import Tensor

Step = Callable[[Sequence["Tensor | None"]], None]
"""Takes the gradients and moves the parameters in place; a parameter without a gradient stays as it is."""
Move = Callable[[Sequence["Tensor"], Sequence["Tensor"], "float | Tensor"], None]
"""(parameters, directions, learning rate): w ← w − lr·d."""


def move_in_place(weights: Sequence[Tensor], direction: Sequence[Tensor], lr: float | Tensor) -> None:
    """w ← w − lr·d."""
    each("add_", weights, direction, alpha=-lr)


class Optimizer(Protocol):
    """Settings of an optimiser; `start` makes the step function of one visit."""

    @property
    def kept(self) -> int:
        """How many tensors of its size it keeps of a parameter from step to step."""
        ...

    def start(
        self, params: list[Tensor], lr: float | Tensor, scale: list[Tensor] | None, move: Move = move_in_place
    ) -> Step:
        """The step function of one visit, for these parameters; `scale` multiplies the direction, one per parameter."""
        ...


def _pick(lists: Sequence[list[Tensor]], grads: Sequence[Tensor | None]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """(the gradients that are there, the other lists' entries beside them)."""
    there = [g for g in grads if g is not None]
    if len(there) == len(grads):
        return there, list(lists)
    used = [i for i, g in enumerate(grads) if g is not None]
    return there, [[entries[i] for i in used] if entries else [] for entries in lists]


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent: v ← ρ·v + g + λ·w; w ← w − lr·v (Nesterov: w ← w − lr·(g + λ·w + ρ·v))."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        not_negative("sgd", momentum=self.momentum, weight_decay=self.weight_decay)
        if self.momentum > 1:
            raise UsageError(f"sgd's momentum must be 1 at most, not {self.momentum}")
        if self.nesterov and not self.momentum:
            raise UsageError("sgd's nesterov needs a momentum above 0")

    @property
    def kept(self) -> int:
        """The velocity, if there is momentum."""
        return 1 if self.momentum else 0

    def start(
        self, params: list[Tensor], lr: float | Tensor, scale: list[Tensor] | None, move: Move = move_in_place
    ) -> Step:
        """The step function of one visit, with a velocity of zero."""
        state = [params, [torch.zeros_like(p) for p in params] if self.momentum else [], scale or []]

        def step(grads: Sequence[Tensor | None]) -> None:
            direction, (weights, velocity, factors) = _pick(state, grads)
            if not direction:
                return
            if self.weight_decay:
                direction = each("add", direction, weights, alpha=self.weight_decay)
            if self.momentum:
                each("mul_", velocity, self.momentum)
                each("add_", velocity, direction)
                direction = each("add", direction, velocity, alpha=self.momentum) if self.nesterov else velocity
            if factors:
                direction = each("mul", direction, factors)
            move(weights, direction, lr)

        return step


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam: m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², d = m̂/(√v̂ + ε); weight decay as λ·w in g, or in d if decoupled."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        not_negative("adam", beta1=self.beta1, beta2=self.beta2, eps=self.eps, weight_decay=self.weight_decay)
        if max(self.beta1, self.beta2) >= 1:
            raise UsageError("adam's beta1 and beta2 must be below 1")

    @property
    def kept(self) -> int:
        """Both moments."""
        return 2

    def start(
        self, params: list[Tensor], lr: float | Tensor, scale: list[Tensor] | None, move: Move = move_in_place
    ) -> Step:
        """The step function of one visit, with moments of zero."""
        state = [params, [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params], scale or []]
        counts = [0] * len(params)

        def step(grads: Sequence[Tensor | None]) -> None:
            raw, (weights, first, second, factors) = _pick(state, grads)
            if not raw:
                return
            taken = []
            for i, g in enumerate(grads):
                if g is not None:
                    counts[i] += 1
                    taken.append(counts[i])
            if self.weight_decay and not self.decoupled:
                raw = each("add", raw, weights, alpha=self.weight_decay)
            each("lerp_", first, raw, 1 - self.beta1)
            each("mul_", second, self.beta2)
            each("addcmul_", second, raw, raw, 1 - self.beta2)
            root = each("sqrt", second)
            each("div_", root, [math.sqrt(1 - self.beta2**n) for n in taken])
            each("add_", root, self.eps)
            direction = each("div", first, root)
            each("div_", direction, [1 - self.beta1**n for n in taken])
            if self.weight_decay and self.decoupled:
                each("add_", direction, weights, alpha=self.weight_decay)
            if factors:
                each("mul_", direction, factors)
            move(weights, direction, lr)

        return step


def adamw(*, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01) -> Optimizer:
    """Adam with decoupled weight decay."""
    return Adam(beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decoupled=True)


def momentum(*, momentum: float = 0.9, weight_decay: float = 0.0, nesterov: bool = False) -> Optimizer:
    """SGD with momentum 0.9 unless another is given."""
    return Sgd(momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)


OPTIMIZERS: Registry = {"sgd": Sgd, "momentum": momentum, "adam": Adam, "adamw": adamw}


@lru_cache(maxsize=64)
def build_optimizer(text: str) -> Optimizer:
    """Read an optimiser such as `sgd(momentum=0.9, weight_decay=1e-4)` or `adam`."""
    target, kwargs = bind("optimizer", OPTIMIZERS, text)
    optimizer: Optimizer = target(**kwargs)
    return optimizer


Schedule = Callable[[int, int], float]
"""(round, rounds) → factor of the learning rate."""


def constant() -> Schedule:
    """The same learning rate in every round."""
    return lambda round, rounds: 1.0


def cosine(*, final: float = 0.0) -> Schedule:
    """Half a cosine from 1 in the first round to `final` after the last."""
    _fraction("cosine", "final", final)
    return lambda round, rounds: final + (1 - final) * (1 + math.cos(math.pi * round / rounds)) / 2


def step(*, every: int = 30, factor: float = 0.1) -> Schedule:
    """Times `factor` after every `every` rounds."""
    _fraction("step", "factor", factor)
    if every < 1:
        raise UsageError(f"the step schedule's every must be 1 or more, not {every}")
    return lambda round, rounds: float(factor ** (round // every))


def exponential(*, factor: float = 0.998) -> Schedule:
    """Times `factor` after every round."""
    _fraction("exponential", "factor", factor)
    return lambda round, rounds: float(factor**round)


def _fraction(kind: str, name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UsageError(f"the {kind} schedule's {name} must lie between 0 and 1, not {value}")


SCHEDULES: Registry = {"constant": constant, "cosine": cosine, "step": step, "exponential": exponential}


def build_schedule(text: str) -> Schedule:
    """Read a learning-rate schedule such as `cosine` or `step(every=50, factor=0.1)`."""
    target, kwargs = bind("schedule", SCHEDULES, text)
    schedule: Schedule = target(**kwargs)
    return schedule
