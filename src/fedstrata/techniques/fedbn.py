"""FedBN: norm layers stay with their client.

Li, Jiang, Zhang, Kamp and Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR
2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.models.parts import NORM, Patterns
from fedstrata.techniques.keep import Keep

PAPERS = (
    Paper(
        "Xiaoxiao Li and Meirui Jiang and Xiaofei Zhang and Michael Kamp and Qi Dou",
        "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
        "ICLR",
        2021,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FedBN(Keep):
    """Local norm layers: their scales, shifts and running statistics stay with the client, and all else is shared.

    For every layer l that is no norm layer, w^l ← Σ p_k w_k^l; each client goes on with its own norm layers.

    Args:
        strata: what stays, as for `keep`. Other norm layers than batch norms stay, too.
    """

    name: ClassVar[str] = "fedbn"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    defaults: ClassVar[dict[str, str]] = {"buffers": "local"}
    strata: Patterns = NORM
