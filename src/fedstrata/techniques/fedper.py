"""FedPer: the last layers stay with their client.

Arivazhagan, Aggarwal, Singh and Choudhary, "Federated Learning with Personalization Layers", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.techniques.keep import Keep

PAPERS = (
    Paper(
        "Manoj Ghuhan Arivazhagan and Vinay Aggarwal and Aaditya Kumar Singh and Sunav Choudhary",
        "Federated Learning with Personalization Layers",
        "arXiv",
        2019,
        arxiv="1912.00818",
    ),
)


@dataclass(frozen=True, kw_only=True)
class FedPer(Keep):
    """Personalisation layers: the last layers stay with their client, and all below them is shared.

    The base layers are averaged, W_B ← Σ γ_j W_B,j with γ_j = n_j / Σ n; the personalisation layers W_P,j train beside
    them by the same SGD and stay.

    Args:
        strata: the personalisation layers, as for `keep`; the paper has the classifier, or that and blocks before it.
    """

    name: ClassVar[str] = "fedper"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
