"""A table's cells, which are text: what is missing, what is a number, and one way of writing each value."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedstrata.errors import UsageError, one_line

Array = np.ndarray[Any, Any]
MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
"""What stands for a missing value, in any case."""
MOSTLY = 0.9
"""A column with at least this share of numbers is meant to be one of numbers."""
_COMMA = re.compile(r"[+-]?\d+,\d+")
_WHOLE = re.compile(r"(0|-?[1-9]\d*)\.0+")
"""A whole number with nothing but zeros behind its point."""


def is_missing(cell: str) -> bool:
    """True if a cell holds nothing."""
    return cell.strip().lower() in MISSING


def number_of(cell: str) -> float | None:
    """The finite number that a cell holds, or None."""
    if "_" in cell:  # Python reads 1_0 as 10, and nobody else does
        return None
    try:
        found = float(cell)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def plain(cell: str) -> str:
    """One way of writing a value: without blanks around it, and whole numbers without a point (1.0 is 1).

    Everything else stays as it is: 1.1 and 1.10 may be two sites, and 007 a code.
    """
    text = cell.strip()
    found = _WHOLE.fullmatch(text)
    return found[1] if found else text


def numbers_or_words(what: str, cells: Sequence[str], otherwise: str) -> Array | None:
    """Cells as numbers, NaN where they are missing; None if they are words.

    Args:
        what: the column, for messages.
        cells: its text.
        otherwise: how to have them as words although most are numbers.

    Raises:
        UsageError: if nearly all of them are numbers, and one is none.
    """
    found = [math.nan if is_missing(cell) else number_of(cell) for cell in cells]
    wrong = [row for row, number in enumerate(found) if number is None]
    if not wrong:
        return np.array(found, dtype=np.float64)
    there = sum(number is None or not math.isnan(number) for number in found)
    commas = sum(_COMMA.fullmatch(cells[row].strip()) is not None for row in wrong)
    if there - len(wrong) + commas < MOSTLY * there:
        return None
    cell = cells[wrong[0]].strip()
    told = f"{one_line(repr(cell), 60)} in row {wrong[0] + 1}"
    if _COMMA.fullmatch(cell):
        raise UsageError(f"{what} has {told}, and numbers are written with a decimal point: mend it, or {otherwise}")
    raise UsageError(f"{what} is a number in most rows, but {told}: mend it, leave it empty, or {otherwise}")
