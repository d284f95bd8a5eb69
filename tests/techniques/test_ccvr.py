"""CCVR, Luo et al. 2021."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.techniques.ccvr import add_statistics, draw_features, pool_statistics, statistics
from tests.techniques.worlds import (
    CLASSES,
    HIDDEN,
    INPUTS,
    ClientData,
    Vector,
    federation,
    flat,
    layer,
    parties,
    present,
    tensors,
    two_layers,
)

FIRST = HIDDEN * (INPUTS + 1)
SKEWED = ((0,) * 8, (1,) * 9 + (0,) * 3, (2,) * 7 + (1,))
"""Labels of three clients; one class is a client's alone, and one client has a single example of a class."""


def covariance(rows: Vector) -> Vector:
    """The sample covariance, divided by n − 1; 0 for a single row."""
    away = rows - rows.mean(0)
    return away.T @ away / max(len(rows) - 1, 1)


def features(w: Vector, x: Vector) -> Vector:
    return np.tanh(layer(w[:FIRST], x, HIDDEN))


def test_statistics_batch_by_batch_and_merged() -> None:
    """Three clients, features far from 0, in batches of four; class 3 is nobody's, and one class has a single row."""
    rng = np.random.default_rng(3)
    rows = [rng.normal(loc=100.0, size=(n, HIDDEN)) * [1.0, 2.0, 0.1, 3.0] for n in (11, 6, 9)]
    labels = [rng.integers(0, 2, 11), np.array([0, 0, 1, 1, 1, 2]), rng.integers(0, 2, 9)]
    total: dict[str, torch.Tensor] = {}
    for x, y in zip(rows, labels, strict=True):
        batches = [(torch.from_numpy(x[i : i + 4]), torch.from_numpy(y[i : i + 4])) for i in range(0, len(y), 4)]
        found = statistics(batches, 4)
        assert found["count"].tolist() == np.bincount(y, minlength=4).tolist()
        for c in range(3):
            if (y == c).any():
                np.testing.assert_allclose(found["mean"][c], x[y == c].mean(0), rtol=1e-6)
                np.testing.assert_allclose(found["covariance"][c], covariance(x[y == c]), atol=1e-4)
        total = add_statistics(total, found)
    count, mean, spread = pool_statistics(total)
    assert count.tolist() == np.bincount(np.concatenate(labels), minlength=4).tolist()
    for c in range(3):
        own = np.concatenate([x[y == c] for x, y in zip(rows, labels, strict=True)])
        np.testing.assert_allclose(mean[c], own.mean(0), rtol=1e-6)
        np.testing.assert_allclose(spread[c], covariance(own), atol=1e-3)


def test_drawn_features_have_the_statistics() -> None:
    """Many draws from N(μ, Σ) with Σ of rank two: their mean, their covariance, and nothing outside Σ's span."""
    rng = np.random.default_rng(4)
    root, mu = rng.normal(size=(HIDDEN, 2)), rng.normal(size=HIDDEN)
    sigma = root @ root.T
    given = torch.from_numpy(mu), torch.from_numpy(sigma)
    rows = draw_features(*given, 40_000, torch.Generator().manual_seed(0)).numpy()
    np.testing.assert_allclose(rows.mean(0), mu, atol=0.05)
    np.testing.assert_allclose(np.cov(rows.T), sigma, atol=0.1)
    outside = np.eye(HIDDEN) - root @ np.linalg.pinv(root)
    np.testing.assert_allclose((rows - mu) @ outside, 0.0, atol=1e-6)


def test_what_clients_send_is_of_their_own_features_under_the_final_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the server makes of it is the mean and covariance of everybody's features together."""
    clients = parties(*SKEWED)
    fed = federation("ccvr(samples=20)", clients, two_layers(), rounds=2)
    slots: list[list[Any]] = []
    original = fed._engine.run

    def overheard(*arguments: Any) -> Any:
        slots.append([])
        for update, memory in original(*arguments):
            slots[-1].append(update.slots.get("ccvr", {}))
            yield update, memory

    monkeypatch.setattr(fed._engine, "run", overheard)
    rounds = fed.rounds()
    next(rounds), next(rounds)
    final = flat(fed)
    next(rounds)
    assert slots[:2] == [[{}] * 3] * 2
    total: dict[str, torch.Tensor] = {}
    for (x, y), slot in zip(clients, slots[2], strict=True):
        z = features(final, x)
        for c in range(CLASSES):
            own = z[y == c]
            assert slot["count"][c] == len(own)
            if len(own):
                np.testing.assert_allclose(slot["mean"][c], own.mean(0), atol=1e-6)
                np.testing.assert_allclose(slot["covariance"][c], covariance(own), atol=1e-6)
        total = add_statistics(total, slot)
    _, mean, spread = pool_statistics(total)
    for c in range(CLASSES):
        own = np.concatenate([features(final, x)[y == c] for x, y in clients])
        np.testing.assert_allclose(mean[c], own.mean(0), atol=1e-6)
        np.testing.assert_allclose(spread[c], covariance(own), atol=1e-6)


