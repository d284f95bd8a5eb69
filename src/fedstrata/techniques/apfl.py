"""APFL: every client mixes the global model with one of its own, in a proportion that it learns.

Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.technique import Batch, ClientView, Hooks, Technique, memory_mismatch
from fedstrata.core.tensors import Tensors, scale, subtract
from fedstrata.errors import UsageError
from fedstrata.techniques.ditto import ANOTHER_MODEL

if TYPE_CHECKING:
    from torch import Tensor

PAPERS = (
    Paper(
        "Yuyang Deng and Mohammad Mahdi Kamani and Mehrdad Mahdavi",
        "Adaptive Personalized Federated Learning",
        "arXiv",
        2020,
        arxiv="2003.13461",
    ),
)

ALPHA = "(alpha)"
"""Where a client remembers its α."""


def mix(own: Tensors, shared: Tensors, alpha: Tensor) -> Tensors:
    """v̄ = αv + (1 − α)w, for the names of v."""
    return {n: alpha * t + (1 - alpha) * shared[n] for n, t in own.items()}


def next_alpha(alpha: Tensor, own: Tensors, shared: Tensors, gradient: Tensors, lr: float) -> Tensor:
    """α − η⟨v − w, ∇F(v̄)⟩, clipped to [0, 1]."""
    apart = subtract(own, shared, list(gradient))
    slope = torch.stack([(apart[n] * g).sum() for n, g in gradient.items()]).sum()
    return (alpha - lr * slope).clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class APFL(Technique):
    """A client's own model is v̄ = αv_k + (1 − α)w: v_k ← v_k − ηα∇F_k(v̄_k), beside FedAvg's w.

    At every local step w_k moves as ever; v_k moves by the gradient at v̄_k = αv_k + (1 − α)w_k on the same batch, by
    plain SGD with the run's learning rate; and if α adapts, α ← α − η⟨v_k − w_k, ∇F_k(v̄_k)⟩, clipped to [0, 1]. v_k
    and α stay with their client; at first v_k is w. The global model is that of the method without APFL.

    Args:
        alpha: α, how much of a client's model is its own; at first, if it adapts.
        adaptive: learn α.

    A client is judged by v̄ with the global model w of the round. F_k is the client's loss with what other techniques
    add to it. A step costs a second forward and backward pass; which steps count, and running statistics, are as in
    `ditto`.
    """

    name: ClassVar[str] = "apfl"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    personalised: ClassVar[bool] = True
    vectorises: ClassVar[bool] = True
    refuses: ClassVar[dict[str, str]] = dict.fromkeys(("finetune", "fedbabu"), ANOTHER_MODEL)
    alpha: float = 0.5
    adaptive: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"apfl's alpha must lie between 0 and 1, not {self.alpha}")

    def local(self, view: ClientView) -> Hooks:
        """At every step v_k and α move, too."""
        a = view.assignment
        if not a.trains:
            return Hooks()
        first = next(iter(a.params.values()))
        begin = {**{n: a.params[n] for n in a.trains}, ALPHA: torch.full_like(first.flatten()[0], self.alpha)}
        begin, moving, lr = {**begin, **view.memory}, frozenset(a.trains), a.work.lr

        def tally(mine: Tensors, grads: Tensors, batch: Batch) -> Tensors:
            mine = mine or begin
            alpha, own = mine[ALPHA], {n: t for n, t in mine.items() if n != ALPHA}
            found = batch.gradient(mix(own, batch.params, alpha))
            gradient = {n: g for n, g in found.items() if n in moving}
            moved = subtract(own, scale(scale(gradient, alpha), lr), list(gradient))
            if self.adaptive:
                alpha = next_alpha(alpha, own, batch.params, gradient, lr)
            return {**own, **moved, ALPHA: alpha}

        return Hooks(tally=tally, finish=lambda delta, mine: ({}, mine or None), variant=frozenset(begin))

    def own(self, memory: Tensors, params: Tensors) -> Tensors:
        """v̄_k with the global model at hand; that itself where there is no v_k yet."""
        if not memory:
            return params
        return {**params, **mix({n: t for n, t in memory.items() if n != ALPHA}, params, memory[ALPHA])}

    def validate_memory(self, memory: Tensors, params: Tensors, buffers: Tensors) -> str | None:
        """Refuse a memory of anything but parameters and α."""
        if ALPHA not in memory or memory[ALPHA].dim() or not 0 <= float(memory[ALPHA]) <= 1:
            return "its α is not a number between 0 and 1"
        return memory_mismatch(memory, (*params, ALPHA))
