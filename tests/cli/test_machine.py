"""`fedstrata machine`: what it shows, what it measures and where that is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstrata.cli import machine
from fedstrata.engines import tuning
from fedstrata.engines.built_in_speeds import BUILT_IN
from fedstrata.engines.known_speeds import load_table, table_path
from fedstrata.engines.speed_table import SpeedTable
from fedstrata.system.machine import cores
from tests.small_runs import fedstrata, full_disk, one_sentence, strays

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def answer(capsys: Capture, *words: object) -> dict[str, Any]:
    """What a command tells as JSON."""
    assert fedstrata("machine", *words, "--json") == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_show(capsys: Capture, cache: Path) -> None:
    told = answer(capsys, "show")
    assert told["cores"] == cores()
    assert told["torch"] == torch.__version__
    assert told["kernels"].startswith(torch.backends.cpu.get_cpu_capability())
    assert told["memory"] > 10**8
    assert (told["table"], told["measured"], told["note"]) == (None, None, None)
    assert len(told["cells"]) == len(BUILT_IN)
    assert not cache.exists()
    assert fedstrata("machine", "show") == 0
    out = capsys.readouterr().out
    assert "table     the built-in one" in out
    assert "*: not measured on this machine" in out


def test_tune_writes_what_show_shows_and_auto_reads(capsys: Capture) -> None:
    told = answer(capsys, "tune", "--seconds", 0.1)
    assert told["table"] == str(table_path())
    measured = [cell for cell in told["cells"] if not cell["built_in"]]
    assert 0 < len(measured) < len(BUILT_IN) == len(told["cells"])
    assert min(min(cell["one_by_one"], cell["at_once"]) for cell in measured) > 0
    assert not strays(table_path().parent)
    shown = answer(capsys, "show")
    assert (shown["table"], shown["measured"], shown["cells"]) == (told["table"], told["measured"], told["cells"])
    assert load_table()[0].measured == told["measured"]
    assert fedstrata("machine", "show") == 0
    assert f"{table_path()}, measured on {told['measured']}" in " ".join(capsys.readouterr().out.split())


def test_tune_measures_once_unless_it_is_forced(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    table = tuning.tune(1e-9)

    def tune(seconds: float, progress: Any) -> SpeedTable:
        calls.append(seconds)
        return table

    monkeypatch.setattr(tuning, "tune", tune)
    assert fedstrata("machine", "tune") == 0
    assert "written" in capsys.readouterr().out
    before = table_path().read_bytes()
    assert fedstrata("machine", "tune") == 0
    assert f"measured on {table.measured} already; --force" in " ".join(capsys.readouterr().out.split())
    assert calls == [60]
    assert fedstrata("machine", "tune", "--force", "--seconds", 5) == 0
    assert calls == [60, 5]
    assert table_path().read_bytes() == before
    table_path().write_text("{")
    assert fedstrata("machine", "tune") == 0
    assert calls == [60, 5, 60]
    assert table_path().read_bytes() == before


def test_a_damaged_table_is_told(capsys: Capture) -> None:
    table_path().parent.mkdir()
    table_path().write_text("{")
    assert "is damaged" in answer(capsys, "show")["note"]
    assert fedstrata("machine", "show") == 0
    assert "note: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seconds", "-1"], "-1.0 is not in the range"),
        (["--seconds", "0"], "0.0 is not in the range"),
        (["--seconds", "soon"], "'soon' is not a valid float"),
        (["--seconds", "nan"], "seconds = nan does not fit"),
    ],
)
def test_a_time_that_is_none(words: list[str], says: str, capsys: Capture) -> None:
    assert fedstrata("machine", "tune", *words) == 2
    assert says in one_sentence(capsys)
    assert not table_path().exists()


def never(*about: object) -> None:
    raise AssertionError("nothing is measured that cannot be written")


def test_a_cache_that_cannot_be_written(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    """Which is found out before anything is measured."""
    monkeypatch.setattr(machine, "_measure", never)
    cache.write_text("a file")
    assert fedstrata("machine", "tune") == 2
    assert f"cannot write {table_path()}: file exists" in one_sentence(capsys)
    monkeypatch.setenv("FEDSTRATA_CACHE", "/proc/cache")
    assert fedstrata("machine", "tune") == 2
    assert "cannot write /proc/cache/speed-" in one_sentence(capsys)


def test_no_place_for_a_cache(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_measure", never)
    monkeypatch.delenv("FEDSTRATA_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert fedstrata("machine", "tune") == 2
    assert "there is no home directory" in one_sentence(capsys)
    assert fedstrata("machine", "show") == 0


def test_a_disk_that_is_full(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there stays."""
    assert fedstrata("machine", "tune", "--seconds", 0.1) == 0
    capsys.readouterr()
    before, table = table_path().read_bytes(), tuning.tune(1e-9)
    monkeypatch.setattr(machine, "_measure", lambda seconds: table)
    with full_disk(50):
        assert fedstrata("machine", "tune", "--force") == 2
    assert "cannot write" in one_sentence(capsys)
    assert table_path().read_bytes() == before
    assert not strays(table_path().parent)
