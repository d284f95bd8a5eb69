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
from fedstrata.evaluate import Exam, Mark, sheets, total
from fedstrata.timing import Clock, current, timed
from fedstrata.workshop import Workshop

QUEUE = 2
"""Tasks that a worker has at most: one in its hands and one waiting, so that it never idles between two."""
LONG = 200
"""Parameters from which on messages may be too long for a pipe: a task is then sent only to a worker that reads."""
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


@dataclass(eq=False)
class _Worker:
    """A worker process, the main end of its pipe, and the tasks that it has, the running one first."""

    process: Any
    pipe: Connection
    tasks: list[_Task] = field(default_factory=list)


class _Exam:
    """An evaluation under way."""

    def __init__(self, pool: Processes, examples: int, parts: int) -> None:
        self._pool, self._examples, self._marks = pool, examples, [None] * parts
        self._left = parts

    def take(self, parts: Sequence[int], marks: Sequence[Mark]) -> None:
        for part, result in zip(parts, marks, strict=True):
            self._marks[part] = result  # type: ignore[call-overload]
        self._left -= len(parts)

    def __call__(self) -> tuple[float, float]:
        """(accuracy, mean loss), when it is done."""
        while self._left:
            self._pool.pump()
        return total(self._marks, self._examples)  # type: ignore[arg-type]


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
        names = max(sum(1 for _ in shop.build(arch).parameters()) for arch in shop.archs)
        self._queue = QUEUE if names <= LONG else 1

    # Processes.

    def _open(self) -> SharedMemory:
        """Start what is not running yet."""
        if self._memory is None:
            self._memory = SharedMemory()
            self._shelf = Shelf(self._memory, SHELF)
            self._sections: list[int] = []
            self._next_section = SHELF + 1
            self._exams: list[_Task] = []
            self._ready: list[tuple[int, int, _Task]] = []
            self._closer = weakref.finalize(self, _close, self._workers, self._memory)
            for place in range(self.workers):
                self._workers.append(self._hire(place))
        return self._memory

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
            except Exception as error:
                if forks:
                    raise
                why = one_line(f"{type(error).__name__}: {error}", 200)
                raise UsageError(
                    f"model or data cannot be handed to worker processes ({why}): workers must be 1"
                ) from None
        theirs.close()
        return _Worker(process, ours)

    def _replace_dead(self, worker: _Worker) -> None:
        """Put a new worker in a dead one's place, and its tasks back into the queue."""
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
        if self._closer is not None:
            self._closer()
        self._workers.clear()
        self._memory = None

    # Tasks.

    def _give(self, worker: _Worker, task: _Task) -> None:
        task.number = next(self._numbers)
        worker.tasks.append(task)
        with timed("hand out tasks"), suppress(BrokenPipeError, ConnectionError):  # it is dead, which `pump` will see
            worker.pipe.send(task.make(task.number))

    def _dispatch(self) -> None:
        """Give work to every worker that has room for it, evenly; evaluation fills what training leaves."""
        for depth in range(self._queue):
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
            self.spent.add(spent)
            if task.stale:
                self._release(task)
            elif isinstance(result, Failure):
                self._release(task)
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
            for report in reports:
                for place, update, kept in report.read(self._memory, task.section).visits():
                    arrived[group[place]] = (update, kept)

        clients = ", ".join(str(a.client) for a in assignments[:3]) + (", …" if len(assignments) > 3 else "")
        task = _Task(make, done)
        task.what = f"client{'s' if len(assignments) > 1 else ''} {clients}"
        return task

    def evaluate(self, exam: Exam) -> Callable[[], tuple[float, float]]:
        """Begin to judge on the test set; what is returned waits for the result. Training goes on beside it."""
        self._open()
        assert self._test is not None
        parts = len(sheets(self._test, exam.policy))
        result = _Exam(self, len(self._test), parts)
        pieces = min(parts, 2 * self.workers)
        for piece in range(pieces):
            self._exams.append(self._judge(exam, range(piece, parts, pieces), result))
        return result

    def _judge(self, exam: Exam, which: Sequence[int], result: _Exam) -> _Task:
        bare = replace(exam, params={}, buffers={})
        task = _Task(
            lambda number: Judge(number, bare, self._shelf.put(exam.params), self._shelf.put(exam.buffers), which),
            lambda marks: result.take(which, marks),
        )
        task.what = "the evaluation"
        return task


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


def _close(workers: list[_Worker], memory: SharedMemory) -> None:
    for worker in workers:
        worker.process.kill()
        worker.pipe.close()
    for worker in workers:
        worker.process.join()
    memory.close()
