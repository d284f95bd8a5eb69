"""Deeper models: the gaps at equal sequential steps and with re-estimated statistics, fewer local steps, max-pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedstrata.compare import plan, run_missing
from fedstrata.compare.runner import read_finished_records
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.data.examples import TensorExamples
from fedstrata.probes.measures import reestimate_statistics
from fedstrata.reproduce import parts
from fedstrata.reproduce.deeper_figures import (
    BEST,
    EQUAL_STEPS,
    REESTIMATED,
    SettingFigures,
    accuracy_on,
    best_by,
    final_accuracy,
    sequential_steps,
    steps_read,
)
from fedstrata.reproduce.deeper_maxpool import FACTORS, ModelFigures, best_of, claims, ways
from fedstrata.reproduce.deeper_measures import EQ1, GRADIENTS, UPDATES
from fedstrata.reproduce.deeper_plots import accuracy_by_round, by_layer, pictures, updates_by_round
from fedstrata.reproduce.deeper_settings import SCALES, fewer_steps
from fedstrata.reproduce.parts import Grid
from fedstrata.run import deal, final_model, open_run
from fedstrata.runs.records import Record

Rounds = list[Record]


def _grid(name: str, scale: str = "smoke") -> Grid:
    (found,) = parts("deeper", scale, only=[name])
    assert isinstance(found, Grid)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RunConfig, Path]]:
    """The runs of the part `steps`, made once: label → configuration and directory."""
    grid = plan(_grid("steps").values, tmp_path_factory.mktemp("steps"))
    assert not run_missing(grid)
    return {run.label: (run.config, run.directory) for run in grid.runs}


@pytest.fixture(scope="module")
def record(runs: dict[str, tuple[RunConfig, Path]]) -> Record:
    return read_finished_records(runs["FL"][1])[0]


def _rounds(record: Record, accuracies: list[float | None], steps: int, clients: int) -> Rounds:
    return [
        replace(record, round=at, accuracy=value, steps=steps, clients=list(range(clients)))
        for at, value in enumerate(accuracies, start=1)
    ]


# --- equal sequential steps ------------------------------------------------------------------------------------------


def test_clients_train_side_by_side(record: Record) -> None:
    """4 clients make 20 steps in a round, 5 each; one party that makes the same 20 makes them one after the other."""
    assert sequential_steps(_rounds(record, [0.1, 0.2, 0.3], 20, 4)) == [5, 10, 15]
    assert sequential_steps(_rounds(record, [0.1, 0.2], 20, 1)) == [20, 40]


def test_centralised_training_is_read_where_the_federation_ends(record: Record) -> None:
    """FL: 8 rounds of 5 sequential steps are 40, which CL has made after 2 rounds of 20: its best is then 50 %.

    CL's best of all is 80 %, FL's 45 %: a gap of 35 points, and of 5 at equal sequential steps. With re-estimated
    statistics both are at 70 and 60 %: 10 points, and FL, which ended at 40 %, regains 20.
    """
    fl = _rounds(record, [0.2, 0.3, 0.45, 0.3, 0.3, 0.3, 0.3, 0.4], 20, 4)
    cl = _rounds(record, [0.5, 0.4, 0.7, 0.8], 20, 1)
    assert [best_by(cl, steps) for steps in (1, 20, 21, 40, 60, 80, 81)] == [0.5, 0.5, 0.5, 0.5, 0.7, 0.8, None]
    assert best_by([replace(cl[0], accuracy=None), *cl[1:]], 20) == 0.4
    cell = SettingFigures({0: 0.8}, {0: 0.45}, {}, {0: fl}, {0: cl}, {0: 0.7}, {0: 0.6})
    assert cell.gap_by(BEST) == {0: pytest.approx(0.35)}
    assert cell.gap_by(EQUAL_STEPS) == {0: pytest.approx(0.05)}
    assert cell.gap_by(REESTIMATED) == {0: pytest.approx(0.1)}
    assert cell.regained == {0: pytest.approx(0.2)}
    assert steps_read(cell) == (40, 40)
    assert steps_read(replace(cell, cl_curves={})) is None
    assert replace(cell, cl_curves={}).gap_by(EQUAL_STEPS) == {}


def test_at_evidence_centralised_training_is_read_at_a_whole_round() -> None:
    """32 rounds of 8 clients' visits are, one after the other, as many steps as 32/8 rounds of centralised training."""
    run = SCALES["evidence"].run
    assert run["rounds"] % run["clients"] == 0
    assert {r.config.eval_every for r in plan(_grid("depth", "evidence").values, "out").runs} == {1}


# --- re-estimated statistics -----------------------------------------------------------------------------------------


