"""Who is asked in a round, on which state, when the round ends: everybody at once, or by a clock of simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fedstrata.core.results import DeviceUse
from fedstrata.core.stacks import Assignments, Visits
from fedstrata.core.types import Absence, Assignment, Slots, Work
from fedstrata.server.sampling import ClientSampler
from fedstrata.server.server import Server
from fedstrata.server.state import Flight, Outcome, ServerState, Version

WorkOf = Callable[[int], Work]
"""A round's number → how clients train in it."""
Recall = Callable[[Sequence[int]], Sequence[Slots]]
"""Clients → what they remember."""
Train = Callable[[Sequence[Assignment], Recall], Iterator[Visits]]
"""Trains clients, as an engine's `run` does."""


@dataclass(frozen=True, eq=False)
class OpenRound:
    """A round that was opened.

    Args:
        asked: what clients are asked for whose updates the round ends with, or would have.
        trained: those of them that are trained, in the parts in which they are.
        absent: those of them whose updates do not count, and why.
        ends: the simulated second at which the round is closed; None without a clock.
        late: clients whose updates come after the deadline.
        flights: visits that go on when it is closed.
        versions: of the states that these began with.
        devices: what the visits took, by kind of device.
    """

    asked: Assignments
    trained: tuple[Assignments, ...]
    absent: tuple[Absence, ...] = ()
    ends: float | None = None
    late: tuple[int, ...] = ()
    flights: tuple[Flight, ...] = ()
    versions: tuple[Version, ...] = ()
    devices: tuple[DeviceUse, ...] = ()

    def visits(self, train: Train, recall: Recall) -> Iterator[Visits]:
        """What comes of the visits."""
        for part in self.trained:
            yield from train(part, recall)
        for absence in self.absent:
            yield absence, {}

    def settle(self, after: ServerState, outcome: Outcome) -> tuple[ServerState, Outcome]:
        """The state and the outcome of the closed round, with what the clock says."""
        if self.ends is None:
            return after, outcome
        told = replace(outcome, simulated_seconds=self.ends, late=list(self.late), devices=list(self.devices))
        return replace(after, clock=self.ends, flights=self.flights, versions=self.versions), told


class Pace(Protocol):
    """Opens rounds."""

    def open(self, state: ServerState, work_of: WorkOf, recall: Recall) -> OpenRound:
        """The round that begins with a state."""
        ...

    def goes_on(self, state: ServerState) -> bool:
        """False if no client is ever there again, so that no round can begin with a state."""
        ...


@dataclass(frozen=True, eq=False)
class AllAtOnce:
    """Everybody who is drawn is asked at once, on the same state; no clock runs."""

    server: Server
    sampler: ClientSampler

    def open(self, state: ServerState, work_of: WorkOf, recall: Recall) -> OpenRound:
        """The round that begins with a state."""
        asked = self.server.open(state, self.sampler.sample(state.round), work_of(state.round))
        return OpenRound(asked, (asked,))

    def goes_on(self, state: ServerState) -> bool:
        """True: everybody is always there."""
        return True
