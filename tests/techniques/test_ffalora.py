"""FFA-LoRA in NumPy: B alone moves, and one step is a step of a linear model in B."""

from __future__ import annotations

import numpy as np

from tests.techniques.adapted_worlds import PLACES, SHAPES, adapted, by_hand, check, counts, means, run_adapted
from tests.techniques.worlds import LR, differ, parties, slopes


def test_three_rounds() -> None:
    """B_k ← B_k − η·s·G·A₀ᵀ in every step, and B ← Σ p_k B_k; A stays."""
    clients = parties()
    fed = run_adapted("ffalora", clients)
    now = start = by_hand(adapted())
    for _ in range(3):
        now = means([now.train(c, "B") for c in clients], counts(clients))
    check(fed, now)
    differ(now.whole(), start.whole())
    differ(now.whole(), by_hand(run_adapted("fedavg", clients).state.params).whole())


def test_one_step_is_the_linear_case() -> None:
    """With A frozen, the merged weight after one step is W − η·s²·(Σ p_k G_k)·A₀ᵀA₀: the mean of all G_k is enough."""
    clients = parties()
    fed = run_adapted("ffalora", clients, steps=1, rounds=1)
    start = by_hand(adapted())
    slope = np.average([slopes(start.whole(), c) for c in clients], axis=0, weights=counts(clients))
    expected = start.whole()
    for n, place in PLACES.items():
        projected = slope[place].reshape(SHAPES[n]) @ start.a[n].T @ start.a[n]
        expected[place] -= LR * start.scale**2 * projected.ravel()
    np.testing.assert_allclose(by_hand(fed.state.params).whole(), expected, rtol=0, atol=1e-12)


def test_the_mean_is_exact() -> None:
    """Σ p_k B_k·A₀ is B·A₀: FedAvg's factors miss the mean of the products, and these do not."""
    clients = parties()
    start = by_hand(adapted())
    gaps = {}
    for factors in ("B", "AB"):
        ends = [start.train(c, factors) for c in clients]
        exact = np.average([one.whole() for one in ends], axis=0, weights=counts(clients))
        gaps[factors] = np.abs(means(ends, counts(clients)).whole() - exact).max()
    assert gaps["B"] < 1e-15
    assert gaps["AB"] > 1e-3
    found = by_hand(run_adapted("ffalora", clients, rounds=1).state.params).whole()
    exact = np.average([start.train(c, "B").whole() for c in clients], axis=0, weights=counts(clients))
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-12)
