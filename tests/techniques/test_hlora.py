"""HLoRA in NumPy: the mean of the products of unequal rank, cut off at the server's rank by its singular values."""

from __future__ import annotations

import numpy as np

from tests.techniques.adapted_worlds import (
    SHAPES,
    Adapted,
    adapted,
    by_hand,
    counts,
    mean_products,
    run_adapted,
    unequal_ranks,
    visits,
)
from tests.techniques.worlds import differ, parties


def split(now: Adapted, products: dict[str, np.ndarray]) -> Adapted:
    """B = U·S/s, A = Vᵀ of the two largest singular values; a row and a column that both turn are the same model."""
    a, b = {}, {}
    for n, product in products.items():
        u, s, v = np.linalg.svd(product)
        a[n], b[n] = v[:2], u[:, :2] * s[:2] / now.scale
    return Adapted(now.base, a, b, now.scale)


def test_three_rounds_of_unequal_ranks() -> None:
    clients = parties()
    fed = run_adapted("hlora", clients, **unequal_ranks())
    now = by_hand(adapted())
    for _ in range(3):
        now = split(now, mean_products(visits(now, clients), counts(clients)))
    found = by_hand(fed.state.params)
    np.testing.assert_allclose(found.whole(), now.whole(), rtol=0, atol=1e-9)
    for n in SHAPES:  # rows of A are the first singular vectors, the largest first
        np.testing.assert_allclose(np.abs(found.a[n]), np.abs(now.a[n]), rtol=0, atol=1e-9)
        np.testing.assert_allclose(found.a[n] @ found.a[n].T, np.eye(2), rtol=0, atol=1e-12)
        lengths = np.linalg.norm(found.b[n], axis=0)
        assert lengths[0] > lengths[1] > 0
    differ(now.whole(), by_hand(run_adapted("fedavg", clients).state.params).whole())


def test_nothing_is_nearer_to_the_mean_of_the_products() -> None:
    """Of rank 2: the distance after a round is that of the singular values left out."""
    clients = parties()
    fed = run_adapted("hlora", clients, rounds=1, **unequal_ranks())
    found = by_hand(fed.state.params)
    for n, product in mean_products(visits(by_hand(adapted()), clients), counts(clients)).items():
        left_out = np.linalg.svd(product, compute_uv=False)[2:]
        gap = np.linalg.norm(found.product(n) - product)
        np.testing.assert_allclose(gap, np.linalg.norm(left_out), rtol=0, atol=1e-12)
        assert gap > 1e-4
