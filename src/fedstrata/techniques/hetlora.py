"""HetLoRA: clients of different rank; their factors are filled up with zeros, and those that learnt more count more.

Cho, Liu, Xu, Fahrezi and Joshi, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models",
EMNLP 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from fedstrata.core.citation import Paper
from fedstrata.core.low_rank import product
from fedstrata.core.technique import RoundView, Setting, Technique
from fedstrata.core.tensors import Tensors, subtract
from fedstrata.core.types import LowRank
from fedstrata.errors import one_of
from fedstrata.techniques.low_rank import (
    MIXED,
    Factors,
    arrived_adapters,
    check_products,
    collect_factors,
    mean_factors,
)
from fedstrata.techniques.staleness import SYNCHRONOUS

if TYPE_CHECKING:
    from torch import Tensor

By = Literal["norm", "weight"]


PAPERS = (
    Paper(
        "Yae Jee Cho and Luyang Liu and Zheng Xu and Aldi Fahrezi and Gauri Joshi",
        "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models",
        "EMNLP",
        2024,
    ),
)


def weigh_by_norm(factors: Factors, adapter: LowRank, weight: Tensor) -> Factors:
    """The same clients with p_k = ‖B_k·A_k‖ / Σ_j ‖B_j·A_j‖; as they were where all of these are zero."""
    norms = [float(product(own, adapter, weight).norm()) for _, own in factors]
    total = sum(norms)
    return [(norm / total, own) for norm, (_, own) in zip(norms, factors, strict=True)] if total else factors


@dataclass(frozen=True, kw_only=True)
class HetLoRA(Technique):
    """Ranks filled up with zeros: A ← Σ p_k pad(A_k), B ← Σ p_k pad(B_k), p_k = ‖B_k·A_k‖/Σ_j‖B_j·A_j‖.

    A client of rank r_k begins with the first r_k rows of A and columns of B, which `--archs "… + lora(r=2); …"` says;
    nothing else of them is sent. Factors are compared and averaged in the server's scale α/r, whatever a client's is.

    Args:
        by: `norm` as above, adapter by adapter; `weight` counts clients as the mean does, p_k = n_k/Σn, which is
            FedAvg where all ranks are the same.

    Deviations from the paper: ranks stay as they are, without its self-pruning and the regulariser for it.
    """

    name: ClassVar[str] = "hetlora"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    needs_deltas: ClassVar[bool] = True
    mixes_ranks: ClassVar[bool] = True
    synchronous: ClassVar[str] = SYNCHRONOUS
    refuses: ClassVar[dict[str, str]] = {
        "fedexlora": MIXED,
        **dict.fromkeys(("ffalora", "rolora"), "hetlora weighs products of factors that both come from clients"),
        "fednova": "fednova divides changes by steps, and hetlora takes what clients ended with",
    }
    by: By = "norm"

    def __post_init__(self) -> None:
        one_of("hetlora", get_args(By), by=self.by)

    def check(self, setting: Setting) -> None:
        """Refuse a model without low-rank adapters, or without both factors of one."""
        check_products(self.name, setting)

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """The mean, with that of the factors in its place where clients' own ranks or norms count."""
        for one in arrived_adapters(round):
            factors = collect_factors(round, one)
            if self.by == "norm":
                factors = weigh_by_norm(factors, one, round.params[one.weight])
            elif all(asked.params[one.a].shape == round.params[one.a].shape for asked in round.asked):
                continue
            means = mean_factors(factors)
            delta = {**delta, **subtract(means, round.params, list(means))}
        return delta, state
