"""Which examples go together: the order of batches in training and in evaluation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedstrata.core.rng import generator
from fedstrata.core.technique import Buffers
from fedstrata.core.types import Examples, Work


def eval_batches(examples: Examples, policy: Buffers, batch_size: int = 512) -> list[Tensor]:
    """The examples' indices, batch by batch.

    Under the policy `drop` norm layers use the statistics of each batch; batches are drawn in a fixed random order
    then, so that a test set sorted by class is judged like any other.
    """
    by_batch = policy == "drop" and len(examples) > 1
    order = torch.randperm(len(examples), generator=generator("evaluate")) if by_batch else torch.arange(len(examples))
    parts = list(torch.split(order, batch_size))
    if by_batch and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def batch_sizes(examples: int, work: Work, drop_single: bool) -> list[int]:
    """How many examples each step of a visit takes: an epoch's last batch may be smaller.

    `drop_single` leaves out a last batch of one example, which normalisation over the batch cannot use.
    """
    full, rest = divmod(examples, work.batch_size)
    epoch = [work.batch_size] * full + ([rest] if rest else [])
    if drop_single:
        epoch = [size for size in epoch if size > 1]
    if not epoch:
        return []
    if work.steps is None:
        return epoch * work.epochs
    return (epoch * -(-work.steps // len(epoch)))[: work.steps]


def batches(examples: int, work: Work, rng: torch.Generator, drop_single: bool) -> Iterator[Tensor]:
    """Index tensors, one per step: a fresh permutation every epoch, split into batches."""
    sizes = batch_sizes(examples, work, drop_single)
    epoch = sizes[: _count_batches(sizes, examples)]
    rest = examples - sum(epoch)
    parts = [*epoch, rest] if rest else epoch
    for taken in range(0, len(sizes), max(len(epoch), 1)):
        order = torch.randperm(examples, generator=rng)
        yield from order.split_with_sizes(parts)[: min(len(epoch), len(sizes) - taken)]


def _count_batches(sizes: list[int], examples: int) -> int:
    """How many of the first batches a single pass over the examples has."""
    total = 0
    for number, size in enumerate(sizes):
        total += size
        if total > examples:
            return number
    return len(sizes)
