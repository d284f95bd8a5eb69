"""Measures of single clients, of depth and of learning rates, against numbers that were obtained in other ways."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.core.types import Stratum, Work
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError
from fedstrata.models.strata import strata
from fedstrata.probes import measures
from fedstrata.probes.measures.exchange import agreement, mixture_error, mixture_loss
from fedstrata.probes.measures.visits import centre_cosines
from fedstrata.tasks.registry import build_task

TWO = (Stratum("a", "a", ("a.weight",), ()), Stratum("b", "b", ("b.weight", "b.bias"), ()))


def update(a: list[float], b: list[float], bias: float) -> dict[str, Tensor]:
    return {"a.weight": torch.tensor(a), "b.weight": torch.tensor(b), "b.bias": torch.tensor([bias])}


# Updates ------------------------------------------------------------------------------------------------------


def test_norms_and_cosines_by_hand() -> None:
    """Of three clients in a plane the others' centre is halfway: at 67.5° from the first, and so on."""
    root = math.sqrt(0.5)
    deltas = [update([3, 0], [0, 0], 4), update([0, 7], [3, 0], 4), update([root, root], [0, 1], 0)]
    found = measures.compare_visits(deltas, TWO)
    assert found.norms["a"] == pytest.approx([3, 7, 1])
    assert found.norms["b"] == pytest.approx([4, 5, 1])
    assert found.norm == pytest.approx([5, math.sqrt(74), math.sqrt(2)])
    sharp = math.cos(math.radians(67.5))
    assert found.cosines["a"] == pytest.approx([sharp, sharp, 1.0])
    pairs = np.array([[3, 0, 0, 0, 4], [0, 7, 3, 0, 4], [root, root, 0, 1, 0]])
    units = pairs / np.linalg.norm(pairs, axis=1, keepdims=True)
    between = units @ units.T
    assert found.nearest == pytest.approx([max(between[i, j] for j in range(3) if j != i) for i in range(3)], rel=1e-5)


def test_the_centre_is_the_geometric_median_of_the_others_directions() -> None:
    """Against a minimum that was searched for in the space itself."""
    rng = np.random.default_rng(0)
    units = rng.normal(size=(7, 5)) + np.array([1.5, 0, 0, 0, 0])
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    for i, found in enumerate(centre_cosines(torch.from_numpy(units @ units.T))):
        others = np.delete(units, i, axis=0)
        centre = minimize(lambda v, o=others: np.linalg.norm(v - o, axis=1).sum(), others.mean(0), tol=1e-12).x
        assert found == pytest.approx(centre @ units[i] / np.linalg.norm(centre), abs=1e-4)


def test_a_minority_does_not_move_the_centre_however_long_its_updates_are() -> None:
    """Two of seven go the other way, a thousand times as far."""
    honest = [update([1.0, 0.01 * k], [1.0, 0.0], 0.0) for k in range(5)]
    flipped = [update([-1000.0, 0.0], [-1000.0, 0.0], 0.0)] * 2
    found = measures.compare_visits([*honest, *flipped], TWO)
    assert min(value for value in found.cosine[:5] if value is not None) > 0.99
    assert max(value for value in found.cosine[5:] if value is not None) < -0.99
    assert found.nearest[5] == pytest.approx(1)


def test_clients_without_a_direction_or_a_stratum() -> None:
    """An update of zero has no cosine and is in no centre; who does not hold a stratum has the norm zero there."""
    deltas = [update([1, 0], [1, 0], 0), update([0, 0], [0, 0], 0), {"a.weight": torch.tensor([2.0, 0.0])}]
    found = measures.compare_visits(deltas, TWO)
    assert found.cosines["a"] == pytest.approx([1, None, 1])
    assert found.cosines["b"] == [None, None, None]
    assert found.norms["b"] == [1, 0, 0]
    alone = measures.compare_visits(deltas[:1], TWO)
    assert (alone.cosine, alone.nearest, alone.norm) == ([None], [None], pytest.approx([math.sqrt(2)]))
    with pytest.raises(UsageError, match="no clients with updates"):
        measures.compare_visits([{}], TWO)
    with pytest.raises(UsageError, match="no 'c'"):
        measures.compare_visits([{"c": torch.ones(1)}], TWO)