def test_one_more_round_moves_the_classifier_and_nothing_else() -> None:
    """Round `rounds + 1`: everybody takes part, nobody trains, and the layers below the classifier keep their bits."""
    fed = federation("ccvr(samples=50)", parties(*SKEWED), two_layers(), rounds=3, participation=2)
    states = [flat(fed) for _ in fed.rounds()]
    assert [r.round for r in fed.records] == [1, 2, 3, 4]
    assert [len(took_part) for took_part in present(fed)] == [2, 2, 2, 3]
    assert [r.steps > 0 for r in fed.records] == [True, True, True, False]
    np.testing.assert_array_equal(states[3][:FIRST], states[2][:FIRST])
    assert (states[3][FIRST:] != states[2][FIRST:]).all()


def test_training_itself_is_fedavg() -> None:
    """Before the last round CCVR does nothing at all."""
    theirs = federation("fedavg", parties(), two_layers(), rounds=3)
    ours = federation("ccvr(samples=50)", parties(), two_layers(), rounds=3)
    for _ in zip(theirs.rounds(), ours.rounds(), strict=False):
        np.testing.assert_array_equal(flat(ours), flat(theirs))


def clouds(seed: int, *sizes: int) -> ClientData:
    """Points around one centre for each class."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(CLASSES), sizes)
    return rng.normal(scale=0.7, size=(len(y), INPUTS)) + 1.5 * np.eye(CLASSES, INPUTS)[y], y


def test_it_mends_a_skewed_classifier() -> None:
    """One class a client, one of them rare: the refitted classifier is much better than the averaged one."""
    clients = [clouds(0, 80, 0, 0), clouds(1, 0, 80, 0), clouds(2, 0, 0, 15)]
    settings = {"test": tensors(clouds(3, 100, 100, 100)), "rounds": 5, "lr": 0.1}
    fed = federation("ccvr(samples=200, epochs=20, lr=0.1)", clients, two_layers(), **settings)
    fed.fit()
    before, after = (record.accuracy for record in fed.records[-2:])
    assert after > before + 0.1


def test_the_draw_does_not_hang_on_rounding() -> None:
    """Equal eigenvalues leave eigenvectors free, and rounding turns them; the symmetric root does not move."""
    rng = np.random.default_rng(5)
    mean, noise = torch.zeros(6, dtype=torch.float64), torch.from_numpy(rng.normal(size=(6, 6))) * 1e-12
    for sigma in (torch.eye(6, dtype=torch.float64), torch.diag(torch.tensor([3.0, 3, 3, 1, 1, 0.5]).double())):
        rows = [draw_features(mean, c, 50, torch.Generator().manual_seed(1)) for c in (sigma, sigma + noise + noise.T)]
        torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=1e-9)


def test_the_draw_has_the_covariance() -> None:
    factor = torch.tensor([[2.0, 0.0], [1.0, 0.5]], dtype=torch.float64)
    sigma = factor @ factor.T
    rows = draw_features(torch.tensor([1.0, -1.0]).double(), sigma, 200_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(torch.cov(rows.T), sigma, rtol=0, atol=0.05)
    torch.testing.assert_close(rows.mean(0), torch.tensor([1.0, -1.0]).double(), rtol=0, atol=0.02)


class Negated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ([nn.Linear(4, 3), Negated()], "changes them after it"),
        ([nn.Linear(4, 3).requires_grad_(False)], "is frozen"),
        ([nn.Conv1d(1, 3, 4), nn.Flatten()], "a linear last layer"),
    ],
)
def test_a_last_layer_that_cannot_be_refitted_is_refused_at_once(last: list[nn.Module], why: str) -> None:
    net = nn.Sequential(
        nn.Linear(5, 4), *([nn.Unflatten(1, (1, 4))] if len(last) > 1 and "linear" in why else []), *last
    )
    data = (torch.randn(6, 5), torch.randint(0, 3, (6,)))
    with pytest.raises(fs.UsageError, match=why):
        fs.Federation(net, [data], None, method="ccvr", rounds=1)


@pytest.mark.parametrize("first", ["a", "c"])
def test_a_last_layer_that_shares_its_weight_is_refused_at_once(first: str) -> None:
    """A refit would change the layer below, and with it the features; under either name of the weight."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in sorted("ac", reverse=first == "c"):
                self.add_module(name, nn.Linear(3, 3))
            self.c.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.c(torch.tanh(self.a(x)))
            return out

    data = (torch.randn(6, 3), torch.arange(6) % 3)
    with pytest.raises(fs.UsageError, match="ccvr refits the last layer alone, and this model's shares its parameters"):
        fs.Federation(Tied(), [data], None, method="ccvr", rounds=1)


def test_statistics_by_the_batch_at_hand_with_one_example_left_over() -> None:
    """Under `drop` batch norm uses the batch at hand: 257 examples in batches of 256 would leave a batch of one."""
    y = torch.arange(257) % 3
    data = (torch.randn(257, 5, generator=torch.Generator().manual_seed(0)) + y[:, None], y)
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    history = fs.Federation(net, [data], None, method="fedavg(buffers='drop') + ccvr", rounds=1).fit()
    assert len(history.records) == 2
    assert not history.records[-1].refused
