"""FedNLR's reproduction: its settings, what is compared with what, and its measures against numbers by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fedstrata.compare import plan
from fedstrata.reproduce import PAPERS, SCALES
from fedstrata.reproduce.fednlr_drift import activation_gain, strictly_bound
from fedstrata.reproduce.fednlr_layers import mean_spread, point_name, share_above
from fedstrata.reproduce.fednlr_settings import LAYERS, TABLE_1, TABLE_3, skew_name
from fedstrata.reproduce.fednlr_settings import SCALES as SETTINGS
from fedstrata.reproduce.parts import Grid, Part, accuracy_at_end, accuracy_before_epilogue
from fedstrata.techniques import method


def _named(scale: str) -> dict[str, Part]:
    return {part.name: part for part in PAPERS["fednlr"](scale)}


# --- settings --------------------------------------------------------------------------------------------------------


def test_the_papers_settings() -> None:
    """Section 7.1: 500 rounds of two epochs, 40 % of 20 clients; Table 3: 10 % of 100; Fig. 4: 9 layers, three μ."""
    found = _named("paper")
    runs = {name: plan(part.values, "out").runs for name, part in found.items() if isinstance(part, Grid)}
    assert {(r.config.rounds, r.config.epochs, r.config.participation) for r in runs["table"]} == {(500, 2, 0.4)}
    assert [len(runs[name]) for name in ("table", "mu", "clients", "layers")] == [10 * 3 * 2, 8 * 2, 4 * 4 * 2, 28 * 2]
    assert {(r.config.clients, r.config.participation, r.config.rounds) for r in runs["clients"]} == {(100, 0.1, 500)}


@pytest.mark.parametrize("scale", SCALES)
def test_every_kind_of_skew_has_the_papers_figures(scale: str) -> None:
    settings = SETTINGS[scale]
    assert {skew_name(partition) for partition in settings.partitions} <= TABLE_1.keys()
    assert {skew_name(partition) for partition in settings.many_partitions} <= TABLE_3.keys()


def test_ccvr_is_among_all_methods_only() -> None:
    every = _named("evidence")
    labels = {n: [entry["label"] for entry in p.values["method"]] for n, p in every.items() if isinstance(p, Grid)}
    assert [name for name, found in labels.items() if "CCVR" in found] == ["methods"]
    assert labels["clients"] == labels["table"] == ["FedAvg", "FedDyn", "FedNLR", "FedDyn + FedNLR"]


def test_one_layer_at_a_time() -> None:
    part = _named("evidence")["layers"]
    assert isinstance(part, Grid)
    chosen = [method(entry["method"]).techniques for entry in part.values["method"]]
    assert [technique.layers for (technique,) in chosen[1:]] == [(name,) for name in LAYERS]  # type: ignore[attr-defined]


# --- what is compared ------------------------------------------------------------------------------------------------


def _rounds(*accuracies: float | None, trained: int) -> Any:
    return [SimpleNamespace(accuracy=value, steps=9 if at < trained else 0) for at, value in enumerate(accuracies)]


def test_a_refit_is_judged_by_itself() -> None:
    """Of rounds 0.1, 0.3, 0.5 the last two have mean 0.4; a fourth, in which nobody trained, is the run's figure."""
    assert accuracy_at_end(2)(_rounds(0.1, 0.3, 0.5, trained=3)) == pytest.approx(0.4)
    refitted = _rounds(0.1, 0.3, 0.5, 0.9, trained=3)
    assert accuracy_at_end(2)(refitted) == 0.9
    assert accuracy_before_epilogue(refitted) == 0.5
    assert accuracy_before_epilogue(_rounds(0.1, 0.3, trained=2)) is None
    assert accuracy_at_end(2)([]) is None


def test_points_above_fedavg() -> None:
    """Of four points three gain with seed 1 and two with seed 2; a point that equals FedAvg is not above it."""
    gains = {"a": {1: 0.1, 2: -0.1}, "b": {1: 0.2, 2: 0.1}, "c": {1: 0.3, 2: 0.3}, "d": {1: 0.0, 2: -0.2, 3: 1.0}}
    assert share_above(gains) == {1: 0.75, 2: 0.5}
    assert share_above({}) == {}


def test_the_spread_over_ratios() -> None:
    """Gains 1 and 3 with two ratios have the deviation √2, gains 2 and 2 have 0: √2/2 in the mean over two layers."""
    gains = {
        point_name(layer, mu): {7: value}
        for layer, pair in {"a": (1.0, 3.0), "b": (2.0, 2.0)}.items()
        for mu, value in zip((1.75, 4.0), pair, strict=True)
    }
    assert mean_spread(gains, ("a", "b"), (1.75, 4.0)) == {7: pytest.approx(2**0.5 / 2)}


# --- neurons ---------------------------------------------------------------------------------------------------------


def test_bound_word_for_word() -> None:
    """Of three neurons on two classes: the first is above everything else on class 0, the second overlaps by 0.1, and
    the third is as large on class 0 at its least as on class 1 at its most."""
    ranges = [[[2.0, 1.0, 1.0], [3.0, 4.0, 2.0]], [[0.0, 0.5, 0.0], [1.9, 1.1, 1.0]]]
    assert strictly_bound(ranges) == [1, 0]
    assert strictly_bound(ranges[::-1]) == [0, 1]


def test_drift_is_of_bound_neurons() -> None:
    """On class 1's data neurons 0 and 2 are more active than on class 0's: they change by −0.1 and −0.5, of 0.4 + 0.6.

    On class 2's data neuron 1 is, by +0.3 of 1.2; against both, (−0.1 − 0.5 + 0.3)/(0.4 + 0.6 + 1.2).
    """
    before, after = [[0.1, 0.9, 0.0], [0.4, 0.2, 0.6], [0.1, 1.2, 0.0]], [[], [0.3, 9.0, 0.1], [7.0, 1.5, 0.0]]
    after[0] = before[0]
    assert activation_gain(before, after, 0, [1]) == pytest.approx(-0.6)
    assert activation_gain(before, after, 0, [1, 2]) == pytest.approx(-0.3 / 2.2)
    assert activation_gain([[1.0] * 3, [0.0] * 3], after, 0, [1]) is None
