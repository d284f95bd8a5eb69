"""Scaling: clients whose changes are far too large, by a wrong unit, a wrong learning rate, or on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.tensors import Tensors, scale
from fedstrata.core.types import Absence, Update, replace_fields
from fedstrata.errors import UsageError
from fedstrata.faults.fault import SHARE, Fault, VisitView


def multiply(update: Update, factor: float, slots: bool = False) -> Update:
    """factor·Δ_k and, if asked for, factor times what techniques send along, as far as it is real numbers."""
    sent = {name: _multiply_real(slot, factor) for name, slot in update.slots.items()} if slots else update.slots
    return replace_fields(update, delta=scale(update.delta, factor), slots=sent, finite=False)


def _multiply_real(slot: Tensors, factor: float) -> Tensors:
    return {n: t * factor if t.is_floating_point() else t for n, t in slot.items()}


@dataclass(frozen=True, kw_only=True)
class Scale(Fault):
    """Far too large: factor·Δ_k is sent.

    Args:
        factor: what the change is multiplied with; 0 is a client that takes and gives nothing.
        slots: True if what techniques send along is multiplied, too.
        share, clients, begin: whom it hits, and from which round on.
    """

    name: ClassVar[str] = "scale"
    factor: float = 1000.0
    slots: bool = False
    share: float = SHARE
    clients: tuple[int, ...] = ()
    begin: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if abs(self.factor) == float("inf"):
            raise UsageError(f"scale's factor must be finite, not {self.factor}")

    def change(self, update: Update, view: VisitView) -> Update | Absence:
        """factor·Δ_k."""
        return multiply(update, self.factor, self.slots)
