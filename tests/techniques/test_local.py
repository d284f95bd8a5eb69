"""The reference run in which every client trains alone."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from tests.techniques.worlds import (
    ClientData,
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


def accuracy(w: Vector, test: ClientData) -> float:
    x, y = test
    return float((layer(w, x).argmax(1) == y).mean())


def loss(w: Vector, test: ClientData) -> float:
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


def test_a_shallow_client_is_judged_by_its_own_model() -> None:
    """All clients hold first and head only; what is judged has no untrained `second` in between."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = {n: nn.Linear(a, b) for n, a, b in (("first", 6, 8), ("second", 8, 8), ("head", 8, 3))}
        y = torch.arange(60) % 3
        data = (torch.randn(60, 6) + 2 * nn.functional.one_hot(y, 6), y)
    whole = nn.Sequential(OrderedDict(parts))
    small = nn.Sequential(OrderedDict((n, parts[n]) for n in ("first", "head")))
    settings: dict[str, Any] = {"method": "local", "rounds": 10, "lr": 0.3, "eval_clients": True}
    shallow = fs.Federation(
        whole, [data] * 2, data, archs={"small": small}, arch_of=lambda c: "small", **settings
    ).fit()
    alone = fs.Federation(small, [data] * 2, data, **settings).fit()
    assert shallow.accuracy == alone.accuracy
    assert shallow.records[-1].client_accuracy == alone.records[-1].client_accuracy
    assert alone.accuracy is not None
    assert alone.accuracy > 0.8


def test_nothing_travels() -> None:
    """The global model stays as it was, and a message up is smaller than the parameters alone would be."""
    clients = parties()
    ours, theirs = (run(method, clients, test=tensors(TEST)) for method in ("local", "fedavg"))
    np.testing.assert_array_equal(flat(ours), flat(linear()))
    size = 8 * len(flat(linear()))
    for one, other in zip(ours.records, theirs.records, strict=True):
        assert one.bytes_up <= other.bytes_up - 3 * size
        assert one.steps == other.steps
