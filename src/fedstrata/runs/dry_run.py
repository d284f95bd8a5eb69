"""Rounds that are only tried: measured, and then forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedstrata.core.stacks import Memories
from fedstrata.core.tensors import clone
from fedstrata.core.types import Slots
from fedstrata.errors import Diverged, NobodyThere
from fedstrata.probes.runner import Prober
from fedstrata.runs.closed_round import ClosedRound
from fedstrata.runs.reader import SavedRun
from fedstrata.server.state import ServerState


@dataclass(frozen=True)
class DryRun:
    """Rounds that were measured and then forgotten, and why they ended early, if they did."""

    rows: tuple[dict[str, Any], ...]
    diverged: str | None = None

    def put_into(self, saved: SavedRun) -> SavedRun:
        """A run, with what the trial tells of it."""
        more = {} if self.diverged is None else {"diverged": self.diverged}
        return replace(saved, probes=self.rows, summary={**saved.summary, **more})


Recall = Callable[[Sequence[int]], Sequence[Slots]]
RunRound = Callable[[ServerState, Prober, Recall, Callable[[Sequence[int], Memories], None]], ClosedRound]


def dry_run(
    run_round: RunRound, prober: Prober, state: ServerState, rounds: int, planned: int, memories: Recall
) -> DryRun:
    """Run and measure a few rounds from a state on; clients' memories stay as they are.

    Args:
        run_round: (state, prober, recall, keep) → the round, closed.
        prober: measures it.
        state: to begin with. A run that is at its end does its last rounds once more. Simulated time begins anew.
        rounds: how many, if the run has as many.
        planned: rounds of the run.
        memories: clients → what they remember.
    """
    kept: dict[int, Slots] = {}
    rows: list[dict[str, Any]] = []

    def recall(clients: Sequence[int]) -> list[Slots]:
        return [kept[client] if client in kept else memories([client])[0] for client in clients]

    def keep(clients: Sequence[int], remembered: Memories) -> None:
        for client, memory in zip(clients, remembered, strict=True):
            kept[client] = {name: clone(slot) for name, slot in memory.items()}

    done = state.round
    state = replace(state, round=min(done, max(planned - rounds, 0)), flights=(), versions=(), clock=0.0)
    while len(rows) < min(rounds, planned):
        try:
            trained = run_round(state, prober, recall, keep)
        except Diverged as error:
            return DryRun(tuple(rows), str(error))
        except NobodyThere:
            break
        rows.append({**prober.measure(trained), "round": done + len(rows) + 1, "tried": True})
        state = trained.after
    return DryRun(tuple(rows))
