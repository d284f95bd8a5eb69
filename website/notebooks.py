"""Notebooks of examples/ as pages of the site: text, code and what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def pages(folder: Path) -> dict[str, str]:
    """Page of the site → its Markdown, for every notebook of a folder; none where there is no folder."""
    return {_page(path): as_markdown(path.read_text("utf-8")) for path in _notebooks(folder)}


def seconds(folder: Path) -> dict[str, tuple[float, float]]:
    """Page of the site → the seconds that its notebook took, in all and of the processor; 0 where it does not say."""
    known = {_page(path): json.loads(path.read_text("utf-8"))["metadata"] for path in _notebooks(folder)}
    times = {page: about.get("fedstrata", {}) for page, about in known.items()}
    return {page: (float(took.get("seconds", 0)), float(took.get("cpu_seconds", 0))) for page, took in times.items()}


def _notebooks(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ipynb")) if folder.is_dir() else []


def _page(path: Path) -> str:
    return f"tutorials/{path.stem.replace('_', '-')}.md"


def as_markdown(notebook: str) -> str:
    """The cells of a notebook (nbformat 4), one after the other."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = _joined(cell["source"]).strip("\n")
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source:
            parts.append(_fenced(source, "python"))
            parts += [shown for output in cell.get("outputs", []) if (shown := _output(output))]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    """What a cell printed, drew or returned; HTML stays HTML."""
    if output["output_type"] == "stream":
        return _fenced(_joined(output["text"]), "text")
    if output["output_type"] == "error":
        return _fenced(f"{output['ename']}: {output['evalue']}", "text")
    data = output.get("data", {})
    if "image/png" in data:
        picture = "".join(_joined(data["image/png"]).split())
        return f'<img class="output" alt="the figure that this cell draws" src="data:image/png;base64,{picture}">'
    if "text/html" in data:
        lines = [line for line in _joined(data["text/html"]).splitlines() if line.strip()]
        return '<div class="output">\n' + "\n".join(lines) + "\n</div>"
    return _fenced(_joined(data["text/plain"]), "text") if "text/plain" in data else ""


def _fenced(text: str, language: str) -> str:
    """A block of code whose fence is longer than any in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)
