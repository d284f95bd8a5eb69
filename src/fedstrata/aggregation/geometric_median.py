"""The geometric median of the updates (RFA)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedstrata.aggregation.arithmetic import LONGEST, ROUNDING, gram_matrices
from fedstrata.aggregation.mean import mean_of
from fedstrata.aggregation.strata import Per, check_per
from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.tensors import Tensors
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


PAPERS = (
    Paper(
        "Krishna Pillutla and Sham M. Kakade and Zaid Harchaoui",
        "Robust Aggregation for Federated Learning",
        "IEEE Transactions on Signal Processing",
        2022,
        kind="journal",
    ),
)


def weiszfeld(
    inner: Tensor, holds: Tensor, sizes: Tensor, alphas: Tensor, smooth: float, steps: int, tolerance: float
) -> Tensor:
    """The clients' weights in their geometric median, which sum to 1; see GeometricMedian.

    `inner`, `holds` and `sizes` are what `gram_matrices` returns.

    What happens in the space of all parameters is computed from inner products alone: with v = Σ_k m_k w_k in a group
    of names, ‖v − w_k‖² = ⟨w_k, w_k⟩ − 2⟨w_k, v⟩ + ⟨v, v⟩. So one look at the deltas is enough for any number of steps.
    """

    def mix_weights(betas: Tensor) -> Tensor:
        mix = holds * betas
        return mix / mix.sum(1, keepdim=True)

    stretch = sizes.sum() / (sizes @ holds)
    norms = inner.diagonal(dim1=1, dim2=2)
    least = (ROUNDING * (norms.sum(0) * stretch).sqrt()).clamp(min=smooth)
    alphas = alphas / alphas.sum()
    betas, mix = alphas, mix_weights(alphas)
    for _ in range(steps):
        along = (inner @ mix[:, :, None])[:, :, 0]
        squares = norms - 2 * along + (mix * along).sum(1, keepdim=True)
        far = ((squares * holds).sum(0) * stretch).clamp(min=0).sqrt()
        betas = alphas / torch.maximum(far, least)
        before, mix = mix, mix_weights(betas)
        step = mix - before
        moved = (step[:, None] @ inner @ step[:, :, None]).sum().clamp(min=0).sqrt()
        if moved <= tolerance / betas.sum():
            break
    return betas / betas.sum()


def median_weights(
    deltas: Sequence[Tensors], weights: Sequence[float], smooth: float, steps: int, tolerance: float
) -> list[float]:
    """The clients' weights in their geometric median; 0 for a client whose delta is empty or infinitely long."""
    inner, holds, sizes = gram_matrices(deltas)
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
        smooth: ν, the shortest distance that counts as one.
        steps: largest number of steps.
        tolerance: v rests when it moves by no more than this part of the harmonic mean of the distances.
        per: `model`, or `stratum`, where each layer's updates have a median of their own.
    """

    by_name: ClassVar[bool] = False
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    trusts: ClassVar[bool] = False

    smooth: float = 1e-6
    steps: int = 1000
    tolerance: float = 1e-6
    per: Per = "model"

    def __post_init__(self) -> None:
        check_per("geometric_median", self.per)
        if not 0 < self.smooth < math.inf:
            raise UsageError(f"geometric_median's smooth must be above 0, not {self.smooth}")
        if self.steps < 1:
            raise UsageError(f"geometric_median's steps must be 1 or more, not {self.steps}")
        if not 0 <= self.tolerance < math.inf:
            raise UsageError(f"geometric_median's tolerance must be 0 or more, not {self.tolerance}")

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        """The mean, weighted by the clients' β_k."""
        found = median_weights(deltas, weights, self.smooth, self.steps, self.tolerance)
        return mean_of(deltas, found), mean_of(buffers, found)
