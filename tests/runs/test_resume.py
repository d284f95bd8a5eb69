"""Kill, stop, damage, resume: the result has the same bits as a run that was left alone."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedstrata as fs
from fedstrata.run import open_run, resume_run
from fedstrata.runs import checkpoint
from fedstrata.runs.records import Record
from tests.runs.moments import contents, put, snapshots
from tests.small_runs import (
    LONG,
    config,
    edit,
    fedstrata,
    metrics,
    one_sentence,
    options,
    process,
    rounds_written,
    same,
    sentence,
    settle,
    shorten,
    strays,
)
from tests.warm import Warm, warm


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run, never stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    open_run(config(), out).fit()
    return out


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run with as many rounds as it takes until an old checkpoint is removed."""
    out = tmp_path_factory.mktemp("short") / "run"
    open_run(config(rounds=3), out).fit()
    return out


# --- every moment ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 1e6], ids=["checkpoint every round", "one checkpoint at the end"])
def test_a_kill_between_any_two_changes_of_the_disk(tmp_path: Path, short: Path, seconds: float) -> None:
    settings = config(rounds=3, checkpoint_seconds=seconds, workers=1)  # workers write nothing
    with snapshots(tmp_path / "run") as taken:
        open_run(settings, tmp_path / "run").fit()
    assert same(tmp_path / "run", short)
    assert len(taken) > (20 if seconds == 0 else 12), len(taken)
    assert any(name.endswith(".tmp") for files in taken for name in files)
    restarted = 0
    for moment, files in enumerate(taken):
        killed = put(files, tmp_path / str(moment))
        if (killed / "run.toml").exists():
            resume_run(killed).fit()
        else:  # killed before there was a run: the same command starts it
            open_run(settings, killed).fit()
            restarted += 1
        assert same(killed, short), f"killed at moment {moment}: {sorted(files)}"
    assert 0 < restarted < len(taken) / 2


def test_it_may_go_on_in_another_way_and_be_measured(tmp_path: Path, whole: Path) -> None:
    """What does not decide about the result is an option of `resume`, and changes nothing in the result."""
    rounds = open_run(config(), tmp_path / "run").rounds()
    next(rounds)
    rounds.close()
    del rounds
    changed = ("--engine", "processes", "--workers", 2, "--checkpoint-seconds", 5, "--probe", "divergence")
    assert fedstrata("resume", tmp_path / "run", *changed, "--quiet", "--no-report") == 0
    assert same(tmp_path / "run", whole)
    probes = (tmp_path / "run" / "probes.jsonl").read_text()
    assert [json.loads(line)["round"] for line in probes.splitlines()] == [2, 3, 4]


def test_a_checkpoint_older_than_the_metrics(tmp_path: Path, whole: Path) -> None:
    federation = open_run(config(checkpoint_seconds=1e6), tmp_path / "run")

    def hear(record: Record) -> None:
        if record.round == 1:
            federation.save()
        if record.round == 3:
            shutil.copytree(tmp_path / "run", tmp_path / "killed")

    federation.fit(hear)
    assert len(metrics(tmp_path / "killed")) == 3
    assert [p.name for p in checkpoint.paths(tmp_path / "killed" / "checkpoints")] == ["round-000001.checkpoint"]
    resumed = resume_run(tmp_path / "killed")
    assert resumed.state.round == len(resumed.records) == len(metrics(tmp_path / "killed")) == 1
    resumed.fit()
    assert same(tmp_path / "killed", whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "wire", "schedule": "cosine"},
        {"eval_clients": True, "eval_every": 3},
        {"method": "fedavg", "buffers": "average", "optimizer": "adam", "lr": 0.01, "steps": 3},
        {"method": "fedavg", "buffers": "drop", "participation": 1.0, "clip": 1.0},
        {"target": 0.3, "stop_at_target": True},
    ],
    ids=str,
)
def test_stopped_in_every_round(tmp_path: Path, changes: dict[str, Any]) -> None:
    """With other settings than the small run's: one round, and the rest later, by another Federation."""
    open_run(config(**changes), tmp_path / "reference").fit()
    next(open_run(config(**changes), tmp_path / "run").rounds())
    while not (resumed := resume_run(tmp_path / "run")).done:
        next(resumed.rounds())
    resumed.fit()
    assert same(tmp_path / "run", tmp_path / "reference")


