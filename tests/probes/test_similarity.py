"""Similarity of models: CKA against NumPy and loops, stage by stage; distributions of updates; maps of features."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.core.tensors import Tensors, clone
from fedstrata.core.types import Into, Stratum
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError
from fedstrata.models.strata import strata
from fedstrata.probes import measures


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def related_features(rows: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two sets of features of which the second has something of the first."""
    left = normal(rows, 5, seed=seed) + 3
    return left, left @ normal(5, 7, seed=seed + 1) + 2 * normal(rows, 7, seed=seed + 2)


def rotation(size: int, seed: int = 5) -> Tensor:
    return torch.linalg.qr(normal(size, size, seed=seed)).Q


# CKA --------------------------------------------------------------------------------------------------------


def plain_by_numpy(left: Tensor, right: Tensor) -> float:
    """tr(KHLH) with H = I − 11ᵀ/n, written out."""
    k, l = (side.numpy() @ side.numpy().T for side in (left, right))  # noqa: E741
    h = np.eye(len(k)) - 1 / len(k)
    hsic = lambda a, b: np.trace(a @ h @ b @ h) / (len(k) - 1) ** 2  # noqa: E731
    return float(hsic(k, l) / math.sqrt(hsic(k, k) * hsic(l, l)))


def hsic_by_loops(left: np.ndarray, right: np.ndarray) -> float:
    """HSIC₁ as a U-statistic, over all tuples of different examples, which is what its closed form sums up:

    mean K_ij L_ij over (i, j) + mean K_ij L_qr over (i, j, q, r) − 2·mean K_ij L_iq over (i, j, q).
    """
    n = len(left)
    k = [[float(left[i] @ left[j]) for j in range(n)] for i in range(n)]
    m = [[float(right[i] @ right[j]) for j in range(n)] for i in range(n)]
    pairs = triples = quadruples = 0.0
    for i in range(n):
        for j in range(n):
            if j == i:
                continue
            pairs += k[i][j] * m[i][j]
            for q in range(n):
                if q in (i, j):
                    continue
                triples += k[i][j] * m[i][q]
                quadruples += sum(k[i][j] * m[q][r] for r in range(n) if r not in (i, j, q))
    return pairs / math.perm(n, 2) + quadruples / math.perm(n, 4) - 2 * triples / math.perm(n, 3)


def hsic_by_formula(left: np.ndarray, right: np.ndarray) -> float:
    """The closed form of Song et al., sum by sum."""
    n = len(left)
    k, m = (side @ side.T for side in (left, right))
    trace = whole_k = whole_m = across = 0.0
    for i in range(n):
        for j in range(n):
            if i != j:
                trace += k[i, j] * m[j, i]
                whole_k += k[i, j]
                whole_m += m[i, j]
            across += sum(k[i, q] * m[q, j] for q in range(n) if q not in (i, j))
    return (trace + whole_k * whole_m / ((n - 1) * (n - 2)) - 2 / (n - 2) * across) / (n * (n - 3))


Hsic = Callable[[np.ndarray, np.ndarray], float]


def unbiased_by_hand(pairs: Sequence[tuple[Tensor, Tensor]], hsic: Hsic) -> float:
    arrays = [(left.numpy(), right.numpy()) for left, right in pairs]
    both, left, right = (
        sum(hsic(*chosen) for chosen in batches)
        for batches in (arrays, [(a, a) for a, _ in arrays], [(b, b) for _, b in arrays])
    )
    return both / math.sqrt(left * right)


def test_the_plain_one_against_numpy():
    left, right = related_features()
    assert measures.cka(left, right, unbiased=False) == pytest.approx(plain_by_numpy(left, right), rel=1e-10)
    middle = [side - side.mean(0) for side in (left, right)]  # Kornblith's other form: ‖YᵀX‖²/(‖XᵀX‖·‖YᵀY‖)
    others = (middle[1].T @ middle[0]).norm() ** 2 / math.prod((side.T @ side).norm() for side in middle)
    assert measures.cka(left, right, unbiased=False) == pytest.approx(others.item(), rel=1e-10)


@pytest.mark.parametrize("hsic", [hsic_by_loops, hsic_by_formula])
@pytest.mark.parametrize("rows", [4, 5, 9])
def test_the_unbiased_one_against_loops(rows: int, hsic: Hsic):
    pair = related_features(rows)
    assert measures.cka(*pair) == pytest.approx(unbiased_by_hand([pair], hsic), rel=1e-9)
    assert measures.minibatch_cka([pair]) == measures.cka(*pair)


