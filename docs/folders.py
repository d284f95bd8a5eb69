"""Draw docs/img/folders.svg, the folders and what they import, from the imports themselves: python docs/folders.py

A folder stands above whatever it imports. Arrows that follow from others (a → b → c, so a → c) are left out.
"""

from __future__ import annotations

import ast
import html
import textwrap
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "fedstrata"
PICTURE = ROOT / "docs" / "img" / "folders.svg"
WIDTH, HEIGHT, GAP, STEP = 218, 66, 14, 34
"""Of a box, between two boxes of a row, and between two rows."""
DOOR = "the public door"


def folder_of(parts: tuple[str, ...]) -> str:
    """The folder that a module lies in; modules of the root are the public door, but for what everybody imports."""
    if len(parts) > 1:
        return parts[0]
    return {"errors": "errors", "_version": "errors"}.get(parts[0] if parts else "", DOOR)


def imported(path: Path) -> set[str]:
    """The folders that a module imports anything from, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "fedstrata":
            names |= {f"fedstrata.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedstrata."):
            names.add(str(node.module))
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("fedstrata.")}
    found = set()
    for name in names:
        parts = tuple(name.split(".")[1:])
        inside = (SOURCE / parts[0]).is_dir()
        found.add(parts[0] if inside else folder_of(parts[:1]))
    return found


def graph() -> dict[str, set[str]]:
    """Folder → the folders that it imports."""
    edges: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        own = folder_of(parts)
        others = imported(path) if parts not in (("__init__",), ("__main__",)) else set()
        edges.setdefault(own, set()).update(others - {own})
    return edges


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without arrows that follow from others."""

    @cache
    def below(name: str) -> frozenset[str]:
        return frozenset(edges[name]).union(*(below(other) for other in edges[name]))

    return {name: {o for o in others if not any(o in below(p) for p in others - {o})} for name, others in edges.items()}


def levels(edges: dict[str, set[str]]) -> list[list[str]]:
    """Rows of folders, from the ground up: each stands one above the highest that it imports."""

    @cache
    def height(name: str) -> int:
        return 1 + max((height(other) for other in edges[name]), default=-1)

    rows: list[list[str]] = [[] for _ in range(1 + max(map(height, edges)))]
    for name in sorted(edges):
        rows[height(name)].append(name)
    return rows


def question(name: str) -> str:
    """What a folder is for: its docstring's first sentence."""
    if name == DOOR:
        return "federation.py, run.py: what a user types"
    if name == "errors":
        return "errors.py: one clear sentence for every mistake"
    text = ast.get_docstring(ast.parse((SOURCE / name / "__init__.py").read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).rstrip(".")


def draw() -> str:
    """The picture as SVG."""
    edges = graph()
    rows = levels(edges)
    widest = max(map(len, rows))
    width = widest * (WIDTH + GAP) + GAP
    place: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(reversed(rows)):
        left = (width - len(row) * (WIDTH + GAP) + GAP) / 2
        for column, name in enumerate(row):
            place[name] = (left + column * (WIDTH + GAP), GAP + level * (HEIGHT + STEP))
    height = len(rows) * (HEIGHT + STEP) - STEP + 2 * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#7a8794"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for name, others in sorted(reduced(edges).items()):
        for other in sorted(others):
            (x, y), (u, v) = place[name], place[other]
            parts.append(
                f'<path d="M{x + WIDTH / 2:.0f} {y + HEIGHT:.0f} C{x + WIDTH / 2:.0f} {y + HEIGHT + STEP:.0f} '
                f'{u + WIDTH / 2:.0f} {v - STEP:.0f} {u + WIDTH / 2:.0f} {v:.0f}" fill="none" stroke="#9aa7b4" '
                'stroke-width="1.2" marker-end="url(#a)"/>'
            )
    for name, (x, y) in sorted(place.items()):
        parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eef3f8" stroke="#4a6785"/>'
            f'<text x="{x + 10:.0f}" y="{y + 18:.0f}" font-size="13" font-weight="bold" fill="#1d3348">'
            f"{html.escape(name if name in (DOOR, 'errors') else name + '/')}</text>"
        )
        lines = textwrap.wrap(question(name), 38)
        for number, line in enumerate(lines[:3]):
            more = "…" if number == 2 and len(lines) > 3 else ""
            parts.append(
                f'<text x="{x + 10:.0f}" y="{y + 33 + 13 * number:.0f}" font-size="10" fill="#33475b">'
                f"{html.escape(line + more)}</text>"
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw())