# --- real processes --------------------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool], child: subprocess.Popen[str] | Warm) -> None:
    """Wait until something is so, or the process has ended."""
    limit = time.monotonic() + LONG
    while not condition() and child.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.0005)


def same_but_for_length(run: Path, reference: Path) -> bool:
    """True if weights and metrics are the same; messages tell the number of rounds, which was another at first."""
    models = [(path / "model.safetensors").read_bytes() for path in (run, reference)]
    rows, expected = ([row | {"bytes_down": 0} for row in metrics(path)] for path in (run, reference))
    return models[0] == models[1] and rows == expected


@pytest.mark.slow
def test_kill_9_five_times(tmp_path: Path) -> None:
    """None of the moments can come too late: the run has no end until it was killed for the last time."""
    run, endless = tmp_path / "run", options(rounds=100_000)

    def writing(directory: Path, after: int) -> bool:
        """True while a file is being written there, or when none was caught at it for five rounds."""
        done = rounds_written(run)
        return done >= after and (done >= after + 5 or any(directory.glob(".*.tmp")))

    delays = random.Random(7)
    moments: list[Callable[[], bool]] = [
        lambda: run.exists(),  # while the run's directory is being made
        lambda: rounds_written(run) >= 2,
        lambda: writing(run / "memory", 4),
        lambda: writing(run / "checkpoints", 7),
        lambda: rounds_written(run) >= 11,
    ]
    for number, moment in enumerate(moments):
        began = (run / "run.toml").exists()
        arguments = ["resume", run] if began else ["run", "--out", run, *endless]
        child = warm(*arguments, "--quiet", cwd=tmp_path)
        wait_for(moment, child)
        if number in (1, 4):
            time.sleep(delays.uniform(0, 0.05))
        assert child.poll() is None, (number, child.communicate())
        child.kill()
        child.communicate()
        assert not (run / "summary.json").exists()
    last = rounds_written(run) + 3
    shorten(run, last)
    child = warm("resume", run, "--quiet", cwd=tmp_path)
    printed, error = child.communicate(timeout=LONG)
    assert (child.returncode, error) == (0, "")
    assert printed.startswith("accuracy ")
    assert printed.count("\n") == 1
    open_run(config(rounds=last), tmp_path / "reference").fit()
    assert not strays(run)
    assert same_but_for_length(run, tmp_path / "reference")


@pytest.mark.slow
def test_ctrl_c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "my run"
    child = process("run", "--out", run, *options(rounds=100_000, checkpoint_seconds=1e6), cwd=tmp_path)
    wait_for(lambda: rounds_written(run) >= 2, child)
    child.send_signal(signal.SIGINT)
    printed, error = child.communicate(timeout=LONG)
    assert child.returncode == 130
    assert "round 1/100000  accuracy" in printed
    said = re.fullmatch(rf"stopped after round (\d+); go on with: fedstrata resume '{run}'", sentence(error))
    assert said
    done = int(said[1])
    assert not strays(run)
    assert resume_run(run).state.round == done == len(metrics(run))
    assert done >= 1  # the second round's line was there, but perhaps not yet its state
    shorten(run, done + 1)
    capsys.readouterr()
    assert fedstrata("resume", run) == 0
    assert re.search(rf"resumed +after round {done} ", capsys.readouterr().out)
    reference = tmp_path / "reference"
    open_run(config(rounds=done + 1, checkpoint_seconds=1e6), reference).fit()
    assert same_but_for_length(run, reference)


