"""`fedstrata diagnose` and `Federation.diagnose`: of runs and of what would be one, without leaving a trace."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.diagnosis import Diagnosis
from fedstrata.errors import UsageError
from fedstrata.run import dry_run_of, open_run
from fedstrata.system.machine import compute_with
from tests.engines.worlds import check_same, convnet, federation, pictures, run
from tests.small_runs import SETTINGS, config, fedstrata, one_sentence, options, same

SMALL: dict[str, Any] = {"model": "mlp(hidden=(4,))", "method": "scaffold", "workers": 1, "rounds": 2}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models this small are no faster with more threads; and a map of few points takes no time."""
    monkeypatch.setattr("fedstrata.probes.registry.POINTS", 24)
    with compute_with(1):
        yield


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without probes."""
    out = tmp_path_factory.mktemp("diagnosed") / "bare"
    with compute_with(1):
        open_run(config(**SMALL), out).fit()
    return out


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with probes."""
    out = tmp_path_factory.mktemp("diagnosed") / "probed"
    with compute_with(1):
        open_run(config(**SMALL, probe="divergence proxy cosine calibration"), out).fit()
    return out


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a directory, with the time of its last change."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


# The command --------------------------------------------------------------------------------------------------


def test_a_run_with_probes(probed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read: nothing is built, and nothing trains."""
    before = contents(probed)
    monkeypatch.setattr("fedstrata.run.open_run", None)
    monkeypatch.setattr("fedstrata.run.dry_run_of", None)
    assert fedstrata("diagnose", probed) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("probed (scaffold")
    assert contents(probed) == before


def test_a_run_without_probes(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some rounds are tried, and nothing comes of them: the run's directory is as it was, to the byte."""
    before = contents(bare)
    assert fedstrata("diagnose", bare, "--probing-rounds", 2, "--json") == 0
    printed = capsys.readouterr()
    assert "2 more rounds" in printed.err
    assert printed.err.count("\n") == 1
    found = json.loads(printed.out)
    assert found["run"] == "bare"
    assert found["looked"]
    assert contents(bare) == before
    assert not list(bare.parent.glob(".*"))


def test_the_same_again(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form in (["--json"], ["--markdown"], []):
        texts = set()
        for _ in range(2):
            assert fedstrata("diagnose", bare, "--probing-rounds", 1, *form) == 0
            texts.add(capsys.readouterr().out)
        assert len(texts) == 1
        assert texts.pop().strip()


def test_rounds_are_tried_on_the_model_that_the_run_has_now(bare: Path, tmp_path: Path) -> None:
    """The last round once more, of the same clients, batches and learning rate, but from the final weights: by hand."""
    row = dry_run_of(bare, 1).rows[0]
    last = open_run(config(**SMALL), None)
    last.fit()
    expected = last.dry_run(1).rows[0]
    assert {**row, "seconds": 0} == {**expected, "seconds": 0}
    assert row["round"] == SMALL["rounds"] + 1
    assert row["tried"]
    start = open_run(config(**SMALL), None).dry_run(1).rows[0]
    assert start["round"] == 1
    assert start["divergence"] != row["divergence"]


def test_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoint is read beside it; before the first one there is no model to measure."""
    fed = open_run(config(**{**SMALL, "checkpoint_seconds": 1e6}), tmp_path / "run")
    assert fedstrata("diagnose", tmp_path / "run") == 2
    assert "checkpoint" in capsys.readouterr().err
    rounds = fed.rounds()
    next(rounds)
    fed.save()
    assert fedstrata("diagnose", tmp_path / "run", "--probing-rounds", 1) == 0
    for _ in rounds:
        pass
    open_run(config(**SMALL), tmp_path / "reference").fit()
    assert same(tmp_path / "run", tmp_path / "reference")


def test_options_instead_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert fedstrata("diagnose", *options(**SMALL), "--probing-rounds", 1, "--json") == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["method"].startswith("scaffold")
    assert found["looked"]
    assert printed.err == ""
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_instead_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('method = "fedprox(mu=0.3)"\nrounds = 1\n')
    small = options(**SMALL)
    said = ("--method", "--rounds")  # by the file
    words = [word for pair in zip(small[::2], small[1::2], strict=True) if pair[0] not in said for word in pair]
    assert fedstrata("diagnose", file, *words, "--set", "lr=0.05", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert "fedprox(mu=0.3)" in found["method"]
    assert found["looked"]  # the three rounds that are tried by default, though the file says one
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RUN", "--lr", "0.1"], "--lr"),
        (["RUN", "--probe", "all"], "--probe"),
        (["RUN", "--batch-size", "4"], "--batch-size"),
        (["RUN", "--probe-every", "2"], "--probe-every"),
        (["RUN", "--set", "lr=0.1"], "--set"),
        (["RUN", "--json", "--markdown"], "exclude"),
        (["--json", "--markdown"], "exclude"),
        (["RUN", "--probing-rounds", "0"], "probing-rounds"),
        (["--method", "fedavgg"], "fedavg"),
        (["--probe", "divergnce"], "divergence"),
        (["NOWHERE"], "nowhere"),
        (["EMPTY"], "no run"),
        (["RUN", "RUN"], "argument"),
    ],
)
def test_wrong_combinations(
    bare: Path, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"RUN": bare, "NOWHERE": tmp_path / "nowhere", "EMPTY": tmp_path / "empty"}
    assert fedstrata("diagnose", *(places.get(word, word) for word in words)) == 2
    assert said in one_sentence(capsys)


def test_a_run_from_python_with_probes_can_be_diagnosed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With probes there is nothing to build; without, the rest is judged, and what is missing is told."""
    run(probe="divergence calibration", out=tmp_path / "a")
    assert fedstrata("diagnose", tmp_path / "a") == 0
    capsys.readouterr()
    run(out=tmp_path / "b")
    assert fedstrata("diagnose", tmp_path / "b") == 0
    printed = capsys.readouterr()
    assert "the model and data of this run are not here" in printed.err
    assert "Not measured: hostile-updates" in printed.out


def test_a_damaged_run(bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(bare, tmp_path / "copy"))
    (copy / "facts.json").unlink()
    assert fedstrata("diagnose", copy, "--probing-rounds", 1) == 0
    for path in (copy / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    before = contents(copy)
    assert fedstrata("diagnose", copy) == 2
    assert contents(copy) == before
    (copy / "run.toml").write_text("rounds = ")
    assert fedstrata("diagnose", copy) == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "fedpart(full_rounds=1, rounds_per_stratum=1)", "model": "cnn2(width=2)"},
        {"method": "fedavg", "buffers": "local", "model": "resnet8(width=2, stem='3x3', maxpool=False)"},
        {"method": "heteroavg + inco", "archs": "mlp(hidden=(4, 4)); mlp(hidden=(4, 4, 4))"},
        {"method": "fedavg", "target": 0.01, "stop_at_target": True, "rounds": 3},
    ],
    ids=str,
)
def test_runs_of_many_kinds(tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**SETTINGS, **SMALL, **changes}
    if "archs" in changes:
        del settings["model"]
    open_run(validate_settings(RunConfig, settings), tmp_path / "run").fit()
    before = contents(tmp_path / "run")
    assert fedstrata("diagnose", tmp_path / "run", "--probing-rounds", 2, "--json") == 0
    assert json.loads(capsys.readouterr().out)["looked"]
    assert contents(tmp_path / "run") == before


