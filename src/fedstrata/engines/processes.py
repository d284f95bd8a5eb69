"""Worker processes: clients trained at the same time, with the same bits as one after the other.

Workers live as long as the run. Data and the server's tensors lie in memory that they read in place; updates come back
the same way.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

import torch.multiprocessing as mp

from fedstrata.client.context import ClientContext
from fedstrata.core.types import Assignment, Examples, Slots, Update
from fedstrata.engines.grouping import Trainer
from fedstrata.engines.pool import PoolTask, Worker, WorkerPool
from fedstrata.engines.serial import Recall
from fedstrata.engines.tensor_store import SharedMemory, TensorStore
from fedstrata.engines.worker import STORE, Home, Report, TensorRefs, TrainTask, WorkerLoop, serve, write_slots
from fedstrata.errors import UsageError, one_line
from fedstrata.system.signals import block_signals
from fedstrata.system.timing import current_clock

LONG = 32 << 10
"""Bytes of a message from which on it is sent only to a worker that is waiting for it: a full pipe would block both."""
CROWD = 64
"""Segments from which on updates that wait are copied out of theirs: each takes a file descriptor."""


@dataclass(eq=False, kw_only=True)
class _Worker(Worker):
    """A worker process, the main end of its pipe, and a message that must wait."""

    process: Any
    pipe: Connection
    unsent: bytes | None = None


class Processes(WorkerPool[_Worker]):
    """Trains clients in worker processes.

    Args:
        start: how processes are made; forked where that is safe: on Linux, with one thread each.
    """

    kind: ClassVar[str] = "worker process"

    def __init__(
        self,
        context: ClientContext,
        clients: Sequence[Examples],
        test: Examples | None,
        workers: int,
        threads: int,
        trainer: Trainer,
        start: str | None = None,
    ) -> None:
        if sys.platform == "win32":
            raise UsageError("worker processes need Linux or macOS; on Windows use workers = 1 and another engine")
        if context.device.type != "cpu":
            why = f"worker processes train on the CPU; with device = {context.device} use the engine 'serial'"
            raise UsageError(why)
        super().__init__(context, clients, test, workers, threads, trainer)
        # A forked process inherits the main one's OpenMP pool without its threads: with more than one it would hang.
        forks = sys.platform == "linux" and threads == 1
        self._processes: Any = mp.get_context(start or ("fork" if forks else "spawn"))
        self._memory: SharedMemory | None = None
        self._closer: Any = None

    # Processes.

    def _open(self) -> None:
        if self._memory is None:
            self._memory = SharedMemory()
            self._store = TensorStore(self._memory, STORE)
            self._segments: list[int] = []
            self._next_segment = STORE + 1
            self._hired: dict[int, tuple[Any, Connection]] = {}  # for the finalizer, which must not hold on to us
            self._closer = weakref.finalize(self, _close, self._hired, self._memory)
            for place in range(self.workers):
                self._workers.append(self._hire(place))

    @property
    def _tensors(self) -> TensorStore:
        return self._store

    def _hire(self, place: int) -> _Worker:
        assert self._memory is not None
        ours, theirs = self._processes.Pipe()
        forks = self._processes.get_start_method() == "fork"
        others = [w.pipe for i, w in enumerate(self._workers) if i != place] + [ours] if forks else []
        context = replace(self._context, replicas={}, flops=dict(self._context.flops))
        loop = WorkerLoop(context, self._clients, self._test, self._memory, self._trainer, current_clock() is not None)
        lasting = threading.current_thread() is threading.main_thread()
        home = Home(theirs, others, os.getpid(), lasting)
        process = self._processes.Process(
            target=serve, args=(loop, home, self._threads), daemon=True, name=f"fedstrata worker {place + 1}"
        )
        with warnings.catch_warnings(), block_signals():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside the progress bar's thread
            try:
                process.start()
            except AssertionError as error:  # multiprocessing's way to refuse
                raise UsageError(f"worker processes cannot be started here ({error}): use workers = 1") from None
            except Exception as error:
                if forks:
                    raise
                why = one_line(f"{type(error).__name__}: {error}", 200)
                raise UsageError(
                    f"model or data cannot be handed to worker processes ({why}): workers must be 1"
                ) from None
        theirs.close()
        self._hired[place] = (process, ours)
        return _Worker(process=process, pipe=ours)

    def _bury(self, worker: _Worker) -> str:
        worker.process.kill()  # its pipe broke, but a thread of its own may keep it
        worker.process.join()
        worker.pipe.close()
        return _cause(worker.process.exitcode)

    def close(self) -> None:
        """End all workers; they hold nothing that would be lost. The next round starts new ones."""
        closer, self._closer = self._closer, None
        self._memory = None
        self._ended()
        if closer is not None:
            closer()

    # Messages.

    def _send(self, worker: _Worker, message: Any) -> None:
        data = bytes(reduction.ForkingPickler.dumps(message))
        if len(worker.tasks) > 1 and len(data) > LONG:
            worker.unsent = data
        else:
            self._send_bytes(worker, data)

    def _send_bytes(self, worker: _Worker, data: bytes) -> None:
        with suppress(ConnectionError):  # it is dead, which `pump` will see
            worker.pipe.send_bytes(data)

    def _wait(self) -> Sequence[_Worker]:
        pipes: dict[Any, _Worker] = {w.pipe: w for w in self._workers}
        return [pipes[pipe] for pipe in wait(list(pipes))]

    def _receive(self, worker: _Worker) -> tuple[int, Any, dict[str, float]] | None:
        try:
            answer: tuple[int, Any, dict[str, float]] = worker.pipe.recv()
        except (EOFError, OSError):
            return None
        if worker.unsent is not None:
            self._send_bytes(worker, worker.unsent)
            worker.unsent = None
        return answer

    # Tasks.

    def _take_section(self) -> int:
        if self._segments:
            return self._segments.pop()
        self._next_segment += 1
        return self._next_segment - 1

    def _release(self, task: PoolTask) -> None:
        if task.segment is not None:
            self._segments.append(task.segment)
            task.segment = None

    def _train_task(
        self,
        group: Sequence[int],
        assignments: Sequence[Assignment],
        recall: Recall,
        arrived: dict[int, tuple[Update, Slots]],
    ) -> PoolTask:
        def make(number: int) -> TrainTask:
            """The task as it is sent; its memories are read no earlier than this."""
            assert self._memory is not None
            if task.segment is None:
                task.segment = self._take_section()
            begin = 0
            memories: list[TensorRefs] = []
            for a in assignments:
                memory, begin = write_slots(self._memory, task.segment, recall(a.client), begin)
                memories.append(memory)
            return TrainTask(number, task.segment, begin, self._visits(assignments, memories))

        def done(reports: Sequence[Report]) -> None:
            assert self._memory is not None
            crowded = self._next_segment - len(self._segments) > CROWD
            for report in reports:
                result = report.read(self._memory)
                for place, update, kept in (result.copy() if crowded else result).visits():
                    arrived[group[place]] = (update, kept)
            if crowded:
                self._release(task)

        task = PoolTask(make, done)
        return task


def _cause(code: int | None) -> str:
    """Why a process ended."""
    if code == -signal.SIGKILL:
        return "killed, perhaps because memory ran out"
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _close(hired: dict[int, tuple[Any, Connection]], memory: SharedMemory) -> None:
    for process, pipe in hired.values():
        process.kill()
        pipe.close()
    for process, _ in hired.values():
        process.join()
    hired.clear()
    memory.close()