def test_minibatches_add_up_before_the_ratio():
    pairs = [related_features(rows, seed) for rows, seed in ((6, 0), (6, 10), (5, 20))]
    expected = unbiased_by_hand(pairs, hsic_by_loops)
    assert measures.minibatch_cka(iter(pairs)) == pytest.approx(expected, rel=1e-9)
    assert expected != pytest.approx(np.mean([measures.cka(*pair) for pair in pairs]), rel=1e-3)


def test_minibatches_tell_about_the_whole():
    """Small batches and one large one estimate the same; the plain one's value depends on the batch."""
    left, right = related_features(2000)
    whole = measures.cka(left, right)
    small = measures.minibatch_cka(zip(left.split(10), right.split(10), strict=True))
    assert small == pytest.approx(whole, abs=0.02)
    plain = np.mean([measures.cka(*pair, unbiased=False) for pair in zip(left.split(10), right.split(10), strict=True)])
    assert plain > whole + 0.1


@pytest.mark.parametrize("unbiased", [True, False])
def test_turning_scaling_and_moving_do_not_matter(unbiased: bool):
    left, right = related_features()
    value = measures.cka(left, right, unbiased)
    assert 0.1 < value < 0.95
    assert measures.cka(left, left, unbiased) == pytest.approx(1, abs=1e-12)
    assert measures.cka(left, 3 * left @ rotation(5) - 8, unbiased) == pytest.approx(1, abs=1e-12)
    assert measures.cka(right, left, unbiased) == pytest.approx(value, abs=1e-12)
    turned = measures.cka(-0.2 * left @ rotation(5) + 40, 7 * right @ rotation(7), unbiased)
    assert turned == pytest.approx(value, abs=1e-10)
    stretched = left * torch.tensor([10.0, 1, 1, 1, 1])
    assert measures.cka(stretched, right, unbiased) != pytest.approx(value, abs=0.01)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    assert measures.cka(left[order], right[order], unbiased) == pytest.approx(value, abs=1e-12)


def test_unrelated_features_are_at_zero_only_without_the_bias():
    values = [
        [measures.cka(normal(40, 60, seed=s), normal(40, 80, seed=s + 100), unbiased) for s in range(20)]
        for unbiased in (True, False)
    ]
    assert abs(np.mean(values[0])) < 0.02
    assert min(values[0]) < 0 < max(values[0])
    assert np.mean(values[1]) > 0.5


def test_axes_and_types_of_features():
    left, right = related_features(12)
    value = measures.cka(left, right)
    assert measures.cka(left.reshape(12, 5, 1, 1), right.float()) == pytest.approx(value, abs=1e-5)
    whole = torch.arange(12) ** 2
    assert measures.cka(whole, whole.double() * 2) == pytest.approx(1)
    assert measures.cka(left.requires_grad_(), right) == value


@pytest.mark.parametrize("unbiased", [True, False])
def test_features_that_do_not_vary_have_no_cka(unbiased: bool):
    left, _ = related_features(50)
    for same in (torch.full((50, 3), 0.1), torch.full((50, 3), 1 / 3, dtype=torch.float64), torch.zeros(50, 3)):
        assert math.isnan(measures.cka(same, left, unbiased))
        assert math.isnan(measures.cka(same, same, unbiased))
    equidistant = torch.eye(50, dtype=torch.float64)
    assert math.isnan(measures.cka(equidistant, left))  # all pairs alike: nothing is left without a diagonal


# Models -----------------------------------------------------------------------------------------------------


def deep(blocks: int, seed: int, width: int = 6) -> nn.Sequential:
    """stem, body (of some blocks), head; ReLUs work in place, and there are norm layers and dropout."""
    torch.manual_seed(seed)
    inside = [
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Dropout(0.5))
        for _ in range(blocks)
    ]
    model = nn.Sequential()
    for name, part in (("stem", nn.Linear(4, width)), ("body", nn.Sequential(*inside)), ("head", nn.Linear(width, 3))):
        model.add_module(name, part)
    return model


MODELS = [deep(1, 0), deep(2, 1), deep(3, 2, width=9)]
INPUTS = normal(30, 4).float()


def features(model: nn.Module, stage: str, x: Tensor = INPUTS) -> Tensor:
    return measures.features_at(model, TensorExamples(x, torch.zeros(len(x))), stage)[0].double()


