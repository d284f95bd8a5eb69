"""The reference run in which one party holds all data."""

from __future__ import annotations

import numpy as np
import pytest

from tests.techniques.worlds import LR, agree, descend, equal_rows, flat, gradient, linear, parties, run


@pytest.mark.parametrize("participation", [2, 3])
def test_full_batches(participation: int) -> None:
    """Each of the sampled clients would take three steps; one party takes them all, on everybody's examples."""
    clients = parties()
    fed = run("centralised", clients, participation=participation)
    everyone = np.concatenate([x for x, _ in clients]), np.concatenate([y for _, y in clients])
    steps = 3 * participation
    assert [r.steps for r in fed.records] == [steps] * 3
    agree(fed, descend(flat(linear()), lambda v: gradient(v, everyone), steps=3 * steps))


def test_steps_of_clients_of_unequal_size() -> None:
    """4, 10 and 8 examples in batches of 3 are 2 + 4 + 3 = 9 steps per round, although 22 examples make 8 batches.

    All rows are the same, so that the reference need not know the order of batches.
    """
    clients = [equal_rows(count, 1, seed=7) for count in (4, 10, 8)]
    fed = run("centralised", clients, epochs=1, batch_size=3)
    assert [r.steps for r in fed.records] == [9] * 3
    agree(fed, descend(flat(linear()), lambda v: gradient(v, clients[0]), steps=27))


def test_as_many_steps_as_the_sampled_clients() -> None:
    """In every round the budget is that of the clients that FedAvg would have asked, with the same seed."""
    clients = [equal_rows(count, 1, seed=7) for count in (4, 10, 8, 17)]
    settings = {"epochs": 2, "batch_size": 3, "participation": 2, "rounds": 5, "lr": LR}
    ours, theirs = (run(method, clients, **settings) for method in ("centralised", "fedavg"))
    budget = [r.steps for r in theirs.records]
    assert len(set(budget)) > 1
    assert [r.steps for r in ours.records] == budget


def test_momentum_begins_anew_every_round() -> None:
    """The optimiser is made for a visit, as on any client: v = 0 at the beginning of each round."""
    clients = parties()
    fed = run("centralised", clients, steps=1, optimizer="sgd(momentum=0.9)", rounds=2)
    everyone = np.concatenate([x for x, _ in clients]), np.concatenate([y for _, y in clients])
    w = flat(linear())
    for _ in range(2):
        v = np.zeros_like(w)
        for _ in range(3):
            v = 0.9 * v + gradient(w, everyone)
            w = w - LR * v
    agree(fed, w)
