"""Numbers as a page writes them, and text that cannot be taken for markup."""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from fedstrata.core.text import SHARES, bytes_text, flops_text, metric_spread
from fedstrata.diagnosis.evidence import finite_number, finite_numbers

NONE = "–"


def escape(value: object) -> str:
    """Text for HTML, and for Plotly, which interprets a few tags and entities in what it shows, but not `&quot;`."""
    return html.escape(str(value), quote=True).replace("&quot;", "&#34;")


def round_digits(value: Any, digits: int = 4) -> float | None:
    """Round to so many significant digits: a screen shows no more, and the file is smaller. None for no number."""
    found = finite_number(value)
    return None if found is None else float(f"{found:.{digits}g}")


def bytes_or_dash(count: float | None) -> str:
    """A number of bytes with its unit; a dash for None."""
    return NONE if count is None else bytes_text(count)


def flops_or_dash(count: float | None) -> str:
    """A number of floating-point operations with its unit; a dash for None."""
    return NONE if count is None else flops_text(count)


def duration_text(value: float | None) -> str:
    """75.2 → '1 min 15 s'; a dash for None."""
    if value is None:
        return NONE
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def spread(values: Sequence[float], metric: str = "accuracy") -> str:
    """Mean ± standard deviation of a metric; of shares in percent."""
    if not values:
        return NONE
    found = metric_spread(metric, statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
    return found + (" %" if metric in SHARES else "")


def mean(values: Iterable[Any]) -> float | None:
    """The mean of those that are finite numbers; None if there are none."""
    found = finite_numbers(values)
    return statistics.fmean(found) if found else None


def comma_list(values: Sequence[object]) -> str:
    """'0, 1, 2', and 'none' for none."""
    return ", ".join(map(str, values)) or "none"


def distinct_names(names: Iterable[object]) -> list[str]:
    """The names, repeated ones numbered: an axis would draw equal names in one place."""
    seen: dict[str, int] = {}
    found = []
    for name in map(escape, names):
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found
