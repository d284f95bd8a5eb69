"""A worker's side: it takes jobs, reads their tensors in place from segments of memory, and writes results there.

Pipes carry small Python objects between processes of one program; nothing of this crosses a trust boundary.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from fedstrata.client.context import ClientContext
from fedstrata.core.stacks import Assignments, Memories, UpdateStack, structure_of
from fedstrata.core.tensors import FlatTensors, Tensors, all_finite
from fedstrata.core.types import Assignment, Examples, Slots, Update, replace_fields
from fedstrata.data.batching import eval_batches
from fedstrata.engines.grouping import Trainer
from fedstrata.engines.tensor_store import Layout, SegmentedMemory, TensorRef, plan_layout
from fedstrata.evaluation.evaluate import BatchScore, EvalRequest, score_batches
from fedstrata.system.machine import end_with_parent, keep_memory
from fedstrata.system.signals import leave_to_parent
from fedstrata.system.timing import Clock, set_clock, timed

STORE = 0
"""The segment that holds the server's tensors; every other one belongs to a job at a time."""

TensorRefs = dict[str, TensorRef]
"""Technique name → where its tensors are."""


@dataclass(frozen=True, eq=False)
class TemplateSpec:
    """What visits of a kind have in common, for a worker: the assignment without its tensors, and where these are.

    All of them are in the store's segment.
    """

    assignment: Assignment
    params: TensorRef
    buffers: TensorRef
    slots: TensorRefs

    @property
    def refs(self) -> Iterator[TensorRef]:
        """Where its tensors are."""
        yield from (self.params, self.buffers, *self.slots.values())


@dataclass(frozen=True, eq=False)
class MemorySpec:
    """What the clients of a job remember, for a worker: where the stacks of it are; kinds and rows as in `Memories`."""

    stacks: tuple[TensorRefs, ...]
    kinds: Sequence[int]
    rows: Sequence[int]

    @staticmethod
    def write(memory: SegmentedMemory, segment: int, memories: Memories) -> tuple[MemorySpec, int]:
        """Copy memories to the beginning of a segment: (where they are, where they end)."""
        end = 0

        def write(stack: Slots) -> TensorRefs:
            nonlocal end
            refs, end = write_slots(memory, segment, stack, end)
            return refs

        refs, kinds, rows = memories.regroup(write)
        return MemorySpec(tuple(refs), kinds, rows), end

    def read(self, memory: SegmentedMemory) -> Memories:
        """The memories, in place."""
        return Memories(tuple(read_slots(memory, refs) for refs in self.stacks), self.kinds, self.rows)


@dataclass(frozen=True, eq=False)
class TrainJob:
    """A job: visits to train, whose results are to be written to `segment` from `begin` on.

    Args:
        number: of the job.
        segment: for the results.
        begin: where there is room in it.
        templates: what visits of each kind have in common.
        asked: the visits, of these kinds; their own templates are left out.
        memories: where clients' memories are, in a segment of the job's own.
    """

    number: int
    segment: int
    begin: int
    templates: tuple[TemplateSpec, ...]
    asked: Assignments
    memories: MemorySpec


@dataclass(frozen=True, eq=False)
class EvaluateJob:
    """A job: some batches of the test set to evaluate."""

    number: int
    request: EvalRequest
    params: TensorRef
    buffers: TensorRef
    parts: Sequence[int]


@dataclass(frozen=True, eq=False)
class Report:
    """What comes back of visits: updates without their tensors, and where these are in the job's segment.

    Args:
        places: which of the job's visits these are.
        stack: the updates, without tensors.
        delta: where the deltas are, stacked; or where the first row's would be, of rows that follow each other.
        rows: which of these rows are theirs; None where the deltas are stacked.
        buffers, slots, memory: where the other tensors are.
    """

    places: Sequence[int]
    stack: UpdateStack
    delta: TensorRef
    rows: range | None
    buffers: TensorRef
    slots: TensorRefs
    memory: TensorRefs

    def read(self, memory: SegmentedMemory) -> UpdateStack:
        """The updates, their tensors in place."""
        rows = self.rows
        return self.stack.with_tensors(
            memory.read(*self.delta) if rows is None else _read_deltas(memory, *self.delta, rows),
            memory.read(*self.buffers),
            read_slots(memory, self.slots),
            read_slots(memory, self.memory),
        )


@dataclass(frozen=True, eq=False)
class TrainAnswer:
    """What came of a job of training, and the seconds that it took."""

    reports: Sequence[Report]
    seconds: float


@dataclass(frozen=True, eq=False)
class Failure:
    """An exception that a job ended with, and its traceback as text."""

    error: BaseException
    trace: str


def write_slots(memory: SegmentedMemory, segment: int, slots: Slots, begin: int) -> tuple[TensorRefs, int]:
    """Copy slots into a segment: (where they are, where they end)."""
    places: TensorRefs = {}
    for name, tensors in slots.items():
        layout, begin = memory.write(segment, tensors, begin)
        places[name] = (segment, layout)
    return places, begin


