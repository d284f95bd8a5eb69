"""Small federations with a linear softmax model, and the few lines of NumPy that work them out again.

All numbers are double precision. A batch is a client's whole data, or the client's rows are all the same, so that no
result depends on the order of batches. A model is one vector here: each layer's weights row by row, then its biases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import fedstrata as fs

Vector = npt.NDArray[np.float64]
ClientData = tuple[Vector, npt.NDArray[np.int64]]
"""A client's inputs and labels."""

INPUTS, CLASSES, HIDDEN = 3, 3, 4
STEPS, LR = 3, 0.5
SKEWED = ((0, 0, 1), (1, 2, 2, 2, 0), (2, 2))
"""Labels of three clients of unequal size; the first and the last lack classes."""


def party(labels: Sequence[int], seed: int) -> ClientData:
    """A client with these labels."""
    y = np.array(labels)
    return np.random.default_rng(seed).normal(size=(len(y), INPUTS)) + 0.5 * y[:, None], y


def parties(*labels: Sequence[int]) -> list[ClientData]:
    """One client for each list of labels."""
    return [party(some, seed) for seed, some in enumerate(labels or SKEWED)]


def equal_rows(count: int, label: int, seed: int) -> ClientData:
    """A client whose rows are all the same: any batch has the same gradient, in any order."""
    x, y = party([label], seed)
    return x.repeat(count, axis=0), y.repeat(count)


def linear() -> nn.Module:
    """The softmax model."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Linear(INPUTS, CLASSES).double()


def two_layers() -> nn.Sequential:
    """A model with features: what goes into its last layer."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).double()


def tensors(party: ClientData) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(party[0]), torch.from_numpy(party[1])


def federation(
    method: str | fs.Method, clients: Sequence[ClientData], model: nn.Module | None = None, **settings: Any
) -> Any:
    """A federation of these clients; each of its steps is a full batch unless the settings say otherwise."""
    settings = {"steps": STEPS, "batch_size": 100, "lr": LR, "rounds": 3, "engine": "serial", **settings}
    if "epochs" in settings:
        del settings["steps"]
    return fs.Federation(model or linear(), [tensors(c) for c in clients], method=method, **settings)


def run(method: str | fs.Method, clients: Sequence[ClientData], model: nn.Module | None = None, **settings: Any) -> Any:
    """The same, with all its rounds run."""
    fed = federation(method, clients, model, **settings)
    fed.fit()
    return fed


def flat(model: nn.Module | fs.Federation) -> Vector:
    """A model's parameters, or a federation's global ones, as one vector."""
    params = dict(model.named_parameters()) if isinstance(model, nn.Module) else model.state.params
    return np.concatenate([p.detach().numpy().ravel() for p in params.values()]).astype(np.float64)


def present(fed: fs.Federation) -> list[list[int]]:
    """Who took part, round by round."""
    return [record.clients for record in fed.records]


def returns(rounds: Sequence[Sequence[int]]) -> bool:
    """True if some client took part, sat a round out and came back."""
    clients = {client for took_part in rounds for client in took_part}
    marks = ["".join("x" if c in took_part else "." for took_part in rounds).strip(".") for c in clients]
    return any("." in mark for mark in marks)


def agree(fed: fs.Federation, expected: Vector, within: float = 1e-9) -> None:
    """The federation ends where the reference does."""
    np.testing.assert_allclose(flat(fed), expected, rtol=0, atol=within)


def differ(one: Vector, other: Vector) -> None:
    """Two references are far enough apart for a test to tell them from each other."""
    assert np.abs(one - other).max() > 1e-3


def softmax(logits: Vector) -> Vector:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def layer(w: Vector, x: Vector, outputs: int = CLASSES) -> Vector:
    """x Wᵀ + b for w = (W row by row, b)."""
    return x @ w[:-outputs].reshape(outputs, -1).T + w[-outputs:]


def pulled_back(error: Vector, x: Vector) -> Vector:
    """The gradient of a layer's w where `error` is the gradient of its outputs."""
    return np.concatenate([(error.T @ x).ravel(), error.sum(0)])


def gradient(w: Vector, party: ClientData, scale: Any = 1.0, shift: Any = 0.0) -> Vector:
    """∇f of the mean cross-entropy of softmax(scale·logits + shift): scale·(p − onehot)/n, through the layer."""
    x, y = party
    error = softmax(scale * layer(w, x) + shift) - np.eye(CLASSES)[y]
    return pulled_back(scale * error / len(y), x)


def descend(w: Vector, slope: Callable[[Vector], Vector], steps: int = STEPS, lr: float = LR) -> Vector:
    """Gradient descent."""
    for _ in range(steps):
        w = w - lr * slope(w)
    return w


def differences(f: Callable[[Vector], float], w: Vector, step: float = 1e-6) -> Vector:
    """∇f by central differences."""
    return np.array([(f(w + step * e) - f(w - step * e)) / (2 * step) for e in np.eye(len(w))])


def mean(values: Sequence[Vector], weights: Sequence[float] | None = None) -> Vector:
    """The weighted mean; uniform without weights."""
    return np.average(values, axis=0, weights=weights)


def fedavg(clients: Sequence[ClientData], rounds: Sequence[Sequence[int]], uniform: bool = False) -> Vector:
    """w ← Σ n_k w_k / Σ n_k over the clients that took part."""
    w = flat(linear())
    for took_part in rounds:
        here = [clients[k] for k in took_part]
        ends = [descend(w, lambda v, c=c: gradient(v, c)) for c in here]
        w = mean(ends, None if uniform else [len(y) for _, y in here])
    return w


FIRST = INPUTS * HIDDEN + HIDDEN
"""Entries of the first layer of `two_layers`; its last one has the rest."""


def slopes(w: Vector, client: ClientData) -> Vector:
    """∇ of the mean cross-entropy of softmax(W₂ tanh(W₁x + b₁) + b₂), the model `two_layers`."""
    x, y = client
    z = np.tanh(layer(w[:FIRST], x, HIDDEN))
    error = (softmax(layer(w[FIRST:], z)) - np.eye(CLASSES)[y]) / len(y)
    back = error @ w[FIRST:-CLASSES].reshape(CLASSES, HIDDEN) * (1 - z**2)
    return np.concatenate([pulled_back(back, x), pulled_back(error, z)])


def trained(w: Vector, client: ClientData, active: slice, lr: float = LR) -> Vector:
    """The change that a visit makes in which a part of `two_layers` trains."""
    v = w.copy()
    for _ in range(STEPS):
        v[active] -= lr * slopes(v, client)[active]
    return v - w
