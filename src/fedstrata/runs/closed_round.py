"""A round that is closed, and the record that it becomes once it is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedstrata.core.types import Assignment, Work
from fedstrata.evaluation.evaluator import EvalResult
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

    def record(self, result: EvalResult, seconds: float, memory: int) -> Record:
        """The round, evaluated."""
        outcome = self.outcome
        return Record(
            round=self.before.round + 1,
            accuracy=result.accuracy,
            loss=result.loss,
            bytes_up=outcome.bytes_up,
            bytes_down=outcome.bytes_down,
            slots_up=outcome.slots_up,
            flops=round(outcome.flops),
            seconds=seconds,
            clients=[a.client for a in self.assignments],
            active=list(outcome.active),
            refused=[{"client": client, "why": why} for client, why in outcome.refused],
            train_loss=outcome.train_loss,
            examples=outcome.examples,
            steps=outcome.steps,
            lr=self.work.lr,
            memory=memory,
            arch_accuracy=result.archs,
            client_accuracy=result.clients,
        )
