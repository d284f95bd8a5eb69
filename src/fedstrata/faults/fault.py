"""What a fault is: whom it hits, from which round on, and what it does at each of three doors.

A fault is a frozen dataclass without mutable state, read from a string as techniques are. What it must know of an
earlier visit is in the client's memory: a run with faults has the same bits on every engine, and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.rng import derive, generator
from fedstrata.core.spec import non_default_fields, text_of
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Absence, Assignment, Examples, Update
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    import torch

    from fedstrata.core.task import Task

SHARE = 0.3
"""Share of the clients that a fault hits where nothing is said."""


@dataclass(frozen=True, eq=False)
class FaultSetting:
    """What a fault is about to hit.

    Args:
        task: what is learnt.
        sample: a small batch of inputs.
        classes: how many classes labels are of, found when it is asked for; 0 where there are none.
        seed: of the run.
    """

    task: Task
    sample: Any
    classes: Callable[[], int]
    seed: int = 0


@dataclass(frozen=True, eq=False)
class VisitView:
    """What a fault sees of a client's visit.

    Args:
        fault: the fault's name, for its random stream.
        assignment: what the client was asked for.
        memory: what this fault remembered of the client's earlier visits; empty at first.
    """

    fault: str
    assignment: Assignment
    memory: Tensors

    @cached_property
    def rng(self) -> torch.Generator:
        """A random stream of this fault's own in this visit."""
        a = self.assignment
        return generator(derive(a.run_seed, "fault", self.fault, a.round, a.client))


class Fault:
    """One way for clients to go wrong. Subclass it as a frozen, keyword-only dataclass; the last fields are these.

    Args:
        share: of the clients, drawn by the run's seed: rounded down, but one client unless it is 0. Faults with a
            share hit different clients, as long as there are enough; beyond that some are hit by several.
        clients: these clients, instead of a share; several faults may name the same ones, and act from left to right.
        begin: the first round in which it acts, from 1. What happens to a client's data has always been so.
    """

    name: ClassVar[str] = ""
    papers: ClassVar[tuple[Paper, ...]] = ()
    share: float
    clients: tuple[int, ...]
    begin: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UsageError(f"{self.name}'s share must be from 0 to 1, not {self.share}")
        if len(set(self.clients)) < len(self.clients) or any(client < 0 for client in self.clients):
            raise UsageError(f"{self.name}'s clients must be different numbers from 0 on, not {self.clients}")
        if self.clients and self.share != SHARE:
            raise UsageError(f"{self.name} names clients and a share of them: leave one of the two out")
        if self.begin < 1:
            raise UsageError(f"{self.name}'s begin must be 1 or more, not {self.begin}")

    def check(self, setting: FaultSetting) -> None:
        """Before anything is trained or written: raise a UsageError for what cannot be hit in this way."""

    def spoil(self, examples: Examples, client: int, setting: FaultSetting) -> Examples:
        """What a client that is hit trains on: the same examples, seen wrongly."""
        return examples

    def change(self, update: Update, view: VisitView) -> Update | Absence:
        """What a client that is hit sends in place of its update. The update's tensors are not to be changed."""
        return update

    def remember(self, update: Update, view: VisitView) -> Tensors | None:
        """What is to be known of an update, before it is changed, at later visits; None for what was known before."""
        return None

    def collude(self, own: Update, others: Sequence[Update], mates: Sequence[Update]) -> Update:
        """What a client that is hit sends, once all updates of the round are there.

        Args:
            own: its update.
            others: those that came from clients that this fault does not hit; at least one, all of finite numbers.
            mates: those of clients that it hits, `own` among them.
        """
        return own

    def tell_success(self, test: Examples, setting: FaultSetting) -> Examples | None:
        """Test examples whose targets are what the fault is after, to measure how far it got; None for none."""
        return None

    def __str__(self) -> str:
        return text_of(self.name, non_default_fields(self))


def acts(fault: Fault, *doors: str) -> bool:
    """True if a fault does something at one of these doors."""
    return any(getattr(type(fault), door) is not getattr(Fault, door) for door in doors)
