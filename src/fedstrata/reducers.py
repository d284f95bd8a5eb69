"""How the updates of a round become one: the mean, folded as updates arrive, and robust reducers that look at all.

A reducer takes one delta, one dict of buffers and one weight a client, in client order, and returns (delta, buffers).
Clients may hold different names. Coordinate-wise reducers (`median`, `trimmed_mean`) go name by name over the clients
that hold the name, buffers included. The others measure how far whole deltas are from each other, turn that into one
weight a client, 0 for none, and take the weighted mean of deltas and buffers, name by name; a name that only clients of
weight 0 hold is left out. Where no delta holds anything, nothing can be measured, and the clients' own weights stay.

Half-precision tensors are computed in single precision; integers in double, and rounded, so they stay integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from fedstrata.errors import UsageError
from fedstrata.lazy import torch
from fedstrata.spec import Table, bind
from fedstrata.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = 2**14
"""Elements of a tensor that are looked at together, in all clients."""
ROUNDING = 1e-6
"""Part of a vector's norm below which distances that come from inner products in double precision mean nothing."""
LONGEST = 1e280
"""Squared norm from which a delta counts as infinitely long: what is computed from shorter ones stays finite."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float64


def _narrow(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A result in the type of what it was computed from."""
    return tensor.to(dtype) if dtype.is_floating_point else tensor.round().to(dtype)


class Mean:
    """The weighted mean, name by name, over the updates that hold the name: Σ n_k x_k / Σ n_k, folded in order.

    Half-precision tensors are summed in single precision; integers in double, and rounded, so they stay integers.
    """

    def __init__(self) -> None:
        self._sums: Tensors = {}
        self._weights: dict[str, float] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Fold one client's tensors in."""
        if not tensors:
            return
        new = [n for n in tensors if n not in self._sums]
        for name in new:
            tensor = tensors[name]
            self._dtypes[name], self._weights[name] = tensor.dtype, 0.0
            self._sums[name] = torch.zeros_like(tensor, dtype=_wide(tensor.dtype))
        sums = [self._sums[n] for n in tensors]
        values = [t if t.dtype == s.dtype else t.to(s.dtype) for t, s in zip(tensors.values(), sums, strict=True)]
        torch._foreach_add_(sums, values, alpha=weight)
        for name in tensors:
            self._weights[name] += weight

    def result(self) -> Tensors:
        """The mean of what was folded in."""
        if not self._sums:
            return {}
        means = torch._foreach_div(list(self._sums.values()), list(self._weights.values()))
        return {name: _narrow(mean, dtype) for (name, dtype), mean in zip(self._dtypes.items(), means, strict=True)}


class Reducer(Protocol):
    """Makes one (delta, buffers) of one delta, one dict of buffers and one weight a client, in client order."""

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]: ...


def _holders(clients: Sequence[Tensors]) -> dict[str, list[int]]:
    """Name → positions of the clients that hold it."""
    holders: dict[str, list[int]] = {}
    for position, tensors in enumerate(clients):
        for name in tensors:
            holders.setdefault(name, []).append(position)
    return holders


def _blocks(tensors: Sequence[Tensor], dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """(first element, matrix with a row a tensor), some elements at a time: no second copy of all of them is made."""
    flat = [t.detach().reshape(-1) for t in tensors]
    for start in range(0, flat[0].numel(), WIDTH):
        yield start, torch.stack([f[start : start + WIDTH].to(dtype) for f in flat])


@lru_cache(maxsize=64)
def network(count: int) -> tuple[tuple[int, int], ...]:
    """Batcher's odd-even merge sort of so many things: pairs of places to put in order, one after the other."""
    pairs = []
    sizes = [2**k for k in range((count - 1).bit_length())]
    for size in sizes:
        for gap in (s for s in reversed(sizes) if s <= size):
            for first in range(gap % size, count - gap, 2 * gap):
                for low in range(first, min(first + gap, count - gap)):
                    if low // (2 * size) == (low + gap) // (2 * size):
                        pairs.append((low, low + gap))
    return tuple(pairs)


def in_order(block: Tensor) -> Tensor:
    """Each column sorted, smallest first. Whole rows are compared: several times as fast as `torch.sort`."""
    rows = list(block.clone())
    spare = torch.empty_like(rows[0])
    for low, high in network(len(rows)):
        torch.minimum(rows[low], rows[high], out=spare)
        torch.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]
    return torch.stack(rows)


