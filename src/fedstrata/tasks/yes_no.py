"""Yes or no, once per example (binary) or once per label (multilabel): logistic loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedstrata.core.lazy import functional as F
from fedstrata.core.lazy import torch
from fedstrata.core.task import Metric, Task
from fedstrata.data.targets import read_flags
from fedstrata.errors import UsageError, positive
from fedstrata.tasks.details import Calibration, Confusion, yes_or_no
from fedstrata.tasks.metrics import OF_CURVES, balanced_accuracy, check_metrics, curves, f1

if TYPE_CHECKING:
    from torch import Tensor

AT_ONE_HALF = ("accuracy", "balanced_accuracy", "f1")
"""Metrics of answers: yes where its probability is one half or more."""


@dataclass(frozen=True, kw_only=True)
class Binary(Task):
    """Yes or no: the logistic loss of one logit, judged by the area under the ROC curve.

    Args:
        positive_weight: so many times the examples with a yes count in the loss.
        metrics: which to compute: accuracy, balanced_accuracy, f1 (of yes), auroc, average_precision.
        primary: the one that a run is judged by.
    """

    name: ClassVar[str] = "binary"
    has_labels: ClassVar[bool] = True
    outputs: ClassVar[str] = "one logit for each input, of shape [rows] or [rows, 1]"
    positive_weight: float = 1.0
    metrics: tuple[str, ...] = ("auroc", "accuracy", "balanced_accuracy", "f1", "average_precision")
    primary: str = "auroc"

    def __post_init__(self) -> None:
        positive(f"the task {self.name}", positive_weight=self.positive_weight)
        check_metrics(self.name, self.metrics, self.primary, AT_ONE_HALF, OF_CURVES)

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean logistic loss."""
        losses, weights = self.terms(outputs, targets)
        return losses.sum() / weights.sum()

    def terms(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of each example."""
        flags = targets.to(outputs.dtype)
        weight = outputs.new_tensor(self.positive_weight)
        losses = F.binary_cross_entropy_with_logits(
            outputs.reshape(targets.shape), flags, reduction="none", pos_weight=weight
        )
        losses = losses.flatten(1).mean(1) if losses.dim() > 1 else losses
        return losses, torch.ones_like(losses)

    def build_metrics(self, width: int) -> Sequence[Metric]:
        """Answers at one half, and areas under curves."""
        return [Answers(tuple(n for n in self.metrics if n in AT_ONE_HALF)), *curves(self.metrics, _columns)]

    def build_details(self, width: int) -> Sequence[Metric]:
        """Who is taken for whom, and how sure the model is."""
        return [Confusion(2, _answers), Calibration(yes_or_no)]

    def guess(self, targets: Tensor, width: int) -> float | None:
        """The same answer for everybody."""
        share = float(targets.double().mean())
        always = {"auroc": 0.5, "accuracy": max(share, 1 - share), "balanced_accuracy": 0.5, "average_precision": share}
        return always.get(self.primary)

    def read_targets(self, given: Any, whose: str = "", index: Any = None) -> Tensor:
        """0 or 1 per example."""
        return read_flags(given, whose, index, axes=1)

    def check_outputs(self, outputs: Any, rows: int) -> str | None:
        """One logit per example."""
        wrong = super().check_outputs(outputs, rows)
        return wrong or (None if outputs.numel() == rows else f"the model must return {self.outputs}")


@dataclass(frozen=True, kw_only=True)
class Multilabel(Binary):
    """Yes or no for each of several labels: the logistic loss of a logit per label, judged by mean average precision.

    Args:
        positive_weight: so many times a yes counts in the loss.
        metrics: which to compute, each the mean over labels: accuracy, balanced_accuracy, f1, auroc, average_precision.
        primary: the one that a run is judged by.
    """

    name: ClassVar[str] = "multilabel"
    has_labels: ClassVar[bool] = False
    outputs: ClassVar[str] = "one tensor of logits, with a row for each input and a column for each label"
    metrics: tuple[str, ...] = ("average_precision", "auroc", "f1", "accuracy")
    primary: str = "average_precision"

    def build_details(self, width: int) -> Sequence[Metric]:
        """Nothing: labels do not exclude each other."""
        return ()

    def guess(self, targets: Tensor, width: int) -> float | None:
        """The same answer for everybody, label by label."""
        found = [Binary.guess(self, column, 1) for column in targets.unbind(1)]
        return None if None in found else sum(f for f in found if f is not None) / len(found)

    def read_targets(self, given: Any, whose: str = "", index: Any = None) -> Tensor:
        """A row of 0 and 1 per example."""
        return read_flags(given, whose, index, axes=2)

    def check_targets(self, targets: Tensor, width: int, whose: str = "", index: Tensor | None = None) -> None:
        """Every label has a logit."""
        if targets.shape[1] != width:
            raise UsageError(f"there are {targets.shape[1]} labels per example, but the model has {width} outputs")

    def check_outputs(self, outputs: Any, rows: int) -> str | None:
        """A row of logits per example."""
        wrong = Task.check_outputs(self, outputs, rows)
        return wrong or (None if outputs.dim() == 2 else f"the model must return {self.outputs}")


@dataclass(frozen=True, eq=False)
class Answers:
    """Metrics of yes and no, the mean over labels; F1 is that of yes alone."""

    names: tuple[str, ...]

    def observe(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Per label: how often no was right, yes was right, no and yes were true, no and yes were said."""
        true = targets.reshape(len(targets), -1).bool()
        said = outputs.reshape(true.shape) >= 0
        parts = {"right": (said & true, ~said & ~true), "true": (true, ~true), "predicted": (said, ~said)}
        return {name: torch.stack([no.sum(0), yes.sum(0)], 1) for name, (yes, no) in parts.items()}

    def compute(self, observed: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """The metrics of all counts together."""
        totals = (torch.stack([part[n] for part in observed]).sum(0) for n in ("right", "true", "predicted"))
        found = [_of_label(*label) for label in zip(*totals, strict=True)]
        return {name: _mean_defined([one[name] for one in found]) for name in self.names}


def _mean_defined(values: Sequence[float]) -> float:
    """The mean of those that are numbers: F1 is none where a label is neither true nor predicted."""
    there = [value for value in values if not math.isnan(value)]
    return sum(there) / len(there) if there else math.nan


def _of_label(right: Tensor, true: Tensor, predicted: Tensor) -> dict[str, float]:
    return {
        "accuracy": int(right.sum()) / int(true.sum()),
        "balanced_accuracy": balanced_accuracy(right, true, predicted),
        "f1": f1(right[1:], true[1:], predicted[1:]),
    }


def _answers(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return (outputs.reshape(len(targets)) >= 0).long(), targets


def _columns(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.reshape(len(targets), -1), targets.reshape(len(targets), -1)
