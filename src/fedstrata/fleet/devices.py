"""Which client has which device: `phone*6(memory='60MB', up='1MB/s', flops='2G/s'); gateway*3(up='8MB/s'); server*1`.

Groups stand one after the other, as `archs` do: the first clients have the first group's device. What is not said is
unlimited.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fedstrata.core.groups import divide_in_groups
from fedstrata.core.spec import Call, bind, parse_call, text_of
from fedstrata.errors import UsageError
from fedstrata.fleet.availability import Availability, Trace, parse_availability
from fedstrata.fleet.quantities import RATES, SIZES, SPEEDS, parse_quantity, quantity_text

_PART = re.compile(r"""(?:'[^']*'|"[^"]*"|[^;])+""")
_GROUP = re.compile(r"\s*([A-Za-z][\w-]*)\s*(?:\*\s*([^\s(]*)\s*)?(\(.*\))?\s*", re.DOTALL)
HOW = "phone*6(memory='60MB', up='1MB/s', down='4MB/s', flops='2G/s', available='daily(p=0.3)'); server*1"


@dataclass(frozen=True)
class Device:
    """What one kind of client has; None where nothing limits it.

    Args:
        name: of the kind.
        memory: bytes that training may take.
        up: bytes per second towards the server.
        down: bytes per second from the server.
        flops: floating-point operations per second.
        available: when it is there; None for always.
    """

    name: str
    memory: int | None = None
    up: float | None = None
    down: float | None = None
    flops: float | None = None
    available: Availability | None = None

    @property
    def limits(self) -> dict[str, str]:
        """What limits it, as it is written."""
        said = {
            "memory": None if self.memory is None else quantity_text(self.memory, SIZES),
            "up": None if self.up is None else quantity_text(self.up, RATES),
            "down": None if self.down is None else quantity_text(self.down, RATES),
            "flops": None if self.flops is None else quantity_text(self.flops, SPEEDS),
            "available": None if self.available is None else str(self.available),
        }
        return {name: text for name, text in said.items() if text is not None}


@dataclass(frozen=True)
class Group:
    """Clients with the same kind of device.

    Args:
        device: theirs.
        count: how many (int), or their share of the clients (float).
    """

    device: Device
    count: int | float = 1

    def __str__(self) -> str:
        arguments = text_of("", self.device.limits)
        return f"{self.device.name}*{self.count}{arguments}"


@dataclass(frozen=True)
class Fleet:
    """All clients' devices, group after group."""

    groups: tuple[Group, ...]

    def devices(self, clients: int) -> tuple[Device, ...]:
        """The device of each of so many clients, by its number.

        Raises:
            UsageError: if the groups do not come to as many, or a share leaves a group without any.
        """
        if isinstance(self.groups[0].count, float):
            by_name = {group.device.name: group.device for group in self.groups}
            shares = {group.device.name: group.count for group in self.groups}
            return tuple(by_name[name] for name in divide_in_groups("fleet", shares, clients))
        total = sum(int(group.count) for group in self.groups)
        if total != clients:
            raise UsageError(f"the fleet has {total} devices, and there are {clients} clients: say how many have which")
        return tuple(group.device for group in self.groups for _ in range(int(group.count)))

    def __str__(self) -> str:
        return "; ".join(map(str, self.groups))


def parse_fleet(text: str) -> Fleet:
    """Read a fleet, groups with a semicolon between; `*6` are six clients, `*0.6` is that share of all.

    Raises:
        UsageError: for what cannot be read, a name that is given twice, or numbers beside shares.
    """
    groups = [_read_group(part) for part in _PART.findall(text) if part.strip()]
    if not groups:
        raise UsageError(f"fleet names no device; write it like {HOW}")
    names = [group.device.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"fleet names '{name}' twice; one group holds all devices of a kind")
    _check_counts(groups)
    return Fleet(tuple(groups))


def devices_of(fleet: str | None, clients: int, centralised: bool = False) -> tuple[Device, ...]:
    """The device of each of a run's clients, by its number; empty without a fleet.

    Raises:
        UsageError: if it does not fit the clients, or there is but one party.
    """
    if fleet is not None and centralised:
        raise UsageError("a fleet needs clients: 'centralised' has one party that holds everybody's examples")
    return () if fleet is None else parse_fleet(fleet).devices(clients)


def traces_digest(devices: Sequence[Device]) -> dict[str, str]:
    """What a run's files say of the fleet's traces, whose files may be changed; empty where there are none."""
    there = dict.fromkeys(device.available for device in devices)
    spans = [repr(kind.spans) for kind in there if isinstance(kind, Trace)]
    return {"traces": hashlib.sha256("".join(spans).encode()).hexdigest()[:16]} if spans else {}


def _check_counts(groups: Sequence[Group]) -> None:
    """Refuse numbers beside shares, and shares that do not come to everybody."""
    shares = [group.count for group in groups if isinstance(group.count, float)]
    if shares and len(shares) < len(groups):
        raise UsageError("fleet: give every group a whole number of clients, or every group a share with a point")
    if shares and not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise UsageError(f"fleet: the shares come to {sum(shares):g}, not to 1")


def _read_group(part: str) -> Group:
    found = _GROUP.fullmatch(part)
    if found is None:
        raise UsageError(f"fleet: '{part.strip()}' cannot be read; write it like {HOW}")
    name, count, arguments = found[1], found[2], found[3] or ""
    call = parse_call(name + arguments)
    _, given = bind("device", {name: _limits}, Call(name, call.args, call.kwargs))
    return Group(_build_device(name, **given), 1 if count is None else _read_count(name, count))


def _limits(
    *,
    memory: str | int | float | None = None,
    up: str | int | float | None = None,
    down: str | int | float | None = None,
    flops: str | int | float | None = None,
    available: str | None = None,
) -> None:
    """What may be said of a device; `bind` reads its arguments here."""


def _build_device(
    name: str,
    memory: str | float | None = None,
    up: str | float | None = None,
    down: str | float | None = None,
    flops: str | float | None = None,
    available: str | None = None,
) -> Device:
    """A device from its limits as they are written."""
    return Device(
        name,
        None if memory is None else max(1, round(parse_quantity(f"{name}'s memory", memory, SIZES, "60MB"))),
        None if up is None else parse_quantity(f"{name}'s up", up, RATES, "1MB/s"),
        None if down is None else parse_quantity(f"{name}'s down", down, RATES, "4MB/s"),
        None if flops is None else parse_quantity(f"{name}'s flops", flops, SPEEDS, "2G/s"),
        None if available is None else parse_availability(available),
    )


def _read_count(name: str, text: str) -> int | float:
    """A whole number of clients, or a share with a decimal point, as `participation` has it."""
    with suppress(ValueError):
        count: int | float = int(text) if text.isdecimal() else float(text)
        if count > 0 and (isinstance(count, int) or count <= 1):
            return count
    raise UsageError(f"fleet: in {name}*{text} the number must be a whole one, as in {name}*6, or a share up to 1.0")
