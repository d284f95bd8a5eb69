"""Classification: cross-entropy, with one sentence for a label that the model has no output for."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fedstrata.data.labels import check_range

_NO_LABEL = -(2**62)
"""Torch leaves one label out of the loss, −100 unless another is said: here no label means that."""


def task_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy, with one sentence for a label that the model has no output for."""
    try:
        return F.cross_entropy(logits, labels, reduction=reduction, ignore_index=_NO_LABEL)
    except IndexError:
        check_range(labels, logits.shape[1])
        raise


def padded_task_loss(rows: Tensor | None, logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of the real rows; of a padded step, which has none, zero.

    Args:
        rows: 1 for a real row and 0 for a padded one; None where all are real.
        logits: the model's outputs.
        labels: already known to be in range.
    """
    if rows is None:
        return F.cross_entropy(logits, labels)
    each = F.cross_entropy(logits, labels, reduction="none")
    return (each * rows).sum() / rows.sum().clamp(min=1.0)