def test_a_matrix_for_every_stage_that_all_models_have():
    """All in one batch, so that the matrix is that of `cka` pair by pair."""
    found = measures.layer_similarity(MODELS, INPUTS)
    assert list(found.matrices) == list(found.means) == ["stem", "body", "head"]
    for stage, matrix in found.matrices.items():
        seen = [features(model, stage) for model in MODELS]
        expected = [[measures.cka(a, b) for b in seen] for a in seen]
        np.testing.assert_allclose(matrix.numpy(), expected, atol=1e-6)
        assert found.means[stage] == pytest.approx((matrix[0, 1] + matrix[0, 2] + matrix[1, 2]).item() / 3)


def test_stages_by_name_inside_stages_and_at_inputs():
    """A place that not all models have is left out: only two of the models have a second block."""
    places = ["body.0", "body.1", Into("head"), ""]
    found = measures.layer_similarity(MODELS, INPUTS, places)
    assert list(found.matrices) == ["body.0", Into("head"), ""]
    assert measures.layer_similarity(MODELS[1:], INPUTS, iter(places)).matrices.keys() == set(places)
    whole = measures.layer_similarity(MODELS, INPUTS)
    torch.testing.assert_close(found.matrices[Into("head")], whole.matrices["body"])
    torch.testing.assert_close(found.matrices[""], whole.matrices["head"])


def test_what_a_stage_puts_out_is_seen_before_the_next_one_changes_it():
    models = [nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)) for _ in range(2)]
    found = measures.layer_similarity(models, INPUTS, ["0", "1"])
    raw = [model[0](INPUTS).detach().double() for model in models]
    assert found.means["0"] == pytest.approx(measures.cka(*raw), abs=1e-6)
    assert found.means["1"] == pytest.approx(measures.cka(*(x.relu() for x in raw)), abs=1e-6)


def test_minibatches_of_any_size_and_examples_instead_of_a_tensor():
    """30 examples in batches of 9: the last 3 join the batch before. No example is left out or taken twice."""
    seen: list[Tensor] = []

    class Noting(nn.Identity):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x

    watched = nn.Sequential(Noting(), nn.Linear(4, 2))
    found = measures.layer_similarity([watched, watched], INPUTS, ["1"], batch_size=9)
    assert [len(x) for x in seen[::2]] == [9, 9, 12]
    torch.testing.assert_close(torch.cat(seen[::2]).sort(0).values, INPUTS.sort(0).values)
    assert found.means["1"] == pytest.approx(1)
    data = TensorExamples(INPUTS, torch.arange(30) % 3)
    one, other = (measures.layer_similarity(MODELS, given, batch_size=9) for given in (INPUTS, data))
    assert one.means == other.means
    batches = seen[::2]
    pairs = [tuple(features(m, "body", x) for m in MODELS[:2]) for x in batches]
    assert one.matrices["body"][0, 1] == pytest.approx(measures.minibatch_cka(pairs), abs=1e-6)


def test_of_a_module_that_runs_twice_the_first_time_counts():
    twice = [nn.Sequential(layer, nn.ReLU(), layer) for layer in (nn.Linear(4, 4), nn.Linear(4, 4))]
    found = measures.layer_similarity(twice, INPUTS)
    assert list(found.means) == ["0", "1", "2"]
    first = [model[0](INPUTS).detach() for model in twice]
    assert found.means["0"] == found.means["2"] == pytest.approx(measures.cka(*first), abs=1e-6)


def test_examples_sorted_by_class_are_mixed():
    """Classes 40 apart, which both models see: batches of one class would not know."""
    x = normal(96, 4).float() + 40 * (torch.arange(96) // 24).unsqueeze(1)
    found = measures.layer_similarity([nn.Sequential(nn.Linear(4, 5)) for _ in range(2)], x, batch_size=24)
    assert found.means["0"] > 0.99


def test_models_of_the_zoo_with_different_depths():
    models = [fs.build_model(f"resnet{d}(width=4)", (1, 16, 16), 10, seed=d) for d in (10, 14)]
    images = normal(16, 1, 16, 16).float()
    found = measures.layer_similarity(models, images)
    assert list(found.means) == list(fs.stages(models[0]))
    for stage, value in found.means.items():
        assert value == pytest.approx(measures.cka(*(features(model, stage, images) for model in models)), abs=1e-6)


def test_measuring_changes_no_model_and_no_generator():
    model = deep(2, 0)
    before, random = clone(model.state_dict()), torch.get_rng_state()
    measures.layer_similarity([model, MODELS[0]], INPUTS, batch_size=8)
    measures.embedding(INPUTS, torch.zeros(30), [0] * 30, perplexity=5)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_norm_layers_without_running_statistics_and_random_datasets():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            return torch.randn(4) + np.random.rand(), 0

    bare = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))
    models, data = [bare, nn.Sequential(nn.Identity(), nn.Linear(4, 2))], fs.MapExamples(Noisy())
    first, again = (measures.layer_similarity(models, data, batch_size=7).means for _ in range(2))
    assert first == again
    assert first["0"] > 0.8