def read_slots(memory: SegmentedMemory, places: Mapping[str, TensorRef]) -> Slots:
    """Slots, in place."""
    return {name: memory.read(*place) for name, place in places.items()}


def _read_deltas(memory: SegmentedMemory, segment: int, layout: Layout, rows: range) -> Tensors:
    """Deltas that follow each other row by row, in place."""
    tensors, _ = memory.read_rows(segment, layout, rows.stop)
    return {n: t[rows.start :] for n, t in tensors.items()}


@dataclass(eq=False)
class _DeltaBlock:
    """Room for the deltas of visits that are trained one by one, a row for each; `used` rows are taken.

    Args:
        params: the parameters that they are differences of.
        names: which of these travel.
        layout: where the first row's tensors are.
        room: how many rows there are.
        rows: the tensors of each row, in place; None if the segment may have moved since they were read.
    """

    params: Tensors
    names: Sequence[str]
    layout: Layout
    room: int
    used: int = 0
    rows: list[Tensors] | None = None

    def fits(self, params: Tensors, names: Sequence[str]) -> bool:
        """True if there is a row for tensors like these."""
        if self.used >= self.room:
            return False
        if params is self.params and names is self.names:
            return True
        if tuple(names) != tuple(self.names):
            return False
        return all(self.params[n].shape == params[n].shape and self.params[n].dtype == params[n].dtype for n in names)

    def take_row(self, memory: SegmentedMemory, segment: int) -> Tensors:
        """The tensors of the first row that is not used."""
        if self.rows is None:
            tensors, flat = memory.read_rows(segment, self.layout, self.room)
            each = [
                dict(zip(tensors, row, strict=True))
                for row in zip(*(t.unbind() for t in tensors.values()), strict=True)
            ]
            whole = None if flat is None else flat.unbind()
            self.rows = each if whole is None else [FlatTensors(*row) for row in zip(each, whole, strict=True)]
        return self.rows[self.used] if self.rows else {}


class _ResultWriter:
    """Writes the results of a job to its segment.

    Visits that are trained one by one compute their deltas in rows of a block there, and come back as a stack.
    """

    def __init__(self, memory: SegmentedMemory, segment: int, begin: int, visits: int) -> None:
        self._memory, self._segment, self._end, self._left = memory, segment, begin, visits
        self._block: _DeltaBlock | None = None
        self._given: Tensors | None = None
        self._stack: tuple[Layout, Tensors] = ((), {})
        self._waiting: list[tuple[int, Update, Slots]] = []
        self._structure: tuple[Any, ...] = ()
        self.reports: list[Report] = []

    def reserve(self, params: Tensors, names: Sequence[str]) -> Tensors:
        """Room in the segment for a visit's delta, tensors like these: what is computed there need not be copied."""
        block = self._block
        if block is None or not block.fits(params, names):
            self._report_waiting()
            layout, end = plan_layout({n: params[n] for n in names}, self._end)
            block = self._block = _DeltaBlock(params, names, layout, self._left)
            self._end += self._left * (end - self._end)
        self._given = block.take_row(self._memory, self._segment)
        return self._given

    def reserve_stack(self, tensors: Tensors) -> Tensors:
        """The same for the deltas of visits that are trained at once."""
        layout, self._end = plan_layout(tensors, self._end)
        self._stack = layout, self._memory.read(self._segment, layout)
        return dict(self._stack[1])

    def write(self, places: Sequence[int], came: UpdateStack | tuple[Update, Slots]) -> None:
        """Write what came of visits, unless it is there already."""
        self._left -= len(places)
        if isinstance(came, UpdateStack):
            layout, reserved = self._stack
            there = len(reserved) == len(came.delta) and all(came.delta[n] is t for n, t in reserved.items())
            self._report(places, came, (self._segment, layout) if there else self._write(came.delta), None)
        else:
            self._write_single(places[0], *came)

    def _write_single(self, place: int, update: Update, memory: Slots) -> None:
        """Take up one visit; those whose tensors are alike wait for each other."""
        given, self._given = self._given, None
        if not given or update.delta.keys() != given.keys():
            self._report_waiting()
            stack = UpdateStack.of([(update, memory)])
            self._report([place], stack, self._write(stack.delta), None)
            return
        assert self._block is not None
        if update.delta is not given:
            for name, tensor in given.items():
                if update.delta[name] is not tensor:  # a technique has added something to what travels
                    tensor.copy_(update.delta[name])
        structure: tuple[Any, ...] = ()
        if update.buffers or update.slots or memory:
            structure = structure_of({"": update.buffers}), structure_of(update.slots), structure_of(memory)
        if self._waiting and structure != self._structure:
            self._report_waiting()
        self._structure = structure
        self._block.used += 1
        self._waiting.append((place, replace_fields(update, delta={}), memory))

    def _report_waiting(self) -> None:
        """Write down what the last visits of the block have sent."""
        if not self._waiting or self._block is None:
            return
        places = [place for place, _, _ in self._waiting]
        stack = UpdateStack.of([(update, memory) for _, update, memory in self._waiting])
        self._waiting = []
        rows, layout = range(self._block.used - len(places), self._block.used), self._block.layout
        stack.delta = _read_deltas(self._memory, self._segment, layout, rows)
        self._report(places, stack, (self._segment, layout), rows)
        self._block.rows = None

    def _report(self, places: Sequence[int], stack: UpdateStack, delta: TensorRef, rows: range | None) -> None:
        with timed("check updates"):
            stack.finite = stack.finite or all_finite(stack.tensors())
        with timed("hand over"):
            buffers = self._write(stack.buffers)
            slots, self._end = write_slots(self._memory, self._segment, stack.slots, self._end)
            memory, self._end = write_slots(self._memory, self._segment, stack.memory, self._end)
        self.reports.append(Report(places, stack.without_tensors(), delta, rows, buffers, slots, memory))

    def finish(self) -> list[Report]:
        """All that was written."""
        self._report_waiting()
        return self.reports

    def _write(self, tensors: Tensors) -> TensorRef:
        layout, self._end = self._memory.write(self._segment, tensors, self._end)
        return self._segment, layout


