"""InCo Aggregation, Chan et al. 2023, with its two baselines: heterogeneous aggregation alone, and groups apart."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Update
from fedstrata.models.registry import build_model
from fedstrata.system.machine import compute_with
from fedstrata.techniques.inco import FIGURES, cross, measure_step, references, shuffle, stretch
from tests.small_runs import fedstrata, one_sentence, options
from tests.techniques.worlds import LR, STEPS, ClientData, Vector, differ, equal_rows, parties, present, run, tensors
from tests.techniques.worlds import federation as prepared

Arrays = dict[str, Vector]
FORMS = ("theorem", "paper", "released")
SWITCHES = list(product(FORMS, (True, False), (True, False)))
switches = pytest.mark.parametrize(("form", "normalise", "optimise"), SWITCHES)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are no faster with more threads, and much slower beside other work."""
    with compute_with(1):
        yield


# The formulas, again --------------------------------------------------------------------------------------


def crossed_vector(own: Vector, first: Vector, form: str, normalise: bool, optimise: bool) -> tuple[Vector, float]:
    """(result, θ) for vectors, without the clamp of the result."""
    alpha, beta = float(first @ first), float(first @ own)
    lengths = float(own @ own) ** 0.5, alpha**0.5
    if lengths[1] == 0 or (normalise and lengths[0] == 0):
        return own, 0.0
    theta = beta / alpha
    if form == "theorem":
        theta = min(theta, 0.0)
    elif form == "released":
        theta = min(abs(theta), 5.0)
    share = 1.0 if not optimise else theta if form == "released" else -theta
    if not normalise:
        return own + share * first, theta
    return (own / lengths[0] + share * first / lengths[1]) * sum(lengths) / 2, theta


def cross_arrays(
    own: Vector, first: Vector, form: str, normalise: bool, optimise: bool
) -> tuple[Vector, Vector, Vector]:
    """(result, θ, β) for arrays: as one long vector or, in the released form, kernel by kernel."""
    rows = -1 if form == "released" and own.ndim == 4 else 1
    inside = own.shape[2] * own.shape[3] if rows == -1 else own.size
    mine, theirs = own.reshape(-1, inside), first.reshape(-1, inside)
    pairs = [crossed_vector(k, o, form, normalise, optimise) for k, o in zip(mine, theirs, strict=True)]
    result = np.array([result for result, _ in pairs]).reshape(own.shape)
    beta = np.array([k @ o for k, o in zip(mine, theirs, strict=True)])
    return (result.clip(-0.1, 0.1) if form == "released" else result), np.array([t for _, t in pairs]), beta


def cross_by_library(own: Any, first: Any, form: str, normalise: bool, optimise: bool) -> tuple[Vector, Vector, Vector]:
    """The same by the library; the inputs stay as they are."""
    mine, theirs = (torch.tensor(np.asarray(g, np.float64)) for g in (own, first))
    kept = mine.clone(), theirs.clone()
    result, theta, beta = cross(mine, theirs, form=form, normalise=normalise, optimise=optimise)
    assert torch.equal(mine, kept[0])
    assert torch.equal(theirs, kept[1])
    assert (result.shape, result.dtype) == (mine.shape, mine.dtype)
    kernels = form == "released" and mine.ndim == 4
    assert theta.numel() == beta.numel() == (mine.shape[0] * mine.shape[1] if kernels else 1)
    assert kernels or theta.ndim == beta.ndim == 0
    return result.numpy(), theta.numpy().ravel(), beta.numpy().ravel()


def close(one: Any, other: Any, within: float = 1e-12) -> None:
    np.testing.assert_allclose(one, other, rtol=within, atol=within)


SHAPES = ((7,), (4, 5), (3, 2, 4), (3, 2, 3, 3), (4, 3, 1, 1))


@switches
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_against_numpy(shape: tuple[int, ...], scale: float, form: str, normalise: bool, optimise: bool) -> None:
    """Both signs of β; at the smaller scale the clamp of the released form lets everything through."""
    signs = set()
    for seed in range(8):
        own, first = scale * np.random.default_rng(seed).normal(size=(2, *shape))
        result, theta, beta = cross_by_library(own, first, form, normalise, optimise)
        expected = cross_arrays(own, first, form, normalise, optimise)
        close(result, expected[0])
        close(beta, expected[2])
        if optimise:
            close(theta, expected[1])
        signs |= set(np.sign(beta))
    assert signs == {-1.0, 1.0}


def test_theorem_by_hand() -> None:
    """g_0 = (3, 4) and g_k = (−10, 0): α = 25, β = −30, θ = −1.2, ‖g_0‖ = 5, ‖g_k‖ = 10.

    g_k − θ g_0 = (−10 + 3.6, 4.8) = (−6.4, 4.8), at a right angle to g_0: −19.2 + 19.2 = 0.
    Normalised: ((−1, 0) + 1.2·(0.6, 0.8))·(10 + 5)/2 = (−0.28, 0.96)·7.5 = (−2.1, 7.2).
    Not optimised: (−7, 4), and ((−1, 0) + (0.6, 0.8))·7.5 = (−3, 6).
    g_k = (10, 0): β = 30 ≥ 0, so g_k stays; normalised, (1, 0)·7.5 = (7.5, 0).
    """
    for normalise, optimise, expected in (
        (False, True, (-6.4, 4.8)),
        (True, True, (-2.1, 7.2)),
        (False, False, (-7, 4)),
        (True, False, (-3, 6)),
    ):
        result, theta, beta = cross_by_library((-10, 0), (3, 4), "theorem", normalise, optimise)
        close(result, expected)
        close(beta, -30)
        assert not optimise or np.allclose(theta, -1.2, rtol=0, atol=1e-12)
    for normalise, expected in ((False, (10, 0)), (True, (7.5, 0))):
        result, theta, beta = cross_by_library((10, 0), (3, 4), "theorem", normalise, True)
        close(result, expected)
        assert (theta, beta) == (0, 30)