def test_a_dead_model_is_left_out_of_the_mean():
    dead = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    with torch.no_grad():
        dead[0].bias.fill_(-1e6)
    models = [nn.Sequential(nn.Linear(4, 5), nn.ReLU()), dead, nn.Sequential(nn.Linear(4, 5), nn.ReLU())]
    found = measures.layer_similarity(models, INPUTS)
    assert found.matrices["1"][1].isnan().all()
    assert found.means["1"] == found.matrices["1"][0, 2].item()
    assert math.isnan(measures.layer_similarity([dead, dead], INPUTS, ["1"]).means["1"])


# Distributions ----------------------------------------------------------------------------------------------


LAYERS = (Stratum("one", "one", ("a", "b"), ()), Stratum("two", "two", ("c",), ()), Stratum("none", "none", ("d",), ()))


def test_a_distribution_by_hand():
    """Stratum one holds 0, 1, 1 and 4: mean 1.5, variance (2.25 + 0.25 + 0.25 + 6.25)/4 = 2.25.

    Two bins from 0 to 4: three entries in [0, 2), one in [2, 4], densities 3/4/2 and 1/4/2.
    """
    clients: list[Tensors] = [
        {"a": torch.tensor([[0.0, 1.0]]), "b": torch.tensor(1.0)},
        {"b": torch.tensor(4.0), "c": torch.tensor([2.0, 2.0])},
    ]
    found = measures.gradient_distribution(clients, LAYERS, bins=2)
    assert list(found) == ["one", "two"]
    one, two = found.values()
    assert (one.density.tolist(), one.edges.tolist()) == ([0.375, 0.125], [0, 2, 4])
    assert (one.mean, one.std, one.entries) == pytest.approx((1.5, 1.5, 4))
    assert (two.density.tolist(), two.edges.tolist()) == ([0, 2], [1.5, 2, 2.5])  # all alike: bins around it
    assert (two.mean, two.std, two.entries) == (2, 0, 2)


def test_edges_make_distributions_comparable():
    """Of 0, 1, 1 and 4, the 4 is outside: 1/4 in [0, ½) and 2/4 in [½, 2]."""
    update = {"a": torch.tensor([0.0, 1.0, 1.0, 4.0])}
    found = measures.gradient_distribution(update, LAYERS, bins=[0, 0.5, 2])["one"]
    assert found.density.tolist() == pytest.approx([0.25 / 0.5, 0.5 / 1.5])
    assert found.edges.tolist() == [0, 0.5, 2]
    assert found.mean == 1.5


def test_a_distribution_of_real_gradients():
    model = deep(1, 0)
    data = [TensorExamples(INPUTS, torch.arange(30) % 3), TensorExamples(INPUTS + 1, torch.arange(30) % 2)]
    gradients = measures.client_gradients(model, data)
    found = measures.gradient_distribution(gradients, strata(model), bins=50)
    assert list(found) == [s.name for s in strata(model)]
    head = np.concatenate([g[n].numpy().ravel() for g in gradients for n in ("head.weight", "head.bias")])
    density, edges = np.histogram(head.astype(np.float64), bins=50, density=True)
    np.testing.assert_allclose(found["head"].density.numpy(), density)
    np.testing.assert_allclose(found["head"].edges.numpy(), edges)
    assert found["head"].std == pytest.approx(head.std(), rel=1e-5)


# Maps -------------------------------------------------------------------------------------------------------


