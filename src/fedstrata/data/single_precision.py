"""Models are trained in float32: what it cannot hold, or cannot tell apart, is refused before it is lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedstrata.data.cells import Array
from fedstrata.errors import UsageError

LARGEST = float(np.finfo(np.float32).max)
_TOLERATED = 0.01
"""Rounding may take away this share of the targets' deviation, a ten-thousandth of their variance."""


def refuse_beyond(values: Array, place: Callable[[int], str]) -> None:
    """Refuse the first row with a number that float32 does not hold; those that are missing are passed over."""
    if values.dtype.kind != "f" or values.dtype.itemsize <= 4:  # no integer is too large, and float32 holds its own
        return
    beyond = np.abs(values) > LARGEST
    if beyond.any():
        at = tuple(np.argwhere(beyond)[0])
        raise UsageError(f"{place(int(at[0]))} is {values[at]:g}, which is beyond what float32 holds")


def as_float32(name: str, targets: Array, place: Callable[[int], str]) -> Array:
    """Targets of any type of number in float32.

    Args:
        name: of the dataset, for messages.
        targets: a row per example.
        place: how a message calls the target of a row.

    Raises:
        UsageError: if one is too large, or if they differ by less than rounding does.
    """
    wide = targets.astype(np.float64)
    refuse_beyond(wide, place)
    found: Array = wide.astype(np.float32)
    spread, rounding = wide.std(0), np.sqrt(((wide - found) ** 2).mean(0))
    lost = (rounding > _TOLERATED * spread) & (wide.max(0) > wide.min(0))
    if np.any(lost):
        at = np.flatnonzero(lost)[0]
        mean, differ = np.ravel(wide.mean(0))[at], np.ravel(spread)[at]
        raise UsageError(
            f"{name}: targets about {mean:g} that differ by about {differ:.2g} are hardly told apart in float32: "
            "subtract their mean from them"
        )
    return found
