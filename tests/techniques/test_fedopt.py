"""FedAdagrad, FedAdam and FedYogi: Reddi et al. 2021, Algorithm 2."""

from __future__ import annotations

import numpy as np
import pytest

from tests.techniques.worlds import (
    Vector,
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
    run,
)

ROUNDS = 5


def second(name: str, v: Vector, delta: Vector, beta2: float) -> Vector:
    """v_t from v_{t−1} and Δ_t."""
    square = delta**2
    if name == "fedadagrad":
        return v + square
    if name == "fedadam":
        return beta2 * v + (1 - beta2) * square
    return v - (1 - beta2) * square * np.sign(v - square)


@pytest.mark.parametrize("weight", ["examples", "uniform"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedadagrad", {"lr": 0.1, "beta1": 0.0, "tau": 1e-3}),
        ("fedadagrad", {"lr": 0.3, "beta1": 0.5, "tau": 0.1}),
        ("fedadam", {"lr": 0.03, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}),
        ("fedadam", {"lr": 0.1, "beta1": 0.5, "beta2": 0.6, "tau": 0.1}),
        ("fedyogi", {"lr": 0.03, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}),
        ("fedyogi", {"lr": 0.1, "beta1": 0.5, "beta2": 0.6, "tau": 0.1}),
    ],
)
def test_five_rounds(name: str, settings: dict[str, float], weight: str) -> None:
    """m ← β₁m + (1 − β₁)Δ; v by the method's rule; x ← x + η·m/(√v + τ). m begins at 0 and v at τ².

    Δ is the mean of the clients' changes; there is no bias correction. Yogi's v grows where Δ² is above it and shrinks
    where Δ² is below, by (1 − β₂)Δ²; both happen in the second setting.
    """
    clients = parties()
    arguments = ", ".join(f"{key}={value}" for key, value in settings.items())
    fed = run(f"fedavg(weight='{weight}') + {name}({arguments})", clients, rounds=ROUNDS)
    x = flat(linear())
    m, v = np.zeros_like(x), np.full_like(x, settings["tau"] ** 2)
    signs = set()
    for _ in range(ROUNDS):
        ends = [descend(x, lambda u, c=c: gradient(u, c)) for c in clients]
        delta = mean(ends, [len(y) for _, y in clients] if weight == "examples" else None) - x
        signs |= set(np.sign(v - delta**2))
        m = settings["beta1"] * m + (1 - settings["beta1"]) * delta
        v = second(name, v, delta, settings.get("beta2", 0.0))
        x = x + settings["lr"] * m / (np.sqrt(v) + settings["tau"])
    agree(fed, x)
    differ(x, fedavg(clients, present(fed), uniform=weight == "uniform"))
    if name == "fedyogi" and settings["beta2"] == 0.6:
        assert signs == {-1.0, 1.0}
