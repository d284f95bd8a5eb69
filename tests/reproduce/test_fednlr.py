"""FedNLR's reproduction: its settings, what is compared with what, and its measures against numbers by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.compare import plan
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.reproduce import PAPERS, SCALES
from fedstrata.reproduce.fednlr_checks import (
    count_collapsed,
    count_printed,
    count_rates,
    printed_share,
    train_network,
)
from fedstrata.reproduce.fednlr_depth import depth_correlation
from fedstrata.reproduce.fednlr_drift import activation_gain, mean_gains, strictly_bound
from fedstrata.reproduce.fednlr_equal_loss import match_rate
from fedstrata.reproduce.fednlr_layers import mean_spread, point_name, share_above
from fedstrata.reproduce.fednlr_settings import LAYERS, TABLE_1, TABLE_3, skew_name
from fedstrata.reproduce.fednlr_settings import SCALES as SETTINGS
from fedstrata.reproduce.fednlr_temperatures import Temperatures, measure_run
from fedstrata.reproduce.fednlr_temperatures import assess as assess_temperatures
from fedstrata.reproduce.fednlr_theory import (
    TwoLayers,
    discrepancy,
    example_figures,
    printed_reduction,
    rate_bounds,
    shares,
)
from fedstrata.reproduce.part_runs import build_federation
from fedstrata.reproduce.parts import Grid, Part, accuracy_at_end, accuracy_before_epilogue
from fedstrata.run import open_run
from fedstrata.techniques import method
from fedstrata.techniques.fednlr import FedNLR


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


# --- one more rate, and the layers of a deep network -----------------------------------------------------------------


def test_the_rate_of_an_equal_loss() -> None:
    """A visit that ends with loss 2/(1 + r): 0.5 is that of r = 3, which is beyond the first interval, 0 to 1."""
    found = match_rate(lambda rate: 2 / (1 + rate), 0.5, 1.0, 1e-6, 60)
    assert found == pytest.approx(3, rel=1e-5)
    assert match_rate(lambda rate: 2 / (1 + rate), 1.6, 1.0, 1e-6, 60) == pytest.approx(0.25, rel=1e-5)
    assert match_rate(lambda rate: 1.0, 0.5, 1.0, 1e-6, 60) is None
    assert match_rate(lambda rate: 0.9 if rate < 1 else 0.1, 0.5, 1.0, 1e-6, 60) is None


def test_visits_without_a_rate_are_left_out() -> None:
    """Class 1's neuron goes from 1 to 0.5 after the visit to class 0; for the visit to class 1 no rate was found."""
    found = {3: {"before": [[0.0, 1.0], [1.0, 0.0]]}}
    visits = [(0, [1]), (1, [0])]
    assert mean_gains(found, {3: [[[0.0, 1.0], [0.5, 0.0]], []]}, visits) == {3: -0.5}
    assert mean_gains(found, {3: [[], []]}, visits) == {}


def test_depth_by_ranks() -> None:
    """Falls of 1, 2 and 3 % in the order of the layers are in order; a layer without bound neurons is left out."""
    changes = {"a": -0.01, "b": -0.02, "c": -0.03}
    assert depth_correlation(changes, ["a", "b", "x", "c"]) == pytest.approx(1)
    assert depth_correlation(changes, ["c", "b", "a"]) == pytest.approx(-1)


# --- temperatures ----------------------------------------------------------------------------------------------------


WATCHED: dict[str, Any] = {
    **SETTINGS["smoke"].run,
    "partition": "shards(classes=2)",
    "method": "fednlr(a1=0.45, a2=0.3)",
    "seed": 3,
}


def test_watching_temperatures_changes_nothing() -> None:
    config = validate_settings(RunConfig, WATCHED)
    plain = open_run(config, None).fit()
    federation = build_federation(config, Temperatures(rates=FedNLR(a1=0.45, a2=0.3)))
    found = measure_run(federation)
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, federation.model.state_dict()[name]), name
    assert tuple(found) == LAYERS
    assert all(len(layer["temperatures"]) == config.rounds for layer in found.values())
    assert [found[n]["outputs"] for n in ("layer1.conv1", "layer1.conv2", "head")] == [2 * 64, 4 * 64, 10]