def test_statistics_are_those_of_all_clients_by_hand() -> None:
    """Class 0 where the normalised x is above 0. Clients hold x = 1, 3 and x = 5, 7, whose mean is 4.

    With the running mean at 0 every x > 0 is of class 0; with 4 only those above: of the test's x = 2, 3.9, 6 of
    classes 1, 1, 0 it is then right about all instead of one.
    """
    model = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0], [0.0]]))
    clients = [(np.array(x, np.float32).reshape(-1, 1), np.array([0, 1])) for x in ([1, 3], [5, 7])]
    test = TensorExamples(torch.tensor([[2.0], [3.9], [6.0]]), torch.tensor([1, 1, 0]))
    assert accuracy_on(model, test) == pytest.approx(1 / 3)
    again = reestimate_statistics(model, clients)
    assert float(again[0].running_mean) == pytest.approx(np.mean([1, 3, 5, 7]))
    assert accuracy_on(again, test) == 1


@pytest.mark.parametrize("label", ["CL", "FL"])
def test_of_a_finished_run(label: str, runs: dict[str, tuple[RunConfig, Path]]) -> None:
    """With the run's own statistics the accuracy is its last; estimated again it is kept beside the run."""
    config, directory = runs[label]
    dataset, dealt = deal(config)
    model = final_model(directory, config, dataset)
    assert accuracy_on(model, dataset.test) == read_finished_records(directory)[-1].accuracy
    wanted = accuracy_on(reestimate_statistics(model, list(dataset.train.split(dealt))), dataset.test)
    assert final_accuracy(directory, config, config.seed) == wanted
    assert (directory / "reestimated.json").exists()
    (directory / "reestimated.json").write_text('{"accuracy": 0.123}\n')
    assert final_accuracy(directory, config, config.seed) == 0.123


# --- fewer steps, a smaller rate -------------------------------------------------------------------------------------


def test_all_rows_take_the_same_steps(runs: dict[str, tuple[RunConfig, Path]]) -> None:
    """And are evaluated as often, after as many sequential steps."""
    seen = {}
    for label, (_, directory) in runs.items():
        rounds = read_finished_records(directory)
        at = zip(sequential_steps(rounds), rounds, strict=True)
        seen[label] = sum(r.steps for r in rounds), [made for made, r in at if r.accuracy is not None]
    assert list(seen) == ["CL", "FL", "FL, 1 local step", "CL, lr 0.0125", "FL, lr 0.0125"]
    assert {total for total, _ in seen.values()} == {12}
    assert [evaluated for label, (_, evaluated) in seen.items() if label.startswith("FL")] == [[2, 4]] * 3
    assert runs["CL, lr 0.0125"][0].lr == runs["FL, lr 0.0125"][0].lr == pytest.approx(0.05 / 4)


def test_fewer_steps_at_evidence() -> None:
    """32 rounds of 4 epochs are 128 of one; the epochs are the paper's word for it."""
    many, one, fields = fewer_steps(SCALES["evidence"])
    assert (many, one) == ("4 local epochs", "1 local epoch")
    assert fields == {"epochs": 1, "rounds": 128, "eval_every": 4}


# --- max-pool --------------------------------------------------------------------------------------------------------


def _model(record: Record, cl: float, early: float, fl: float, again: float, others: tuple[float, float]) -> Any:
    """FL's last model is as good as its best one; CL is read after its first round."""
    five = range(5)
    curve, central = _rounds(record, [early, fl], 10, 2), _rounds(record, [early, cl], 10, 1)
    layers = {measure.name: {"a": 1 - fl} for measure in GRADIENTS}
    setting = SettingFigures(
        *(dict.fromkeys(five, value) for value in (cl, fl, layers, curve, central, cl, again)),
    )
    tuned, short = others
    return ModelFigures(setting, *(dict.fromkeys(five, value) for value in (early, fl, fl, tuned, short, 2 - again)))


