"""Numbers as a page writes them, and text that cannot be taken for markup."""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from fedstrata.core.text import bytes_text, flops_text

NONE = "–"
LARGEST = 1e100
"""A number beyond it is shown as one that is not finite: sums and squares of it would not be."""


def text(value: object) -> str:
    """For HTML, and for Plotly, which reads a few tags and all entities in what it shows."""
    return html.escape(str(value), quote=True)


def number(value: Any) -> float | None:
    """The value if it is a finite number: what was measured may be anything in a file that was edited."""
    kind = type(value)
    return value if (kind is float or kind is int) and abs(value) <= LARGEST else None


def known(values: Iterable[Any]) -> list[float]:
    """Those that are finite numbers."""
    return [found for value in values if (found := number(value)) is not None]


def rounded(value: Any, digits: int = 4) -> float | None:
    """With so many significant digits: what a screen shows needs no more, and a file is smaller."""
    found = number(value)
    return None if found is None else float(f"{found:.{digits}g}")


def sized(count: float | None) -> str:
    """Bytes, and a dash for None."""
    return NONE if count is None else bytes_text(count)


def flops(count: float | None) -> str:
    """Floating-point operations, and a dash for None."""
    return NONE if count is None else flops_text(count)


def seconds(value: float | None) -> str:
    """75.2 → '1 min 15 s'."""
    if value is None:
        return NONE
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation of fractions, in percent."""
    if not values:
        return NONE
    deviation = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.2f}{deviation} %"


def mean(values: Iterable[Any]) -> float | None:
    """Of those that are numbers; None for none."""
    found = known(values)
    return statistics.fmean(found) if found else None


def listed(values: Sequence[object]) -> str:
    """'0, 1, 2', and 'none' for none."""
    return ", ".join(map(str, values)) or "none"


def distinct(names: Iterable[object]) -> list[str]:
    """The names, a second one of the same kind with its number: an axis would put both into one place."""
    seen: dict[str, int] = {}
    found = []
    for name in map(text, names):
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found
