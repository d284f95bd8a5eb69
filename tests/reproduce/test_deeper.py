"""Deeper models reproduced: at the smallest scale, the measures by hand, the claims' arithmetic, and the settings."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedstrata.compare import plan
from fedstrata.compare.runner import read_finished_records
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.data.examples import TensorExamples
from fedstrata.models.strata import strata
from fedstrata.probes.measures import client_gradients, divergence, reestimate_statistics, relative_divergence
from fedstrata.reproduce import Reproduction, parts, reproduce
from fedstrata.reproduce.deeper_accumulation import assess, first_of_each_class, gradient_spreads, log_means
from fedstrata.reproduce.deeper_divergence import assess_rounds, measure_rounds
from fedstrata.reproduce.deeper_figures import SettingFigures, rounds_to_share
from fedstrata.reproduce.deeper_measures import EQ1, GRADIENTS, MEASURES, RELATIVE, UNSCALED, UPDATES, layer_halves
from fedstrata.reproduce.deeper_settings import SCALES
from fedstrata.reproduce.deeper_tables import paper_tables
from fedstrata.reproduce.parts import Findings, Grid, OwnWork, PartResources
from fedstrata.run import deal, models_of, open_run
from fedstrata.runs.records import Record

PARTS = (
    "accumulation",
    "terms",
    "rounds",
    "depth",
    "width",
    "stem",
    "resolution",
    "augmentation",
    "transformer",
    "residual",
    "channels",
)
"""The tables, and what comes before them."""
REASONS = ("steps", "maxpool")

Made = tuple[Reproduction, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The whole at scale smoke, made once."""
    out = tmp_path_factory.mktemp("deeper")
    return reproduce("deeper", "smoke", out=out), out


# --- the whole -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "claim",
    [
        "4-layer CNN: the first layer diverges more than the last (noise on an image), by Eq. 1",
        "8-layer CNN: most layers diverge more than the next (images of one class), un-normalised",
        "the 8-layer CNN's first layer diverges more than the 4-layer CNN's (images of one class), by Eq. 1",
        "8-layer CNN of one width: most layers diverge more than the next (noise on an image), relative to the mean",
        "4-layer CNN: Assumption 1 holds within a factor of 2 in every layer (noise on an image, trained)",
        "MLP: divergence never falls towards the input (images of one class, before training)",
        "shallow layers diverge more than deep ones, by Eq. 1",
        "shallow layers diverge more than deep ones, un-normalised",
        "shallow layers' divergence falls, relative to the mean",
        "deep layers' divergence grows, from updates",
        "the gap is narrower with ResNet8 than with ResNet10 on digits, by best accuracies",
        "the gap is narrower with ResNet8 than with ResNet10 on digits, at equal sequential steps",
        "the gap is narrower with ResNet8 than with ResNet10 on digits, with re-estimated statistics",
        "FL's accuracy falls more from round to round with ResNet10 than with ResNet8 on digits",
        "FL is better with 3× width than with 1× width on digits",
        "clients diverge less with 3×3 conv. than with base on digits, by Eq. 1",
        "clients diverge less with 3×3 conv. than with base on digits, un-normalised",
        "clients diverge less with 3×3 conv. than with base on digits, relative to the mean",
        "the gap is narrower with no max-pool than with base on digits, at equal sequential steps",
        "clients diverge less in deep layers with 16×16 than with 8×8 on digits, by Eq. 1",
        "clients diverge less in deep layers with 16×16 than with 8×8 on digits, un-normalised",
        "clients diverge less in deep layers with 16×16 than with 8×8 on digits, relative to the mean",
        "FL is better with RRC than with CJ on digits",
        "FL loses a smaller share of CL's accuracy with Swin than with ViT on digits",
        "FL needs fewer rounds to 90 % with residual links than with no links on digits",
        "clients diverge less with normal than with reversed on digits, by Eq. 1",
        "clients diverge less with normal than with reversed on digits, un-normalised",
        "clients diverge less with normal than with reversed on digits, relative to the mean",
        "FL is better with 1 local step, lr 0.05 than with 2 local steps, lr 0.05 on digits",
        "the gap is narrower with 2 local steps, lr 0.0125 than with 2 local steps, lr 0.05 on digits, "
        "by best accuracies",
        "running statistics: max-pool gains FL less once they are estimated again, on digits",
        "local drift: less than a point of max-pool's gain is left with the fewest local steps, on digits",
        "clients diverge more with no max-pool than with base, relative to the mean, on digits",
    ],
)
def test_every_claim_is_judged(claim: str, made: Made) -> None:
    (check,) = [check for check in made[0].checks if check.name == claim]
    assert check.values
    assert "one seed" in check.told or "seeds" in check.told


