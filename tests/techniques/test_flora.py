"""FLoRA in NumPy: stacked factors are the exact mean of the products, and everybody begins with new ones."""

from __future__ import annotations

import numpy as np
import pytest

import fedstrata as fs
from tests.techniques.adapted_worlds import (
    PLACES,
    Adapted,
    adapted,
    by_hand,
    counts,
    unequal_ranks,
    visits,
)
from tests.techniques.worlds import Vector, differ, federation, parties


def stacked(ends: list[Adapted], weights: list[int], layer: str) -> Vector:
    """s·(p_1 B_1, p_2 B_2, …)·(A_1; A_2; …), as one product of two stacks."""
    shares = np.array(weights) / sum(weights)
    b = np.concatenate([p * one.b[layer] for p, one in zip(shares, ends, strict=True)], axis=1)
    return ends[0].scale * b @ np.concatenate([one.a[layer] for one in ends])


def test_three_rounds_of_unequal_ranks() -> None:
    """W ← W + the stacks' product; B is zero again, and A is drawn anew within ±1/√inputs."""
    clients = parties()
    fed = federation("flora", clients, adapted(), **unequal_ranks())
    now, seen = by_hand(adapted()), list[Vector]()
    for _ in fed.rounds():
        ends, base = visits(now, clients), now.base.copy()
        for n, place in PLACES.items():
            base[place] += stacked(ends, counts(clients), n).ravel()
        found = by_hand(fed.state.params)
        np.testing.assert_allclose(found.base, base, rtol=0, atol=1e-9)
        differ(base, now.base)
        assert not any(b.any() for b in found.b.values())
        for n, a in found.a.items():
            assert 0.3 < np.abs(a).max() * a.shape[1] ** 0.5 <= 1
            differ(a, now.a[n])
        now = found
        seen.append(found.whole())
    np.testing.assert_allclose(seen[-1], now.base, rtol=0, atol=0)


def test_the_mean_of_whole_matrices() -> None:
    """With equal ranks a round of it is FedAvg of the merged weights."""
    clients = parties()
    start = by_hand(adapted())
    fed = federation("flora", clients, adapted(), rounds=1)
    fed.fit()
    whole = np.average([start.train(c).whole() for c in clients], axis=0, weights=counts(clients))
    np.testing.assert_allclose(by_hand(fed.state.params).whole(), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["flora", "hlora"])
def test_what_remembers_factors_is_refused(method: str) -> None:
    """Rows of A and columns of B stand for other things after a round, and flora's W has what old ones had."""
    for other in ("scaffold", "fedadam", "ditto", "apfl", "inco"):
        with pytest.raises(fs.UsageError, match="other factors of a product in every round"):
            fs.method(f"{method} + {other}")
    for other in ("topk", "quantise(feedback=True)"):
        with pytest.raises(fs.UsageError, match=r"\(feedback=True\)' cannot be combined: .*feedback=False remembers"):
            fs.method(f"{method} + {other}")
    for other in ("topk(feedback=False)", "quantise", "fedprox", "fedpart"):
        fs.method(f"{method} + {other}")
    if method == "flora":
        with pytest.raises(fs.UsageError, match="moon's last model"):
            fs.method("flora + moon")
