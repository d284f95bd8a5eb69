"""MOON, Li, He and Song 2021."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstrata.client.train import train_client
from fedstrata.models.norms import running_statistics
from fedstrata.techniques.moon import Moon
from tests.client.test_train import assign, equal, normed, toy, workshop
from tests.techniques.worlds import (
    HIDDEN,
    INPUTS,
    ClientData,
    Vector,
    agree,
    descend,
    differ,
    differences,
    flat,
    layer,
    mean,
    parties,
    present,
    returns,
    run,
    softmax,
    two_layers,
)

FIRST = HIDDEN * (INPUTS + 1)


def features(w: Vector, x: Vector) -> Vector:
    """z: what goes into the last layer."""
    return np.tanh(layer(w[:FIRST], x, HIDDEN))


def cosine(a: Vector, b: Vector) -> Vector:
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def loss(w: Vector, client: ClientData, glob: Vector, prev: Vector | None, mu: float, tau: float) -> float:
    x, y = client
    z = features(w, x)
    task = -np.log(softmax(layer(w[FIRST:], z))[np.arange(len(y)), y]).mean()
    if prev is None:
        return float(task)
    near, far = (np.exp(cosine(z, features(other, x)) / tau) for other in (glob, prev))
    return float(task - mu * np.log(near / (near + far)).mean())


def moon(clients: list[ClientData], rounds: list[list[int]], mu: float, tau: float) -> Vector:
    w = flat(two_layers())
    last: dict[int, Vector] = {}
    for took_part in rounds:
        for k in took_part:
            c, glob, prev = clients[k], w, last.get(k)
            step = lambda v, c=c, g=glob, p=prev: differences(lambda u: loss(u, c, g, p, mu, tau), v)  # noqa: E731
            last[k] = descend(w, step)
        w = mean([last[k] for k in took_part], [len(clients[k][1]) for k in took_part])
    return w


@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (5.0, 0.2)])
def test_clients_that_sit_out(mu: float, tau: float) -> None:
    """ℓ = ℓ_sup + μ·mean over the batch of −log(e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ})).

    z, z_glob and z_prev are the features of the same inputs under the model that trains, the global model and the
    client's model at the end of its last visit, however long ago; sim is the cosine. In a first visit there is no
    such model and no term (with the global model in its place the term would be log 2, without a gradient). The
    reference's gradient is a central difference.
    """
    clients = parties()
    fed = run(f"moon(mu={mu}, tau={tau})", clients, two_layers(), participation=2, rounds=4)
    assert returns(present(fed))
    w = moon(clients, present(fed), mu, tau)
    agree(fed, w, within=1e-7)
    differ(w, moon(clients, present(fed), 0.0, tau))


def test_the_first_visit_is_fedavg() -> None:
    one, other = (flat(run(method, parties(), two_layers(), rounds=1)) for method in ("moon(mu=5.0)", "fedavg"))
    np.testing.assert_array_equal(one, other)


# Modes ----------------------------------------------------------------------------------------------------

MASK = np.array([2.0, 0.0, 2.0, 2.0])
MOMENTUM, EPSILON = 0.1, 1e-5
NORM = 2 * HIDDEN
State = tuple[Vector, Vector]
"""A norm layer's running mean and variance."""


class Masked(nn.Module):
    """Dropout whose mask is known: it acts in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy(MASK).to(x) if self.training else x


def normalising() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(8)
        first, last = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, 3)
        return nn.Sequential(first, nn.BatchNorm1d(HIDDEN), Masked(), nn.Tanh(), last).double()


def hidden_features(w: Vector, x: Vector, state: State | None, training: bool) -> Vector:
    """z = tanh(mask·(γ·(h − m)/√(v + ε) + β)), with the batch's own m and v where there is no state."""
    h = layer(w[:FIRST], x, HIDDEN)
    mean_, variance = (h.mean(0), h.var(0)) if state is None else state
    gamma, beta = w[FIRST : FIRST + HIDDEN], w[FIRST + HIDDEN : FIRST + NORM]
    normal = gamma * (h - mean_) / np.sqrt(variance + EPSILON) + beta
    return np.tanh(MASK * normal if training else normal)


