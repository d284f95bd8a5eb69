"""Dropout for clients that are trained at once: each one's random numbers as it would draw them alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn


def is_dropout(module: nn.Module) -> TypeGuard[nn.Dropout]:
    """True for a layer that sets single numbers to zero at random, and leaves some."""
    return type(module) is nn.Dropout and 0 < module.p < 1


@dataclass(frozen=True)
class DropoutLayer:
    """A dropout layer of a chain.

    Args:
        name: the module's.
        share: of the numbers that it sets to zero.
        shape: of one row of what goes into it.
    """

    name: str
    share: float
    shape: tuple[int, ...]

    def draw(self, rows: int) -> Tensor:
        """What it multiplies so many rows with, drawn as torch's own layer draws it."""
        return torch.empty(rows, *self.shape).bernoulli_(1 - self.share).div_(1 - self.share)


class DropoutMasks:
    """What dropout multiplies the rows of all steps with, one tensor [clients, steps, rows, …] per call of a layer.

    Args:
        calls: the layers that a step calls, in order; all of them again in a second pass.
        shape: clients, steps and rows.
    """

    def __init__(self, calls: Sequence[DropoutLayer], shape: tuple[int, int, int]) -> None:
        self._calls = calls
        self.tensors = [torch.zeros(*shape, *layer.shape) for layer in calls]

    def draw(self, client: int, step: int, rows: int) -> None:
        """Draw those of a step from torch's own generator, which is where the client's stream is."""
        for layer, masks in zip(self._calls, self.tensors, strict=True):
            masks[client, step, :rows] = layer.draw(rows)


@contextmanager
def count_calls(model: nn.Module) -> Iterator[list[int]]:
    """Inside, the number in the list is how often a model that is trained has called its dropout layers."""
    count = [0]

    def note(module: nn.Module, args: Any, output: Any) -> None:
        count[0] += module.training

    handles = [m.register_forward_hook(note) for m in model.modules() if is_dropout(m)]
    try:
        yield count
    finally:
        for handle in handles:
            handle.remove()
