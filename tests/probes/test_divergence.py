"""Divergence, layer by layer: Eq. 1, cosines and the spread of single gradients, against loops and by hand."""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.core.rng import generator
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Stratum
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError
from fedstrata.models.registry import build_model
from fedstrata.models.strata import strata
from fedstrata.probes import measures

CLASSES = 3
LAYERS = (
    Stratum("one", "one", ("one.weight", "one.bias"), ()),
    Stratum("two", "two", ("two.weight",), ()),
    Stratum("three", "three", ("three.weight",), ()),
)


def convolution(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Convolution, batch norm with statistics that are not the first ones, dropout, head."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(27, CLASSES)
    )
    model(torch.randn(20, 1, 5, 5) * 2 + 1)
    return model.to(dtype)


def images(count: int, seed: int = 0, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 5, 5, generator=rng, dtype=torch.float64) + shift
    return x, torch.randint(CLASSES, (count,), generator=rng)


def one_gradient(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, np.ndarray]:
    """Of one example, by plain autograd on a copy in evaluation mode."""
    own = copy.deepcopy(model).eval()
    F.cross_entropy(own(x.unsqueeze(0)), y.unsqueeze(0)).backward()
    return {n: p.grad.numpy().copy() for n, p in own.named_parameters() if p.grad is not None}


def row(tensors: dict[str, Any], names: Sequence[str]) -> np.ndarray:
    return np.concatenate([np.asarray(tensors[n], dtype=np.float64).ravel() for n in names])


def divergence_by_loop(vectors: Sequence[np.ndarray]) -> float:
    """Eq. 1, entry by entry."""
    size, total = len(vectors[0]), 0.0
    mean = [math.fsum(float(v[k]) for v in vectors) / len(vectors) for k in range(size)]
    for v in vectors:
        total += math.sqrt(math.fsum((float(v[k]) - mean[k]) ** 2 for k in range(size)) / size)
    return total / len(vectors)