def test_smoke(made: Made) -> None:
    found, out = made
    assert not found.failures
    assert len({check.name for check in found.checks}) == len(found.checks)
    assert all(check.values and not check.missing for check in found.checks)
    assert [section.part.name for section in found.sections] == [*PARTS, *REASONS]
    assert "–" not in {cell for s in found.sections for t in s.findings.tables for row in t.rows for cell in row}
    assert [name for s in found.sections for name in s.findings.pictures] == ["accumulation.png", "rounds.png"]
    assert all((out / name).stat().st_size > 5000 for s in found.sections for name in s.findings.pictures)
    assert str(out) not in (out / "report.md").read_text()
    assert [part["name"] for part in json.loads((out / "report.json").read_text())["parts"]] == [*PARTS, *REASONS]


def test_what_is_equal_in_two_tables_is_run_once(made: Made) -> None:
    """2 depths, of which one is the slim model and one the deep; 2 more widths, 2 stems, 1 resolution, 3 augmentations,
    2 transformers, 1 without links, 2 plans: 15, centralised and federated. Then 1 with fewer steps, and a pair at a
    smaller rate; and, each with max-pool and without, 2 more rates, fewer steps and more rounds, but the base's fewer
    steps are there: 7."""
    grids = [plan(part.values, "out").runs for part in parts("deeper", "smoke") if isinstance(part, Grid)]
    assert [len(runs) // 2 for runs in grids[:8]] == [2, 3, 3, 2, 4, 2, 2, 3]
    assert [len(runs) for runs in grids[8:]] == [5, 12]
    assert len(list((made[1] / "runs").iterdir())) == 2 * (2 + 2 + 2 + 1 + 3 + 2 + 1 + 2) + 1 + 2 + 7


def test_the_tables_first_rows_have_nothing_to_gain(made: Made) -> None:
    for section in made[0].sections[3:-1]:
        table, _ = section.findings.tables
        assert table.columns[2:6] == ("Acc. CL, %", "Acc. FL, %", "Gap, points", "I_div, points")
        assert table.columns[6:] == ("Div., Eq. 1, ×10⁻³", "Div., un-normalised", "Div., relative")
        first, *others = table.rows
        assert first[5] == ""
        for row in others:
            cl, fl, gap, gained = map(float, row[2:6])
            assert gap == pytest.approx(cl - fl, abs=0.011)
            assert gained == pytest.approx(float(first[4]) - gap, abs=0.011)


# --- what is measured ------------------------------------------------------------------------------------------------


def test_divergence_is_that_of_the_finished_run(made: Made) -> None:
    """The last model's, after a run that nobody watched, and the same in the part that watches every round."""
    rounds, depth = (part for part in parts("deeper", "smoke") if part.name in ("rounds", "depth"))
    assert isinstance(rounds, OwnWork)
    config = validate_settings(RunConfig, {**rounds.settings["run"], "seed": 0})
    federation = open_run(config, None)
    federation.fit()
    clients, layers = list(federation.clients), federation.strata
    wanted = divergence(client_gradients(federation.model, clients), layers)
    relative = relative_divergence(client_gradients(reestimate_statistics(federation.model, clients), clients), layers)
    sections = {section.part.name: section.findings for section in made[0].sections}
    watched, finished = (
        {measure: rounds[-1] for measure, rounds in sections["rounds"].data["0"]["rounds"].items()},
        sections["depth"].data["layers"]["digits"]["ResNet10"][0],
    )
    assert list(watched) == [measure.name for measure in MEASURES]
    for found in (watched, finished):
        assert found[EQ1.name] == pytest.approx(wanted, rel=1e-4)
        assert found[RELATIVE.name] == pytest.approx(relative, rel=1e-3)
        sizes = {s.name: sum(dict(federation.model.named_parameters())[n].numel() for n in s.params) for s in layers}
        unscaled = {name: math.sqrt(sizes[name]) * value for name, value in wanted.items()}
        assert found[UNSCALED.name] == pytest.approx(unscaled, rel=1e-4)
    assert depth.name == "depth"


def test_watching_the_rounds_changes_nothing() -> None:
    run = {**SCALES["smoke"].run, "dataset": "digits", "partition": "iid", "model": "logreg", "augment": "none"}
    found = measure_rounds({"run": run}, 3, PartResources(None, 1))
    assert {name: len(rounds) for name, rounds in found["rounds"].items()} == dict.fromkeys(
        [measure.name for measure in MEASURES], run["rounds"]
    )
    config = validate_settings(RunConfig, {**run, "seed": 3})
    history = open_run(config, None).fit()
    dataset, dealt = deal(config)
    model, _ = models_of(config, dataset)
    model.load_state_dict(history.model.state_dict())
    wanted = divergence(client_gradients(model, list(dataset.train.split(dealt))), strata(model))
    assert found["rounds"][EQ1.name][-1] == pytest.approx(wanted, rel=1e-6)
    assert found["stages"] == {"head": "head"}


def test_updates_are_those_of_the_round() -> None:
    """One step of plain SGD on all of a client's examples: the update is −η·g, so that its divergence is η times Eq. 1
    at the model before."""
    run = {**SCALES["smoke"].run, "dataset": "digits(examples=60)", "partition": "iid", "model": "logreg"}
    run |= {"augment": "none", "rounds": 1, "steps": 1, "batch_size": 60, "lr": 0.5}
    found = measure_rounds({"run": run}, 3, PartResources(None, 1))
    federation = open_run(validate_settings(RunConfig, {**run, "seed": 3}), None)
    before = divergence(client_gradients(federation.model, list(federation.clients)), federation.strata)
    assert found["rounds"][UPDATES.name] == [pytest.approx({"head": 0.5 * before["head"]}, rel=1e-4)]


def test_spreads_within_a_class_are_by_hand() -> None:
    """Logits (w·x, 0) with w = 0: the loss's gradient of w is −x/2 for class 0 and +x/2 for class 1.

    Class 0 has x = 1 and 3, gradients −0.5 and −1.5 and, for the second row of the weight, +0.5 and +1.5: standard
    deviation 0.5. Class 1 has x = 2 twice: none. There are 2 weights: √2 times as much un-normalised. Class 0's mean
    gradient is (−1, 1), of length √2: 0.5 relative to it.
    """
    model = nn.Sequential(nn.Linear(1, 2, bias=False))
    nn.init.zeros_(model[0].weight)
    x, y = torch.tensor([[1.0], [3.0], [2.0], [2.0]]), torch.tensor([0, 0, 1, 1])
    found = gradient_spreads(model, x, y, 200, 0)
    assert found["class"][EQ1.name] == {"0": pytest.approx((0.5, 0.0), abs=1e-6)}
    assert found["class"][UNSCALED.name] == {"0": pytest.approx((math.sqrt(0.5), 0.0), abs=1e-6)}
    assert found["class"][RELATIVE.name] == {"0": pytest.approx((0.5, 0.0), abs=1e-6)}
    assert found["noise"][EQ1.name]["0"] == pytest.approx((0.05, 0.05), rel=0.2)
    assert log_means({"a": [0.1, 0.01, 0.19]}) == [pytest.approx(-1)]


def test_the_first_images_of_the_first_classes() -> None:
    data = TensorExamples(torch.arange(7.0).unsqueeze(1), torch.tensor([2, 0, 2, 5, 0, 2, 0]))
    x, y = first_of_each_class(data, classes=2, count=2)
    assert (x.flatten().tolist(), y.tolist()) == ([1.0, 4.0, 0.0, 2.0], [0, 0, 2, 2])


def test_halves_are_from_the_input() -> None:
    assert layer_halves({"a": 1.0, "b": 3.0, "c": 7.0}) == (2.0, 7.0)
    assert layer_halves({"a": 1.0, "b": 3.0}) == (1.0, 3.0)


# --- what is found in it ---------------------------------------------------------------------------------------------


def _network(*layers: float) -> dict[str, Any]:
    layer = {str(at): [10**value] * 3 for at, value in enumerate(layers)}
    figures = {measure.name: layer for measure in GRADIENTS}
    return {
        "trained": {"noise": figures, "class": figures},
        "new": {"noise": figures, "class": figures},
        "accuracy": 0.9,
    }


def test_accumulation_is_judged() -> None:
    """The deep one's first layer is at 10⁻¹, the shallow one's at 10⁻²; each layer has more than the next."""
    found = assess(_five({"4": _network(-2, -3), "8": _network(-1, -2, -3, -4)}))
    assert [check.holds for check in found.checks] == [True] * 5 * 2 * 3
    assert found.checks[0].figures.startswith("-2.0000 ± 0.0000 against -3.0000 ± 0.0000, +1.0000")
    assert [row[1] for row in found.tables[0].rows] == ["-2.0000 ± 0.0000", "-3.0000 ± 0.0000", "", ""]
    found = assess(_five({"4": _network(-2, -1), "8": _network(-4, -3, -2, -1)}))
    assert [check.holds for check in found.checks] == [False] * 5 * 2 * 3


def test_networks_are_compared_in_pairs() -> None:
    """By 2 kinds and 3 measures: 4 networks have 2 claims each, 2 pairs one."""
    lines = {"4": (-2, -3), "8": (-1, -2, -3), "4 of one width": (-5, -4), "8 of one width": (-6, -5, -4)}
    found = assess(_five({label: _network(*line) for label, line in lines.items()}))
    assert len(found.checks) == 2 * 3 * (4 * 2 + 2)
    between = [check for check in found.checks if check.name.startswith("the ")]
    assert {check.name.partition(" (")[0]: check.holds for check in between} == {
        "the 8's first layer diverges more than the 4's": True,
        "the 8 of one width's first layer diverges more than the 4 of one width's": False,
    }


def _five(figures: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The same figures with five seeds: the fewest that decide without any spread."""
    return dict.fromkeys(range(5), figures)


def _watched(*rounds: tuple[float, float]) -> dict[str, Any]:
    """Un-normalised it is the other way round: layers are then as far apart as the other layer is by other measures."""
    straight, turned = ([{"a": pair[at], "b": pair[1 - at]} for pair in rounds] for at in (0, 1))
    figures = {measure.name: turned if measure is UNSCALED else straight for measure in MEASURES}
    return {"rounds": figures, "stages": {"a": "a", "b": "b"}}


def test_rounds_are_judged() -> None:
    """Layer a falls from 0.008 to 0.004, layer b grows from 0.001 to 0.003; un-normalised b falls, and a grows."""
    found = assess_rounds(_five(_watched((0.008, 0.001), (0.004, 0.003))))
    assert [check.holds for check in found.checks] == [True] * 3 + [False] * 3 + [True] * 6
    assert found.checks[0].figures.startswith("6.000 ± 0.000 against 2.000 ± 0.000, +4.000")
    found = assess_rounds({0: _watched((0.008, 0.001), (0.004, 0.003))})
    assert found.tables[0].columns[1:5] == (
        "Eq. 1, ×10⁻³, first half",
        "Eq. 1, ×10⁻³, second half",
        "un-normalised, first half",
        "un-normalised, second half",
    )
    assert [row[:5] for row in found.tables[0].rows] == [
        ("shallow half", "8.000", "4.000", "0.0010", "0.0030"),
        ("deep half", "1.000", "3.000", "0.0080", "0.0040"),
        ("a", "8.000", "4.000", "0.0010", "0.0030"),
        ("b", "1.000", "3.000", "0.0080", "0.0040"),
    ]


@pytest.fixture(scope="module")
def record(made: Made) -> Record:
    return read_finished_records(next((made[1] / "runs").iterdir()))[0]


def _cell(record: Record, cl: float, curve: list[float], layers: tuple[float, ...] = (0.001, 0.001)) -> SettingFigures:
    rounds = [replace(record, round=at, accuracy=value, metrics={}) for at, value in enumerate(curve, start=1)]
    figures = {str(at): value for at, value in enumerate(layers)}
    by_measure = {measure.name: figures for measure in GRADIENTS}
    central = [replace(rounds[0], accuracy=cl)]
    again = {"cl_again": {0: cl}, "fl_again": {0: max(curve)}, "updates": {0: [figures]}}
    return SettingFigures({0: cl}, {0: max(curve)}, {0: by_measure}, {0: rounds}, {0: central * len(rounds)}, **again)


def _of_five_seeds(cell: SettingFigures) -> SettingFigures:
    figures = {field.name: dict.fromkeys(range(5), getattr(cell, field.name)[0]) for field in fields(cell)}
    return SettingFigures(**figures)


def test_a_cell(record: Record) -> None:
    """CL 80 %, FL 60 %: a gap of 20 points, a quarter of 80 %. Of three steps one falls, by 30 points."""
    cell = _cell(record, 0.8, [0.2, 0.5, 0.2, 0.6], (0.004, 0.002, 0.001, 0.003))
    assert cell.gap == {0: pytest.approx(0.2)}
    assert cell.loss == {0: pytest.approx(0.25)}
    assert cell.falls == {0: pytest.approx(0.1)}
    assert cell.div(UNSCALED) == {0: pytest.approx(0.0025)}
    assert cell.deep(EQ1) == {0: pytest.approx(0.002)}
    assert replace(cell, cl={1: 0.9}).gap == {}


def test_rounds_to_what_both_reach(record: Record) -> None:
    """The lower one has 50 % at its best: 45 % is reached in the third round, and by the other one in the second."""
    cells = {"a": _cell(record, 0.8, [0.1, 0.4, 0.5]), "b": _cell(record, 0.8, [0.4, 0.45, 0.9])}
    assert rounds_to_share(cells, 0.9) == {"a": {0: 3}, "b": {0: 2}}
    assert rounds_to_share({**cells, "c": replace(cells["a"], fl={})}, 0.9) == {"a": {}, "b": {}, "c": {}}


@pytest.mark.parametrize("name", PARTS[3:])
def test_a_table_is_judged(name: str, record: Record) -> None:
    """Where everything is as the paper has it every claim holds, and none where everything is the other way round."""
    sheet = paper_tables(SCALES["small"])[name]
    labels = list(sheet.rows)
    better = {"depth": labels[::-1], "channels": labels[::-1], "augmentation": ["none", "CJ", "both", "RRC"]}
    order = better.get(name, labels)
    good = {}
    for place, label in enumerate(order):
        curve = [0.2 + 0.09 * place, 0.3 + 0.1 * place, 0.3 + 0.1 * place - 0.02 / (place + 1)]
        good[label] = _of_five_seeds(_cell(record, 0.8, curve, (0.01 / (place + 1),) * 4))
    bad = dict(zip(order, reversed(good.values()), strict=True))
    for cells, verdict in ((good, True), (bad, False)):
        checks = sheet.claims(sheet, {label: cells[label] for label in labels}, "CIFAR-10")
        assert len(checks) >= 1
        first, last = order[0], order[-1]
        against = [c for c in checks if first in c.name and last in c.name]
        assert against
        assert {check.holds for check in against} == {verdict}, [str(check) for check in against]


# --- the settings ----------------------------------------------------------------------------------------------------


def test_the_papers_figures_stand_beside() -> None:
    tables = paper_tables(SCALES["paper"])
    assert tables["width"].paper("gap", "1× width", "2× width", "CIFAR-100") == "6.0 against 2.7 points"
    assert tables["width"].paper("div", "1× width", "3× width", "CIFAR-10") == (
        "Tiny-ImageNet: 46 against 11; CIFAR-100: 52 against 14"
    )
    assert tables["stem"].paper("fl", "no max-pool", "base", "CIFAR-10") == "72.4 against 61.8 %"
    assert tables["augmentation"].paper("fl", "RRC", "CJ", "Tiny-ImageNet") == "23.6 against 14.7 %"
    assert tables["augmentation"].paper("fl", "RRC", "none", "Tiny-ImageNet") == ""
    assert tables["channels"].paper("fl", "normal", "reversed", "Tiny-ImageNet") == "45.8 against 35.4 %"
    for table in tables.values():
        assert {len(rows) for rows in table.figures.values()} <= {len(table.rows)}


def test_the_papers_settings() -> None:
    """30 clients, IID, 8 epochs, lr 0.02, 64×64, random resized crops; ResNet-13 and ResNet-101."""
    found = {part.name: part for part in parts("deeper", "paper")}
    assert list(found) == [*PARTS, *REASONS]
    runs = {name: plan(part.values, "out").runs for name, part in found.items() if isinstance(part, Grid)}
    configs = [run.config for name, several in runs.items() if name not in REASONS for run in several]
    assert {(c.clients, c.epochs, c.lr, c.partition, c.device) for c in configs} == {(30, 8, 0.02, "iid", "cuda")}
    assert {c.method for c in configs} == {"centralised", "fedavg"}
    assert {c.augment for c in configs} == {"rrc", "none", "cj", "both"}
    counts = {name: len(several) // (2 * 3) for name, several in runs.items() if name not in REASONS}
    assert counts == {
        "depth": 5 * 2,
        "width": 3 * 2,
        "stem": 3 * 3,
        "resolution": 3 * 3,
        "augmentation": 4 * 2,
        "transformer": 2 * 3,
        "residual": 2 * 2,
        "channels": 3,
    }
    widths = [f"resnet13(width={width})" for width in (32, 64, 96)]
    assert list(dict.fromkeys(run.config.model for run in runs["width"])) == widths
    assert {run.config.model for run in runs["resolution"]} == {"resnet101(stem='7x7', maxpool=True)"}
    assert "cifar-100(resolution=192)" in {run.config.dataset for run in runs["resolution"]}
    networks = found["accumulation"]
    assert isinstance(networks, OwnWork)
    assert (networks.settings["run"]["dataset"], networks.settings["draws"]) == ("mnist", 1000)
    assert list(networks.settings["models"].values()) == [
        "cnn4(width=32)",
        "cnn8(width=32)",
        "cnn4(width=64, growth=1)",
        "cnn8(width=64, growth=1)",
    ]


def test_seed_1_is_for_finding_settings() -> None:
    assert SCALES["small"].seeds == (4, 5, 6)


def test_findings_are_numbers(made: Made) -> None:
    """Divergences are finite, and above zero wherever clients differ."""
    tables: list[Findings] = [section.findings for section in made[0].sections[3:-1]]
    values = [
        value
        for findings in tables
        for cells in findings.data["layers"]["digits"].values()
        for figures in cells[0].values()
        for value in figures.values()
    ]
    assert all(math.isfinite(value) and value >= 0 for value in values)
    assert sum(value > 0 for value in values) > 0.9 * len(values)