def test_paper_by_hand() -> None:
    """As above for β < 0. For g_k = (10, 0), β = 30 and θ = 1.2 all the same:

    g_k − θ g_0 = (10 − 3.6, −4.8) = (6.4, −4.8). Normalised: ((1, 0) − 1.2·(0.6, 0.8))·7.5 = (0.28, −0.96)·7.5.
    """
    for sign, normalise, expected in (
        (-1, False, (-6.4, 4.8)),
        (-1, True, (-2.1, 7.2)),
        (1, False, (6.4, -4.8)),
        (1, True, (2.1, -7.2)),
    ):
        result, theta, beta = cross_by_library((sign * 10, 0), (3, 4), "paper", normalise, True)
        close(result, expected)
        close(theta, sign * 1.2)
        close(beta, sign * 30)


def test_released_by_hand() -> None:
    """g_0 = (3, 4)/1000 and g_k = (±10, 0)/1000: |θ| = 1.2 whatever the sign, and nothing is clamped.

    (10 + 3.6, 4.8) and (−10 + 3.6, 4.8), in thousandths. Normalised: (1 + 0.72, 0.96)·7.5 = (12.9, 7.2) and
    (−1 + 0.72, 0.96)·7.5 = (−2.1, 7.2).
    """
    for sign, normalise, expected in (
        (1, False, (13.6, 4.8)),
        (-1, False, (-6.4, 4.8)),
        (1, True, (12.9, 7.2)),
        (-1, True, (-2.1, 7.2)),
    ):
        result, theta, _ = cross_by_library((sign * 0.01, 0), (0.003, 0.004), "released", normalise, True)
        close(result * 1000, expected)
        close(theta, 1.2)


def test_released_clamps() -> None:
    """g_0 = (0.3, 0.4)/1000, g_k = (5, 0)/1000: θ = 1.5e-6/2.5e-7 = 6, of which 5 are used: (5 + 1.5, 2)/1000.

    g_0 = (3, 4), g_k = (−10, 0) give (−6.4, 4.8) before the clamp and (−0.1, 0.1) after it; g_k = (0.02, 0) gives
    θ = 0.0024 and (0.02 + 0.0072, 0.0096), inside of it. Not optimised, (3.02, 4) ends at (0.1, 0.1).
    """
    result, theta, _ = cross_by_library((0.005, 0), (0.0003, 0.0004), "released", False, True)
    close(result, (0.0065, 0.002))
    assert theta == 5
    for own, optimise, expected in (
        ((-10, 0), True, (-0.1, 0.1)),
        ((0.02, 0), True, (0.0272, 0.0096)),
        ((0.02, 0), False, (0.1, 0.1)),
    ):
        close(cross_by_library(own, (3, 4), "released", False, optimise)[0], expected)


def test_kernels_have_a_theta_each() -> None:
    """Two kernels of the same layer: one along its g_0 (θ = 2), one against it (|θ| = 3), both without clamps.

    The sums over both would give θ = (2 − 3)/2 = −0.5, which is what the other forms take.
    """
    first = np.full((1, 2, 2, 2), 0.001)
    own = first * np.array([2, -3]).reshape(1, 2, 1, 1)
    result, theta, _ = cross_by_library(own, first, "released", False, True)
    close(theta, (2, 3))
    close(result, first * np.array([2 + 2, -3 + 3]).reshape(1, 2, 1, 1))
    result, theta, _ = cross_by_library(own, first, "theorem", False, True)
    close(theta, -0.5)
    close(result, first * np.array([2.5, -2.5]).reshape(1, 2, 1, 1))


@switches
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 3, 3)])
def test_zero_gradients(shape: tuple[int, ...], form: str, normalise: bool, optimise: bool) -> None:
    """Without a g_0 nothing is crossed; nor is a g_k = 0 that cannot be normalised."""
    some, nothing = np.random.default_rng(3).uniform(-0.09, 0.09, size=shape), np.zeros(shape)
    result, theta, beta = cross_by_library(some, nothing, form, normalise, optimise)
    close(result, some)
    assert not theta.any()
    assert not beta.any()
    for own, first in ((nothing, some), (nothing, nothing)):
        result, theta, beta = cross_by_library(own, first, form, normalise, optimise)
        close(result, cross_arrays(own, first, form, normalise, optimise)[0])
        assert not beta.any()
        assert np.isfinite(theta).all()


@pytest.mark.parametrize(("normalise", "optimise"), list(product((True, False), repeat=2)))
def test_a_zero_kernel_among_others(normalise: bool, optimise: bool) -> None:
    """The kernels without a g_0 stay as they are, the others are crossed."""
    own, first = np.random.default_rng(4).uniform(-0.02, 0.02, size=(2, 2, 2, 3, 3))
    first[0, 1] = own[1, 0] = 0
    result, theta, _ = cross_by_library(own, first, "released", normalise, optimise)
    close(result, cross_arrays(own, first, "released", normalise, optimise)[0])
    close(result[0, 1], own[0, 1])
    assert np.abs(result[0, 0] - own[0, 0]).max() > 1e-4
    assert theta[1] == 0


@switches
@pytest.mark.parametrize("scale", [1e-20, 1e-30, 1e-42])
def test_single_precision_does_not_underflow_into_nan(scale: float, form: str, normalise: bool, optimise: bool) -> None:
    """The squares of such numbers are 0 in single precision."""
    source = torch.Generator().manual_seed(1)
    own, first = (torch.randn(2, 2, 3, 3, generator=source) for _ in range(2))
    for pair in ((own * scale, first * scale), (own, first * scale), (own * scale, first)):
        for answer in cross(*pair, form=form, normalise=normalise, optimise=optimise):
            assert answer.dtype == torch.float32
            assert torch.isfinite(answer).all()


# The controls ---------------------------------------------------------------------------------------------


def shuffle_array(first: Vector, order: Vector, signs: Vector, form: str) -> Vector:
    """g_0 with its kernels, or its numbers, elsewhere and some turned round; in `released` as long as those before."""
    pieces = (
        [piece.ravel() for kernels in first for piece in kernels] if first.ndim == 4 else list(first.reshape(-1, 1))
    )
    found = []
    for at, (source, sign) in enumerate(zip(order, signs, strict=True)):
        piece = sign * pieces[source]
        length = np.linalg.norm(piece)
        resized = form == "released" and first.ndim == 4 and length > 0
        found.append(piece * np.linalg.norm(pieces[at]) / length if resized else piece)
    return np.concatenate(found).reshape(first.shape)


