"""Limits that are known: settings that are FedAvg, methods that are each other, and where each one converges to."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from tests.techniques.worlds import (
    LR,
    ClientData,
    Vector,
    agree,
    descend,
    differ,
    fedavg,
    flat,
    gradient,
    linear,
    parties,
    run,
)

NEUTRAL = [
    "fedprox(mu=0.0)",
    "fedrs(alpha=1.0)",
    "fedlc(tau=0.0)",
    "moon(mu=0.0)",
    "fedavgm(beta=0.0)",
    "feddf(noise=True, steps=0)",
    "fednlr(mu=1.0)",
    "fedpart(cycles=0)",
    "fedpart(warmup=4)",
    "fedpart(full_rounds=0, group=2)",
    "fedpart(full_rounds=0, strata=('*',))",
    "fednlr(mu=1.0) + fedpart(full_rounds=4)",
]

DEFAULTS = [
    "fedprox(mu=0.01)",
    "feddyn(alpha=0.1)",
    "moon(mu=1.0, tau=0.5)",
    "fedrs(alpha=0.5)",
    "fedlc(tau=1.0)",
    "fednlr(mu0=1.0, a1=1.0, a2=1.0)",
    "fedpart(full_rounds=5, rounds_per_stratum=2, order='sequential', warmup=0, group=1)",
    "fedspeed(rho=0.1, lambda_=10.0, alpha=0.9375, normalised=True)",
    "fedavgm(beta=0.9, lr=1.0)",
    "fedadagrad(lr=0.1, beta1=0.0, tau=0.001)",
    "fedadam(lr=0.03, beta1=0.9, beta2=0.99, tau=0.001)",
    "fedyogi(lr=0.03, beta1=0.9, beta2=0.99, tau=0.001)",
    "fedbuff(buffer=10, staleness='poly(0.5)')",
    "fedasync(alpha=0.6, staleness='poly(0.5)')",
]


@pytest.mark.parametrize("full", DEFAULTS)
def test_defaults(full: str) -> None:
    assert fs.method(full.partition("(")[0]) == fs.method(full)


@cache
def end_of_skewed_run(method: str, **settings: Any) -> dict[str, Tensor]:
    """Where a small net ends on skewed clients of unequal size, with batches in random order; nobody may change it."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
        labels = [torch.randint(0, 2, (size,)) + k % 3 for k, size in enumerate((9, 14, 21, 6))]
        clients = [(torch.randn(len(y), 5) + y[:, None], y) for y in labels]
    settings = {"participation": 3, "batch_size": 4, "epochs": 2, "rounds": 4, **settings}
    fed = fs.Federation(net, clients, method=method, engine="serial", **settings)
    fed.fit()
    return fed.state.params


@pytest.mark.parametrize("method", NEUTRAL)
@pytest.mark.parametrize("optimizer", ["sgd(momentum=0.5)", "adam"])
def test_neutral_settings_are_fedavg_bit_for_bit(method: str, optimizer: str) -> None:
    plain, ours = (end_of_skewed_run(m, optimizer=optimizer, lr=0.01) for m in ("fedavg", method))
    assert all(torch.equal(plain[n], ours[n]) for n in plain)


def test_fednova_with_equal_steps_is_fedavg_bit_for_bit() -> None:
    plain, ours = (end_of_skewed_run(m, steps=5) for m in ("fedavg", "fednova"))
    assert all(torch.equal(plain[n], ours[n]) for n in plain)


def test_scaffold_begins_as_fedavg() -> None:
    """In the first round c = c_k = 0."""
    plain, ours = (end_of_skewed_run(m, rounds=1) for m in ("fedavg(weight='uniform')", "scaffold"))
    assert all(torch.equal(plain[n], ours[n]) for n in plain)


def test_fedpart_begins_as_fedavg() -> None:
    """Up to the first partial round: warm-up, then full rounds; and not after it."""
    part = "fedpart(full_rounds=2, rounds_per_stratum=1, warmup=1)"
    for rounds in (3, 4):
        plain, ours = (end_of_skewed_run(m, rounds=rounds) for m in ("fedavg", part))
        assert all(torch.equal(plain[n], ours[n]) for n in plain) == (rounds == 3)


