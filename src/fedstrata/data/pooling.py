"""Clients' own small tensors as parts of one, so that batches of many clients are gathered in one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedstrata.core.lazy import torch
from fedstrata.core.parts import Parts
from fedstrata.core.types import Examples
from fedstrata.data.examples import Split, TensorExamples

POOLED_CLIENT, POOLED_ALL = 1 << 20, 1 << 30
"""Bytes of a client's inputs on average, and of everybody's together, up to which they are copied into one tensor."""


def pool_examples(clients: Sequence[Examples]) -> Sequence[Examples]:
    """Many clients' own small tensors as parts of one; others stay as they are: to copy them takes more than it saves.

    Everything else is as before, every bit of training included.
    """
    first = clients[0] if len(clients) > 1 and not isinstance(clients, Split) else None
    if not isinstance(first, TensorExamples) or isinstance(first.x, Parts):
        return clients
    alike: list[TensorExamples] = []
    for data in clients:
        if not isinstance(data, TensorExamples) or data.index is not None or not _is_alike(data, first):
            return clients
        alike.append(data)
    if len({id(data.x) for data in alike}) < len(alike):  # they share memory already
        return clients
    size = sum(data.x.nbytes + data.y.nbytes for data in alike)
    if size > min(POOLED_ALL, POOLED_CLIENT * len(alike)):
        return clients
    whole = replace(first, x=torch.cat([data.x for data in alike]), y=torch.cat([data.y for data in alike]))
    return whole.split(torch.split(torch.arange(len(whole)), [len(data) for data in alike]))


def _is_alike(data: TensorExamples, other: TensorExamples) -> bool:
    """True if two clients' tensors can be parts of one."""
    if isinstance(data.x, Parts) or (data.mean, data.std) != (other.mean, other.std):
        return False
    pairs = ((data.x, other.x), (data.y, other.y))
    return all(a.dtype == b.dtype and a.shape[1:] == b.shape[1:] and a.device == b.device for a, b in pairs)
