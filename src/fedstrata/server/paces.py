"""Which pace a run has: everybody at once, by a fleet's clock, or updates as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fedstrata.client.context import ClientContext
from fedstrata.client.forecast import Forecast
from fedstrata.errors import UsageError
from fedstrata.fleet.clock import Presence
from fedstrata.fleet.devices import Device
from fedstrata.server.arrivals import AsTheyArrive
from fedstrata.server.clocked import Clocked
from fedstrata.server.pace import AllAtOnce, Pace
from fedstrata.server.sampling import ClientSampler
from fedstrata.server.server import Server


class Limits(Protocol):
    """What a run's settings say of its clock."""

    @property
    def seed(self) -> int:
        """Of the run."""
        ...

    @property
    def deadline(self) -> float | None:
        """Simulated seconds of a round."""
        ...

    @property
    def stragglers(self) -> str:
        """What becomes of updates that come later."""
        ...


def build_pace(
    server: Server, sampler: ClientSampler, limits: Limits, devices: Sequence[Device], context: ClientContext
) -> Pace:
    """What opens a run's rounds.

    Raises:
        UsageError: if the method takes updates as they arrive, and nothing says when that is; or if nobody is ever
            there.
    """
    buffer = server.method.arrivals
    if buffer is not None:
        _check_arrivals(server, sampler, limits, devices, buffer)
    if not devices:
        return AllAtOnce(server, sampler)
    presence, forecast = Presence(devices, limits.seed), Forecast(context, sampler.clients)
    if not presence.first(sampler.everybody, 0.0)[1]:
        raise UsageError("of the clients that take part none is ever there: the fleet's traces do not name them")
    if buffer is not None:
        return AsTheyArrive(server, sampler, forecast, presence, limits.seed, buffer)
    return Clocked(server, sampler, forecast, presence, limits.deadline, limits.stragglers != "wait")


def _check_arrivals(
    server: Server, sampler: ClientSampler, limits: Limits, devices: Sequence[Device], buffer: int
) -> None:
    """Refuse updates as they arrive where that has no meaning."""
    name, there = next(t.name for t in server.method.techniques if t.arrivals is not None), len(sampler.everybody)
    if not devices:
        raise UsageError(f"'{name}' takes updates in the order in which devices are done: it needs a fleet")
    if limits.deadline is not None:
        raise UsageError(f"'{name}' waits for nobody: it has no rounds that a deadline could end")
    if buffer > there:
        raise UsageError(f"'{name}' waits for {buffer} updates, each of another client, and there are {there} clients")
