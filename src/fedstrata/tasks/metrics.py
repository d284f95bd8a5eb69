"""Metrics: counts and sums that add up over batches, and whatever needs all outputs at once.

Counts are whole numbers and sums are float64, taken in the order of the batches: a metric has the same bits however
many processes judged the batches. Areas under curves come from torchmetrics, which takes seconds to import and is
loaded by the process that needs the number, when it needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedstrata.core.lazy import functional as F
from fedstrata.core.lazy import torch
from fedstrata.core.task import Metric
from fedstrata.core.tensors import Tensors
from fedstrata.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class ClassCounts:
    """Metrics of predicted classes: per class, how often it was right, how often it was there, how often predicted.

    Args:
        names: of the metrics, from `OF_COUNTS`.
        classes: how many there are.
        predict: (outputs, targets) → (predicted classes, true classes), flat and without what does not count.
    """

    names: tuple[str, ...]
    classes: int
    predict: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def observe(self, outputs: Tensor, targets: Tensor) -> Tensors:
        """The counts of a batch."""
        predicted, true = self.predict(outputs, targets)
        parts = {"right": true[predicted == true], "true": true, "predicted": predicted}
        return {name: torch.bincount(part, minlength=self.classes) for name, part in parts.items()}

    def compute(self, observed: Sequence[Tensors]) -> dict[str, float]:
        """The metrics of all counts together."""
        total = [torch.stack([part[name] for part in observed]).sum(0) for name in ("right", "true", "predicted")]
        return {name: OF_COUNTS[name](*total) for name in self.names}


def accuracy(right: Tensor, true: Tensor, predicted: Tensor) -> float:
    """The share that is right."""
    count = int(true.sum())
    return int(right.sum()) / count if count else float("nan")


def balanced_accuracy(right: Tensor, true: Tensor, predicted: Tensor) -> float:
    """The mean over classes that are there of the share of each that is right."""
    return _mean_ratio(right, true)


def f1(right: Tensor, true: Tensor, predicted: Tensor) -> float:
    """The mean over classes of 2·right / (true + predicted): F1, and for pixels the Dice coefficient."""
    return _mean_ratio(2 * right, true + predicted)


def miou(right: Tensor, true: Tensor, predicted: Tensor) -> float:
    """The mean over classes of the intersection of true and predicted over their union."""
    return _mean_ratio(right, true + predicted - right)


def _mean_ratio(part: Tensor, whole: Tensor) -> float:
    """The mean of part / whole, in float64, over classes where there is a whole."""
    there = whole > 0
    return float((part[there].double() / whole[there].double()).mean()) if bool(there.any()) else float("nan")


OF_COUNTS: dict[str, Callable[[Tensor, Tensor, Tensor], float]] = {
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "f1": f1,
    "miou": miou,
    "dice": f1,
}
"""What is computed of per class counts, by name."""


@dataclass(frozen=True, eq=False)
class ErrorSums:
    """Mean absolute error, root of the mean squared error and R² of numbers, each the mean over a model's outputs.

    R² = 1 − Σ(y − ŷ)² / Σ(y − ȳ)². The spread about the mean is put together from each batch's own (Chan et al.), which
    loses no digits where the mean is large.
    """

    names: tuple[str, ...]

    def observe(self, outputs: Tensor, targets: Tensor) -> Tensors:
        """Count, sums of absolute and squared errors, mean and spread of the targets, per output."""
        true = targets.double().reshape(len(targets), -1)
        error = outputs.double().reshape(len(targets), -1) - true
        mean = true.mean(0)
        return {
            "count": torch.tensor(len(true), dtype=torch.float64),
            "absolute": error.abs().sum(0),
            "squared": error.square().sum(0),
            "mean": mean,
            "spread": (true - mean).square().sum(0),
        }

    def compute(self, observed: Sequence[Tensors]) -> dict[str, float]:
        """The metrics of all batches together."""
        count = mean = spread = torch.zeros((), dtype=torch.float64)
        for part in observed:
            both, apart = count + part["count"], part["mean"] - mean
            mean = mean + apart * part["count"] / both
            spread = spread + part["spread"] + apart.square() * count * part["count"] / both
            count = both
        squared = torch.stack([part["squared"] for part in observed]).sum(0)
        absolute = torch.stack([part["absolute"] for part in observed]).sum(0)
        found = {
            "mae": absolute / count,
            "rmse": (squared / count).sqrt(),
            "r2": 1 - squared / spread,
        }
        return {name: float(found[name].mean()) for name in self.names}


@dataclass(frozen=True, eq=False)
class WholeOutputs:
    """Metrics of all outputs and all targets at once: they are kept, and judged together.

    Args:
        functions: name → function of (outputs, targets), such as a metric of torchmetrics.
    """

    functions: Mapping[str, Callable[[Tensor, Tensor], Any]]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the metrics."""
        return tuple(self.functions)

    def observe(self, outputs: Tensor, targets: Tensor) -> Tensors:
        """The batch itself."""
        plain = outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
        return {"outputs": plain.clone(), "targets": targets.clone()}

    def compute(self, observed: Sequence[Tensors]) -> dict[str, float]:
        """The metrics of all batches together."""
        outputs, targets = (torch.cat([part[name] for part in observed]) for name in ("outputs", "targets"))
        return {name: float(_fresh(function)(outputs, targets)) for name, function in self.functions.items()}


