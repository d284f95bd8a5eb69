"""FedImpro at the scale `evidence`: which runs its parts have and share; margins against numbers made by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fedstrata import probes
from fedstrata.compare import plan
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.reproduce import PAPERS, parts
from fedstrata.reproduce.fedimpro_margin import assess, bounds, choose, correlation, measure_round
from fedstrata.reproduce.fedimpro_settings import SCALES
from fedstrata.reproduce.parts import Grid
from fedstrata.reproduce.tuning import tuning_plan
from fedstrata.reproduce.verdicts import EVIDENCE_SEEDS
from fedstrata.run import open_run
from fedstrata.techniques import method


def test_the_headline(tmp_path: Any) -> None:
    """Eight methods on two datasets and two kinds of skew, 150 rounds, five seeds, rates chosen on another seed."""
    found = {part.name: part for part in parts("fedimpro", "evidence")}
    assert list(found) == ["table", "table-cifar-10", "options"]
    for name, data in (("table", "fashion-mnist"), ("table-cifar-10", "cifar-10")):
        part = found[name]
        assert isinstance(part, Grid)
        runs, trials = plan(part.values, tmp_path).runs, tuning_plan(part, {}, tmp_path).runs
        assert len(runs) == 8 * 2 * 5
        assert {run.config.dataset.partition("(")[0] for run in (*runs, *trials)} == {data}
        assert {run.config.partition for run in runs} == {"dirichlet(alpha=0.1)", "dirichlet(alpha=0.05)"}
        assert min(run.config.rounds for run in runs) >= 150
        assert len(trials) == 8 * 3
        assert len({run.config.seed for run in runs}) >= EVIDENCE_SEEDS
        assert not {run.config.seed for run in runs} & {run.config.seed for run in trials}
        labels = {run.label: run.config.method for run in runs}
        assert labels["FedDyn + FedImpro"] == "feddyn(alpha=0.1) + fedimpro(split='layer1')"
        assert labels["centralised"] == "centralised"


def test_every_option_stands_alone(tmp_path: Any) -> None:
    """Each entry but the default differs from it in one argument, but for two that are named for several."""
    (options,) = parts("fedimpro", "evidence", ["options"])
    assert isinstance(options, Grid)
    methods = {run.label or "": run.config.method for run in plan(options.values, tmp_path).runs}
    (default,) = method(methods.pop("Eq. 5 (the default)")).techniques
    assert methods.pop("FedAvg") == "fedavg"
    changed = {}
    for label, text in methods.items():
        (technique,) = method(text).techniques
        changed[label] = {n for n, v in vars(technique).items() if v != getattr(default, n)}
    assert changed.pop("as released") == {"form", "std_cap", "weight", "beta_client", "noise"}
    assert changed.pop("mean, and the batch's labels") == {"loss", "labels"}
    assert sorted(map(sorted, changed.values())) == sorted(
        [[n] for n in ("loss", "labels", "weight", "beta_client", "variance", "std_cap")]
    )


def test_runs_that_parts_share_are_the_same(tmp_path: Any) -> None:
    """FedAvg on Fashion-MNIST with Dirichlet(0.1) is one run in all parts without settings of their own."""
    several = parts("fedimpro", "evidence", ["table", "options", "rivals", "momentum", "split", "noise", "form"])
    for planned, count in ((lambda part: plan(part.values, tmp_path), 5), (lambda p: tuning_plan(p, {}, tmp_path), 3)):
        found = [
            {r.directory for r in planned(part).runs if r.label == "FedAvg" and "0.1" in r.config.partition}
            for part in several
        ]
        assert all(one == found[0] for one in found)
        assert len(found[0]) == count


def test_other_settings(tmp_path: Any) -> None:
    """E = 5; M = 100 with 10 per round; both on both datasets, and they are to be asked for."""
    every = {part.name: part for part in PAPERS["fedimpro"]("evidence")}
    asked = {name for name, part in every.items() if not part.headline}
    assert asked >= {"epochs", "many-cifar-10", "vgg9", "cifar-100", "rivals", "momentum", "divergence"}
    for data in ("", "-cifar-10"):
        epochs, many = every[f"epochs{data}"], every[f"many{data}"]
        assert isinstance(epochs, Grid)
        assert isinstance(many, Grid)
        assert {run.config.epochs for run in plan(epochs.values, tmp_path).runs} == {5}
        sizes = {(run.config.clients, run.config.participation) for run in plan(many.values, tmp_path).runs}
        assert sizes == {(100, 0.1)}


# --- Theorem 4.1 -----------------------------------------------------------------------------------------------------


def test_the_theorems_bound_by_hand() -> None:
    """0.5 − |0.2 − 0.5| − 2·0.05 = 0.1, and 0.2 without the distance; 0.1 − |0.4 − 0.1| = −0.2."""
    found = {"sample": [0.5, 0.1], "whole": [0.2, 0.4], "distance": [0.05, 0.0]}
    assert bounds(found, measured=True) == pytest.approx([0.1, -0.2])
    assert bounds(found, measured=False) == pytest.approx([0.2, -0.2])
    assert correlation([1.0, 2.0, 3.0], [2.0, 4.0, 9.0]) == pytest.approx(7 / 52**0.5)
    assert correlation([1.0, 1.0, 1.0], [2.0, 4.0, 9.0]) is None


def test_margins_are_judged() -> None:
    """FedAvg breaks the theorem in all seeds, FedImpro keeps it and has the larger margins."""
    usual = {"sample": [0.3, 0.3, 0.3], "whole": [0.3, 0.2, 0.3], "distance": [4.0, 4.0, 4.0]}
    found = {
        seed: {
            "FedAvg": {**usual, "others": [0.1, 0.11, 0.1 + seed / 100], "accuracy": [0.3, 0.31, 0.35]},
            "FedImpro": {**usual, "others": [0.4, 0.45, 0.4 + seed / 100], "accuracy": [0.5, 0.4, 0.5]},
        }
        for seed in range(1, 6)
    }
    verdicts = {check.name: check.holds for check in assess(found, ["FedAvg", "FedImpro"], 1).checks}
    assert verdicts["FedImpro's local models have larger margins than FedAvg's on other clients' data"]
    assert verdicts["Theorem 4.1 holds in the mean over visits, C_d = 0 (FedAvg)"] is False
    assert verdicts["Theorem 4.1 holds in the mean over visits, C_d = 0 (FedImpro)"]
    assert verdicts["Theorem 4.1's bound with the samples' C_d is above 0 (FedAvg)"] is False
    assert verdicts["visits with larger margins have higher accuracies (FedAvg)"]
    assert verdicts["visits with larger margins have higher accuracies (FedImpro)"] is False


def test_a_rounds_margins_are_those_of_the_local_models() -> None:
    """Client 2's model is the global one with its classifier turned round, client 0's the global one itself."""
    run = {**SCALES["smoke"].run, "partition": "iid", "participation": 2, "method": "fedavg"}
    federation = open_run(validate_settings(RunConfig, {**run, "rounds": 6, "steps": 8}), None)
    federation.fit()
    model, clients = federation.model, list(federation.clients)
    turned = {"head.weight": -model.state_dict()["head.weight"]}
    fresh = choose(clients[1], 60, 0, "fresh")
    found = measure_round(model, {0: {}, 2: turned}, clients, fresh, 20, seed=4)
    held = {client: choose(clients[client], 20, 4, client) for client in (0, 2)}
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("head.weight").neg_()
    rows = [(model, held[2], held[0], clients[2]), (other, held[0], held[2], clients[0])]
    assert len(found) == 2
    for row, (mine, others, own, _) in zip(found, rows, strict=True):
        assert row["others"] == pytest.approx(float(probes.margins(mine, *others).mean()))
        assert row["sample"] == pytest.approx(float(probes.margins(mine, *own).mean()))
        assert row["distance"] == pytest.approx(probes.conditional_wasserstein(own, others, None).value)
    accuracies = [
        sum(int((m.eval()(x).argmax(1) == y).sum()) for x, y in several) / sum(len(y) for _, y in several)
        for m, several in (
            (model, [c.batch(torch.arange(len(c))) for at, c in enumerate(clients) if at != 0]),
            (other, [c.batch(torch.arange(len(c))) for at, c in enumerate(clients) if at != 2]),
        )
    ]
    assert [row["accuracy"] for row in found] == pytest.approx(accuracies)
