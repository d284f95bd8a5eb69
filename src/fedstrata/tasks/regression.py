"""Regression: one number or several per example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from fedstrata.core.lazy import functional as F
from fedstrata.core.lazy import torch
from fedstrata.core.task import Metric, Task
from fedstrata.data.targets import read_numbers
from fedstrata.errors import UsageError, one_of, positive
from fedstrata.tasks.details import Predictions
from fedstrata.tasks.metrics import ErrorSums, check_metrics

if TYPE_CHECKING:
    from torch import Tensor

Loss = Literal["mse", "l1", "huber"]
KNOWN = ("rmse", "mae", "r2")


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """One number or several per example, judged by the root of the mean squared error.

    Args:
        loss: what is trained on: `mse` (y − ŷ)², `l1` |y − ŷ|, or `huber`, which is half the former within ±delta and
            grows linearly beyond.
        delta: of the Huber loss.
        metrics: which to compute: rmse, mae, r2.
        primary: the one that a run is judged by.
    """

    name: ClassVar[str] = "regression"
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"loss", "rmse", "mae"})
    outputs: ClassVar[str] = "one tensor of numbers, with a row for each input"
    axes: ClassVar[tuple[int, ...]] = (1, 2)
    loss: Loss = "mse"
    delta: float = 1.0
    metrics: tuple[str, ...] = KNOWN
    primary: str = "rmse"

    def __post_init__(self) -> None:
        one_of("the task regression", get_args(Loss), loss=self.loss)
        positive("the task regression", delta=self.delta)
        check_metrics(self.name, self.metrics, self.primary, KNOWN)

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over examples and numbers."""
        return self._errors(outputs, targets, "mean")

    def _errors(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        precise = torch.promote_types(outputs.dtype, torch.float32)  # of bf16's outputs: targets would lose digits
        made, true = outputs.reshape(targets.shape).to(precise), targets.to(precise)
        if self.loss == "mse":
            return F.mse_loss(made, true, reduction=reduction)
        if self.loss == "l1":
            return F.l1_loss(made, true, reduction=reduction)
        return F.huber_loss(made, true, reduction=reduction, delta=self.delta)

    def terms(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of each example, the mean over its numbers."""
        losses = self._errors(outputs, targets, "none")
        losses = losses.flatten(1).mean(1) if losses.dim() > 1 else losses
        return losses, torch.ones_like(losses)

    def build_metrics(self, width: int) -> Sequence[Metric]:
        """Of sums of errors."""
        return [ErrorSums(self.metrics)]

    def build_details(self, width: int) -> Sequence[Metric]:
        """Predicted against true."""
        return [Predictions()]

    def guess(self, targets: Tensor, width: int) -> float | None:
        """Always the mean or, for the mean absolute error, the median."""
        numbers = targets.double().reshape(len(targets), -1)
        always = {
            "rmse": numbers.std(0, correction=0),
            "mae": (numbers - numbers.median(0).values).abs().mean(0),
            "r2": torch.zeros(1),
        }
        return float(always[self.primary].mean()) if self.primary in always else None

    def read_targets(self, given: Any, whose: str = "", index: Any = None) -> Tensor:
        """Finite numbers, as many for each example."""
        return read_numbers(given, whose, index)

    def check_targets(self, targets: Tensor, width: int, whose: str = "", index: Tensor | None = None) -> None:
        """A number for each output."""
        numbers = targets[:1].numel() if len(targets) else width
        if numbers != width:
            raise UsageError(f"there are {numbers} targets per example, but the model has {width} outputs")
