"""What the models share: checks of their arguments, and naming the children of an `nn.Sequential`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from fedstrata.core.lazy import nn
from fedstrata.errors import UsageError

Norm = Literal["batch", "group", "none"]
"""Norm layers that a model may have."""


def sequential(*children: tuple[str, nn.Module]) -> nn.Sequential:
    """An `nn.Sequential` from (name, module) pairs."""
    return nn.Sequential(OrderedDict(children))


def check_positive(model: str, **values: int | Sequence[int]) -> None:
    """Refuse arguments that are not whole numbers of at least 1."""
    for name, value in values.items():
        for number in (value,) if isinstance(value, int) else value:
            if number < 1:
                raise UsageError(f"model '{model}': {name} must be at least 1, not {number}")


def check_images(model: str, input_shape: Sequence[int], classes: int, smallest: int = 1) -> tuple[int, int, int]:
    """The shape as (channels, height, width); refused unless images of `smallest` pixels per side or more."""
    if len(input_shape) != 3:
        raise UsageError(
            f"model '{model}' takes images (channels, height, width), not inputs of shape {_text(input_shape)}"
        )
    check_positive(model, input_shape=input_shape, classes=classes)
    channels, height, width = input_shape
    if min(height, width) < smallest:
        raise UsageError(
            f"model '{model}' needs images of at least {smallest}×{smallest} pixels with these arguments, "
            f"not {height}×{width}"
        )
    return channels, height, width


def check_tokens(model: str, input_shape: Sequence[int], classes: int) -> int:
    """The length of the token sequences; refused unless the inputs are such."""
    if len(input_shape) != 1:
        raise UsageError(f"model '{model}' takes token sequences (length,), not inputs of shape {_text(input_shape)}")
    check_positive(model, input_shape=input_shape, classes=classes)
    return input_shape[0]


def _text(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) if shape else "()"
