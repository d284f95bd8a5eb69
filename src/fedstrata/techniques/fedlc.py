"""FedLC: logits calibrated by how many examples of each class a client has.

Zhang, Li, Li, Xu, Wu, Ding and Wu, "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.technique import Batch, ClientView, Hooks, Technique
from fedstrata.errors import not_negative, one_of

if TYPE_CHECKING:
    from torch import Tensor

Denominator = Literal["all", "others"]

PAPERS = (
    Paper(
        "Jie Zhang and Zhiqi Li and Bo Li and Jianghe Xu and Shuang Wu and Shouhong Ding and Chao Wu",
        "Federated Learning with Label Distribution Skew via Logits Calibration",
        "ICML",
        2022,
    ),
)

LEFT_OUT = 3e4
"""Exponentials of numbers so much lower are 0 in every precision; half precision still holds it."""


def margins(counts: Tensor, tau: float) -> Tensor:
    """What is taken from each class's logit: τ·n_c^(−1/4), and for a class without examples so much that it is out.

    Its exponential is then 0. It is not ∞, since a row that only fills a batch up may carry the label of such a class,
    and 0 · ∞ would be no number.
    """
    return torch.where(counts > 0, tau * counts.clamp(min=1.0).pow(-0.25), LEFT_OUT)


def without_label(logits: Tensor, labels: Tensor) -> Tensor:
    """Row by row log Σ_{i≠y} e^{z_i} − log Σ_i e^{z_i}: what takes the true class out of a cross-entropy."""
    own = labels[:, None] == torch.arange(logits.shape[1], device=labels.device)
    return logits.masked_fill(own, -torch.inf).logsumexp(1) - logits.logsumexp(1)


@dataclass(frozen=True, kw_only=True)
class FedLC(Technique):
    """Calibrated logits: in local training logit_c − τ·n_c^(−1/4), with n_c the client's examples of class c.

    With z_c = f_c(x) − τ·n_c^(−1/4) the loss is −log(e^{z_y} / Σ_i e^{z_i}), the cross-entropy of calibrated logits, as
    the paper's abstract has it. Classes that the client lacks are left out of the sum: there the margin is infinite.

    Args:
        tau: τ, the strength of the margin; 0 is no calibration at all, which is FedAvg.
        denominator: what the sum is over: `all` classes, or all `others` than y, as the paper's equation is printed.
            That loss has no lower bound (its gradient for z_y is −1, however sure the model is), and training with it
            collapsed or diverged in all our runs. A client of one class has no others, and does not move.

    Deviation: `all` instead of the printed Σ_{i≠y}. We know of no code by the authors; public implementations
    (FL-bench, fluke) sum over all classes, too, and FL-bench's author reports that training collapses without the true
    class.
    """

    name: ClassVar[str] = "fedlc"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    vectorises: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    refuses: ClassVar[dict[str, str]] = {
        "fedrs": "fedlc leaves the classes that a client lacks out of the softmax, and fedrs has nothing left to scale",
    }
    tau: float = 1.0
    denominator: Denominator = "all"

    def __post_init__(self) -> None:
        not_negative("fedlc", tau=self.tau)
        one_of("fedlc", get_args(Denominator), denominator=self.denominator)

    def local(self, view: ClientView) -> Hooks:
        """Calibrated logits and, without the true class, what takes it out of the loss."""
        others = self.denominator == "others"
        if not view.assignment.trains or not (self.tau or others):
            return Hooks()
        counts = view.counts()
        margin = margins(counts, self.tau)
        several = (counts > 0).sum() > 1

        def loss(batch: Batch) -> Tensor:
            value = batch.mean(without_label(batch.logits[: len(batch.y)], batch.y))
            return torch.where(several.to(value.device), value, torch.zeros_like(value))

        return Hooks(
            output=lambda batch: batch.logits - margin.to(batch.logits),
            loss=loss if others and len(counts) > 1 else None,
        )
