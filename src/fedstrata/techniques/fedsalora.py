"""FedSA-LoRA: A is shared, for it learns what all have in common, and B stays with its client.

Guo, Zeng, Wang, Fan, Wang and Qu, "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.technique import Setting
from fedstrata.models.parts import Patterns
from fedstrata.techniques.keep import Keep
from fedstrata.techniques.low_rank import check_adapters

PAPERS = (
    Paper(
        "Pengxin Guo and Shuang Zeng and Yanran Wang and Huijie Fan and Feifei Wang and Liangqiong Qu",
        "Selective Aggregation for Low-Rank Adaptation in Federated Learning",
        "ICLR",
        2025,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FedSALoRA(Keep):
    """Share A: W_k = W + scale·B_k·A. Both factors train in every visit; A ← Σ p_k A_k, and B_k stays.

    Args:
        strata: what stays, as for `keep`; `("lora_B", "head")` also leaves every client its own classifier.

    Every client has a model of its own, and is judged by it. Deviations from the paper: none known; what trains beside
    the adapters, such as the head, is shared unless `strata` names it.
    """

    name: ClassVar[str] = "fedsalora"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    strata: Patterns = "lora_B"

    def check(self, setting: Setting) -> None:
        """Refuse a model without low-rank adapters, and patterns that name nothing, or everything."""
        check_adapters(self.name, setting)
        super().check(setting)
