"""Batches of texts are as long as their longest text, and not as the longest text of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

STEP = 8
"""Texts of a batch are padded to a multiple of so many tokens, so that few shapes occur."""


def cut_padding(x: Any, y: Tensor, mask: str) -> tuple[Any, Tensor]:
    """Inputs, and targets where each position has one, cut to the longest text among them, up to the next `STEP`."""
    real = x.tensors[mask]
    whole = real.shape[1]
    longest = int(real.sum(1).max()) if len(real) else whole
    width = min(-(-max(longest, 1) // STEP) * STEP, whole)
    if width == whole:
        return x, y
    cut = x.map(lambda part: part[:, :width] if part.dim() > 1 and part.shape[1] == whole else part)
    return cut, y[:, :width] if y.dim() > 1 and y.shape[1] == whole else y
