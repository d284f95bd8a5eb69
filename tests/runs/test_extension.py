"""More rounds than a run was first asked for: the bits of asking for all at once, or a note; and never half done."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import fedstrata as fs
from fedstrata.federation import Federation
from fedstrata.run import open_run, resume_run
from fedstrata.runs import checkpoint, rollback
from fedstrata.runs.directory import RunDirectory
from fedstrata.runs.extension import Step, extension_notes, read_steps, write_steps
from fedstrata.runs.reader import SavedRun
from fedstrata.techniques import method
from tests.runs.moments import contents, put, snapshots
from tests.small_runs import config, fedstrata, full_disk, metrics, one_sentence, same, strays

Capture = pytest.CaptureFixture[str]


def run(out: Path, **changes: Any) -> Path:
    open_run(config(**changes), out).fit()
    return out


def extend(out: Path, rounds: int, **changes: Any) -> Federation:
    federation = resume_run(out, rounds=rounds, **changes)
    federation.fit()
    return federation


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("four") / "run")


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("six") / "run", rounds=6)


TUNED = {"method": "finetune(epochs=1)", "rounds": 2}
"""A run that finishes with a round after the last one, in which all clients remember something."""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("tuned") / "run", **TUNED)


# --- the same bits ---------------------------------------------------------------------------------------------------


def test_a_finished_run_goes_on(tmp_path: Path, four: Path, six: Path, capsys: Capture) -> None:
    longer = shutil.copytree(four, tmp_path / "run")
    assert fedstrata("resume", longer, "--rounds", 6, "--quiet", "--no-report") == 0
    printed = capsys.readouterr()
    assert "after 6 rounds" in printed.out
    assert printed.err == ""
    assert same(longer, six)
    saved = SavedRun.read(longer)
    assert (saved.config["rounds"], len(saved.records), saved.summary["notes"]) == (6, 6, [])
    assert saved.versions["extended"] == "4 of 4"
    assert (longer / "run.toml").read_text() == (six / "run.toml").read_text()
    assert contents(longer).keys() == contents(six).keys()


def test_again_and_again(tmp_path: Path, six: Path) -> None:
    longer = run(tmp_path / "run", rounds=1)
    for rounds in (2, 5, 6):
        assert extend(longer, rounds).notes == ()
    assert same(longer, six)
    assert read_steps(RunDirectory(longer).versions()) == (Step(1, 1), Step(2, 2), Step(5, 5))


def test_a_run_that_has_not_ended(tmp_path: Path, six: Path) -> None:
    federation = open_run(config(), tmp_path / "run")
    rounds = federation.rounds()
    next(rounds), next(rounds)
    rounds.close()
    extend(tmp_path / "run", 6)
    assert same(tmp_path / "run", six)
    assert RunDirectory(tmp_path / "run").versions()["extended"] == "2 of 4"


def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path, four: Path, six: Path) -> None:
    longer = shutil.copytree(four, tmp_path / "run")
    shutil.rmtree(longer / "checkpoints")
    extend(longer, 6)
    assert same(longer, six)
    assert "extended" not in RunDirectory(longer).versions()


def test_an_extended_run_is_resumed_like_any_other(tmp_path: Path, four: Path, six: Path) -> None:
    longer = shutil.copytree(four, tmp_path / "run")
    rounds = resume_run(longer, rounds=6).rounds()
    next(rounds)
    rounds.close()
    assert len(metrics(longer)) == 5
    assert not (longer / "summary.json").exists()
    resume_run(longer).fit()
    assert same(longer, six)


def test_what_techniques_finished_is_finished_anew(tmp_path: Path, tuned: Path) -> None:
    """The last round, in which clients tuned the model, is taken back, with what they remember of it."""
    longer, whole = shutil.copytree(tuned, tmp_path / "run"), open_run(config(**{**TUNED, "rounds": 4}), tmp_path / "x")
    whole.fit()
    found = extend(longer, 4)
    assert found.notes == whole.notes
    assert same(longer, tmp_path / "x")
    for client in range(5):
        mine, other = found.memory(client), whole.memory(client)
        assert {n: {k: t.tolist() for k, t in s.items()} for n, s in mine.items()} == {
            n: {k: t.tolist() for k, t in s.items()} for n, s in other.items()
        }


def test_a_target_that_was_reached_ends_the_longer_run_too(tmp_path: Path) -> None:
    reached = {"target": 0.01, "stop_at_target": True}
    longer = run(tmp_path / "run", **reached)
    assert len(metrics(longer)) == 1
    extend(longer, 6)
    assert same(longer, run(tmp_path / "x", rounds=6, **reached))
    assert not (longer / ".before").exists()


def test_a_run_of_ones_own(tmp_path: Path) -> None:
    """From Python, with the rounds that it is to have."""
    import torch
    from torch import nn

    clients = [(torch.randn(8, 4), torch.arange(8) % 2) for _ in range(2)]
    model = nn.Linear(4, 2)
    fs.Federation(model, clients, rounds=2, out=tmp_path / "run").fit()
    found = fs.Federation(model, clients, rounds=5, out=tmp_path / "run", resume=True).fit()
    whole = fs.Federation(model, clients, rounds=5).fit()
    assert len(found.records) == 5
    for mine, other in zip(found.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)


# --- what goes by the number of rounds -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "step(every=2, factor=0.5)", "exponential(factor=0.9)"])
def test_schedules_that_do_not_look_at_it(schedule: str, tmp_path: Path) -> None:
    longer = run(tmp_path / "run", rounds=2, schedule=schedule)
    assert extend(longer, 4).notes == ()
    assert same(longer, run(tmp_path / "x", rounds=4, schedule=schedule))


def test_a_schedule_that_does(tmp_path: Path, capsys: Capture) -> None:
    """The note stays: in the summary, and whenever the run goes on."""
    longer = run(tmp_path / "run", rounds=2, schedule="cosine")
    note = (
        "extended from 2 rounds to 4: the result is not that of 4 at once, for the schedule cosine goes by the number "
        "of rounds"
    )
    federation = resume_run(longer, rounds=4)
    assert federation.notes == (note,)
    rounds = federation.rounds()
    next(rounds)
    rounds.close()
    assert fedstrata("resume", longer, "--quiet", "--no-report") == 0
    assert f"note: {note}" in capsys.readouterr().err
    assert SavedRun.read(longer).summary["notes"] == [note]
    assert not same(longer, run(tmp_path / "x", rounds=4, schedule="cosine"))


def test_a_technique_that_does() -> None:
    settings = {"rounds": 6, "schedule": "constant", "engine": "serial", "eval_every": 1}
    ramp = extension_notes([Step(2, 4)], settings, method("fedimpro(weight='ramp')"))
    assert len(ramp) == 1
    assert "fedimpro goes by it: weight='ramp' grows over the whole run" in ramp[0]
    assert extension_notes([Step(2, 4)], settings, method("fedimpro(weight=0.5)")) == ()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"eval_every": 3}, "extended from 4 rounds to 6: round 4 was evaluated because it was the last one"),
        ({"eval_every": 2, "probe": "divergence", "probe_every": 3}, "round 4 was measured because it was the last"),
        ({"dp_noise": 1.0}, "what was promised of privacy holds for 4 rounds; more rounds reveal more"),
        ({"fleet": "phone*6", "rounds": 12}, "messages name the number of rounds"),
        ({"fleet": "phone*6"}, ""),
        ({"eval_every": 4}, ""),
    ],
)
def test_what_else_a_reader_is_told(given: dict[str, Any], told: str) -> None:
    settings = {"rounds": 6, "schedule": "constant", "eval_every": 1, **given}
    notes = extension_notes([Step(4, 4)], settings, method("fedavg"))
    assert (told in notes[0]) if told else notes == ()
    if "messages" not in told and "privacy" not in told:
        assert extension_notes([Step(2, 4)], settings, method("fedavg")) == ()


def test_a_round_that_was_evaluated_as_the_last(tmp_path: Path) -> None:
    longer = run(tmp_path / "run", rounds=2, eval_every=3)
    (note,) = extend(longer, 4).notes
    assert "round 2 was evaluated" in note
    whole = run(tmp_path / "x", rounds=4, eval_every=3)
    assert (longer / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert [row["loss"] is None for row in metrics(longer)] == [True, False, False, False]
    assert [row["loss"] is None for row in metrics(whole)] == [True, True, False, False]


def test_steps_are_read_as_they_are_written() -> None:
    steps = (Step(3, 4), Step(9, 12))
    assert read_steps(write_steps(steps)) == steps
    assert write_steps(()) == {}
    assert read_steps({"extended": "whatever"}) == read_steps({}) == ()


# --- what is refused -------------------------------------------------------------------------------------------------


def test_fewer_rounds(tmp_path: Path, four: Path, capsys: Capture) -> None:
    shorter = shutil.copytree(four, tmp_path / "run")
    before = contents(shorter)
    assert fedstrata("resume", shorter, "--rounds", 3) == 2
    told = one_sentence(capsys)
    assert told == f"{shorter} was run with rounds = 4, not 3: rounds can be added, and none taken away"
    assert fedstrata("resume", shorter, "--rounds", 0) == 2
    assert contents(shorter) == before


def test_other_settings_beside(tmp_path: Path, four: Path) -> None:
    longer = shutil.copytree(four, tmp_path / "run")
    before = contents(longer)
    with pytest.raises(fs.UsageError, match=r"was run with lr = 0\.1, not 0\.2"):
        resume_run(longer, rounds=6, lr=0.2)
    assert contents(longer) == before


def test_a_finished_run_that_kept_no_state_from_before_its_end(tmp_path: Path, tuned: Path, capsys: Capture) -> None:
    """As older versions left them."""
    longer = shutil.copytree(tuned, tmp_path / "run")
    last, *others = checkpoint.paths(longer / "checkpoints")
    assert checkpoint.number(last) == TUNED["rounds"] + 1
    for path in others:
        path.unlink()
    before = contents(longer)
    assert fedstrata("resume", longer, "--rounds", 4) == 2
    assert "no checkpoint from before its method finished the run" in one_sentence(capsys)
    assert contents(longer) == before


# --- nothing half done -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("boom"), fs.Diverged("it diverged"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("which", ["four", "tuned"])
def test_a_first_round_that_fails_leaves_the_run_as_it_was(
    which: str, error: BaseException, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = shutil.copytree(request.getfixturevalue(which), tmp_path / "run")
    before = contents(longer)
    federation = resume_run(longer, rounds=6)
    assert contents(longer) == before

    def fail(closed: Any) -> None:
        """All clients have trained, and what they remember is written."""
        if which == "tuned":  # in the place of what they remembered of the round in which they tuned the model
            now = contents(longer)
            assert any(now.get(name) != data for name, data in before.items() if name.startswith("memory/"))
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(federation._around, "close", fail)
        with pytest.raises(type(error)):
            federation.fit()
    assert contents(longer) == before
    federation.fit()
    assert SavedRun.read(longer).config["rounds"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("which", ["four", "tuned"])
def test_a_kill_between_any_two_changes_of_the_disk(which: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The command that was killed goes on to the same bits; the old number of rounds gives the old run back."""
    start = shutil.copytree(request.getfixturevalue(which), tmp_path / "run")
    planned, before = SavedRun.read(start).config["rounds"], contents(start)
    rounds, alone = planned + 1, {"workers": 1}  # workers write nothing
    whole = run(tmp_path / "whole", **{**(TUNED if which == "tuned" else {}), **alone, "rounds": rounds})
    with snapshots(start) as taken:
        extend(start, rounds, **alone)
    assert same(start, whole)
    undone = 0
    for moment, files in enumerate(taken):
        killed = put(files, tmp_path / str(moment))
        other = shutil.copytree(killed, tmp_path / f"{moment}-back")
        extend(killed, rounds, **alone)
        assert same(killed, whole), f"killed at moment {moment}: {sorted(files)}"
        assert not [path for path in killed.iterdir() if path.name.startswith(".before")]
        try:
            resume_run(other, rounds=planned, **alone).fit()
        except fs.UsageError as error:  # a round had come of it: it is a longer run by then
            assert "none taken away" in str(error)  # noqa: PT017
        else:
            undone += 1
            assert {n: d for n, d in contents(other).items() if not n.startswith(".before")} == before
    assert 3 < undone < len(taken)