def draw_order(first: Vector, seed: int) -> tuple[Vector, Vector]:
    """(a permutation of the kernels, or of the numbers, of a layer; a sign for each)."""
    count = first.shape[0] * first.shape[1] if first.ndim == 4 else first.size
    rng = np.random.default_rng(seed)
    return rng.permutation(count), rng.choice([-1, 1], count)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shuffled_against_numpy(shape: tuple[int, ...], form: str) -> None:
    """Another direction, the same lengths: of the whole layer, and of every kernel where kernels are crossed.

    What is 0 in all kernels, because no data reaches it, is still 0.
    """
    first = np.random.default_rng(6).normal(size=shape)
    if first.ndim == 4 and shape[2] > 1:
        first[:, :, 0] = 0
    order, signs = draw_order(first, 7)
    found = shuffle(torch.tensor(first), torch.tensor(order), torch.tensor(signs), form=form).numpy()  # type: ignore[arg-type]
    close(found, shuffle_array(first, order, signs, form))
    close(np.linalg.norm(found), np.linalg.norm(first))
    assert not found[first == 0].any()
    if first.ndim == 4 and form == "released":
        close(np.linalg.norm(found, axis=(2, 3)), np.linalg.norm(first, axis=(2, 3)))
    else:
        assert sorted(np.abs(found).ravel()) == pytest.approx(sorted(np.abs(first).ravel()), abs=1e-12)
    differ(found, first)


def test_a_kernel_without_a_length_has_none_elsewhere() -> None:
    first = np.random.default_rng(8).normal(size=(3, 2, 3, 3))
    first[1, 1] = 0
    order, signs = np.array([3, 0, 1, 2, 4, 5]), np.ones(6)
    found = shuffle(torch.tensor(first), torch.tensor(order), torch.tensor(signs), form="released").numpy()
    close(found, shuffle_array(first, order, signs, "released"))
    assert not found[0, 0].any()
    assert not found[1, 1].any()


def test_length_by_hand() -> None:
    """g_0 = (3, 4), g_k = (−10, 0): crossed (−2.1, 7.2) (`theorem`, above), of length 7.5, along g_k (−7.5, 0).

    With cos(g_0, g_k) = −30/50 = −0.6, ‖g'‖/‖g_k‖ = 0.75 and cos(g', g_k) = 1; of the crossed step itself 21/75 = 0.28.
    """
    first, own, crossed = (torch.tensor(g, dtype=torch.float64) for g in ((3, 4), (-10, 0), (-2.1, 7.2)))
    step = stretch(own, crossed)
    close(step.numpy(), (-7.5, 0))
    for result, kept in ((step, 1.0), (crossed, 0.28)):
        found = {name: float(value) for name, value in measure_step(own, first, result).items()}
        assert found == pytest.approx({"cosine": -0.6, "length": 0.75, "kept": kept}, abs=1e-12)
    nothing = torch.zeros(2, dtype=torch.float64)
    assert torch.equal(stretch(nothing, crossed), nothing)
    found = {name: float(value) for name, value in measure_step(nothing, first, nothing).items()}
    assert found == {"cosine": 0, "length": 1, "kept": 0}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("control", ["shuffled", "length"])
def test_controls_in_a_federation(control: str, form: str) -> None:
    """Three rounds against NumPy: both layers with one order of their layer 0's numbers, or as long as when crossed.

    The order is drawn in the first round and stays: from round to round it is as much the same as g_0 is.
    """
    fed = prepared(text(form, True, True, more=f", control='{control}'"), TWO, deep(), rounds=3)
    rounds = fed.rounds()
    next(rounds)
    state = fed.state.techniques["inco"]
    order, signs = None, None
    if control == "shuffled":
        source = generator(int(state["order"]), "inco", "body.0.weight")
        order = torch.randperm(16, generator=source).numpy()
        signs = 2 * torch.randint(2, (16,), generator=source).numpy() - 1

    def change(delta: Arrays) -> Arrays:
        found = dict(delta)
        for name, first in FIRST.items():
            if order is not None and signs is not None:
                moved = shuffle_array(delta[first], order, signs, form)
                found[name] = cross_arrays(delta[name], moved, form, True, True)[0]
            else:
                crossed = cross_arrays(delta[name], delta[first], form, True, True)[0]
                found[name] = delta[name] * np.linalg.norm(crossed) / np.linalg.norm(delta[name])
        return found

    path = reference(TWO, [[0, 1]] * 3, WEIGHTS["examples"], change)
    agree(fed.state.params, path[1])
    for number, _ in enumerate(rounds, start=2):
        agree(fed.state.params, path[number])
    later = fed.state.techniques["inco"]
    assert later.get("order") == state.get("order")
    published = fed.method.publish(fed.state.techniques)
    assert published.keys() == set(FIGURES)
    assert all(found.keys() == FIRST.keys() for found in published.values())
    if control == "length":
        assert all(abs(value - 1) < 1e-9 for value in published["kept"].values())
        assert not any(published["theta"].values())
    other = prepared(text(form, True, True, more=", control='shuffled'"), TWO, deep(), rounds=1, seed=9)
    other.fit()
    assert later.get("order") != other.state.techniques["inco"]["order"]


# Theorem 3.1 ----------------------------------------------------------------------------------------------


