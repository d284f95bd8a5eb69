"""SCAFFOLD, Karimireddy et al. 2020."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from tests.techniques.worlds import (
    CLASSES,
    INPUTS,
    LR,
    STEPS,
    agree,
    differ,
    equal_rows,
    fedavg,
    flat,
    gradient,
    linear,
    mean,
    parties,
    present,
    returns,
    run,
)


def test_clients_that_sit_out() -> None:
    """Two of three clients per round, four rounds.

    Local: y_i ← y_i − η(g_i(y_i) − c_i + c). Then c_i⁺ = c_i − c + (x − y_i)/(Kη) (Option II of the paper). From
    x − y_i = η Σ (g_i − c_i + c) it follows that c_i⁺ is the mean of the K raw gradients. Server: x ← mean of y_i over
    the round's clients, c ← c + Σ (c_i⁺ − c_i)/N, N counting those that sat out. A client that sits out keeps its c_i.
    """
    clients = parties()
    fed = run("scaffold", clients, participation=2, rounds=4)
    assert returns(present(fed))
    x = flat(linear())
    c, own = np.zeros_like(x), [np.zeros_like(x) for _ in clients]
    for took_part in present(fed):
        ends, changes = [], []
        for i in took_part:
            y, raw = x, []
            for _ in range(STEPS):
                raw.append(gradient(y, clients[i]))
                y = y - LR * (raw[-1] - own[i] + c)
            option_two = own[i] - c + (x - y) / (STEPS * LR)
            np.testing.assert_allclose(mean(raw), option_two, atol=1e-12)
            changes.append(option_two - own[i])
            own[i] = option_two
            ends.append(y)
        x, c = mean(ends), c + sum(changes) / len(clients)
    agree(fed, x)
    differ(x, fedavg(clients, present(fed), uniform=True))


@pytest.mark.parametrize("optimizer", ["sgd", "sgd(momentum=0.5)"])
def test_unequal_steps(optimizer: str) -> None:
    """Clients of 2, 8 and 6 steps: each c_i⁺ is the mean over its own steps; momentum does not enter c_i."""
    clients = [parties()[0], equal_rows(12, 1, seed=7), equal_rows(7, 2, seed=8)]
    fed = run("scaffold", clients, epochs=2, batch_size=3, lr=0.1, optimizer=optimizer)
    rho = 0.5 if "momentum" in optimizer else 0.0
    x = flat(linear())
    c, own = np.zeros_like(x), [np.zeros_like(x) for _ in clients]
    for _ in range(3):
        ends, changes = [], []
        for i, steps in enumerate((2, 8, 6)):
            y, velocity, raw = x, 0.0, []
            for _ in range(steps):
                raw.append(gradient(y, clients[i]))
                velocity = rho * velocity + raw[-1] - own[i] + c
                y = y - 0.1 * velocity
            changes.append(mean(raw) - own[i])
            own[i] = mean(raw)
            ends.append(y)
        x, c = mean(ends), c + sum(changes) / 3
    agree(fed, x)


def test_a_client_without_a_step_is_refused() -> None:
    """One example cannot be normalised by its batch, so its client takes no step: there is no mean gradient, no c_i."""
    model = nn.Sequential(nn.Linear(INPUTS, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)).double()
    fed = run("scaffold", parties((0, 1, 2), (1,), (2, 2, 0, 1)), model, rounds=2)
    assert [[r["client"] for r in record.refused] for record in fed.records] == [[1], [1]]


def test_clients_without_examples_do_not_count() -> None:
    """N is the number of clients that can take part."""
    clients = parties()
    empty = (clients[0][0][:0], clients[0][1][:0])
    one, other = run("scaffold", clients), run("scaffold", [*clients, empty, empty])
    np.testing.assert_array_equal(flat(one), flat(other))
