"""FedSpeed, Sun et al. 2023."""

from __future__ import annotations

import numpy as np
import pytest

from tests.techniques.worlds import (
    LR,
    STEPS,
    agree,
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


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("rho", "lambda_", "alpha"), [(0.1, 10.0, 0.9375), (0.5, 2.0, 0.6), (0.0, 2.0, 0.5)])
def test_clients_that_sit_out(rho: float, lambda_: float, alpha: float, normalised: bool) -> None:
    """Two of three clients per round, four rounds; Algorithm 1 of the paper.

    g₁ = ∇F(x), g₂ = ∇F(x + ρ g₁), g̃ = (1 − α) g₁ + α g₂; x ← x − η(g̃ − ĝ_i + (x − x^t)/λ). After K steps
    ĝ_i ← ĝ_i − (x − x^t)/λ, and x̂_i = x − λ ĝ_i is sent, with the new ĝ_i. Server: x^{t+1} = mean of x̂_i. The released
    code perturbs by ρ g₁/(‖g₁‖ + 1e-7).
    """
    clients = parties()
    method = f"fedspeed(rho={rho}, lambda_={lambda_}, alpha={alpha}, normalised={normalised})"
    fed = run(method, clients, participation=2, rounds=4)
    assert returns(present(fed))
    start = flat(linear())
    own = [np.zeros_like(start) for _ in clients]
    for took_part in present(fed):
        sent = []
        for i in took_part:
            x = start
            for _ in range(STEPS):
                g1 = gradient(x, clients[i])
                length = np.linalg.norm(g1) + 1e-7 if normalised else 1.0
                g2 = gradient(x + rho * g1 / length, clients[i])
                mixed = (1 - alpha) * g1 + alpha * g2
                x = x - LR * (mixed - own[i] + (x - start) / lambda_)
            own[i] = own[i] - (x - start) / lambda_
            sent.append(x - lambda_ * own[i])
        start = mean(sent)
    agree(fed, start)
    differ(start, fedavg(clients, present(fed), uniform=True))
