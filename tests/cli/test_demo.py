"""The demo: what it claims are the numbers of the runs that it has made."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from fedstrata.cli import demo
from fedstrata.errors import Stopped
from fedstrata.report.formatting import escape
from tests.docs.test_first_pages import understand
from tests.small_runs import fedstrata, one_sentence

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


SMALL_DEMO = {
    "model": "mlp(hidden=(8,))",
    "method": ["fedavg", "fedimpro(split=1)", "fedpart(full_rounds=1, rounds_per_stratum=1)"],
    "clients": 5,
    "rounds": 2,
    "epochs": 1,
    "seed": [0, 1],
    "probe_every": 2,
    "probe_examples": 32,
}


@pytest.mark.slow
def test_demo(monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path) -> None:
    """What it says are the numbers of its runs; asked again, it runs nothing; its last lines can be typed."""
    monkeypatch.setattr(demo, "DEMO", {**demo.DEMO, **SMALL_DEMO})
    assert fedstrata("demo", "--no-report") == 0
    told = capsys.readouterr().out
    assert told.count("after 2 rounds") == 3 * 2 + 3 * 2  # methods; control group, reference and remedy
    assert "the control group" in told
    commands = [shlex.split(line) for line in told.splitlines() if line.startswith("  fedstrata ")]
    assert [words[1] for words in commands] == ["diagnose", "compare", "run"]
    for words in commands:
        understand(words[1:])
    assert fedstrata(*commands[1][1 : commands[1].index("--seeds")], "--no-report") == 0  # the file says the same
    assert "6 of 6 runs already finished" in capsys.readouterr().out

    assert fedstrata("demo", "--out", "runs/demo", "--json") == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert "after 2 rounds" not in printed.err
    page = (tmp_path / "runs/demo/report.html").read_text()
    assert all(escape(line) in page for line in found["learnt"])
    scores = {row["method"]: {r["seed"]: r["score"] for r in row["runs"]} for row in found["rows"]}
    for line in found["learnt"][:2]:
        own, base = scores[line.partition(": ")[0]], scores["fedavg"]
        means = [sum(several.values()) / 2 for several in (own, base)]
        better = means[0] >= means[1]
        count = sum((own[seed] > base[seed]) if better else (own[seed] < base[seed]) for seed in base)
        assert f"{100 * means[0]:.2f} % against fedavg's {100 * means[1]:.2f} %" in line
        assert f"{'better' if better else 'worse'} with {count} of 2 seeds" in line
    (remedy,) = found["tried"]["remedies"]
    gains = [
        after - before for after, before in zip(remedy["scores"], found["tried"]["control"]["scores"], strict=True)
    ]
    assert f"{remedy['change']}: {50 * sum(gains):+.1f} points over the control group" in found["learnt"][-1]


def test_the_demo_does_not_write_over_a_run(tmp_path: Path, capsys: Capture) -> None:
    for name in ("run.toml", "file"):
        (tmp_path / name).touch()
    for out, what in ((tmp_path, "a run's directory"), (tmp_path / "file", "a file")):
        assert fedstrata("demo", "--out", out) == 2
        assert f"{out} is {what}" in one_sentence(capsys)


def test_a_demo_that_is_stopped_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Stopped("stopped with 0 of 9 runs finished; the same command goes on")

    monkeypatch.setattr("fedstrata.compare.run_missing", stop)
    assert fedstrata("demo") == Stopped.exit_code
    assert capsys.readouterr().err.endswith("go on with: fedstrata demo --out runs/demo\n")