def test_distances_of_running_statistics_by_hand() -> None:
    """Medians 0 and 1: two channels of 3 and 4 deviations are √(25/2) in the square mean."""
    means = ([0.0, 0.0], [0.0, 0.0], [3.0, 4.0])
    buffers = [{"n.running_mean": torch.tensor(m), "n.running_var": torch.ones(2)} for m in means]
    found = measures.statistics_distances([*buffers, {}])
    assert found == [0, 0, pytest.approx(math.sqrt(12.5), rel=1e-4), None]
    assert measures.statistics_distances(buffers[:1]) == [None]


# Models and examples exchanged --------------------------------------------------------------------------------


def linear(weights: list[list[float]]) -> nn.Module:
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(weights))
    return model


def test_losses_that_are_exchanged_by_hand() -> None:
    """The model's margin is ±2 for the two inputs; a right answer costs ln(1 + e⁻²), a wrong one 2 more.

    The client has three examples of class 0 and one of class 1, all with the other's label; its own model has learnt
    that. Shared examples are right: in the client's mixture of labels they cost the global model the same as ever.
    """
    good, bad = math.log(1 + math.exp(-2)), math.log(1 + math.exp(-2)) + 2
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    before, local = linear([[2.0, 0.0], [0.0, 2.0]]), linear([[0.0, 2.0], [2.0, 0.0]])
    mine = TensorExamples(x[[0, 0, 0, 1]], torch.tensor([1, 1, 1, 0]))
    honest = TensorExamples(x[[0, 0, 0, 1]], torch.tensor([0, 0, 0, 1]))
    shared = x[[0, 1, 1]], torch.tensor([0, 1, 1])
    found = measures.exchange([before] * 2, [local, before], [mine, honest], shared)
    assert found.own == pytest.approx([bad, good])
    assert found.expected == pytest.approx([good, good])
    assert found.own_after == pytest.approx([good, good])
    assert found.shared_after == pytest.approx([bad, good])
    assert found.accuracy == [0, 1]
    assert found.consistent == [1, 1]


def test_a_loss_in_another_mixture_of_classes_by_hand() -> None:
    """Classes cost 1, 3 and 8; a mixture of two of the first and one of the second costs 5/3."""
    each, labels = torch.tensor([0.0, 2.0, 3.0, 8.0]), torch.tensor([0, 0, 1, 2])
    assert mixture_loss(3.25, each, labels, torch.tensor([0, 1, 0])) == pytest.approx(5 / 3)
    assert mixture_loss(3.25, each, labels, torch.tensor([0, 5])) == pytest.approx(1)  # nobody else has class 5
    assert mixture_loss(3.25, each, labels, torch.tensor([5])) is None
    assert mixture_loss(3.25, each, labels, None) == 3.25


def test_agreement_with_labels_that_were_exchanged_or_are_random() -> None:
    named = torch.tensor([0, 0, 1, 1, 2, 2])
    assert agreement(named, (named + 1) % 3) == (0, 1)
    assert agreement(named, torch.tensor([0, 1, 0, 1, 0, 1])) == pytest.approx((2 / 6, 3 / 6))


def test_regression_has_no_classes() -> None:
    task = build_task("regression")
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    data = TensorExamples(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 4.0]))
    found = measures.exchange([model], [model], [data], (torch.tensor([[3.0]]), torch.tensor([4.0])), task)
    assert (found.own, found.expected) == ([0.5], [4])
    assert (found.accuracy, found.consistent) == ([None], [None])
    with pytest.raises(UsageError, match="2 clients' examples"):
        measures.exchange([model], [model], [data, data], (torch.ones(1, 1), torch.ones(1)), task)


def test_targets_that_are_numbers_are_compared_range_by_range() -> None:
    """The model says 0: 20 shared targets around 1 and 20 around 3 cost 1 and 9; a client of the latter expects 9."""
    task, model = build_task("regression"), nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    shared = torch.ones(40, 1), torch.tensor([1.0, 3.0]).repeat_interleave(20)
    data = [TensorExamples(torch.ones(5, 1), torch.full((5,), number)) for number in (1.0, 3.0)]
    found = measures.exchange([model] * 2, [model] * 2, data, shared, task)
    assert found.own == found.expected == found.shared_after == pytest.approx([1, 9])
    assert found.doubt == pytest.approx([0, 0])


