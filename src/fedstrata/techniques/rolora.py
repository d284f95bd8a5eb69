"""RoLoRA: the factors take turns; in a round all clients train one of them on top of the same other one.

Chen, Guo, Ju, Dalal, Zhu and Khisti, "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA",
NeurIPS 2025.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, get_args

from fedstrata.core.citation import Paper
from fedstrata.core.low_rank import Factor, factor_names
from fedstrata.core.technique import Setting, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Stratum
from fedstrata.errors import one_of, whole_number
from fedstrata.techniques.low_rank import check_adapters

PAPERS = (
    Paper(
        "Shuangyi Chen and Yuanxin Guo and Yue Ju and Hardik Dalal and Zhongwen Zhu and Ashish Khisti",
        "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA",
        "NeurIPS",
        2025,
    ),
)


@dataclass(frozen=True, kw_only=True)
class RoLoRA(Technique):
    """Alternating factors: one of B and A trains and travels for some rounds, then the other one.

    With A frozen Σ p_k B_k·A = (Σ p_k B_k)·A, and with B frozen Σ p_k B·A_k = B·(Σ p_k A_k): every round's mean is
    exact, and half of the adapters' numbers travel, as with FFA-LoRA, yet A is learnt too. The head, and whatever else
    trains beside the adapters, trains in every round.

    Args:
        rounds_per_factor: rounds that a factor trains for before the other one does.
        first: the factor that begins, `B` or `A`. While B is zero, as at first, A has no gradient.

    Deviations from the paper: none; it has `rounds_per_factor=1`.
    """

    name: ClassVar[str] = "rolora"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    refuses: ClassVar[dict[str, str]] = {
        "ffalora": "ffalora never trains A, which rolora trains in its turn",
        "fedsalora": "fedsalora leaves B with its client, and rolora lets all train A on the same B",
    }
    rounds_per_factor: int = 1
    first: Factor = "B"

    def __post_init__(self) -> None:
        whole_number("rolora", 1, rounds_per_factor=self.rounds_per_factor)
        one_of("rolora", get_args(Factor), first=self.first)

    def check(self, setting: Setting) -> None:
        """Refuse a model without low-rank adapters."""
        check_adapters(self.name, setting)

    def resting(self, round: int) -> Factor:
        """The factor that is frozen in a round."""
        begins = round // self.rounds_per_factor % 2 == 0
        return "A" if begins == (self.first == "B") else "B"

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        """Everything trains and travels but the factor that rests."""
        frozen = set(factor_names(strata, self.resting(assignment.round)))
        trains = tuple(n for n in assignment.trains if n not in frozen)
        return replace(assignment, trains=trains, uploads=trains)
