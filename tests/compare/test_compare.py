"""Comparisons: the grid, the directories, the statistics, and what the command runs, resumes and prints."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedstrata.cli.main import _join_values
from fedstrata.compare import Comparison, News, Plan, Result, compare, merge_options, plan, run_missing, show, tabulate
from fedstrata.compare.plan import directory_name, identity
from fedstrata.compare.runner import _attempt, find_result, missing
from fedstrata.compare.table import gap, rows, stat
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.config.toml import to_toml
from fedstrata.errors import Diverged, FedstrataError, UsageError
from fedstrata.federation import Federation
from fedstrata.run import open_run
from fedstrata.runs.files import claim
from tests.small_runs import LONG, fedstrata, metrics, one_sentence, process, same, sentence, strays

Capture = pytest.CaptureFixture[str]
UNIFORM = "fedavg(weight='uniform')"
SMALL: dict[str, Any] = {
    "dataset": "synthetic(shape=(4,), classes=3, examples=60, test_examples=30)",
    "model": "logreg",
    "partition": "dirichlet(alpha=1.0)",
    "clients": 3,
    "rounds": 3,
    "workers": 1,
    "checkpoint_seconds": 0.0,
}
TWO = {**SMALL, "method": ["fedavg", UNIFORM], "seed": [0, 1]}
WORDS = [str(word) for n, v in SMALL.items() for word in (f"--{n.replace('_', '-')}", v)]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("FEDSTRATA_DATA", "FEDSTRATA_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


def config(**changes: Any) -> RunConfig:
    return validate_settings(RunConfig, {**SMALL, **changes})


# --- the grid --------------------------------------------------------------------------------------------------------


def test_a_grid() -> None:
    made = plan({**SMALL, "lr": [0.1, 1], "methods": ["fedavg", UNIFORM], "seeds": [3, 1]}, "out")
    found = [(run.config.lr, run.label, run.config.seed) for run in made.runs]
    assert found == [(lr, m, s) for lr in (0.1, 1.0) for m in ("fedavg", UNIFORM) for s in (3, 1)]
    assert made.axes == ["lr"]
    assert made.seeds == [3, 1]
    assert str(made.runs[-1]) == f"{UNIFORM}, lr=1.0 seed 1"
    assert "lr" not in made.common
    assert (made.common["rounds"], made.common["epochs"]) == (3, 1)
    assert len({run.directory for run in made.runs}) == 8
    assert {run.directory.parent for run in made.runs} == {Path("out")}


def test_one_run_is_a_grid_too() -> None:
    (run,) = plan({"lr": [0.5]}, "out").runs
    assert (run.label, run.config.seed, run.config.lr, run.varied) == ("fedavg", 0, 0.5, {})


def test_methods_with_settings_of_their_own() -> None:
    tables = [
        "fedavg",
        {"method": "fedavg", "lr": 0.5},
        {"method": UNIFORM, "model": {"name": "mlp", "hidden": [4]}, "label": "Uniform"},
    ]
    made = plan({**SMALL, "method": tables, "seed": [0, 1]}, "out")
    assert [run.label for run in made.runs[::2]] == ["fedavg", "fedavg, lr=0.5", "Uniform"]
    assert [run.config.lr for run in made.runs[::2]] == [0.1, 0.5, 0.1]
    assert made.runs[-1].config.model == "mlp(hidden=(4,))"
    assert made.runs[-1].own == {"model": "mlp(hidden=(4,))"}
    assert made.common.keys().isdisjoint({"lr", "model"})


def test_lists_of_tables() -> None:
    """A model, as `run` reads it, may be a table; so may each of several."""
    made = plan({**SMALL, "model": [{"name": "mlp", "hidden": [4]}, "logreg"]}, "out")
    assert [run.config.model for run in made.runs] == ["mlp(hidden=(4,))", "logreg"]
    (single,) = plan({**SMALL, "model": {"name": "mlp", "hidden": [4]}}, "out").runs
    assert single.config.model == "mlp(hidden=(4,))"


def test_one_client_is_not_all_of_them() -> None:
    made = plan({**SMALL, "participation": [1, 1.0]}, "out")
    assert len({run.directory for run in made.runs}) == 2
    assert len(rows(made, {})) == 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"method": ["fedavg", "fedavgg"]}, "there is no method 'fedavgg' (did you mean 'fedavg'?)"),
        ({"method": []}, "method is an empty list"),
        ({"seed": []}, "seed is an empty list"),
        ({"lr": []}, "lr is an empty list"),
        ({"lr": [0.1, "x"]}, "lr = 'x' does not fit"),
        ({"lr": [0.1, [0.2]]}, "lr = [0.2] does not fit"),
        ({"lr": [0.1, 0.1]}, "lr has the value 0.1 twice"),
        ({"seed": [0, 1, 0]}, "seed has the value 0 twice"),
        ({"seed": [0, -1]}, "seed = -1 does not fit"),
        ({"seed": 0, "seeds": [0]}, "give 'seed' or 'seeds', not both"),
        ({"lrr": [0.1, 0.2]}, "there is no setting 'lrr' (did you mean 'lr'?)"),
        ({"train": {"lr": [0.1, 0.2]}}, "there is no setting 'train'"),
        ({"model": {"name": ["mlp"]}}, "the table [model] needs a name"),
        ({"workers": [1, 2]}, "workers changes no result"),
        ({"method": ["fedavg", "fedavg"]}, "the method 'fedavg' is given twice"),
        ({"method": ["fedavg", "fedavg()"]}, "the method 'fedavg()' is the same as 'fedavg'"),
        ({"method": ["fedavg", {"method": UNIFORM, "label": "fedavg"}]}, "two methods are called 'fedavg'"),
        ({"method": [{"method": "fedavg", "label": " "}]}, "label = ' ' does not fit"),
        ({"method": [{"method": "fedavg", "lable": "x"}]}, "there is no setting 'lable'"),
        ({"method": [{"lr": 0.1}]}, 'needs a method = "…"'),
        ({"method": [{"method": "fedavg", "seed": 1}]}, "seed is set by the method 'fedavg, seed=1'"),
        ({"method": [{"method": "fedavg", "lr": 1.0}], "lr": [0.1, 0.2]}, "lr is set by the method"),
        ({"method": [{"method": "fedavg", "lr": [0.1, 0.2]}]}, "lr = [0.1, 0.2] does not fit"),
        ({"method": 3}, "method = 3 does not fit"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_wrong_grids(values: Mapping[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(values, "out")
    assert said in str(caught.value)
    assert not Path("out").exists()


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_win_over_the_file() -> None:
    file = {"methods": ["fedavg"], "seeds": [7], "lr": 0.5, "epochs": [1, 2], "model": "mlp"}
    given = {"lr": 0.25, "rounds": 2}
    vary = ["batch_size = 8; 16;", "model.hidden=[4]; [5]"]
    found = merge_options(file, given, f"fedavg;{UNIFORM} ; ", ["0,1", "2"], vary, ["epochs=3"])
    assert found == {
        "method": ["fedavg", UNIFORM],
        "seed": [0, 1, 2],
        "lr": 0.25,
        "rounds": 2,
        "epochs": 3,
        "batch_size": [8, 16],
        "model": ["mlp(hidden=(4,))", "mlp(hidden=(5,))"],
    }
    assert merge_options({}, {}, sets=["seed=[0, 1]"]) == {"seed": (0, 1)}
    assert len(plan(merge_options({}, {}, sets=["seed=[0, 1]"]), "out").runs) == 2
    varied = merge_options({}, {}, vary=["methods=fedavg; " + UNIFORM, "participation=1; 0.5"])
    assert varied == {"method": ["fedavg", UNIFORM], "participation": [1, 0.5]}


@pytest.mark.parametrize(
    ("words", "gathered"),
    [
        ("compare --seeds 0 1 2 a.toml", "compare --seeds 0,1,2 a.toml"),
        ("compare --seeds 0,1 --seeds 2 3 --lr 1", "compare --seeds 0,1 --seeds 2,3 --lr 1"),
        ("compare --seeds x 1", "compare --seeds x 1"),
        ("compare --seeds 0, 1,", "compare --seeds 0,,1,"),
        ("run --seed 1 2", "run --seed 1 2"),
    ],
)
def test_seeds_take_all_whole_numbers(words: str, gathered: str) -> None:
    assert _join_values(words.split()) == gathered.split()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "fedavgg; fedavg"], "there is no method 'fedavgg' (did you mean 'fedavg'?)"),
        (["--methods", " ; "], "--methods needs at least one value"),
        (["--methods", "fedavg", "--method", "fedavg"], "--methods gives method, but it is already set"),
        (["--seeds", "x"], "--seeds x: give whole numbers, such as --seeds 0 1 2"),
        (["--seeds", "0", "1.5"], "1.5"),
        (["--seeds", "0", "0"], "seed has the value 0 twice"),
        (["--seeds", ","], "--seeds needs at least one value"),
        (["--seeds"], "'--seeds' requires an argument"),
        (["--seeds", "0", "--seed", "1"], "--seeds gives seed, but it is already set"),
        (["--vary", "lr"], "--vary lr: write it like 'lr=0.1; 0.01'"),
        (["--vary", "lr="], "--vary lr= needs at least one value"),
        (["--vary", "lrr=1; 2"], "there is no setting 'lrr'"),
        (["--vary", "lr=1; 2", "--lr", "3"], "gives lr, but it is already set"),
        (["--vary", "lr=1; 2", "--vary", "lr=3"], "gives lr, but it is already set"),
        (["--vary", "model.widht=1; 2"], "has no argument 'widht'"),
        (["--vary", "model=mlp; cnn2", "--set", "model.width=3"], "there are several values of 'model'"),
        (["--jobs", "0"], "--jobs"),
        (["--json", "--csv"], "exclude each other"),
        (["--rounds", "0"], "rounds = 0 does not fit"),
        (["--frobnicate"], "No such option"),
        (["missing.toml"], "cannot read missing.toml"),
        (["--dataset", "mnist"], "FEDSTRATA_DATA"),
        (["--participation", "99"], "participation = 99, but only 10 clients have examples"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_wrong_input(words: list[str], said: str, tmp_path: Path, capsys: Capture) -> None:
    assert fedstrata("compare", *words) == 2
    assert said in one_sentence(capsys)
    assert list(tmp_path.iterdir()) == []


# --- directories -----------------------------------------------------------------------------------------------------


def test_names_are_of_the_result() -> None:
    name = directory_name(config())
    assert name.startswith("synthetic-fedavg-seed0-")
    same_result: list[dict[str, Any]] = [
        {"engine": "serial"},
        {"workers": 2},
        {"checkpoint_seconds": 5.0},
        {"data_dir": "x"},
        {"target": 0.5},
        {"method": "fedavg()"},
        {"buffers": "average"},
    ]
    for changes in same_result:
        assert directory_name(config(**changes)) == name, changes
    others: list[dict[str, Any]] = [
        {"seed": 1},
        {"lr": 0.2},
        {"threads": 2},
        {"compile": True},
        {"participation": 1},
        {"method": UNIFORM},
        {"buffers": "drop"},
        {"target": 0.5, "stop_at_target": True},
        {"target": 0.6, "stop_at_target": True},
    ]
    names = {name, *(directory_name(config(**changes)) for changes in others)}
    assert len(names) == 1 + len(others)
    assert all(len(n) < 100 and "/" not in n and "(" not in n for n in names)


def test_another_comparison_uses_the_runs_that_they_share(tmp_path: Path) -> None:
    first = compare(TWO, "out")
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("summary.json")}
    heard: list[News] = []
    values = {**SMALL, "method": [UNIFORM], "seed": [1, 2], "workers": "auto", "target": 0.01}
    second = compare(values, "out", on_news=heard.append)
    assert len(before) == 4
    assert len(list(Path("out").iterdir())) == 5
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert {news.run.config.seed for news in heard} == {2}
    assert [result.seed for result in second.rows[0].results] == [1, 2]
    assert second.rows[0].results[0].accuracy == first.rows[1].results[1].accuracy
    # The first comparison knew of no target: its rounds tell.
    assert [result.rounds_to_target for result in second.rows[0].results] == [1, 1]


def test_a_run_is_what_run_makes(tmp_path: Path) -> None:
    compare({**SMALL, "seed": [5]}, "out")
    (made,) = Path("out").iterdir()
    open_run(config(seed=5), tmp_path / "alone").fit()
    assert same(made, tmp_path / "alone")


# --- statistics ------------------------------------------------------------------------------------------------------


def test_mean_and_sample_standard_deviation() -> None:
    """2, 4, 9: mean 5, deviations −3, −1, 4, their squares 9 + 1 + 16 = 26, over n − 1 = 2: √13."""
    found = stat([2.0, None, 4.0, 9.0])
    assert found is not None
    assert (found.mean, found.count) == (5.0, 3)
    assert found.std == pytest.approx(13**0.5)
    assert stat([]) is None
    assert stat([None]) is None
    single = stat([0.5])
    assert single is not None
    assert (single.mean, single.std) == (0.5, None)


def test_a_gap_is_taken_seed_by_seed() -> None:
    """Seeds 0 and 2 are common: 0.9 − 0.5 = 0.4 and 0.8 − 0.6 = 0.2, mean 0.3, deviations ±0.1, std √0.02."""
    found = gap({0: 0.9, 1: 0.1, 2: 0.8}, {2: 0.6, 0: 0.5, 3: 1.0})
    assert found is not None
    assert found.mean == pytest.approx(0.3)
    assert found.std == pytest.approx(0.02**0.5)
    assert found.count == 2
    assert gap({0: 0.9}, {1: 0.9}) is None


def result(made: Plan, place: int, accuracy: float | None, **changes: Any) -> tuple[Path, Result]:
    run = made.runs[place]
    values: dict[str, Any] = {
        "best_accuracy": accuracy,
        "score": accuracy,
        "best_score": accuracy,
        "rounds": 3,
        "rounds_to_target": None,
        "bytes_up": 1000,
        "bytes_down": 3000,
        "flops": 2_000_000,
        "seconds": 1.5,
    }
    values |= changes
    return run.directory, Result(run.config.seed, str(run.directory), accuracy, **values)


def test_rows() -> None:
    """Per lr one reference, of two seeds. At lr 0.1: 0.9 − 0.6 and 0.8 − 0.7 for fedavg, mean 0.2, std √0.02."""
    made = plan({**TWO, "method": ["fedavg", "centralised", UNIFORM], "lr": [0.1, 0.2], "target": 0.5}, "out")
    results = dict(
        [
            result(made, 0, 0.6, rounds_to_target=3, bytes_up=2000),
            result(made, 1, 0.7),
            result(made, 2, 0.9),
            result(made, 3, 0.8),
            result(made, 4, 0.2, diverged="training diverged in round 2"),
            result(made, 5, 0.5),
            result(made, 8, 0.7),
            result(made, 10, None, diverged="…"),
            result(made, 11, None, diverged="…"),
        ]
    )
    found = rows(made, results)
    assert [(row.method, row.run.varied["lr"]) for row in found] == [
        (m, lr) for lr in (0.1, 0.2) for m in ("fedavg", "centralised", UNIFORM)
    ]
    fedavg, central, uniform, absent, alone, lost = found
    assert fedavg.gap is not None
    assert fedavg.gap.mean == pytest.approx(0.2)
    assert fedavg.gap.std == pytest.approx(0.02**0.5)
    assert fedavg.of("bytes_up").mean == 1500  # type: ignore[union-attr]
    assert central.gap is None
    assert uniform.diverged_seeds == [0]
    assert uniform.of("accuracy") == stat([0.5])
    assert uniform.gap == stat([0.8 - 0.5])
    assert absent.missing_seeds == [0, 1]
    assert absent.of("accuracy") is None
    assert absent.gap is None
    assert alone.missing_seeds == [1]
    assert lost.of("accuracy") is None

    comparison = Comparison(made, found, {})
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in show.markdown(comparison).splitlines()]
    names = ["method", "lr", "seeds", "accuracy", "best", "gap", "to target", "up", "down", "FLOPs", "seconds"]
    assert table[0] == names
    shown = [dict(zip(names, cells, strict=True)) for cells in table[2:8]]
    assert [row["seeds"] for row in shown] == ["2", "2", "2", "0/2", "1/2", "2"]
    accuracies = ["65.00 ± 7.07", "85.00 ± 7.07", "50.00 (1/2 diverged)", "–", "70.00", "diverged"]
    assert [row["accuracy"] for row in shown] == accuracies
    assert [row["gap"] for row in shown] == ["20.00 ± 14.14", "–", "30.00", "–", "–", "–"]
    assert [row["to target"] for row in shown][:2] == ["3.0 (1/2)", "– (0/2)"]
    assert [row["up"] for row in shown][:2] == ["1.5 kB", "1.0 kB"]
    assert "gap: centralised − method" in show.markdown(comparison)

    lines = list(csv.DictReader(io.StringIO(show.csv_text(comparison))))
    assert float(lines[0]["gap"]) == pytest.approx(0.2)
    assert (lines[0]["lr"], lines[0]["reached"], lines[0]["bytes_up"]) == ("0.1", "1", "1500.0")
    assert (lines[3]["accuracy"], lines[3]["missing"]) == ("", "2")
    told = comparison.as_dict()
    assert told["rows"][2]["diverged"] == [0]
    assert told["rows"][2]["runs"][0]["diverged"] == "training diverged in round 2"
    assert json.loads(json.dumps(told))["rows"][0]["gap"] == told["rows"][0]["gap"]
    assert str(comparison).splitlines()[0] == "fedavg, lr=0.1: 65.00 ± 7.07 %"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_in_a_terminal(width: int) -> None:
    made = plan(TWO, "out")
    comparison = Comparison(made, rows(made, dict([result(made, 0, 0.5), result(made, 1, 0.75)])), {})
    file = io.StringIO()
    on = Console(file=file, width=width, force_terminal=True, color_system=None, markup=False, highlight=False)
    on.print(show.SideBySide(comparison), soft_wrap=True)
    text = file.getvalue()
    assert "62.50 ± 17.68" in text
    assert ("no room for: FLOPs" in text) == (width < 200)
    table = [line for line in text.splitlines() if line.startswith(("│", "┃"))]
    assert max(map(len, table)) <= width
    assert "buffers average" in text


def test_the_settings_below_the_table() -> None:
    made = plan({**TWO, "steps": 4, "optimizer": "adam", "engine": "serial"}, "out")
    told = show.settings_text(Comparison(made, rows(made, {}), {}))
    assert told == (
        f"dataset {SMALL['dataset']}; model logreg; partition dirichlet(alpha=1.0); clients 3; participation 1.0; "
        "rounds 3; steps 4; batch_size 32; lr 0.1; optimizer adam; seeds 0, 1; buffers average"
    )
    own = plan({**TWO, "method": ["fedavg", {"method": UNIFORM, "lr": 0.5, "label": "A|B"}]}, "out")
    assert "; lr 0.1, 0.5 for A|B; seeds" in show.settings_text(Comparison(own, rows(own, {}), {}))
    assert "| A\\|B " in show.markdown(Comparison(own, rows(own, {}), {}))
    mixed = plan({**TWO, "method": ["fedavg", "fedavg(buffers='drop')"]}, "out")
    comparison = Comparison(mixed, rows(mixed, {}), {})
    assert "buffers" not in show.settings_text(comparison)
    assert "| buffers |" in show.markdown(comparison)


# --- running ---------------------------------------------------------------------------------------------------------


def test_what_was_interrupted_goes_on(tmp_path: Path) -> None:
    made = plan({**SMALL, "rounds": 4, "method": ["fedavg", UNIFORM]}, "out")
    half = made.runs[1]
    federation = open_run(half.config, half.directory)
    going = federation.rounds()
    assert [next(going).round, next(going).round] == [1, 2]
    going.close()
    del federation, going
    assert find_result(half) is None
    assert [run.label for run in missing(made)] == ["fedavg", UNIFORM]
    heard: list[News] = []
    assert run_missing(made, on_news=heard.append) == {}
    assert [news.rounds for news in heard if news.run is half] == [0, 3, 4, 4]
    open_run(half.config, tmp_path / "whole").fit()
    assert same(half.directory, tmp_path / "whole")
    assert missing(made) == []


def test_an_interrupted_run_with_another_target_goes_on() -> None:
    first, second = (plan({**SMALL, "target": target}, "out") for target in (None, 0.01))
    going = open_run(first.runs[0].config, first.runs[0].directory).rounds()
    next(going)
    going.close()
    del going
    assert run_missing(second) == {}
    assert tabulate(second).rows[0].results[0].rounds_to_target == 1


def test_a_summary_that_is_not_whole_is_made_again() -> None:
    made = plan(SMALL, "out")
    run_missing(made)
    (path,) = Path("out").rglob("summary.json")
    whole = json.loads(path.read_text())
    for text in ("", "{}", "[]", json.dumps({**whole, "costs": None})):
        path.write_text(text)
        assert find_result(made.runs[0]) is None
        assert run_missing(made) == {}
        assert json.loads(path.read_text())["accuracy"] == whole["accuracy"]


def test_a_recipe_that_was_edited(capsys: Capture) -> None:
    compare(SMALL, "out")
    (path,) = Path("out").rglob("run.toml")
    for text, said in (
        (path.read_text().replace("lr = 0.1", "lr = 0.2"), "was edited"),
        ("lrr = 1", "no setting 'lrr'"),
    ):
        path.write_text(text)
        assert fedstrata("compare", *WORDS, "--out", "out") == 2
        assert said in one_sentence(capsys)


def test_a_failing_run_does_not_keep_the_others(capsys: Capture) -> None:
    """A partition that cannot be made, and a directory where no run can be."""
    words = [*WORDS, "--methods", f"fedavg; {UNIFORM}", "--set", "partition=['iid', 'shards(classes=9)']"]
    made = plan({**SMALL, "method": ["fedavg", UNIFORM], "partition": ["iid", "shards(classes=9)"]}, "out")
    made.runs[1].directory.mkdir(parents=True)
    (made.runs[1].directory / "letter").write_text("")
    assert fedstrata("compare", *words, "--out", "out", "--markdown") == 1
    printed = capsys.readouterr()
    *progress, last = printed.err.splitlines(keepends=True)
    assert progress[0].startswith("[1/4] fedavg, partition=iid seed 0: ")
    assert "failed: " in progress[1]
    said = sentence(last)
    assert said.startswith("3 runs failed: ")
    assert "exists and is not empty" in said
    assert said.count("classes must be") == 1
    assert [line.split("|")[3].strip() for line in printed.out.splitlines()[2:6]] == ["1", "0/1", "0/1", "0/1"]


def test_an_error_of_ours_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Federation, *args: object, **keywords: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(Federation, "fit", fail)
    (error,) = compare(SMALL, "out").failures.values()
    assert str(error) == "internal error: KeyError: 'x'"


def test_a_diverged_run_is_finished(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    made = plan({**SMALL, "seed": [0, 1]}, "out")
    run_missing(made)
    path = made.runs[1].directory / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"diverged": "training diverged in round 3: …"}))
    assert missing(made) == []
    (row,) = tabulate(made).rows
    assert (row.diverged_seeds, len(row.sound_results)) == ([1], 1)
    assert fedstrata("compare", *WORDS, "--seeds", 0, 1, "--out", "out") == 0
    assert "(1/2 diverged)" in capsys.readouterr().out

    def diverge(self: Federation, *args: object, **keywords: object) -> None:
        raise Diverged("training diverged")

    monkeypatch.setattr(Federation, "fit", diverge)
    assert _attempt(config(seed=7), Path("other"), lambda rounds: None) is None


def test_a_run_that_really_diverges() -> None:
    """An absurd learning rate: the table shows it, and it is not run again."""
    found = compare({**SMALL, "model": "mlp(hidden=(8,))", "lr": 1e38, "rounds": 5}, "out")
    assert found.failures == {}
    assert missing(found.plan) == []
    assert found.rows[0].diverged_seeds == [0]
    assert "diverged" in show.markdown(found)


def test_a_directory_in_use(tmp_path: Path, capsys: Capture) -> None:
    made = plan({**SMALL, "seed": [0, 1]}, tmp_path / "out")
    directory = made.runs[0].directory
    directory.mkdir(parents=True)
    (directory / "run.toml").write_text(to_toml(identity(config()) | {"workers": 1}))
    code = (
        "import sys, time; from pathlib import Path; from fedstrata.runs.files import claim\n"
        "held = claim(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    holder = process(directory, cwd=tmp_path, code=code)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert fedstrata("compare", *WORDS, "--seeds", 0, 1, "--out", "out", "--quiet") == 1
        said = sentence(capsys.readouterr().err)
        assert said == f"1 run failed: fedavg seed 0: another process is at work in {directory.relative_to(tmp_path)}"
    finally:
        holder.kill()
        holder.communicate()


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: Capture) -> None:
    Path("c.toml").write_text(
        f'methods = ["fedavg", {{method = "{UNIFORM}", lr = 0.5, label = "Uniform"}}]\nseeds = [9]\nrounds = 9\n'
    )
    words = ["compare", "c.toml", *WORDS, "--seeds", 0, 1, "--vary", "epochs=1; 2"]
    assert fedstrata(*words, "--no-run") == 0
    printed = capsys.readouterr()
    assert printed.out.count("0/2") == 4
    assert not Path("runs").exists()
    assert fedstrata(*words) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert lines[0].startswith("[1/8] fedavg, epochs=1 seed 0: ")
    assert lines[0].endswith(" s")
    assert "after 3 rounds" in lines[7]
    assert len(list(Path("runs/compare").glob("*/run.toml"))) == 8
    assert Path("runs/compare/report.html").exists()
    assert not strays(tmp_path)
    for text in ("Uniform", "epochs", "±", "buffers average", "seconds"):
        assert text in printed.out

    assert fedstrata(*words) == 0
    assert capsys.readouterr().out.startswith("8 of 8 runs already finished\n┏")
    assert fedstrata(*words, "--quiet") == 0
    assert capsys.readouterr().out.startswith("┏")


def test_outputs_for_programs(capsys: Capture) -> None:
    words = ["compare", *WORDS, "--methods", f"fedavg; {UNIFORM}", "--seeds", "0,1"]
    assert fedstrata(*words, "--json") == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1
    assert len(printed.err.splitlines()) == 4
    told = json.loads(printed.out)
    assert told["seeds"] == [0, 1]
    assert (told["fixed"]["model"], told["fixed"]["rounds"]) == ("logreg", 3)
    assert [row["method"] for row in told["rows"]] == ["fedavg", UNIFORM]
    for row in told["rows"]:
        for run in row["runs"]:
            assert run["accuracy"] == metrics(Path(run["directory"]))[-1]["accuracy"]
        mean = sum(run["accuracy"] for run in row["runs"]) / 2
        assert row["accuracy"]["mean"] == pytest.approx(mean)

    assert fedstrata(*words, "--csv", "--quiet") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = list(csv.DictReader(io.StringIO(printed.out)))
    assert [line["method"] for line in lines] == ["fedavg", UNIFORM]
    assert float(lines[0]["accuracy_std"]) == told["rows"][0]["accuracy"]["std"]
    assert lines[0]["gap"] == ""

    assert fedstrata(*words, "--markdown") == 0
    printed = capsys.readouterr()
    assert printed.err == "4 of 4 runs already finished\n"
    assert printed.out.startswith("| method ")
    assert len({len(line) for line in printed.out.splitlines()[:4]}) == 1


# --- processes of their own ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_jobs_give_the_same_runs_whatever_goes_wrong_in_others(tmp_path: Path) -> None:
    """Four runs, two at a time: the second cannot be made, the third has no directory, the last begins after them."""
    values = {**SMALL, "partition": ["iid", "shards(classes=9)", "dirichlet(alpha=2.0)", "dirichlet(alpha=1.0)"]}
    del values["workers"]
    first, wrong, blocked, last = plan(values, "many").runs
    blocked.directory.mkdir(parents=True)
    (blocked.directory / "letter").write_text("")
    heard: list[News] = []
    failures = compare(values, "many", jobs=2, on_news=heard.append).failures
    assert failures.keys() == {wrong.directory, blocked.directory}
    assert "classes must be" in str(failures[wrong.directory])
    assert isinstance(failures[blocked.directory], UsageError)
    assert "exists and is not empty" in str(failures[blocked.directory])
    assert sum(news.is_last for news in heard) == 4
    for run in (first, last):
        open_run(run.config.model_copy(update={"workers": 1}), tmp_path / "one" / run.directory.name).fit()
        assert same(run.directory, tmp_path / "one" / run.directory.name)
        assert "workers = 1\n" in (run.directory / "run.toml").read_text()


def test_a_process_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.compare.runner.sys.path", ["nowhere"])
    (error,) = run_missing(plan(SMALL, "out"), jobs=2).values()
    assert type(error) is FedstrataError
    assert str(error) == "its process ended with exit code 1"


def is_free(run: Path) -> bool:
    """True if no process is at work in a directory any more."""
    try:
        return claim(run) is not None
    except UsageError:
        return False


STARTER = """
import gc
import json
import os
import signal
import sys
from fedstrata.__main__ import main
import fedstrata.cli.main, fedstrata.compare.runner, fedstrata.federation

