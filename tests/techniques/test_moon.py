"""MOON, Li, He and Song 2021."""

from __future__ import annotations

import numpy as np
import pytest

from tests.techniques.worlds import (
    HIDDEN,
    INPUTS,
    Party,
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


def loss(w: Vector, client: Party, glob: Vector, prev: Vector | None, mu: float, tau: float) -> float:
    x, y = client
    z = features(w, x)
    task = -np.log(softmax(layer(w[FIRST:], z))[np.arange(len(y)), y]).mean()
    if prev is None:
        return float(task)
    near, far = (np.exp(cosine(z, features(other, x)) / tau) for other in (glob, prev))
    return float(task - mu * np.log(near / (near + far)).mean())


def moon(clients: list[Party], rounds: list[list[int]], mu: float, tau: float) -> Vector:
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
