"""Late updates: what a client sends in a round answers an earlier one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.types import Absence, Update, replace_fields
from fedstrata.errors import positive
from fedstrata.faults.drop import LOST
from fedstrata.faults.fault import SHARE, Fault, VisitView


@dataclass(frozen=True, kw_only=True)
class Late(Fault):
    """Too late: an update arrives some rounds after it was asked for, and is refused; at first nothing arrives.

    Whenever the client is asked, what arrives bears the number of an earlier round. It is of the size that it would
    have, but its numbers are this round's: nobody reads them.

    Args:
        rounds: how many rounds it takes.
        share, clients, begin: whom it hits, and from which round on.
    """

    name: ClassVar[str] = "late"
    rounds: int = 1
    share: float = SHARE
    clients: tuple[int, ...] = ()
    begin: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("late", rounds=self.rounds)

    def change(self, update: Update, view: VisitView) -> Update | Absence:
        """An answer to an earlier round; nothing in the first rounds."""
        answers = view.assignment.round - self.rounds
        return replace_fields(update, round=answers) if answers >= self.begin - 1 else Absence(update.client, LOST)
