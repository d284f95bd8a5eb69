"""Simulated time: how long a visit takes on a device, when a round ends, and who is there when it begins.

Pure functions of what is counted: bytes of messages, FLOPs of steps. A round's seconds are the same on every engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedstrata.fleet.devices import Device


def visit_seconds(device: Device, down: float, flops: float, up: float) -> float:
    """bytes down / rate down + FLOPs / speed + bytes up / rate up; what is unlimited takes no time."""
    parts = (down, device.down), (flops, device.flops), (up, device.up)
    return sum(amount / rate for amount, rate in parts if rate is not None)


def round_seconds(seconds: Sequence[float], deadline: float | None) -> float:
    """How long a server waits that drops what comes after the deadline: for the slowest client, or until then.

    It cannot know that nobody else will come in time, so if one is late it waits until the deadline.
    """
    slowest = max(seconds, default=0.0)
    return slowest if deadline is None else min(slowest, deadline)


@dataclass(frozen=True)
class Presence:
    """When clients are there.

    Args:
        devices: of all clients.
        seed: of the run.
    """

    devices: Sequence[Device]
    seed: int

    def next_time(self, client: int, now: float) -> float:
        """The first second from `now` on at which a client is there; infinity for never."""
        available = self.devices[client].available
        return now if available is None else available.next_time(client, now, self.seed)

    def ever(self, clients: Sequence[int], now: float) -> bool:
        """True if one of some clients is there at some time from `now` on."""
        return any(self.next_time(client, now) < math.inf for client in clients)

    def first(self, clients: Sequence[int], now: float) -> tuple[float, list[int]]:
        """(first second from `now` on at which one of some clients is there, those that are); infinity for never."""
        times = [self.next_time(client, now) for client in clients]
        begins = min(times, default=math.inf)
        return begins, [client for client, time in zip(clients, times, strict=True) if time == begins < math.inf]
