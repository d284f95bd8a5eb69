"""The lowest layer moved once per visit, against steps that were taken one by one in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedstrata.client import gram, stacked, vectorised
from fedstrata.client.gram import GramLayer, saves_work
from tests.engines.worlds import check_close, flat, run, seeded

CLIENTS, STEPS, ROWS, INPUTS, OUTPUTS, RATE = 4, 3, 2, 7, 5, 0.3


@pytest.mark.parametrize("bias", ["moves", "frozen", "none"])
def test_outputs_and_deltas_are_those_of_steps_one_by_one(bias: str) -> None:
    """Float64 in NumPy: W ← W − lr·gᵀx and b ← b − lr·Σg after each step; clients take 3, 3, 2 and 1 of them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(CLIENTS, STEPS, ROWS, INPUTS))
    g = rng.normal(size=(CLIENTS, STEPS, ROWS, OUTPUTS))
    w, b = rng.normal(size=(OUTPUTS, INPUTS)), rng.normal(size=OUTPUTS) * (bias != "none")
    params = {"w": torch.tensor(w).float()} | ({} if bias == "none" else {"b": torch.tensor(b).float()})
    moved = {"w": torch.full((CLIENTS, OUTPUTS, INPUTS), float("nan"))}
    if bias == "moves":
        moved["b"] = torch.full((CLIENTS, OUTPUTS), float("nan"))
    steps = [3, 3, 2, 1]
    layer = GramLayer("w", "" if bias == "none" else "b", params, moved, torch.tensor(x).float(), RATE)
    weights, biases = np.stack([w] * CLIENTS), np.stack([b] * CLIENTS)
    for step in range(STEPS):
        going = sum(taken > step for taken in steps)
        out = layer.run(step, going)
        expected = np.einsum("cri,coi->cro", x[:going, step], weights[:going]) + biases[:going, None]
        np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-5)
        layer.take(step, torch.tensor(g[:going, step]).float())
        weights[:going] -= RATE * np.einsum("cro,cri->coi", g[:going, step], x[:going, step])
        if bias == "moves":
            biases[:going] -= RATE * g[:going, step].sum(1)
    assert layer.write_delta(steps, moved) == moved.keys()
    np.testing.assert_allclose(moved["w"].numpy(), weights - w, rtol=0, atol=1e-5)
    if bias == "moves":
        np.testing.assert_allclose(moved["b"].numpy(), biases - b, rtol=0, atol=1e-5)


def test_when_it_is_used() -> None:
    """A weight of 64 × 512 numbers is just large enough; 32 rows are half as many as its outputs."""
    assert saves_work(torch.empty(3, 2, 16, 512), torch.empty(64, 512))
    assert not saves_work(torch.empty(3, 2, 16, 511), torch.empty(64, 511))
    assert not saves_work(torch.empty(3, 3, 11, 512), torch.empty(64, 512))


WORLDS: dict[str, Any] = {
    "unequal clients": lambda: {"participation": 1.0, "epochs": 2},
    "equal clients": lambda: {"clients": flat(10, 10, 10), "participation": 1.0},
    "frozen bias": lambda: {"frozen": "bias"},
    "frozen weight": lambda: {"frozen": "weight"},
    "no bias": lambda: {"bias": False, "steps": 4},
    "a frozen layer below": lambda: {"method": "fedpart(full_rounds=1, rounds_per_stratum=1)", "epochs": 2},
}


@pytest.mark.parametrize("case", WORLDS)
def test_whole_runs_equal_one_after_the_other(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows there are; the layer is used wherever its weight trains."""
    used = []

    def note(x: Any, weight: Any) -> bool:
        used.append(x.shape)
        return True

    monkeypatch.setattr(stacked, "saves_work", note)
    monkeypatch.setattr(vectorised, "vmap", None)
    settings = WORLDS[case]()
    bias, frozen = settings.pop("bias", True), settings.pop("frozen", None)
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8, bias=bias), nn.ReLU(), nn.Linear(8, 4)))
    if frozen:
        getattr(model[0], frozen).requires_grad_(False)
    check_close(run(model, **settings, engine="vmap"), run(model, **settings, engine="serial"))
    assert bool(used) is (case != "frozen weight")


def test_the_same_bits_for_any_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked, so they use it, too."""
    monkeypatch.setattr(gram, "MIN_WEIGHT", 1)
    settings: dict[str, Any] = {"clients": flat(*range(2, 22)), "participation": 1.0, "batch_size": 2, "steps": 2}
    one, two = (run(**settings, engine="vmap", workers=workers) for workers in (1, 2))
    for name, value in one.state.params.items():
        assert torch.equal(two.state.params[name], value)
