"""A run that somebody else has sent: what only reads it runs none of the code that it names (SECURITY.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.synthetic import write_run
from tests.small_runs import edit, fedstrata

CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n\ndef make():\n    raise RuntimeError\n"


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """A run with probes whose model and data are a file beside it."""
    run = tmp_path / "run"
    write_run(run, rounds=3, strata=3)
    (tmp_path / "theirs.py").write_text(CODE)
    for field in ("model", "dataset"):
        edit(run, field, f"\"python(source='{tmp_path}/theirs:make')\"")
    return run


@pytest.mark.parametrize(
    "words", [["report"], ["diagnose"], ["diagnose", "--json"], ["plot", "--format", "svg"]], ids=" ".join
)
def test_reading_it_runs_nothing(words: list[str], sent: Path) -> None:
    if words[0] == "plot":
        pytest.importorskip("matplotlib", reason="plots need the extra report")
    assert fedstrata(words[0], sent, *words[1:]) == 0
    assert not (sent.parent / "ran").exists()


def test_going_on_with_it_does(sent: Path) -> None:
    """Lest the test above look for the wrong thing."""
    assert fedstrata("resume", sent) == 2
    assert (sent.parent / "ran").exists()