def test_fedpart_moves_the_last_layer_as_a_model_whose_others_are_frozen() -> None:
    """A partial round is FedAvg on a model in which the user froze the rest."""

    def end(method: str, frozen: bool) -> dict[str, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
            clients = [(torch.randn(size, 5), torch.randint(0, 4, (size,))) for size in (9, 14)]
        net[0].requires_grad_(not frozen)
        fed = fs.Federation(net, clients, method=method, rounds=3, batch_size=4, optimizer="adam", lr=0.01)
        fed.fit()
        return fed.state.params

    theirs, ours = end("fedavg", True), end("fedpart(full_rounds=0, strata=('2',))", False)
    assert all(torch.equal(theirs[n], ours[n]) for n in theirs)


def pool_clients(clients: list[ClientData]) -> ClientData:
    return np.concatenate([x for x, _ in clients]), np.concatenate([y for _, y in clients])


def test_one_full_step_of_fedavg_is_centralised_gradient_descent() -> None:
    """Σ n_k (w − η∇f_k)/n = w − η∇f, where f = Σ n_k f_k/n is the mean loss over everybody's examples.

    Three clients that take one step each are worth three steps per round to `centralised`: six rounds of the one are
    two rounds of the other.
    """
    clients = parties()
    everyone = pool_clients(clients)
    w = descend(flat(linear()), lambda v: gradient(v, everyone), steps=6)
    agree(run("fedavg", clients, steps=1, rounds=6), w)
    agree(run("centralised", clients, steps=1, rounds=2), w)


def test_one_full_step_of_scaffold_is_uniform_gradient_descent() -> None:
    """With everybody present c is the mean of the c_k, so that the corrections of one step cancel in the mean."""
    clients = parties()
    w = flat(linear())
    for _ in range(4):
        w = w - LR * np.mean([gradient(w, c) for c in clients], axis=0)
    agree(run("scaffold", clients, steps=1, rounds=4), w)


@pytest.mark.parametrize("alpha", [0.25, 2.0])
def test_fedspeed_without_perturbation_is_feddyn_when_all_take_part(alpha: float) -> None:
    """ĝ_k is h_k for λ = 1/α. With everybody present h = mean h_k, so mean(w_k) − h/α = mean(w_k − λĝ_k)."""
    clients = parties()
    dyn, speed = run(f"feddyn(alpha={alpha})", clients), run(f"fedspeed(rho=0.0, lambda_={1 / alpha})", clients)
    agree(speed, flat(dyn))
    differ(flat(dyn), fedavg(clients, [[0, 1, 2]] * 3, uniform=True))


A = [
    np.diag([2.0, 0.3, 1.0]),
    np.array([[0.5, 0.2, 0.0], [0.2, 1.5, 0.0], [0.0, 0.0, 0.4]]),
    np.diag([1.0, 1.0, 2.0]),
]
B = [np.array([1.0, -1.0, 2.0]), np.array([-2.0, 1.0, 0.0]), np.array([0.0, 3.0, -1.0])]
STEPS, ETA = 20, 0.1


class Bowl(fs.Technique):
    """The local loss ½(w − b)ᵀA(w − b); a client's data are the rows of A and, last, b.

    The model has one output, whose cross-entropy is 0 whatever the weights.
    """

    name: ClassVar[str] = "bowl"

    def local(self, view: fs.ClientView) -> fs.Hooks:
        rows = view.data.batch(torch.arange(len(view.data)))[0]
        curvature, bottom = rows[:-1], rows[-1]

        def loss(batch: fs.Batch) -> Tensor:
            away = batch.params["weight"][0] - bottom
            return away @ curvature @ away / 2

        return fs.Hooks(loss=loss, output=lambda batch: batch.logits.detach())


def bowls(method: str, rounds: int = 60, participation: int = 3) -> fs.Federation:
    with torch.random.fork_rng():
        model = nn.Linear(3, 1, bias=False).double()
    clients = [(np.vstack([a, b]), np.zeros(4, dtype=np.int64)) for a, b in zip(A, B, strict=True)]
    settings = {"steps": STEPS, "lr": ETA, "rounds": rounds, "participation": participation}
    return run(fs.chain(Bowl(), *fs.method(method).techniques), clients, model, **settings)


def weighted_optimum(matrices: list[Vector]) -> Vector:
    """(Σ M_k)⁻¹ Σ M_k b_k."""
    return np.linalg.solve(sum(matrices), sum(m @ b for m, b in zip(matrices, B, strict=True)))


def test_fedavg_converges_to_the_wrong_point() -> None:
    """τ steps take w to b_k + P_k(w − b_k) with P_k = (I − ηA_k)^τ, so FedAvg's fixed point is weighted by I − P_k.

    The minimum of Σ f_k is weighted by A_k. For τ = 1, I − P_k = ηA_k and the two are the same.
    """
    wrong = weighted_optimum([np.eye(3) - np.linalg.matrix_power(np.eye(3) - ETA * a, STEPS) for a in A])
    assert np.linalg.norm(wrong - weighted_optimum(A)) > 0.4
    agree(bowls("fedavg"), wrong, within=1e-6)


@pytest.mark.parametrize("participation", [3, 2])
@pytest.mark.parametrize("method", ["scaffold", "feddyn(alpha=1.0)"])
def test_scaffold_and_feddyn_converge_to_the_right_point(method: str, participation: int) -> None:
    """Where nothing moves any more, the correction of each client is its gradient, and these sum to 0 on the server."""
    agree(bowls(method, participation=participation), weighted_optimum(A), within=1e-4)


def test_fedspeed_without_perturbation_converges_to_the_right_point() -> None:
    """Where nothing moves any more ĝ_k = ∇f_k(w) and the mean of λĝ_k is 0."""
    agree(bowls("fedspeed(rho=0.0, lambda_=1.0)"), weighted_optimum(A), within=1e-4)
