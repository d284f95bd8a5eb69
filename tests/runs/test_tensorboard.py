"""TensorBoard's own reader reads what `--tensorboard` wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.small_runs import fedstrata, metrics, one_sentence, options, shorten

pytest.importorskip("tensorboard")

NAMES = {"accuracy/test": "accuracy", "loss/test": "loss", "loss/train": "train_loss", "cost/bytes_up": "bytes_up"}
NAMES |= {"balanced_accuracy/test": "balanced_accuracy", "f1/test": "f1"}
NAMES |= {"cost/bytes_down": "bytes_down", "cost/flops": "flops", "round/lr": "lr"}


def read(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of a run: its (step, value) pairs."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def agree(run: Path) -> None:
    found = read(run)
    rows = [{**row, **{name: row["metrics"].get(name) for name in ("balanced_accuracy", "f1")}} for row in metrics(run)]
    assert found.keys() == {*NAMES, "cost/seconds", "round/refused"}
    for tag, name in NAMES.items():
        wanted = [(row["round"], row[name]) for row in rows if row[name] is not None]
        assert [step for step, _ in found[tag]] == [step for step, _ in wanted], tag
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in wanted], rel=1e-6), tag
    assert [value for _, value in found["round/refused"]] == [0.0] * len(rows)


def test_events_are_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    arguments = options(eval_every=2, rounds=3)
    assert fedstrata("run", "--out", run, *arguments, "--json", "--tensorboard") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["rounds"] == 3
    assert printed.err == ""
    agree(run)
    assert [step for step, _ in read(run)["accuracy/test"]] == [2, 3]


def test_rounds_that_are_done_again_show_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert fedstrata("run", "--out", run, *options(rounds=4), "--quiet", "--tensorboard") == 0
    (run / "checkpoints" / "round-000004.checkpoint").unlink()
    shorten(run, 6)
    assert fedstrata("resume", run, "--quiet", "--tensorboard") == 0
    assert len(metrics(run)) == 6
    agree(run)


def test_without_the_extra_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert fedstrata("run", "--out", tmp_path / "run", *options(), "--tensorboard") == 2
    assert (
        one_sentence(capsys) == "TensorBoard events need the package tensorboard: pip install 'fedstrata[tensorboard]'"
    )
    assert list(tmp_path.iterdir()) == []
