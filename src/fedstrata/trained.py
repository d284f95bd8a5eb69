"""A round that is closed, the record that it becomes once it is evaluated, and rounds that are only tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedstrata.core import Assignment, Slots, Work
from fedstrata.errors import Diverged
from fedstrata.exams import Quality
from fedstrata.history import Record
from fedstrata.probing import Prober, Watch
from fedstrata.saved import Saved
from fedstrata.server import Outcome, ServerState
from fedstrata.tensors import clone


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


@dataclass(frozen=True)
class Trial:
    """Rounds that were measured and then forgotten, and why they ended early, if they did."""

    rows: tuple[dict[str, Any], ...]
    diverged: str | None = None

    def put_into(self, saved: Saved) -> Saved:
        """A run, with what the trial tells of it."""
        more = {} if self.diverged is None else {"diverged": self.diverged}
        return replace(saved, probes=self.rows, summary={**saved.summary, **more})


Close = Callable[[ServerState, Prober, Callable[[int], Slots], Callable[[int, Slots], None]], Trained]


def tried(
    close: Close, prober: Prober, state: ServerState, rounds: int, planned: int, memory: Callable[[int], Slots]
) -> Trial:
    """Run and measure a few rounds from a state on; clients' memories stay as they are.

    Args:
        close: (state, prober, recall, keep) → the next round.
        prober: measures it.
        state: to begin with. A run that is at its end does its last rounds once more.
        rounds: how many, if the run has as many.
        planned: rounds of the run.
        memory: client → what it remembers.
    """
    kept: dict[int, Slots] = {}
    rows: list[dict[str, Any]] = []

    def recall(client: int) -> Slots:
        return kept[client] if client in kept else memory(client)

    def keep(client: int, slots: Slots) -> None:
        kept[client] = {name: clone(slot) for name, slot in slots.items()}

    done = state.round
    state = replace(state, round=min(done, max(planned - rounds, 0)))
    while len(rows) < min(rounds, planned):
        try:
            trained = close(state, prober, recall, keep)
        except Diverged as error:
            return Trial(tuple(rows), str(error))
        rows.append({**prober.measure(trained), "round": done + len(rows) + 1, "tried": True})
        state = trained.after
    return Trial(tuple(rows))
