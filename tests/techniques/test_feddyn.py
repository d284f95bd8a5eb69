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
