"""LG-FedAvg: the lower layers stay with their client.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov and Morency, "Think Locally, Act Globally: Federated Learning
with Local and Global Representations", 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.types import Stratum
from fedstrata.errors import UsageError
from fedstrata.models.parts import Patterns
from fedstrata.techniques.keep import Keep

PAPERS = (
    Paper(
        "Paul Pu Liang and Terrance Liu and Liu Ziyin and Nicholas B. Allen and Randy P. Auerbach and David Brent "
        "and Ruslan Salakhutdinov and Louis-Philippe Morency",
        "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
        "arXiv",
        2020,
        arxiv="2001.01523",
    ),
)


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(Keep):
    """Local representations: the lower layers stay with their client, and the upper ones are shared.

    Both θ_k^ℓ, which makes a client's representation, and θ^g, which predicts from it, train together by the client's
    loss; θ^g alone is averaged, by examples.

    Args:
        strata: patterns of what stays, as for `keep`, instead of the share.
        share: of the strata, counted from the input, that stay; at least one stays, and one travels.

    Deviation: the paper begins with some rounds of FedAvg of the whole model; here all begin with the server's.
    """

    name: ClassVar[str] = "lgfedavg"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    defaults: ClassVar[dict[str, str]] = {"buffers": "local"}
    refuses: ClassVar[dict[str, str]] = {
        **Keep.refuses,
        "fedimpro": "features of clients with lower layers of their own are not alike",
    }
    strata: Patterns = ()
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UsageError(f"lgfedavg's share must lie between 0 and 1, not {self.share}")

    def kept(self, strata: tuple[Stratum, ...]) -> frozenset[str]:
        """The names of what stays."""
        if self.strata:
            return super().kept(strata)
        lower = strata[: max(min(round(self.share * len(strata)), len(strata) - 1), 1)]
        return frozenset(n for s in lower for n in (*s.params, *s.buffers))