def everything(model: nn.Module) -> dict[str, Any]:
    """Whatever measuring could change: values, modes, gradients, and the states of all generators."""
    return {
        "state": {n: t.clone() for n, t in model.state_dict().items()},
        "modes": [m.training for m in model.modules()],
        "needs": [p.requires_grad for p in model.parameters()],
        "grads": [p.grad for p in model.parameters()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
    }


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    tensors = all(torch.equal(left["state"][n], t) for n, t in right["state"].items())
    others = all(left[key] == right[key] for key in ("modes", "needs", "grads", "python", "numpy"))
    return tensors and others and torch.equal(left["torch"], right["torch"])


# Eq. 1 ------------------------------------------------------------------------------------------------------


def test_divergence_of_two_clients_by_hand():
    """one: the gradients are (1, 2 | 3) and (3, 2 | 7), their mean (2, 2 | 5); both are √(1 + 0 + 4) away, d = 3.

    two: (0, 0) and (6, 8), mean (3, 4); both are 5 away, d = 2.
    """
    clients = [
        {"one.weight": torch.tensor([[1.0, 2.0]]), "one.bias": torch.tensor([3.0]), "two.weight": torch.zeros(2)},
        {"one.weight": torch.tensor([[3.0, 2.0]]), "one.bias": torch.tensor([7.0]), "two.weight": torch.tensor([6, 8])},
    ]
    expected = {"one": math.sqrt(5 / 3), "two": math.sqrt(25 / 2)}
    assert measures.divergence(clients, LAYERS) == pytest.approx(expected, abs=1e-12)


def test_three_measures_of_two_clients_by_hand():
    """As above: one has 3 parameters, both clients are √5 away from a mean of length √(4 + 4 + 25) = √33.

    two: 2 parameters, both are 5 away from (3, 4), of length 5.
    """
    clients = [
        {"one.weight": torch.tensor([[1.0, 2.0]]), "one.bias": torch.tensor([3.0]), "two.weight": torch.zeros(2)},
        {"one.weight": torch.tensor([[3.0, 2.0]]), "one.bias": torch.tensor([7.0]), "two.weight": torch.tensor([6, 8])},
    ]
    assert measures.unscaled_divergence(clients, LAYERS) == pytest.approx({"one": math.sqrt(5), "two": 5.0}, abs=1e-12)
    relative = {"one": math.sqrt(5 / 33), "two": 1.0}
    assert measures.relative_divergence(clients, LAYERS) == pytest.approx(relative, abs=1e-12)
    longer = [{n: 10 * t for n, t in mine.items()} for mine in clients]
    assert measures.relative_divergence(longer, LAYERS) == pytest.approx(relative, abs=1e-12)


def test_the_relative_measure_where_the_mean_is_zero():
    """−1 and 1 differ and have nothing in common; 0 and 0 do not differ at all."""
    clients = [{"one.weight": torch.tensor([v]), "two.weight": torch.zeros(2)} for v in (-1.0, 1.0)]
    assert measures.relative_divergence(clients, LAYERS) == {"one": math.inf, "two": 0.0}


def test_all_measures_compare_sub_models_in_what_they_share():
    """two: 1 and 5, mean 3, both 2 away. one: what client 0 alone holds does not count; 2 and 6, mean 4."""
    clients = [
        {"one.weight": torch.tensor([2.0]), "one.bias": torch.tensor([9.0]), "two.weight": torch.tensor([1.0])},
        {"one.weight": torch.tensor([6.0])},
        {"two.weight": torch.tensor([5.0]), "three.weight": torch.ones(2)},
    ]
    assert measures.unscaled_divergence(clients, LAYERS) == pytest.approx({"one": 2.0, "two": 2.0}, abs=1e-12)
    assert measures.relative_divergence(clients, LAYERS) == pytest.approx({"one": 1 / 2, "two": 2 / 3}, abs=1e-12)


def test_reestimated_statistics_by_hand():
    """Clients hold 0, 2 and 4, 6, 8: mean 4, unbiased variance (16 + 4 + 0 + 4 + 16)/4 = 10, in one batch of all.

    The second norm sees what the first makes of the batch: mean 0, variance 1, and unbiased 5/4.
    """
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.5), nn.BatchNorm1d(1, momentum=0.3), nn.Linear(1, 2)).double()
    data = [
        (torch.tensor(rows, dtype=torch.float64).unsqueeze(1), torch.zeros(len(rows), dtype=torch.int64))
        for rows in ([0.0, 2.0], [4.0, 6.0, 8.0])
    ]
    before = everything(model)
    found = measures.reestimate_statistics(model, data)
    assert same(everything(model), before)
    first, second = found[0], found[2]
    assert (first.running_mean.item(), first.running_var.item()) == pytest.approx((4.0, 10.0), rel=1e-6)
    assert (second.running_mean.item(), second.running_var.item()) == pytest.approx((0.0, 1.25), rel=1e-5, abs=1e-9)
    assert (first.momentum, second.momentum, found.training) == (0.1, 0.3, model.training)


def test_reestimated_statistics_weigh_batches_by_their_examples():
    """In batches of 2 and 3 (a last batch of one joins the one before) the mean is still that of all five: 4."""
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)).double()
    x, y = torch.tensor([[0.0], [2.0], [4.0], [6.0], [8.0]], dtype=torch.float64), torch.zeros(5, dtype=torch.int64)
    found = measures.reestimate_statistics(model, [(x, y)], batch_size=2)
    assert found[0].running_mean.item() == pytest.approx(4.0, rel=1e-12)


def test_a_model_without_batch_norm_has_nothing_to_estimate():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    found = measures.reestimate_statistics(model, [(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64))])
    assert found is not model
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in found.state_dict().items())


def test_divergence_is_a_mean_of_roots_and_not_a_root_of_means():
    """Three clients with 0, 0 and 3: mean 1, distances 1, 1 and 2, so 4/3 and not √2."""
    clients = [{"two.weight": torch.tensor([value])} for value in (0.0, 0.0, 3.0)]
    assert measures.divergence(clients, LAYERS) == pytest.approx({"two": 4 / 3}, abs=1e-12)


def test_clients_are_alike_however_many_examples_they_have():
    """A client of 1 example weighs in the mean as much as one of 9."""
    model, data = convolution(), [TensorExamples(*images(size, seed=size, shift=size)) for size in (1, 9)]
    gradients = measures.client_gradients(model, data)
    head = row({n: (gradients[0][n] - gradients[1][n]) / 2 for n in ("5.weight", "5.bias")}, ("5.weight", "5.bias"))
    found = measures.divergence(gradients, strata(model))
    assert found["5"] == pytest.approx(math.sqrt((head**2).mean()), rel=1e-12)


