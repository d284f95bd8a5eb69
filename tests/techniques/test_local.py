"""The reference run in which every client trains alone."""

from __future__ import annotations

import numpy as np
import pytest

from tests.techniques.worlds import (
    Party,
    Vector,
    descend,
    flat,
    gradient,
    layer,
    linear,
    parties,
    present,
    returns,
    run,
    tensors,
)

TEST = parties((0, 1, 2) * 20)[0]


def accuracy(w: Vector, test: Party) -> float:
    x, y = test
    return float((layer(w, x).argmax(1) == y).mean())


def loss(w: Vector, test: Party) -> float:
    x, y = test
    z = layer(w, x)
    return float((np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]).mean())


@pytest.mark.parametrize("participation", [3, 2])
def test_mean_of_the_clients_own_models(participation: int) -> None:
    """w_k goes on from where client k left it; accuracy and loss are means over all clients, each on the test set.

    A client that sits out keeps its model. The clients are of unequal size and count the same.
    """
    clients = parties()
    fed = run("local", clients, test=tensors(TEST), participation=participation, rounds=4)
    assert returns(present(fed)) == (participation == 2)
    own = [flat(linear()) for _ in clients]
    for record in fed.records:
        for k in record.clients:
            own[k] = descend(own[k], lambda v, k=k: gradient(v, clients[k]))
        assert record.accuracy == pytest.approx(np.mean([accuracy(w, TEST) for w in own]), abs=1e-12)
        assert record.loss == pytest.approx(np.mean([loss(w, TEST) for w in own]), abs=1e-6)
    assert len({accuracy(w, TEST) for w in own}) > 1


def test_nothing_travels() -> None:
    """The global model stays as it was, and a message up is smaller than the parameters alone would be."""
    clients = parties()
    ours, theirs = (run(method, clients, test=tensors(TEST)) for method in ("local", "fedavg"))
    np.testing.assert_array_equal(flat(ours), flat(linear()))
    size = 8 * len(flat(linear()))
    for one, other in zip(ours.records, theirs.records, strict=True):
        assert one.bytes_up <= other.bytes_up - 3 * size
        assert one.steps == other.steps
