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

from fedstrata.client.context import BUFFERS, PERSONAL, Bench, Workshop
from fedstrata.client.cost import counted_flops, rehearsed
from fedstrata.client.hooks import Crew
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


def train_client(shop: Workshop, assignment: Assignment, data: Examples, memory: Slots) -> tuple[Update, Slots]:
    """Train one client for one round: (update, what the client will remember if the server accepts it).

    Seeds global generators, which dropout, augmentation and datasets draw from; the caller gives them back (`own_rng`).
    """
    a, method = _assignment_on(shop.device, assignment), shop.method
    memory = _slots_on(shop.device, memory)
    with timed("load the model"):
        bench = shop.bench(a.arch)
        prepare(bench, method, a, memory)
    crew = Crew({})
    before = after = 0
    if any(method.at("local")):
        seed_global(derive(a.seed, "local"), shop.device)
        key: Any = (a.arch, a.trains, tuple(a.slots), tuple(memory), len(data))
        with timed("techniques"):
            crew, before = counted_flops(shop, key, lambda: build_own_hooks(method, bench, data, a, memory))
            prepare(bench, method, a, memory)  # a technique's own passes may have moved statistics or modes
    foreign = bench.own_code or not isinstance(data, TensorExamples)  # may draw from Python's and NumPy's generators
    seed_global(derive(a.seed, "train"), shop.device, everything=foreign)
    trained, flops = _train(shop, bench, a, data, memory, crew)

    with timed("difference"):
        mine = own_names(a)
        room = None if shop.room is None else shop.room({n: a.params[n] for n in a.travels})
        delta = subtract({n: bench.params[n].detach().contiguous() for n in a.travels}, a.params, a.travels, room)
    slots: Slots = {}
    kept, sent = dict(memory), delta
    if crew.all("finish") or crew.all("upload"):
        key = ("finish", a.arch, a.trains, *crew.present, len(data))
        with timed("techniques"):
            (slots, kept, sent), after = counted_flops(
                shop, key, lambda: (*crew.finished(delta, trained.tallies, memory), crew.uploaded(delta))
            )
    if mine:
        kept[PERSONAL] = {**memory.get(PERSONAL, {}), **{n: bench.params[n].detach().clone() for n in mine}}
    buffers: Tensors = {}
    if method.buffers != "drop" and bench.buffers and a.trains:
        buffers = {n: b.detach().to("cpu", copy=True) for n, b in bench.buffers.items()}
        if method.buffers == "local":
            kept[BUFFERS] = buffers
        if a.reports is not None:
            buffers = {n: buffers[n] for n in a.reports}
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
    shop: Workshop, bench: Bench, a: Assignment, data: Examples, memory: Slots, crew: Crew
) -> tuple[LocalSteps, int]:
    """Take the steps of a visit: (what they came to, their FLOPs)."""
    features = crew.all("features")
    steps = LocalSteps(shop, bench, a, crew, bench.model if features else bench.forward)
    flops = 0
    if not steps.names:
        return steps, flops
    key: tuple[Any, ...] = (a.arch, a.trains, *crew.present)
    order = list(batches(len(data), a.work, generator(a.seed, "order"), bench.batch_norm))
    kept: _Kept | None = None
    if a.reuse and steps.forward is bench.model and shop.augment is None:
        kept, flops = _kept(shop, bench, a, data, crew.places)
    if kept is not None:
        steps.forward, key = kept, (*key, "above")
    elif steps.forward is not bench.model:  # a compiled step cannot be counted while it runs
        cost = rehearsed(shop, a, data, memory, map(len, order), key)
        prepare(bench, shop.method, a, memory)
    with crew.tapped(steps.objective) if features else nullcontext():
        for index in order:
            with timed("batches"):
                x, y = data.batch(index, shop.augment)
                x, y = bench.inputs(x.to(shop.device)), y.to(shop.device)
                if kept is not None:
                    kept.rows = index
            try:
                if steps.forward is not bench.model and kept is None:
                    steps.step(x, y)
                    flops += cost.steps[len(index)]
                else:
                    flops += counted_flops(shop, (*key, x.shape), partial(steps.step, x, y))[1]
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
    shop: Workshop, bench: Bench, a: Assignment, data: Examples, places: Sequence[str]
) -> tuple[_Kept | None, int]:
    """Compute once what lies below everything that trains: (None if nothing does, FLOPs)."""
    quiet = still(bench, a)
    key = ("cut", a.arch, a.trains, quiet, tuple(places))
    if key not in shop.kept:
        assert bench.sample is not None
        shop.kept[key] = cut_at(bench.model, a.trains, quiet, bench.inputs(bench.sample), places)
    cut: Cut | None = shop.kept[key]
    if cut is None:
        return None, 0

    def compute() -> list[tuple[Tensor, ...]]:
        with torch.no_grad():
            parts = torch.split(torch.arange(len(data)), 256)
            return [cut.below(bench.inputs(data.batch(index)[0].to(shop.device))) for index in parts]

    with timed("prefix"):
        parts, flops = counted_flops(shop, (*key, len(data)), compute)
    return _Kept(cut.above, tuple(torch.cat(t) for t in zip(*parts, strict=True)), torch.empty(0)), flops