@pytest.mark.slow
def test_an_interrupt_at_any_place_of_a_round_leaves_a_run_that_goes_on(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in training, in evaluation, while memory is put away and while the metrics are written."""
    places = ["fedstrata.engines.grouping.train_client", "fedstrata.engines.serial.evaluate"]
    places += [
        "fedstrata.runs.client_memory.write_sealed",
        "fedstrata.runs.directory.append_line",
        "fedstrata.runs.checkpoint.write_sealed",
    ]
    for number, place in enumerate(places):
        module, _, name = place.rpartition(".")
        inside = getattr(sys.modules[module], name)
        calls = 0

        def interrupted(*args: Any, inside: Callable[..., Any] = inside, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt
            return inside(*args, **kwargs)

        run = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(place, interrupted)
            assert fedstrata("run", "--out", run, *options(), "--workers", 1, "--quiet") == 130, place
        assert not strays(run)
        assert fedstrata("resume", run, "--quiet") == 0
        assert same(run, whole), place


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, place: float) -> None:
    """Change one bit of a file, `place` of the way through."""
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "first byte": lambda p: flip(p, 0),
    "seal": lambda p: flip(p, 0.001),
    "middle byte": lambda p: flip(p, 0.5),
    "last byte": lambda p: flip(p, 1),
    "cut": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "cut in half": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "grown": lambda p: p.write_bytes(p.read_bytes() + b"\0"),
    "empty": lambda p: p.write_bytes(b""),
    "another file": lambda p: p.write_text("hello\n"),
    "missing": lambda p: p.unlink(),
}


def stopped(whole: Path, to: Path) -> Path:
    """A copy of the small run as it was before it wrote its model."""
    shutil.copytree(whole, to)
    (to / "model.safetensors").unlink()
    (to / "summary.json").unlink()
    return to


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint(tmp_path: Path, whole: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = stopped(whole, tmp_path / "run")
    newest, _ = checkpoint.paths(run / "checkpoints")
    DAMAGE[damage](newest)
    assert resume_run(run).state.round == 3  # the damaged file is gone now, and so is its round
    assert not newest.exists()
    run = stopped(whole, tmp_path / "again")
    newest, _ = checkpoint.paths(run / "checkpoints")
    DAMAGE[damage](newest)
    assert fedstrata("resume", run, "--quiet") == 0
    assert same(run, whole)
    error = capsys.readouterr().err
    noted = json.loads((run / "summary.json").read_text())["notes"]
    if damage == "missing":
        assert (error, noted) == ("", [])
    else:
        assert len(noted) == 1
        assert newest.name in noted[0]
        assert "damaged" in noted[0]
        assert newest.name in sentence(error)


@pytest.mark.parametrize("damage", ["middle byte", "missing"])
def test_all_checkpoints_damaged(tmp_path: Path, whole: Path, damage: str) -> None:
    run = stopped(whole, tmp_path / "run")
    for path in checkpoint.paths(run / "checkpoints"):
        DAMAGE[damage](path)
    resumed = resume_run(run)
    assert resumed.state.round == 0
    assert resumed.records == []
    resumed.fit()
    assert same(run, whole)


def test_the_whole_folder_of_checkpoints_missing(tmp_path: Path, whole: Path) -> None:
    run = stopped(whole, tmp_path / "run")
    for name in ("checkpoints", "memory"):
        shutil.rmtree(run / name)
    for name in ("metrics.jsonl", "versions.json"):
        (run / name).unlink()
    resume_run(run).fit()
    assert same(run, whole)
    assert "torch" in json.loads((run / "versions.json").read_text())


@pytest.fixture(scope="module")
def everybody(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that has a round left, in which every client takes part; and the same when it is finished."""
    home = tmp_path_factory.mktemp("everybody")
    open_run(config(rounds=2, participation=1.0), home / "run").fit()
    shorten(home / "run", 3)
    open_run(config(rounds=3, participation=1.0), home / "reference").fit()
    return home / "run", home / "reference"


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["middle byte", "cut", "empty", "missing"])
def test_a_damaged_memory_is_an_error_not_a_wrong_result(
    tmp_path: Path, everybody: tuple[Path, Path], damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(everybody[0], tmp_path / "run")
    DAMAGE[damage](run / "memory" / "3-1.memory")
    assert fedstrata("resume", run, "--quiet") == 2
    said = one_sentence(capsys)
    assert "3-1.memory" in said
    assert "client 3" in said
    assert str(run / "checkpoints") in said
    assert len(metrics(run)) == 2
    assert not strays(run)
    shutil.rmtree(run / "checkpoints")  # what the sentence advises
    assert fedstrata("resume", run, "--quiet") == 0
    assert same(run, everybody[1])


@pytest.mark.parametrize(
    "edit",
    [
        lambda rows: rows[:-1],
        lambda rows: [*rows[:1], b"not json", *rows[2:]],
        lambda rows: [*rows[:1], b"5", *rows[2:]],
        lambda rows: [*rows[:1], b"\xff\xfe", *rows[2:]],
        lambda rows: [rows[1], rows[0], *rows[2:]],
        lambda rows: [*rows[:1], *rows[2:], rows[0]],
        lambda rows: [],
    ],
    ids=["a line gone", "no JSON", "a number", "no text", "swapped", "moved", "emptied"],
)
def test_edited_metrics(
    tmp_path: Path, whole: Path, edit: Callable[[list[bytes]], list[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped(whole, tmp_path / "run")
    rows = (run / "metrics.jsonl").read_bytes().splitlines()
    (run / "metrics.jsonl").write_bytes(b"".join(row + b"\n" for row in edit(rows)))
    assert fedstrata("resume", run) == 2
    assert "metrics.jsonl" in one_sentence(capsys)


def test_a_line_without_its_end_is_mended(tmp_path: Path, whole: Path) -> None:
    run = stopped(whole, tmp_path / "run")
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.removesuffix("\n"))
    resume_run(run).fit()
    assert (run / "metrics.jsonl").read_text() == text


# --- an edited run.toml ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("lr", 0.2, "lr was 0.1, is 0.2"),
        ("rounds", 5, "rounds was 4, is 5"),
        ("participation", 1, "participation was 0.4, is 1"),
        ("seed", 3, "seed was 0, is 3"),
        ("method", '"fedprox"', "method was \"fedavg(buffers='local')\", is 'fedprox'"),
    ],
)
def test_a_setting_that_decides(
    tmp_path: Path, whole: Path, name: str, value: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused by every way to go on from the checkpoint, and nothing changes on the disk."""
    run = stopped(whole, tmp_path / "run")
    edit(run, name, value)
    before = contents(run)
    assert fedstrata("resume", run) == 2
    found = one_sentence(capsys)
    assert found.startswith(f"{run}/run.toml was edited after the run began: {said}")
    assert found.endswith("; put it back, or start a new run")
    assert fedstrata("diagnose", run) == 2
    assert said in capsys.readouterr().err
    assert contents(run) == before


def test_several_settings_and_one_that_was_not_set(tmp_path: Path, whole: Path) -> None:
    run = stopped(whole, tmp_path / "run")
    edit(run, "lr", "0.2\nclip = 1.0")
    with pytest.raises(fs.UsageError, match=r"began: lr was 0\.1, is 0\.2, clip was not set, is 1\.0; put it back"):
        resume_run(run)


def test_a_setting_that_does_not_decide(tmp_path: Path, whole: Path) -> None:
    run = stopped(whole, tmp_path / "run")
    edit(run, "checkpoint_seconds", 7.0)
    edit(run, "probe_every", 2)
    (run / "run.toml").write_text("# a remark\n" + (run / "run.toml").read_text())
    resume_run(run).fit()
    assert same(run, whole)


def test_a_checkpoint_that_does_not_tell_its_settings(tmp_path: Path, whole: Path) -> None:
    """As older versions wrote them: it goes on, and a note says what could not be looked at."""
    run = stopped(whole, tmp_path / "run")
    for path in checkpoint.paths(run / "checkpoints"):
        checkpoint.save(path.parent, checkpoint.load(path))
        assert checkpoint.settings(path) is None
    resumed = resume_run(run)
    assert any("it cannot be told whether run.toml was edited" in note for note in resumed.notes)
    resumed.fit()
    assert same(run, whole)


def test_an_edit_before_the_first_checkpoint_begins_anew(tmp_path: Path, whole: Path) -> None:
    """There is nothing to be unlike, and what is written of the run is what it is now."""
    run = stopped(whole, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    edit(run, "model", '"cnn2(width=2)"')
    resume_run(run).fit()
    open_run(config(model="cnn2(width=2)"), tmp_path / "reference").fit()
    assert same(run, tmp_path / "reference")
    assert (run / "facts.json").read_text() == (tmp_path / "reference" / "facts.json").read_text()


def test_an_edit_of_a_run_made_in_python(tmp_path: Path) -> None:
    clients = [(torch.ones(8, 4), torch.arange(8) % 2) for _ in range(2)]
    run, model = tmp_path / "run", nn.Linear(4, 2)
    fs.Federation(model, clients, rounds=2, lr=0.1, out=run).fit()
    fs.Federation(model, clients, rounds=2, lr=0.1, out=run, resume=True).fit()
    edit(run, "lr", 0.2)
    with pytest.raises(fs.UsageError, match=r"was edited after the run began: lr was 0\.1, is 0\.2"):
        fs.Federation(model, clients, rounds=2, lr=0.2, out=run, resume=True)


# --- what else resuming must do --------------------------------------------------------------------------------------


def test_resume_of_a_finished_run_changes_nothing(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    before = contents(run)
    assert fedstrata("resume", run, "--quiet", "--no-report") == 0
    assert contents(run) == before
    assert "after 4 rounds" in capsys.readouterr().out
    assert fedstrata("resume", run, "--quiet") == 0
    assert contents(run).keys() - before.keys() == {"report.html"}


@pytest.mark.slow
def test_two_processes_cannot_share_a_run(tmp_path: Path, whole: Path) -> None:
    run = stopped(whole, tmp_path / "run")
    federation = resume_run(run)
    assert resume_run(run).state.round == federation.state.round  # in one process they can
    before = contents(run)
    child = warm("resume", run, cwd=tmp_path)
    _, error = child.communicate(timeout=LONG)
    assert child.returncode == 2
    assert sentence(error) == f"another process is at work in {run}"
    assert contents(run) == before


def test_a_run_made_in_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clients = [(torch.randn(8, 4), torch.arange(8) % 2) for _ in range(2)]
    fs.Federation(nn.Linear(4, 2), clients, rounds=1, out=tmp_path / "run").fit()
    assert fedstrata("resume", tmp_path / "run") == 2
    assert "was run from Python" in one_sentence(capsys)


@pytest.mark.parametrize("place", ["nothing", "a file", "an empty folder", "another folder", "an emptied run"])
def test_what_is_no_run(tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    if place == "a file":
        run.write_text("hello")
    elif place != "nothing":
        run.mkdir()
    if place == "another folder":
        (run / "letter.txt").write_text("hello")
    if place == "an emptied run":
        (run / "run.toml").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert fedstrata("resume", run) == 2
    assert "run.toml" in one_sentence(capsys)
    assert sorted(tmp_path.rglob("*")) == before


def test_divergence_keeps_the_last_good_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    open_run(config(rounds=2, checkpoint_seconds=1e6), run).fit()
    (run / "model.safetensors").unlink()
    edit(run, "lr", 1e20)
    settle(run, lr=1e20)
    shorten(run, 5)
    good = checkpoint.paths(run / "checkpoints")[0].read_bytes()
    for _ in range(2):  # the same bits diverge again
        assert fedstrata("resume", run, "--quiet") == 1
        assert one_sentence(capsys).startswith("training diverged in round 3: ")
        (path,) = checkpoint.paths(run / "checkpoints")
        assert path.read_bytes() == good
        assert checkpoint.load(path).round == len(metrics(run)) == 2
        assert load_file(run / "model.safetensors").keys() >= checkpoint.load(path).params.keys()  # the last good one
        assert not strays(run)


def test_divergence_in_the_first_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fedstrata("run", "--out", tmp_path / "run", *options(lr=1e20), "--json") == 1
    assert one_sentence(capsys).startswith("training diverged in round 1: ")
    assert checkpoint.load(checkpoint.paths(tmp_path / "run" / "checkpoints")[0]).round == 0


def test_another_processor_is_noted(whole: Path, tmp_path: Path) -> None:
    """Its kernels round differently, so the result may be another than where the run began."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    about = json.loads((run / "versions.json").read_text())
    assert torch.backends.cpu.get_cpu_capability() in about["processor"]
    assert not resume_run(run).notes
    now, about["processor"] = about["processor"], "Abacus 1, DEFAULT"
    (run / "versions.json").write_text(json.dumps(about))
    assert f"begun with processor Abacus 1, DEFAULT, now {now}: the last bits may differ" in resume_run(run).notes


def test_another_version_is_noted(whole: Path, tmp_path: Path) -> None:
    """What a technique computes may have changed since."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    about = json.loads((run / "versions.json").read_text())
    (run / "versions.json").write_text(json.dumps({**about, "fedstrata": "0.1.0"}))
    noted = f"begun with fedstrata 0.1.0, now {fs.__version__}: the last bits may differ"
    assert noted in resume_run(run).notes