# Federation.diagnose ------------------------------------------------------------------------------------------


def world(**settings: Any) -> dict[str, Any]:
    clients = [pictures(size, seed) for seed, size in enumerate((9, 14, 3, 7))]
    settings = {"rounds": 3, "participation": 3, **settings}
    return {"model": convnet(), "clients": clients, "test": pictures(16, 99), **settings}


WORLDS: dict[str, dict[str, Any]] = {
    "scaffold": {"method": "scaffold", "engine": "serial"},
    "scaffold, processes": {"method": "scaffold", "engine": "processes", "workers": 2},
    "own statistics": {"buffers": "local", "engine": "serial"},
    "own statistics, processes": {"buffers": "local", "method": "scaffold", "engine": "processes", "workers": 2},
    "wire": {"method": "feddyn", "engine": "wire"},
    "fedpart": {"method": "fedpart(full_rounds=1, rounds_per_stratum=1)", "engine": "serial"},
    "fedimpro": {"method": "fedimpro(split='relu')", "engine": "serial"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "stored"),
    [*((case, True) for case in WORLDS), ("scaffold", False), ("own statistics, processes", False)],
)
def test_a_diagnosis_changes_nothing_of_what_follows(case: str, stored: bool, tmp_path: Path) -> None:
    """Before the run, between its rounds and after it; also with clients that remember things."""
    places = [tmp_path / name if stored else None for name in ("reference", "run")]
    settings = world(**WORLDS[case], checkpoint_seconds=0)
    reference = run(**settings, out=places[0])
    fed = federation(**settings, out=places[1])
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    found = [fed.diagnose(1)]
    assert fed.state.round == len(fed.records) == len(fed.probes) == 0
    for record in fed.rounds():
        if record.round == 1:
            found.append(fed.diagnose(2))
    found.append(fed.diagnose(1))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(np.array_equal(one, other) for one, other in zip(np.random.get_state(), states[2], strict=True))
    assert all(isinstance(one, Diagnosis) for one in found)
    assert all(one.looked for one in found[:2])
    check_same(fed, reference)
    check_memories(fed, reference)
    assert fed.probes == []
    if stored:
        assert same(tmp_path / "run", tmp_path / "reference")
        assert not (tmp_path / "run" / "probes.jsonl").exists()
        files = [{str(p.relative_to(place)) for p in place.rglob("*") if p.is_file()} for place in places if place]
        assert files[0] == files[1]


