"""Norm clipping: no update counts for more than its length allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from fedstrata.aggregation.arithmetic import blocks, cast_back, compute_dtype
from fedstrata.aggregation.coordinate_wise import median_of_sorted, reduce_by_coordinate
from fedstrata.aggregation.mean import mean_of
from fedstrata.aggregation.strata import Per, check_per
from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.tensors import Tensors
from fedstrata.errors import positive

PAPERS = (
    Paper(
        "Ziteng Sun and Peter Kairouz and Ananda Theertha Suresh and H. Brendan McMahan",
        "Can You Really Backdoor Federated Learning?",
        "arXiv",
        2019,
        arxiv="1911.07963",
    ),
)


def norm_of(delta: Tensors) -> float:
    """The Euclidean norm of all tensors together, in double precision."""
    squares = (block.square().sum() for tensor in delta.values() for _, block in blocks([tensor], torch.float64))
    return math.sqrt(sum(float(square) for square in squares))


def shorten(delta: Tensors, factor: float) -> Tensors:
    """factor · delta, in the types to compute in."""
    return {name: tensor.to(compute_dtype(tensor.dtype)) * factor for name, tensor in delta.items()}


@dataclass(frozen=True, kw_only=True)
class NormClip:
    """The weighted mean of updates that are shortened to one norm where they are longer.

    Sun, Kairouz, Suresh and McMahan, "Can You Really Backdoor Federated Learning?", 2019: Σ n_k Δ_k / max(1, ‖Δ_k‖/M),
    over Σ n_k.

    It bounds what one client can do in a round, and no more: many small lies add up. Running statistics are values,
    whose length says nothing: they have the median of each coordinate.

    Args:
        limit: M, the largest norm; None for the median of the norms of the round's updates.
        per: `model`, or `stratum`, where each layer's update is shortened by itself.
    """

    by_name: ClassVar[bool] = False
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    trusts: ClassVar[bool] = False

    limit: float | None = None
    per: Per = "model"

    def __post_init__(self) -> None:
        if self.limit is not None:
            positive("norm_clip", limit=self.limit)
        check_per("norm_clip", self.per)

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        """The weighted mean of the clipped updates."""
        norms = [norm_of(delta) for delta in deltas]
        limit = median(norms) if self.limit is None else self.limit
        clipped = [
            shorten(delta, limit / norm if norm > limit else 1.0) for delta, norm in zip(deltas, norms, strict=True)
        ]
        dtypes = {name: tensor.dtype for delta in deltas for name, tensor in delta.items()}
        mean = {name: cast_back(tensor, dtypes[name]) for name, tensor in mean_of(clipped, weights).items()}
        return mean, reduce_by_coordinate(buffers, median_of_sorted)