def test_a_temperature_is_the_mean_over_the_rounds_clients() -> None:
    """T = (h̄_max − h̄_min)/ln μ on the received model, where h̄ is the mean of ReLU(conv(x)) over examples and places;
    for the classifier of the logits. Of one client's data in NumPy, with μ_1 = 1 + 0.45/9 + 0.3·log₁₀ 2."""
    config = validate_settings(RunConfig, {**WATCHED, "partition": "dirichlet(alpha=0.5)", "clients": 2, "rounds": 1})
    federation = build_federation(config, Temperatures(rates=FedNLR(a1=0.45, a2=0.3)))
    model, wanted = federation.model, {"layer1.conv1": [], "head": []}
    for data in federation.clients:
        x, _ = data.batch(torch.arange(len(data)))
        with torch.no_grad():
            first = model.get_submodule("layer1.conv1")(x).numpy()
            logits = model(x).numpy()
        ranges = [np.ptp(np.maximum(first, 0).mean((0, 2, 3))), np.ptp(logits.mean(0))]
        mus = [1 + 0.45 * 1 / 9 + 0.3 * np.log10(2), 1 + 0.45 + 0.3 * 1]
        for layer, spread, mu in zip(wanted, ranges, mus, strict=True):
            wanted[layer].append(spread / np.log(mu))
    found = measure_run(federation)
    for layer, values in wanted.items():
        assert found[layer]["temperatures"] == [pytest.approx(np.mean(values), rel=1e-5)]
    assert found["layer1.conv1"]["mu"] == pytest.approx(1 + 0.05 + 0.3 * np.log10(2))


def test_the_hottest_layer() -> None:
    """Two layers with most units, at 3 and 5, against the second one at 4, which has the most outputs."""
    sizes = {"a": (2, 50), "b": (4, 90), "c": (8, 8), "d": (8, 8)}
    heat = {"a": 1.0, "b": 4.0, "c": 3.0, "d": 5.0}
    one = {
        name: {"temperatures": [9.0, heat[name]], "neurons": n, "outputs": m, "mu": 2.0}
        for name, (n, m) in sizes.items()
    }
    found = assess_temperatures(dict.fromkeys(range(5), one), 1)
    assert [check.holds for check in found.checks] == [False, True, False, True]
    assert found.checks[0].figures.startswith("4.0000 ± 0.0000 against 5.0000 ± 0.0000")


# --- theory ----------------------------------------------------------------------------------------------------------


def test_example_1_by_hand() -> None:
    """x¹ = (1, 1/3), x² = (1/3, 1), W₁ = (x¹, x²): h on x¹ is (10/9, 2/3), on x² (2/3, 10/9), and W₂ is these two rows.

    On x¹ the logits differ by (4/9)², so p₂ = 1/(1 + e^(16/81)) = 0.45078. One step with 0.5 moves W₁'s rows by
    ±0.5·p₂·(4/9)·x¹, whose product with x² is ±0.5·p₂·8/27: h on x² becomes 2/3 + 0.06678 and 10/9 − 0.06678. W₂'s rows
    move by ±0.5·p₂·(10/9, 2/3), so the logits on x² differ by (4/9 + p₂·10/9)·0.73345 + (−4/9 + p₂·2/3)·1.04433.
    """
    p = 1 / (1 + math.exp(16 / 81))
    move = 0.5 * p * 8 / 27
    h = 2 / 3 + move, 10 / 9 - move
    apart = (4 / 9 + p * 10 / 9) * h[0] + (-4 / 9 + p * 2 / 3) * h[1]
    found = example_figures()
    assert found["h₁"] == pytest.approx((2 / 3, h[0]))
    assert found["h₂"] == pytest.approx((10 / 9, h[1]))
    assert found["p₁"] == pytest.approx((p, 1 / (1 + math.exp(-apart))))
    assert found["p₂"] == pytest.approx((1 - p, 1 / (1 + math.exp(apart))))
    assert printed_share() == 1


