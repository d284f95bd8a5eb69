"""FedImpro at the scale `evidence`: which runs its parts have, and which of them they share."""

from __future__ import annotations

from typing import Any

from fedstrata.compare import plan
from fedstrata.reproduce import PAPERS, parts
from fedstrata.reproduce.parts import Grid
from fedstrata.reproduce.tuning import tuning_plan
from fedstrata.reproduce.verdicts import EVIDENCE_SEEDS
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
