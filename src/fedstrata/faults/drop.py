"""Lost updates: they never reach the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.lazy import torch
from fedstrata.core.types import Absence, Update
from fedstrata.errors import UsageError
from fedstrata.faults.fault import SHARE, Fault, VisitView

LOST = "it did not come"


@dataclass(frozen=True, kw_only=True)
class Drop(Fault):
    """Lost on the way: the update does not come, and the round goes on without it.

    Args:
        rate: how often, from 0 to 1.
        share, clients, begin: whom it hits, and from which round on.
    """

    name: ClassVar[str] = "drop"
    rate: float = 0.5
    share: float = SHARE
    clients: tuple[int, ...] = ()
    begin: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.rate <= 1:
            raise UsageError(f"drop's rate must be from 0 to 1, not {self.rate}")

    def change(self, update: Update, view: VisitView) -> Update | Absence:
        """The update, or nothing."""
        drawn = float(torch.rand((), generator=view.rng, dtype=torch.float64))
        return Absence(update.client, LOST) if drawn < self.rate else update