def check_memories(fed: fs.Federation, reference: fs.Federation) -> None:
    for client in range(len(fed.clients)):
        ours, theirs = fed.memory(client), reference.memory(client)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[slot][name]) for slot in ours for name, tensor in ours[slot].items())


def test_stopped_after_a_diagnosis_and_resumed(tmp_path: Path) -> None:
    """What clients would remember of rounds that were only tried is not what they remember."""
    settings = world(method="scaffold", engine="serial", checkpoint_seconds=0, buffers="local")
    reference = run(**settings, out=tmp_path / "reference")
    fed = federation(**settings, out=tmp_path / "run")
    rounds = fed.rounds()
    next(rounds)
    rounds.close()
    fed.diagnose(3)
    del fed, rounds
    resumed = federation(**settings, out=tmp_path / "run", resume=True)
    assert resumed.state.round == 1
    resumed.fit()
    check_same(resumed, reference)
    check_memories(resumed, reference)
    assert same(tmp_path / "run", tmp_path / "reference")


def test_a_diagnosis_leaves_no_files(tmp_path: Path) -> None:
    """Also before the first round: nothing comes of the rounds that are tried."""
    fed = federation(**world(method="scaffold", engine="serial"), out=tmp_path / "run")
    before = contents(tmp_path / "run")
    fed.diagnose(2)
    assert contents(tmp_path / "run") == before


def test_where_a_run_has_measured_something_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = run(**world(probe="divergence proxy", engine="serial", rounds=2))
    monkeypatch.setattr(fed, "dry_run", None)
    found = fed.diagnose()
    assert found.looked
    assert found.as_dict()["method"] == str(fed.method)


def test_the_number_of_rounds_that_are_tried() -> None:
    fed = federation(**world(rounds=3, engine="serial"))
    assert [row["round"] for row in fed.dry_run(2).rows] == [1, 2]
    assert [row["round"] for row in fed.dry_run(9).rows] == [1, 2, 3]
    next(fed.rounds())
    assert [row["round"] for row in fed.dry_run(1).rows] == [2]
    assert fed.state.round == 1


def test_what_is_tried_is_what_the_run_would_measure() -> None:
    settings = world(rounds=3, engine="serial", method="scaffold")
    tried = federation(**settings).dry_run(3).rows
    measured = run(**settings, probe="all").probes
    assert [{**row, "seconds": 0} for row in tried] == [{**row, "seconds": 0, "tried": True} for row in measured]


def test_a_finished_federation_is_measured_too() -> None:
    """Its last rounds once more; nothing of it changes."""
    fed = run(**world(rounds=3, engine="serial"))
    before = {n: t.clone() for n, t in fed.state.params.items()}
    assert [row["round"] for row in fed.dry_run(2).rows] == [4, 5]
    assert "label-skew" in fed.diagnose(2).looked
    assert all(torch.equal(t, before[n]) for n, t in fed.state.params.items())
    assert (fed.state.round, fed.probes) == (3, [])


def test_a_diagnosis_of_a_diverging_federation() -> None:
    """The rounds that are tried diverge: that is what is found, and the federation is as it was."""
    fed = federation(lr=1e38, rounds=3, engine="serial")
    before = {n: t.clone() for n, t in fed.state.params.items()}
    assert fed.diagnose().findings[0].name == "diverged"
    assert all(torch.equal(t, before[n]) for n, t in fed.state.params.items())
    assert fed.state.round == 0


def test_rounds_cannot_be_tried_on_what_is_no_run(probed: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.toml"):
        dry_run_of(probed.parent, 1)
