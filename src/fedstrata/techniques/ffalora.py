"""FFA-LoRA: A stays as it was drawn, and B alone trains, so that the mean of the products is the product of the means.

Sun, Li, Li and Ding, "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.low_rank import factor_names
from fedstrata.core.technique import Setting, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Stratum
from fedstrata.techniques.low_rank import check_adapters

PAPERS = (
    Paper(
        "Youbang Sun and Zitao Li and Yaliang Li and Bolin Ding",
        "Improving LoRA in Privacy-preserving Federated Learning",
        "ICLR",
        2024,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FFALoRA(Technique):
    """Federated freeze-A: W_k = W + scale·B_k·A_0 with A_0 frozen as it was drawn, the same for all clients.

    What a client learns is linear in B_k, so Σ p_k B_k·A_0 = (Σ p_k B_k)·A_0: the mean is exact, where that of both
    factors is not. Half of the adapters' numbers train and travel. The head, and whatever else trains beside the
    adapters, does so as under FedAvg.

    Deviations from the paper: none; it trains the classification head or freezes it, as `adapter` says here
    (`lora(trains=())` freezes it).
    """

    name: ClassVar[str] = "ffalora"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    refuses: ClassVar[dict[str, str]] = {"fedsalora": "fedsalora shares A, which ffalora never trains"}

    def check(self, setting: Setting) -> None:
        """Refuse a model without low-rank adapters."""
        check_adapters(self.name, setting)

    def fixed(self, strata: tuple[Stratum, ...]) -> frozenset[str]:
        """Every A."""
        return frozenset(factor_names(strata, "A"))

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        """Everything trains and travels but A."""
        fixed = self.fixed(strata)
        trains = tuple(n for n in assignment.trains if n not in fixed)
        return replace(assignment, trains=trains, uploads=trains)
