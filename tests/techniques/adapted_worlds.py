"""The two layers of `worlds` with low-rank adapters, W + s·B·A, and the NumPy that trains A and B by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from tests.techniques.worlds import (
    CLASSES,
    FIRST,
    HIDDEN,
    LR,
    STEPS,
    ClientData,
    Vector,
    federation,
    slopes,
    two_layers,
)

SHAPES = {"0": (HIDDEN, 3), "2": (CLASSES, HIDDEN)}
"""Of each layer's weight; its bias follows it in `two_layers`, seen as one vector."""
PLACES = {"0": slice(0, FIRST - HIDDEN), "2": slice(FIRST, -CLASSES)}
BASE = "{}.base_layer.weight"


@dataclass(frozen=True)
class Adapted:
    """A model by hand: the base as one vector, the factors by layer, and their scale."""

    base: Vector
    a: dict[str, Vector]
    b: dict[str, Vector]
    scale: float

    def product(self, layer: str) -> Vector:
        """s·B·A."""
        return self.scale * self.b[layer] @ self.a[layer]

    def whole(self) -> Vector:
        """The model without adapters that computes the same."""
        merged = self.base.copy()
        for layer, place in PLACES.items():
            merged[place] += self.product(layer).ravel()
        return merged

    def cut(self, rank: int, scale: float) -> Adapted:
        """What a client of a lower rank begins with: the same product of its first ranks, in its own scale."""
        a, b = {n: v[:rank] for n, v in self.a.items()}, {n: v[:, :rank] for n, v in self.b.items()}
        return replace(self, a=a, b={n: v * self.scale / scale for n, v in b.items()}, scale=scale)

    def padded(self, rank: int, scale: float) -> Adapted:
        """The way back: zeros for ranks that it does not have."""
        a = {n: np.pad(v, ((0, rank - len(v)), (0, 0))) for n, v in self.a.items()}
        b = {n: np.pad(v * self.scale / scale, ((0, 0), (0, rank - v.shape[1]))) for n, v in self.b.items()}
        return replace(self, a=a, b=b, scale=scale)

    def train(self, client: ClientData, factors: str = "AB", steps: int = STEPS, lr: float = LR) -> Adapted:
        """A visit: with G the gradient of a merged weight, ∂A = s·Bᵀ·G and ∂B = s·G·Aᵀ."""
        now = self
        for _ in range(steps):
            slope = slopes(now.whole(), client)
            found = {layer: slope[place].reshape(SHAPES[layer]) for layer, place in PLACES.items()}
            a = {n: now.a[n] - lr * self.scale * now.b[n].T @ g for n, g in found.items()} if "A" in factors else now.a
            b = {n: now.b[n] - lr * self.scale * g @ now.a[n].T for n, g in found.items()} if "B" in factors else now.b
            now = replace(now, a=a, b=b)
        return now


def adapted(rank: int = 2, alpha: float = 3.0, shaken: bool = True) -> nn.Module:
    """The two layers, each with an adapter, of which alone something trains; B is not zero, if it is shaken."""
    pytest.importorskip("peft")
    model = fs.adapt(two_layers(), f"lora(r={rank}, alpha={alpha}, trains=())", seed=1)
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if shaken and "lora_B" in name:
                p.copy_(0.3 * torch.randn(p.shape, generator=draw))
    return model


def by_hand(given: nn.Module | dict[str, torch.Tensor], scale: float = 1.5) -> Adapted:
    """A model, or a federation's parameters, as arrays."""
    named = dict(given.named_parameters()) if isinstance(given, nn.Module) else given
    arrays = {n: p.detach().numpy().copy() for n, p in named.items()}
    base = np.concatenate([v.ravel() for n, v in arrays.items() if "lora" not in n])
    a = {layer: arrays[f"{layer}.lora_A.default.weight"] for layer in SHAPES}
    return Adapted(base, a, {layer: arrays[f"{layer}.lora_B.default.weight"] for layer in SHAPES}, scale)


def means(ends: Sequence[Adapted], weights: Sequence[float]) -> Adapted:
    """A ← Σ p_k A_k, B ← Σ p_k B_k."""
    a, b = (
        {n: np.average([getattr(one, factor)[n] for one in ends], axis=0, weights=weights) for n in SHAPES}
        for factor in ("a", "b")
    )
    return replace(ends[0], a=a, b=b)


def mean_products(ends: Sequence[Adapted], weights: Sequence[float]) -> dict[str, Vector]:
    """Σ p_k s·B_k·A_k."""
    return {n: np.average([one.product(n) for one in ends], axis=0, weights=weights) for n in SHAPES}


def check(fed: fs.Federation, expected: Adapted, within: float = 1e-9) -> None:
    """The federation ends with this base and these factors."""
    found = by_hand(fed.state.params)
    np.testing.assert_allclose(found.base, expected.base, rtol=0, atol=within)
    for factor in ("a", "b"):
        for n, value in getattr(expected, factor).items():
            np.testing.assert_allclose(getattr(found, factor)[n], value, rtol=0, atol=within)


def run_adapted(method: str, clients: Sequence[ClientData], model: nn.Module | None = None, **settings: Any) -> Any:
    """A federation of these clients, with all its rounds run."""
    fed = federation(method, clients, adapted() if model is None else model, **settings)
    fed.fit()
    return fed


LOW_RANK, LOW_SCALE = 1, 2.5
"""Of the second of three clients; the others and the server have rank 2 and scale 1.5."""


def unequal_ranks() -> dict[str, Any]:
    """Settings of a federation in which the second client has adapters of rank 1, in another scale."""
    small = adapted(LOW_RANK, LOW_SCALE * LOW_RANK)
    return {"archs": {"small": small}, "arch_of": lambda client: "small" if client == 1 else ""}


def visits(now: Adapted, clients: Sequence[ClientData]) -> list[Adapted]:
    """What the three clients of unequal rank end with, in the server's rank and scale."""
    starts = [now, now.cut(LOW_RANK, LOW_SCALE), now]
    return [start.train(c).padded(2, now.scale) for start, c in zip(starts, clients, strict=True)]


def counts(clients: Sequence[ClientData]) -> list[int]:
    """How many examples each client has."""
    return [len(y) for _, y in clients]
