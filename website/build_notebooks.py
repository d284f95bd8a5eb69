"""Builds examples/*.ipynb from the scripts beside them: python -m website.build_notebooks [NAME…]

A script in the percent format is what people edit: `# %%` begins a cell of code, `# %% [markdown]` one of text. The
notebook is made of it, with what its cells printed, returned and drew when they were run, in an empty folder. A cell
with the tag `parameters` holds settings for which others can be put in (tests run with small ones).
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PARAMETERS = "parameters"
_HEAD = re.compile(r"^# %%(?: \[(markdown)\])?(?: tags=(\[.*\]))?$")
_DPI = 90


@dataclass(frozen=True)
class Cell:
    """A cell of a script: its kind, its text, its tags."""

    kind: str
    source: str
    tags: tuple[str, ...] = ()


def read_cells(script: str) -> list[Cell]:
    """The cells of a script in the percent format.

    Raises:
        ValueError: for text before the first cell, or a head or a line of text that nobody can read.
    """
    cells, head, lines = list[Cell](), "", list[str]()
    for line in [*script.splitlines(), "# %%"]:
        if not line.startswith("# %%"):
            lines.append(line)
            continue
        if head:
            cells.append(_cell(head, "\n".join(lines).strip("\n")))
        elif "".join(lines).strip():
            raise ValueError("there is code before the first cell")
        head, lines = line, []
    return cells


def _cell(head: str, text: str) -> Cell:
    found = _HEAD.match(head)
    if found is None:
        raise ValueError(f"this begins no cell: {head}")
    tags = tuple(json.loads(found[2] or "[]"))
    if not found[1]:
        return Cell("code", text, tags)
    wrong = [line for line in text.splitlines() if not re.match(r"#( |$)", line)]
    if wrong:
        raise ValueError(f"this line of text does not begin with '# ': {wrong[0]}")
    return Cell("markdown", "\n".join(line[2:] for line in text.splitlines()), tags)


def run_cells(cells: Sequence[Cell], parameters: Mapping[str, Any] | None = None) -> list[list[dict[str, Any]]]:
    """What each cell puts out, in the form of a notebook; `parameters` take the place of those of the script.

    Raises:
        KeyError: for a parameter that the script does not have.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    left, outputs, count = dict(parameters or {}), list[list[dict[str, Any]]](), 0
    for cell in cells:
        if cell.kind != "code":
            outputs.append([])
            continue
        count += 1
        outputs.append(list(_run(cell.source, f"cell {count}", count, names)))
        if PARAMETERS in cell.tags:
            for name in [name for name in left if name in names]:
                names[name] = left.pop(name)
    if left:
        raise KeyError(f"the script has no parameters {', '.join(left)}")
    return outputs


def _run(source: str, name: str, count: int, names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run one cell: what it prints, what its last line is worth, and what was drawn."""
    tree, printed = ast.parse(source, name), io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
    if printed.getvalue():
        yield {"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())}
    if value is not None:
        yield {"output_type": "execute_result", "execution_count": count, "data": _bundle(value), "metadata": {}}
    yield from _figures()


def _bundle(value: Any) -> dict[str, list[str]]:
    """What a notebook shows of a value."""
    html = getattr(value, "_repr_html_", None)
    shown = {"text/plain": repr(value)} if html is None else {"text/html": html(), "text/plain": _name_of(value)}
    return {kind: _lines(text) for kind, text in shown.items()}


def _name_of(value: Any) -> str:
    return f"<{type(value).__name__}>"


def _figures() -> Iterator[dict[str, Any]]:
    """The figures that were drawn and are open, which are closed then."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    for number in () if pyplot is None else pyplot.get_fignums():
        figure, file = pyplot.figure(number), io.BytesIO()
        figure.savefig(file, format="png", dpi=_DPI, bbox_inches="tight", metadata={"Software": None})
        pyplot.close(figure)
        picture = base64.b64encode(file.getvalue()).decode()
        data = {"image/png": picture, "text/plain": ["<Figure>"]}
        yield {"output_type": "display_data", "data": data, "metadata": {}}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def as_notebook(
    cells: Sequence[Cell], outputs: Sequence[list[dict[str, Any]]], took: Mapping[str, float]
) -> dict[str, Any]:
    """A notebook (nbformat 4.5) of cells and what they put out; the times that it `took` are kept with it."""
    made, count = [], 0
    for number, (cell, put_out) in enumerate(zip(cells, outputs, strict=True), start=1):
        tags = {"tags": list(cell.tags)} if cell.tags else {}
        entry: dict[str, Any] = {"cell_type": cell.kind, "id": f"cell-{number}", "metadata": tags}
        if cell.kind == "code":
            count += 1
            entry |= {"execution_count": count, "outputs": put_out}
        made.append({**entry, "source": _lines(cell.source)})
    about = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "fedstrata": {name: round(seconds, 1) for name, seconds in took.items()},
    }
    return {"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def build(script: Path) -> dict[str, float]:
    """Run a script in an empty folder and write its notebook; returns its seconds, in all and of the processor."""
    os.environ.setdefault("MPLBACKEND", "agg")
    cells, begun, spent = read_cells(script.read_text("utf-8")), time.perf_counter(), _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        outputs = run_cells(cells)
    took = {"seconds": time.perf_counter() - begun, "cpu_seconds": _cpu_seconds() - spent}
    text = json.dumps(as_notebook(cells, outputs, took), indent=1, ensure_ascii=False) + "\n"
    script.with_suffix(".ipynb").write_text(text, encoding="utf-8")
    return took


def _cpu_seconds() -> float:
    """Processor time of this process and of those that it has started, and waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def main(names: Sequence[str]) -> None:
    """Build the notebooks of these names, or all."""
    scripts = [EXAMPLES / f"{Path(name).stem}.py" for name in names] or sorted(EXAMPLES.glob("*.py"))
    for script in scripts:
        if not script.is_file():
            raise SystemExit(f"there is no script {script.name} in {script.parent.name}/")
        took = build(script)
        print(f"{script.stem}: {took['seconds']:.1f} s, {took['cpu_seconds']:.1f} s of processor time")


if __name__ == "__main__":
    main(sys.argv[1:])
