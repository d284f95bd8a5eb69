"""A round that is closed, and the record that it becomes once it is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedstrata.core.types import Assignment, Work
from fedstrata.evaluation.evaluator import Quality
from fedstrata.probes.runner import Watch
from fedstrata.runs.records import Record
from fedstrata.server.state import Outcome, ServerState


@dataclass(frozen=True, eq=False)
class Trained:
    """A round that is closed but not yet evaluated.

    Args:
        before: the state that it began with.
        after: the state that it ended with.
        outcome: what the server counted.
        assignments: what clients were asked to do.
        work: how they were to train.
        watch: what passed of a round that is to be measured.
        exam: waits for the evaluation; None in a round without one.
        seconds: that it took so far.
    """

    before: ServerState
    after: ServerState
    outcome: Outcome
    assignments: Sequence[Assignment]
    work: Work
    watch: Watch | None
    exam: Callable[[], Quality] | None = None
    seconds: float = 0.0

    def record(self, quality: Quality, seconds: float, memory: int) -> Record:
        """The round, evaluated."""
        outcome = self.outcome
        return Record(
            round=self.before.round + 1,
            accuracy=quality.accuracy,
            loss=quality.loss,
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
            arch_accuracy=quality.archs,
            client_accuracy=quality.clients,
        )