def by_coordinate(clients: Sequence[Tensors], reduce: Callable[[Tensor], Tensor]) -> Tensors:
    """Reduce each element on its own: `reduce` is given a column of sorted values an element, smallest first."""
    out: Tensors = {}
    for name, holders in _holders(clients).items():
        tensors = [clients[k][name] for k in holders]
        like = tensors[0]
        flat = torch.empty(like.numel(), dtype=_wide(like.dtype), device=like.device)
        for start, block in _blocks(tensors, flat.dtype):
            flat[start : start + block.shape[1]] = reduce(in_order(block))
        out[name] = _narrow(flat, like.dtype).reshape(like.shape)
    return out


def middle(ordered: Tensor) -> Tensor:
    """The median of sorted rows; of an even number, the mean of the middle two."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def part(share: float, count: int) -> int:
    """⌊share · count⌋ for the share as it was written: 0.29 of 100 is 29, although 0.29 · 100 is a little less."""
    return math.floor(Fraction(str(share)) * count)


def mean_of(clients: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """The weighted mean, name by name, over the clients of a weight above 0 that hold the name."""
    mean = Mean()
    for tensors, weight in zip(clients, weights, strict=True):
        if weight > 0:
            mean.add(tensors, weight)
    return mean.result()


def distances(deltas: Sequence[Tensors]) -> Tensor:
    """Squared distances between any two deltas, for each element that both hold; infinite where they share none."""
    sums = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
    counts = torch.zeros_like(sums)
    for name, holders in _holders(deltas).items():
        tensors = [deltas[k][name] for k in holders]
        left, right = torch.tensor(holders)[torch.triu_indices(len(holders), len(holders), offset=1)]
        for _, block in _blocks(tensors, torch.float64):
            sums[left, right] += torch.pdist(block).square().cpu()
        counts[left, right] += tensors[0].numel()
    means = torch.where(counts > 0, sums / counts, math.inf).triu(1)
    return means + means.T


def krum_order(distances: Tensor, suspects: int) -> list[int]:
    """Positions by Krum's score, the lowest first, ties in client order.

    The score is the sum of the squared distances to the n − f − 2 nearest others, at least one. Among infinite sums,
    the one with fewer infinite terms is lower, and then the one whose finite terms have the lower sum.
    """
    count = len(distances)
    others = distances.clone().fill_diagonal_(math.inf)
    nearest = others.sort(1).values[:, : max(1, count - suspects - 2)]
    known = nearest.isfinite()
    missing = (~known).sum(1).tolist()
    sums = nearest.where(known, 0.0).sum(1).tolist()
    return sorted(range(count), key=lambda k: (missing[k], sums[k]))


def grams(deltas: Sequence[Tensors]) -> tuple[Tensor, Tensor, Tensor]:
    """Inner products of all deltas, apart for each group of names that the same clients hold.

    Returns (groups × clients × clients: inner products, groups × clients: 1 for holders, groups: numbers of elements).
    """
    count = len(deltas)
    found: dict[tuple[int, ...], tuple[Tensor, int]] = {}
    for name, holders in _holders(deltas).items():
        key = tuple(holders)
        tensors = [deltas[k][name] for k in holders]
        products, size = found.get(key, (torch.zeros(len(key), len(key), dtype=torch.float64), 0))
        for _, block in _blocks(tensors, torch.float64):
            products += (block @ block.T).cpu()
        found[key] = products, size + tensors[0].numel()
    inner, holds = torch.zeros(len(found), count, count, dtype=torch.float64), torch.zeros(len(found), count).double()
    for group, (key, (products, _)) in enumerate(found.items()):
        at = torch.tensor(key)
        inner[group, at[:, None], at], holds[group, at] = products, 1.0
    return inner, holds, torch.tensor([size for _, size in found.values()], dtype=torch.float64)


def weiszfeld(
    inner: Tensor, holds: Tensor, sizes: Tensor, alphas: Tensor, smooth: float, steps: int, tolerance: float
) -> Tensor:
    """The clients' weights in their geometric median, which sum to 1; see GeometricMedian. The rest is from `grams`.

    What happens in the space of all parameters is computed from inner products alone: with v = Σ_k m_k w_k in a group
    of names, ‖v − w_k‖² = ⟨w_k, w_k⟩ − 2⟨w_k, v⟩ + ⟨v, v⟩. So one look at the deltas is enough for any number of steps.
    """

    def mixed(betas: Tensor) -> Tensor:
        mix = holds * betas
        return mix / mix.sum(1, keepdim=True)

    stretch = sizes.sum() / (sizes @ holds)
    norms = inner.diagonal(dim1=1, dim2=2)
    least = (ROUNDING * (norms.sum(0) * stretch).sqrt()).clamp(min=smooth)
    alphas = alphas / alphas.sum()
    betas, mix = alphas, mixed(alphas)
    for _ in range(steps):
        along = (inner @ mix[:, :, None])[:, :, 0]
        squares = norms - 2 * along + (mix * along).sum(1, keepdim=True)
        far = ((squares * holds).sum(0) * stretch).clamp(min=0).sqrt()
        betas = alphas / torch.maximum(far, least)
        before, mix = mix, mixed(betas)
        step = mix - before
        moved = (step[:, None] @ inner @ step[:, :, None]).sum().clamp(min=0).sqrt()
        if moved <= tolerance / betas.sum():
            break
    return betas / betas.sum()


def median_weights(
    deltas: Sequence[Tensors], weights: Sequence[float], smooth: float, steps: int, tolerance: float
) -> list[float]:
    """The clients' weights in their geometric median; 0 for a client whose delta is empty or endlessly long."""
    inner, holds, sizes = grams(deltas)
    near = (inner.diagonal(dim1=1, dim2=2).sum(0) < LONGEST) & (sizes @ holds > 0)
    if not near.any():
        return list(weights)
    left = holds[:, near].sum(1) > 0
    shares = torch.zeros(len(deltas), dtype=torch.float64)
    shares[near] = weiszfeld(
        inner[left][:, near][:, :, near],
        holds[left][:, near],
        sizes[left],
        torch.tensor(weights, dtype=torch.float64)[near],
        smooth,
        steps,
        tolerance,
    )
    found: list[float] = shares.tolist()
    return found


