"""The README's promises: its snippet runs and is short, its commands are understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fedstrata.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_snippet(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(code.strip().splitlines()) <= 12
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert len(names["history"].records) == 5  # type: ignore[attr-defined]
    assert "head" in capsys.readouterr().out


def test_the_two_commands_come_first() -> None:
    (first, *_) = re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)
    assert "make demo" in first
    assert "make test" in first


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every `fedstrata` line of the README, in an empty folder; runs are cut short, and nothing is downloaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedstrata.data.fetch.fetch", lambda name, where, **settings: [])
    text = "\n".join(re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True)[2:] for line in text.splitlines() if line.startswith("$ fedstrata")]
    assert len(lines) >= 6
    for line in lines:
        if line[0] in ("run", "compare"):
            line += ["--rounds", "2", "--steps", "1"]
        assert main._run_guarded(line, debug=True) == 0, line
    assert (tmp_path / "runs/wider/model.safetensors").exists()
    assert 'model = "cnn2(width=32)"' in (tmp_path / "runs/wider/run.toml").read_text()
    assert (tmp_path / "partition.png").exists()
    assert len(list((tmp_path / "runs/compare").glob("*/summary.json"))) == 9
    assert "gap" in capsys.readouterr().out
