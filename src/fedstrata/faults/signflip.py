"""Sign flipping: clients that push the model the other way.

Li, Xu, Chen, Giannakis and Ling, "RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from
Heterogeneous Datasets", AAAI 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.types import Absence, Update
from fedstrata.errors import positive
from fedstrata.faults.fault import SHARE, Fault, VisitView
from fedstrata.faults.scale import multiply

PAPERS = (
    Paper(
        "Liping Li and Wei Xu and Tianyi Chen and Georgios B. Giannakis and Qing Ling",
        "RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from Heterogeneous Datasets",
        "AAAI",
        2019,
    ),
)


@dataclass(frozen=True, kw_only=True)
class SignFlip(Fault):
    """The other way: −scale·Δ_k is sent.

    Args:
        scale: how much larger it is than the honest change; the paper takes 4.
        slots: True if what techniques send along is multiplied, too.
        share, clients, begin: whom it hits, and from which round on.
    """

    name: ClassVar[str] = "signflip"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    scale: float = 1.0
    slots: bool = False
    share: float = SHARE
    clients: tuple[int, ...] = ()
    begin: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("signflip", scale=self.scale)

    def change(self, update: Update, view: VisitView) -> Update | Absence:
        """−scale·Δ_k."""
        return multiply(update, -self.scale, self.slots)
