"""Every notebook is that of its script, was run, and runs: here with small settings, in one process."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fedstrata.probes import registry
from fedstrata.techniques import TECHNIQUES
from tests.docs.snippets import is_in
from website.build_notebooks import EXAMPLES, Cell, as_notebook, read_cells, run_cells

PROBES: Any = registry.PROBES
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
SMALL: dict[str, dict[str, Any]] = {
    "01_my_hospitals": {"ROUNDS": 2, "PATIENTS": 60, "SEEDS": 2},
    "02_compare_and_publish": {"ROUNDS": 2, "EPOCHS": 1, "SEEDS": [0, 1], "TUNING": [0.1]},
    "03_my_technique": {"ROUNDS": 2, "SEEDS": [0, 1], "EPOCHS": 1},
    "04_depth_and_budget": {"ROUNDS": 2, "WIDTH": 4},
    "05_to_flower": {"ROUNDS": 1, "PATIENTS": 40},
    "06_adapters": {"ROUNDS": 1, "LETTERS": 20, "PRETRAINED": False},
}
"""Script → its parameters here."""
EXTRAS = {
    "01_my_hospitals": ("matplotlib",),
    "02_compare_and_publish": ("matplotlib",),
    "05_to_flower": ("flwr", "cryptography"),
    "06_adapters": ("transformers", "peft"),
}
"""Script → the packages of extras that it shows."""


def test_there_is_a_notebook_for_every_script() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == {path.stem for path in SCRIPTS} <= {*SMALL}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_pair_agrees(script: Path) -> None:
    """The same cells, all of them run in their order, with nothing in them of the machine that ran them."""
    text = script.with_suffix(".ipynb").read_text(encoding="utf-8")
    notebook = json.loads(text)
    pytest.importorskip("nbformat").validate(notebook)
    found = [
        Cell(cell["cell_type"], "".join(cell["source"]), tuple(cell["metadata"].get("tags", ())))
        for cell in notebook["cells"]
    ]
    assert found == read_cells(script.read_text(encoding="utf-8")), "run: make notebooks"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any(cell["outputs"] for cell in code)
    assert not re.search(r"(?<![\w.])/(tmp|home|root|work|Users|var)/", re.sub(r'"image/png": "[^"]*"', "", text))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebooks_run(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what they claim, which they assert."""
    for package in EXTRAS.get(script.stem, ()):
        pytest.importorskip(package)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.path", [*sys.path])
    before = set(sys.modules)
    with mock.patch.dict(TECHNIQUES), mock.patch.dict(PROBES):  # to which a notebook may add its own
        run_cells(read_cells(script.read_text(encoding="utf-8")), SMALL[script.stem])
    for name in set(sys.modules) - before:
        if is_in(sys.modules[name], tmp_path):
            del sys.modules[name]


def test_what_a_cell_puts_out() -> None:
    script = '# %% [markdown]\n# # Title\n#\n# Text.\n\n# %% tags=["parameters"]\nn = 2\n\n# %%\nprint(n)\nn + 1\n'
    cells = read_cells(script)
    assert cells[0] == Cell("markdown", "# Title\n\nText.")
    outputs = run_cells(cells, {"n": 5})
    assert outputs[1] == []
    printed, result = outputs[2]
    assert (printed["text"], result["data"]) == (["5\n"], {"text/plain": ["6"]})
    notebook = as_notebook(cells, outputs, {"seconds": 1.26})
    assert notebook["metadata"]["fedstrata"] == {"seconds": 1.3}
    assert [cell.get("execution_count") for cell in notebook["cells"]] == [None, 1, 2]
    pytest.importorskip("nbformat").validate(notebook)
    with pytest.raises(KeyError, match="no parameters m"):
        run_cells(cells, {"m": 5})


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("x = 1\n# %%\n", "before the first cell"),
        ("# %% [raw]\n", "begins no cell"),
        ("# %% [markdown]\ntext\n", "does not begin with"),
    ],
)
def test_a_script_that_cannot_be_read(script: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_cells(script)
