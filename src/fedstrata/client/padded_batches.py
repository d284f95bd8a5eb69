"""The batches of many clients in one tensor, padded to one shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedstrata.client.dropout import DropoutLayer, DropoutMasks
from fedstrata.client.group import ClientGroup
from fedstrata.client.visit import owner_of
from fedstrata.core.parts import Parts, zeros_of
from fedstrata.core.rng import derive, seed_global
from fedstrata.data.examples import Split, TensorExamples
from fedstrata.system.devices import to_device

COMPILED_STEPS = 16
"""Visits of more steps are not compiled: the compiler takes them apart, and would take minutes."""


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The batches of one step, of some clients: `PaddedBatches` without its axis of steps."""

    x: Tensor
    y: Tensor
    rows: Tensor | None
    masks: Sequence[Tensor]


@dataclass(eq=False)
class PaddedBatches:
    """The batches of many clients: inputs [clients, steps, rows, …], which rows are real, and each one's steps.

    `masks` are what dropout multiplies with, in the order in which a step asks for them.
    """

    x: Tensor
    y: Tensor
    rows: Tensor | None
    steps: list[int]
    masks: Sequence[Tensor] = ()

    @property
    def longest(self) -> int:
        """Steps that all clients go through, those with fewer on padding."""
        return self.y.shape[1]

    def cut(self, step: int, clients: int) -> StepBatch:
        """The batches of a step, of the first clients."""

        def some(tensor: Tensor) -> Tensor:
            there = tensor.select(1, step)
            return there if clients == len(there) else there[:clients]

        rows = None if self.rows is None else some(self.rows)
        return StepBatch(some(self.x), some(self.y), rows, [some(mask) for mask in self.masks])


def draw_padded(
    group: ClientGroup,
    compiles: bool,
    dropouts: Sequence[DropoutLayer] = (),
    below: Callable[[Tensor], Tensor] | None = None,
) -> PaddedBatches:
    """Every client's batches, drawn from its own random streams as if it were alone, and padded to one shape.

    Args:
        group: the clients.
        compiles: True if what they go through is compiled, for each shape on its own: there are few shapes then.
        dropouts: the dropout layers that a step calls, in order.
        below: what inputs go through, once for each example; the examples are parts of one tensor then.
    """
    steps, sizes = group.steps, {tuple(row) for row in group.batches}
    width, longest = max(max(row) for row in sizes), max(steps)
    full = len(sizes) == 1 and min(next(iter(sizes))) == width
    if compiles and not full and longest <= COMPILED_STEPS:
        longest = 1 << (longest - 1).bit_length()
    shape = (len(group), longest, width)
    rows = None if full else torch.zeros(shape)
    masks = DropoutMasks(dropouts, shape)
    pool = find_pool(group) if group.context.augment is None else None
    if pool is not None and below is not None:
        pool = _run_once(group, *pool, below)
    if pool is None:
        drawn = _draw_each(group, shape, rows, masks)
    else:
        drawn = _draw_from_pool(group, *pool, shape, rows)
        for client, seed in enumerate(group.seeds if dropouts else ()):
            _draw_masks(masks, client, seed, group)
    device = group.context.device
    x, y = (to_device(part, device) for part in drawn)
    held = [to_device(mask, device) for mask in masks.tensors]
    return PaddedBatches(x, y, None if rows is None else to_device(rows, device), steps, held)


def _draw_masks(masks: DropoutMasks, client: int, seed: int, group: ClientGroup) -> None:
    """Draw a client's dropout, where nothing else is drawn while it trains."""
    seed_global(derive(seed, "train"), group.context.device, everything=False)
    for step, size in enumerate(group.batches[client]):
        masks.draw(client, step, size)


FindPlaces = Callable[[Sequence[int], Sequence[Tensor]], Tensor]
"""(clients, places among each one's own examples) → places in the pool, client after client."""


def _run_once(
    group: ClientGroup, pool: TensorExamples, places: FindPlaces, below: Callable[[Tensor], Tensor]
) -> tuple[TensorExamples, FindPlaces]:
    """A pool of what comes of the inputs of all examples of these clients, and of no others."""
    everything = [torch.arange(count) for count in group.examples_of_each]
    x, y = pool.batch(places(group.clients, everything))
    own = TensorExamples(below(x), y).split(torch.split(torch.arange(len(y)), group.examples_of_each))
    return own.pool, lambda clients, orders: own.places(range(len(orders)), orders)