def test_a_full_disk(tmp_path: Path, four: Path, capsys: Capture) -> None:
    """No file beyond the size of the largest that is copied: the round's files do not fit."""
    longer = shutil.copytree(four, tmp_path / "run")
    before = contents(longer)
    with full_disk((longer / "metrics.jsonl").stat().st_size // 2):
        assert fedstrata("resume", longer, "--rounds", 6, "--quiet") == 2
    told = capsys.readouterr().err
    assert "cannot write" in told
    assert {n: d for n, d in contents(longer).items() if not n.startswith(".before-unfinished")} == before
    extend(longer, 6)
    assert not strays(longer)
    assert not [path for path in longer.iterdir() if path.name.startswith(".before")]


def test_a_file_system_without_second_names(tmp_path: Path, four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*names: Any) -> None:
        raise OSError("not here")

    monkeypatch.setattr(os, "link", link)
    longer = shutil.copytree(four, tmp_path / "run")
    before = contents(longer)
    federation = resume_run(longer, rounds=6)
    monkeypatch.setattr(federation, "_rounds", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        federation.fit()
    assert contents(longer) == before


def test_restoring_twice_is_restoring_once(tmp_path: Path) -> None:
    """As after a kill in the middle of it: what is in its place already stays."""
    run = tmp_path / "run"
    put({"run.toml": b"a", "metrics.jsonl": b"1\n", "checkpoints/x": b"x"}, run)
    rollback.keep_files(run, ["run.toml"], ["metrics.jsonl"])
    (run / "run.toml").unlink()  # files are replaced, not changed
    (run / "checkpoints" / "x").unlink()
    put({"run.toml": b"b", "metrics.jsonl": b"1\n2\n", "checkpoints/y": b"y", "mine.txt": b"mine"}, run)
    shutil.copytree(run / ".before", tmp_path / "again")
    assert rollback.restore_kept(run)
    expected = {"run.toml": b"a", "metrics.jsonl": b"1\n", "checkpoints/x": b"x", "mine.txt": b"mine"}
    assert contents(run) == expected
    os.replace(tmp_path / "again", run / ".before")
    assert rollback.restore_kept(run)
    assert contents(run) == expected
    assert not rollback.restore_kept(run)


def test_the_command_that_goes_on(tmp_path: Path, four: Path) -> None:
    told = RunDirectory(four).resume_command
    assert told() == told(4) == f"fedstrata resume {four}"
    assert told(6) == f"fedstrata resume {four} --rounds 6"