def clusters(rows: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """Three classes far apart."""
    labels = torch.arange(rows) % 3
    return normal(rows, 2, 4) + 30 * labels.view(-1, 1, 1), labels, torch.arange(rows) % 2


def test_a_map_keeps_classes_apart_and_rows_together_with_their_class_and_client():
    x, labels, clients = clusters()
    found = measures.embedding(x, labels, clients, perplexity=10)
    assert found.points.shape == (60, 2)
    assert torch.equal(found.rows, torch.arange(60))
    assert torch.equal(found.labels, labels)
    assert torch.equal(found.clients, clients)
    middle = torch.stack([found.points[labels == c].mean(0) for c in range(3)])
    assert torch.equal(torch.cdist(found.points, middle).argmin(1), labels)


def test_a_seed_chooses_rows_and_points():
    x, labels, clients = clusters()
    first, again, other = (
        measures.embedding(x, labels, clients.tolist(), seed=s, perplexity=5, limit=25) for s in (0, 0, 1)
    )
    assert torch.equal(first.points, again.points)
    assert torch.equal(first.rows, again.rows)
    assert not torch.equal(first.rows, other.rows)
    assert len(first.rows.unique()) == len(first.points) == 25
    assert torch.equal(first.labels, labels[first.rows])
    assert torch.equal(first.clients, clients[first.rows])


# Bad input --------------------------------------------------------------------------------------------------


X = normal(8, 3)
Y = torch.zeros(8)
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "few": (lambda: measures.cka(X[:3], X[:3]), "4 or more examples per batch, not 3"),
    "plain few": (lambda: measures.cka(X[:1], X[:1], unbiased=False), "2 or more examples per batch, not 1"),
    "few in a batch": (lambda: measures.minibatch_cka([(X, X), (X[:3], X[:3])]), "4 or more examples per batch, not 3"),
    "rows": (lambda: measures.cka(X, X[:5]), "8 rows and 5"),
    "no batches": (lambda: measures.minibatch_cka([]), "no batches"),
    "one model": (lambda: measures.layer_similarity(MODELS[:1], INPUTS), "2 or more models; there are 1"),
    "few inputs": (lambda: measures.layer_similarity(MODELS, INPUTS[:3]), "4 or more examples per batch, not 3"),
    "batch size": (
        lambda: measures.layer_similarity(MODELS, INPUTS, batch_size=2),
        "4 or more examples per batch, not 2",
    ),
    "stage": (lambda: measures.layer_similarity(MODELS, INPUTS, ["bodi"]), "no model has a stage 'bodi'.*'body'"),
    "letters": (lambda: measures.layer_similarity(MODELS, INPUTS, "body"), "a list of module names, not 'body'"),
    "in common": (lambda: measures.layer_similarity(MODELS, INPUTS, ["body.2"]), "none of the stages in common"),
    "no stages": (lambda: measures.layer_similarity([nn.Linear(4, 2)] * 2, INPUTS), "a Linear has no stages"),
    "turned": (
        lambda: measures.layer_similarity([nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))] * 2, INPUTS),
        "120 rows for 30",
    ),
    "no tensors": (lambda: measures.gradient_distribution([{}], LAYERS), "no tensors"),
    "foreign": (lambda: measures.gradient_distribution({"e": X}, LAYERS), "the strata have no 'e'"),
    "infinite": (lambda: measures.gradient_distribution({"a": X / 0}, LAYERS), "stratum 'one' .* not finite"),
    "no bins": (
        lambda: measures.gradient_distribution({"a": X}, LAYERS, 0),
        "1 or more, or 2 or more increasing edges",
    ),
    "edges": (lambda: measures.gradient_distribution({"a": X}, LAYERS, [1, 1]), "increasing edges"),
    "labels": (lambda: measures.embedding(X, Y[:5], Y), "5 labels for 8 rows"),
    "clients": (lambda: measures.embedding(X, Y, [0, 1]), "2 clients for 8 rows"),
    "limit": (lambda: measures.embedding(X, Y, Y, limit=0), "limit of rows must be 1 or more, not 0"),
    "perplexity": (lambda: measures.embedding(X, Y, Y), "less than the 8 rows, not 30"),
    "perplexity 0": (lambda: measures.embedding(X, Y, Y, perplexity=0), "above 0, not 0"),
    "thin": (lambda: measures.embedding(X[:, :1], Y, Y, perplexity=2), "2 or more finite numbers"),
    "dead": (lambda: measures.embedding(X * 0, Y, Y, perplexity=2), "not all the same"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_gets_a_sentence(case: str):
    call, sentence = REFUSALS[case]
    with pytest.raises(UsageError, match=sentence):
        call()


def test_crossing_is_read_from_what_is_published() -> None:
    """β of layer a is 1, −1 and 2: positive in two of three rounds; b was crossed in one, and nothing in the last."""
    rounds = [
        {"theta": {"a": 0.5}, "beta": {"a": 1.0}, "length": {"a": 1.2}},
        {"theta": {"a": 0.1, "b": 3.0}, "beta": {"a": -1.0, "b": 0.0}},
        {"theta": {"a": 0.2}, "beta": {"a": 2.0}},
        {},
    ]
    found = measures.crossing(rounds)
    assert found.theta["a"] == pytest.approx([0.5, 0.1, 0.2])
    assert found.length == {"a": [1.2]}
    assert found.kept == {}
    assert found.positive == {"a": pytest.approx(2 / 3), "b": 0.0}
