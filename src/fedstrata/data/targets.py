"""Targets that are no classes: numbers, yes and no, and a whole number for every pixel or position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.core.lazy import torch
from fedstrata.data.labels import place_of
from fedstrata.errors import UsageError, one_line

if TYPE_CHECKING:
    from torch import Tensor


def read_numbers(given: Any, whose: str = "", index: Any = None) -> Tensor:
    """Finite numbers, as many for each example, in float32."""
    found = _as_tensor(given, whose, "numbers").to(torch.float32)
    if found.dim() not in (1, 2):
        raise UsageError(f"targets are one row of numbers per example{place_of(whose)}, not {_shape(found)}")
    _refuse(~found.isfinite(), found, "finite numbers", whose, index)
    return found


def read_flags(given: Any, whose: str = "", index: Any = None, *, axes: int) -> Tensor:
    """0 or 1, one per example (one axis, whole numbers) or one per label (two axes)."""
    found = _as_tensor(given, whose, "0 or 1")
    if found.dim() != axes and not (axes == 1 and found.dim() == 2 and found.shape[1] == 1):
        raise UsageError(f"targets are 0 or 1, with {axes} axes{place_of(whose)}, not {_shape(found)}")
    _refuse((found != 0) & (found != 1), found, "0 or 1", whose, index)
    return found.long().reshape(len(found), *found.shape[1:axes])


def read_whole(given: Any, whose: str = "", index: Any = None, *, axes: int) -> Tensor:
    """Whole numbers with so many axes, examples the first."""
    found = _as_tensor(given, whose, "whole numbers")
    if found.dim() != axes:
        raise UsageError(f"targets are whole numbers with {axes} axes{place_of(whose)}, not {_shape(found)}")
    if found.is_floating_point():
        _refuse(~found.isfinite() | (found.frac() != 0), found, "whole numbers", whose, index)
    return found.long()


def read_any(given: Any, whose: str = "", index: Any = None) -> Tensor:
    """Targets as they are, of whoever wants to know their shape alone."""
    return _as_tensor(given, whose, "numbers")


def _as_tensor(given: Any, whose: str, kind: str) -> Tensor:
    """One tensor, of what is one already or of a list with an entry per example."""
    try:
        if isinstance(given, list) and given and isinstance(given[0], torch.Tensor | np.ndarray):
            found = torch.stack([torch.as_tensor(one) for one in given])
        else:
            found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        why = one_line(str(error), 100)
        raise UsageError(f"targets are {kind}, the same shape for each example{place_of(whose)}: {why}") from None
    if found.is_complex():
        raise UsageError(f"targets are {kind}{place_of(whose)}, not complex numbers")
    return found


def _refuse(wrong: Tensor, found: Tensor, kind: str, whose: str, index: Any) -> None:
    """Refuse the first target that is wrong, with its place."""
    if not bool(wrong.any()):
        return
    place = tuple(int(i) for i in wrong.nonzero()[0])
    row = place[0] if index is None else int(index[place[0]])
    raise UsageError(f"targets are {kind}, not {found[place].item()}{place_of(whose, row)}")


def _shape(found: Tensor) -> str:
    return f"an array of shape {list(found.shape)}"
