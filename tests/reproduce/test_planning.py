"""A reproduction before it begins and while it goes on: plans, seeds, settings, trials, partial reports, resuming."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedstrata import reproduce as package
from fedstrata.compare import News, plan
from fedstrata.compare.runner import find_result
from fedstrata.errors import UsageError
from fedstrata.reproduce import outlook, parse_seeds, parts, reproduce
from fedstrata.reproduce.choices import choose_seeds, set_fields
from fedstrata.reproduce.claims import above
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    Grid,
    OwnWork,
    Part,
    Tuning,
    best_until,
    figures_by_label,
    label_methods,
    mean_of_last,
)
from fedstrata.reproduce.planning import Outlook, Paces, PlannedPart, RunClock, kind_of, minutes_text
from fedstrata.reproduce.tuning import tuning_plan
from tests.small_runs import fedstrata, one_sentence

Capture = pytest.CaptureFixture[str]

RUN: dict[str, Any] = {
    "dataset": "synthetic(shape=(4,), classes=3, examples=60, test_examples=30)",
    "model": "logreg",
    "partition": "iid",
    "clients": 2,
    "rounds": 3,
    "batch_size": 8,
    "lr": 0.1,
    "workers": 1,
    "engine": "serial",
}
METHODS = {"FedAvg": "fedavg", "FedProx": "fedprox(mu=1.0)"}


def _assess(comparison: Any) -> Findings:
    found = figures_by_label(comparison, mean_of_last(1))
    check = above("FedProx beats FedAvg", found["FedProx"], found["FedAvg"])
    return Findings((FindingsTable("Accuracy", ("", "x"), (("a", "b"),)),), (check,))


def _grid(**others: Any) -> Grid:
    values = {**RUN, "method": label_methods(METHODS), "seed": [1, 2]}
    return replace(Grid("main", "two methods", values, _assess), **others)


def _work(settings: Any, seed: int, resources: Any) -> dict[str, Any]:
    return {"figure": 1.0 + seed}


def _look(found: Any) -> Findings:
    figures = {seed: figures["figure"] for seed, figures in found.items()}
    return Findings((), (above("all is well", figures, dict.fromkeys(figures, 0.0)),))


OWN = OwnWork("own", "work of its own", {"run": RUN}, (1, 2), _work, _look)
TUNING = Tuning((0.01, 0.1), 0, mean_of_last(1), {"rounds": 2})


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[Part]]:
    """A paper `toy` of two parts, and a third that must be asked for; tests may put others in their place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)
    known: dict[str, list[Part]] = {
        scale: [_grid(), OWN, _grid(name="more", headline=False)] for scale in ("smoke", "evidence")
    }
    monkeypatch.setitem(package.PAPERS, "toy", lambda scale: known[scale])  # type: ignore[attr-defined]
    monkeypatch.setitem(package._SETTINGS, "toy", known)  # type: ignore[attr-defined]
    return known


# --- seeds and settings ----------------------------------------------------------------------------------------------


def test_seeds_are_a_number_or_a_list() -> None:
    assert parse_seeds(["5"]) == 5
    assert parse_seeds(["1,2,9"]) == [1, 2, 9]
    assert parse_seeds(["7,"]) == [7]
    assert choose_seeds((4, 5, 6), 5) == [4, 5, 6, 7, 8]
    assert choose_seeds((4, 5, 6), 2) == [4, 5]
    assert choose_seeds((4, 5, 6), [9, 1]) == [9, 1]


def test_seeds_of_every_part(paper: Any) -> None:
    found = parts("toy", "smoke", seeds=3)
    assert [part.seeds for part in found] == [(1, 2, 3), (1, 2, 3)]