def nearest(own: Vector, first: Vector) -> Vector:
    """The nearest point to g_k with ⟨g, g_0⟩ ≥ 0, by a solver."""
    from scipy.optimize import minimize  # by whoever runs these tests, and not by all who collect them

    found = minimize(
        lambda g: float((g - own) @ (g - own)),
        first,  # allowed, for ⟨g_0, g_0⟩ ≥ 0
        jac=lambda g: 2 * (g - own),
        constraints={"type": "ineq", "fun": lambda g: g @ first, "jac": lambda g: first},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    assert found.success
    return np.asarray(found.x)


@pytest.mark.parametrize("shape", [(2,), (5,), (12,), (3, 4), (2, 2, 2, 2)])
def test_the_theorem_gives_the_nearest_point(shape: tuple[int, ...]) -> None:
    signs = []
    for seed in range(12):
        own, first = np.random.default_rng(seed).normal(size=(2, *shape))
        result, theta, beta = cross_by_library(own, first, "theorem", False, True)
        close(result.ravel(), nearest(own.ravel(), first.ravel()), within=1e-6)
        assert (result * first).sum() >= -1e-12
        if beta >= 0:
            assert np.array_equal(result, own)
            assert theta == 0
        else:
            close((result * first).sum(), 0)
        signs.append(bool(beta >= 0))
    assert 0 < sum(signs) < len(signs)


# A federation ---------------------------------------------------------------------------------------------

DEPTH = 3
FIRST = {"body.2.weight": "body.0.weight", "body.4.weight": "body.0.weight"}
SECOND = {"body.4.weight": "body.2.weight"}
Weighs = Callable[[ClientData], float]
WEIGHTS: dict[str, Weighs] = {"examples": lambda party: len(party[1]), "uniform": lambda party: 1.0}


def deep(depth: int = DEPTH) -> nn.Sequential:
    """A model whose stage `body` has layers of the same shape; a shallower one holds the first of them."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(4, 4), nn.Tanh())]
        stem, head = nn.Linear(3, 4), nn.Linear(4, 3)
    parts = {"stem": stem, "act": nn.Tanh(), "body": nn.Sequential(*layers[: 2 * depth]), "head": head}
    return nn.Sequential(OrderedDict(parts)).double()


def arrays(params: Mapping[str, Tensor]) -> Arrays:
    return {n: p.detach().double().numpy().copy() for n, p in params.items()}


def train_client(model: nn.Module, params: Arrays, party: ClientData, only: Sequence[str] | None = None) -> Arrays:
    """w_k − w after gradient descent on a whole client, of all the model's names or only some."""
    model = copy.deepcopy(model)
    mine = dict(model.named_parameters())
    x, y = tensors(party)
    with torch.no_grad():
        for name, p in mine.items():
            p.copy_(torch.from_numpy(params[name]))
    moving = [n for n in mine if only is None or n in only]
    for _ in range(STEPS):
        slopes = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), [mine[n] for n in moving])
        with torch.no_grad():
            for name, slope in zip(moving, slopes, strict=True):
                mine[name] -= LR * slope
    return {n: mine[n].detach().numpy() - params[n] for n in moving}


