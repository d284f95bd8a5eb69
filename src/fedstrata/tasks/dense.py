"""A class for every pixel (segmentation) or for every position of a text (next_token): cross-entropy of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedstrata.core.lazy import functional as F
from fedstrata.core.lazy import torch
from fedstrata.core.task import Metric, Task
from fedstrata.core.tensors import Tensors
from fedstrata.data.labels import check_range
from fedstrata.data.targets import read_whole
from fedstrata.tasks.details import Confusion, Masks
from fedstrata.tasks.metrics import ClassCounts, check_metrics

if TYPE_CHECKING:
    from torch import Tensor

OF_PIXELS = ("miou", "dice", "accuracy")
OF_TOKENS = ("perplexity", "accuracy")


@dataclass(frozen=True, kw_only=True)
class DenseTask(Task):
    """Many classes per example, some of which count nowhere: those with the number `ignore`."""

    ignore: int

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over all that count; 0 where none does."""
        losses, weights = self.terms(outputs, targets)
        return losses.sum() / weights.sum().clamp(min=1.0)

    def count_outputs(self, targets: Tensor) -> int:
        """One per class."""
        return int(targets[targets != self.ignore].max()) + 1

    def check_targets(self, targets: Tensor, width: int, whose: str = "", index: Tensor | None = None) -> None:
        """Every class has a logit."""
        check_range(targets.masked_fill(targets == self.ignore, 0), width, whose, index)


@dataclass(frozen=True, kw_only=True)
class Segmentation(DenseTask):
    """A class for every pixel: cross-entropy over classes × pixels, judged by the mean intersection over union.

    Args:
        ignore: pixels with this number count nowhere.
        metrics: which to compute: miou, dice (both the mean over classes), accuracy (of pixels).
        primary: the one that a run is judged by.
    """

    name: ClassVar[str] = "segmentation"
    outputs: ClassVar[str] = "one tensor of logits, [rows, classes, height, width]"
    axes: ClassVar[tuple[int, ...]] = (4,)
    ignore: int = 255
    metrics: tuple[str, ...] = OF_PIXELS
    primary: str = "miou"

    def __post_init__(self) -> None:
        check_metrics(self.name, self.metrics, self.primary, OF_PIXELS)

    def terms(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of each example: the sum over its pixels that count, and their number."""
        try:
            losses = F.cross_entropy(outputs, targets, reduction="none", ignore_index=self.ignore)
        except IndexError:
            check_range(targets[targets != self.ignore], outputs.shape[1])
            raise
        return losses.flatten(1).sum(1), (targets != self.ignore).to(losses.dtype).flatten(1).sum(1)

    def build_metrics(self, width: int) -> Sequence[Metric]:
        """Counts per class."""
        return [ClassCounts(self.metrics, width, self._predict)]

    def _predict(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        counts = targets != self.ignore
        return outputs.argmax(1)[counts], targets[counts]

    def build_details(self, width: int) -> Sequence[Metric]:
        """Who is taken for whom, and a few masks."""
        return [Confusion(width, self._predict), Masks(self.ignore)]

    def guess(self, targets: Tensor, width: int) -> float | None:
        """Always the most frequent class."""
        counts = torch.bincount(targets[targets != self.ignore].flatten(), minlength=width)
        likeliest, there = int(counts.argmax()), int((counts > 0).sum())
        share = float(counts[likeliest]) / max(float(counts.sum()), 1.0)
        always = {"accuracy": share, "miou": share / max(there, 1), "dice": 2 * share / (1 + share) / max(there, 1)}
        return always.get(self.primary)

    def read_targets(self, given: Any, whose: str = "", index: Any = None) -> Tensor:
        """Whole numbers, one per pixel."""
        return read_whole(given, whose, index, axes=3)


@dataclass(frozen=True, kw_only=True)
class NextToken(DenseTask):
    """The next token at every position: cross-entropy over positions × vocabulary, judged by perplexity.

    Args:
        ignore: positions with this target, such as padding, count nowhere.
        metrics: which to compute: perplexity (the exponential of the mean loss), accuracy.
        primary: the one that a run is judged by.
    """

    name: ClassVar[str] = "next_token"
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"loss", "perplexity"})
    outputs: ClassVar[str] = "one tensor of logits, [rows, positions, vocabulary]"
    axes: ClassVar[tuple[int, ...]] = (3,)
    ignore: int = -100
    metrics: tuple[str, ...] = OF_TOKENS
    primary: str = "perplexity"

    def __post_init__(self) -> None:
        check_metrics(self.name, self.metrics, self.primary, OF_TOKENS)

    def terms(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of each example: the sum over its positions that count, and their number."""
        try:
            losses = F.cross_entropy(
                outputs.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=self.ignore
            )
        except IndexError:
            check_range(targets[targets != self.ignore], outputs.shape[2])
            raise
        return losses.view(targets.shape).sum(1), (targets != self.ignore).to(losses.dtype).sum(1)

    def build_metrics(self, width: int) -> Sequence[Metric]:
        """Sums over positions."""
        return [TokenSums(self.metrics, self)]

    def guess(self, targets: Tensor, width: int) -> float | None:
        """Every token by its frequency alone."""
        counts = torch.bincount(targets[targets != self.ignore].flatten()).double()
        if not counts.numel():
            return None
        share = counts[counts > 0] / counts.sum()
        always = {"perplexity": float((-(share * share.log()).sum()).exp()), "accuracy": float(share.max())}
        return always.get(self.primary)

    def read_targets(self, given: Any, whose: str = "", index: Any = None) -> Tensor:
        """Whole numbers, one per position."""
        return read_whole(given, whose, index, axes=2)

    def width(self, outputs: Tensor) -> int:
        """The vocabulary is the last axis."""
        return outputs.shape[-1]


@dataclass(frozen=True, eq=False)
class TokenSums:
    """Perplexity and accuracy over all positions that count."""

    names: tuple[str, ...]
    task: NextToken

    def observe(self, outputs: Tensor, targets: Tensor) -> Tensors:
        """Sums over a batch."""
        losses, counts = self.task.terms(outputs, targets)
        right = (outputs.argmax(2) == targets) & (targets != self.task.ignore)
        return {"loss": losses.double().sum(), "right": right.sum(), "count": counts.double().sum()}

    def compute(self, observed: Sequence[Tensors]) -> dict[str, float]:
        """The metrics of all batches together."""
        loss, right, count = (torch.stack([part[n] for part in observed]).sum() for n in ("loss", "right", "count"))
        found = {"perplexity": float((loss / count).exp()), "accuracy": float(right / count)}
        return {name: found[name] for name in self.names}
