"""FedNova, Wang et al. 2020."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedstrata.techniques.fednova import accumulation
from tests.techniques.worlds import (
    ClientData,
    Vector,
    agree,
    differ,
    equal_rows,
    flat,
    gradient,
    linear,
    mean,
    parties,
    run,
)

LR, TAUS = 0.1, (2, 8, 6)


def uneven() -> list[ClientData]:
    """Three clients that take 2, 8 and 6 steps in two epochs of batches of three."""
    return [parties()[0], equal_rows(12, 1, seed=7), equal_rows(7, 2, seed=8)]


def local(w: Vector, client: ClientData, steps: int, rho: float, nesterov: bool) -> Vector:
    """Torch's SGD: v ← ρv + g; w ← w − η·v, or w − η·(g + ρv) with Nesterov's momentum; v begins at 0."""
    v = np.zeros_like(w)
    for _ in range(steps):
        g = gradient(w, client)
        v = rho * v + g
        w = w - LR * (g + rho * v if nesterov else v)
    return w


def norm(steps: int, rho: float, nesterov: bool) -> float:
    """‖a‖₁: a visit in which every gradient is 1 moves by −η‖a‖₁."""
    v = moved = 0.0
    for _ in range(steps):
        v = rho * v + 1
        moved += 1 + rho * v if nesterov else v
    return moved


def nova(clients: list[ClientData], rounds: list[list[int]], rho: float, nesterov: bool, even: bool = False) -> Vector:
    w = flat(linear())
    for took_part in rounds:
        p = np.array([len(clients[k][1]) for k in took_part], dtype=float)
        p /= p.sum()
        a = np.array([1.0 if even else norm(TAUS[k], rho, nesterov) for k in took_part])
        deltas = np.array([local(w, clients[k], TAUS[k], rho, nesterov) - w for k in took_part])
        w = w + (p * a).sum() * (p / a) @ deltas
    return w


@pytest.mark.parametrize(
    ("optimizer", "rho", "nesterov"),
    [
        ("sgd", 0.0, False),
        ("sgd(momentum=0.9)", 0.9, False),
        ("momentum", 0.9, False),
        ("sgd(momentum=0.9, nesterov=True)", 0.9, True),
    ],
)
@pytest.mark.parametrize("participation", [3, 2])
def test_unequal_steps(optimizer: str, rho: float, nesterov: bool, participation: int) -> None:
    """w ← w + τ_eff Σ p_k Δ_k/‖a_k‖₁ with τ_eff = Σ p_k ‖a_k‖₁; p_k = n_k/Σ n over the round's clients.

    Δ_k = −η Σ_j a_{k,j} g_j. Under SGD all a_{k,j} are 1, so ‖a_k‖₁ = τ_k. Under momentum g_j enters the steps
    j, j+1, …, τ−1 with 1, ρ, ρ², …, so a_{k,j} = (1 − ρ^{τ−j})/(1 − ρ). Nesterov's momentum adds one more power to
    each: a_{k,j} = (1 − ρ^{τ−j+1})/(1 − ρ).
    """
    clients = uneven()
    settings = {"epochs": 2, "batch_size": 3, "lr": LR, "optimizer": optimizer, "participation": participation}
    fed = run("fednova", clients, **settings)
    rounds = [r.clients for r in fed.records]
    assert [r.steps for r in fed.records] == [sum(TAUS[k] for k in took_part) for took_part in rounds]
    w = nova(clients, rounds, rho, nesterov)
    agree(fed, w)
    differ(w, nova(clients, rounds, rho, nesterov, even=True))


@pytest.mark.parametrize("rho", [0.5, 0.9])
@pytest.mark.parametrize("tau", [1, 2, 7])
def test_closed_forms_of_the_norm(rho: float, tau: int) -> None:
    """The paper's [τ − ρ(1 − ρ^τ)/(1 − ρ)]/(1 − ρ), and Nesterov's Σ_{s=1..τ} (1 − ρ^{s+1})/(1 − ρ)."""
    assert norm(tau, rho, False) == pytest.approx((tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho), rel=1e-12)
    terms = [(1 - rho ** (s + 1)) / (1 - rho) for s in range(1, tau + 1)]
    assert norm(tau, rho, True) == pytest.approx(sum(terms), rel=1e-12)
    for nesterov in (False, True):
        assert accumulation(tau, rho, nesterov) == pytest.approx(norm(tau, rho, nesterov), rel=1e-12)
        assert accumulation(tau, 1.0, nesterov) == pytest.approx(norm(tau, 1.0, nesterov), rel=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd(momentum=0.9)", "sgd(momentum=0.9, nesterov=True)"])
def test_equal_steps_are_fedavg_bit_for_bit(optimizer: str) -> None:
    """‖a_k‖₁ = a for all k: a·Σ p_k Δ_k/a = Σ p_k Δ_k."""
    one, other = (run(method, parties(), optimizer=optimizer).state.params for method in ("fednova", "fedavg"))
    assert all(torch.equal(one[n], other[n]) for n in other)


def test_small_steps_follow_the_global_gradient() -> None:
    """FedAvg weighs a client by its steps, FedNova does not.

    With η → 0 all gradients of a visit are ∇F_k(w): Δ_k → −η τ_k ∇F_k, so FedAvg moves along Σ p_k τ_k ∇F_k and FedNova
    along Σ p_k ∇F_k, the gradient of the global objective.
    """
    clients, lr = uneven(), 1e-7
    w = flat(linear())
    p = [len(y) for _, y in clients]
    slopes = [gradient(w, c) for c in clients]
    true = mean(slopes, p)
    moved = {m: flat(run(m, clients, epochs=2, batch_size=3, lr=lr, rounds=1)) - w for m in ("fednova", "fedavg")}
    tau = np.average(TAUS, weights=p)
    np.testing.assert_allclose(moved["fednova"] / (-lr * tau), true, atol=1e-5)
    drifted = mean([s * t for s, t in zip(slopes, TAUS, strict=True)], p)
    np.testing.assert_allclose(moved["fedavg"] / -lr, drifted, atol=1e-5)
