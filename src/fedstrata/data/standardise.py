"""Inputs on one scale: each client's by its own mean and deviation, those that belong to no client by the median's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedstrata.core.lazy import torch
from fedstrata.core.parts import Parts
from fedstrata.core.rng import preserve_rng
from fedstrata.core.types import Augment, Examples
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

SAMPLED = 1024
"""Examples of a client that its mean and deviation are computed from, evenly spaced, at most."""


@dataclass(frozen=True, eq=False)
class StandardisedExamples:
    """Examples with inputs (x − mean)/deviation.

    Args:
        examples: as they are.
        mean: of each channel of an image, of each column of a table, or of all numbers together.
        deviation: likewise.
    """

    examples: Examples
    mean: Tensor
    deviation: Tensor

    @property
    def whose(self) -> str:
        """Of whom a refusal speaks."""
        return getattr(self.examples, "whose", "")

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, index: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Inputs, standardised, and labels of the examples at `index`."""
        x, y = self.examples.batch(index, augment)
        shape = (1, len(self.mean), *[1] * (x.dim() - 2)) if len(self.mean) > 1 else [1] * x.dim()
        return (x - self.mean.to(x.dtype).view(shape)) / self.deviation.to(x.dtype).view(shape), y

    def labels(self) -> Tensor:
        """All labels, in order."""
        return self.examples.labels()


def measure_inputs(examples: Examples) -> tuple[Tensor, Tensor]:
    """(mean, deviation) of a client's inputs, by channel or column; numbers that are not finite are left out.

    A column that does not vary has deviation 0.

    Raises:
        UsageError: for inputs that are no tensor of real numbers.
    """
    rows = torch.linspace(0, len(examples) - 1, min(len(examples), SAMPLED)).round().long()
    with preserve_rng():  # who reads an example may draw random numbers
        x: Any = examples.batch(rows)[0]
    if isinstance(x, Parts) or not x.is_floating_point():
        raise UsageError("standardise needs inputs that are one tensor of real numbers")
    apart = x.shape[1] if x.dim() in (2, 4) else 1
    columns = x.double().reshape(len(x), apart, -1).transpose(0, 1).reshape(apart, -1)
    there = columns.isfinite()
    known, count = columns.nan_to_num(0.0, 0.0, 0.0), there.sum(1).clamp(min=1)
    mean = known.sum(1) / count
    square = ((known - mean.unsqueeze(1)) * there).square().sum(1) / count
    return mean, square.sqrt()


@dataclass(frozen=True, eq=False)
class Standards:
    """Everybody's mean and deviation, and the median client's."""

    of_client: dict[int, tuple[Tensor, Tensor]]
    median: tuple[Tensor, Tensor]

    def apply(self, examples: Examples, client: int | None = None) -> Examples:
        """Examples of a client, or of nobody, on the common scale."""
        mean, deviation = self.median if client is None else self.of_client.get(client, self.median)
        return StandardisedExamples(examples, mean, deviation)

    def apply_measured(self, examples: Examples, like: Examples) -> Examples:
        """Examples on the common scale, by the mean and deviation of others that are like them."""
        mean, deviation = measure_inputs(like)
        return StandardisedExamples(examples, mean, torch.where(deviation > 0, deviation, self.median[1]))


def measure_clients(clients: Mapping[int, Examples]) -> Standards:
    """Everybody's mean and deviation; where a client's column does not vary, the median client's deviation, or 1.

    There must be one at least. The median over clients is column by column: a few that are on another scale do not
    move it, as they would a mean.
    """
    found = {client: measure_inputs(examples) for client, examples in clients.items()}
    mean = torch.stack([mean for mean, _ in found.values()]).median(0).values
    usual = torch.stack([deviation for _, deviation in found.values()]).median(0).values
    usual = torch.where(usual > 0, usual, 1.0)
    fitted = {client: (mean, torch.where(std > 0, std, usual)) for client, (mean, std) in found.items()}
    return Standards(fitted, (mean, usual))