def test_the_standard_error_of_a_difference_by_hand() -> None:
    """Own losses 0, 2 of class 0: variance 2, over 2. Elsewhere 1, 3 of class 0: variance 2, over 2. Together √2."""
    own, each = torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0])
    zeros = torch.zeros(2, dtype=torch.int64)
    assert mixture_error(own, each, zeros, zeros) == pytest.approx(math.sqrt(2))
    assert mixture_error(torch.empty(0), each, zeros, zeros) is None


# Depth --------------------------------------------------------------------------------------------------------


class Halving(nn.Module):
    """Numbers on their way through three layers, of which the middle one makes them a hundredth."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(1, 1, bias=False) for _ in range(3))
        for layer, weight in ((self.a, 2.0), (self.b, 0.01), (self.c, 5.0)):
            nn.init.constant_(layer.weight, weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(F.relu(self.b(F.relu(self.a(x)))))
        return out


def test_gradients_against_weights_by_hand() -> None:
    """ŷ = abc·x = 0.1x; with x = 1, y = 1.1 the derivative of (ŷ − y)² is −2·abc/w, of each weight w."""
    model, task = Halving(), build_task("regression")
    found = measures.relative_gradients(model, strata(model), torch.ones(1, 1), torch.tensor([1.1]), task)
    assert found == pytest.approx({"a": 2 * 0.1 / 2**2, "b": 2 * 0.1 / 0.01**2, "c": 2 * 0.1 / 5**2}, rel=1e-4)


class Deaf(nn.Module):
    """Two of three neurons never fire, nor does one of two channels; rectifiers are functions and modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU(inplace=True)
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 2)
        with torch.no_grad():
            self.conv.bias.copy_(torch.tensor([-99.0, 9.0]))  # type: ignore[union-attr]
            self.first.bias.copy_(torch.tensor([-99.0, 99.0, -99.0]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x))).mean((2, 3))
        out: Tensor = self.last(F.relu(self.first(x)))
        return out


def test_units_that_never_fire_are_counted() -> None:
    model = Deaf()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    sample = torch.randn(16, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    assert measures.dead_units(model, strata(model, sample), sample) == pytest.approx({"conv": 1 / 2, "first": 2 / 3})
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


# Learning rates -----------------------------------------------------------------------------------------------


def test_losses_by_learning_rate_by_hand() -> None:
    """(w − 1)² from w = 0: k steps of plain SGD leave w − 1 = −(1 − 2η)ᵏ, in the mean over clients, too."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    clients = [TensorExamples(torch.ones(n, 1), torch.ones(n)) for n in (8, 20, 3)]
    work = Work(lr=0.01, batch_size=4)
    found = measures.search_rates(model, clients, work, steps=5, task=build_task("regression"))
    assert found.before == pytest.approx(1)
    expected = {factor: (1 - 2 * 0.01 * factor) ** 10 for factor in (0.1, 1.0, 10.0, 100.0)}
    assert found.after == pytest.approx(expected, rel=1e-4)
    assert model.weight.item() == 0


def test_what_is_clipped_in_the_run_is_clipped_in_the_search() -> None:
    """A gradient of norm 2 is cut to 0.5: one step of η = 0.1 goes 0.05 of the way."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    data = [TensorExamples(torch.ones(8, 1), torch.ones(8))]
    work = Work(lr=0.1, batch_size=4, clip=0.5)
    found = measures.search_rates(model, data, work, 1, (1.0,), task=build_task("regression"))
    assert found.after[1.0] == pytest.approx(0.95**2, rel=1e-4)


def test_clients_that_cannot_hold_anything_out() -> None:
    few: Any = [TensorExamples(torch.ones(3, 1), torch.ones(3))]
    with pytest.raises(UsageError, match="four examples"):
        measures.search_rates(nn.Linear(1, 1), few, Work(), task=build_task("regression"))
