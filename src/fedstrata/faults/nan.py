"""NaN: clients whose training has left the finite numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.lazy import torch
from fedstrata.core.types import Absence, Update, replace_fields
from fedstrata.faults.fault import SHARE, Fault, VisitView


@dataclass(frozen=True, kw_only=True)
class NotANumber(Fault):
    """Not a number: NaN is sent, everywhere; the server refuses it.

    Args:
        share, clients, begin: whom it hits, and from which round on.
    """

    name: ClassVar[str] = "nan"
    share: float = SHARE
    clients: tuple[int, ...] = ()
    begin: int = 1

    def change(self, update: Update, view: VisitView) -> Update | Absence:
        """NaN in the place of every number of the change."""
        broken = {n: torch.full_like(t, float("nan")) for n, t in update.delta.items()}
        return replace_fields(update, delta=broken, finite=False)
