"""Worker processes: clients trained at the same time, with the same bits as one after the other.

Workers live as long as the run. Data and the server's tensors lie in memory that they read in place; updates come back
the same way and are handed on in client order as they arrive. Clients with more examples go first, but only so far
ahead that few updates wait for their turn. A worker that dies is replaced, and its clients are trained again.
"""

from __future__ import annotations

import heapq
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.multiprocessing as mp

from fedstrata.core import Assignment, Slots, Update, altered
from fedstrata.data.examples import Examples, sizes
from fedstrata.engines.serial import Recall
from fedstrata.engines.shared import SharedMemory, Shelf
from fedstrata.engines.training import Trainer
from fedstrata.engines.worker import SHELF, Desk, Failure, Judge, Report, Train, Visit, serve, write_slots
from fedstrata.errors import FedstrataError, UsageError, one_line
from fedstrata.evaluate import Exam, Mark, total
from fedstrata.timing import Clock, current, timed
from fedstrata.workshop import Workshop, sheets

QUEUE = 2
"""Tasks that a worker has at most: one in its hands and one waiting, so that it never idles between two."""
LONG = 32 << 10
"""Bytes of a message from which on it is sent only to a worker that is waiting for it: a full pipe would block both."""
CROWD = 64
"""Sections from which on updates that wait are copied out of theirs: each takes a file descriptor."""
AHEAD = 4
"""Updates, for each worker, that may wait for their turn; more where they are small."""
AHEAD_BYTES = 64 << 20
"""Memory that waiting updates may take anyway."""
LIVES = 3
"""How many workers a task may cost before the run gives up."""


@dataclass(eq=False)
class _Task:
    """A task, where it stands, and how many workers died of it."""

    make: Callable[[int], Train | Judge]
    done: Callable[[Any], None]
    number: int = -1
    section: int | None = None
    deaths: int = 0
    stale: bool = False
    what: str = ""
    failed: Callable[[BaseException], None] | None = None


@dataclass(eq=False)
class _Worker:
    """A worker process, the main end of its pipe, its tasks, the running one first, and a message that must wait."""

    process: Any
    pipe: Connection
    tasks: list[_Task] = field(default_factory=list)
    unsent: bytes | None = None


class _Exam:
    """An evaluation under way; begun anew if the workers are ended in between."""

    def __init__(self, pool: Processes, exam: Exam, examples: int, parts: int) -> None:
        self._pool, self._exam, self._examples = pool, exam, examples
        self._marks: list[Mark | None] = [None] * parts
        self._error: BaseException | None = None
        self._begin()

    def _begin(self) -> None:
        self._era = self._pool.era
        missing = [part for part, result in enumerate(self._marks) if result is None]
        pieces = min(len(missing), 2 * self._pool.workers)
        for piece in range(pieces):
            self._pool.judge(self._exam, missing[piece::pieces], self._take, self._fail)

    def _fail(self, error: BaseException) -> None:
        self._error = error

    def _take(self, parts: Sequence[int], marks: Sequence[Mark]) -> None:
        for part, result in zip(parts, marks, strict=True):
            self._marks[part] = result

    def __call__(self) -> tuple[float, float]:
        """(accuracy, mean loss), when it is done."""
        while None in self._marks:
            if self._error is not None:
                raise self._error
            if self._era != self._pool.era:
                self._begin()
            self._pool.pump()
        return total([result for result in self._marks if result is not None], self._examples)


