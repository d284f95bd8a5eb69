"""FedProx, Li et al. 2020."""

from __future__ import annotations

from tests.techniques.worlds import agree, descend, differ, fedavg, flat, gradient, linear, mean, parties, present, run


def test_three_rounds() -> None:
    """h_k(w; w^t) = F_k(w) + μ/2‖w − w^t‖², so a local step is w_k ← w_k − η(∇F_k(w_k) + μ(w_k − w^t))."""
    mu, clients = 0.7, parties()
    fed = run(f"fedprox(mu={mu})", clients)
    w = flat(linear())
    for _ in range(3):
        ends = [descend(w, lambda v, c=c, w=w: gradient(v, c) + mu * (v - w)) for c in clients]
        w = mean(ends, [len(y) for _, y in clients])
    agree(fed, w)
    differ(w, fedavg(clients, present(fed)))