def _draw_from_pool(
    group: ClientGroup, pool: TensorExamples, places: FindPlaces, shape: tuple[int, int, int], rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(inputs, targets), where one tensor holds everybody's examples: all batches are gathered from it in one go."""
    orders = list(_draw_orders(group))
    index = places(group.clients, orders)
    if rows is not None:
        parts = torch.split(index, [len(order) for order in orders])
        index = torch.empty(shape, dtype=torch.int64)
        for c, (part, sizes) in enumerate(zip(parts, group.batches, strict=True)):
            index[c] = part[0]  # padded with an example of its own: nobody else's may get in, whatever is in it
            _pad(index[c], part, sizes, rows[c])
    x, y = pool.batch(index.view(-1))
    inputs: Any = x.unflatten(0, shape) if isinstance(x, Parts) else torch.unflatten(x, 0, shape)
    return inputs, torch.unflatten(y, 0, shape)


def _pad(into: Tensor, flat: Tensor, sizes: Sequence[int], rows: Tensor) -> None:
    """Lay one client's batches, which come after each other, into a block of [steps, rows]."""
    width, step = into.shape[1], 0
    while step < len(sizes):  # full batches in one go
        many = step
        while many < len(sizes) and sizes[many] == width:
            many += 1
        count = (many - step) * width or sizes[step]
        end = max(many, step + 1)
        part, flat = flat[:count], flat[count:]
        if many > step:
            into[step:end], rows[step:end] = part.view(end - step, width), 1.0
        else:
            into[step, :count], rows[step, :count] = part, 1.0
        step = end


def _draw_orders(group: ClientGroup) -> Iterator[Tensor]:
    """The places of each client's examples, batch after batch: what `batches` gives, in one tensor."""
    rng, work = torch.Generator(), group.template.work
    for seed, examples, sizes in zip(group.seeds, group.examples_of_each, group.batches, strict=True):
        rng.manual_seed(derive(seed, "order"))
        count = sum(sizes)
        passes = [torch.randperm(examples, generator=rng) for _ in range(-(-count // examples))]
        flat = passes[0] if len(passes) == 1 else torch.cat(passes)
        if work.steps is not None and len(flat) > count:
            flat = flat[:count]
        yield flat


def _draw_each(
    group: ClientGroup, shape: tuple[int, int, int], rows: Tensor | None, masks: DropoutMasks
) -> tuple[Tensor, Tensor]:
    """(inputs, targets), client by client."""
    inputs: Any = None
    targets: Any = None
    for c, order in enumerate(_draw_orders(group)):
        x, y = _read_visit(group, c, order, masks)
        if inputs is None:
            inputs, targets = zeros_of(x, *shape), zeros_of(y, *shape)
        if rows is None:
            inputs[c] = x.unflatten(0, shape[1:])
            targets[c] = torch.unflatten(y, 0, shape[1:])
            continue
        sizes = group.batches[c]
        for s, (some, theirs) in enumerate(zip(*(torch.split(t, sizes) for t in (x, y)), strict=True)):
            inputs[c, s, : len(theirs)], targets[c, s, : len(theirs)], rows[c, s, : len(theirs)] = some, theirs, 1.0
    return inputs, targets


def _read_visit(group: ClientGroup, client: int, order: Tensor, masks: DropoutMasks) -> tuple[Any, Tensor]:
    """The batches of one client after each other; what dropout draws comes after each batch's own random numbers."""
    visit, sizes, context = group.visit(client), group.batches[client], group.context
    a, examples = visit.assignment, visit.data
    if isinstance(examples, TensorExamples) and context.augment is None:  # nothing is drawn, and targets were checked
        if masks.tensors:
            _draw_masks(masks, client, a.seed, group)
        return examples.batch(order)
    seed_global(derive(a.seed, "train"), context.device, everything=not isinstance(examples, TensorExamples))
    read = []
    for step, part in enumerate(torch.split(order, list(sizes))):
        x, y = examples.batch(part, context.augment)
        context.task.check_targets(y, visit.replica.width, owner_of(examples, a.client), part)
        read.append((x, y))
        masks.draw(client, step, len(part))
    xs, ys = zip(*read, strict=True)
    return torch.cat(xs), torch.cat(ys)


def find_pool(group: ClientGroup) -> tuple[TensorExamples, FindPlaces] | None:
    """The tensors that all clients' examples are parts of, and where each one's are; None if they share none."""
    held = group.examples
    if isinstance(held, Split):
        return held.pool, held.places
    data = {client: held[client] for client in group.clients}
    first = data[group.clients[0]]
    if not isinstance(first, TensorExamples):
        return None
    if not all(isinstance(d, TensorExamples) and d.x is first.x and d.y is first.y for d in data.values()):
        return None

    def places(clients: Sequence[int], orders: Sequence[Tensor]) -> Tensor:
        held = [data[client].index for client in clients]  # type: ignore[attr-defined]
        return torch.cat([order if index is None else index[order] for index, order in zip(held, orders, strict=True)])

    return replace(first, index=None), places
