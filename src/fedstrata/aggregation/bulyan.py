"""Bulyan: updates chosen by Krum again and again, and of each of their numbers those around the median."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from fedstrata.aggregation.arithmetic import floor_share, squared_distances
from fedstrata.aggregation.coordinate_wise import median_of_sorted, reduce_by_coordinate
from fedstrata.aggregation.krum import krum_order
from fedstrata.aggregation.strata import Per, check_per
from fedstrata.core.citation import Paper
from fedstrata.core.tensors import Tensors
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


PAPERS = (
    Paper(
        "El Mahdi El~Mhamdi and Rachid Guerraoui and Sébastien Rouault",
        "The Hidden Vulnerability of Distributed Learning in Byzantium",
        "ICML",
        2018,
    ),
)


def most_suspects(count: int) -> int:
    """The largest f for which n ≥ 4f + 3."""
    return max(0, (count - 3) // 4)


def select_repeatedly(distances: Tensor, suspects: int, keep: int) -> list[int]:
    """Positions of the clients that Krum chooses, each taken out before it chooses the next, in their order."""
    left = list(range(len(distances)))
    chosen = []
    for _ in range(keep):
        first = left[krum_order(distances[left][:, left], suspects)[0]] if len(left) > 1 else left[0]
        left.remove(first)
        chosen.append(first)
    return sorted(chosen)


def mean_around_median(ordered: Tensor, suspects: int) -> Tensor:
    """The mean of the values nearest to the median of sorted rows, without twice as many as are suspected."""
    keep = max(1, len(ordered) - 2 * suspects)
    nearest = (ordered - median_of_sorted(ordered)).abs().sort(dim=0, stable=True).indices[:keep]
    return ordered.gather(0, nearest).mean(0)


@dataclass(frozen=True, kw_only=True)
class Bulyan:
    """Krum's choices, one after the other, and the mean of each coordinate's values around their median.

    El Mhamdi, Guerraoui and Rouault, "The Hidden Vulnerability of Distributed Learning in Byzantium", ICML 2018: from
    all n updates Krum chooses one, which is taken out, until there are θ = n − 2f; each coordinate is then the mean of
    the β = θ − 2f values that are nearest to the median of the θ.

    f is ⌊share · n⌋, but never more than ⌊(n − 3)/4⌋, for the paper needs n ≥ 4f + 3: with fewer than 7 updates nobody
    is suspected, and this is the mean. Clients count alike, whatever their weights. Of an even number of values the
    median is the mean of the middle two. Every name has its own θ, the chosen clients that hold it. Distances are as
    Krum's. Running statistics of the chosen are treated like parameters.

    Args:
        share: f/n, the fraction of the clients that is suspected; below 0.25.
        per: `model`, or `stratum`, where each layer's update is reduced by itself.
    """

    by_name: ClassVar[bool] = False
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    trusts: ClassVar[bool] = False

    share: float = 0.2
    per: Per = "model"

    def __post_init__(self) -> None:
        if not 0 <= self.share < 0.25:
            raise UsageError(f"bulyan's share must be 0 or more and below 0.25, not {self.share}")
        check_per("bulyan", self.per)

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        """The mean around the median, of the chosen clients."""
        suspects = min(floor_share(self.share, len(deltas)), most_suspects(len(deltas)))
        chosen = list(range(len(deltas)))
        if suspects and any(tensor.numel() for delta in deltas for tensor in delta.values()):
            chosen = select_repeatedly(squared_distances(deltas), suspects, len(deltas) - 2 * suspects)
        reduce = partial(mean_around_median, suspects=suspects)
        delta = reduce_by_coordinate([deltas[k] for k in chosen], reduce)
        return delta, reduce_by_coordinate([buffers[k] for k in chosen], reduce)
