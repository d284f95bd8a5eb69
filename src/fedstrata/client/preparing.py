"""What techniques prepare for clients that are trained at once: from one pass over everybody's examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fedstrata.client.dense import known_chain
from fedstrata.client.group import ClientGroup, SharedAssignment, UnreadableExamples, shared_answers
from fedstrata.client.hooks import open_view
from fedstrata.client.padded_batches import find_pool
from fedstrata.client.personal import is_personal
from fedstrata.client.visit import ClientVisit
from fedstrata.core.rng import derive, generator, seed_global
from fedstrata.core.stacks import UpdateStack
from fedstrata.core.technique import ClientView, Measure, Technique, overrides
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Slots, Update, replace_fields
from fedstrata.data.examples import TensorExamples
from fedstrata.models.norms import evaluation_mode
from fedstrata.models.taps import watch_places

ROWS_AT_ONCE = 4096
"""Groups of more examples are looked at client by client: what goes through the model takes too much memory."""


def prepare_group(group: ClientGroup, slots: Slots, memory: Slots) -> Slots:
    """What each technique prepares for its hooks, a row per client.

    Args:
        group: the clients.
        slots: what techniques sent; stacked, or shared by all.
        memory: what clients remember, likewise.
    """
    method, replica, data = group.context.method, group.replica, UnreadableExamples()
    if not any(method.at("prepare")):
        return {}
    passes = GroupPasses(group)
    answers = replace_fields(
        shared_answers({}, {}),
        observe=passes.observe,
        sum_rows=passes.sum_rows,
        sizes=lambda: torch.tensor(group.examples_of_each),
        measure_gradients=passes.measure_gradients,
        normal=lambda name, rng: partial(_draw_normal, [generator(seed, name) for seed in group.seeds]),
    )
    a = SharedAssignment(**vars(replace_fields(group.template, slots=slots)))
    with torch.no_grad():
        views = {t: open_view(t, method, replica, data, a, memory, answers) for t in method.at("prepare")}
        return {t.name: t.prepare(view) for t, view in views.items()}


def _draw_normal(streams: Sequence[torch.Generator], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Numbers of N(0, 1), a row from each stream."""
    numbers = torch.empty(len(streams), *shape, dtype=dtype)
    for row, rng in zip(numbers, streams, strict=True):
        row.normal_(generator=rng)
    return numbers


def open_views(group: ClientGroup) -> dict[Technique, list[ClientView]]:
    """Each client's own view, for techniques that draw random numbers in the steps, or pack what they send."""
    local = group.context.method.acting("local", group.template.is_after_training)
    chosen = [t for t in local if overrides(t, "draws") or overrides(t, "pack")]
    visits = [group.visit(place) for place in range(len(group))] if chosen else []
    return {t: [visit.open_view(t) for visit in visits] for t in chosen}


def draw_steps(group: ClientGroup, views: Mapping[Technique, Sequence[ClientView]], longest: int) -> Slots:
    """The random numbers of all steps, by technique: [clients, steps, …], filled up with zeros to one shape."""
    drawn: Slots = {}
    for technique, of_each in views.items():
        draws = [technique.draws(view) for view in of_each]
        taken = [[draw(size) for size in sizes] for draw, sizes in zip(draws, group.batches, strict=True) if draw]
        if taken:
            drawn[technique.name] = {n: _fill_up([[s[n] for s in c] for c in taken], longest) for n in taken[0][0]}
    return drawn


def _fill_up(tensors: Sequence[Sequence[Tensor]], longest: int) -> Tensor:
    """Tensors by client and step as one."""
    like, width = tensors[0][0], max(len(t) for steps in tensors for t in steps)
    filled = torch.zeros(len(tensors), longest, width, *like.shape[1:], dtype=like.dtype)
    for client, steps in enumerate(tensors):
        for step, tensor in enumerate(steps):
            filled[client, step, : len(tensor)] = tensor
    return filled


