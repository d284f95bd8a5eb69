"""FedAvgM, Hsu, Qi and Brown 2019."""

from __future__ import annotations

import numpy as np
import pytest

from tests.techniques.worlds import (
    agree,
    descend,
    differ,
    fedavg,
    flat,
    gradient,
    linear,
    mean,
    parties,
    present,
    run,
)


@pytest.mark.parametrize(("beta", "lr"), [(0.9, 1.0), (0.5, 0.3)])
def test_four_rounds(beta: float, lr: float) -> None:
    """v ← β v + Δ̄, w ← w + lr·v, where Δ̄ is the mean of w_k − w weighted by examples; v begins at 0."""
    clients = parties()
    fed = run(f"fedavgm(beta={beta}, lr={lr})", clients, rounds=4)
    w = flat(linear())
    v = np.zeros_like(w)
    for _ in range(4):
        ends = [descend(w, lambda u, c=c: gradient(u, c)) for c in clients]
        v = beta * v + mean(ends, [len(y) for _, y in clients]) - w
        w = w + lr * v
    agree(fed, w)
    differ(w, fedavg(clients, present(fed)))
