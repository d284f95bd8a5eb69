"""One client, one round: `train_client` turns an assignment, the client's data and its memory into an update.

It is pure: the model instance is scratch that is loaded anew, the random streams come from the assignment's seed, and
what the client will remember is returned, not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from fedstrata.core import Assignment, Slots, Update, altered
from fedstrata.cost import FlopCount
from fedstrata.crew import Crew, Objective, open_crew, seen_at, watched
from fedstrata.data.examples import Examples, TensorExamples
from fedstrata.data.labels import UnknownClass, check_range
from fedstrata.methods import Method
from fedstrata.optim import build_optimizer
from fedstrata.prefix import Cut, cut_at
from fedstrata.tensors import Tensors, apart, derive, generator, laid_out, load, own_rng, scale, subtract, whole_norm
from fedstrata.timing import timed
from fedstrata.workshop import BUFFERS, PERSONAL, Bench, Workshop, batches, judging, seed_global, sheets

T = TypeVar("T")

Forward = Callable[[Tensor], Tensor]


def _starting_buffers(method: Method, bench: Bench, assignment: Assignment, memory: Slots) -> Tensors:
    """The client's own running statistics, the server's, or, where there are none yet, the model's initial ones."""
    own = memory.get(BUFFERS) if method.buffers == "local" else None
    return own or assignment.buffers or bench.initial


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
            crew, before = _counted(shop, key, lambda: _own_crew(method, bench, data, a, memory))
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
            (slots, kept, sent), after = _counted(
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


def prepare(bench: Bench, method: Method, assignment: Assignment, memory: Slots) -> None:
    """Load the scratch model, and freeze what does not train: autograd then skips the frozen prefix by itself."""
    load(bench.params, assignment.params)
    load(bench.params, own_params(assignment, memory))
    load(bench.buffers, _starting_buffers(method, bench, assignment, memory))
    load(*bench.constants)
    trains = set(assignment.trains)
    for name, p in bench.params.items():
        p.grad = None  # of a step that was interrupted
        if p.requires_grad is not (name in trains):
            p.requires_grad_(name in trains)
    if not all(module.training for module in bench.modules):
        bench.model.train()
    for owner in {name.rpartition(".")[0] for name in still(bench, assignment)}:
        norm = bench.model.get_submodule(owner)
        if isinstance(norm, _NormBase):
            norm.eval()


def still(bench: Bench, assignment: Assignment) -> tuple[str, ...]:
    """The running statistics that stay as they are."""
    if assignment.moves is None:
        return ()
    moves = set(assignment.moves)
    return tuple(n for n in bench.buffers if n not in moves)


def own_names(assignment: Assignment) -> tuple[str, ...]:
    """What trains and does not travel: the client keeps it."""
    if len(assignment.trains) == len(assignment.travels):
        return ()
    sent = set(assignment.travels)
    return tuple(n for n in assignment.trains if n not in sent)


def own_params(assignment: Assignment, memory: Slots) -> Tensors:
    """The parameters of its own that a client goes on with."""
    kept = memory.get(PERSONAL, {})
    return {n: kept[n] for n in own_names(assignment) if n in kept} if kept else {}


class _Steps:
    """The local steps of a visit; they train the scratch model in place."""

    def __init__(self, shop: Workshop, bench: Bench, a: Assignment, crew: Crew, forward: Forward) -> None:
        self.crew, self.forward, self.clip = crew, forward, a.work.clip
        self.names = [n for n, p in bench.params.items() if p.requires_grad]
        self.leaves = [bench.params[n] for n in self.names]
        self.objective = Objective(
            bench.model, bench.params, bench.buffers, crew.outputs, crew.all("loss"), policy=shop.method.buffers
        )
        self.move = build_optimizer(a.work.optimizer).start(
            [p.detach() for p in self.leaves], a.work.lr, crew.scale(self.names, shop.device)
        )
        self.changes = bool(crew.all("tally") or crew.all("correct") or a.work.clip is not None)
        self.no_grad = torch.no_grad()
        self.total = torch.zeros((), dtype=bench.exact, device=shop.device)
        self.taken = 0
        self.tallies: Slots = {}
        self.grads: Sequence[Tensor | None] = ()

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step of the optimiser."""
        with timed("forward"):
            batch = self.objective.batch(x, y, self.taken, self.objective.params)
            task, loss = self.objective(batch, self.forward)
            self.total.add_(task.detach())
        self.taken += 1
        self.grads = [None] * len(self.leaves)
        if loss.requires_grad:
            with timed("backward"):
                self.grads = self._gradients(loss)
        if self.changes:
            with timed("techniques"), self.no_grad:
                # A layer that this step did not use has no gradient and gets none.
                used = {n: g for n, g in zip(self.names, self.grads, strict=True) if g is not None}
                self.tallies = self.crew.tallied(self.tallies, used, batch)
                used = clipped(self.crew.corrected(used, batch, apart(used, self.tallies)), self.clip)
                self.grads = [used.get(n) for n in self.names]
        with timed("optimiser"):
            self.move(self.grads)

    def _gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        """The raw gradients; where they will be changed, in memory that nobody else holds."""
        if not self.changes:
            return torch.autograd.grad(loss, self.leaves, allow_unused=True)
        torch.autograd.backward(loss, inputs=self.leaves)  # which copies gradients that are shared or expanded
        grads = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        return grads

    @property
    def loss(self) -> float:
        """The mean of the task's loss over the steps."""
        return self.total.item() / max(self.taken, 1)


def _train(
    shop: Workshop, bench: Bench, a: Assignment, data: Examples, memory: Slots, crew: Crew
) -> tuple[_Steps, int]:
    """Take the steps of a visit: (what they came to, their FLOPs)."""
    features = crew.all("features")
    steps = _Steps(shop, bench, a, crew, bench.model if features else bench.forward)
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
                    flops += _counted(shop, (*key, x.shape), partial(steps.step, x, y))[1]
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
        parts, flops = _counted(shop, (*key, len(data)), compute)
    return _Kept(cut.above, tuple(torch.cat(t) for t in zip(*parts, strict=True)), torch.empty(0)), flops


@dataclass(eq=False)
class Rehearsal:
    """What visits of one kind cost, and the parameters that they leave without a gradient.

    Args:
        around: FLOPs before and after the steps.
        steps: number of examples → FLOPs of a step with so many.
        idle: parameters that the steps do not use.
    """

    around: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()


def rehearsed(
    shop: Workshop, a: Assignment, data: Examples, memory: Slots, sizes: Iterable[int], kind: Hashable
) -> Rehearsal:
    """What a visit of this kind costs, counted on the side: for ways of training that cannot be counted themselves.

    Nothing changes but the scratch model, which the caller prepares again.
    """
    known: Rehearsal | None = shop.kept.get(kind)
    done = shop.kept[kind] = known or Rehearsal()
    missing = sorted(set(sizes) - done.steps.keys())
    if known is not None and not missing:
        return done
    bench = shop.bench(a.arch)
    with own_rng():
        prepare(bench, shop.method, a, memory)
        with FlopCount() as before:
            crew = _own_crew(shop.method, bench, data, a, memory)
        prepare(bench, shop.method, a, memory)
        steps = _Steps(shop, bench, a, crew, bench.model)
        with crew.tapped(steps.objective):
            for size in missing if steps.names else ():
                x, y = data.batch(torch.arange(size), shop.augment)
                with FlopCount() as counter:
                    steps.step(bench.inputs(x.to(shop.device)), y.to(shop.device))
                done.steps[size] = counter.total
        if known is None:
            delta = {n: torch.zeros_like(bench.params[n], memory_format=torch.contiguous_format) for n in a.travels}
            with FlopCount() as after:
                crew.finished(delta, steps.tallies, memory)
                crew.uploaded(delta)
            done.around = before.total + after.total
            done.idle = frozenset(n for n, g in zip(steps.names, steps.grads, strict=False) if g is None)
    return done


def clipped(grads: Tensors, limit: float | None) -> Tensors:
    """The gradients, scaled down where the norm of all of them together is above the limit."""
    if limit is None or not grads:
        return grads
    factor = torch.clamp(limit / (whole_norm(grads) + 1e-6), max=1.0)
    return scale(grads, factor)


def _counted(shop: Workshop, key: Any, compute: Callable[[], T]) -> tuple[T, int]:
    """(result, FLOPs): counted at the first, real execution with this key, and known from then on.

    Counting every step would cost more than training; what the key names (sub-model, plan, hooks, inputs) settles the
    number of matrix products and convolutions.
    """
    known = shop.flops.get(key)
    if known is not None:
        return compute(), known
    with FlopCount() as counter:
        result = compute()
    shop.flops[key] = counter.total
    return result, counter.total


def _own_crew(method: Method, bench: Bench, data: Examples, a: Assignment, memory: Slots) -> Crew:
    """Every technique's hooks for one client's visit; they see the parameters in the scratch model's layout."""
    a = altered(a, params=laid_out(a.params, bench.params))

    def outputs(place: str) -> Iterator[tuple[Tensor, Tensor]]:
        for run, y in _passes(method, bench, data):
            yield seen_at(bench.model, place, run), y

    def observe(watch: Mapping[str, Callable[[Tensor], None]]) -> None:
        with watched(bench.model, watch):
            for run, _ in _passes(method, bench, data):
                run()

    counts = partial(class_counts, data, bench)
    return open_crew(method, bench, data, a, memory, partial(generator, a.seed), counts, outputs, observe)


def _passes(method: Method, bench: Bench, data: Examples) -> Iterator[tuple[Callable[[], Tensor], Tensor]]:
    """Batch by batch over all of a client's data: (what runs the model on it, as in an evaluation; labels)."""
    device = next(iter(bench.params.values())).device
    with torch.no_grad(), judging(bench.model, method.buffers, len(data)):
        for index in sheets(data, method.buffers, 256):
            x, y = data.batch(index)
            yield partial(bench.model, bench.inputs(x.to(device))), y.to(device)


def class_counts(data: Examples, bench: Bench) -> Tensor:
    """How many examples of each class there are."""
    labels = data.labels()
    check_range(labels, bench.classes, whose(data))
    return torch.bincount(labels, minlength=bench.classes).to(bench.exact)


def whose(data: Examples, client: int | None = None) -> str:
    """Whose data it is, as far as it knows itself."""
    return getattr(data, "whose", "") or ("" if client is None else f"client {client}")