gc.freeze()  # else every fork copies all that was imported when it looks for garbage at its end
for line in sys.stdin:
    place, words = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(300)  # so that nobody waits for ever
        os.chdir(place)
        for number, name in enumerate((os.devnull, "stdout", "stderr")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have told them to ignore it
        sys.argv[1:] = words
        main()
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Commands as `python -m fedstrata` would run them, one after the other, without importing everything for each."""


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    child = process(code=STARTER, cwd=tmp_path_factory.mktemp("starter"), stdin=subprocess.PIPE, stderr=None)
    yield child
    child.communicate(timeout=LONG)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jobs", "seeds", "how"),
    [
        (1, 2, signal.SIGINT),
        (1, 2, signal.SIGTERM),
        (2, 2, signal.SIGINT),
        (2, 1, signal.SIGTERM),
        (2, 1, signal.SIGHUP),
        (2, 2, signal.SIGKILL),
    ],
)
def test_stopped(jobs: int, seeds: int, how: signal.Signals, tmp_path: Path, starter: subprocess.Popen[str]) -> None:
    """Ctrl-C, a batch system's way to end it, and the death of the command: no process goes on, and every run can."""
    numbers = [str(seed) for seed in range(seeds)]
    words = [*WORDS, "--rounds", "100000", "--checkpoint-seconds", "1000", "--seeds", *numbers, "--out", "out"]
    assert starter.stdin is not None
    assert starter.stdout is not None
    print(json.dumps([str(tmp_path), ["compare", *words, "--jobs", str(jobs)]]), file=starter.stdin, flush=True)
    command = int(starter.stdout.readline())
    runs = [run.directory for run in plan({**SMALL, "rounds": 100_000, "seed": [0, 1]}, tmp_path / "out").runs]
    runs = runs[: min(jobs, seeds)]

    def written() -> list[int]:
        paths = [run / "metrics.jsonl" for run in runs]
        return [path.read_bytes().count(b"\n") if path.exists() else 0 for path in paths]

    deadline = time.monotonic() + LONG
    while min(written()) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(command, how)
    code = int(starter.stdout.readline())
    assert (tmp_path / "stdout").read_text() == ""
    if how is signal.SIGKILL:
        assert code == -how
    else:
        assert code == 128 + how
        said = sentence((tmp_path / "stderr").read_text())
        assert said == f"stopped with 0 of {seeds} runs finished; the same command goes on"
    while not all(map(is_free, runs)) and time.monotonic() < deadline:
        time.sleep(0.05)  # without its parent a run still saves its last round
    assert all(map(is_free, runs))
    assert all(list(run.glob("checkpoints/*.checkpoint")) for run in runs)
    assert min(written()) >= 2  # a line that was not flushed yet when the signal came is taken back