def test_exact_divergence_against_a_loop_over_every_clients_examples():
    model = convolution()
    data = [images(size, seed=client, shift=client) for client, size in enumerate((4, 9, 1, 6))]
    expected = {}
    for stratum in strata(model):
        means = []
        for x, y in data:
            each = [row(one_gradient(model, a, b), stratum.params) for a, b in zip(x, y, strict=True)]
            means.append(sum(each) / len(each))
        expected[stratum.name] = divergence_by_loop(means)
    gradients = measures.client_gradients(model, [TensorExamples(x, y) for x, y in data], batch_size=4)
    found = measures.divergence(gradients, strata(model))
    assert list(found) == ["0", "5"]
    assert found == pytest.approx(expected, rel=1e-10)


def test_identical_clients_do_not_diverge_at_all():
    model = convolution(dtype=torch.float32)
    x, y = images(8)
    gradients = measures.client_gradients(model, [TensorExamples(x.float(), y)] * 3)
    assert all(g.abs().max() > 0 for g in gradients[0].values())
    assert measures.divergence(gradients, strata(model)) == {"0": 0.0, "5": 0.0}


def test_the_proxy_of_one_plain_step_is_the_learning_rate_times_the_exact_one():
    """A step of full-batch SGD is −η·g, so that its divergence is η times that of g."""
    model, data = convolution(), [TensorExamples(*images(6, seed=c, shift=c)) for c in range(3)]
    gradients = measures.client_gradients(model, data)
    updates = [{n: -0.1 * g for n, g in mine.items()} for mine in gradients]
    exact, proxy = (measures.divergence(tensors, strata(model)) for tensors in (gradients, updates))
    assert proxy == pytest.approx({name: 0.1 * value for name, value in exact.items()}, rel=1e-12)


def test_sub_models_are_compared_in_what_they_share():
    """two: held by clients 0 and 2 with 1 and 5: 2. one: the bias is client 0's alone and does not count, so that
    (0, 0), (0, 3) and (0, 6), of d = 2, are 3, 0 and 3 away: the mean is 2/√2. three: client 1 alone, left out."""
    clients = [
        {"one.weight": torch.zeros(1, 2), "one.bias": torch.tensor([9.0]), "two.weight": torch.tensor([1.0])},
        {"one.weight": torch.tensor([[0.0, 3.0]]), "three.weight": torch.ones(2)},
        {"one.weight": torch.tensor([[0.0, 6.0]]), "two.weight": torch.tensor([5.0])},
    ]
    assert measures.divergence(clients, LAYERS) == pytest.approx({"one": 2 / math.sqrt(2), "two": 2.0}, abs=1e-12)
    assert measures.divergence(clients[:1], LAYERS) == {}


def test_scale_of_gradients_and_order_of_clients():
    rng = torch.Generator().manual_seed(0)
    clients = [{"two.weight": torch.randn(50, generator=rng, dtype=torch.float64)} for _ in range(5)]
    value = measures.divergence(clients, LAYERS)["two"]
    assert value == pytest.approx(divergence_by_loop([c["two.weight"].numpy() for c in clients]), rel=1e-12)
    assert measures.divergence(clients[::-1], LAYERS)["two"] == pytest.approx(value, rel=1e-12)
    moved = [{"two.weight": -7 * c["two.weight"] + 3} for c in clients]
    assert measures.divergence(moved, LAYERS)["two"] == pytest.approx(7 * value, rel=1e-12)


# Cosines ----------------------------------------------------------------------------------------------------


def updates(*rows: Sequence[float]) -> list[Tensors]:
    """Of stratum one: two weights and a bias."""
    return [{"one.weight": torch.tensor([[a, b]]), "one.bias": torch.tensor([c])} for a, b, c in rows]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (((1, 2, 3), (2, 4, 6)), 1.0),
        (((1, 2, 3), (-3, -6, -9)), -1.0),
        (((1, 0, 0), (0, 0, 5)), 0.0),
        (((3, 4, 0), (3, 0, 4)), 9 / 25),
        (((1, 0, 0), (1, 0, 0), (-1, 0, 0)), (1 - 1 - 1) / 3),
    ],
)
def test_cosines_by_hand(rows: Sequence[Sequence[float]], expected: float):
    found = measures.update_cosine(updates(*(map(float, r) for r in rows)), LAYERS)  # type: ignore[arg-type]
    assert found == pytest.approx({"one": expected}, abs=1e-12)


