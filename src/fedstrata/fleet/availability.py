"""When is a device there? Pure functions of the client, the simulated second and the run's seed."""

from __future__ import annotations

import csv
import math
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

from fedstrata.core.own_code import PathText
from fedstrata.core.rng import derive
from fedstrata.core.spec import Registry, bind, non_default_fields, text_of
from fedstrata.errors import UsageError, positive

HOUR = 3600.0
"""Seconds."""
SHORTEST = 1e-3
"""Seconds: what is shorter is lost in the digits of a clock that has run for years."""


class Availability(Protocol):
    """When clients of one kind are there."""

    name: ClassVar[str]

    def next_time(self, client: int, now: float, seed: int) -> float:
        """The first second from `now` on at which a client is there: `now` itself, later, or infinity for never."""
        ...


@dataclass(frozen=True, kw_only=True)
class Daily:
    """There for a share of every day, in one piece that begins at another time for every client and day.

    Args:
        p: the share; a piece that reaches midnight goes on in the morning of the same day.
        hours: of a day.
    """

    name: ClassVar[str] = "daily"
    p: float
    hours: float = 24.0

    def __post_init__(self) -> None:
        positive("daily", p=self.p, hours=self.hours)
        if self.p > 1:
            raise UsageError(f"daily's p must be above 0 and at most 1, not {self.p}")
        if self.p * self.hours * HOUR < SHORTEST:
            raise UsageError(f"{self} is there for less than a thousandth of a second a day")

    def next_time(self, client: int, now: float, seed: int) -> float:
        """`now` within the day's piece; else the piece's next beginning, or midnight if the new day begins within it.

        A day's piece begins at a second drawn from (seed, client, day), uniformly over the day.
        """
        day = self.hours * HOUR
        number = math.floor(now / day)
        while True:  # the next day's piece, or its rest at midnight, ends the search
            begin = number * day
            start = random.Random(derive(seed, "available", client, number)).random() * day
            past = now - begin - start
            if (past if past >= 0 else past + day) < self.p * day:
                return now
            if past < 0:
                return begin + start
            number, now = number + 1, begin + day

    def __str__(self) -> str:
        return text_of(self.name, {"p": self.p, **non_default_fields(self)})


@dataclass(frozen=True, kw_only=True)
class Trace:
    """There when a file says so: a CSV file with the columns client, start and end, in simulated seconds.

    Args:
        path: of the file; clients that it does not name are never there.
        every: after so many seconds the file begins again; without it nobody is there after its last row.
    """

    name: ClassVar[str] = "trace"
    path: PathText
    every: float | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            positive("trace", every=self.every)
            if self.every < SHORTEST:
                raise UsageError(f"trace's every must be a thousandth of a second or more, not {self.every}")

    @cached_property
    def spans(self) -> dict[int, list[tuple[float, float]]]:
        """Client → when it is there: (from, until), in order; read once.

        Raises:
            UsageError: if the file cannot be read, or is no such table.
        """
        found: dict[int, list[tuple[float, float]]] = {}
        for client, start, end in _read_trace(Path(self.path)):
            if self.every is not None and end > self.every:
                raise UsageError(f"{self.path} goes on after second {end:g}, but begins again every {self.every:g}")
            found.setdefault(client, []).append((start, end))
        return {client: sorted(spans) for client, spans in found.items()}

    def next_time(self, client: int, now: float, seed: int) -> float:
        """`now` within one of the client's spans, else where the next one begins."""
        spans = self.spans.get(client, [])
        begin = 0.0 if self.every is None else math.floor(now / self.every) * self.every
        for offset in (begin,) if self.every is None else (begin, begin + self.every):
            for start, end in spans:
                if now < offset + end:
                    return max(now, offset + start)
        return math.inf

    def __str__(self) -> str:
        return text_of(self.name, {"path": self.path, **non_default_fields(self)})


def _read_trace(path: Path) -> list[tuple[int, float, float]]:
    """The rows of a trace.

    Raises:
        UsageError: with the first row that is wrong.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    found = []
    for number, row in enumerate(rows, 1):
        try:
            client, start, end = int(row["client"]), float(row["start"]), float(row["end"])
        except (KeyError, TypeError, ValueError):
            raise UsageError(f"{path}, row {number}: it needs numbers in the columns client, start and end") from None
        if client < 0 or not 0 <= start < end < math.inf:
            raise UsageError(f"{path}, row {number}: a client, 0 or more, and a start before an end, from 0 on")
        found.append((client, start, end))
    if not found:
        raise UsageError(f"{path} has no rows with the columns client, start and end")
    return found


AVAILABILITY: Registry = {"daily": Daily, "trace": Trace}


def parse_availability(text: str) -> Availability:
    """Read `daily(p=0.3)` or `trace('file.csv')`.

    Raises:
        UsageError: for an unknown name, or a wrong argument.
    """
    target, kwargs = bind("availability", AVAILABILITY, text)
    made: Any = target(**kwargs)
    found: Availability = made
    return found
