"""HLoRA: clients of different rank; the mean of their products is split again by its singular values.

Liu, Zhang, Yao and Liu, "HLoRA: Efficient Federated Learning System for LLM Heterogeneous Fine-Tuning", 2025; the same
rule is FlexLoRA's, Bai, Chen, Qian, Yao and Li, "Federated Fine-tuning of Large Language Models under Heterogeneous
Tasks and Client Resources", NeurIPS 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.technique import RoundView, Setting, Technique
from fedstrata.core.tensors import Tensors, subtract
from fedstrata.core.types import LowRank
from fedstrata.techniques.low_rank import (
    MIXED,
    REMEMBERS,
    TURNS,
    Factors,
    arrived_adapters,
    check_products,
    collect_factors,
)
from fedstrata.techniques.staleness import SYNCHRONOUS

if TYPE_CHECKING:
    from torch import Tensor


PAPERS = (
    Paper(
        "Qianli Liu and Zhaorui Zhang and Xin Yao and Benben Liu",
        "HLoRA: Efficient Federated Learning System for LLM Heterogeneous Fine-Tuning",
        "arXiv",
        2025,
        arxiv="2503.00813",
    ),
    Paper(
        "Jiamu Bai and Daoyuan Chen and Bingchen Qian and Liuyi Yao and Yaliang Li",
        "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources",
        "NeurIPS",
        2024,
    ),
)


def split_product(factors: Factors, adapter: LowRank, like: Tensors) -> Tensors:
    """The B and A of the server's rank whose product is nearest to Σ p_k B_k·A_k: B = U·S, A = Vᵀ.

    The product is never made: it is (√p_1 B_1, …)·(√p_1 A_1; …), of which both are taken apart by themselves. Rows of A
    are of length 1 and orthogonal, the first ones matter most, and where S is zero A is not, so that all of it learns.
    """
    a = torch.cat([p**0.5 * own[adapter.a].flatten(1).double() for p, own in factors])
    b = torch.cat([p**0.5 * own[adapter.b].flatten(1).double() for p, own in factors], 1)
    (left, inner), (right, other) = torch.linalg.qr(b), torch.linalg.qr(a.t())
    u, s, v = torch.linalg.svd(inner @ other.t())
    new_b, new_a = left @ u[:, : len(s)] * s, (right @ v[: len(s)].t()).t()
    signs = _signs(new_a)
    kept = {adapter.a: new_a * signs[:, None], adapter.b: (new_b * signs).t()}
    return {n: _rows(t, like[n], transposed=n == adapter.b) for n, t in kept.items()}


def _signs(rows: Tensor) -> Tensor:
    """The sign of each row's largest number: a singular vector may have either, and machines differ."""
    return rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign().squeeze(1)


def _rows(rows: Tensor, like: Tensor, transposed: bool) -> Tensor:
    """The first rows, as many as the rank, and zeros where there are no more, as the factor lies."""
    flat = like.flatten(1)
    count = flat.shape[1 if transposed else 0]
    filled = rows.new_zeros(count, rows.shape[1])
    filled[: len(rows)] = rows[:count]
    return (filled.t() if transposed else filled).to(like.dtype).reshape(like.shape)


@dataclass(frozen=True, kw_only=True)
class HLoRA(Technique):
    """Ranks by singular values: U·S·Vᵀ = Σ p_k B_k·A_k; B ← U·S, A ← Vᵀ, cut off at the server's rank.

    A client of rank r_k begins with the first r_k singular vectors, the nearest that its rank allows to the mean of the
    products, which `--archs "… + lora(r=2); …"` says; nothing else is sent. All products are in the server's scale α/r.

    Deviations from the paper: the server keeps as many singular vectors as its own model has ranks, the largest; the
    paper also says how to choose clients' ranks, which here `archs` names.
    """

    name: ClassVar[str] = "hlora"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    needs_deltas: ClassVar[bool] = True
    mixes_ranks: ClassVar[bool] = True
    synchronous: ClassVar[str] = SYNCHRONOUS
    renews: ClassVar[str] = TURNS
    refuses: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("fedexlora", "hetlora"), MIXED),
        **dict.fromkeys(("ffalora", "rolora"), "it splits the mean of the products anew, and the other keeps a factor"),
        **dict.fromkeys(REMEMBERS, TURNS),
    }

    def check(self, setting: Setting) -> None:
        """Refuse a model without low-rank adapters, or without both factors of one."""
        check_products(self.name, setting)

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """The mean, with the factors of the mean product in place of the mean factors."""
        for one in arrived_adapters(round):
            split = split_product(collect_factors(round, one), one, round.params)
            delta = {**delta, **subtract(split, round.params, list(split))}
        return delta, state
