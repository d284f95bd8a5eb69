"""A round that is closed, and the record that it becomes once it is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedstrata.core.results import EvalResult, RoundCost
from fedstrata.core.types import Assignment, Work
from fedstrata.probes.runner import UpdateRecorder
from fedstrata.runs.records import Record
from fedstrata.server.state import Outcome, ServerState


@dataclass(frozen=True, eq=False)
class ClosedRound:
    """A round that is closed but not yet evaluated.

    Args:
        before: the state that it began with.
        after: the state that it ended with.
        outcome: what the server counted.
        assignments: what clients were asked to do.
        work: how they were to train.
        watch: what passed of a round that is to be measured.
        request: waits for the evaluation; None in a round without one.
        seconds: that it took so far.
    """

    before: ServerState
    after: ServerState
    outcome: Outcome
    assignments: Sequence[Assignment]
    work: Work
    watch: UpdateRecorder | None
    request: Callable[[], EvalResult] | None = None
    seconds: float = 0.0

    @property
    def lr(self) -> float:
        """The learning rate that clients were asked to train with, which a technique's plan may have changed."""
        return next((asked.work.lr for asked in self.assignments), self.work.lr)

    def record(self, result: EvalResult, cost: RoundCost) -> Record:
        """The round, evaluated."""
        return Record.compose(self.before.round + 1, result, self.outcome, cost)


class RoundFilter:
    """Looks at every round before it is opened and after it is closed; this one changes nothing."""

    def open(self, state: ServerState) -> ServerState:
        """The state that the round is opened on."""
        return state

    def close(self, closed: ClosedRound) -> ClosedRound:
        """What counts of the round."""
        return closed