def test_a_step_is_that_of_autograd() -> None:
    rng = torch.Generator().manual_seed(0)
    hidden, out, x = (torch.randn(shape, generator=rng).double() for shape in ((4, 3), (2, 4), (5, 3)))
    labels = torch.tensor([0, 1, 1, 0, 1])
    parameters = hidden.clone().requires_grad_(), out.clone().requires_grad_()
    logits = torch.relu(x @ parameters[0].T) @ parameters[1].T
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    moved = TwoLayers(hidden, out).descend(x, labels, 0.1)
    for was, now, parameter in zip((hidden, out), (moved.hidden, moved.out), parameters, strict=True):
        torch.testing.assert_close(now, was - 0.1 * parameter.grad)


def test_theorem_2_by_hand() -> None:
    """One neuron with w = 1, W₂ = (0, 1), an example of each class, x_k = ln 3, x_i = 2: p_c(x_k) = 3/4, and the fall
    is η·2 ln 3·3/4 = 1.5 ln 3·η. With η = 1 that is 1.648; with η = 2 it is more than the activation, 2."""
    net = TwoLayers(torch.tensor([[1.0]]).double(), torch.tensor([[0.0], [1.0]]).double())
    own, other = torch.tensor([[math.log(3)]]).double(), torch.tensor([[2.0]]).double()
    for lr, fall in ((1.0, 1.5 * math.log(3)), (2.0, 2.0)):
        assert float(printed_reduction(net, own, other, 1, lr)) == pytest.approx(fall)
        assert 2 - float(net.step(own, 0, lr).activations(other)) == pytest.approx(fall)


def test_lemma_4_by_hand() -> None:
    """Activations 0, 0 and 1 with μ = 4: q is 1/6, 1/6 and 4/6, on both of the bounds of a single layer of three,
    1/(4·2 + 1) ≤ q and q ≤ 4/(4 + 3 − 1); a second layer, of 2 neurons and μ = 2, leaves it 1/9 and 4/5."""
    q = shares(torch.tensor([0.0, 0.0, 1.0]).double(), 4.0)
    assert q.tolist() == pytest.approx([1 / 6, 1 / 6, 4 / 6])
    assert rate_bounds([4.0], [3]) == pytest.approx((1 / 9, 4 / 6))
    assert rate_bounds([4.0, 2.0], [3, 2]) == pytest.approx((1 / 9, 4 / 5))
    assert discrepancy(torch.tensor([0.0, 1.0]), 0.5) == pytest.approx(math.e**2)


def test_what_is_counted_of_the_theory() -> None:
    """Not every bound neuron is active on the client's data, and Eq. 15's rates are beyond Lemma 4 in every draw."""
    rng = torch.Generator().manual_seed(1)
    counts = count_collapsed(20, rng)
    assert counts["rising"] == 0
    assert counts["falling"] == counts["bound"] - counts["idle"]
    assert counts["idle"] > 0
    printed = count_printed(20, rng)
    assert printed["active right"] == printed["active"]
    assert printed["others right"] < printed["others"]
    assert printed["emptied"] > 0
    assert count_rates(20, rng) == {"draws": 20, "Eq. 21": 20, "Eq. 15": 0, "even": 20}


def test_a_trained_network_on_two_digits() -> None:
    """Two groups of rows along two axes, with a third in common: it tells them apart."""
    own, other = torch.zeros(6, 3).double(), torch.zeros(6, 3).double()
    own[:, 0], own[:, 2], other[:, 1], other[:, 2] = 1.0, 0.5, 1.0, 0.5
    settings = {"hidden": 12, "steps": 400, "lr": 0.5}
    net = train_network(own, other, settings, torch.Generator().manual_seed(2))
    assert float(net.scores(own)[:, 0].min()) > 0.9
    assert float(net.scores(other)[:, 1].min()) > 0.9