def krum_weights(deltas: Sequence[Tensors], weights: Sequence[float], suspects: int, keep: int) -> list[float]:
    """The weights of the `keep` clients with the lowest scores, and 0 for all others."""
    if not any(tensor.numel() for delta in deltas for tensor in delta.values()):
        return list(weights)
    kept = set(krum_order(distances(deltas), suspects)[:keep])
    return [weight if k in kept else 0.0 for k, weight in enumerate(weights)]


def _below_half(kind: str, share: float) -> None:
    if not 0 <= share < 0.5:
        raise UsageError(f"{kind}'s share must be 0 or more and below 0.5, not {share}")


@dataclass(frozen=True, kw_only=True)
class WeightedMean:
    """The mean, weighted by the clients' weights: Σ n_k x_k / Σ n_k, name by name.

    McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", AISTATS 2017. One client that lies can move it anywhere.
    """

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        return mean_of(deltas, weights), mean_of(buffers, weights)


@dataclass(frozen=True, kw_only=True)
class Median:
    """The median of each coordinate, unweighted: no minority of clients can move it beyond the others' values.

    Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
    ICML 2018, Definition 1: g_j = med{x_j^i : i ∈ [m]}, with x^i the delta of client i of m.

    Of an even number of values it is the mean of the middle two. Clients count alike, whatever their weights. Every
    name has the median over the m clients that hold it. The paper takes gradients; these are changes after local
    training. Running statistics are treated like parameters.
    """

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        return by_coordinate(deltas, middle), by_coordinate(buffers, middle)


