"""Draw the two drawings of the concepts, docs/img/drawing-*.svg: python website/drawings.py

Colours are the page's, which puts a drawing into itself; seen alone, a drawing follows the system's.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
DARK = "@media (prefers-color-scheme:dark)"
STYLE = {
    "text": "fill:var(--md-default-fg-color,#222);font:15px system-ui,sans-serif",
    ".small": "font-size:13px;fill:var(--md-default-fg-color--light,#666)",
    ".strong": "font-weight:600",
    ".box": "fill:var(--md-code-bg-color,#f5f5f5);stroke:var(--md-default-fg-color--lighter,#999);stroke-width:1.2",
    ".on": "fill:#00968833;stroke:#009688;stroke-width:2",
    ".arrow": "fill:none;stroke:var(--md-default-fg-color--light,#777);stroke-width:1.6",
    ".tip": "fill:var(--md-default-fg-color--light,#777)",
}
IN_THE_DARK = {
    "text": "fill:var(--md-default-fg-color,#ddd)",
    ".small": "fill:var(--md-default-fg-color--light,#aaa)",
    ".box": "fill:var(--md-code-bg-color,#2a2d35)",
    ".on": "fill:#00968833",
}


def drawing(name: str, width: int, height: int, *parts: str) -> None:
    """Write a drawing of some parts."""
    tip = f"tip-{name}"
    marker = (
        f'<marker id="{tip}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0 8 4 0 8z"/></marker>'
    )
    style = f"{_rules(STYLE)}.drawing .arrow{{marker-end:url(#{tip})}}{DARK}{{{_rules(IN_THE_DARK)}}}"
    lines = [
        f'<svg class="drawing" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">',
        f"<style>{style}</style><defs>{marker}</defs>",
        *parts,
        "</svg>",
    ]
    (IMAGES / f"drawing-{name}.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _rules(style: dict[str, str]) -> str:
    """Rules of style for drawings alone: in a page, they would hold for all of it."""
    return "".join(f".drawing {what}{{{how}}}" for what, how in style.items())


def box(x: int, y: int, width: int, height: int, *lines: str, on: bool = False) -> str:
    """A box with lines of text; the first is strong, the others are small."""
    middle, top = x + width / 2, y + height / 2 - 9 * (len(lines) - 1) + 5
    texts = [
        f'<text class="{"small" if i else "strong"}" x="{middle:g}" y="{top + 19 * i:g}" text-anchor="middle">'
        f"{escape(line)}</text>"
        for i, line in enumerate(lines)
    ]
    kind = "box on" if on else "box"
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="7"/>' + "".join(texts)


def arrow(*points: tuple[int, int]) -> str:
    """A line through points, with a tip at its end."""
    return f'<path class="arrow" d="M{" L".join(f"{x} {y}" for x, y in points)}"/>'


def label(x: int, y: int, text: str, anchor: str = "middle") -> str:
    """A line of small text."""
    return f'<text class="small" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def round_() -> None:
    """Open, three visits, close."""
    visits = [
        box(285, 10 + 80 * i, 190, 62, f"client {name}", "trains on its own data") for i, name in enumerate("123")
    ]
    down = [arrow((175, 121), (230, 121), (230, 41 + 80 * i), (283, 41 + 80 * i)) for i in range(3)]
    up = [arrow((475, 41 + 80 * i), (530, 41 + 80 * i), (530, 121), (583, 121)) for i in range(3)]
    drawing(
        "round",
        760,
        310,
        *down,
        *up,
        box(5, 85, 170, 72, "open", "draw clients,", "plan layers"),
        *visits,
        box(585, 85, 170, 72, "close", "check, average,", "new model"),
        label(228, 18, "assignments"),
        label(532, 18, "updates"),
        arrow((670, 157), (670, 285), (90, 285), (90, 160)),
        label(
            380,
            303,
            "the next round begins with the new model; one line goes into metrics.jsonl, probes look at copies",
        ),
    )


def strata() -> None:
    """A network of three strata, of which one trains."""
    parts = []
    for i, (name, layers, on) in enumerate(
        [("stem", "conv · BatchNorm", False), ("layer1", "conv · BatchNorm", True), ("head", "linear", False)]
    ):
        y = 10 + 85 * i
        parts.append(box(120, y, 250, 60, name, layers, on=on))
        if i:
            parts.append(arrow((245, y - 25), (245, y - 3)))
        parts.append(
            label(390, y + 27, "trains; its change travels" if on else "frozen: no gradient,", "start")
            + label(390, y + 45, "" if on else "no optimiser state, no bytes", "start")
        )
    drawing(
        "strata",
        620,
        245,
        *parts,
        label(60, 45, "inputs"),
        arrow((85, 40), (117, 40)),
        label(60, 215, "outputs"),
        arrow((118, 210), (88, 210)),
    )


if __name__ == "__main__":
    round_()
    strata()
