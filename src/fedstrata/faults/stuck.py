"""Stuck clients: they send the same again and again, or nothing new at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedstrata.core.lazy import torch
from fedstrata.core.tensors import Tensors, clone
from fedstrata.core.types import Absence, Update, replace_fields
from fedstrata.errors import one_of
from fedstrata.faults.fault import SHARE, Fault, VisitView


@dataclass(frozen=True, kw_only=True)
class Stuck(Fault):
    """Nothing new: the first change is sent again and again, or zeros.

    Args:
        sends: `first` for the change of its first visit from `begin` on, or `zeros`. Parameters that did not travel in
            that visit, because another part of the model trained, do not change.
        share, clients, begin: whom it hits, and from which round on.
    """

    name: ClassVar[str] = "stuck"
    sends: Literal["first", "zeros"] = "first"
    share: float = SHARE
    clients: tuple[int, ...] = ()
    begin: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("stuck", ("first", "zeros"), sends=self.sends)

    def change(self, update: Update, view: VisitView) -> Update | Absence:
        """What was sent first, or zeros."""
        if self.sends == "first" and not view.memory:
            return update
        again = {n: view.memory[n] if n in view.memory else torch.zeros_like(t) for n, t in update.delta.items()}
        return replace_fields(update, delta=again, finite=False)

    def remember(self, update: Update, view: VisitView) -> Tensors | None:
        """The first change."""
        return None if self.sends == "zeros" or view.memory else clone(update.delta)
