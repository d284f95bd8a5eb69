"""The lowest layer that trains, moved once per visit: what earlier steps changed comes in by products of inputs.

Most numbers of a small dense network are in the weight of its first layer, and few rows of a client meet it. To read
and write that weight in every step is dearer than to reckon with what it would have become.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


class GramLayer:
    """A linear layer of many clients who begin with the same weights, move by plain SGD, and train nothing below it.

    With inputs x and gradients g of its outputs, row by row, a step moves W to W − lr·gᵀx and b to b − lr·Σg. So after
    some steps its outputs for other inputs z are z·Wᵀ + b − lr·(z·xᵀ + 1)·g, with W and b as they were at the beginning
    and x and g of all rows so far. The first part is one product for all clients and steps; the delta, −lr·gᵀx, is
    taken once, when the visit ends.

    Args:
        weight, bias: the parameters' names; there may be no bias.
        params: the parameters that all clients begin with.
        trains: those that move; the weight does.
        x: the layer's inputs [clients, steps, rows, inputs].
        rate: of learning.
    """

    def __init__(
        self, weight: str, bias: str, params: Mapping[str, Tensor], trains: Container[str], x: Tensor, rate: float
    ) -> None:
        self._weight, self._bias, self._bias_moves = weight, bias, bias in trains
        self._rate, self._steps = rate, x
        self._x = x.flatten(1, 2)
        at_first = F.linear(self._x, params[weight], params.get(bias))
        self._gradients = torch.empty_like(at_first)
        self._at_first = torch.unflatten(at_first, 1, x.shape[1:3])

    def run(self, step: int, clients: int) -> Tensor:
        """What the layer puts out in a step, for the first clients."""
        out, x = self._at_first.select(1, step), self._steps.select(1, step)
        seen = step * x.shape[1]
        before, g = self._x.narrow(1, 0, seen), self._gradients.narrow(1, 0, seen)
        if clients < x.shape[0]:
            out, x, before, g = (t[:clients] for t in (out, x, before, g))
        if not step:
            return out
        gram = torch.bmm(x, before.mT)
        return torch.baddbmm(out, gram.add_(1) if self._bias_moves else gram, g, alpha=-self._rate)

    def take(self, step: int, gradients: Tensor) -> None:
        """Keep the gradients of what was put out in a step."""
        rows = gradients.shape[1]
        self._gradients[: len(gradients), step * rows : (step + 1) * rows] = gradients

    def write_delta(self, steps: Sequence[int], into: Mapping[str, Tensor]) -> frozenset[str]:
        """Write what the steps changed, where each client, those with most first, took so many: the names."""
        for clients, taken in _runs(steps):
            seen = slice(0, taken * self._steps.shape[2])
            g, x = self._gradients[clients, seen], self._x[clients, seen]
            out = into[self._weight][clients]
            torch.baddbmm(out, g.mT, x, beta=0, alpha=-self._rate, out=out)
            if self._bias_moves:
                torch.mul(g.sum(1), -self._rate, out=into[self._bias][clients])
        return frozenset((self._weight, self._bias) if self._bias_moves else (self._weight,))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """(where the same number stands several times after each other, the number)."""
    begin = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[begin]:
            yield slice(begin, place), numbers[begin]
            begin = place


MIN_WEIGHT = 1 << 15
"""Numbers of a weight below which it stays in the processor's nearest memory anyway."""


def saves_work(x: Tensor, weight: Tensor) -> bool:
    """True if it is quicker to move a weight once than in every step, with inputs [clients, steps, rows, …].

    Products of inputs grow with the square of the rows. Measured with 64 and 256 outputs, 784 inputs and batches of 8
    to 32: 0.4 to 0.9 of the time where the rows of a visit are half as many as the outputs, as much or more where they
    are as many.
    """
    steps, rows = x.shape[1:3]
    return weight.numel() >= MIN_WEIGHT and 2 * steps * rows <= len(weight)
