"""Classification: one class per example, a logit for each, cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fedstrata.core.lazy import functional as F
from fedstrata.core.lazy import torch
from fedstrata.core.task import Metric, Task
from fedstrata.data.labels import check_range, read_classes
from fedstrata.errors import UsageError
from fedstrata.tasks.details import Calibration, Confusion, top_answer
from fedstrata.tasks.metrics import OF_CURVES, ClassCounts, check_metrics, curves, one_against_rest

if TYPE_CHECKING:
    from torch import Tensor

_NO_LABEL = -(2**62)
"""Torch leaves one label out of the loss, −100 unless another is said: here no label means that."""
COUNTED = ("accuracy", "balanced_accuracy", "f1")


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """One class per example: cross-entropy of a logit per class, judged by accuracy.

    Args:
        weights: of the classes in the loss: a number for each, or `balanced` for n / (C · n_c), with n_c the examples
            of class c in the whole federation and C the classes that somebody has; 1 for a class that nobody has. None
            weighs all examples alike. The weighted loss is Σ w_y ℓ / Σ w_y over a batch.
        label_smoothing: so much of each target is spread evenly over all classes.
        metrics: which to compute: accuracy, balanced_accuracy, f1 (the mean over classes), auroc and average_precision
            (one class against the rest, the mean over classes).
        primary: the one that a run is judged by.
    """

    name: ClassVar[str] = "classification"
    has_classes: ClassVar[bool] = True
    has_labels: ClassVar[bool] = True
    outputs: ClassVar[str] = "one tensor of logits, with a row for each input"
    axes: ClassVar[tuple[int, ...]] = (2,)
    weights: tuple[float, ...] | Literal["balanced"] | None = None
    label_smoothing: float = 0.0
    metrics: tuple[str, ...] = COUNTED
    primary: str = "accuracy"

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"the task's label_smoothing is from 0 up to less than 1, not {self.label_smoothing}")
        if isinstance(self.weights, tuple) and not (self.weights and all(0 <= w < float("inf") for w in self.weights)):
            raise UsageError(f"the task's weights are numbers from 0 on, one for each class, not {self.weights}")
        check_metrics(self.name, self.metrics, self.primary, COUNTED, OF_CURVES)

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The (weighted) mean cross-entropy; 0 where no example has a weight."""
        weights = self._weights_like(outputs)
        if weights is None:
            return self._cross_entropy(outputs, targets, "mean")
        precise = torch.promote_types(weights.dtype, torch.float32)  # a sum in bf16 has three digits
        total, weight = self._cross_entropy(outputs, targets, "sum"), weights[targets].sum(dtype=precise)
        return total / torch.where(weight > 0, weight, torch.ones_like(weight))

    def _cross_entropy(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Cross-entropy, with one sentence for a label that the model has no output for."""
        try:
            return F.cross_entropy(
                outputs,
                targets,
                weight=self._weights_like(outputs),
                reduction=reduction,
                ignore_index=_NO_LABEL,
                label_smoothing=self.label_smoothing,
            )
        except IndexError:
            check_range(targets, outputs.shape[1])
            raise

    def _weights_like(self, outputs: Tensor) -> Tensor | None:
        if self.weights is None:
            return None
        assert self.weights != "balanced", "the federation resolves its task first"
        return torch.tensor(self.weights, dtype=outputs.dtype, device=outputs.device)

    def terms(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy and weight of each example; the targets are known to be in range."""
        weights = self._weights_like(outputs)
        losses = F.cross_entropy(outputs, targets, weights, reduction="none", label_smoothing=self.label_smoothing)
        return losses, torch.ones_like(losses) if weights is None else weights[targets]

    def differentiate(self, outputs: Tensor, targets: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of −log p_y, with p the softmax of the outputs, the gradient is p − e_y: a third of the tape's time."""
        other = type(self).terms is not Classification.terms  # somebody's own loss, of which this is no gradient
        if other or self.weights is not None or self.label_smoothing:
            return super().differentiate(outputs, targets, real)
        at = targets.unsqueeze(-1)
        logs = torch.log_softmax(outputs, -1)
        losses = logs.gather(-1, at).squeeze(-1)
        gradient = logs.exp_().scatter_(-1, at, -1.0, reduce="add")
        if real is None:
            return losses.mean(1).neg_(), gradient.div_(targets.shape[1])
        rows = real.sum(1).clamp_(min=1)
        gradient = gradient.div_(rows.view(-1, 1, 1)).masked_fill_(~real.unsqueeze(-1), 0.0)
        return losses.masked_fill_(~real, 0.0).sum(1).div_(rows).neg_(), gradient

    def sums(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """Sums over a batch."""
        weights = self._weights_like(outputs)
        total = self._cross_entropy(outputs, targets, "sum")
        return total, float(len(targets)) if weights is None else weights[targets].sum().item()

    def build_metrics(self, width: int) -> Sequence[Metric]:
        """Counts per class and, where asked for, areas under curves."""
        counted = tuple(name for name in self.metrics if name in COUNTED)
        return [ClassCounts(counted, width, _predict), *curves(self.metrics, one_against_rest)]

    def build_details(self, width: int) -> Sequence[Metric]:
        """Who is taken for whom, and how sure the model is."""
        return [Confusion(width, _predict), Calibration(top_answer)]

    def count_outputs(self, targets: Tensor) -> int:
        """One per class."""
        return int(targets.max()) + 1

    def guess(self, targets: Tensor, width: int) -> float | None:
        """Always the most frequent class."""
        counts = torch.bincount(targets, minlength=width)
        always = {"accuracy": float(counts.max()) / max(len(targets), 1), "auroc": 0.5}
        always["balanced_accuracy"] = 1 / max(int((counts > 0).sum()), 1)
        return always.get(self.primary)

    def read_targets(self, given: Any, whose: str = "", index: Any = None) -> Tensor:
        """Whole numbers from 0 on, one per example."""
        return read_classes(given, whose, index)

    def check_targets(self, targets: Tensor, width: int, whose: str = "", index: Tensor | None = None) -> None:
        """Every class has a logit."""
        if isinstance(self.weights, tuple) and len(self.weights) != width:
            raise UsageError(f"the task has {len(self.weights)} weights, but the model has {width} outputs")
        check_range(targets, width, whose, index)

    @property
    def needs_counts(self) -> bool:
        """For balanced weights."""
        return self.weights == "balanced"

    def resolve(self, counts: Tensor | None) -> Classification:
        """With the numbers that `balanced` means."""
        if not self.needs_counts:
            return self
        if counts is None:
            raise UsageError(
                "the task's weights='balanced' needs everybody's labels, which are not at hand here: give the weights "
                "themselves, such as weights=(1.0, 2.5)"
            )
        each = [int(n) for n in counts]
        held = sum(n > 0 for n in each)
        return replace(self, weights=tuple(sum(each) / (held * n) if n else 1.0 for n in each))


CLASSIFICATION = Classification()


def _predict(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.argmax(1), targets
