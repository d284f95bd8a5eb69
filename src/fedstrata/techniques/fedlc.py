"""FedLC: logits calibrated by how many examples of each class a client has.

Zhang, Li, Li, Xu, Wu, Ding and Wu, "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedstrata.core import ClientView, Hooks, Technique
from fedstrata.errors import not_negative
from fedstrata.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

LEFT_OUT = 3e4
"""Exponentials of numbers so much lower are 0 in every precision; half precision still holds it."""


def margins(counts: Tensor, tau: float) -> Tensor:
    """What is taken from each class's logit: τ·n_c^(−1/4), and for a class without examples so much that it is out.

    Its exponential is then 0. It is not ∞, since a row that only fills a batch up may carry the label of such a class,
    and 0 · ∞ would be no number.
    """
    return torch.where(counts > 0, tau * counts.clamp(min=1.0).pow(-0.25), LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class FedLC(Technique):
    """Calibrated logits: in local training logit_c − τ·n_c^(−1/4), with n_c the client's examples of class c.

    Classes that the client lacks are left out of the softmax: there the margin is infinite.

    Args:
        tau: τ, the strength of the margin; 0 is no calibration at all, which is FedAvg.
    """

    name: ClassVar[str] = "fedlc"
    refuses: ClassVar[dict[str, str]] = {
        "fedrs": "fedlc leaves the classes that a client lacks out of the softmax, and fedrs has nothing left to scale",
    }
    vectorises: ClassVar[bool] = True
    tau: float = 1.0

    def __post_init__(self) -> None:
        not_negative("fedlc", tau=self.tau)

    def local(self, view: ClientView) -> Hooks:
        if not self.tau or not view.assignment.trains:
            return Hooks()
        margin = margins(view.counts(), self.tau)
        return Hooks(output=lambda batch: batch.logits - margin.to(batch.logits))
