"""Tensors that are mostly zeros: the other numbers, and a bit for every number that says where they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedstrata.core.bits import count_bytes, find_bits, pack_bits
from fedstrata.wire.packing import AXES, WireError


def pack_sparse(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(the numbers that are not zero, in order; bytes that say where they are)."""
    flat = tensor.reshape(-1).cpu()
    places = flat.nonzero().view(-1)
    return flat[places], pack_bits(places, len(flat))


def unpack_sparse(values: Tensor, packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor again; it takes at most eight numbers for each byte of places that came.

    Raises:
        WireError: if the three do not fit each other.
    """
    sound = values.dim() == packed.dim() == 1 and packed.dtype == torch.uint8 and len(shape) <= AXES
    if not sound or min(shape, default=0) < 0 or count_bytes(math.prod(shape)) != len(packed):
        raise WireError("the message has sparse numbers of another shape than it says")
    places, length = find_bits(packed), math.prod(shape)
    if len(places) != len(values) or (len(places) and int(places[-1]) >= length):
        raise WireError("the message has another number of sparse numbers than of places")
    return torch.zeros(length, dtype=values.dtype).index_copy_(0, places, values).view(*shape)