def _fresh(function: Any) -> Any:
    """A metric of torchmetrics keeps what it has seen: let it forget that."""
    if hasattr(function, "reset"):
        function.reset()
    return function


def auroc(scores: Tensor, targets: Tensor) -> float:
    """Area under the receiver operating characteristic, the mean over columns in which there is yes and no."""
    from torchmetrics.functional.classification import binary_auroc

    return _mean_over_columns(binary_auroc, scores, targets)


def average_precision(scores: Tensor, targets: Tensor) -> float:
    """Area under precision over recall, the mean over columns in which there is yes and no."""
    from torchmetrics.functional.classification import binary_average_precision

    return _mean_over_columns(binary_average_precision, scores, targets)


def _mean_over_columns(area: Callable[..., Tensor], scores: Tensor, targets: Tensor) -> float:
    if bool(scores.isnan().any()):
        return float("nan")
    yes = targets.long()
    both = ((yes.amax(0) == 1) & (yes.amin(0) == 0)).nonzero().flatten()
    found = [float(area(_ranks(scores[:, c]), yes[:, c], validate_args=False)) for c in both]
    return sum(found) / len(found) if found else float("nan")


def _ranks(scores: Tensor) -> Tensor:
    """Numbers from 0 to below 1 in the order of the scores: a curve depends on nothing else.

    Probabilities would not do. That of a logit above 37 is 1, and all such examples would be alike.
    """
    places: Tensor = torch.unique(scores, return_inverse=True)[1]
    return places.double() / len(scores)


OF_CURVES: dict[str, Callable[[Tensor, Tensor], float]] = {"auroc": auroc, "average_precision": average_precision}
"""What is computed of all scores, by name."""


def curves(names: Sequence[str], read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[Metric]:
    """The metrics of curves among some names; `read` makes (scores, yes or no) per column of outputs."""

    def judge(name: str) -> Callable[[Tensor, Tensor], float]:
        return lambda outputs, targets: OF_CURVES[name](*read(outputs.double(), targets))

    wanted = {name: judge(name) for name in names if name in OF_CURVES}
    return [WholeOutputs(wanted)] if wanted else []


def one_against_rest(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of classes and their numbers as (scores, yes or no), a column for each class.

    A score is log p/(1 − p), with 1 − p summed up from the other classes where p is nearly 1.
    """
    log_p = outputs.log_softmax(1)
    top = outputs.argmax(1, keepdim=True)
    others = outputs.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
    odds = (log_p - torch.log1p(-log_p.exp())).scatter(1, top, outputs.gather(1, top) - others)
    return odds, F.one_hot(targets, outputs.shape[1])


def check_metrics(task: str, wanted: Sequence[str], primary: str, *tables: Mapping[str, Any] | Sequence[str]) -> None:
    """Refuse a metric that a task does not know, and a primary one that it is not asked for."""
    known = [name for table in tables for name in table]
    for name in wanted:
        if name not in known:
            raise UsageError(f"the task '{task}' has no metric '{name}'{did_you_mean(name, known)}")
    if primary not in (*wanted, "loss"):
        raise UsageError(f"the task '{task}' has no metric '{primary}' among {', '.join(wanted)} to be judged by")
