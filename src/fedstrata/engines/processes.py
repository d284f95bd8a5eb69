"""Worker processes: clients trained at the same time, with the same bits as one after the other.

Workers run as long as the federation does. Data and the server's tensors are in memory that they share with the main
process and read in place; updates come back the same way.
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
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

import torch
import torch.multiprocessing as mp

from fedstrata.client.context import ClientContext
from fedstrata.core.stacks import Assignments, Memories
from fedstrata.core.types import Examples, replace_fields
from fedstrata.engines.grouping import ONE_BY_ONE, ArrivedVisits, Trainer
from fedstrata.engines.pool import PoolJob, Worker, WorkerPool
from fedstrata.engines.protocol import Engine, Recall
from fedstrata.engines.registry import EngineRequest
from fedstrata.engines.tensor_store import SharedMemory, TensorStore
from fedstrata.engines.worker import STORE, MemorySpec, ParentProcess, TrainAnswer, TrainJob, WorkerLoop, serve
from fedstrata.errors import UsageError, one_line
from fedstrata.system.devices import survive_fork
from fedstrata.system.signals import block_signals
from fedstrata.system.timing import current_clock

LONG_MESSAGE = 32 << 10
"""Bytes of a message from which on it is sent only to a worker that is waiting for it: a full pipe would block both."""
MANY_SEGMENTS = 64
"""Segments in use from which on updates that wait are copied out of theirs: each takes a file descriptor."""


def build_processes(request: EngineRequest, trainer: Trainer = ONE_BY_ONE) -> Engine:
    """The engine `processes`; with another trainer, the workers of `vmap`."""
    assert request.workers is not None
    data, size = (request.clients, request.test), (request.workers, request.threads)
    return Processes(request.context, *data, *size, trainer, request.devices)


@dataclass(eq=False, kw_only=True)
class _Worker(Worker):
    """A worker process, the main process's end of its pipe, and a message that must wait until it is read."""

    process: Any
    pipe: Connection
    unsent: bytes | None = None


class Processes(WorkerPool[_Worker]):
    """Trains clients in worker processes.

    Args:
        devices: that workers are dealt out to, in turn; empty for the context's own.
        start: how processes are started, as multiprocessing calls it; None forks where that is safe: on Linux, with one
            thread each, on the CPU.
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
        devices: Sequence[torch.device] = (),
        start: str | None = None,
    ) -> None:
        if sys.platform == "win32":
            raise UsageError("worker processes need Linux or macOS; on Windows use workers = 1 and another engine")
        super().__init__(context, clients, test, workers, threads, trainer)
        self._devices = tuple(devices) or (context.device,)
        # A forked process inherits the main one's OpenMP pool without its threads: with more than one it would hang.
        forks = sys.platform == "linux" and threads == 1 and survive_fork(self._devices)
        self._multiprocessing: Any = mp.get_context(start or ("fork" if forks else "spawn"))
        self._memory: SharedMemory | None = None
        self._closer: Any = None

    # Processes.

    def _open(self) -> None:
        if self._memory is None:
            self._memory = SharedMemory()
            self._store = TensorStore(self._memory, STORE)
            self._segments: list[int] = []
            self._next_segment = STORE + 1
            # For the finalizer, which must not hold on to this object: place → (process, pipe).
            self._running: dict[int, tuple[Any, Connection]] = {}
            self._closer = weakref.finalize(self, _kill_all, self._running, self._memory)
            for place in range(self.workers):
                self._workers.append(self._start_worker(place))

    @property
    def _tensors(self) -> TensorStore:
        return self._store

    def _start_worker(self, place: int) -> _Worker:
        assert self._memory is not None
        ours, theirs = self._multiprocessing.Pipe()
        forks = self._multiprocessing.get_start_method() == "fork"
        others = [w.pipe for i, w in enumerate(self._workers) if i != place] + [ours] if forks else []
        context = self._context.for_worker(self._devices[place % len(self._devices)])
        loop = WorkerLoop(context, self._clients, self._test, self._memory, self._trainer, current_clock() is not None)
        lasting = threading.current_thread() is threading.main_thread()
        parent = ParentProcess(theirs, others, os.getpid(), lasting)
        process = self._multiprocessing.Process(
            target=serve, args=(loop, parent, self._threads), daemon=True, name=f"fedstrata worker {place + 1}"
        )
        _start(process, forks)
        theirs.close()
        self._running[place] = (process, ours)
        return _Worker(process=process, pipe=ours)

    def _reap(self, worker: _Worker) -> str:
        worker.process.kill()  # its pipe is broken, but a thread of its own may keep the process alive
        worker.process.join()
        worker.pipe.close()
        return _exit_cause(worker.process.exitcode)

    def close(self) -> None:
        """End all workers; they hold nothing that would be lost. The next round starts new ones."""
        closer, self._closer = self._closer, None
        self._memory = None
        self._forget_workers()
        if closer is not None:
            closer()

    # Messages.

    def _send(self, worker: _Worker, message: Any) -> None:
        data = bytes(reduction.ForkingPickler.dumps(message))
        if len(worker.jobs) > 1 and len(data) > LONG_MESSAGE:
            worker.unsent = data
        else:
            self._send_bytes(worker, data)

    def _send_bytes(self, worker: _Worker, data: bytes) -> None:
        """Write a message to a worker's pipe."""
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

    def _take_segment(self) -> int:
        """A segment that no job uses."""
        if self._segments:
            return self._segments.pop()
        self._next_segment += 1
        return self._next_segment - 1

    def _release(self, job: PoolJob) -> None:
        if job.segment is not None:
            self._segments.append(job.segment)
            job.segment = None

    def _train_job(self, group: Sequence[int], asked: Assignments, recall: Recall, arrived: ArrivedVisits) -> PoolJob:
        def build_message(number: int) -> TrainJob:
            """The job as it is sent; its clients' memories are read no earlier than this."""
            assert self._memory is not None
            if job.segment is None:
                job.segment = self._take_segment()
            remembered = Memories.of(recall(asked.clients))
            memories, begin = MemorySpec.write(self._memory, job.segment, remembered)
            bare = replace_fields(asked, templates=())
            return TrainJob(number, job.segment, begin, self._templates(asked), bare, memories)

        def take_result(answer: TrainAnswer) -> None:
            """Put the updates into `arrived`; copied if too many segments are in use."""
            assert self._memory is not None
            self._take_pace(answer, len(asked))
            copies = self._next_segment - len(self._segments) > MANY_SEGMENTS
            for report in answer.reports:
                stack = report.read(self._memory)
                arrived.add([group[place] for place in report.places], stack.copy() if copies else stack)
            if copies:
                self._release(job)

        job = PoolJob(build_message, take_result)
        return job


def _start(process: Any, forks: bool) -> None:
    """Start a process, or refuse in one sentence."""
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
            raise UsageError(f"model or data cannot be handed to worker processes ({why}): workers must be 1") from None


def _exit_cause(code: int | None) -> str:
    """Why a process ended."""
    if code == -signal.SIGKILL:
        return "killed, perhaps because memory ran out"
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _kill_all(running: dict[int, tuple[Any, Connection]], memory: SharedMemory) -> None:
    """End all worker processes and let go of the memory that they shared."""
    for process, pipe in running.values():
        process.kill()
        pipe.close()
    for process, _ in running.values():
        process.join()
    running.clear()
    memory.close()
