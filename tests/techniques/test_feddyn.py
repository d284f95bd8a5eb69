"""FedDyn, Acar et al. 2021."""

from __future__ import annotations

import numpy as np
import pytest

from fedstrata.errors import UsageError
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
    returns,
    run,
)


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_a_client_that_sits_one_out(alpha: float) -> None:
    """Two of three clients per round, four rounds; the paper's m is our N = 3, sat out or not.

    Local: θ_k minimises L_k(θ) − ⟨h_k, θ⟩ + α/2‖θ − θ^t‖², so a step uses ∇L_k(θ) − h_k + α(θ − θ^t). Then
    h_k ← h_k − α(θ_k − θ^t). Server: h ← h − (α/N) Σ_{k∈P} (θ_k − θ^t), and θ^{t+1} = mean_{k∈P} θ_k − h/α.
    """
    clients = parties()
    fed = run(f"feddyn(alpha={alpha})", clients, participation=2, rounds=4)
    assert returns(present(fed))
    theta = flat(linear())
    h, own = np.zeros_like(theta), [np.zeros_like(theta) for _ in clients]
    for took_part in present(fed):
        ends = []
        for k in took_part:
            c, h_k, centre = clients[k], own[k], theta
            ends.append(descend(theta, lambda v, c=c, h=h_k, o=centre: gradient(v, c) - h + alpha * (v - o)))
            own[k] = h_k - alpha * (ends[-1] - theta)
        h = h - alpha / len(clients) * sum(end - theta for end in ends)
        theta = mean(ends) - h / alpha
    agree(fed, theta)
    differ(theta, fedavg(clients, present(fed), uniform=True))


def test_the_mean_of_the_clients_may_be_judged() -> None:
    """Two rounds of all clients: what is sent stays as it is, and w + h/α is the plain mean of the last models."""
    clients = parties()
    plain, other = (run(method, clients, rounds=2) for method in ("feddyn", "feddyn(judge='clients')"))
    agree(other, flat(plain.model))
    theta = flat(linear())
    own = [np.zeros_like(theta) for _ in clients]
    h = np.zeros_like(theta)
    for _ in range(2):
        start = theta
        ends = [
            descend(start, lambda v, c=c, h=h_k, o=start: gradient(v, c) - h + 0.1 * (v - o))
            for c, h_k in zip(clients, own, strict=True)
        ]
        own = [h_k - 0.1 * (end - start) for h_k, end in zip(own, ends, strict=True)]
        h = h - 0.1 / len(clients) * sum(end - start for end in ends)
        theta = mean(ends) - h / 0.1
    np.testing.assert_allclose(flat(other.model), mean(ends), rtol=1e-10)
    differ(mean(ends), theta)
    with pytest.raises(UsageError, match="judge"):
        run("feddyn(judge='nobody')", clients)


@pytest.mark.parametrize("engine", ["serial", "vmap"])
def test_alpha_scaled_by_relative_size(engine: str) -> None:
    """Clients of 3, 5 and 2 examples, whose mean is 10/3: α_k = 0.3·(10/3)/n_k is 1/3, 1/5 and 1/2.

    As in the authors' code both the step, ∇L_k(θ) − h_k + α_k(θ − θ^t), and h_k ← h_k − α_k(θ_k − θ^t) have α_k, and
    the server subtracts what clients could not do: θ^{t+1} = mean_{k∈P} θ_k + (1/N) Σ of all changes so far.
    """
    clients = parties()
    fed = run("feddyn(alpha=0.3, mean_examples=3.3333333333333335)", clients, participation=2, rounds=4, engine=engine)
    assert returns(present(fed))
    strengths = [1 / 3, 1 / 5, 1 / 2]
    theta = flat(linear())
    changes, own = np.zeros_like(theta), [np.zeros_like(theta) for _ in clients]
    for took_part in present(fed):
        ends = []
        for k in took_part:
            c, h_k, a, centre = clients[k], own[k], strengths[k], theta
            ends.append(descend(theta, lambda v, c=c, h=h_k, a=a, o=centre: gradient(v, c) - h + a * (v - o)))
            own[k] = h_k - a * (ends[-1] - theta)
        changes = changes + sum(end - theta for end in ends) / len(clients)
        theta = mean(ends) + changes
    agree(fed, theta)
    differ(theta, flat(run("feddyn(alpha=0.3)", clients, participation=2, rounds=4)))
