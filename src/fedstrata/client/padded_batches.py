"""The batches of many clients in one tensor, padded to one shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedstrata.client.visit import ClientVisit, owner_of
from fedstrata.core.parts import Parts, zeros_of
from fedstrata.core.rng import derive, generator, seed_global
from fedstrata.core.types import Examples
from fedstrata.data.batching import batches
from fedstrata.data.examples import TensorExamples

COMPILED_STEPS = 16
"""Visits of more steps are not compiled: the compiler takes them apart, and would take minutes."""


@dataclass(eq=False)
class PaddedBatches:
    """The batches of many clients: inputs [clients, steps, rows, …], which rows are real, and each one's steps."""

    x: Tensor
    y: Tensor
    rows: Tensor | None
    steps: list[int]

    @property
    def longest(self) -> int:
        """Steps that all clients go through, those with fewer on padding."""
        return self.y.shape[1]


def draw_padded(visits: Sequence[ClientVisit], sizes: Sequence[Sequence[int]], compiles: bool) -> PaddedBatches:
    """Every client's batches, drawn from its own random streams as if it were alone, and padded to one shape.

    Args:
        visits: of the clients.
        sizes: the sizes of each one's batches.
        compiles: True if what they go through is compiled, for each shape on its own: there are few shapes then.
    """
    steps, width = [len(row) for row in sizes], max(max(row) for row in sizes)
    full = all(min(row) == width for row in sizes) and len(set(steps)) == 1
    longest = max(steps)
    if compiles and not full and longest <= COMPILED_STEPS:
        longest = 1 << (longest - 1).bit_length()
    shape = (len(sizes), longest, width)
    rows = None if full else torch.zeros(shape)
    pool = _find_pool([visit.data for visit in visits]) if visits[0].context.augment is None else None
    draw = _draw_each(visits, sizes, shape, rows) if pool is None else _draw_from_pool(visits, sizes, pool, shape, rows)
    return PaddedBatches(*draw, rows, steps)


def _draw_from_pool(
    visits: Sequence[ClientVisit],
    sizes: Sequence[Sequence[int]],
    pool: TensorExamples,
    shape: tuple[int, int, int],
    rows: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(inputs, targets), where one tensor holds everybody's examples: all batches are gathered from it in one go."""
    index = torch.zeros(shape, dtype=torch.int64)
    rng = torch.Generator()
    for c, visit in enumerate(visits):
        a, examples = visit.assignment, visit.data
        order = list(batches(len(examples), a.work, rng.manual_seed(derive(a.seed, "order")), False))
        mine = examples.index if isinstance(examples, TensorExamples) else None
        flat = order[0] if len(order) == 1 else torch.cat(order)
        flat = flat if mine is None else mine[flat]
        if rows is None:
            index[c] = flat.view(shape[1:])
            continue
        for s, part in enumerate(torch.split(flat, list(sizes[c]))):
            index[c, s, : len(part)], rows[c, s, : len(part)] = part, 1.0
    x, y = pool.batch(index.view(-1))
    inputs: Any = x.unflatten(0, shape) if isinstance(x, Parts) else torch.unflatten(x, 0, shape)
    return inputs, torch.unflatten(y, 0, shape)


def _draw_each(
    visits: Sequence[ClientVisit], sizes: Sequence[Sequence[int]], shape: tuple[int, int, int], rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(inputs, targets), client by client."""
    inputs: Any = None
    targets: Any = None
    for c, visit in enumerate(visits):
        x, y = _read_visit(visit)
        if inputs is None:
            inputs, targets = zeros_of(x, *shape), zeros_of(y, *shape)
        if rows is None:
            inputs[c] = x.unflatten(0, shape[1:])
            targets[c] = torch.unflatten(y, 0, shape[1:])
            continue
        for s, (some, theirs) in enumerate(zip(*(torch.split(t, list(sizes[c])) for t in (x, y)), strict=True)):
            inputs[c, s, : len(theirs)], targets[c, s, : len(theirs)], rows[c, s, : len(theirs)] = some, theirs, 1.0
    return inputs, targets


def _read_visit(visit: ClientVisit) -> tuple[Any, Tensor]:
    """The batches of one client after each other."""
    a, examples, context = visit.assignment, visit.data, visit.context
    order = list(batches(len(examples), a.work, generator(a.seed, "order"), False))
    if isinstance(examples, TensorExamples) and context.augment is None:  # nothing is drawn, and targets were checked
        return examples.batch(torch.cat(order))
    seed_global(derive(a.seed, "train"), context.device, everything=not isinstance(examples, TensorExamples))
    read = []
    for part in order:
        x, y = examples.batch(part, context.augment)
        context.task.check_targets(y, visit.replica.width, owner_of(examples, a.client), part)
        read.append((x, y))
    xs, ys = zip(*read, strict=True)
    return torch.cat(xs), torch.cat(ys)


def _find_pool(data: Sequence[Examples]) -> TensorExamples | None:
    """The tensors that all clients' examples are parts of, or None."""
    first = data[0]
    if not isinstance(first, TensorExamples):
        return None
    same = all(isinstance(d, TensorExamples) and d.x is first.x and d.y is first.y for d in data)
    return replace(first, index=None) if same else None
