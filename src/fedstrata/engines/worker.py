"""A worker process: takes tasks from its pipe, reads tensors where they lie in shared memory, and leaves results there.

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
from fedstrata.engines.tensor_store import Layout, SegmentedMemory, TensorRef, plan
from fedstrata.evaluation.evaluate import BatchScore, EvalRequest, score_batches
from fedstrata.system.machine import end_with_parent, keep_memory
from fedstrata.system.signals import leave_to_parent
from fedstrata.system.timing import Clock, set_clock, timed

STORE = 0
"""The segment that holds the server's tensors; every other one belongs to a task at a time."""

TensorRefs = dict[str, TensorRef]
"""Technique name → where its tensors lie."""


@dataclass(frozen=True, eq=False)
class VisitSpec:
    """One client's visit, for a worker: the assignment without its tensors, and where they lie.

    `params`, `buffers` and `slots` are on the store; `memory` is in a segment of the task's own.
    """

    assignment: Assignment
    params: TensorRef
    buffers: TensorRef
    slots: TensorRefs
    memory: TensorRefs


@dataclass(frozen=True, eq=False)
class TrainTask:
    """A task: visits to train, the results to be left in `segment` from `begin` on."""

    number: int
    segment: int
    begin: int
    visits: Sequence[VisitSpec]


@dataclass(frozen=True, eq=False)
class EvaluateTask:
    """A task: some batches of the test set to evaluate."""

    number: int
    request: EvalRequest
    params: TensorRef
    buffers: TensorRef
    parts: Sequence[int]


@dataclass(frozen=True, eq=False)
class Report:
    """What comes back of visits: a result without its tensors, and where they lie: in the task's segment."""

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
    """An exception that a task ended with, and its traceback as text."""

    error: BaseException
    trace: str


def write_slots(memory: SegmentedMemory, segment: int, slots: Slots, begin: int) -> tuple[TensorRefs, int]:
    """Copy slots into a segment: (where they lie, where they end)."""
    places: TensorRefs = {}
    for name, tensors in slots.items():
        layout, begin = memory.write(segment, tensors, begin)
        places[name] = (segment, layout)
    return places, begin


def read_slots(memory: SegmentedMemory, places: Mapping[str, TensorRef]) -> Slots:
    """Slots, in place."""
    return {name: memory.read(*place) for name, place in places.items()}


@dataclass(eq=False)
class WorkerLoop:
    """What a worker has: its scratch models, clients' data, and the memory that tensors lie in."""

    context: ClientContext
    clients: Sequence[Examples] | Mapping[int, Examples]
    test: Examples | None
    memory: SegmentedMemory
    trainer: Trainer
    profile: bool = False

    def train(self, task: TrainTask) -> list[Report]:
        """Train the visits of a task and leave what comes of them in its segment."""
        read: dict[int, Tensors] = {}  # one message names the same places many times

        def store(place: TensorRef) -> Tensors:
            if id(place) not in read:
                read[id(place)] = self.memory.read(*place)
            return read[id(place)]

        assignments = [
            replace_fields(
                visit.assignment,
                params=store(visit.params),
                buffers=store(visit.buffers),
                slots={name: store(place) for name, place in visit.slots.items()},
            )
            for visit in task.visits
        ]
        memories = [read_slots(self.memory, visit.memory) for visit in task.visits]
        data = [self.clients[a.client] for a in assignments]
        end = task.begin
        reports = []
        given: list[tuple[Layout, Tensors]] = []

        def room(tensors: Tensors) -> Tensors:
            nonlocal end
            layout, end = plan(tensors, end)
            given[:] = [(layout, self.memory.read(task.segment, layout))]
            return given[0][1]

        if self.context.device.type == "cpu":
            self.context.room = room  # deltas are computed where they are wanted
        for result in self.trainer.train(self.context, assignments, data, memories):
            with timed("check updates"):
                finite = all_finite(result.tensors())
            if given and all(result.delta[n] is t for n, t in given[0][1].items()):
                delta = given[0][0]
            else:
                with timed("hand over"):
                    delta, end = self.memory.write(task.segment, result.delta, end)
            with timed("hand over"):
                buffers, end = self.memory.write(task.segment, result.buffers, end)
                slots, end = write_slots(self.memory, task.segment, result.slots, end)
                memory, end = write_slots(self.memory, task.segment, result.memory, end)
            updates = tuple(replace_fields(u, finite=finite) for u in result.updates)
            bare = replace_fields(result, updates=updates, delta={}, buffers={}, slots={}, memory={})
            reports.append(Report(bare, (task.segment, delta), (task.segment, buffers), slots, memory))
        return reports

    def judge(self, task: EvaluateTask) -> list[BatchScore]:
        """Evaluate some batches of the test set."""
        assert self.test is not None
        request = replace(
            task.request,
            params=self.memory.read(*task.params),
            buffers=self.memory.read(*task.buffers),
        )
        parts = eval_batches(self.test, request.policy)
        return score_batches(self.context.replica(request.arch), request, self.test, parts, task.parts)

    def answer(self, task: TrainTask | EvaluateTask) -> list[Report] | list[BatchScore] | Failure:
        """Do a task; an exception is an answer too."""
        try:
            with timed("everything else" if isinstance(task, TrainTask) else "evaluate"):
                return self.train(task) if isinstance(task, TrainTask) else self.judge(task)
        except Exception as error:
            return Failure(_sendable(error), traceback.format_exc())


@dataclass(frozen=True, eq=False)
class Home:
    """Where a worker process comes from.

    Args:
        pipe: to the main process.
        others: the main ends of all pipes, which a forked process inherits: they would never seem closed.
        main: the main process's number.
        lasting: the worker was started by a thread that lives as long as the main process.
    """

    pipe: Connection
    others: Sequence[Connection]
    main: int
    lasting: bool


def serve(loop: WorkerLoop, home: Home, threads: int) -> None:
    """A worker's life: until the pipe is closed, or the main process dies."""
    end_with_parent(home.main, home.lasting)
    for other in home.others:
        other.close()
    leave_to_parent()
    pipe = home.pipe
    keep_memory()
    clock = Clock() if loop.profile else None
    set_clock(clock)
    with loop.context.computing(threads):
        while True:
            try:
                task = pipe.recv()
            except (EOFError, OSError):
                return
            result = loop.answer(task)
            spent = {} if clock is None else clock.take()
            with suppress(ConnectionError):  # the main process is gone, which `recv` will tell
                pipe.send((task.number, result, spent))


def _sendable(error: Exception) -> Exception:
    """An exception that survives the way to the main process; of one that does not, its text does."""
    try:
        reduction.ForkingPickler.dumps(error)
        parts: Any = error.__reduce__()
        parts[0](*parts[1])  # as the other side will make it anew
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
