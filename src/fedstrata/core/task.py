"""What is learnt: a Task knows its loss, what targets look like, and the metrics that tell how good a model is.

A task is a frozen value with a string, as a technique is: `classification(label_smoothing=0.1)`. `fedstrata.tasks` has
those that can be named. Subclass `Task` for one of your own: `mean_loss` and `build_metrics` are all that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from fedstrata.core.lazy import torch
from fedstrata.core.spec import non_default_fields, text_of
from fedstrata.core.tensors import Tensors
from fedstrata.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor


class Metric(Protocol):
    """Numbers that tell how good outputs are: some tensors per batch, and what all batches' come to.

    Batches may be judged in several processes. What they leave is put together in the order of the batches, wherever
    it was computed, so that the result has the same bits everywhere. One that knows the `names` of its numbers need not
    be computed to tell them.
    """

    def observe(self, outputs: Tensor, targets: Tensor) -> Tensors:
        """What has to be known of a batch, whose tensors are on the CPU."""
        ...

    def compute(self, observed: Sequence[Tensors]) -> dict[str, Any]:
        """The numbers by name, of all batches in order."""
        ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learnt. Subclass it as a frozen, keyword-only dataclass; `mean_loss` and `build_metrics` must be there.

    Class attributes:
        name: as written in a task string.
        has_classes: True if an example is of one class and the model puts out a logit for each: what needs classes may
            run.
        has_labels: True if a target is one whole number per example, so that labels can be counted.
        lower_is_better: names of metrics of which less is better.
        outputs: what the model must put out, for messages.
        axes: how many axes these have, one of several numbers; empty for any.

    Args:
        primary: the metric that a run is judged by: the name of one that `build_metrics` gives, or `loss`.
    """

    name: ClassVar[str] = ""
    has_classes: ClassVar[bool] = False
    has_labels: ClassVar[bool] = False
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"loss"})
    outputs: ClassVar[str] = "one tensor, with a row for each input"
    axes: ClassVar[tuple[int, ...]] = ()

    primary: str = "loss"

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, which is trained on."""
        raise NotImplementedError(f"the task '{self}' has no loss")

    def terms(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, weight) of each example: the mean loss is the sum of the losses over the sum of the weights.

        Only what trains many clients at once needs it, where some rows of a batch are padding.
        """
        raise NotImplementedError(f"the task '{self}' has no loss per example")

    def sums(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """(sum of the losses, sum of the weights) of a batch: for a mean over several."""
        if not self.has_terms:
            return self.mean_loss(outputs, targets) * len(targets), float(len(targets))
        losses, weights = self.terms(outputs, targets)
        return losses.sum(), weights.sum().item()

    def padded_loss(self, rows: Tensor | None, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the real rows; of a padded step, which has none, zero.

        Args:
            rows: 1 for a real row and 0 for a padded one; None where all are real.
            outputs: the model's.
            targets: already known to fit the outputs.
        """
        if rows is None:
            return self.mean_loss(outputs, targets)
        losses, weights = self.terms(outputs, targets)
        total = (weights * rows).sum()
        return (losses * rows).sum() / torch.where(total > 0, total, torch.ones_like(total))

    def differentiate(self, outputs: Tensor, targets: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of many clients: (each one's mean loss over its real rows, the gradient of all of these for the outputs).

        Where a client has no real row both are zero. A task that knows the gradient need not ask torch's tape for it.

        Args:
            outputs: [clients, rows, …].
            targets: [clients, rows, …], already known to fit the outputs.
            real: True for a real row and False for a padded one; None where all are real.
        """
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            both = self.terms(leaf.flatten(0, 1), targets.flatten(0, 1))
            losses, weights = (t.view(targets.shape[:2]) for t in both)
            if real is not None:  # not as a product: what stands in a padded row may be no number
                losses, weights = losses.where(real, 0.0), weights.where(real, 0.0)
            total = weights.sum(1)
            means = losses.sum(1) / torch.where(total > 0, total, torch.ones_like(total))
            (gradient,) = torch.autograd.grad(means.sum(), [leaf])
        if real is not None:
            gradient[~real] = 0.0
        return means.detach(), gradient

    def build_metrics(self, width: int) -> Sequence[Metric] | Mapping[str, Any]:
        """What judges a model that tells `width` answers apart (see `width`); the loss is always there.

        Or by name: functions of all outputs and all targets, such as torchmetrics' metrics.
        """
        return ()

    def build_details(self, width: int) -> Sequence[Metric]:
        """What a report shows of the final model beside its metrics: metrics whose results are JSON, by name."""
        return ()

    def width(self, outputs: Tensor) -> int:
        """How many different answers a model tells apart: the length of axis 1, or 1 where there is none."""
        return outputs.shape[1] if outputs.dim() > 1 else 1

    def count_outputs(self, targets: Tensor) -> int:
        """How many outputs a model needs for these targets: `width` of what it puts out."""
        return targets.shape[1] if targets.dim() > 1 else 1

    def guess(self, targets: Tensor, width: int) -> float | None:
        """The primary metric of the best answer that looks at no input; None where nobody can say."""
        return None

    def read_targets(self, given: Any, whose: str = "", index: Any = None) -> Tensor:
        """Several examples' targets, which may be those at an index, as one tensor; a refusal says `whose` they are."""
        return torch.as_tensor(given)

    def check_targets(self, targets: Tensor, width: int, whose: str = "", index: Tensor | None = None) -> None:
        """Refuse targets that a model with so many outputs cannot give."""

    def check_outputs(self, outputs: Any, rows: int) -> str | None:
        """Why a model's outputs for so many inputs do not fit this task, or None."""
        fits = isinstance(outputs, torch.Tensor) and outputs.dim() >= 1 and len(outputs) == rows
        fits = fits and (not self.axes or outputs.dim() in self.axes)
        return None if fits else f"the model must return {self.outputs}"

    def check_primary(self, metrics: Iterable[str] | None) -> None:
        """Refuse to be judged by a metric that is not among those that there are; None where they are not known."""
        if metrics is None or self.primary in (known := [*metrics, "loss"]):
            return
        nearest = did_you_mean(self.primary, known)
        raise UsageError(f"the task '{self.name}' has no metric '{self.primary}' to be judged by{nearest}")

    @property
    def needs_counts(self) -> bool:
        """True if `resolve` wants to know how many examples of each class there are."""
        return False

    def resolve(self, counts: Tensor | None) -> Task:
        """The task for a federation with so many examples of each class, None where that is not known."""
        return self

    @property
    def has_terms(self) -> bool:
        """True if each example's loss is known by itself."""
        return type(self).terms is not Task.terms

    @property
    def better(self) -> Literal["higher", "lower"]:
        """Whether more of the primary metric is better, or less."""
        return "lower" if self.primary in self.lower_is_better else "higher"

    def is_better(self, one: float, other: float) -> bool:
        """True if the first primary metric is better than the second."""
        return one < other if self.better == "lower" else one > other

    def __str__(self) -> str:
        return text_of(self.name, non_default_fields(self))


def resolution_note(asked: Task, resolved: Task) -> tuple[str, ...]:
    """What a reader must know of a task whose numbers depend on the data."""
    return () if asked == resolved else (f"task: {resolved}",)
