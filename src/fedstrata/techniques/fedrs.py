"""FedRS: a softmax that is restricted for the classes that a client lacks.

Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.technique import ClientView, Hooks, Technique
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


PAPERS = (
    Paper(
        "Xin-Chun Li and De-Chuan Zhan",
        "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data",
        "KDD",
        2021,
    ),
)


def restriction(counts: Tensor, alpha: float) -> Tensor:
    """The factor of each class's logit: α where the client has no example of it, else 1."""
    return torch.where(counts > 0, 1.0, alpha)


@dataclass(frozen=True, kw_only=True)
class FedRS(Technique):
    """A restricted softmax: in local training the logits of classes that the client lacks are multiplied by α.

    Args:
        alpha: α, from 0 to 1; 1 is FedAvg. The paper uses 0.5 and 0.9.
    """

    name: ClassVar[str] = "fedrs"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    needs_classes: ClassVar[bool] = True
    vectorises: ClassVar[bool] = True
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"fedrs's alpha must lie between 0 and 1, not {self.alpha}")

    def local(self, view: ClientView) -> Hooks:
        """Logits times α for the classes that the client lacks."""
        if self.alpha == 1 or not view.assignment.trains:
            return Hooks()
        factors = restriction(view.counts(), self.alpha)
        return Hooks(output=lambda batch: batch.logits * factors.to(batch.logits))
