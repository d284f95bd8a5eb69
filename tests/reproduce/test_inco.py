"""InCo at the scale `evidence`: what its parts have, and the measures of gradients against numbers made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.compare import plan
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.probes.measures import Crossing
from fedstrata.reproduce import parts
from fedstrata.reproduce.inco import BASES, HETEROS
from fedstrata.reproduce.inco_decisive import LENGTH, SHUFFLED, beta_left
from fedstrata.reproduce.inco_gradients import (
    BINS,
    GROUP,
    HETERO,
    IID,
    assess,
    distance,
    histogram,
    likeness,
    name_layers,
    roughness,
    watch_changes,
)
from fedstrata.reproduce.inco_settings import SCALES
from fedstrata.reproduce.parts import Grid
from fedstrata.reproduce.tuning import tuning_plan
from fedstrata.reproduce.verdicts import EVIDENCE_SEEDS
from fedstrata.run import open_run

# --- the plan --------------------------------------------------------------------------------------------------------


def test_the_decisive_part(tmp_path: Any) -> None:
    """Two datasets and two kinds of skew, 250 rounds, five paired seeds, rates chosen on another seed."""
    found = {part.name: part for part in parts("inco", "evidence")}
    assert list(found) == ["decisive", "decisive-cifar-10", "coefficients", "gradients"]
    every = {part.name: part for part in parts("inco", "evidence", list(_names("evidence")))}
    assert {
        "table",
        "table-cifar-10",
        "ablation",
        "groups",
        "transformers",
        "similarity",
    } <= every.keys() - found.keys()
    for name, data in (("decisive", "fashion-mnist"), ("decisive-cifar-10", "cifar-10")):
        part = found[name]
        assert isinstance(part, Grid)
        runs = plan(part.values, tmp_path).runs
        assert len(runs) == 4 * 2 * 5
        assert {run.config.dataset.partition("(")[0] for run in runs} == {data}
        assert {run.config.partition for run in runs} == {"dirichlet(alpha=0.5)", "dirichlet(alpha=1.0)"}
        assert min(run.config.rounds for run in runs) >= 250
        assert {run.label: run.config.method for run in runs} == {
            "HeteroAvg": "heteroavg",
            "InCo": "heteroavg + inco(reference='conv2')",
            SHUFFLED: "heteroavg + inco(reference='conv2', control='shuffled')",
            LENGTH: "heteroavg + inco(reference='conv2', control='length')",
        }
        assert {run.config.probe for run in runs if run.label != "HeteroAvg"} == {"crossing"}
        trials = tuning_plan(part, {}, tmp_path).runs
        assert len(trials) == 4 * 3
        assert len({run.config.seed for run in runs}) >= EVIDENCE_SEEDS
        assert not {run.config.seed for run in runs} & {run.config.seed for run in trials}


def _names(scale: str) -> list[str]:
    from fedstrata.reproduce import PAPERS

    return [part.name for part in PAPERS["inco"](scale)]


def test_runs_that_parts_share_are_the_same(tmp_path: Any) -> None:
    """InCo with Dirichlet(0.5) on Fashion-MNIST is one run in all parts that have it, and so are its trials."""
    several = parts("inco", "evidence", ["decisive", "coefficients", "ablation", "groups"])
    for planned in (lambda part: plan(part.values, tmp_path), lambda part: tuning_plan(part, {}, tmp_path)):
        found = [
            {run.directory for run in planned(part).runs if run.label == "InCo" and "0.5" in run.config.partition}
            for part in several
        ]
        assert all(one == found[0] for one in found)
        assert len(found[0]) in (3, 5)


def test_the_table_credits_crossing(tmp_path: Any) -> None:
    (table,) = parts("inco", "evidence", ["table"])
    assert isinstance(table, Grid)
    methods = {run.label: run.config.method for run in plan(table.values, tmp_path).runs}
    assert len(methods) == 15
    for base, text in BASES.items():
        assert methods[HETEROS[base]] == (f"{text} + heteroavg" if text else "heteroavg")
        assert methods[f"{base} + InCo"] == methods[HETEROS[base]] + " + inco(reference='conv2')"


def test_the_transformers_have_8_to_12_blocks(tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    (part,) = parts("inco", "evidence", ["transformers"])
    assert isinstance(part, Grid)
    runs = plan(part.values, tmp_path).runs
    assert {run.label for run in runs} == {"HeteroAvg", "InCo"}
    assert [f"depth={depth}," in (runs[0].config.archs or "") for depth in range(7, 14)] == [False, *[True] * 5, False]


# --- measures --------------------------------------------------------------------------------------------------------


def test_a_histogram_by_hand() -> None:
    """−1, −1, 1 and 1 have deviation 1: half of them each in the bins from −1 to −0.9 and from 1 to 1.1.

    Second differences of (… 0, ½, 0 …) are ½, −1 and ½: 2 for each of the two. Twice the numbers are as smooth.
    """
    values = torch.tensor([[-1.0, 1.0], [1.0, -1.0]])
    found = histogram(values)
    assert len(found) == BINS
    assert {at: float(share) for at, share in enumerate(found) if share} == {20: 0.5, 40: 0.5}
    assert roughness(values) == pytest.approx(4.0)
    assert roughness(2 * values) == pytest.approx(4.0)
    smooth = torch.distributions.Normal(0, 1).icdf(torch.linspace(0.001, 0.999, 20_001))
    noisy = torch.randn(500, generator=torch.Generator().manual_seed(1))
    assert roughness(smooth) < roughness(noisy) < roughness(values)


def test_a_distance_by_hand() -> None:
    """(−1, 1) and (0, 2): the second's deviation is √2, so |−1 − 0| and |1 − √2|, in the mean (1 + 0.414)/2."""
    one, other = torch.tensor([1.0, -1.0]), torch.tensor([[0.0, 2.0]])
    assert distance(one, other) == pytest.approx((1 + 2**0.5 - 1) / 2)
    assert distance(other, 3 * other) == pytest.approx(0)
    rng = np.random.default_rng(2)
    left, right = rng.normal(size=300), rng.exponential(size=300)
    expected = [np.sort(v / np.sqrt((v**2).mean())) for v in (left, right)]
    found = distance(torch.tensor(left), torch.tensor(right))
    assert found == pytest.approx(np.abs(expected[0] - expected[1]).mean())


