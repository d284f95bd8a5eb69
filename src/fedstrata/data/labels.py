"""Labels are whole numbers from 0 on, one per example: whatever type they come in, nothing is rounded or guessed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.core.lazy import torch
from fedstrata.core.parts import as_tensor
from fedstrata.errors import UsageError, one_line

if TYPE_CHECKING:
    from torch import Tensor


def class_of(label: Any, whose: str = "", row: int | None = None) -> int:
    """One example's label; a refusal says `whose` example it is, and its number."""
    if type(label) is int and label >= 0:
        return label
    number = label.item() if isinstance(label, torch.Tensor | np.ndarray | np.generic) and _one(label) else label
    whole = isinstance(number, int) or (isinstance(number, float) and number.is_integer())
    if not whole or number < 0:
        raise _refusal(label if number is label else number, whose, row)
    return int(number)


def class_numbers(labels: Any, whose: str = "", index: Tensor | None = None, signed: bool = False) -> Tensor:
    """Several examples' labels, which may be those at an index, as one row of int64.

    With `signed`, those below 0 are left to whoever trains on them.
    """
    try:
        given = as_tensor(labels)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # such as words
        raise _refusal(labels[0] if len(labels) else labels, whose, None) from None
    if given.dim() != 1 or given.is_complex():
        raise UsageError(f"labels are whole numbers, one for each example{place_of(whose, None)}, not {_shape(given)}")
    found = given.long()
    if given.is_floating_point():
        wrong = ~given.isfinite() | (given.frac() != 0) | (given.abs() >= 2.0**62)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise _refusal(given[row].item(), whose, _at(row, index))
    if not signed and len(found) and int(found.min()) < 0:
        row = int((found < 0).nonzero()[0])
        raise _refusal(given[row].item(), whose, _at(row, index))
    return found


def read_classes(labels: Any, whose: str = "", index: Any = None) -> Tensor:
    """Several examples' labels: a tensor or array of them, or a list with an entry per example, whatever it is."""
    if index is None or not isinstance(labels, list):
        return class_numbers(labels, whose, index)
    places = [int(place) for place in index]
    found = [class_of(label, whose, place) for label, place in zip(labels, places, strict=True)]
    return torch.tensor(found, dtype=torch.int64)


class UnknownClass(UsageError):
    """A label that a model has no output for; `at` makes the sentence that says where it is."""

    def __init__(self, label: int, outputs: int) -> None:
        super().__init__(_unknown(label, outputs, ""))
        self.label, self.outputs = label, outputs

    def __reduce__(self) -> Any:  # on its way from a worker
        return type(self), (self.label, self.outputs)

    def at(self, whose: str, labels: Tensor, index: Tensor | None = None) -> UsageError:
        """Where the label is among others, which may be those at an index."""
        row = int((labels == self.label).nonzero()[0, 0])
        return UsageError(_unknown(self.label, self.outputs, place_of(whose, _at(row, index))))


def check_range(labels: Tensor, outputs: int, whose: str = "", index: Tensor | None = None) -> None:
    """Refuse labels that a model has no output for."""
    if not labels.numel():
        return
    low, high = (int(end) for end in torch.aminmax(labels))
    if low < 0 or high >= outputs:
        unknown = UnknownClass(high if high >= outputs else low, outputs)
        raise unknown.at(whose, labels, index) if whose or index is not None else unknown


def _unknown(label: int, outputs: int, where: str) -> str:
    return f"there is a label {label}{where}, but the model has {outputs} outputs"


def _at(row: int, index: Tensor | None) -> int:
    return row if index is None else int(index[row])


def _one(label: Any) -> bool:
    return bool(math.prod(label.shape) == 1)


def _refusal(label: Any, whose: str, row: int | None) -> UsageError:
    shown = _shape(label) if isinstance(label, torch.Tensor | np.ndarray) else one_line(repr(label), 60)
    return UsageError(f"labels are whole numbers from 0 on, one for each example, not {shown}{place_of(whose, row)}")


def _shape(label: Any) -> str:
    return f"an array of shape {list(label.shape)}"


def place_of(whose: str, row: int | None = None) -> str:
    """` (client 3, example 7)`, as far as it is known."""
    parts = [whose] * bool(whose) + ([] if row is None else [f"example {row}"])
    return f" ({', '.join(parts)})" if parts else ""
