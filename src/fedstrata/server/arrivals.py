"""Updates as they arrive: clients begin when there is room, and a number of updates ends a round, not its clients.

A round is then what happens between two changes of the model. Visits go on across it: the state says which are under
way, when each of them ends, and with which earlier state it began. They are trained when their updates are needed, so
that an engine gets all visits of a round that began with one state together, and a run that is resumed needs no more
than these states.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedstrata.client.forecast import Forecast
from fedstrata.core.rng import derive
from fedstrata.core.stacks import Assignments
from fedstrata.core.types import replace_fields
from fedstrata.errors import NobodyThere
from fedstrata.fleet.clock import Presence
from fedstrata.server.clocked import NOBODY, Clocked, foresee, sum_by_device
from fedstrata.server.pace import OpenRound, Recall, WorkOf
from fedstrata.server.sampling import ClientSampler
from fedstrata.server.server import Server
from fedstrata.server.state import Flight, ServerState, Version

TRIES = 32
"""Draws before all clients are looked at: with a tenth of them there, one draw in thirty needs that."""


@dataclass(frozen=True, eq=False)
class AsTheyArrive:
    """As many clients as take part train at the same time; whenever one is done, another begins with the newest state.

    Updates arrive in the order of the simulated seconds at which visits end, and of client numbers where these are the
    same. Who begins is drawn among those that are there, do not train, and whose update the open round does not hold.
    Who would train nothing of the newest model, as its device and the method plan it, is passed over until the model
    has changed: such a visit takes next to no time, and empty updates would fill rounds before others arrive.

    Args:
        server: opens rounds.
        sampler: says who may take part, and how many at the same time.
        forecast: says what visits cost.
        presence: says when clients are there.
        seed: of the run.
        buffer: updates that end a round; fewer where nobody else will come.
    """

    server: Server
    sampler: ClientSampler
    forecast: Forecast
    presence: Presence
    seed: int
    buffer: int

    def open(self, state: ServerState, work_of: WorkOf, recall: Recall) -> OpenRound:
        """The round that begins with a state; those after the last one wait for everybody."""
        if self.server.is_after_training(state):
            return Clocked(self.server, self.sampler, self.forecast, self.presence).open(state, work_of, recall)
        events = _Events(self, state, work_of, recall)
        while len(events.arrived) < self.buffer and events.go_on():
            pass
        if not events.arrived:
            raise NobodyThere(NOBODY.format(events.now))
        parts = self._ask(state, events.arrived, work_of)
        asked = Assignments.of(sorted((a for part in parts for a in part), key=lambda a: a.client))
        needed = {flight.round for flight in events.flying}
        kept = [version for version in state.versions if version.round in needed]
        kept += [Version.of(state)] if state.round in needed else []
        left = tuple(sorted(events.flying, key=_order))
        devices = sum_by_device(use for part in parts for use in foresee(part, self.forecast, self.presence, recall))
        return OpenRound(asked, parts, ends=events.now, flights=left, versions=tuple(kept), devices=devices)

    def goes_on(self, state: ServerState) -> bool:
        """False if nobody is under way, and no client is ever there again."""
        if state.flights and not self.server.is_after_training(state):
            return True
        return self.presence.ever(self.sampler.candidates(state.round), state.clock)

    def _ask(self, state: ServerState, arrived: Sequence[Flight], work_of: WorkOf) -> tuple[Assignments, ...]:
        """What those were asked for whose updates have arrived: a part for each state that visits began with."""
        parts = []
        for number in sorted({flight.round for flight in arrived}):
            clients = [flight.client for flight in arrived if flight.round == number]
            part = self.server.open(state.at(number), clients, work_of(number))
            late = (replace_fields(template, staleness=state.round - number) for template in part.templates)
            parts.append(replace_fields(part, templates=tuple(late)))
        return tuple(parts)


def _order(flight: Flight) -> tuple[float, int]:
    """When an update arrives, among others."""
    return flight.ends, flight.client


@dataclass(eq=False)
class _Events:
    """What happens in an open round, one thing after the other."""

    pace: AsTheyArrive
    state: ServerState
    work_of: WorkOf
    recall: Recall
    arrived: list[Flight] = field(default_factory=list)
    begun: int = 0
    passed_over: set[int] = field(default_factory=set)
    all_begin: bool = False

    def __post_init__(self) -> None:
        self.now, self.flying = self.state.clock, list(self.state.flights)

    def go_on(self) -> bool:
        """Let the next thing happen: a client begins, or an update arrives. False if nothing ever will.

        A round that nobody has anything to train in, such as one for a stratum that no device can train, is not awaited
        for ever: then they begin all the same.
        """
        if self._happens():
            return True
        if self.arrived or not self.passed_over:
            return False
        self.passed_over, self.all_begin = set(), True
        return self._happens()

    def _happens(self) -> bool:
        """The same, without those who were passed over."""
        first = min(self.flying, key=_order, default=None)
        begins, client = self._draw()
        if first is not None and first.ends < begins:
            self.now = first.ends
            self.flying.remove(first)
            self.arrived.append(first)
        elif begins < math.inf:
            self.now = begins
            self._begin(client)
        else:
            return False
        return True

    def _draw(self) -> tuple[float, int]:
        """(when there is room and somebody to begin, who it is); infinity for never.

        Any of those that are there is as likely as the others: clients are drawn until one is there and, after a few
        that are not, among those that are.
        """
        pace = self.pace
        busy = {flight.client for flight in (*self.flying, *self.arrived)} | self.passed_over
        free = [c for c in pace.sampler.candidates(self.state.round) if c not in busy]
        room = pace.sampler.per_round - len(self.flying)
        if self.all_begin:  # no more than this round takes: the next one has something to train, perhaps
            room = min(room, pace.buffer - len(self.arrived) - len(self.flying))
        if room <= 0 or not free:
            return math.inf, -1
        rng = random.Random(derive(pace.seed, "begin", self.state.round, self.begun))
        for _ in range(TRIES):
            client = rng.choice(free)
            if pace.presence.next_time(client, self.now) == self.now:
                return self.now, client
        begins, there = pace.presence.first(free, self.now)
        return begins, rng.choice(there or [-1])

    def _begin(self, client: int) -> None:
        """Let a client begin with the newest state, if there is anything for it to train."""
        pace, number = self.pace, self.state.round
        self.begun += 1
        asked = pace.server.open(self.state, [client], self.work_of(number))
        if not (self.all_begin or any(template.trains for template in asked.templates)):
            self.passed_over.add(client)
            return
        (use,) = foresee(asked, pace.forecast, pace.presence, self.recall)
        self.flying.append(Flight(client, number, self.now + use.seconds))
