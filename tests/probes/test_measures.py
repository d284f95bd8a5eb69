"""Measures of how far clients are apart, against numbers that were obtained in other ways."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.core.tensors import Tensors, clone
from fedstrata.core.types import Into, Stratum
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError
from fedstrata.models.strata import strata
from fedstrata.probes import measures

HIGH = ("head.weight", "head.bias")
SIZES = (5, 11, 3, 8)
CLASSES = 3


def small(seed: int = 0) -> nn.Sequential:
    """Linear, tanh, linear, in float64; the cut is after the tanh."""
    torch.manual_seed(seed)
    parts = {"low": nn.Linear(4, 6), "act": nn.Tanh(), "head": nn.Linear(6, CLASSES)}
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    return model.double()


def normed_model(seed: int = 0) -> nn.Sequential:
    """A model with batch norm, whose statistics are not the first ones, and dropout."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, CLASSES))
    model(torch.randn(20, 4) * 2 + 1)
    return model


def parties(sizes: Sequence[int] = SIZES, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[TensorExamples]:
    """Clients of unequal sizes whose inputs and classes differ."""
    rng = torch.Generator().manual_seed(seed)
    return [
        TensorExamples(
            (torch.randn(size, 4, generator=rng, dtype=torch.float64) + client).to(dtype),
            (torch.randint(2, (size,), generator=rng) + client) % CLASSES,
        )
        for client, size in enumerate(sizes)
    ]


def numbers(model: nn.Module) -> dict[str, np.ndarray]:
    return {n: p.detach().numpy() for n, p in model.named_parameters()}


def slopes(logits: np.ndarray, y: np.ndarray) -> np.ndarray:
    """∂ mean CE/∂ logits = (softmax − one-hot)/n."""
    odds = np.exp(logits - logits.max(1, keepdims=True))
    odds /= odds.sum(1, keepdims=True)
    odds[np.arange(len(y)), y] -= 1
    return odds / len(y)


def by_hand(model: nn.Module, x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """The small model's gradient by the chain rule: s = (softmax − one-hot)/n, h = tanh(W₁x + b₁),
    ∂W₂ = sᵀh, ∂b₂ = Σs, r = (s·W₂)∘(1 − h²), ∂W₁ = rᵀx, ∂b₁ = Σr."""
    p = numbers(model)
    h = np.tanh(x @ p["low.weight"].T + p["low.bias"])
    s = slopes(h @ p["head.weight"].T + p["head.bias"], y)
    r = (s @ p["head.weight"]) * (1 - h**2)
    return {"low.weight": r.T @ x, "low.bias": r.sum(0), "head.weight": s.T @ h, "head.bias": s.sum(0)}


def head_by_hand(model: nn.Module, h: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """The gradient of the part above the cut for given features."""
    p = numbers(model)
    s = slopes(h @ p["head.weight"].T + p["head.bias"], y)
    return {"head.weight": s.T @ h, "head.bias": s.sum(0)}


def all_by_hand(model: nn.Module, clients: Sequence[TensorExamples]) -> list[dict[str, np.ndarray]]:
    return [by_hand(model, data.x.numpy(), data.y.numpy()) for data in clients]


def as_tensors(arrays: dict[str, np.ndarray]) -> Tensors:
    return {name: torch.tensor(array) for name, array in arrays.items()}


def variance_by_hand(gradients: Sequence[dict[str, np.ndarray]], p: Sequence[float], names: Sequence[str]) -> float:
    """Σ p_m‖g_m‖² − ‖Σ p_m g_m‖², which is Σ p_m‖g_m − Σ p_k g_k‖²."""
    rows = np.stack([np.concatenate([g[n].ravel() for n in names]) for g in gradients])
    shares = np.asarray(p) / sum(p)
    return float(shares @ (rows**2).sum(1) - ((shares @ rows) ** 2).sum())


def close(found: Tensors, expected: dict[str, np.ndarray], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor.numpy(), expected[name], atol=tolerance, rtol=0)


# Gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4, 512])
def test_a_clients_gradient_is_that_of_the_mean_loss_over_all_of_its_data(batch_size: int):
    model, clients = small(), parties()
    for found, expected in zip(
        measures.client_gradients(model, clients, batch_size), all_by_hand(model, clients), strict=True
    ):
        close(found, expected)


def test_frozen_parameters_have_a_gradient_too():
    model, clients = small(), parties()
    model.low.requires_grad_(False)
    close(measures.client_gradients(model, clients)[0], by_hand(model, clients[0].x.numpy(), clients[0].y.numpy()))
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


def test_in_evaluation_mode_batches_do_not_matter_to_batch_norm():
    model, clients = normed_model().double(), parties()
    one, other = (measures.client_gradients(model, clients, batch_size=size)[1] for size in (2, 100))
    close(one, {n: t.numpy() for n, t in other.items()})
    model.eval()
    F.cross_entropy(model(clients[1].x), clients[1].y).backward()
    close(other, {n: p.grad.numpy() for n, p in model.named_parameters()})


def test_in_training_mode_batch_norm_uses_the_batch():
    model, clients = normed_model().double(), parties()
    model[3].p = 0.0
    whole = measures.client_gradients(model, clients, training=True)[1]
    reference = copy.deepcopy(model).train()
    F.cross_entropy(reference(clients[1].x), clients[1].y).backward()
    close(whole, {n: p.grad.numpy() for n, p in reference.named_parameters()})
    with pytest.raises(UsageError, match="one example"):
        measures.client_gradients(model, parties((1, 4)), training=True)
    measures.client_gradients(model, parties((5, 9)), batch_size=4, training=True)  # a last batch of one joins another


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_measuring_leaves_model_and_generators_as_they_were(training: bool, mode: bool):
    model, clients = normed_model().train(mode), parties(dtype=torch.float32)
    model[2].train(not mode)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = clone(model.state_dict())
    modes, random = [m.training for m in model.modules()], torch.get_rng_state()
    measures.client_gradients(model, clients, training=training)
    measures.shared_gradient(model, torch.randn(7, 6, generator=torch.Generator()), torch.arange(7) % 3, "2")
    measures.features_at(model, clients[0], "1")
    measures.feature_distance(model, clients, "1")
    measures.generalisation(model, {0: {n: t + 1 for n, t in before.items()}}, clients)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_variance_of_two_clients_by_hand():
    """p = (1/4, 3/4). a: 0 and 4, mean 3, (1/4)·9 + (3/4)·1 = 3. b: (1, 2) and (1, −2), mean (1, −1),
    (1/4)·9 + (3/4)·1 = 3. c: 2 and 2, 0. High = {b}: low 3, high 3."""
    gradients = [
        {"a": torch.tensor(0.0), "b": torch.tensor([1.0, 2.0]), "c": torch.tensor([2.0])},
        {"a": torch.tensor(4.0), "b": torch.tensor([1.0, -2.0]), "c": torch.tensor([2.0])},
    ]
    found = measures.gradient_variance(gradients, {"b"}, [10, 30])
    assert (found.low, found.high, found.total) == pytest.approx((3, 3, 6))
    layers = (Stratum("one", "one", ("a", "b"), ()), Stratum("two", "two", ("c",), ()))
    assert measures.gradient_variance_by_stratum(gradients, layers, [10, 30]) == pytest.approx({"one": 6, "two": 0})
    alike = measures.gradient_variance(gradients, {"b"})  # p = (1/2, 1/2): a: 4, b: 4
    assert (alike.low, alike.high) == pytest.approx((4, 4))


def test_variance_of_real_gradients():
    model, clients = small(), parties()
    found = measures.client_gradients(model, clients)
    expected = all_by_hand(model, clients)
    variance = measures.gradient_variance(found, HIGH, SIZES)
    assert variance.high == pytest.approx(variance_by_hand(expected, SIZES, HIGH), rel=1e-9)
    assert variance.low == pytest.approx(variance_by_hand(expected, SIZES, ("low.weight", "low.bias")), rel=1e-9)
    layers = measures.gradient_variance_by_stratum(found, strata(model), SIZES)
    assert layers == pytest.approx({"low": variance.low, "head": variance.high})


def test_with_shared_by_hand():
    """n = 3, n̂ = 1: high is 3/4·4 + 1/4·8 = 5; low stays 2."""
    found = measures.with_shared(
        {"low": torch.tensor(2.0), "high": torch.tensor(4.0)}, {"high": torch.tensor(8.0)}, {"high"}, 3, 1
    )
    assert {n: t.item() for n, t in found.items()} == {"low": 2.0, "high": 5.0}


@pytest.mark.parametrize("ratio", [0, 0.25, 1, 3, 100])
def test_theorem_4_2(ratio: float):
    """With n̂_m = ratio·n_m the high part shrinks by N²/(N + N̂)² = 1/(1 + ratio)², and the low part stays."""
    model, clients = small(), parties()
    gradients = all_by_hand(model, clients)
    rng = np.random.default_rng(0)
    shared = head_by_hand(model, rng.standard_normal((50, 6)), rng.integers(0, CLASSES, 50))
    total, sampled = sum(SIZES), [ratio * size for size in SIZES]
    mixed = [
        measures.with_shared(as_tensors(g), as_tensors(shared), HIGH, n, extra)
        for g, n, extra in zip(gradients, SIZES, sampled, strict=True)
    ]
    weights = [n + extra for n, extra in zip(SIZES, sampled, strict=True)]
    before = measures.gradient_variance([as_tensors(g) for g in gradients], HIGH, SIZES)
    after = measures.gradient_variance(mixed, HIGH, weights)
    assert before.high > 0.01
    assert after.high / before.high == pytest.approx(total**2 / (total + sum(sampled)) ** 2, rel=1e-9)
    assert after.low == pytest.approx(before.low, rel=1e-12)


def class_gaussians(features: np.ndarray, labels: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Class → mean and standard deviation of its features, element by element."""
    return {int(c): (features[labels == c].mean(0), features[labels == c].std(0)) for c in np.unique(labels)}


def draw_rows(
    gaussians: dict[int, tuple[np.ndarray, np.ndarray]], count: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    means, spreads = (np.stack([gaussians[c][i] for c in range(CLASSES)])[labels] for i in (0, 1))
    return means + spreads * rng.standard_normal(means.shape), labels


def test_theorem_4_2_with_features_drawn_from_the_clients_statistics():
    """Every client draws its own features, many of them, from class-wise Gaussians that all share, N̂ = N.

    The gradient of its objective is taken by autograd, of ½·mean CE(real) + ½·mean CE(sampled) for the high part.
    """
    model, clients = small(), parties([10 * size for size in SIZES])
    seen = [measures.features_at(model, data, "act") for data in clients]
    gaussians = class_gaussians(*(torch.cat(part).numpy() for part in zip(*seen, strict=True)))
    sizes = [len(data) for data in clients]
    with_features = []
    for client, data in enumerate(clients):
        h, y = draw_rows(gaussians, 60_000, seed=client)
        real = F.cross_entropy(model(data.x), data.y)
        sampled = F.cross_entropy(model.head(torch.tensor(h)), torch.tensor(y))
        low = torch.autograd.grad(real, list(model.low.parameters()), retain_graph=True)
        high = torch.autograd.grad(real / 2 + sampled / 2, list(model.head.parameters()))
        names = ("low.weight", "low.bias", *HIGH)
        with_features.append({n: g.numpy() for n, g in zip(names, (*low, *high), strict=True)})
    plain = all_by_hand(model, clients)
    ratio = variance_by_hand(with_features, sizes, HIGH) / variance_by_hand(plain, sizes, HIGH)
    assert ratio == pytest.approx(0.25, rel=0.01)

    h, y = draw_rows(gaussians, 60_000, seed=9)
    shared = measures.shared_gradient(model, torch.tensor(h), torch.tensor(y), "act")
    mixed = [
        measures.with_shared(g, shared, HIGH, n, n)
        for g, n in zip(measures.client_gradients(model, clients), sizes, strict=True)
    ]
    found = measures.gradient_variance(mixed, HIGH, sizes)
    assert found.high == pytest.approx(variance_by_hand(with_features, sizes, HIGH), rel=0.01)
    assert found.low == pytest.approx(variance_by_hand(with_features, sizes, ("low.weight", "low.bias")), rel=1e-9)
    for mine, other in zip(mixed, with_features, strict=True):
        close(mine, other, 5e-3)


def test_the_shared_gradient_by_hand():
    model = small()
    h, y = np.random.default_rng(1).standard_normal((1100, 6)), np.arange(1100) % CLASSES
    found = measures.shared_gradient(model, torch.tensor(h), torch.tensor(y), "act")
    assert not found.pop("low.weight").any()
    assert not found.pop("low.bias").any()
    close(found, head_by_hand(model, h, y))


# Weights ----------------------------------------------------------------------------------------------------


LAYERS = (Stratum("one", "one", ("a", "b"), ()), Stratum("two", "two", ("c",), ()), Stratum("none", "none", ("d",), ()))


def test_divergence_of_two_clients_by_hand():
    """θ̄ = (a 2, b 1, c 0). Client 0 is off by (2, 0, 3): √13; client 1 by (−2, 0, −3): √13.

    Stratum one: √(2² + 0²) = 2; stratum two: 3.
    """
    params = [
        {"a": torch.tensor([0.0]), "b": torch.tensor(1.0), "c": torch.tensor(-3.0)},
        {"a": torch.tensor([4.0]), "b": torch.tensor(1.0), "c": torch.tensor(3.0)},
    ]
    assert measures.weight_divergence(params) == pytest.approx(13**0.5)
    assert measures.weight_divergence_by_stratum(params, LAYERS) == pytest.approx({"one": 2, "two": 3})
    start = {"a": torch.tensor([7.0]), "b": torch.tensor(-2.0), "c": torch.tensor(5.0)}
    deltas = [{n: t - start[n] for n, t in mine.items()} for mine in params]
    assert measures.weight_divergence(deltas) == pytest.approx(13**0.5)
    # weights (3, 1): θ̄ = (a 1, c −1.5), clients off by (1, 1.5) and (3, 4.5): √3.25 and √29.25
    assert measures.weight_divergence(params, [3, 1]) == pytest.approx((3.25**0.5 + 29.25**0.5) / 2)


def test_names_that_only_some_clients_hold_are_compared_among_these():
    """a: 0, 2, 4 with mean 2; c: only clients 1 and 2, at 0 and 6, mean 3, so both are off by 3.

    Client 0: 2. Client 1: √(0 + 9) = 3. Client 2: √(4 + 9). Client 3 holds nothing and is not counted.
    """
    params: list[Tensors] = [
        {"a": torch.tensor(0.0)},
        {"a": torch.tensor(2.0), "c": torch.tensor(0.0)},
        {"a": torch.tensor(4.0), "c": torch.tensor(6.0)},
        {},
    ]
    assert measures.weight_divergence(params) == pytest.approx((2 + 3 + 13**0.5) / 3)
    assert measures.weight_divergence_by_stratum(params, LAYERS) == pytest.approx({"one": 4 / 3, "two": 3})


# Features ---------------------------------------------------------------------------------------------------


def line(points: Sequence[float], labels: Sequence[int]) -> measures.Labelled:
    return torch.tensor(points).unsqueeze(1), torch.tensor(labels)


def test_distance_on_a_line_by_hand():
    """Class 0: {0, 1, 5} and {2, 3, 4} sorted: (2 + 2 + 1)/3 = 5/3. Class 1: {0} and {0, 4}: half of it moves 4: 2.

    D has class 0 in 3 of 4, D' in 3 of 5: ½(¾·5/3 + ¼·2) + ½(⅗·5/3 + ⅖·2) = ½·1.75 + ½·1.8.
    """
    left, right = line([5, 0, 1, 0], [0, 0, 0, 1]), line([2, 4, 0, 3, 4], [0, 0, 1, 0, 1])
    found = measures.conditional_wasserstein(left, right)
    assert found.value == pytest.approx((1.75 + 1.8) / 2)
    assert found.covered == 1
    assert measures.conditional_wasserstein(right, left) == found


def test_classes_of_one_side_only_are_left_out_and_told():
    """Only class 0 is on both sides, at distance 3; it is half of D and a quarter of D'."""
    found = measures.conditional_wasserstein(line([0, 9], [0, 1]), line([3, 7, 7, 7], [0, 2, 2, 2]))
    assert found.value == pytest.approx(3)
    assert found.covered == pytest.approx((0.5 + 0.25) / 2)


def test_distance_against_scipy_and_under_a_shift():
    rng = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 1, generator=rng) for n in (40, 30))
    y, z = torch.zeros(40, dtype=torch.int64), torch.zeros(30, dtype=torch.int64)
    from scipy.stats import wasserstein_distance  # by whoever runs these tests, and not by all who collect them

    expected = wasserstein_distance(left.flatten().numpy(), right.flatten().numpy())
    assert measures.conditional_wasserstein((left, y), (right, z)).value == pytest.approx(expected)

    x, labels = torch.randn(60, 2, 3, 3, generator=rng) + 100, torch.arange(60) % 4
    shift = torch.randn(2, 3, 3, generator=rng)
    moved = measures.conditional_wasserstein((x, labels), (x + shift, labels))
    assert moved.value == pytest.approx(shift.norm().item(), rel=1e-5)
    for limit, far in ((3, 0), (None, 0), (None, 1e5)):
        same = measures.conditional_wasserstein((x + far, labels), (x + far, labels), limit=limit)
        assert same.value == pytest.approx(0, abs=1e-6)


def test_a_limit_bounds_the_examples_and_a_seed_chooses_them(monkeypatch: pytest.MonkeyPatch):
    rng = torch.Generator().manual_seed(0)
    left = torch.randn(100, 2, generator=rng), torch.arange(100) % 2
    right = torch.randn(70, 2, generator=rng), torch.arange(70) % 2
    sizes = []
    real = measures.features._transport
    monkeypatch.setattr(measures.features, "_transport", lambda a, b: sizes.append((len(a), len(b))) or real(a, b))
    found = [measures.conditional_wasserstein(left, right, limit=8, seed=seed).value for seed in (0, 0, 1)]
    assert sizes == [(8, 8)] * 6
    assert found[0] == found[1] != found[2]
    assert measures.conditional_wasserstein(right, left, limit=8).value == pytest.approx(found[0])


@pytest.mark.parametrize("place", ["act", Into("head"), "", "low"])
def test_features_at_a_place(place: str):
    model, data = small(), parties((1100, 3))[0]
    p, x = numbers(model), data.x.numpy()
    low = x @ p["low.weight"].T + p["low.bias"]
    expected = {"low": low, "act": np.tanh(low), "": np.tanh(low) @ p["head.weight"].T + p["head.bias"]}
    features, labels = measures.features_at(model, data, place)
    np.testing.assert_allclose(features.numpy(), expected.get(place, np.tanh(low)), atol=1e-12)
    assert torch.equal(labels, data.y)
    index = torch.tensor([7, 3, 1099])
    some, theirs = measures.features_at(model, data, place, index)
    torch.testing.assert_close(some, features[index])
    assert torch.equal(theirs, data.y[index])


def test_features_of_a_model_without_running_statistics_keep_the_order():
    """Its norm layers use the batch at hand, so batches are mixed; the rows come back in order."""
    norm = nn.BatchNorm1d(4, track_running_stats=False, affine=False)
    x = torch.arange(2000.0).reshape(500, 4)
    features, _ = measures.features_at(nn.Sequential(norm, nn.Linear(4, 2)), TensorExamples(x, torch.zeros(500)), "0")
    assert (features.diff(dim=0) > 0).all()


def test_distance_of_clients_is_the_mean_over_pairs():
    """Inputs at 0, 1 and 5, all of one class: distances 1, 5 and 4 before a layer that doubles, mean 20/3 after it.

    A fourth client, of another class, shares no class with anybody: 3 of 6 pairs are covered.
    """
    double = nn.Linear(1, 1)
    with torch.no_grad():
        double.weight.fill_(2.0)
        double.bias.fill_(-7.0)
    model = nn.Sequential(double, nn.Linear(1, 2))
    clients = [
        TensorExamples(torch.full((n, 1), at), torch.zeros(n).long()) for n, at in ((3, 0.0), (2, 1.0), (4, 5.0))
    ]
    found = measures.feature_distance(model, clients, "0")
    assert found.value == pytest.approx(2 * (1 + 5 + 4) / 3)
    assert found.covered == 1
    clients.append(TensorExamples(torch.zeros(2, 1), torch.ones(2).long()))
    found = measures.feature_distance(model, clients, "0")
    assert found.value == pytest.approx(2 * (1 + 5 + 4) / 3)
    assert found.covered == pytest.approx(0.5)


def test_distance_of_clients_equals_that_of_their_features():
    model, clients = normed_model(), parties((30, 40), torch.float32)
    left, right = (measures.features_at(model, data, "2") for data in clients)
    apart = measures.conditional_wasserstein(left, right, limit=6, seed=3)
    found = measures.feature_distance(model, clients, "2", limit=6, seed=3)
    assert (found.value, found.covered) == pytest.approx((apart.value, apart.covered))


def test_without_pot_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "ot":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install 'fedstrata\[probes\]'"):
        measures.conditional_wasserstein(line([0], [0]), line([1], [0]))


# Generalisation ---------------------------------------------------------------------------------------------


def always(answer: int) -> Tensors:
    """Parameters of a linear model that always says one class."""
    return {"weight": torch.zeros(CLASSES, 2), "bias": F.one_hot(torch.tensor(answer), CLASSES).float()}


def test_a_local_model_is_judged_by_everybody_elses_examples():
    """Client 0 has the labels 0 0 1, client 1 has 1, client 2 has 0 2 2 2. A model that always says 0 is right on
    2 of 3 of client 0's and on 1 of the 5 others; one that always says 2 on 3 of 4 of client 2's and 0 of 4 others."""
    labels = [[0, 0, 1], [1], [0, 2, 2, 2]]
    clients = [TensorExamples(torch.ones(len(y), 2), torch.tensor(y)) for y in labels]
    found = measures.generalisation(nn.Linear(2, CLASSES), {0: always(0), 2: always(2)}, clients)
    assert found.others == pytest.approx({0: 1 / 5, 2: 0})
    assert found.own == pytest.approx({0: 2 / 3, 2: 3 / 4})
    assert found.mean == pytest.approx(0.1)


def test_running_statistics_count_and_what_is_missing_is_the_models_own():
    """With a batch norm alone the answer is the class with the largest (x − mean)/σ: statistics decide it."""
    model = nn.Sequential(nn.BatchNorm1d(CLASSES))
    clients = [TensorExamples(torch.eye(CLASSES), torch.arange(CLASSES)) for _ in range(2)]
    shifted = {"0.running_mean": torch.tensor([-9.0, 0.0, 0.0])}  # class 0 always wins
    found = measures.generalisation(model, {0: shifted, 1: {}}, clients)
    assert found.others == pytest.approx({0: 1 / 3, 1: 1})


# A federation, and bad input --------------------------------------------------------------------------------


def test_on_a_federation():
    clients = parties((20, 30, 10), torch.float32)
    federation = fs.Federation(normed_model(), clients, rounds=1, seed=1)
    before = clone(federation.state.params)
    gradients = measures.client_gradients(federation.model, federation.clients)
    sizes = [len(data) for data in federation.clients]
    layers = measures.gradient_variance_by_stratum(gradients, federation.strata, sizes)
    assert list(layers) == [s.name for s in federation.strata]
    federation.fit()
    local = {c: {n: before[n] - g[n] for n in before} for c, g in enumerate(gradients)}
    assert 0 <= measures.generalisation(federation.model, local, federation.clients).mean <= 1
    assert measures.weight_divergence_by_stratum(list(local.values()), federation.strata).keys() == layers.keys()
    assert measures.feature_distance(federation.model, federation.clients, "1").value > 0


ONE = {"a": torch.zeros(2)}
NOBODY = TensorExamples(torch.zeros(0, 4), torch.zeros(0).long())
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "no clients": (lambda: measures.client_gradients(small(), []), "1 or more clients"),
    "no examples": (lambda: measures.client_gradients(small(), [*parties(), NOBODY]), "client 4 has none"),
    "no gradients": (lambda: measures.gradient_variance([], ()), "no clients with tensors"),
    "empty deltas": (lambda: measures.weight_divergence([{}, {}]), "no clients with tensors"),
    "weights": (lambda: measures.weight_divergence([ONE, ONE], [1]), "1 weights for 2 clients"),
    "weight 0": (lambda: measures.weight_divergence([ONE, ONE], [1, 0]), "above 0, not 0"),
    "shapes": (lambda: measures.weight_divergence([ONE, {"a": torch.zeros(3)}]), "'a' are of different shapes"),
    "names": (lambda: measures.gradient_variance([ONE, {"b": ONE["a"]}], ()), "gradient has no 'a'"),
    "more names": (lambda: measures.gradient_variance([ONE, ONE | {"b": ONE["a"]}], ()), "first client's .* no 'b'"),
    "high": (lambda: measures.gradient_variance([ONE], {"b"}), "the gradients have no 'b'"),
    "strata": (lambda: measures.weight_divergence_by_stratum([ONE], LAYERS[1:]), "the strata have no 'a'"),
    "shared": (lambda: measures.with_shared(ONE, {}, {"a"}, 1, 1), "the shared gradient has no 'a'"),
    "sampled": (lambda: measures.with_shared(ONE, ONE, {"a"}, 1, -1), "sampled must be 0 or more"),
    "place": (lambda: measures.features_at(small(), parties()[0], "atc"), "did you mean 'act'"),
    "no features": (lambda: measures.features_at(small(), NOBODY, "act"), "no examples"),
    "cut": (lambda: measures.shared_gradient(small(), torch.zeros(2, 6), torch.zeros(2).long(), "atc"), "'act'"),
    "labels": (lambda: measures.conditional_wasserstein(line([0], [0]), line([0, 1], [0])), "1 labels for 2 rows"),
    "nothing": (lambda: measures.conditional_wasserstein(line([], []), line([0], [0])), "0 labels for 0 rows"),
    "no class": (lambda: measures.conditional_wasserstein(line([0], [0]), line([0], [1])), "no class in common"),
    "limit": (lambda: measures.conditional_wasserstein(line([0], [0]), line([0], [0]), limit=0), "1 or more, not 0"),
    "dimension": (
        lambda: measures.conditional_wasserstein(line([0], [0]), (torch.zeros(1, 2), torch.tensor([0]))),
        "1 and of 2 numbers",
    ),
    "one client": (lambda: measures.feature_distance(small(), parties((3,)), "act"), "2 or more clients"),
    "no local": (lambda: measures.generalisation(small(), {}, parties()), "some of the clients 0 to 3"),
    "stranger": (lambda: measures.generalisation(small(), {7: {}}, parties()), r"not to \[7\]"),
    "foreign": (lambda: measures.generalisation(small(), {0: {"head.wight": ONE["a"]}}, parties()), "did you mean"),
    "misshapen": (lambda: measures.generalisation(small(), {0: {"head.bias": ONE["a"]}}, parties()), "another shape"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_gets_a_sentence(case: str):
    call, sentence = REFUSALS[case]
    with pytest.raises(UsageError, match=sentence):
        call()


def test_clients_that_share_no_class_have_no_distance():
    clients = [TensorExamples(torch.zeros(2, 4).double(), torch.full((2,), c)) for c in range(3)]
    with pytest.raises(UsageError, match="no two clients"):
        measures.feature_distance(small(), clients, "act")


def test_user_datasets_with_random_transforms_give_the_same_figures_every_time():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            return torch.randn(4) + np.random.rand() + row, row % CLASSES

    model, data = normed_model(), fs.MapExamples(Noisy())
    first, again = (measures.client_gradients(model, [data])[0] for _ in range(2))
    assert all(torch.equal(first[n], again[n]) for n in first)


def test_the_high_part_is_names_in_any_form() -> None:
    """An iterator is read once; a string is not a set of letters."""
    gradients = [{"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}, {"a": torch.tensor([3.0]), "b": torch.zeros(1)}]
    assert measures.gradient_variance(gradients, iter(["b"])) == measures.gradient_variance(gradients, ["b"])
    with pytest.raises(UsageError, match="a list of parameter names, not 'b'"):
        measures.gradient_variance(gradients, "b")


def test_the_mean_over_pairs() -> None:
    """Three clients of one point of class 0 each, at 0, 1 and 3: distances 1, 3 and 2. A fourth has another class."""
    sets = [(torch.tensor([[at]]), torch.tensor([0])) for at in (0.0, 1.0, 3.0)]
    assert measures.mean_wasserstein(sets) == measures.Distance(pytest.approx(2.0), pytest.approx(1.0))
    found = measures.mean_wasserstein([*sets, (torch.tensor([[9.0]]), torch.tensor([1]))])
    assert (found.value, found.covered) == (pytest.approx(2.0), pytest.approx(0.5))
