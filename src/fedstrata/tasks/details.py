"""What a report shows of the final model beside its metrics: who is taken for whom, how sure it is, what it misses.

Each is a Metric whose result is JSON instead of numbers: parts of evaluation.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedstrata.core.lazy import torch
from fedstrata.core.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor

MOST_CLASSES = 100
"""A confusion matrix of more classes is not written."""
BINS = 10
POINTS = 1000
"""Examples of a regression that are shown, at most."""
MASKS, SIDE = 4, 64
"""Examples of a segmentation that are shown, and the most pixels per side."""


@dataclass(frozen=True, eq=False)
class Confusion:
    """How often each true class (a row) is taken for each class (a column)."""

    classes: int
    predict: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def observe(self, outputs: Tensor, targets: Tensor) -> Tensors:
        """The counts of a batch; nothing where there are too many classes to look at."""
        if self.classes > MOST_CLASSES:
            return {}
        predicted, true = self.predict(outputs, targets)
        flat = torch.bincount(true * self.classes + predicted, minlength=self.classes**2)
        return {"counts": flat.view(self.classes, self.classes)}

    def compute(self, observed: Sequence[Tensors]) -> dict[str, Any]:
        """The counts of all batches."""
        if self.classes > MOST_CLASSES:
            return {}
        return {"confusion": torch.stack([part["counts"] for part in observed]).sum(0).tolist()}


@dataclass(frozen=True, eq=False)
class Calibration:
    """Reliability: examples by how sure the model is of its answer, and how often it is right then.

    ECE = Σ_b (n_b / n) · |right_b − confidence_b| over equally wide bins of confidence (Guo et al., ICML 2017).

    Args:
        judge: (outputs, targets) → (confidence in the answer, whether it is right).
    """

    judge: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def observe(self, outputs: Tensor, targets: Tensor) -> Tensors:
        """Per bin: examples, sum of confidences, right answers."""
        confidence, right = self.judge(outputs.double(), targets)
        at = (confidence * BINS).long().clamp(0, BINS - 1)
        parts = {"count": torch.ones_like(confidence), "confidence": confidence, "right": right.double()}
        return {name: torch.zeros(BINS, dtype=torch.float64).index_add_(0, at, v) for name, v in parts.items()}

    def compute(self, observed: Sequence[Tensors]) -> dict[str, Any]:
        """Means per bin, null for an empty one, and the expected calibration error."""
        count, sure, right = (torch.stack([p[n] for p in observed]).sum(0) for n in ("count", "confidence", "right"))
        apart = float((right - sure).abs().sum() / count.sum())
        means = [[float(v / n) if n else None for v, n in zip(t, count, strict=True)] for t in (sure, right)]
        found = {"count": [int(n) for n in count], "confidence": means[0], "right": means[1], "ece": round(apart, 6)}
        return {"calibration": found}


@dataclass(frozen=True, eq=False)
class Predictions:
    """True numbers and predicted ones, of the first outputs of the first examples."""

    def observe(self, outputs: Tensor, targets: Tensor) -> Tensors:
        """The first column of a batch."""
        rows = len(targets)
        return {
            "true": targets.reshape(rows, -1)[:, 0].clone(),
            "made": outputs.reshape(rows, -1)[:, 0].float().clone(),
        }

    def compute(self, observed: Sequence[Tensors]) -> dict[str, Any]:
        """As many as a picture can show."""
        true, made = (torch.cat([part[name] for part in observed])[:POINTS] for name in ("true", "made"))
        return {"predictions": {"true": _short(true), "made": _short(made)}}


@dataclass(frozen=True, eq=False)
class Masks:
    """A few examples' true and predicted classes, pixel by pixel; pixels with the true class `ignore` are null."""

    ignore: int

    def observe(self, outputs: Tensor, targets: Tensor) -> Tensors:
        """The first few of a batch."""
        step = -(-max(targets.shape[1:]) // SIDE)
        made = outputs[:MASKS].argmax(1)
        return {"true": targets[:MASKS, ::step, ::step].clone(), "made": made[:, ::step, ::step].clone()}

    def compute(self, observed: Sequence[Tensors]) -> dict[str, Any]:
        """Of the first batch."""
        true = [
            [[None if n == self.ignore else n for n in row] for row in mask] for mask in observed[0]["true"].tolist()
        ]
        return {"masks": {"true": true, "made": observed[0]["made"].tolist()}}


def _short(values: Tensor) -> list[float]:
    """With the digits that a screen shows."""
    return [float(f"{value:.6g}") for value in values.tolist()]


def top_answer(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits of classes: the largest probability, and whether it is the true class's."""
    confidence, answer = outputs.softmax(1).max(1)
    return confidence, answer == targets


def yes_or_no(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of one logit: the probability of the answer, which is one half or more, and whether it is right."""
    yes = outputs.reshape(len(targets)).sigmoid()
    return torch.maximum(yes, 1 - yes), (yes >= 0.5) == targets.bool()