def move_statistics(w: Vector, x: Vector, state: State) -> State:
    """Running statistics after one more batch; torch takes the variance without its bias."""
    h = layer(w[:FIRST], x, HIDDEN)
    now = h.mean(0), h.var(0, ddof=1)
    return tuple((1 - MOMENTUM) * old + MOMENTUM * new for old, new in zip(state, now, strict=True))


def train_visit(w: Vector, client: ClientData, start: State, glob: Vector, prev: Vector | None) -> tuple[Vector, State]:
    """A visit with μ = 2, τ = 0.3 whose contrast is against the features z_glob and z_prev: (w_k, its statistics)."""
    x, y = client

    def local(v: Vector) -> float:
        z = hidden_features(v, x, None, True)
        task = -np.log(softmax(layer(v[FIRST + NORM :], z))[np.arange(len(y)), y]).mean()
        if prev is None:
            return float(task)
        near, far = (np.exp(cosine(z, other) / 0.3) for other in (glob, prev))
        return float(task - 2.0 * np.log(near / (near + far)).mean())

    state = start
    for _ in range(3):
        state = move_statistics(w, x, state)
        w = w - 0.5 * differences(local, w)
    return w, state


def in_modes(clients: list[ClientData], rounds: list[list[int]], policy: str, training: bool = False) -> Vector:
    """MOON with z_glob and z_prev in evaluation mode or, if `training`, with the batch's statistics and the mask."""
    w, fresh = flat(normalising()), (np.zeros(HIDDEN), np.ones(HIDDEN))
    server: State = fresh
    last: dict[int, tuple[Vector, State]] = {}

    def features(v: Vector, x: Vector, state: State) -> Vector:
        return hidden_features(v, x, None if training or policy == "drop" else state, training)

    for took_part in rounds:
        for k in took_part:
            x = clients[k][0]
            start = last[k][1] if policy == "local" and k in last else server
            prev = features(last[k][0], x, last[k][1]) if k in last else None
            last[k] = train_visit(w, clients[k], start, features(w, x, start), prev)
        sizes = [len(clients[k][1]) for k in took_part]
        w = mean([last[k][0] for k in took_part], sizes)
        if policy == "average":
            server = tuple(mean([last[k][1][i] for k in took_part], sizes) for i in (0, 1))
    return w


@pytest.mark.parametrize("policy", ["average", "local", "drop"])
def test_the_other_models_are_in_evaluation_mode(policy: str) -> None:
    """z comes from a model that trains: batch statistics and dropout. z_glob and z_prev come from evaluated ones.

    z_glob = f(w, s), with s the running statistics that the visit starts with: the averaged ones, or the client's own
    of its last visit under `local`. z_prev = f(w_k, s_k), with the weights and the statistics that the client's last
    visit ended with, however long ago. Under `drop` evaluation uses the batch's own statistics. The reference is
    NumPy in double precision; its gradient is a central difference.
    """
    clients = parties((0, 0, 1), (1, 2, 2, 2, 0), (2, 2, 1))
    method = f"fedavg(buffers='{policy}') + moon(mu=2.0, tau=0.3)"
    fed = run(method, clients, normalising(), participation=2, rounds=4)
    assert returns(present(fed))
    w = in_modes(clients, present(fed), policy)
    agree(fed, w, within=1e-6)
    differ(w, in_modes(clients, present(fed), policy, training=True))


def test_a_memory_without_statistics_is_read_with_the_received_ones() -> None:
    """As runs from before they were kept have it: the same as if they had been equal to the received ones."""
    context, data = workshop(normed(), Moon(mu=2.0)), toy()
    asked = assign(normed(), context.method, lr=0.5)
    update, kept = train_client(context, asked, data, {})
    assert {n: t for n, t in kept["moon"].items() if n in update.buffers}.keys() == update.buffers.keys()
    assert equal({n: kept["moon"][n] for n in update.buffers}, update.buffers)
    bare = {n: t for n, t in kept["moon"].items() if n not in update.buffers}
    visits = [
        train_client(context, asked, data, {"moon": memory})[0]
        for memory in (bare, {**bare, **running_statistics(normed())}, kept["moon"])
    ]
    assert equal(visits[0].delta, visits[1].delta)
    assert not equal(visits[0].delta, visits[2].delta)