def test_settings_reach_every_run() -> None:
    grid, own = (set_fields(part, ["rounds=2", "dataset.examples=90"]) for part in (_grid(), OWN))
    assert isinstance(grid, Grid)
    assert isinstance(own, OwnWork)
    configs = [run.config for run in plan(grid.values, "out").runs]
    assert {config.rounds for config in configs} == {2}
    assert all("examples=90" in config.dataset for config in configs)
    assert own.settings["run"]["rounds"] == 2
    assert own.file(Path("x"), 1) != OWN.file(Path("x"), 1)
    tuned = set_fields(_grid(tuning=TUNING), ["rounds=1"])
    assert isinstance(tuned, Grid)
    assert {run.config.rounds for run in tuning_plan(tuned, {}, Path("out")).runs} == {1}
    with pytest.raises(UsageError, match="several values of lr"):
        set_fields(_grid(tuning=TUNING), ["lr=1"])


def test_settings_stand_in_the_report(paper: Any, tmp_path: Path) -> None:
    assert (
        fedstrata("reproduce", "toy", "--set", "rounds=1", "--out", "out", "--parts", "main", "--seeds", "3", "--quiet")
        == 0
    )
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["sets"] == {"rounds": "1"}
    assert report["command"] == "fedstrata reproduce toy --scale smoke --out DIR --parts main --seeds 3 --set rounds=1"
    assert "settings that are not the scale's: rounds 1" in (tmp_path / "out" / "report.md").read_text()
    (part,) = report["parts"]
    assert part["seeds"] == [1, 2, 3]
    (claim,) = part["claims"]
    assert {side: sorted(found) for side, found in claim["values"].items()} == {
        "one": ["1", "2", "3"],
        "other": ["1", "2", "3"],
    }


# --- the plan --------------------------------------------------------------------------------------------------------


def test_a_plan_counts_runs_and_measures_them(paper: Any, tmp_path: Path) -> None:
    """4 runs of two kinds, and own work of 2 seeds; the pilot's figures are kept, for the next time."""
    told: list[str] = []
    found = outlook("toy", "smoke", out="out", say=told.append)
    assert [(part.name, part.runs, part.finished) for part in found.parts] == [("main", 4, 0), ("own", 2, 0)]
    assert all(part.seconds is not None and part.seconds > 0 for part in found.parts)
    assert found.seconds == pytest.approx(sum(part.seconds or 0.0 for part in found.parts))
    assert found.others == ("more",)
    assert sum(line.startswith("pilot of") for line in told) == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["pilot.json"]
    told.clear()
    again = outlook("toy", "smoke", out="out", say=told.append)
    assert told == []
    assert again.seconds == pytest.approx(found.seconds)


def test_a_plan_is_printed_and_nothing_is_made(paper: Any, tmp_path: Path, capsys: Capture) -> None:
    assert fedstrata("reproduce", "toy", "--plan", "--quiet") == 0
    told = capsys.readouterr().out
    assert "main" in told
    assert "made only if asked for by --parts: more" in told
    assert list(tmp_path.iterdir()) == []


def test_the_scale_evidence_is_planned_first(paper: Any, capsys: Capture) -> None:
    assert fedstrata("reproduce", "toy", "--scale", "evidence", "--data-dir", "x", "--parts", "main") == 0
    told = capsys.readouterr().out
    assert 0 < told.index("Plan") < told.index("[1/4]") < told.index("two methods")
    assert "fewer than 5 seeds, which is too few to rely on, in main" in told


def test_runs_that_are_shared_are_planned_once(paper: Any) -> None:
    found = outlook("toy", "smoke", only=["main", "more"])
    assert [(part.name, part.runs) for part in found.parts] == [("main", 4), ("more", 0)]


def test_seconds_come_from_finished_runs_before_the_pilot(paper: Any, tmp_path: Path) -> None:
    reproduce("toy", out="out", only=["main"], seeds=[1])
    runs = plan({**_grid().values}, tmp_path / "out" / "runs").runs
    paces = Paces(tmp_path / "out", False, lambda line: None)
    assert paces.seconds(runs[1].config, 3) is None
    paces.learn(runs)
    (first,) = [result for run in runs[:2] if (result := find_result(run)) is not None]
    assert paces.seconds(runs[1].config, 6) == pytest.approx(6 * first.seconds / 3)
    found = outlook("toy", "smoke", out="out", only=["main"])
    assert [(part.runs, part.finished) for part in found.parts] == [(4, 2)]


