"""Small pieces of HTML for notebooks: text that cannot be taken for markup, no scripts, and no colours of their own.

What is drawn takes the page's own text colour, and grey that is half transparent, so it can be read in light and dark.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

GREY = "rgba(128,128,128,.35)"
_CELL = f"padding:.15em .7em;border-bottom:1px solid {GREY};text-align:"


def escape(value: object) -> str:
    """Text for HTML."""
    return html.escape(str(value), quote=True)


def heading(title: object, rest: object = "") -> str:
    """A line that says what this is."""
    return f"<div><strong>{escape(title)}</strong> {escape(rest)}</div>"


def paragraph(text: object) -> str:
    """Plain text."""
    return f'<div style="margin:.3em 0;max-width:60em">{escape(text)}</div>'


def fact_table(facts: Mapping[str, object]) -> str:
    """Names and values, one pair per row; empty values are left out."""
    rows = "".join(
        f'<tr><th scope="row" style="{_CELL}left">{escape(name)}</th><td style="{_CELL}left">{escape(value)}</td></tr>'
        for name, value in facts.items()
        if value not in (None, "")
    )
    return f'<table style="border-collapse:collapse;margin:.4em 0">{rows}</table>'


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """A table; the first `words` columns are text, the others are numbers and end at the same line."""
    sides = ["left" if place < words else "right" for place in range(len(columns))]
    head = "".join(
        f'<th scope="col" style="{_CELL}{side}">{escape(name)}</th>' for name, side in zip(columns, sides, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{_CELL}{side}">{escape(v)}</td>' for v, side in zip(row, sides, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;margin:.4em 0">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def details(summary: object, inside: str) -> str:
    """Markup that is shown when its summary is clicked."""
    return f'<details style="margin:.3em 0"><summary>{escape(summary)}</summary>{inside}</details>'


def bar(done: int, total: int) -> str:
    """How much of something is done."""
    return f'<progress value="{done}" max="{max(total, 1)}" style="width:20em;max-width:100%"></progress>'


def curve(values: Sequence[float], label: str, width: int = 240, height: int = 48) -> str:
    """A line through the values, from their least to their greatest; `label` is read out in its place."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    step, scale = (width - 4) / (len(values) - 1), (height - 4) / ((high - low) or 1)
    points = " ".join(f"{2 + place * step:.1f},{height - 2 - (v - low) * scale:.1f}" for place, v in enumerate(values))
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" style="display:block;margin:.3em 0;border-bottom:1px solid {GREY}">'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )


def page_part(*parts: str) -> str:
    """Pieces as one, which an output cell holds."""
    return f'<div class="fedstrata" style="color:inherit;font-size:.95em">{"".join(parts)}</div>'