def test_what_is_left_of_max_pools_gain(record: Record) -> None:
    """FL: 60 against 50 %, a gain of 10 points: 12 early, 10 estimated again, none at the best rates, 9 with short
    visits: the reason is the rate. CL: 70 against 75 % in the end, 40 against 28 % at FL's sequential steps."""
    pooled = _model(record, 0.70, 0.40, 0.60, 0.60, (0.62, 0.61))
    bare = _model(record, 0.75, 0.28, 0.50, 0.50, (0.62, 0.52))
    looked = ways(pooled, bare, "1 local epoch")
    gains = {key: round(100 * way.gain[0]) for key, way in looked.items()}
    assert gains == {
        "cl": -5,
        "cl early": 12,
        "fl": 10,
        "early": 12,
        "long": 10,
        "last": 10,
        "again": 10,
        "tuned": 0,
        "short": 9,
    }
    held = {check.name.partition(", on")[0]: check.holds for check in claims(looked, pooled, bare, "CIFAR-10")}
    assert held == {
        "max-pool gains FL accuracy on CIFAR-10": True,
        "max-pool costs CL accuracy on CIFAR-10": True,
        "running statistics: max-pool gains FL less once they are estimated again": None,
        "running statistics: less than a point of max-pool's gain is left once they are estimated again": False,
        "too few rounds: max-pool gains FL less on the plateau": True,
        "too few rounds: less than a point of max-pool's gain is left on the plateau": False,
        "the learning rate: max-pool gains FL less at each one's best rate": True,
        "the learning rate: less than a point of max-pool's gain is left at each one's best rate": True,
        "local drift: max-pool gains FL less with the fewest local steps": True,
        "local drift: less than a point of max-pool's gain is left with the fewest local steps": False,
        "nothing of the federation: max-pool gains CL accuracy, too, at FL's sequential steps": True,
        "lost in averaging: clients' training loss is no higher with no max-pool than with base": False,
        "clients diverge more with no max-pool than with base, relative to the mean": True,
    }


def test_the_best_of_several_rates() -> None:
    """Seed by seed; a rate that diverged with a seed is passed over, and a seed without the usual rate left out."""
    assert best_of([{0: 0.5, 1: 0.6}, {0: 0.7}, {0: 0.1, 1: 0.2, 2: 0.9}]) == {0: 0.7, 1: 0.6}


def test_max_pool_is_tried_at_the_rates_of_the_trials() -> None:
    scale = SCALES["evidence"]
    assert sorted([scale.run["lr"], *(f * scale.run["lr"] for f in FACTORS)]) == pytest.approx(scale.trials)


# --- pictures --------------------------------------------------------------------------------------------------------


def test_lines_of_a_picture_by_hand(record: Record, tmp_path: Path) -> None:
    """Two seeds: means of 20 and 40 %, of layers 0.001 and 0.003, and by halves of updates (1, 3) and (5, 7)."""
    curves = {0: _rounds(record, [0.2, 0.4], 6, 3), 1: _rounds(record, [0.4, None], 6, 3)}
    layers: Any = {s: {m.name: {"a": v, "b": 2 * v} for m in GRADIENTS} for s, v in {0: 0.001, 1: 0.003}.items()}
    updates = {0: [{"a": 0.001, "b": 0.003}], 1: [{"a": 0.005, "b": 0.007}]}
    cell = SettingFigures({0: 0.5, 1: 0.7}, {0: 0.4, 1: 0.4}, layers, curves, updates=updates)
    assert accuracy_by_round(cell) == {1: pytest.approx(30), 2: pytest.approx(40)}
    assert by_layer(cell, EQ1) == {1: pytest.approx(2), 2: pytest.approx(4)}
    assert by_layer(cell, UPDATES) == {1: pytest.approx(3), 2: pytest.approx(5)}
    assert updates_by_round(cell, deep=False) == {1: pytest.approx(3)}
    assert updates_by_round(cell, deep=True) == {1: pytest.approx(5)}
    nothing = SettingFigures({}, {}, {}, {})
    found = pictures("depth", {"CIFAR-10": {"a": cell, "b": nothing}})
    assert list(found) == ["depth.png"]
    found["depth.png"](tmp_path / "depth.png")
    assert (tmp_path / "depth.png").stat().st_size > 20_000
    assert list(pictures("width", {"CIFAR-10": {}, "CIFAR-100": {}})) == ["width-cifar-10.png", "width-cifar-100.png"]


def test_updates_are_watched_in_every_round(runs: dict[str, tuple[RunConfig, Path]]) -> None:
    """Which changes no bit of the result."""
    config, directory = runs["FL"]
    values = {**config.model_dump(), "probe": None}
    plain = open_run(validate_settings(RunConfig, values), None).fit()
    watched = read_finished_records(directory)
    assert [r.accuracy for r in plain.records] == [r.accuracy for r in watched]
    assert len((directory / "probes.jsonl").read_text().splitlines()) == len(watched)


# --- other datasets --------------------------------------------------------------------------------------------------


def test_tables_on_other_datasets() -> None:
    """Depth and width on CIFAR-100 and Tiny-ImageNet, if they are asked for; all else is on CIFAR-10."""
    found = {part.name: part for part in parts("deeper", "evidence")}
    assert list(found) == ["accumulation", "depth"]
    for name, dataset in (("depth-cifar-100", "cifar-100"), ("width-tiny-imagenet", "tiny-imagenet")):
        grid = _grid(name, "evidence")
        assert not grid.headline
        assert {run.config.dataset.partition("(")[0] for run in plan(grid.values, "out").runs} == {dataset}
    assert _grid("depth", "evidence").draws
