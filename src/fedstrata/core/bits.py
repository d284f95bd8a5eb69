"""Places in a vector as one bit for each of its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

BITS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Of a byte, the first one first."""


def count_bytes(length: int) -> int:
    """How many bytes hold a bit for each number of a vector."""
    return -(-length // 8)


def pack_bits(places: Tensor, length: int) -> Tensor:
    """Bytes in which the bits at these places of a vector are set."""
    bits = torch.zeros(count_bytes(length) * 8, dtype=torch.uint8)
    bits[places] = 1
    return (bits.view(-1, 8) * torch.tensor(BITS, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def find_bits(packed: Tensor) -> Tensor:
    """The places of the bits that are set, in order."""
    return (packed[:, None] & torch.tensor(BITS, dtype=torch.uint8)).view(-1).nonzero().view(-1)
