"""Rounds by a clock: a server waits for its clients' devices, or until a deadline, in simulated time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedstrata.client.forecast import Forecast
from fedstrata.core.results import DeviceUse
from fedstrata.core.stacks import Assignments
from fedstrata.core.types import Absence
from fedstrata.errors import NobodyThere
from fedstrata.fleet.clock import Presence, round_seconds, visit_seconds
from fedstrata.server.pace import OpenRound, Recall, WorkOf
from fedstrata.server.sampling import ClientSampler
from fedstrata.server.server import Server
from fedstrata.server.state import ServerState

NOBODY = "no client's device is there after simulated second {:,.0f}: the fleet's traces end"


def foresee(asked: Assignments, forecast: Forecast, presence: Presence, recall: Recall) -> list[DeviceUse]:
    """What each visit will take on its client's device."""
    found = []
    for assignment in asked:
        cost, device = forecast.cost(assignment, recall([assignment.client])[0]), presence.devices[assignment.client]
        counts = {"bytes_down": cost.down, "bytes_up": cost.up, "flops": cost.flops, "memory": cost.memory}
        seconds = visit_seconds(device, cost.down, cost.flops, cost.up)
        found.append(DeviceUse(device=device.name, visits=1, seconds=seconds, **counts))
    return found


def sum_by_device(uses: Iterable[DeviceUse]) -> tuple[DeviceUse, ...]:
    """What the visits of each kind of device take together."""
    found: dict[str, list[DeviceUse]] = {}
    for use in uses:
        found.setdefault(use.device, []).append(use)
    return tuple(
        DeviceUse(
            device=name,
            visits=sum(use.visits for use in those),
            bytes_down=sum(use.bytes_down for use in those),
            bytes_up=sum(use.bytes_up for use in those),
            flops=sum(use.flops for use in those),
            seconds=math.fsum(use.seconds for use in those),
            memory=max(use.memory for use in those),
        )
        for name, those in found.items()
    )


@dataclass(frozen=True, eq=False)
class Clocked:
    """All clients of a round begin with the same state; the slowest one, or the deadline, ends it.

    Clients are drawn among those that are there; where nobody is, time moves on until somebody is. In rounds after the
    last one everybody takes part, each as soon as it is there, and there is no deadline.

    Args:
        server: opens rounds.
        sampler: draws clients.
        forecast: says what visits cost.
        presence: says when clients are there.
        deadline: simulated seconds of a round.
        drops: True if what comes later is dropped; it is awaited else.
    """

    server: Server
    sampler: ClientSampler
    forecast: Forecast
    presence: Presence
    deadline: float | None = None
    drops: bool = True

    def open(self, state: ServerState, work_of: WorkOf, recall: Recall) -> OpenRound:
        """The round that begins with a state."""
        begins, there = self.presence.first(self.sampler.candidates(state.round), state.clock)
        if not there:
            raise NobodyThere(NOBODY.format(state.clock))
        clients = self.sampler.sample(state.round, there)
        asked = self.server.open(state, clients, work_of(state.round))
        waits = [self.presence.next_time(client, begins) - begins for client in asked.clients]
        uses = foresee(asked, self.forecast, self.presence, recall)
        seconds = [wait + use.seconds for wait, use in zip(waits, uses, strict=True)]
        deadline = None if self.server.is_after_training(state) else self.deadline
        late = [place for place, own in enumerate(seconds) if deadline is not None and own > deadline]
        absent = self._absent(asked, seconds, late)
        gone = {absence.client for absence in absent}
        come = [place for place, client in enumerate(asked.clients) if client not in gone]
        awaited = [own for own in seconds if own < math.inf]
        ends = begins + round_seconds(awaited, deadline if self.drops else None)
        trained = asked if len(come) == len(asked) else asked.select(come)
        parts = (trained,) if come else ()
        devices = sum_by_device(uses[place] for place in come)
        return OpenRound(asked, parts, absent, ends, tuple(asked.clients[place] for place in late), devices=devices)

    def goes_on(self, state: ServerState) -> bool:
        """False if no client is ever there again, so that no round can begin with a state."""
        return self.presence.ever(self.sampler.candidates(state.round), state.clock)

    def _absent(self, asked: Assignments, seconds: Sequence[float], late: Sequence[int]) -> tuple[Absence, ...]:
        """Those whose updates do not come, or come too late to count."""
        found = []
        for place, own in enumerate(seconds):
            if own == math.inf:
                found.append(Absence(asked.clients[place], "its device is never there again"))
            elif self.drops and place in late:
                why = f"it came too late: after {own:.4g} simulated seconds, and {self.deadline:g} were allowed"
                found.append(Absence(asked.clients[place], why))
        return tuple(found)
