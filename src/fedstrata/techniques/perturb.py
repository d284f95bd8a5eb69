"""Perturb: Gaussian noise on what clients send, for questions of robustness; from InCo Aggregation's §5.3.

Chan, Zhou, Zhao, Jiang and Ngai, "Internal Cross-Layer Gradients for Extending Homogeneity to Heterogeneity in
Federated Learning", ICLR 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.core.lazy import torch
from fedstrata.core.technique import ClientView, Hooks, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.errors import not_negative


def noise_like(delta: Tensors, share: float, rng: torch.Generator) -> Tensors:
    """N(0, (share·std(Δ))²) for every number, std over the tensor; none where there is but one number."""
    return {
        name: torch.randn(d.shape, generator=rng, dtype=d.dtype).to(d.device) * (share * d.std(correction=0))
        for name, d in delta.items()
    }


@dataclass(frozen=True, kw_only=True)
class Perturb(Technique):
    """Noise on every client's change before it is sent: Δ_k + N(0, (noise·std(Δ_k))²), tensor by tensor.

    Args:
        noise: the noise's standard deviation as a share of the change's own; 0 is FedAvg.

    What clients remember of their own training is without noise. Running statistics have none.
    """

    name: ClassVar[str] = "perturb"
    noise: float = 0.1

    def __post_init__(self) -> None:
        not_negative("perturb", noise=self.noise)

    def local(self, view: ClientView) -> Hooks:
        """Noise on what is sent."""
        if not self.noise or not view.assignment.trains:
            return Hooks()
        return Hooks(upload=lambda delta: noise_like(delta, self.noise, view.rng))