def test_gradients_of_turned_inputs_are_alike() -> None:
    """CKA compares output channels: a layer whose input channels are turned is the same, another one is not."""
    source = torch.Generator().manual_seed(3)
    gradient, other = (torch.randn(16, 8, 3, 3, generator=source) for _ in range(2))
    turned = torch.linalg.qr(torch.randn(72, 72, generator=source)).Q
    assert likeness(gradient, (gradient.flatten(1) @ turned).reshape(gradient.shape)) == pytest.approx(1, abs=1e-4)
    assert abs(likeness(gradient, other)) < 0.5


def test_beta_left_by_hand() -> None:
    """Ten rounds: a fifth is two. Layer a: (4 + 2)/2 first and (1 + 1)/2 last, b: 1 and 0: (1 + 0)/(3 + 1)."""
    a, b = [4.0, -2.0, *[9.0] * 6, -1.0, 1.0], [1.0, -1.0, *[5.0] * 6, 0.0, 0.0]
    assert beta_left(Crossing(beta={"a": a, "b": b})) == pytest.approx(1 / 4)


RUN: dict[str, Any] = {
    **SCALES["smoke"].run,
    **SCALES["smoke"].models,
    "dataset": SCALES["smoke"].datasets[0],
}


@pytest.mark.parametrize("method", ["heteroavg", "fedavg(weight='uniform') + groupavg"])
def test_changes_are_those_of_the_deepest_model(method: str) -> None:
    """They add up to what training did to it; layers of one shape are named from the one that others follow."""
    plain = open_run(validate_settings(RunConfig, {**RUN, "archs": None, "method": "fedavg"}), None)
    layers = name_layers(plain, ["layer3", "layer4"])
    assert layers == {
        f"layer{stage}.{block}.conv{conv}.weight": f"layer{stage}.conv{2 * block + conv - 2}"
        for stage in (3, 4)
        for block, conv in ((0, 2), (1, 1), (1, 2))
    }
    federation = open_run(validate_settings(RunConfig, {**RUN, "method": method}), None)
    begin = federation.model.state_dict()
    found = list(watch_changes(federation, list(layers)))
    assert [number for number, _ in found] == [1, 2]
    end = federation.model.state_dict()
    for layer in layers:
        (name,) = (n for n in end if n == layer or (n.endswith(f".{layer}") and n.startswith("resnet14")))
        total = sum(change[layer] for _, change in found)
        torch.testing.assert_close(end[name] - begin[name], total, rtol=1e-4, atol=1e-6)
        assert total.abs().max() > 0
        same = plain.state.params[layer]
        torch.testing.assert_close(begin[name], same, rtol=0, atol=0)  # all environments begin with the same weights


def _layer(rough: float, near: float, like: float) -> dict[str, Any]:
    return {"roughness": [rough, rough], "distance": [near, near], "likeness": [like, like], "histogram": [0.0] * BINS}


def test_the_third_observation_is_judged() -> None:
    """Seeds in which the first layer is smoother and more alike than the mean of two later ones, and others."""

    def seed(first: float) -> dict[str, Any]:
        later = {"layer3.conv1": _layer(0.5, 0.5, 0.4), "layer3.conv2": _layer(0.7, 0.3, 0.2)}
        hard = {"layer3.conv0": _layer(first, first, 1 - first), **later}
        easy = {name: _layer(first / 2, 0.0, 1.0) for name in hard}
        return {IID: easy, GROUP: hard, HETERO: hard}

    found = assess({1: seed(0.1), 2: seed(0.11)})
    checks = {check.name: check for check in found.checks}
    assert len(checks) == 2 * 4
    for part in ("more like those with IID", "spread more as with IID", "smoother than later", "smoother with IID"):
        assert [check.holds for name, check in checks.items() if part in name] == [True, True], part
    values = checks[f"the first layer's gradients are smoother than later layers' are: layer3, {GROUP}"].values
    assert values["one"] == pytest.approx({1: 0.6, 2: 0.6})
    assert values["other"] == pytest.approx({1: 0.1, 2: 0.11})
    assert [check.holds for check in assess({1: seed(0.9), 2: seed(0.91)}).checks[:3]] == [False] * 3