def test_an_update_of_zero_has_no_cosine():
    """Of three pairs only (0, 2) has one; where none has, the stratum is left out."""
    assert measures.update_cosine(updates((1, 0, 0), (0, 0, 0), (2, 0, 0)), LAYERS) == pytest.approx({"one": 1.0})
    assert measures.update_cosine(updates((1, 0, 0), (0, 0, 0)), LAYERS) == {}


def test_cosines_against_a_loop(monkeypatch: pytest.MonkeyPatch):
    """Also piece by piece."""
    rng = np.random.default_rng(0)
    clients = [{"one.weight": rng.normal(size=(4, 5)) + 0.3, "one.bias": rng.normal(size=4)} for _ in range(5)]
    flat = [row(c, LAYERS[0].params) for c in clients]
    pairs = [(a, b) for i, a in enumerate(flat) for b in flat[i + 1 :]]
    expected = fmean(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in pairs)
    given = [{n: torch.tensor(value) for n, value in c.items()} for c in clients]
    assert measures.update_cosine(given, LAYERS) == pytest.approx({"one": expected}, abs=1e-12)
    monkeypatch.setattr(sys.modules["fedstrata.probes.measures.divergence"], "_COLUMNS", 3)
    assert measures.update_cosine(given, LAYERS) == pytest.approx({"one": expected}, abs=1e-12)


def test_cosines_of_sub_models_are_of_the_names_that_both_hold():
    """Clients 0 and 1 share the weights alone: (1, 0) and (1, 1), 1/√2. Client 2 has another stratum, alone."""
    clients = [
        {"one.weight": torch.tensor([[1.0, 0.0]]), "one.bias": torch.tensor([9.0])},
        {"one.weight": torch.tensor([[1.0, 1.0]])},
        {"two.weight": torch.ones(2)},
    ]
    assert measures.update_cosine(clients, LAYERS) == pytest.approx({"one": 1 / math.sqrt(2)}, abs=1e-12)


def test_small_and_large_updates_have_a_direction():
    tiny, huge = torch.full((2,), 1e-30), torch.full((2,), 1e30)
    found = measures.update_cosine([{"two.weight": tiny}, {"two.weight": huge}], LAYERS)
    assert found == pytest.approx({"two": 1.0}, abs=1e-12)


# Single gradients -------------------------------------------------------------------------------------------


def spread_by_loop(vectors: Sequence[np.ndarray]) -> float:
    """√ of the mean, over the entries, of their variance: NumPy's own."""
    return float(np.sqrt(np.stack(vectors).var(axis=0).mean()))


def fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no model could be vectorised."""

    def never(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        def fail(*args: Any) -> None:
            raise RuntimeError

        return fail

    monkeypatch.setattr(sys.modules["fedstrata.probes.measures.gradient_spread"], "vmap", never)


@pytest.mark.parametrize("vectorised", [True, False])
def test_within_a_class_against_a_loop(vectorised: bool, monkeypatch: pytest.MonkeyPatch):
    if not vectorised:
        fallback(monkeypatch)
    model, (x, y) = convolution(), images(90)
    found = measures.within_class(model, x, y, strata(model), limit=None)
    assert found.labels == (0, 1, 2)
    for stratum in strata(model):
        each = [
            spread_by_loop([row(one_gradient(model, x[k], y[k]), stratum.params) for k in torch.where(y == c)[0]])
            for c in range(CLASSES)
        ]
        assert found.figures[stratum.name] == pytest.approx(each, rel=1e-10)
        assert found.means[stratum.name] == pytest.approx(sum(each) / 3, rel=1e-10)
        assert found.ranges[stratum.name] == pytest.approx((min(each), max(each)), rel=1e-10)


@pytest.mark.parametrize("vectorised", [True, False])
def test_noise_against_a_loop_with_the_same_draws(vectorised: bool, monkeypatch: pytest.MonkeyPatch):
    if not vectorised:
        fallback(monkeypatch)
    model, (x, y) = convolution(), images(2)
    found = measures.input_noise(model, x, y, strata(model), std=0.3, draws=70, seed=5)
    assert found.labels == tuple(y.tolist())
    for image in range(2):
        rng = generator("input_noise", 5, image)
        noise = [torch.randn(1, 5, 5, generator=rng, dtype=torch.float64) for _ in range(70)]
        each = [one_gradient(model, x[image] + 0.3 * n, y[image]) for n in noise]
        for stratum in strata(model):
            expected = spread_by_loop([row(g, stratum.params) for g in each])
            assert found.figures[stratum.name][image] == pytest.approx(expected, rel=1e-10)


def test_noise_on_a_model_of_zeros_by_hand():
    """All outputs are 0, so that s = softmax − one-hot = (−2/3, 1/3, 1/3) whatever the image is, ∂W = s·xᵀ, ∂b = s.

    With noise of σ the entries of ∂W have standard deviations |s_c|·σ, those of ∂b 0. Of 4 inputs and 3 outputs:
    √(σ²·4·Σs²/(3·4 + 3)) = σ·√(4·(6/9)/15).
    """
    model = nn.Sequential(nn.Linear(4, 3))
    for p in model.parameters():
        nn.init.zeros_(p)
    x, y = torch.tensor([[5.0, -1.0, 0.0, 2.0]]), torch.tensor([0])
    found = measures.input_noise(model, x, y, strata(model), std=0.1, draws=4000)
    assert found.means["0"] == pytest.approx(0.1 * math.sqrt(4 * 6 / 9 / 15), rel=0.02)
    twice = measures.input_noise(model, x, y, strata(model), std=0.2, draws=4000)
    assert twice.means["0"] == pytest.approx(2 * found.means["0"], rel=1e-4)


def test_the_default_is_the_papers():
    """N(0, 0.1), 1000 draws."""
    model, (x, y) = nn.Sequential(nn.Linear(4, 3)), (torch.ones(1, 4), torch.tensor([0]))
    default, same_one = (
        measures.input_noise(model, x, y, strata(model), **given) for given in ({}, {"std": 0.1, "draws": 1000})
    )
    assert default == same_one


def test_spread_without_division_and_for_the_mean_gradients_length_by_hand():
    """Logits of 0, so that ∂W = s·x with s = (−½, ½) for class 0. Images 1 and 3: gradients (∓0.5) and (∓1.5).

    Their mean is (−1, 1), of length √2; each is √(2·0.25) = √0.5 away; d = 2, so that the figure is 0.5.
    """
    model = nn.Sequential(nn.Linear(1, 2, bias=False))
    nn.init.zeros_(model[0].weight)
    x, y = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0])
    found = measures.within_class(model, x, y, strata(model))
    assert found.figures["0"] == pytest.approx((0.5,), rel=1e-6)
    assert found.entries == {"0": 2}
    assert found.lengths["0"] == pytest.approx((math.sqrt(2),), rel=1e-6)
    assert found.unscaled["0"] == pytest.approx((math.sqrt(0.5),), rel=1e-6)
    assert found.relative["0"] == pytest.approx((0.5,), rel=1e-6)


def test_equal_images_have_no_spread():
    model, (x, y) = convolution(), images(1)
    found = measures.within_class(model, x.repeat(9, 1, 1, 1), y.repeat(9), strata(model))
    assert all(value < 1e-12 for values in found.figures.values() for value in values)


def test_a_seed_chooses_noise_and_images_and_a_limit_bounds_them():
    model, (x, y) = convolution(), images(60)
    limited = [measures.within_class(model, x, y, strata(model), limit=5, seed=seed) for seed in (0, 0, 1)]
    assert limited[0] == limited[1] != limited[2]
    noisy = [measures.input_noise(model, x[:2], y[:2], strata(model), draws=4, seed=seed) for seed in (0, 0, 1)]
    assert noisy[0] == noisy[1] != noisy[2]


def test_a_class_of_one_image_is_left_out():
    model, (x, _) = convolution(), images(5)
    assert measures.within_class(model, x, torch.tensor([0, 2, 1, 2, 0]), strata(model)).labels == (0, 2)


def test_models_that_cannot_be_vectorised_are_read_one_by_one():
    """A GRU, whose kernel vmap does not know; its tokens are no floats."""
    torch.manual_seed(0)
    model = build_model("chargru(embedding=2, hidden=3, layers=1)", (4,), 5)
    x, y = torch.randint(5, (6, 4)), torch.tensor([0, 0, 0, 1, 1, 1])
    layers = strata(model, x)
    found = measures.within_class(model, x, y, layers)
    for stratum in layers:
        each = [
            spread_by_loop([row(one_gradient(model, x[k], y[k]), stratum.params) for k in rows])
            for rows in (range(3), range(3, 6))
        ]
        assert found.figures[stratum.name] == pytest.approx(each, rel=1e-4)


@pytest.mark.parametrize("name", ["cnn4", "resnet8(width=4)", "vit(dim=8, depth=1, heads=2)"])
def test_models_of_the_zoo(name: str):
    torch.manual_seed(0)
    model = build_model(name, (3, 16, 16), 4)
    x, y = torch.randn(4, 3, 16, 16), torch.tensor([0, 0, 1, 1])
    layers = strata(model, x)
    found = measures.within_class(model, x, y, layers)
    for stratum in layers:
        expected = spread_by_loop([row(one_gradient(model, x[k], y[k]), stratum.params) for k in (0, 1)])
        assert found.figures[stratum.name][0] == pytest.approx(expected, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("mode", [True, False])
def test_measuring_changes_no_model_and_no_generator(mode: bool):
    model, (x, y) = convolution().train(mode), images(8)
    model[0].weight.requires_grad_(False)
    deltas = [{n: p.detach().clone() for n, p in model.named_parameters()} for _ in range(2)]
    kept = copy.deepcopy((x, y, deltas))
    before = everything(model)
    measures.input_noise(model, x[:1], y[:1], strata(model), draws=3)
    measures.within_class(model, x, y, strata(model), limit=3)
    measures.divergence(deltas, strata(model))
    measures.update_cosine(deltas, strata(model))
    assert same(before, everything(model))
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])
    assert all(torch.equal(a[n], b[n]) for a, b in zip(deltas, kept[2], strict=True) for n in a)


def test_some_strata_only():
    """The others' parameters, which could have gradients too, are left alone."""
    model, (x, y) = convolution(), images(20)
    whole = measures.within_class(model, x, y, strata(model))
    for stratum in strata(model):
        found = measures.within_class(model, x, y, (stratum,))
        assert found.figures == {stratum.name: pytest.approx(whole.figures[stratum.name], rel=1e-12)}