def test_kinds() -> None:
    """Seeds, rates and rounds make no other kind of run; methods and models do."""
    one, _, other, _ = (run.config for run in plan(_grid().values, "out").runs)
    assert kind_of(one) == kind_of(one.model_copy(update={"seed": 9, "lr": 0.3, "rounds": 7}))
    assert len({kind_of(one), kind_of(other), kind_of(one.model_copy(update={"batch_size": 4}))}) == 3


def test_minutes() -> None:
    assert [minutes_text(seconds) for seconds in (None, 90.0, 6000.0)] == ["–", "1.5", "100"]
    unknown = Outlook((PlannedPart("a", 2, 1, 60.0), PlannedPart("b", 1, 0, None)), 2)
    assert unknown.seconds is None
    assert unknown.as_dict()["parts"][0]["seconds"] == 60.0


def test_the_time_that_is_left(tmp_path: Path) -> None:
    """Two runs of 3 rounds planned with 30 and 90 seconds: after one of them 60 s have gone, so 180 s are left."""
    every = plan({**RUN, "method": label_methods(METHODS), "seed": [1]}, tmp_path)
    first, second = every.runs
    times = iter([0.0, 20.0, 60.0, 150.0, 240.0])
    clock = RunClock(every, lambda run: 30.0 if run is first else 90.0, lambda: next(times))
    assert clock.tell(News(first, 0)) == "0.3 minutes so far"
    done: Any = SimpleNamespace(rounds=3)
    assert clock.tell(News(first, 3, done)) == "1.0 minutes so far, about 3.0 left"
    assert clock.tell(News(second, 1)) == "2.5 minutes so far, about 2.5 left"
    assert clock.tell(News(second, 3, done)) == "4.0 minutes so far"


def test_the_time_that_is_left_by_rounds(tmp_path: Path) -> None:
    """Nothing is known of how long rounds take: after 3 of 6 of them as much is left as has gone."""
    every = plan({**RUN, "method": label_methods(METHODS), "seed": [1]}, tmp_path)
    times = iter([0.0, 60.0])
    clock = RunClock(every, lambda run: None, lambda: next(times))
    assert clock.tell(News(every.runs[0], 3)) == "1.0 minutes so far, about 1.0 left"


def test_progress_tells_the_time(paper: Any, capsys: Capture) -> None:
    assert fedstrata("reproduce", "toy", "--parts", "main") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert [line.partition("]")[0] for line in lines] == [f"[{at}/4" for at in range(1, 5)]
    assert "minutes so far, about" in lines[0]
    assert lines[-1].endswith("minutes so far")


# --- partial reports -------------------------------------------------------------------------------------------------


def test_a_partial_report(paper: Any, tmp_path: Path, capsys: Capture) -> None:
    """Two of four runs and one of two seeds are there: nothing is made, and no claim is judged."""
    reproduce("toy", out="out", seeds=[1])
    before = sorted(path.name for path in (tmp_path / "out").rglob("*.json"))
    assert fedstrata("reproduce", "toy", "--out", "out", "--no-run") == 0
    told = capsys.readouterr().out
    assert "partial report: of 2 claims 0 hold, 0 do not hold, 2 are not decided" in told
    assert "not decided: FedProx beats FedAvg" in told
    assert "runs missing, seed 2" in told
    assert sorted(path.name for path in (tmp_path / "out").rglob("*.json")) == before
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["partial"] is True
    assert [part["missing"] for part in report["parts"]] == [2, 1]
    assert {claim["reason"] for part in report["parts"] for claim in part["claims"]} == {"runs missing, seed 2"}


