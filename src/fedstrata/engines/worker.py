"""A worker's side: it takes jobs, reads their tensors in place from segments of memory, and writes results there.

Pipes carry small Python objects between processes of one program; nothing of this crosses a trust boundary.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from fedstrata.client.context import ClientContext
from fedstrata.client.results import TrainResult
from fedstrata.core.tensors import Tensors, all_finite
from fedstrata.core.types import Assignment, Examples, Slots, replace_fields
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
class VisitSpec:
    """One client's visit, for a worker: the assignment without its tensors, and where these are.

    `params`, `buffers` and `slots` are in the store's segment; `memory` is in a segment of the job's own.
    """

    assignment: Assignment
    params: TensorRef
    buffers: TensorRef
    slots: TensorRefs
    memory: TensorRefs


@dataclass(frozen=True, eq=False)
class TrainJob:
    """A job: visits to train, whose results are to be written to `segment` from `begin` on."""

    number: int
    segment: int
    begin: int
    visits: Sequence[VisitSpec]


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
    """What comes back of visits: a result without its tensors, and where these are in the job's segment."""

    result: TrainResult
    delta: TensorRef
    buffers: TensorRef
    slots: TensorRefs
    memory: TensorRefs

    def read(self, memory: SegmentedMemory) -> TrainResult:
        """The result, its tensors in place."""
        return replace_fields(
            self.result,
            delta=memory.read(*self.delta),
            buffers=memory.read(*self.buffers),
            slots=read_slots(memory, self.slots),
            memory=read_slots(memory, self.memory),
        )


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


class _ResultWriter:
    """Writes the results of a job to its segment, one after the other."""

    def __init__(self, memory: SegmentedMemory, segment: int, begin: int) -> None:
        self._memory, self._segment, self._end = memory, segment, begin
        self._reserved: tuple[Layout, Tensors] | None = None

    def reserve(self, tensors: Tensors) -> Tensors:
        """Room in the segment for a delta, tensors like these: a delta that is computed there need not be copied."""
        layout, self._end = plan_layout(tensors, self._end)
        self._reserved = layout, self._memory.read(self._segment, layout)
        return self._reserved[1]

    def write(self, result: TrainResult) -> Report:
        """Write a result's tensors, unless they are there already."""
        with timed("check updates"):
            finite = all(u.finite for u in result.updates) or all_finite(result.tensors())
        with timed("hand over"):
            delta = self._written_delta(result.delta) or self._write(result.delta)
            buffers = self._write(result.buffers)
            slots, self._end = write_slots(self._memory, self._segment, result.slots, self._end)
            memory, self._end = write_slots(self._memory, self._segment, result.memory, self._end)
        updates = tuple(replace_fields(u, finite=finite) for u in result.updates)
        bare = replace_fields(result, updates=updates, delta={}, buffers={}, slots={}, memory={})
        return Report(bare, delta, buffers, slots, memory)

    def _written_delta(self, delta: Tensors) -> TensorRef | None:
        """Where a delta is if it was computed in the room that was reserved last."""
        if self._reserved is None:
            return None
        layout, tensors = self._reserved
        return (self._segment, layout) if all(delta[n] is t for n, t in tensors.items()) else None

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

    def train(self, job: TrainJob) -> list[Report]:
        """Train the visits of a job and write what comes of them to its segment."""
        assignments = self._read_assignments(job.visits)
        memories = [read_slots(self.memory, visit.memory) for visit in job.visits]
        data = [self.clients[a.client] for a in assignments]
        writer = _ResultWriter(self.memory, job.segment, job.begin)
        if self.context.device.type == "cpu":
            self.context.allocate_delta = writer.reserve  # deltas are computed where they are wanted
        return [writer.write(result) for result in self.trainer.train(self.context, assignments, data, memories)]

    def _read_assignments(self, visits: Sequence[VisitSpec]) -> list[Assignment]:
        """The assignments with their tensors, in place."""
        found: dict[int, Tensors] = {}  # one message refers to the same tensors many times

        def read(ref: TensorRef) -> Tensors:
            if id(ref) not in found:
                found[id(ref)] = self.memory.read(*ref)
            return found[id(ref)]

        return [
            replace_fields(
                visit.assignment,
                params=read(visit.params),
                buffers=read(visit.buffers),
                slots={name: read(ref) for name, ref in visit.slots.items()},
            )
            for visit in visits
        ]

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

    def answer(self, job: TrainJob | EvaluateJob) -> list[Report] | list[BatchScore] | Failure:
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
