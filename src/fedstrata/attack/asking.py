"""What every attack checks of its arguments, counts of its steps, and writes of its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from fedstrata.errors import UsageError, not_negative, positive
from fedstrata.runs.files import disk_errors, write_atomic

MOST = 64
"""Examples that fit on a sheet."""
Progress = Callable[[int, int], None]
"""Is called with (steps done, steps of all)."""


def check_counts(most: int, **values: int) -> None:
    """Refuse what is no whole number from 1 on."""
    for name, value in values.items():
        if not isinstance(value, int) or not 1 <= value <= most:
            raise UsageError(f"{name} must be a whole number from 1 to {most:,}, not {value}")


def check_search(steps: int, lr: float, tv: float, seed: int, noise: Sequence[float] = ()) -> None:
    """Refuse settings of a search that have no meaning."""
    check_counts(10**6, steps=steps)
    if not isinstance(seed, int) or seed < 0:
        raise UsageError(f"seed must be a whole number, 0 or more, not {seed}")
    positive("the attack", lr=lr)
    not_negative("the attack", tv=tv)
    for level in noise:
        not_negative("the attack", noise=level)


def step_counter(progress: Progress | None, total: int) -> Callable[[], None]:
    """A function to call after every step, which reports how many there have been."""
    steps = count(1)

    def tick() -> None:
        done = next(steps)
        if progress is not None:
            progress(done, total)

    return tick


def last_of(search: Iterator[Tensor], tick: Callable[[], None]) -> Tensor:
    """The images after the last step of a search, which takes one at least."""
    for images in search:
        rebuilt = images
        tick()
    return rebuilt


def write_result(directory: Path, figures: tuple[str, Mapping[str, Any]], picture: tuple[str, bytes] | None) -> None:
    """Write an attack's figures as JSON, and its picture, into a directory that is made if it is not there."""
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    if picture is not None:
        write_atomic(directory / picture[0], picture[1])
    write_atomic(directory / figures[0], json.dumps(figures[1], indent=2) + "\n")
