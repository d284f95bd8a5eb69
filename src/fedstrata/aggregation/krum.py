"""Krum and Multi-Krum: the updates that are nearest to their neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedstrata.aggregation.arithmetic import check_below_half, floor_share, squared_distances
from fedstrata.aggregation.mean import mean_of
from fedstrata.aggregation.strata import Per, check_per
from fedstrata.core.citation import Paper
from fedstrata.core.tensors import Tensors
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


PAPERS = (
    Paper(
        "Peva Blanchard and El Mahdi El~Mhamdi and Rachid Guerraoui and Julien Stainer",
        "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent",
        "NeurIPS",
        2017,
    ),
)


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


def krum_weights(deltas: Sequence[Tensors], weights: Sequence[float], suspects: int, keep: int) -> list[float]:
    """The weights of the `keep` clients with the lowest scores, and 0 for all others."""
    if not any(tensor.numel() for delta in deltas for tensor in delta.values()):
        return list(weights)
    kept = set(krum_order(squared_distances(deltas), suspects)[:keep])
    return [weight if k in kept else 0.0 for k, weight in enumerate(weights)]


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
        per: `model`, or `stratum`, where each layer's update is chosen by itself.
    """

    by_name: ClassVar[bool] = False
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    trusts: ClassVar[bool] = False

    share: float = 0.3
    per: Per = "model"

    def __post_init__(self) -> None:
        check_below_half("krum", self.share)
        check_per("krum", self.per)

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        """The delta and the buffers of the chosen client."""
        found = krum_weights(deltas, weights, floor_share(self.share, len(deltas)), keep=1)
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
        per: `model`, or `stratum`, where each layer's updates are chosen by themselves.
    """

    by_name: ClassVar[bool] = False
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    trusts: ClassVar[bool] = False

    share: float = 0.3
    keep: int | None = None
    per: Per = "model"

    def __post_init__(self) -> None:
        check_below_half("multi_krum", self.share)
        check_per("multi_krum", self.per)
        if self.keep is not None and self.keep < 1:
            raise UsageError(f"multi_krum's keep must be 1 or more, not {self.keep}")

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        """The weighted mean of the chosen clients."""
        suspects = floor_share(self.share, len(deltas))
        found = krum_weights(deltas, weights, suspects, self.keep or len(deltas) - suspects)
        return mean_of(deltas, found), mean_of(buffers, found)
