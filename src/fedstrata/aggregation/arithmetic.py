"""What several rules compute with: the types to compute in, elements of all clients side by side, inner products."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from fedstrata.core.lazy import torch
from fedstrata.core.tensors import Tensors
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = 2**14
"""Elements of a tensor that are looked at together, in all clients."""
ROUNDING = 1e-6
"""Part of a vector's norm below which distances that come from inner products in double precision mean nothing."""
LONGEST = 1e280
"""Squared norm from which a delta counts as infinitely long: what is computed from shorter ones stays finite."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float64


def cast_back(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A result in the type of what it was computed from."""
    return tensor.to(dtype) if dtype.is_floating_point else tensor.round().to(dtype)


def holders_of(clients: Sequence[Tensors]) -> dict[str, list[int]]:
    """Name → positions of the clients that hold it."""
    holders: dict[str, list[int]] = {}
    for position, tensors in enumerate(clients):
        for name in tensors:
            holders.setdefault(name, []).append(position)
    return holders


def blocks(tensors: Sequence[Tensor], dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """(first element, matrix with a row per tensor), some elements at a time: no second copy of all of them is made."""
    flat = [t.detach().reshape(-1) for t in tensors]
    for start in range(0, flat[0].numel(), WIDTH):
        yield start, torch.stack([f[start : start + WIDTH].to(dtype) for f in flat])


def floor_share(share: float, count: int) -> int:
    """⌊share · count⌋ for the share as it was written: 0.29 of 100 is 29, although 0.29 · 100 is a little less."""
    return math.floor(Fraction(str(share)) * count)


def squared_distances(deltas: Sequence[Tensors]) -> Tensor:
    """Squared distances between any two deltas, for each element that both hold; infinite where they share none."""
    sums = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
    counts = torch.zeros_like(sums)
    for name, holders in holders_of(deltas).items():
        tensors = [deltas[k][name] for k in holders]
        left, right = torch.tensor(holders)[torch.triu_indices(len(holders), len(holders), offset=1)]
        for _, block in blocks(tensors, torch.float64):
            sums[left, right] += torch.pdist(block).square().cpu()
        counts[left, right] += tensors[0].numel()
    means = torch.where(counts > 0, sums / counts, math.inf).triu(1)
    return means + means.T


def gram_matrices(deltas: Sequence[Tensors]) -> tuple[Tensor, Tensor, Tensor]:
    """Inner products of all deltas, separately for each group of names that the same clients hold.

    Returns (groups × clients × clients: inner products, groups × clients: 1 for holders, groups: numbers of elements).
    """
    count = len(deltas)
    found: dict[tuple[int, ...], tuple[Tensor, int]] = {}
    for name, holders in holders_of(deltas).items():
        key = tuple(holders)
        tensors = [deltas[k][name] for k in holders]
        products, size = found.get(key, (torch.zeros(len(key), len(key), dtype=torch.float64), 0))
        for _, block in blocks(tensors, torch.float64):
            products += (block @ block.T).cpu()
        found[key] = products, size + tensors[0].numel()
    inner, holds = torch.zeros(len(found), count, count, dtype=torch.float64), torch.zeros(len(found), count).double()
    for group, (key, (products, _)) in enumerate(found.items()):
        at = torch.tensor(key)
        inner[group, at[:, None], at], holds[group, at] = products, 1.0
    return inner, holds, torch.tensor([size for _, size in found.values()], dtype=torch.float64)


def check_below_half(kind: str, share: float) -> None:
    """Refuse a share of the clients that a rule cannot do without."""
    if not 0 <= share < 0.5:
        raise UsageError(f"{kind}'s share must be 0 or more and below 0.5, not {share}")
