"""Numbers as people read them: in a terminal, in a table, on a page."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """1234567 → '1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def flops_text(count: float) -> str:
    """Floating-point operations with a unit."""
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.3g} {unit}FLOP"
        count /= 1000
    return f"{count:.3g} PFLOP"


def percent(value: float | None) -> str:
    """0.9137 → '91.37 %', and a dash for None."""
    return "–" if value is None else f"{100 * value:.2f} %"


def number(value: float | None) -> str:
    """Three digits after the point, and a dash for None."""
    return "–" if value is None else f"{value:.3f}"


def plural(count: int, word: str) -> str:
    """'1 round', '20 rounds'."""
    return f"{count:,} {word}{'s' * (count != 1)}"
