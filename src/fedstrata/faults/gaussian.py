"""Gaussian noise in place of a change.

Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent",
NeurIPS 2017, Section 5, where its deviation is 200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.aggregation.krum import PAPERS
from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.types import Absence, Update, replace_fields
from fedstrata.errors import not_negative
from fedstrata.faults.fault import SHARE, Fault, VisitView


@dataclass(frozen=True, kw_only=True)
class Gaussian(Fault):
    """Noise alone: N(0, sigma²) is sent in the place of every number.

    Args:
        sigma: the noise's standard deviation.
        share, clients, begin: whom it hits, and from which round on.
    """

    name: ClassVar[str] = "gaussian"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    sigma: float = 1.0
    share: float = SHARE
    clients: tuple[int, ...] = ()
    begin: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative("gaussian", sigma=self.sigma)

    def change(self, update: Update, view: VisitView) -> Update | Absence:
        """N(0, sigma²)."""
        noise = {
            n: (torch.randn(t.shape, generator=view.rng, dtype=torch.float64) * self.sigma).to(t.dtype)
            for n, t in update.delta.items()
        }
        return replace_fields(update, delta=noise, finite=False)
