"""FLTrust: updates count for as much as they agree with the server's own, made with examples that it trusts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedstrata.aggregation.arithmetic import blocks, cast_back
from fedstrata.aggregation.mean import mean_of
from fedstrata.aggregation.norm_clip import norm_of, shorten
from fedstrata.aggregation.strata import Per, check_per
from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.tensors import Tensors

PAPERS = (
    Paper(
        "Xiaoyu Cao and Minghong Fang and Jia Liu and Neil Zhenqiang Gong",
        "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping",
        "NDSS",
        2021,
    ),
)


def inner_product(left: Tensors, right: Tensors) -> float:
    """⟨left, right⟩ over all tensors, whose names are the same, in double precision."""
    pairs = (blocks([left[name], right[name]], torch.float64) for name in left)
    return sum(float((block[0] * block[1]).sum()) for pair in pairs for _, block in pair)


def trust(delta: Tensors, reference: Tensors) -> tuple[float, float]:
    """(ReLU(cos(Δ_k, Δ_0)), ‖Δ_0‖/‖Δ_k‖), over the names of client k; 0 for a change that cannot be measured."""
    shared = {name: reference[name] for name in delta}
    norm, own = norm_of(delta), norm_of(shared)
    if not (0 < norm < math.inf and 0 < own < math.inf):
        return 0.0, 0.0
    return max(0.0, inner_product(delta, shared) / (norm * own)), own / norm


@dataclass(frozen=True, kw_only=True)
class FLTrust:
    """The mean of updates as long as the server's own, weighted by the cosine with it; needs examples that it trusts.

    Cao, Fang, Liu and Gong, "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping", NDSS 2021:
    TS_k = ReLU(cos(Δ_k, Δ_0)), and the result is Σ TS_k (‖Δ_0‖/‖Δ_k‖) Δ_k / Σ TS_k, where Δ_0 is what the same local
    training changes on the server's own examples.

    The first update that it is given is the server's. Where nobody is trusted, nothing changes. Clients' weights are
    not used. Clients of different depth are compared over the names that they hold. Running statistics are averaged
    with the same TS_k; where nobody is trusted they are the server's own.

    Args:
        per: `model`, or `stratum`, where each layer's update is trusted by itself.
    """

    by_name: ClassVar[bool] = False
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    trusts: ClassVar[bool] = True

    per: Per = "model"

    def __post_init__(self) -> None:
        check_per("fltrust", self.per)

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        """The mean of the clients' updates, by trust in them."""
        reference, *others = deltas
        found = [trust(delta, reference) for delta in others]
        scores = [score for score, _ in found]
        scaled = [shorten(delta, factor) for delta, (_, factor) in zip(others, found, strict=True)]
        mean = {name: cast_back(t, reference[name].dtype) for name, t in mean_of(scaled, scores).items()}
        return mean, mean_of(buffers[1:], scores) if any(scores) else dict(buffers[0])
