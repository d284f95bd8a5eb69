"""Sizes and rates as people write them: '60MB', '4GiB', '1MB/s', '10Mbit/s', '2G/s'."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fedstrata.errors import UsageError

SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""Unit → bytes."""
RATES = {f"{unit}/s": size for unit, size in SIZES.items()}
RATES |= {"kbit/s": 125, "Mbit/s": 125 * 10**3, "Gbit/s": 125 * 10**6}
"""Unit → bytes per second."""
SPEEDS = {"/s": 1, "k/s": 10**3, "M/s": 10**6, "G/s": 10**9, "T/s": 10**12, "P/s": 10**15}
"""Unit → floating-point operations per second."""
LEAST, MOST = 1e-100, 1e300
"""Beyond these no simulated second is a number."""
_NUMBER = re.compile(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?)\s*([A-Za-z]*(?:/s)?)\s*")


def parse_quantity(what: str, value: str | float, units: Mapping[str, int], example: str) -> float:
    """A size or a rate in its smallest unit; plain numbers are in that already.

    Raises:
        UsageError: for what is no such quantity, or is not above 0.
    """
    number = 0.0
    if isinstance(value, str):
        found = _NUMBER.fullmatch(value)
        if found and found[2] in units:
            number = float(found[1]) * units[found[2]]
    elif not isinstance(value, bool) and value < MOST:
        number = float(value)
    if not LEAST <= number < MOST:
        known = ", ".join(units)
        raise UsageError(f"{what} must be above 0, written like '{example}', not {value!r} (units: {known})")
    return number


def quantity_text(value: float, units: Mapping[str, int]) -> str:
    """The shortest text that reads back as the value."""
    found = []
    for unit, size in units.items():
        number = repr(value / size).removesuffix(".0")
        if float(number) * size == value:
            found.append(f"{number}{unit}")
    return min(found, key=len)
