"""FedPer: the last layers stay with their client.

Arivazhagan, Aggarwal, Singh and Choudhary, "Federated Learning with Personalization Layers", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.techniques.keep import Keep


@dataclass(frozen=True, kw_only=True)
class FedPer(Keep):
    """Personalisation layers: the last layers stay with their client, and all below them is shared.

    The base layers are averaged, W_B ← Σ γ_j W_B,j with γ_j = n_j / Σ n; the personalisation layers W_P,j train beside
    them by the same SGD and stay.

    Args:
        strata: the personalisation layers, as for `keep`; the paper has the classifier, or that and blocks before it.
    """

    name: ClassVar[str] = "fedper"
