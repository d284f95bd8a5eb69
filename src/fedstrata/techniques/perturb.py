"""Perturb: Gaussian noise on what clients send, for questions of robustness; from InCo Aggregation's §5.3.

Chan, Zhou, Zhao, Jiang and Ngai, "Internal Cross-Layer Gradients for Extending Homogeneity to Heterogeneity in
Federated Learning", ICLR 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.technique import ClientView, Hooks, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.errors import not_negative
from fedstrata.techniques.inco import PAPERS

if TYPE_CHECKING:
    from torch import Tensor


def deviation(delta: Tensor, axes: int) -> Tensor:
    """std(Δ) over the last axes of a tensor, which stay with one place each; 0 where there is but one number."""
    if not axes:
        return torch.zeros_like(delta)
    return delta.std(dim=tuple(range(-axes, 0)), correction=0, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class Perturb(Technique):
    """Noise on every client's change before it is sent: Δ_k + N(0, (noise·std(Δ_k))²), tensor by tensor.

    Args:
        noise: the noise's standard deviation as a share of the change's own; 0 is FedAvg.

    What clients remember of their own training is without noise. Running statistics have none.
    """

    name: ClassVar[str] = "perturb"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    vectorises: ClassVar[bool] = True
    stacks: ClassVar[bool] = True
    noise: float = 0.1

    def __post_init__(self) -> None:
        not_negative("perturb", noise=self.noise)

    def prepare(self, view: ClientView) -> Tensors:
        """N(0, 1) for every number that is sent."""
        params = view.assignment.params
        if not self.noise or not view.assignment.trains:
            return {}
        return {n: view.normal(params[n].shape, params[n].dtype) for n in view.assignment.uploads}

    def local(self, view: ClientView) -> Hooks:
        """Noise on what is sent."""
        if not self.noise or not view.assignment.trains:
            return Hooks()
        axes = {n: p.dim() for n, p in view.assignment.params.items()}

        def upload(delta: Tensors) -> Tensors:
            drawn = view.prepared
            return {n: drawn[n].to(d.device) * (self.noise * deviation(d, axes[n])) for n, d in delta.items()}

        return Hooks(upload=upload)