def test_a_report_on_nothing(paper: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    found = reproduce("toy", out="out", run=False)
    assert found.is_partial
    assert [section.missing for section in found.sections] == [4, 2]
    assert "no seed is finished" in found.markdown()


def test_the_rest_is_made_later(paper: Any, tmp_path: Path) -> None:
    """The first seed's runs are not made again, and the report is whole."""
    reproduce("toy", out="out", seeds=[1])
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").rglob("*") if path.is_file()}
    found = reproduce("toy", out="out")
    assert len(made) > 0
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert not found.is_partial
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 4
    assert "partial" not in str(found)
    assert all(not check.missing for check in found.checks)


@pytest.mark.parametrize("name", ["fedpart", "fednlr", "fedimpro", "inco", "deeper"])
def test_every_papers_report_on_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have dashes, and every claim waits for its runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    found = reproduce(name, "smoke", out="out", run=False)
    assert found.is_partial
    assert all(section.missing for section in found.sections)
    assert found.checks
    assert all(check.verdict.reason.startswith("runs missing, seed") for check in found.checks)


# --- trials ----------------------------------------------------------------------------------------------------------


def test_rates_are_chosen_on_a_seed_that_is_not_reported(paper: Any, tmp_path: Path) -> None:
    """Two methods × two rates on seed 0; each has its best one in the reported runs, and the report says so."""
    paper["smoke"][:] = [_grid(tuning=TUNING)]
    found = reproduce("toy", out="out")
    (section,) = found.sections
    assert section.rates["scores"].keys() == METHODS.keys()
    for label, scores in section.rates["scores"].items():
        assert set(scores) == {"0.01", "0.1"}
        assert section.rates["chosen"][label] == float(max(scores, key=lambda rate: scores[rate]))
    assert section.findings.notes[0].startswith(
        "learning rates chosen on seed 0, which is not reported, from 0.01, 0.1 for every method, rounds 2: FedAvg "
    )
    rows = (tmp_path / "out" / "runs").glob("*seed[12]-*/run.toml")
    rates = {f"lr = {rate}" for rate in section.rates["chosen"].values()}
    assert {line for path in rows for line in path.read_text().splitlines() if line.startswith("lr = ")} == rates
    assert len(list((tmp_path / "out" / "runs").glob("*seed0-*"))) == 4
    planned = outlook("toy", "smoke", out="out")
    assert [(part.name, part.runs, part.finished) for part in planned.parts] == [("main, trials", 4, 4), ("main", 4, 4)]


def test_trials_that_are_there_are_not_made_again(paper: Any, tmp_path: Path) -> None:
    paper["smoke"][:] = [_grid(tuning=TUNING)]
    reproduce("toy", out="out", seeds=[1])
    trials = list((tmp_path / "out" / "runs").glob("*seed0-*/summary.json"))
    made = {path: path.stat().st_mtime_ns for path in trials}
    reproduce("toy", out="out")
    assert {path: path.stat().st_mtime_ns for path in trials} == made


def test_without_trials_nothing_is_reported_of_a_part(paper: Any, tmp_path: Path) -> None:
    paper["smoke"][:] = [_grid(tuning=TUNING)]
    (tmp_path / "out").mkdir()
    found = reproduce("toy", out="out", run=False)
    assert [section.missing for section in found.sections] == [4]
    assert "the trials by which its learning rates are chosen are not finished" in found.markdown()


def test_the_trials_seed_cannot_be_reported(paper: Any, capsys: Capture) -> None:
    paper["smoke"][:] = [_grid(tuning=TUNING)]
    assert fedstrata("reproduce", "toy", "--seeds", "0,1") == 2
    assert "seed 0 is the one that the part 'main' is tuned on" in one_sentence(capsys)


# --- FedPart's measures ----------------------------------------------------------------------------------------------


def test_the_best_so_far() -> None:
    rounds: Any = [SimpleNamespace(accuracy=value) for value in (0.1, 0.5, None, 0.3)]
    assert [best_until(number)(rounds) for number in (1, 2, 4)] == [0.1, 0.5, 0.5]
    assert best_until(5)(rounds) is None