@dataclass(eq=False)
class WorkerLoop:
    """What a worker has: its scratch models, clients' data, and the memory that tensors are in."""

    context: ClientContext
    clients: Sequence[Examples] | Mapping[int, Examples]
    test: Examples | None
    memory: SegmentedMemory
    trainer: Trainer
    profile: bool = False

    def train(self, job: TrainJob) -> TrainAnswer:
        """Train the visits of a job and write what comes of them to its segment."""
        start = time.perf_counter()
        asked = replace_fields(job.asked, templates=tuple(self._read_templates(job.templates)))
        memories = job.memories.read(self.memory)
        writer = _ResultWriter(self.memory, job.segment, job.begin, len(asked))
        if self.context.device.type == "cpu":
            self.context.allocate_delta = writer.reserve  # deltas are computed where they are wanted
            self.context.allocate_stack = writer.reserve_stack
        for places, came in self.trainer.train(self.context, asked, self.clients, memories):
            writer.write(places, came)
        return TrainAnswer(writer.finish(), time.perf_counter() - start)

    def _read_templates(self, specs: Sequence[TemplateSpec]) -> Iterator[Assignment]:
        """Assignments with their tensors, in place; what they share, they share here too."""
        found: dict[int, Tensors] = {}

        def read(ref: TensorRef) -> Tensors:
            if id(ref) not in found:
                found[id(ref)] = self.memory.read(*ref)
            return found[id(ref)]

        for spec in specs:
            slots = {name: read(ref) for name, ref in spec.slots.items()}
            yield replace_fields(spec.assignment, params=read(spec.params), buffers=read(spec.buffers), slots=slots)

    def evaluate(self, job: EvaluateJob) -> list[BatchScore]:
        """Evaluate some batches of the test set."""
        assert self.test is not None
        request = replace(
            job.request,
            params=self.memory.read(*job.params),
            buffers=self.memory.read(*job.buffers),
        )
        parts = eval_batches(self.test, request.policy)
        return score_batches(self.context.replica(request.arch), request, self.test, parts, job.parts)

    def answer(self, job: TrainJob | EvaluateJob) -> TrainAnswer | list[BatchScore] | Failure:
        """Do a job; an exception is an answer too."""
        try:
            with timed("everything else" if isinstance(job, TrainJob) else "evaluate"):
                return self.train(job) if isinstance(job, TrainJob) else self.evaluate(job)
        except Exception as error:
            return Failure(_make_sendable(error), traceback.format_exc())


@dataclass(frozen=True, eq=False)
class ParentProcess:
    """The main process, as one of its worker processes knows it.

    Args:
        pipe: to the main process.
        others: the main process's ends of all pipes, which a forked process inherits and must close: a pipe seems open
            as long as anybody has its other end.
        pid: the main process's number.
        lasting: True if the worker was started by a thread that lives as long as the main process.
    """

    pipe: Connection
    others: Sequence[Connection]
    pid: int
    lasting: bool


def serve(loop: WorkerLoop, parent: ParentProcess, threads: int) -> None:
    """What a worker process does: one job after the other, until its pipe is closed or the main process dies."""
    end_with_parent(parent.pid, parent.lasting)
    for other in parent.others:
        other.close()
    leave_to_parent()
    pipe = parent.pipe
    keep_memory()
    clock = Clock() if loop.profile else None
    set_clock(clock)
    with loop.context.computing(threads):
        while True:
            try:
                job = pipe.recv()
            except (EOFError, OSError):
                return
            result = loop.answer(job)
            spent = {} if clock is None else clock.take()
            with suppress(ConnectionError):  # the main process is gone, which `recv` will notice
                pipe.send((job.number, result, spent))


def _make_sendable(error: Exception) -> Exception:
    """An exception that survives the way to the main process; of one that does not, its text does."""
    try:
        reduction.ForkingPickler.dumps(error)
        parts: Any = error.__reduce__()
        parts[0](*parts[1])  # as the other side will make it anew
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