@dataclass(frozen=True, kw_only=True)
class TrimmedMean:
    """The mean of each coordinate without its largest and smallest values, unweighted.

    Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
    ICML 2018, Definition 2: g_j = Σ_{x ∈ U_j} x / ((1 − 2β) m), where U_j is {x_j^i : i ∈ [m]} without the largest and
    the smallest β-fraction, and x^i is the delta of client i of m.

    The number of values dropped at each end is ⌊β m⌋, so nothing is dropped where a name has fewer than 1/β holders;
    the mean is over those that remain. Clients count alike, whatever their weights. Every name has its own m, the
    number of clients that hold it. The paper takes gradients; these are changes after local training. Running
    statistics are treated like parameters.

    Args:
        share: β, the fraction of the values that is dropped at each end; below 0.5.
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        _below_half("trimmed_mean", self.share)

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        return by_coordinate(deltas, self._trimmed), by_coordinate(buffers, self._trimmed)

    def _trimmed(self, ordered: Tensor) -> Tensor:
        drop = part(self.share, len(ordered))
        return ordered[drop : len(ordered) - drop].mean(0)


@dataclass(frozen=True, kw_only=True)
class Krum:
    """The one update that is nearest to its neighbours.

    Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent", NeurIPS 2017: s(i) = Σ_{i→j} ‖V_i − V_j‖², where i→j are the n − f − 2 clients whose V_j is nearest to
    V_i, and V is the delta; the result is V_i of the lowest s(i), and of the first client among several.

    The paper's f is ⌊share · n⌋, and its guarantee needs 2f + 2 < n; with few clients at least one neighbour is looked
    at. Distances are over the names that two clients share, for each shared element; clients that share nothing are
    infinitely far. The result holds the names of the chosen client alone, and its running statistics. The paper takes
    gradients; these are changes after local training.

    Args:
        share: f/n, the fraction of the clients that is suspected; below 0.5.
    """

    share: float = 0.3

    def __post_init__(self) -> None:
        _below_half("krum", self.share)

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        found = krum_weights(deltas, weights, part(self.share, len(deltas)), keep=1)
        if len(chosen := [k for k, weight in enumerate(found) if weight > 0]) == 1:
            found[chosen[0]] = 1.0  # so that the mean of one is that one, to the bit
        return mean_of(deltas, found), mean_of(buffers, found)


@dataclass(frozen=True, kw_only=True)
class MultiKrum:
    """The weighted mean of the updates that are nearest to their neighbours.

    Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent", NeurIPS 2017, Section 4: the mean of the m deltas of the lowest scores s(i); see `krum` for the scores.

    The paper's mean is unweighted; this one keeps the clients' weights. Every name is averaged over its holders among
    the chosen, running statistics too, and a name that none of them holds is left out.

    Args:
        share: f/n, the fraction of the clients that is suspected; below 0.5.
        keep: m, how many clients are kept (all, where there are fewer); None for n − f.
    """

    share: float = 0.3
    keep: int | None = None

    def __post_init__(self) -> None:
        _below_half("multi_krum", self.share)
        if self.keep is not None and self.keep < 1:
            raise UsageError(f"multi_krum's keep must be 1 or more, not {self.keep}")

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        suspects = part(self.share, len(deltas))
        found = krum_weights(deltas, weights, suspects, self.keep or len(deltas) - suspects)
        return mean_of(deltas, found), mean_of(buffers, found)


@dataclass(frozen=True, kw_only=True)
class GeometricMedian:
    """The point with the smallest weighted sum of distances to the updates (RFA).

    Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning", IEEE Transactions on Signal Processing
    2022: argmin_v Σ_k α_k ‖v − w_k‖ by the smoothed Weiszfeld algorithm. From v = Σ_k α_k w_k on, repeat
    β_k = α_k / max(ν, ‖v − w_k‖) and v = Σ_k β_k w_k / Σ_k β_k, where w_k is the delta of client k over all names
    together and α_k its weight over the sum of weights.

    The paper stops after a few steps, each of which costs it a message to every client; here they cost little, and go
    on until v rests. A distance counts as at least 1e-6 ‖w_k‖, which is as well as it is known. Where clients hold
    different names, v is averaged name by name over the holders, and ‖v − w_k‖² is taken over the names of client k
    and multiplied by D/d_k, with d_k of all D elements in them: the result minimises Σ_k α_k (d_k/D) ‖v − w_k‖. Running
    statistics are averaged with the last β_k.

    Args:
        smooth: ν, the shortest distance that is told from none.
        steps: largest number of steps.
        tolerance: v rests when it moves by no more than this part of the harmonic mean of the distances.
    """

    smooth: float = 1e-6
    steps: int = 1000
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 < self.smooth < math.inf:
            raise UsageError(f"geometric_median's smooth must be above 0, not {self.smooth}")
        if self.steps < 1:
            raise UsageError(f"geometric_median's steps must be 1 or more, not {self.steps}")
        if not 0 <= self.tolerance < math.inf:
            raise UsageError(f"geometric_median's tolerance must be 0 or more, not {self.tolerance}")

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        found = median_weights(deltas, weights, self.smooth, self.steps, self.tolerance)
        return mean_of(deltas, found), mean_of(buffers, found)


REDUCERS: Table = {
    "mean": WeightedMean,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "multi_krum": MultiKrum,
    "geometric_median": GeometricMedian,
}


BY_NAME = (Median, TrimmedMean)
"""Reducers that look at every name by itself; the others choose among whole clients."""


def build_reducer(text: str) -> Reducer | None:
    """Read a reducer such as `trimmed_mean(share=0.2)`; None for `mean`, which is folded as updates arrive."""
    target, kwargs = bind("reducer", REDUCERS, text)
    if target is WeightedMean:
        return None
    reducer: Reducer = target(**kwargs)
    return reducer