class Processes:
    """Trains clients in worker processes.

    Args:
        shop: what each worker makes its scratch models from.
        clients: everybody's data.
        test: the test set.
        workers: how many processes.
        threads: of each one.
        trainer: how the clients of one task are trained.
        start: how processes are made; forked where that is safe: on Linux, with one thread each.
    """

    overlaps = True

    def __init__(
        self,
        shop: Workshop,
        clients: Sequence[Examples],
        test: Examples | None,
        workers: int,
        threads: int,
        trainer: Trainer,
        start: str | None = None,
    ) -> None:
        if sys.platform == "win32":
            raise UsageError("worker processes need Linux or macOS; on Windows use workers = 1 and another engine")
        if shop.device.type != "cpu":
            raise UsageError(f"worker processes train on the CPU; with device = {shop.device} use the engine 'serial'")
        self._shop, self._clients, self._test = shop, clients, test
        self.workers, self._threads, self._trainer = workers, threads, trainer
        # A forked process inherits the main one's OpenMP pool without its threads: with more than one it would hang.
        forks = sys.platform == "linux" and threads == 1
        self._context: Any = mp.get_context(start or ("fork" if forks else "spawn"))
        self._workers: list[_Worker] = []
        self._memory: SharedMemory | None = None
        self._numbers = iter(range(1 << 62))
        self._closer: Any = None
        self.spent = Clock()
        self.era = 0

    # Processes.

    def _open(self) -> None:
        """Start what is not running yet."""
        if self._memory is None:
            self._memory = SharedMemory()
            self._shelf = Shelf(self._memory, SHELF)
            self._sections: list[int] = []
            self._next_section = SHELF + 1
            self._exams: list[_Task] = []
            self._ready: list[tuple[int, int, _Task]] = []
            self._hired: dict[int, tuple[Any, Connection]] = {}  # for the finalizer, which must not hold on to us
            self._closer = weakref.finalize(self, _close, self._hired, self._memory)
            for place in range(self.workers):
                self._workers.append(self._hire(place))

    def _hire(self, place: int) -> _Worker:
        """A new worker process, for the place of an old one or its own."""
        assert self._memory is not None
        ours, theirs = self._context.Pipe()
        forks = self._context.get_start_method() == "fork"
        others = [w.pipe for i, w in enumerate(self._workers) if i != place] + [ours] if forks else []
        shop = replace(self._shop, benches={}, flops=dict(self._shop.flops))
        desk = Desk(shop, self._clients, self._test, self._memory, self._trainer, current() is not None)
        process = self._context.Process(
            target=serve, args=(desk, theirs, others, self._threads), daemon=True, name=f"fedstrata worker {place + 1}"
        )
        with warnings.catch_warnings(), _no_interrupts():
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
        return _Worker(process, ours)

    def _replace_dead(self, worker: _Worker) -> None:
        """Put a new worker in a dead one's place, and its tasks back into the queue."""
        worker.process.kill()  # its pipe broke, but a thread of its own may keep it
        worker.process.join()
        place = self._workers.index(worker)
        worker.pipe.close()
        tasks = worker.tasks
        if tasks:
            tasks[0].deaths += 1
            if tasks[0].deaths >= LIVES:
                raise FedstrataError(
                    f"{tasks[0].what}: its worker process died {LIVES} times ({_cause(worker.process.exitcode)})"
                )
        self._workers[place] = self._hire(place)
        for task in tasks:
            self._give(self._workers[place], task)

    def close(self) -> None:
        """End all workers; they hold nothing that would be lost. The next round starts new ones."""
        closer, self._closer = self._closer, None
        self._workers.clear()
        self._memory = None
        self.era += 1
        if closer is not None:
            closer()

    # Tasks.

    def _give(self, worker: _Worker, task: _Task) -> None:
        with timed("hand out tasks"):
            task.number = next(self._numbers)
            message = bytes(reduction.ForkingPickler.dumps(task.make(task.number)))
            worker.tasks.append(task)
            if len(worker.tasks) > 1 and len(message) > LONG:
                worker.unsent = message
            else:
                self._send(worker, message)

    def _send(self, worker: _Worker, message: bytes) -> None:
        with suppress(ConnectionError):  # it is dead, which `pump` will see
            worker.pipe.send_bytes(message)

    def _dispatch(self) -> None:
        """Give work to every worker that has room for it, evenly; evaluation fills what training leaves."""
        for depth in range(QUEUE):
            for worker in self._workers:
                if len(worker.tasks) == depth:
                    if self._ready:
                        self._give(worker, heapq.heappop(self._ready)[2])
                    elif self._exams:
                        self._give(worker, self._exams.pop(0))

    def pump(self) -> None:
        """Hand out tasks, wait until a worker answers or dies, and take up what came."""
        self._dispatch()
        pipes: dict[Any, _Worker] = {w.pipe: w for w in self._workers}
        with timed("wait for workers"):
            answered = wait(list(pipes))
        for pipe in answered:
            worker = pipes[pipe]
            try:
                number, result, spent = worker.pipe.recv()
            except (EOFError, OSError):
                self._replace_dead(worker)
                continue
            task = worker.tasks.pop(0)
            assert task.number == number
            if worker.unsent is not None:
                self._send(worker, worker.unsent)
                worker.unsent = None
            self.spent.add(spent)
            if task.stale:
                self._release(task)
            elif isinstance(result, Failure):
                self._release(task)
                if task.failed is not None:
                    task.failed(result.error)
                result.error.add_note(f"in a worker process:\n{result.trace}")
                raise result.error
            else:
                task.done(result)

    def _take_section(self) -> int:
        if self._sections:
            return self._sections.pop()
        self._next_section += 1
        return self._next_section - 1

    def _release(self, task: _Task) -> None:
        if task.section is not None:
            self._sections.append(task.section)
            task.section = None

    # Rounds.

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[tuple[Update, Slots]]:
        """Updates in client order, each with what its client will remember; good until the next is asked for."""
        self._open()
        era = self.era
        self._shelf.sweep()
        round_ = _Round(assignments, self._trainer.groups(assignments, self._clients), self._clients)
        ahead = max(AHEAD * self.workers, AHEAD_BYTES // _bytes(assignments))
        arrived: dict[int, tuple[Update, Slots]] = {}
        tasks: dict[int, _Task] = {}  # position → the task that it belongs to
        left: dict[_Task, int] = {}  # how many of its updates were not handed on yet
        try:
            for position in range(len(assignments)):
                for group in round_.opened(position + ahead):
                    task = self._task(group, [assignments[i] for i in group], recall, arrived)
                    tasks.update(dict.fromkeys(group, task))
                    heapq.heappush(self._ready, (-round_.size(group), group[0], task))
                while position not in arrived:
                    self.pump()
                self._dispatch()
                yield arrived.pop(position)
                task = tasks.pop(position)
                left[task] = left.get(task, len(round_.group_of[position])) - 1
                if not left[task]:
                    self._release(task)
        finally:
            if self.era == era:  # else those workers are gone, and another round may have begun with new ones
                self._ready.clear()
                for task in tasks.values():  # of a round that was given up
                    task.stale = True
                    if not any(task in w.tasks for w in self._workers):
                        self._release(task)

    def _task(
        self,
        group: Sequence[int],
        assignments: Sequence[Assignment],
        recall: Recall,
        arrived: dict[int, tuple[Update, Slots]],
    ) -> _Task:
        def make(number: int) -> Train:
            """The task as it is sent; its memories are read no earlier than this."""
            assert self._memory is not None
            if task.section is None:
                task.section = self._take_section()
            begin = 0
            visits = []
            for a in assignments:
                memory, begin = write_slots(self._memory, task.section, recall(a.client), begin)
                visits.append(
                    Visit(
                        assignment=altered(a, params={}, buffers={}, slots={}),
                        params=self._shelf.put(a.params),
                        buffers=self._shelf.put(a.buffers),
                        slots={name: self._shelf.put(slot) for name, slot in a.slots.items()},
                        memory=memory,
                    )
                )
            return Train(number, task.section, begin, visits)

        def done(reports: Sequence[Report]) -> None:
            assert self._memory is not None
            assert task.section is not None
            crowded = self._next_section - len(self._sections) > CROWD
            for report in reports:
                harvest = report.read(self._memory, task.section)
                for place, update, kept in (harvest.copy() if crowded else harvest).visits():
                    arrived[group[place]] = (update, kept)
            if crowded:
                self._release(task)

        clients = ", ".join(str(a.client) for a in assignments[:3]) + (", …" if len(assignments) > 3 else "")
        task = _Task(make, done)
        task.what = f"client{'s' if len(assignments) > 1 else ''} {clients}"
        return task

    def evaluate(self, exam: Exam) -> Callable[[], tuple[float, float]]:
        """Begin to judge on the test set; what is returned waits for the result. Training goes on beside it."""
        assert self._test is not None
        return _Exam(self, exam, len(self._test), len(sheets(self._test, exam.policy)))

    def judge(
        self,
        exam: Exam,
        which: Sequence[int],
        done: Callable[[Sequence[int], Sequence[Mark]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Queue some batches of the test set for evaluation."""
        self._open()
        bare = replace(exam, params={}, buffers={})
        task = _Task(
            lambda number: Judge(number, bare, self._shelf.put(exam.params), self._shelf.put(exam.buffers), which),
            lambda marks: done(which, marks),
        )
        task.what, task.failed = "the evaluation", failed
        self._exams.append(task)


class _Round:
    """The groups of a round, opened in the order in which their first updates are needed."""

    def __init__(
        self, assignments: Sequence[Assignment], groups: Sequence[Sequence[int]], clients: Sequence[Examples]
    ) -> None:
        self.group_of = {position: group for group in groups for position in group}
        self._waiting = sorted(groups, key=min, reverse=True)
        size = sizes(clients)
        self._sizes = [size(a.client) if a.work.steps is None else 1 for a in assignments]

    def size(self, group: Sequence[int]) -> int:
        """How much there is to train: the examples of its clients, or 1 each where all take the same steps."""
        return sum(self._sizes[position] for position in group)

    def opened(self, until: int) -> Iterator[Sequence[int]]:
        """The groups that may be trained now: those with an update that is needed before `until`."""
        while self._waiting and min(self._waiting[-1]) < until:
            yield self._waiting.pop()


def _bytes(assignments: Sequence[Assignment]) -> int:
    """About the size of the largest update of a round."""
    return max((sum(a.params[n].nbytes for n in a.travels) for a in assignments), default=0) + 4096


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ctrl-C waits until this is over: a worker must first have said that it ignores it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
