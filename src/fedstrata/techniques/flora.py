"""FLoRA: clients' factors are stacked, which is exact, and go into the frozen weight; then all begin anew.

Wang, Shen, He, Sun, Wang, Lyu and Li, "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
Adaptations", NeurIPS 2024.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.rng import generator
from fedstrata.core.technique import RoundView, Setting, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.techniques.low_rank import (
    MIXED,
    REMEMBERS,
    TURNS,
    arrived_adapters,
    check_products,
    collect_factors,
    mean_product,
)
from fedstrata.techniques.staleness import SYNCHRONOUS

if TYPE_CHECKING:
    from torch import Tensor


PAPERS = (
    Paper(
        "Ziyao Wang and Zheyu Shen and Yexiao He and Guoheng Sun and Hongyi Wang and Lingjuan Lyu and Ang Li",
        "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations",
        "NeurIPS",
        2024,
    ),
)


def draw_factor(like: Tensor, seed: int, name: str) -> Tensor:
    """A new A: each number uniform within ±1/√n, n being the inputs of a row, as layers are drawn at first."""
    bound = 1 / math.sqrt(like[0].numel())
    drawn = torch.rand(like.shape, generator=generator(seed, "flora", name), dtype=like.dtype)
    return (2 * drawn - 1) * bound


@dataclass(frozen=True, kw_only=True)
class FLoRA(Technique):
    """Stacking: W ← W + (p_1 B_1, …, p_K B_K)·(A_1; …; A_K)·scale = W + Σ p_k scale·B_k·A_k; then B ← 0 and a new A.

    The mean of the products is exact for clients of any rank, each with its own α/r: `--archs "… + lora(r=2); …"`. A
    client of rank r_k begins with the first r_k rows of the new A.

    Deviations from the paper: W travels whole in the rounds after those in which it changed, once to each client; the
    paper sends the stacked factors, and clients add them up. A is drawn by the server, the same for all.
    """

    name: ClassVar[str] = "flora"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    needs_deltas: ClassVar[bool] = True
    mixes_ranks: ClassVar[bool] = True
    synchronous: ClassVar[str] = SYNCHRONOUS
    renews: ClassVar[str] = TURNS
    refuses: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("fedexlora", "hetlora", "hlora"), MIXED),
        **dict.fromkeys(("ffalora", "rolora"), "flora begins with new factors in every round, and the other keeps one"),
        **dict.fromkeys(REMEMBERS, TURNS),
        "moon": "flora puts into the frozen weight what moon's last model of a client has in its factors",
    }

    def check(self, setting: Setting) -> None:
        """Refuse a model without low-rank adapters, or without both factors of one."""
        check_products(self.name, setting)

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """The mean of the products goes into the weight of every adapter of which both factors came."""
        for one in arrived_adapters(round):
            a, b, weight = (round.params[n] for n in (one.a, one.b, one.weight))
            merged = mean_product(collect_factors(round, one), one, weight)
            delta = {**delta, one.weight: merged, one.b: -b, one.a: draw_factor(a, round.seed, one.a) - a}
        return delta, state