def pack_slots(stack: UpdateStack, views: Mapping[Technique, Sequence[ClientView]]) -> Iterator[tuple[Update, Slots]]:
    """The visits of a stack one by one, with what techniques make of their slots: they may differ in shape."""
    for row in range(len(stack)):
        update, memory = stack.visit(row)
        packed = {t.name: t.pack(update.slots[t.name], v[row]) for t, v in views.items() if t.name in update.slots}
        yield replace_fields(update, slots={**update.slots, **packed}), memory


class GroupPasses:
    """Passes over all examples of a group with the model that its clients received, as the run would evaluate it.

    The rows of a batch do not know of each other (`check_vectorises`). So in a model whose layers all have a row per
    example, everybody's examples are one batch; else there is a pass per client.
    """

    def __init__(self, group: ClientGroup) -> None:
        self._group = group
        self._lengths: list[int] = []
        """How many examples each client has in the batch at hand."""

    def observe(self, watch: Mapping[str, Callable[[Tensor], None]]) -> None:
        """Call each function with what is at its place, whenever the model runs it, for everybody's examples."""
        inputs = self._pool_inputs()  # first: it looks at the model, on which nothing is to be attached then
        with watch_places(self._group.replica.model, watch):
            for run in self._runs(inputs):
                run()

    def sum_rows(self, rows: Tensor) -> tuple[Tensor, Tensor | int]:
        """(sum of each client's rows, how many they are) of what was made of the batch at hand."""
        many = len(rows) // sum(self._lengths)
        counts = torch.tensor([length * many for length in self._lengths])
        if len(set(self._lengths)) == 1:
            sums = torch.unflatten(rows, 0, (len(counts), -1)).sum(1)
        else:
            sums = torch.segment_reduce(rows, "sum", lengths=counts)
        return sums, counts.view(-1, *[1] * (rows.dim() - 1))

    def measure_gradients(self, parts: int, measure: Measure) -> Tensors:
        """What is made of each client's gradients at the received model, a row per client."""
        found = [visit.measure_gradients(parts, measure) for visit in self._ready_visits()]
        return {n: torch.stack([one[n] for one in found]) for n in found[0]}

    def _runs(self, inputs: Tensor | None) -> Iterator[Callable[[], Tensor]]:
        """Batch by batch: what runs the model on it."""
        group, replica = self._group, self._group.replica
        if inputs is not None:
            replace_fields(group.visit(0), memory={}).prepare()
            self._lengths = group.examples_of_each
            with torch.no_grad(), evaluation_mode(replica.model, group.context.method.buffers, len(inputs)):
                yield lambda: replica.model(inputs)
            return
        for place, visit in enumerate(self._ready_visits()):
            for run, y in visit.passes():
                self._lengths = [len(y) if c == place else 0 for c in range(len(group))]
                yield run

    def _ready_visits(self) -> Iterator[ClientVisit]:
        """Each client's visit by itself, with the replica ready for it."""
        for place, seed in enumerate(self._group.seeds):
            visit = self._group.visit(place)
            seed_global(derive(seed, "local"), self._group.context.device)
            visit.prepare()
            yield visit

    def _pool_inputs(self) -> Tensor | None:
        """Everybody's inputs, client after client; None where they cannot go through the model as one batch."""
        group = self._group
        few = sum(group.examples_of_each) <= ROWS_AT_ONCE
        own = is_personal(group.template, group.memories.structures[0])
        if not few or own or known_chain(group) is None:
            return None
        everything = [torch.arange(count) for count in group.examples_of_each]
        pool = find_pool(group)
        if pool is not None:
            examples, places = pool
            return examples.batch(places(group.clients, everything))[0]
        data = [group.examples[client] for client in group.clients]
        if not all(isinstance(d, TensorExamples) for d in data):  # one may draw random numbers
            return None
        return torch.cat([d.batch(index)[0] for d, index in zip(data, everything, strict=True)])