def mean_by_name(deltas: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    """Name by name, over those who have it."""
    total: Arrays = {}
    weight: dict[str, float] = {}
    for delta, share in zip(deltas, weights, strict=True):
        for name, change in delta.items():
            total[name] = total.get(name, 0.0) + share * change
            weight[name] = weight.get(name, 0.0) + share
    return {name: total[name] / weight[name] for name in total}


def inco(delta: Arrays, partners: Mapping[str, str], *switch: Any) -> tuple[Arrays, dict[str, tuple[float, float]]]:
    """(delta with its layers crossed, mean θ and β by name)."""
    pairs = {k: o for k, o in partners.items() if k in delta and o in delta}
    answers = {k: cross_arrays(delta[k], delta[o], *switch) for k, o in pairs.items()}
    measured = {k: (float(theta.mean()), float(beta.mean())) for k, (_, theta, beta) in answers.items()}
    return {**delta, **{k: result for k, (result, _, _) in answers.items()}}, measured


def reference(
    clients: Sequence[ClientData],
    rounds: Sequence[Sequence[int]],
    weigh: Weighs,
    change: Callable[[Arrays], Arrays] = lambda delta: delta,
    depth_of: Callable[[int], int] = lambda client: DEPTH,
    active: Callable[[int], Sequence[str] | None] = lambda number: None,
) -> list[Arrays]:
    """The parameters before the first round and after each."""
    path = [arrays(dict(deep().named_parameters()))]
    for number, took_part in enumerate(rounds):
        deltas = [train_client(deep(depth_of(k)), path[-1], clients[k], active(number)) for k in took_part]
        delta = change(mean_by_name(deltas, [weigh(clients[k]) for k in took_part]))
        path.append({n: w + delta[n] if n in delta else w for n, w in path[-1].items()})
    return path


def agree(params: Mapping[str, Tensor], expected: Arrays, within: float = 1e-10) -> None:
    assert params.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(params[name].numpy(), value, rtol=0, atol=within, err_msg=name)


def flatten(params: Arrays) -> Vector:
    return np.concatenate([p.ravel() for p in params.values()])


def text(form: str, normalise: bool, optimise: bool, weight: str = "examples", more: str = "") -> str:
    return f"fedavg(weight='{weight}') + inco(form='{form}', normalise={normalise}, optimise={optimise}{more})"


TWO = parties((0, 0, 1, 2), (1, 2, 2, 0, 0, 1))


@switches
@pytest.mark.parametrize(("choice", "partners"), [("first", FIRST), ("conv2", SECOND)])
def test_two_rounds(choice: str, partners: dict[str, str], form: str, normalise: bool, optimise: bool) -> None:
    """Mean of the deltas, then a crossing with what layer 0 had before any; two clients of 4 and 6 examples."""
    method = text(form, normalise, optimise, more=f", reference='{choice}'")
    fed = prepared(method, TWO, deep(), rounds=2)
    measured: list[dict[str, tuple[float, float]]] = []

    def change(delta: Arrays) -> Arrays:
        result, seen = inco(delta, partners, form, normalise, optimise)
        measured.append(seen)
        return result

    path = reference(TWO, [[0, 1]] * 2, WEIGHTS["examples"], change)
    for number, _ in enumerate(fed.rounds()):
        agree(fed.state.params, path[number + 1])
        state = fed.state.techniques["inco"]
        assert state.keys() == {f"{what}/{n}" for n in partners for what in FIGURES}
        assert all(t.ndim == 0 and t.is_floating_point() for t in state.values())
        for name, (theta, beta) in measured[number].items():
            assert float(state[f"beta/{name}"]) == pytest.approx(beta, rel=1e-6, abs=1e-12)
            assert not optimise or float(state[f"theta/{name}"]) == pytest.approx(theta, rel=1e-6, abs=1e-12)
    assert all(theta <= 0 for seen in measured for theta, _ in seen.values()) or form != "theorem"
    differ(flatten(path[2]), flatten(reference(TWO, [[0, 1]] * 2, WEIGHTS["examples"])[2]))


@switches
def test_what_has_no_partner_has_the_plain_mean(form: str, normalise: bool, optimise: bool) -> None:
    """To the bit; layer 0 of the stage, biases, and layers that are alone with their shape in their stage."""
    plain, other = (run(m, TWO, deep(), rounds=1) for m in ("fedavg", text(form, normalise, optimise)))
    alone = plain.state.params.keys() - FIRST.keys()
    assert all(torch.equal(plain.state.params[n], other.state.params[n]) for n in alone)
    crossed = [n for n in FIRST if not torch.equal(plain.state.params[n], other.state.params[n])]
    betas = {n: float(other.state.techniques["inco"][f"beta/{n}"]) for n in FIRST}
    kept = [n for n in FIRST if betas[n] >= 0] if (form, normalise, optimise) == ("theorem", False, True) else []
    assert crossed == [n for n in FIRST if n not in kept]


def test_defaults() -> None:
    """The released form, normalised and optimised, from the first layer."""
    written = "fedavg(weight='uniform') + inco(form='released', normalise=True, optimise=True, reference='first')"
    one, other = (run(method, TWO, deep()) for method in ("fedavg(weight='uniform') + inco", written))
    assert all(torch.equal(one.state.params[n], p) for n, p in other.state.params.items())


def test_layers_of_other_shapes_and_stages_have_no_partner() -> None:
    """A model of one layer a stage, or of layers that all differ, runs as FedAvg does, to the bit."""
    for build in (lambda: deep(1), lambda: build_model("mlp(hidden=(4, 5, 6))", (3,), 3, seed=1).double()):
        plain, other = (run(f"fedavg(weight='examples'){more}", TWO, build()) for more in ("", " + inco"))
        assert all(torch.equal(plain.state.params[n], p) for n, p in other.state.params.items())
        assert other.state.techniques["inco"] == {}


MLP = {"first": {"fc3.linear.weight": "fc2.linear.weight", "fc4.linear.weight": "fc2.linear.weight"}}
MLP["conv2"] = {"fc4.linear.weight": "fc3.linear.weight"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("choice", ["first", "conv2"])
def test_equal_layers_of_a_perceptron_are_one_stage(choice: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fc2, fc3 and fc4 are alike; fc1 has as many outputs, and other inputs; fc6 comes after one that differs."""
    model = build_model("mlp(hidden=(4, 4, 4, 4, 5, 4))", (3,), 3, seed=1).double()
    method = f"inco(form='{form}', reference='{choice}')"
    sent, moved, state = one_round(method, model, tensors(TWO[1]), monkeypatch)
    assert {n.removeprefix("theta/") for n in state if n.startswith("theta/")} == MLP[choice].keys()
    for name, value in inco(sent, MLP[choice], form, True, True)[0].items():
        np.testing.assert_allclose(moved[name], value, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_references_of_a_transformer(form: str) -> None:
    """Blocks are one stage: by shape, all 4×4 projections follow the first block's query, and norm layers too."""
    pytest.importorskip("transformers")
    model = build_model("vit(depth=2, dim=4, heads=2, mlp_ratio=2.0, patch=4)", (1, 8, 8), 3, seed=1)
    found = references(dict(model.named_parameters()), fs.strata(model), "first", form)
    of = [f"block{block}.layer." for block in (1, 2)]
    projections = [f"{block}attention.{p}_proj.weight" for block in of for p in "qkvo"]
    expected = dict.fromkeys(projections[1:], projections[0])
    expected |= {f"{of[1]}mlp.{fc}.weight": f"{of[0]}mlp.{fc}.weight" for fc in ("fc1", "fc2")}
    before, after = ([f"{block}layernorm_{place}.weight" for block in of] for place in ("before", "after"))
    if form == "released":
        expected |= dict(zip(after, before, strict=True))
    else:
        expected |= dict.fromkeys([before[1], *after], before[0])
    assert found == expected


@pytest.mark.parametrize("form", FORMS)
def test_conv2_where_norm_layers_and_blocks_are_stages(form: str) -> None:
    """A norm layer may be a stage by its name, without a weight; of a transformer, the second projection is layer 0."""
    parts = {"conv1": nn.Conv2d(3, 3, 3), "bn1": nn.BatchNorm2d(3), "conv2": nn.Conv2d(3, 3, 3), "fc": nn.Linear(3, 2)}
    plain = nn.Sequential(OrderedDict(parts))
    assert references(dict(plain.named_parameters()), fs.strata(plain), "conv2", form) == {}
    pytest.importorskip("transformers")
    model = build_model("vit(depth=2, dim=4, heads=2, mlp_ratio=2.0, patch=4)", (1, 8, 8), 3, seed=1)
    found = references(dict(model.named_parameters()), fs.strata(model), "conv2", form)
    projections = [f"block{block}.layer.attention.{p}_proj.weight" for block in (1, 2) for p in "qkvo"]
    assert {n: o for n, o in found.items() if "attention" in n} == dict.fromkeys(projections[2:], projections[1])


class Block(nn.Module):
    """Two norm layers around a linear one, with a shortcut, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mix, self.norm2 = nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm2(torch.tanh(self.mix(self.norm1(x))))


def attentive() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(9)
        parts = {"stem": nn.Linear(3, 4), "body": nn.Sequential(Block(), Block()), "head": nn.Linear(4, 3)}
        return nn.Sequential(OrderedDict(parts)).double()


Messages = list[tuple[Assignment, Update]]


def overheard(fed: fs.Federation, monkeypatch: pytest.MonkeyPatch) -> Messages:
    """Copies of all messages, as they come."""
    messages: Messages = []
    original = fed._engine.run

    def listen(assignments: Any, recall: Any) -> Iterator[Any]:
        for assignment, (update, memory) in zip(assignments, original(assignments, recall), strict=True):
            messages.append((copy.deepcopy(assignment), copy.deepcopy(update)))
            yield update, memory

    monkeypatch.setattr(fed._engine, "run", listen)
    return messages


def message_tensors(message: tuple[Assignment, Update]) -> list[Tensors]:
    """Parameters, statistics, changes and statistics again, by the names that they have in the client's own model.

    Groups stand side by side in the server's model, each under a name of its own.
    """
    asked, update = message
    kinds = [asked.params, asked.buffers, update.delta, update.buffers]
    if len({name.partition(".")[0] for name in asked.params}) == 1:
        kinds = [{name.partition(".")[2]: value for name, value in kind.items()} for kind in kinds]
    return kinds


def assert_alike(mine: Messages, theirs: Messages, within: float) -> None:
    """A client was sent the same, and sent the same back."""
    assert len(mine) == len(theirs)
    for message, other_message in zip(mine, theirs, strict=True):
        assert message[0].client == other_message[0].client or within > 0
        for one, other in zip(message_tensors(message), message_tensors(other_message), strict=True):
            assert one.keys() == other.keys()
            for name, value in one.items():
                torch.testing.assert_close(value, other[name], rtol=0, atol=within)


def one_round(
    method: str, model: nn.Module, client: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[Arrays, Arrays, Tensors]:
    """(the only client's delta, what the server made of it, the technique's state)."""
    fed = fs.Federation(model, [client], method=method, rounds=1, batch_size=8, lr=0.05, engine="serial")
    before, messages = arrays(fed.state.params), overheard(fed, monkeypatch)
    fed.fit()
    moved = {n: p - before[n] for n, p in arrays(fed.state.params).items()}
    return arrays(messages[0][1].delta), moved, fed.state.techniques["inco"]


@pytest.mark.parametrize("form", FORMS)
def test_norm_layers_of_a_block(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As released norm2.weight is crossed with its own block's norm1.weight, else all with the first; biases never."""
    sent, moved, state = one_round(f"inco(form='{form}')", attentive(), tensors(TWO[1]), monkeypatch)
    partners = {"body.1.mix.weight": "body.0.mix.weight"}
    if form == "released":
        partners |= {f"body.{block}.norm2.weight": f"body.{block}.norm1.weight" for block in (0, 1)}
    else:
        later = ["body.0.norm2.weight", "body.1.norm1.weight", "body.1.norm2.weight"]
        partners |= dict.fromkeys(later, "body.0.norm1.weight")
    assert {n.removeprefix("theta/") for n in state if n.startswith("theta/")} == partners.keys()
    for name, value in inco(sent, partners, form, True, True)[0].items():
        np.testing.assert_allclose(moved[name], value, rtol=0, atol=1e-12, err_msg=name)


def photos(count: int, seed: int = 2) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 8, 8, generator=source, dtype=torch.float64)
    return x, torch.randint(5, (count,), generator=source)


BLOCKS = {f"layer{s}.{b}.conv{c}.weight": (s, b, c) for s, b, c in product((1, 2, 3, 4), (0, 1), (1, 2))}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("choice", ["first", "conv2"])
def test_references_of_a_resnet(choice: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By names: layer 0 of a stage that widens is its first block's conv2, for its conv1 has another shape.

    Stage 1 does not widen, so that its layer 0 is conv1; with "conv2" it is conv2 there too, and conv2 is not crossed.
    """
    model = build_model("resnet18(width=4)", (3, 8, 8), 5, seed=3).double()
    sent, moved, state = one_round(f"inco(form='{form}', reference='{choice}')", model, photos(8), monkeypatch)
    partners = {name: f"layer{s}.0.conv2.weight" for name, (s, b, _) in BLOCKS.items() if b == 1}
    if choice == "first":
        later = ("layer1.0.conv2.weight", "layer1.1.conv1.weight", "layer1.1.conv2.weight")
        partners |= dict.fromkeys(later, "layer1.0.conv1.weight")
    weights = {n for n in sent if sent[n].ndim >= 2}
    assert {n.removeprefix("beta/") for n in state if n.startswith("beta/")} & weights == partners.keys()
    expected, measured = inco(sent, partners, form, True, True)
    for name in weights:
        np.testing.assert_allclose(moved[name], expected[name], rtol=0, atol=1e-12, err_msg=name)
    for name, (theta, _) in measured.items():
        assert float(state[f"theta/{name}"]) == pytest.approx(theta, rel=1e-6)


# Clients of different depth -------------------------------------------------------------------------------

SIX = parties((0, 0, 1), (1, 2, 2, 2, 0), (2, 2), (0, 1, 2, 0), (1, 1, 0, 2, 2, 2), (0, 2, 1, 1))
ARCHS = {"one": 1, "two": 2}


def depth_of(client: int) -> int:
    """1, 2, 3, 1, 2, 3."""
    return 1 + client % 3


def arch_of(client: int) -> str:
    return ("one", "two", "")[client % 3]


def three_depths(method: str, clients: Sequence[ClientData] = SIX, **settings: Any) -> Any:
    """A federation of three depths."""
    archs = {name: deep(depth) for name, depth in ARCHS.items()}
    return prepared(method, clients, deep(), **{"archs": archs, "arch_of": arch_of, **settings})


@pytest.mark.parametrize(
    ("method", "weight", "form"),
    [
        ("fedavg", "examples", None),
        ("heteroavg", "uniform", None),
        ("fedavg(weight='examples') + heteroavg", "examples", None),
        *((text(form, True, True, weight), weight, form) for form in FORMS for weight in ("examples", "uniform")),
    ],
)
@pytest.mark.parametrize("participation", [6, 2])
def test_three_depths_against_a_dictionary_loop(method: str, weight: str, form: str | None, participation: int) -> None:
    """Every name is averaged over the selected clients that hold it; one that none of them holds keeps its bits."""
    fed = three_depths(method, rounds=6, participation=participation, seed=3)
    states = [fed.state.params, *(fed.state.params for _ in fed.rounds())]
    change = (lambda delta: delta) if form is None else (lambda delta: inco(delta, FIRST, form, True, True)[0])
    path = reference(SIX, present(fed), WEIGHTS[weight], change, depth_of)
    for state, expected in zip(states, path, strict=True):
        agree(state, expected)
    for (before, after), took_part in zip(pairwise(states), present(fed), strict=True):
        deepest = max(map(depth_of, took_part))
        missing = {f"body.{2 * index}.{kind}" for index in range(deepest, DEPTH) for kind in ("weight", "bias")}
        assert {n for n in before if torch.equal(before[n], after[n])} == missing
    depths = {max(map(depth_of, took_part)) for took_part in present(fed)}
    assert depths == ({3} if participation == 6 else {1, 2, 3}), "rounds without the deepest clients are wanted"


def test_the_deepest_layer_is_averaged_over_its_owners_only() -> None:
    """It moves as if there were nobody else; the shallow layers do not."""
    everybody = next(iter_states(three_depths("heteroavg", rounds=1)))
    owners = next(iter_states(prepared("heteroavg", [SIX[2], SIX[5]], deep(), rounds=1)))
    torch.testing.assert_close(everybody["body.4.weight"], owners["body.4.weight"], rtol=0, atol=1e-12)
    differ(everybody["body.0.weight"].numpy(), owners["body.0.weight"].numpy())


def iter_states(fed: fs.Federation) -> Iterator[Tensors]:
    return (fed.state.params for _ in fed.rounds())


def same_bits(one: fs.Federation, other: fs.Federation) -> bool:
    return all(torch.equal(p, other.state.params[n]) for n, p in one.state.params.items())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("heteroavg", "fedavg(weight='uniform')"),
        ("fedavg(weight='examples') + heteroavg", "fedavg"),
        ("heteroavg + fedprox(mu=0.3)", "fedavg(weight='uniform') + fedprox(mu=0.3)"),
        ("groupavg", "fedavg"),
    ],
)
@pytest.mark.parametrize("arch", ["", "whole"])
def test_equal_architectures_are_fedavg(one: str, other: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, whether or not the one architecture has a name; half of the clients per round, in small batches."""
    settings: dict[str, Any] = {"archs": {"whole": deep()}, "arch_of": lambda client: arch}
    settings |= {"participation": 3, "epochs": 2, "batch_size": 2}
    first = prepared(one, SIX, deep(), **settings)
    second = prepared(other, SIX, deep(), **settings)
    heard = [overheard(fed, monkeypatch) for fed in (first, second)]
    first.fit()
    second.fit()
    assert_alike(*heard, within=0)
    assert len(heard[0]) == 9


# Groups apart ---------------------------------------------------------------------------------------------


def alikes() -> list[ClientData]:
    """Rows that are all the same in each of six clients: batches in any order give the same result."""
    return [equal_rows(count, seed % 3, seed) for seed, count in enumerate((2, 4, 6, 3, 5, 1))]


def visits(fed: fs.Federation, monkeypatch: pytest.MonkeyPatch) -> dict[int, Messages]:
    """What was said to and by each client, once everything has run."""
    messages = overheard(fed, monkeypatch)
    fed.fit()
    assert not any(record.refused for record in fed.records)
    by_client: dict[int, Messages] = {}
    for asked, update in messages:
        by_client.setdefault(asked.client, []).append((asked, update))
    return by_client


@pytest.mark.parametrize(
    "more",
    [
        "",
        "fedavg(weight='uniform')",
        "fedprox(mu=0.3)",
        "scaffold",
        "fednova",
        "feddyn(alpha=0.3)",
        "fedavgm",
        "fedadam(lr=0.05)",
        "moon",
        "fednlr",
    ],
)
def test_groups_are_federations_of_their_own(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three depths, each of which gets what it would get without the others; clients take 1 to 6 steps."""
    settings: dict[str, Any] = {"rounds": 4, "epochs": 2, "batch_size": 2, "lr": 0.3}
    clients = alikes()
    together = visits(three_depths(f"{more} + groupavg" if more else "groupavg", clients, **settings), monkeypatch)
    for first in range(3):
        alone = prepared(more or "fedavg", [clients[first], clients[first + 3]], deep(depth_of(first)), **settings)
        apart = visits(alone, monkeypatch)
        for index in (0, 1):
            assert_alike(together[first + 3 * index], apart[index], 1e-10)


def test_the_order_of_groupavg_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (visits(three_depths(m), monkeypatch) for m in ("groupavg + scaffold", "scaffold + groupavg"))
    for client in range(6):
        assert_alike(one[client], other[client], 0)


def normed_model(depth: int) -> nn.Sequential:
    """The model with a norm layer that everybody holds."""
    model = deep(depth)
    parts = {"stem": model.stem, "norm": nn.BatchNorm1d(4).double(), "body": model.body, "head": model.head}
    return nn.Sequential(OrderedDict(parts))


@pytest.mark.parametrize("buffers", ["average", "local", "drop"])
def test_running_statistics_stay_in_their_group(buffers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    archs = {name: normed_model(depth) for name, depth in ARCHS.items()}
    settings: dict[str, Any] = {"rounds": 3, "buffers": buffers}
    together = prepared("groupavg", SIX, normed_model(3), archs=archs, arch_of=arch_of, **settings)
    heard = visits(together, monkeypatch)
    for first in range(3):
        alone = prepared("fedavg", [SIX[first], SIX[first + 3]], normed_model(depth_of(first)), **settings)
        apart = visits(alone, monkeypatch)
        for index in (0, 1):
            assert_alike(heard[first + 3 * index], apart[index], 1e-10)


def test_a_group_moves_with_its_own_clients_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client a round: each group's parameters are those of its last visit plus what came back from it."""
    fed = three_depths("groupavg", rounds=12, participation=1, seed=1)
    messages = overheard(fed, monkeypatch)
    fed.fit()
    groups: dict[str, Messages] = {}
    for asked, update in messages:
        groups.setdefault(asked.arch, []).append((asked, update))
    assert [len(messages) > 1 for messages in groups.values()] == [True] * 3
    for messages in groups.values():
        for (before, update), (after, _) in pairwise(messages):
            for name, value in after.params.items():
                torch.testing.assert_close(value, before.params[name] + update.delta[name], rtol=0, atol=1e-14)


def test_other_groups_data_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [c if depth_of(k) == 2 else (c[0] + 1, c[1]) for k, c in enumerate(SIX)]
    one, other = (visits(three_depths("groupavg", clients), monkeypatch) for clients in (SIX, others))
    for client in (1, 4):
        assert_alike(one[client], other[client], 0)


@pytest.mark.parametrize("name", ["whole", "whole_0", "one two", "forward"])
def test_any_name_of_a_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients 0, 2 and 4 hold a shallow model of that name, the others the server's own."""
    archs: dict[str, Any] = {"archs": {name: deep(1)}, "arch_of": lambda client: "" if client % 2 else name}
    heard = visits(three_depths("groupavg", **archs), monkeypatch)
    for client in range(6):
        own = dict(deep(3 if client % 2 else 1).named_parameters())
        assert message_tensors(heard[client][0])[0].keys() == own.keys()


# Company --------------------------------------------------------------------------------------------------

COMPANY = (
    "fedprox(mu=0.3)",
    "scaffold",
    "fednova",
    "moon",
    "feddyn(alpha=0.3)",
    "fednlr",
    "fedpart(full_rounds=1, rounds_per_stratum=1)",
)


@cache
def company_alone(other: str) -> fs.Federation:
    """The other technique's run, made once; nobody may change it."""
    fed = three_depths(f"fedavg(weight='uniform') + {other}", participation=4)
    fed.fit()
    return fed


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("other", COMPANY)
def test_with_others(other: str, form: str) -> None:
    """Both orders run on three depths, stay finite, and are not the other technique alone."""
    alone = company_alone(other)
    for pair in (f"{other} + inco(form='{form}')", f"inco(form='{form}') + {other}"):
        fed = three_depths(f"fedavg(weight='uniform') + {pair}", participation=4)
        fed.fit()
        assert all(torch.isfinite(p).all() for p in fed.state.params.values())
        assert len(fed.records) == 3
        assert not any(record.refused for record in fed.records)
        assert not same_bits(fed, alone)


@pytest.mark.parametrize("form", FORMS)
def test_a_partner_that_did_not_arrive(form: str) -> None:
    """FedPart's rounds: all, stem, body.0, body.2, body.4, head: only the first one crosses anything."""
    strata = ("stem", "body.0", "body.2", "body.4", "head")
    active = [None, *([f"{name}.weight", f"{name}.bias"] for name in strata)]
    fed = prepared(f"{text(form, True, True)} + fedpart(full_rounds=1, rounds_per_stratum=1)", TWO, deep(), rounds=6)
    crossings = [len(fed.state.techniques["inco"]) for _ in fed.rounds()]
    assert crossings == [2 * len(FIGURES), 0, 0, 0, 0, 0]
    path = reference(
        TWO, [[0, 1]] * 6, WEIGHTS["examples"], lambda d: inco(d, FIRST, form, True, True)[0], active=active.__getitem__
    )
    agree(fed.state.params, path[-1])


@pytest.mark.parametrize("form", FORMS)
def test_partners_that_arrive_together(form: str) -> None:
    """Rounds of body.0 with body.4, then of body.2 with body.4, which both lack a partner's other half."""
    pairs = (("body.0", "body.4"), ("body.2", "body.4"))
    active = [[f"{name}.{kind}" for name in pair for kind in ("weight", "bias")] for pair in pairs]
    schedule = "fedpart(full_rounds=0, rounds_per_stratum=1, strata=('body.[04]', 'body.[24]'))"
    fed = prepared(f"{text(form, True, True)} + {schedule}", TWO, deep(), rounds=2)
    crossings = [sorted(fed.state.techniques["inco"]) for _ in fed.rounds()]
    assert crossings == [sorted(f"{figure}/body.4.weight" for figure in FIGURES), []]
    path = reference(
        TWO, [[0, 1]] * 2, WEIGHTS["examples"], lambda d: inco(d, FIRST, form, True, True)[0], active=active.__getitem__
    )
    agree(fed.state.params, path[-1])


@pytest.mark.parametrize("pair", ["inco + groupavg", "groupavg + inco"])
def test_nothing_is_crossed_between_groups(pair: str) -> None:
    with pytest.raises(fs.UsageError, match=r"cannot be combined: .{20}") as refusal:
        fs.method(pair)
    assert "'inco'" in str(refusal.value)
    assert "'groupavg'" in str(refusal.value)


@pytest.mark.parametrize(
    "method",
    [
        "inco",
        "heteroavg",
        "groupavg",
        *(f"inco(form='{form}')" for form in FORMS),
        "inco(form='released', normalise=False, optimise=False, reference='conv2')",
        "inco(form='released', reference='conv2', control='shuffled')",
        "heteroavg + inco(control='length')",
        "inco(form='theorem', reference='conv2') + fedprox(mu=0.1)",
        "fedavg(weight='examples') + heteroavg",
        "groupavg + scaffold",
    ],
)
def test_written_and_read_again(method: str) -> None:
    made = fs.method(method)
    assert fs.method(str(made)) == made


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("inco(form='algorithm')", "form"),
        ("inco(form=None)", "form"),
        ("inco(reference='conv1')", "reference"),
        ("inco(reference='body.0')", "reference"),
        ("inco(normalise='no')", "normalise"),
        ("inco(optimise=2)", "optimise"),
        ("inco(control='random')", "control"),
        ("inco(normalize=False)", "normalise"),
        ("inco(theta=1.0)", "theta"),
        ("heteroavg(weight='examples')", "weight"),
        ("groupavg(form='paper')", "form"),
    ],
)
def test_bad_arguments(method: str, says: str) -> None:
    with pytest.raises(fs.UsageError, match=says):
        fs.method(method)


def test_factors_of_adapters_are_crossed_with_the_same_factor_of_the_first_block() -> None:
    """Though A of both layers, and B of both, are of one shape: a query's A has the first block's query's A."""
    pytest.importorskip("peft", reason="the extra peft is not installed")

    def block() -> nn.Module:
        return nn.Sequential(OrderedDict(query=nn.Linear(4, 4), value=nn.Linear(4, 4)))

    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(block(), block(), block()), head=nn.Linear(4, 2)))
    fs.adapt(model, "lora(r=2)", torch.zeros(2, 4), seed=0)
    found = references(dict(model.named_parameters()), fs.strata(model), "first", "released")
    factors = {name: other for name, other in found.items() if "lora" in name}
    names = [f"{layer}.{factor}.default.weight" for layer in ("query", "value") for factor in ("lora_A", "lora_B")]
    assert factors == {f"blocks.{at}.{name}": f"blocks.0.{name}" for at in (1, 2) for name in names}


# The command ----------------------------------------------------------------------------------------------

NESTED = "mlp(hidden=(8,)); mlp(hidden=(8, 8)); mlp(hidden=(8, 8, 8))"


@pytest.mark.parametrize("method", ["inco", "heteroavg", "groupavg", "inco(form='released') + scaffold"])
def test_the_command_takes_architectures(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = options(model="mlp(hidden=(8, 8, 8))", method=method, rounds=2)
    assert fedstrata("run", "--out", tmp_path / "run", "--archs", NESTED, *words) == 0, capsys.readouterr().err


def test_architectures_that_do_not_nest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second layer of the narrow one has another shape than the server's."""
    words = options(model="mlp(hidden=(8, 8))", method="inco", rounds=2)
    assert fedstrata("run", "--out", tmp_path / "run", "--archs", "mlp(hidden=(8, 4)); mlp(hidden=(8, 8))", *words) == 2
    assert "fc2.linear.weight" in one_sentence(capsys)
