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