# Refusals ---------------------------------------------------------------------------------------------------

X, Y = images(4)
NET = convolution()
DEEP = strata(NET)
UNEVEN: list[Tensors] = [{"two.weight": torch.ones(2)}, {"two.weight": torch.ones(3)}]
UNKNOWN: list[Tensors] = [{"two.wieght": torch.ones(2)}] * 2


def by_batch() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, track_running_stats=False), nn.Flatten()).double()


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "nobody": (lambda: measures.divergence([], LAYERS), "no clients with tensors"),
    "nothing": (lambda: measures.divergence([{}, {}], LAYERS), "no clients with tensors"),
    "shapes": (lambda: measures.divergence(UNEVEN, LAYERS), "'two.weight' are of different shapes"),
    "names": (lambda: measures.divergence(UNKNOWN, LAYERS), "did you mean 'two.weight'"),
    "one name": (lambda: measures.divergence(UNKNOWN[:1], LAYERS), "did you mean 'two.weight'"),
    "no updates": (lambda: measures.update_cosine([], LAYERS), "no clients with updates"),
    "uneven updates": (lambda: measures.update_cosine(UNEVEN, LAYERS), "'two.weight' are of different shapes"),
    "unknown updates": (lambda: measures.update_cosine(UNKNOWN, LAYERS), "did you mean 'two.weight'"),
    "std": (lambda: measures.input_noise(NET, X, Y, DEEP, std=0), "std must be above 0, not 0"),
    "draws": (lambda: measures.input_noise(NET, X, Y, DEEP, draws=1), "2 or more draws, not 1"),
    "tokens": (lambda: measures.input_noise(NET, X.long(), Y, DEEP), "floating point, not of torch.int64"),
    "rows": (lambda: measures.input_noise(NET, X, Y[:2], DEEP, draws=2), "2 labels for 4 rows"),
    "none": (lambda: measures.input_noise(NET, X[:0], Y[:0], DEEP, draws=2), "0 labels for 0 rows"),
    "strata": (lambda: measures.input_noise(NET, X, Y, LAYERS, draws=2), "the model has no '"),
    "label": (lambda: measures.input_noise(NET, X, Y + 7, DEEP, draws=2), "but the model has 3 outputs"),
    "limit": (lambda: measures.within_class(NET, X, Y, DEEP, limit=1), "2 or more, not 1"),
    "single": (lambda: measures.within_class(NET, X[:3], torch.arange(3), DEEP), "no class has them"),
    "batch norm": (lambda: measures.within_class(by_batch(), X, Y * 0, strata(by_batch())), "normalises by the batch"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_gets_a_sentence(case: str):
    call, sentence = REFUSALS[case]
    with pytest.raises(UsageError, match=sentence) as refused:
        call()
    assert "\n" not in str(refused.value)
