"""IPM: the inner product of the mean with the honest direction becomes negative.

Xie, Koyejo and Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation", UAI 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.types import Update, replace_fields
from fedstrata.errors import positive
from fedstrata.faults.fault import SHARE, Fault

PAPERS = (
    Paper(
        "Cong Xie and Oluwasanmi Koyejo and Indranil Gupta",
        "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation",
        "UAI",
        2019,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Ipm(Fault):
    """Inner product manipulation: all attackers send −epsilon times the mean of the others' changes.

    Args:
        epsilon: a small one stays near to the honest changes, a large one turns a mean around: with m attackers of n
            clients, that takes more than (n − m)/m.
        share, clients, begin: whom it hits, and from which round on.
    """

    name: ClassVar[str] = "ipm"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    epsilon: float = 0.5
    share: float = SHARE
    clients: tuple[int, ...] = ()
    begin: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("ipm", epsilon=self.epsilon)

    def collude(self, own: Update, others: Sequence[Update], mates: Sequence[Update]) -> Update:
        """−ε/(n − m) Σ Δ_k over the others."""
        lies = {}
        for name, tensor in own.delta.items():
            if known := [update.delta[name].double() for update in others if name in update.delta]:
                tensor = (torch.stack(known).mean(0) * -self.epsilon).to(tensor.dtype)
            lies[name] = tensor
        return replace_fields(own, delta=lies, finite=False)
