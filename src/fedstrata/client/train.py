"""One client, one round: `train_client` turns an assignment, the client's data and its memory into an update.

It is pure: the model instance is scratch that is loaded anew, the random streams come from the assignment's seed, and
what the client will remember is returned, not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedstrata.client.context import BUFFERS, PERSONAL, ClientContext, ModelReplica
from fedstrata.client.cost import counted_flops, estimate_flops
from fedstrata.client.hooks import HookSet
from fedstrata.client.prepare import own_names, prepare, still
from fedstrata.client.step import LocalSteps
from fedstrata.client.visit_hooks import build_own_hooks, whose
from fedstrata.core.rng import derive, generator, seed_global
from fedstrata.core.tensors import Tensors, subtract
from fedstrata.core.types import Assignment, Examples, Slots, Update
from fedstrata.data.batching import batches
from fedstrata.data.examples import TensorExamples
from fedstrata.data.labels import UnknownClass
from fedstrata.models.frozen_prefix import Cut, cut_at
from fedstrata.system.timing import timed


def train_client(context: ClientContext, assignment: Assignment, data: Examples, memory: Slots) -> tuple[Update, Slots]:
    """Train one client for one round: (update, what the client will remember if the server accepts it).

    Seeds global generators, which dropout, augmentation and datasets draw from; the caller gives them back (`own_rng`).
    """
    a, method = _assignment_on(context.device, assignment), context.method
    memory = _slots_on(context.device, memory)
    with timed("load the model"):
        replica = context.replica(a.arch)
        prepare(replica, method, a, memory)
    hooks = HookSet({})
    before = after = 0
    if any(method.at("local")):
        seed_global(derive(a.seed, "local"), context.device)
        key: Any = (a.arch, a.trains, tuple(a.slots), tuple(memory), len(data))
        with timed("techniques"):
            hooks, before = counted_flops(context, key, lambda: build_own_hooks(method, replica, data, a, memory))
            prepare(replica, method, a, memory)  # a technique's own passes may have moved statistics or modes
    foreign = replica.own_code or not isinstance(data, TensorExamples)  # may draw from Python's and NumPy's generators
    seed_global(derive(a.seed, "train"), context.device, everything=foreign)
    trained, flops = _train(context, replica, a, data, memory, hooks)

    with timed("difference"):
        mine = own_names(a)
        room = None if context.room is None else context.room({n: a.params[n] for n in a.uploads})
        delta = subtract({n: replica.params[n].detach().contiguous() for n in a.uploads}, a.params, a.uploads, room)
    slots: Slots = {}
    kept, sent = dict(memory), delta
    if hooks.all("finish") or hooks.all("upload"):
        key = ("finish", a.arch, a.trains, *hooks.present, len(data))
        with timed("techniques"):
            (slots, kept, sent), after = counted_flops(
                context, key, lambda: (*hooks.finished(delta, trained.tallies, memory), hooks.uploaded(delta))
            )
    if mine:
        kept[PERSONAL] = {**memory.get(PERSONAL, {}), **{n: replica.params[n].detach().clone() for n in mine}}
    buffers: Tensors = {}
    if method.buffers != "drop" and replica.buffers and a.trains:
        buffers = {n: b.detach().to("cpu", copy=True) for n, b in replica.buffers.items()}
        if method.buffers == "local":
            kept[BUFFERS] = buffers
        if a.upload_buffers is not None:
            buffers = {n: buffers[n] for n in a.upload_buffers}
    metrics = {"train_loss": trained.loss, "flops": float(before + flops + after)}
    home = torch.device("cpu")
    sent = _plain(_slots_on(home, {"": sent}))[""]
    slots, kept = _plain(_slots_on(home, slots)), _plain(_slots_on(home, kept))
    return Update(a.round, a.client, method.digest, len(data), trained.taken, sent, buffers, slots, metrics), kept


def _plain(slots: Slots) -> Slots:
    """The tensors in the usual layout, as they are after any way through memory or files: sums depend on it."""
    return {name: {n: t.contiguous() for n, t in slot.items()} for name, slot in slots.items()}


def _slots_on(device: torch.device, slots: Slots) -> Slots:
    """The tensors on a device, the very same ones where they are there already: a visit computes in one place."""
    if all(t.device.type == device.type for slot in slots.values() for t in slot.values()):
        return slots
    return {name: {n: t.to(device) for n, t in slot.items()} for name, slot in slots.items()}


def _assignment_on(device: torch.device, assignment: Assignment) -> Assignment:
    if device.type == "cpu":
        return assignment
    params = _slots_on(device, {"": assignment.params})[""]
    return replace(assignment, params=params, slots=_slots_on(device, assignment.slots))


def _train(
    context: ClientContext, replica: ModelReplica, a: Assignment, data: Examples, memory: Slots, hooks: HookSet
) -> tuple[LocalSteps, int]:
    """Take the steps of a visit: (what they came to, their FLOPs)."""
    features = hooks.all("features")
    steps = LocalSteps(context, replica, a, hooks, replica.model if features else replica.forward)
    flops = 0
    if not steps.names:
        return steps, flops
    key: tuple[Any, ...] = (a.arch, a.trains, *hooks.present)
    order = list(batches(len(data), a.work, generator(a.seed, "order"), replica.batch_norm))
    kept: _Kept | None = None
    if a.cache_prefix and steps.forward is replica.model and context.augment is None:
        kept, flops = _kept(context, replica, a, data, hooks.places)
    if kept is not None:
        steps.forward, key = kept, (*key, "above")
    elif steps.forward is not replica.model:  # a compiled step cannot be counted while it runs
        cost = estimate_flops(context, a, data, memory, map(len, order), key)
        prepare(replica, context.method, a, memory)
    with hooks.tapped(steps.objective) if features else nullcontext():
        for index in order:
            with timed("batches"):
                x, y = data.batch(index, context.augment)
                x, y = replica.inputs(x.to(context.device)), y.to(context.device)
                if kept is not None:
                    kept.rows = index
            try:
                if steps.forward is not replica.model and kept is None:
                    steps.step(x, y)
                    flops += cost.steps[len(index)]
                else:
                    flops += counted_flops(context, (*key, x.shape), partial(steps.step, x, y))[1]
            except UnknownClass as error:
                raise error.at(whose(data, a.client), y, index) from None
    return steps, flops


@dataclass(eq=False)
class _Kept:
    """The model from where something trains, on what the part below it gave for all examples; `rows`: those at hand."""

    above: Callable[..., Tensor]
    crossing: tuple[Tensor, ...]
    rows: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.above(*(t[self.rows] for t in self.crossing))


def _kept(
    context: ClientContext, replica: ModelReplica, a: Assignment, data: Examples, places: Sequence[str]
) -> tuple[_Kept | None, int]:
    """Compute once what lies below everything that trains: (None if nothing does, FLOPs)."""
    quiet = still(replica, a)
    key = ("cut", a.arch, a.trains, quiet, tuple(places))
    if key not in context.kept:
        assert replica.sample is not None
        context.kept[key] = cut_at(replica.model, a.trains, quiet, replica.inputs(replica.sample), places)
    cut: Cut | None = context.kept[key]
    if cut is None:
        return None, 0

    def compute() -> list[tuple[Tensor, ...]]:
        with torch.no_grad():
            parts = torch.split(torch.arange(len(data)), 256)
            return [cut.below(replica.inputs(data.batch(index)[0].to(context.device))) for index in parts]

    with timed("prefix"):
        parts, flops = counted_flops(context, (*key, len(data)), compute)
    return _Kept(cut.above, tuple(torch.cat(t) for t in zip(*parts, strict=True)), torch.empty(0)), flops
