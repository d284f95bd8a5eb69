"""Divergence, layer by layer: how far clients' gradients or updates are apart.

"Unlocking the Potential of Federated Learning for Deeper Models", Eq. 1. Symbols: client i, its gradient
g_i = E_{x∈X_i} ∇L(θ, x), their plain mean ḡ, stratum L with d_L parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

import torch
from torch import Tensor

from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Stratum
from fedstrata.errors import UsageError
from fedstrata.probes.measures.reading import (
    check_names,
    deviations,
    params_of,
    per_stratum,
)

_COLUMNS = 1 << 16
"""Entries of each client that are compared at once."""


def divergence(tensors: Sequence[Tensors], strata: Sequence[Stratum]) -> dict[str, float]:
    """Stratum name → div_L = (1/N) Σ_i √(‖g_i − ḡ‖²/d_L) (Eq. 1), over the N clients that hold the stratum.

    It is 0 if and only if all of them hold the same. A name is compared among the clients that hold it. What only one
    client holds cannot be compared: such names do not count, neither in d_L, and strata of nothing else are left out,
    as are strata that nobody holds.

    Args:
        tensors: each client's exact gradient at the global model (`client_gradients`); or, as a proxy that costs
            nothing, its update.
        strata: of the whole model.
    """
    found = _compare(tensors, strata)
    return {name: fmean(math.sqrt(one.square / one.entries) for one in mine) for name, mine in found.items()}


def unscaled_divergence(tensors: Sequence[Tensors], strata: Sequence[Stratum]) -> dict[str, float]:
    """Stratum name → (1/N) Σ_i ‖g_i − ḡ‖: Eq. 1 without its division by √d_L, in the same names and clients.

    It is what Theorem 1 is about, whose divergence of a layer is E‖ε‖; Eq. 1 is smaller by √d_L, so that large layers
    look calmer by it.
    """
    found = _compare(tensors, strata)
    return {name: fmean(math.sqrt(one.square) for one in mine) for name, mine in found.items()}


def relative_divergence(tensors: Sequence[Tensors], strata: Sequence[Stratum]) -> dict[str, float]:
    """Stratum name → (1/N) Σ_i ‖g_i − ḡ‖/‖ḡ‖: how far clients are apart for what they have in common.

    Neither the number of parameters nor the gradients' length counts. It is 0 where all clients hold the same, even if
    that is nothing but zeros, and infinite where they differ and their mean is zero.
    """
    found = _compare(tensors, strata)
    return {name: fmean(relative_length(one.square, one.mean) for one in mine) for name, mine in found.items()}


def relative_length(square: float, mean: float) -> float:
    """√(square/mean) of two squared lengths; 0 if there is nothing above the line, infinite if nothing below it."""
    return 0.0 if square == 0 else math.sqrt(square / mean) if mean > 0 else math.inf


@dataclass(frozen=True)
class _Deviation:
    """A client's in a stratum: ‖g_i − ḡ‖², ‖ḡ‖² and d_L, over the names that it shares with other clients."""

    square: float
    mean: float
    entries: float


def _compare(tensors: Sequence[Tensors], strata: Sequence[Stratum]) -> dict[str, list[_Deviation]]:
    """Stratum name → what is found of each client that holds it."""
    squares = deviations(tensors, None)[1]
    holders: dict[str, list[Tensor]] = {}
    for client, mine in enumerate(squares):
        for name in mine:
            holders.setdefault(name, []).append(tensors[client][name])
    check_names(holders, params_of(strata), "the strata have")
    shared = {name: held for name, held in holders.items() if len(held) > 1}
    means = {name: float(_mean(held).square().sum()) for name, held in shared.items()}
    compared = [{n: square for n, square in mine.items() if n in shared} for mine in squares]
    apart = per_stratum(compared, strata)
    common = per_stratum([{n: means[n] for n in mine} for mine in compared], strata)
    entries = per_stratum([{n: shared[n][0].numel() for n in mine} for mine in compared], strata)
    return {s: [_Deviation(*one) for one in zip(apart[s], common[s], entries[s], strict=True)] for s in apart}


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].detach().double()
    for tensor in tensors[1:]:
        total = total + tensor.detach().double()
    return total / len(tensors)


def update_cosine(deltas: Sequence[Tensors], strata: Sequence[Stratum]) -> dict[str, float]:
    """Stratum name → the mean, over all pairs of clients, of the cosine between their updates of that stratum.

    A pair is compared in the names that both hold. An update of zero has no direction: such pairs are left out, as are
    strata without any pair.
    """
    if not any(deltas):
        raise UsageError("there are no clients with updates to compare")
    check_names({n for mine in deltas for n in mine}, params_of(strata), "the strata have")
    found = {}
    for stratum in strata:
        dots, squares = inner_products(deltas, stratum.params)
        lengths = (squares.sqrt() * squares.T.sqrt()).tolist()
        pairs = [(i, j) for i, j in combinations(range(len(deltas)), 2) if lengths[i][j] != 0]
        if pairs:
            found[stratum.name] = fmean(float(dots[i, j]) / lengths[i][j] for i, j in pairs)
    return found


def inner_products(deltas: Sequence[Tensors], names: Iterable[str]) -> tuple[Tensor, Tensor]:
    """(the inner product of every two clients' tensors, [i, j]: the square of i's norm in the names that j holds too).

    Only names that both hold count.
    """
    dots, squares = (torch.zeros(len(deltas), len(deltas), dtype=torch.float64) for _ in range(2))
    for name in names:
        holders = torch.tensor([i for i, mine in enumerate(deltas) if name in mine], dtype=torch.int64)
        if len(holders):
            products = _products([deltas[i][name] for i in holders.tolist()], name)
            at = holders.unsqueeze(1), holders
            dots[at] += products
            squares[at] += products.diagonal().unsqueeze(1)
    return dots, squares


def _products(tensors: Sequence[Tensor], name: str) -> Tensor:
    """The inner product of every two tensors, piece by piece: a large layer of many clients is never copied whole."""
    if len({tensor.shape for tensor in tensors}) > 1:
        raise UsageError(f"the clients' tensors '{name}' are of different shapes")
    flat = [tensor.detach().flatten() for tensor in tensors]
    total = torch.zeros(len(flat), len(flat), dtype=torch.float64)
    for start in range(0, len(flat[0]), _COLUMNS):
        piece = torch.stack([row[start : start + _COLUMNS].double().cpu() for row in flat])
        total += piece @ piece.T
    return total
