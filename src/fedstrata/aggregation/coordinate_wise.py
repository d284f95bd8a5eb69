"""Rules that look at every coordinate on its own: the median and the trimmed mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from fedstrata.aggregation.arithmetic import blocks, cast_back, check_below_half, compute_dtype, floor_share, holders_of
from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor


PAPERS = (
    Paper(
        "Dong Yin and Yudong Chen and Kannan Ramchandran and Peter Bartlett",
        "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
        "ICML",
        2018,
    ),
)


@lru_cache(maxsize=64)
def sorting_network(count: int) -> tuple[tuple[int, int], ...]:
    """Batcher's odd-even merge sort of `count` things: pairs of places to put in order, one after the other."""
    pairs = []
    sizes = [2**k for k in range((count - 1).bit_length())]
    for size in sizes:
        for gap in (s for s in reversed(sizes) if s <= size):
            for first in range(gap % size, count - gap, 2 * gap):
                for low in range(first, min(first + gap, count - gap)):
                    if low // (2 * size) == (low + gap) // (2 * size):
                        pairs.append((low, low + gap))
    return tuple(pairs)


def sort_columns(block: Tensor) -> Tensor:
    """Each column sorted, smallest first. Whole rows are compared: several times as fast as `torch.sort`."""
    rows = list(block.clone())
    spare = torch.empty_like(rows[0])
    for low, high in sorting_network(len(rows)):
        torch.minimum(rows[low], rows[high], out=spare)
        torch.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]
    return torch.stack(rows)


def reduce_by_coordinate(clients: Sequence[Tensors], reduce: Callable[[Tensor], Tensor]) -> Tensors:
    """Reduce each element on its own: `reduce` is given a column of sorted values per element, smallest first."""
    out: Tensors = {}
    for name, holders in holders_of(clients).items():
        tensors = [clients[k][name] for k in holders]
        like = tensors[0]
        flat = torch.empty(like.numel(), dtype=compute_dtype(like.dtype), device=like.device)
        for start, block in blocks(tensors, flat.dtype):
            flat[start : start + block.shape[1]] = reduce(sort_columns(block))
        out[name] = cast_back(flat, like.dtype).reshape(like.shape)
    return out


def median_of_sorted(ordered: Tensor) -> Tensor:
    """The median of sorted rows; of an even number, the mean of the middle two."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@dataclass(frozen=True, kw_only=True)
class Median:
    """The median of each coordinate, unweighted: no minority of clients can move it beyond the others' values.

    Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
    ICML 2018, Definition 1: g_j = med{x_j^i : i ∈ [m]}, with x^i the delta of client i of m.

    Of an even number of values it is the mean of the middle two. Clients count alike, whatever their weights. Every
    name has the median over the m clients that hold it. The paper takes gradients; these are changes after local
    training. Running statistics are treated like parameters.
    """

    by_name: ClassVar[bool] = True
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    trusts: ClassVar[bool] = False
    per: ClassVar[str] = "model"

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        """The median of every element, over the clients that hold it."""
        return reduce_by_coordinate(deltas, median_of_sorted), reduce_by_coordinate(buffers, median_of_sorted)


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

    by_name: ClassVar[bool] = True
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    trusts: ClassVar[bool] = False
    per: ClassVar[str] = "model"

    share: float = 0.1

    def __post_init__(self) -> None:
        check_below_half("trimmed_mean", self.share)

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        """The trimmed mean of every element, over the clients that hold it."""
        return reduce_by_coordinate(deltas, self._trimmed_mean), reduce_by_coordinate(buffers, self._trimmed_mean)

    def _trimmed_mean(self, ordered: Tensor) -> Tensor:
        drop = floor_share(self.share, len(ordered))
        return ordered[drop : len(ordered) - drop].mean(0)
