"""Workers that train clients at the same time, whatever they are: who gets which task, and in which order.

Updates are handed on in client order as they arrive. Clients with more examples go first, but only so far ahead that
few updates wait for their turn. A worker that dies is replaced, and its clients are trained again.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

from fedstrata.client.context import ClientContext
from fedstrata.core.types import Assignment, Examples, Slots, Update, replace_fields
from fedstrata.data.batching import eval_batches
from fedstrata.data.examples import sizes
from fedstrata.engines.grouping import Trainer
from fedstrata.engines.serial import Recall
from fedstrata.engines.tensor_store import TensorStore
from fedstrata.engines.worker import EvaluateTask, Failure, TensorRefs, VisitSpec
from fedstrata.errors import FedstrataError
from fedstrata.evaluation.evaluate import BatchScore, EvalRequest, total
from fedstrata.system.timing import Clock, timed

QUEUE = 2
"""Tasks that a worker has at most: one in its hands and one waiting, so that it never idles between two."""
AHEAD = 4
"""Updates, for each worker, that may wait for their turn; more where they are small."""
AHEAD_BYTES = 64 << 20
"""Memory that waiting updates may take anyway."""
LIVES = 3
"""How many workers a task may cost before the run gives up."""


@dataclass(eq=False)
class PoolTask:
    """A task, where it stands, and how many workers died of it.

    Args:
        make: the task as it is sent, under a number.
        done: takes what came of it up.
        what: its name in a sentence.
        clients: whose visits it holds; empty for an evaluation.
        order: the smallest is done first: (minus the amount of work, position).
        failed: told of an exception.
        segment: where its results lie.
        deaths: workers that it has cost.
        stale: nobody waits for it any more.
    """

    make: Callable[[int], Any]
    done: Callable[[Any], None]
    what: str = ""
    clients: tuple[int, ...] = ()
    order: tuple[int, int] = (0, 0)
    failed: Callable[[BaseException], None] | None = None
    number: int = -1
    segment: int | None = None
    deaths: int = 0
    stale: bool = False


@dataclass(eq=False)
class Worker:
    """A worker and its tasks, the running one first."""

    tasks: list[PoolTask] = field(default_factory=list)


W = TypeVar("W", bound=Worker)


class _PoolEvaluation:
    """An evaluation under way; begun anew if the workers are ended in between."""

    def __init__(self, pool: WorkerPool[Any], request: EvalRequest, examples: int, parts: int) -> None:
        self._pool, self._request, self._examples = pool, request, examples
        self._scores: list[BatchScore | None] = [None] * parts
        self._error: BaseException | None = None
        self._begin()

    def _begin(self) -> None:
        self._era = self._pool.era
        missing = [part for part, result in enumerate(self._scores) if result is None]
        pieces = min(len(missing), 2 * self._pool.workers)
        for piece in range(pieces):
            self._pool.judge(self._request, missing[piece::pieces], self._take, self._fail)

    def _fail(self, error: BaseException) -> None:
        self._error = error

    def _take(self, parts: Sequence[int], scores: Sequence[BatchScore]) -> None:
        for part, result in zip(parts, scores, strict=True):
            self._scores[part] = result

    def __call__(self) -> tuple[float, float]:
        """(accuracy, mean loss), when it is done."""
        while None in self._scores:
            if self._error is not None:
                raise self._error
            if self._era != self._pool.era:
                self._begin()
            self._pool.pump()
        return total([result for result in self._scores if result is not None], self._examples)


class WorkerPool(ABC, Generic[W]):
    """Trains clients in workers of some kind.

    Args:
        context: what each worker makes its scratch models from.
        clients: everybody's data.
        test: the test set.
        workers: how many.
        threads: of each one.
        trainer: how the clients of one task are trained.
    """

    overlaps = True
    kind: ClassVar[str] = "worker"
    """What a worker is called."""

    def __init__(
        self,
        context: ClientContext,
        clients: Sequence[Examples],
        test: Examples | None,
        workers: int,
        threads: int,
        trainer: Trainer,
    ) -> None:
        self._context, self._clients, self._test = context, clients, test
        self.workers, self._threads, self._trainer = workers, threads, trainer
        self._workers: list[W] = []
        self._evaluations: list[PoolTask] = []
        self._ready: list[tuple[int, int, PoolTask]] = []
        self._numbers = iter(range(1 << 62))
        self.spent = Clock()
        self._events: list[str] = []
        self._number = 0
        self.era = 0

    # What every kind of worker does in its own way.

    @abstractmethod
    def _open(self) -> None:
        """Start what is not running yet."""

    @abstractmethod
    def _hire(self, place: int) -> W:
        """A new worker, for the place of an old one or its own."""

    @abstractmethod
    def _bury(self, worker: W) -> str:
        """Make sure that a dead worker is gone; why it died."""

    @abstractmethod
    def _send(self, worker: W, message: Any) -> None:
        """Send a task to a worker that has it on its list."""

    @abstractmethod
    def _wait(self) -> Sequence[W]:
        """Wait until workers answer or die: those that did."""

    @abstractmethod
    def _receive(self, worker: W) -> tuple[int, Any, dict[str, float]] | None:
        """An answer (number of the task, result, seconds by phase), or None if the worker is dead."""

    @abstractmethod
    def _train_task(
        self,
        group: Sequence[int],
        assignments: Sequence[Assignment],
        recall: Recall,
        arrived: dict[int, tuple[Update, Slots]],
    ) -> PoolTask:
        """The visits of a group as a task; what comes of them is put into `arrived`."""

    def _release(self, task: PoolTask) -> None:
        """The results of a task are not needed any more."""

    @property
    @abstractmethod
    def _tensors(self) -> TensorStore:
        """Where the server's tensors are."""

    @abstractmethod
    def close(self) -> None:
        """End all workers; they hold nothing that would be lost. The next round starts new ones."""

    def _ended(self) -> None:
        """All workers are gone."""
        self._workers.clear()
        self._evaluations.clear()
        self._ready.clear()
        self.era += 1

    def told(self) -> tuple[str, ...]:
        """What has happened to workers since the last time, for a run's notes."""
        events, self._events = tuple(self._events), []
        return events

    # Tasks.

    def _replace_dead(self, worker: W) -> None:
        """Put a new worker in a dead one's place, and its tasks back into the queue."""
        cause = self._bury(worker)
        place = self._workers.index(worker)
        tasks = worker.tasks
        what = f"{tasks[0].what}: its {self.kind}" if tasks else f"a {self.kind}"
        self._events.append(f"round {self._number}: {what} died ({cause}) and was replaced")
        if tasks:
            tasks[0].deaths += 1
            if tasks[0].deaths >= LIVES:
                raise FedstrataError(f"{what} died {LIVES} times ({cause})")
        self._workers[place] = self._hire(place)
        self._hand_back(tasks)

    def _hand_back(self, tasks: Sequence[PoolTask]) -> None:
        """Put a dead worker's tasks back into the queue."""
        for task in reversed(tasks):
            if task.stale:
                self._release(task)
            elif task.clients:
                self._queue(task)
            else:
                self._evaluations.insert(0, task)

    def _give(self, worker: W, task: PoolTask) -> None:
        with timed("hand out tasks"):
            task.number = next(self._numbers)
            message = task.make(task.number)
            worker.tasks.append(task)
            self._send(worker, message)

    def _queue(self, task: PoolTask) -> None:
        """Let a task of training wait for a worker."""
        heapq.heappush(self._ready, (*task.order, task))

    def _present(self, worker: W) -> bool:
        """True if a worker takes tasks."""
        return True

    def _choose(self, worker: W) -> PoolTask | None:
        """The task of training that a worker should do next."""
        return heapq.heappop(self._ready)[2] if self._ready else None

    def _dispatch(self) -> None:
        """Give work to every worker that has room for it, evenly; evaluation fills what training leaves."""
        for depth in range(QUEUE):
            for worker in self._workers:
                if len(worker.tasks) == depth and self._present(worker):
                    task = self._choose(worker)
                    if task is not None:
                        self._give(worker, task)
                    elif self._evaluations:
                        self._give(worker, self._evaluations.pop(0))

    def pump(self) -> None:
        """Hand out tasks, wait until a worker answers or dies, and take up what came."""
        self._dispatch()
        with timed("wait for workers"):
            answered = self._wait()
        for worker in answered:
            answer = self._receive(worker)
            if answer is None:
                self._replace_dead(worker)
                continue
            number, result, spent = answer
            task = worker.tasks.pop(0)
            assert task.number == number
            self.spent.add(spent)
            if task.stale:
                self._release(task)
            elif isinstance(result, Failure):
                self._release(task)
                if task.failed is not None:
                    task.failed(result.error)
                result.error.add_note(f"in a {self.kind}:\n{result.trace}")
                raise result.error
            else:
                task.done(result)

    # Rounds.

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[tuple[Update, Slots]]:
        """Updates in client order, each with what its client will remember; good until the next is asked for."""
        self._open()
        self._number = assignments[0].round + 1 if assignments else self._number
        era = self.era
        self._tensors.sweep()
        round_ = _Round(assignments, self._trainer.groups(assignments, self._clients), self._clients)
        ahead = max(AHEAD * self.workers, AHEAD_BYTES // _bytes(assignments))
        arrived: dict[int, tuple[Update, Slots]] = {}
        tasks: dict[int, PoolTask] = {}  # position → the task that it belongs to
        left: dict[PoolTask, int] = {}  # how many of its updates were not handed on yet
        try:
            for position in range(len(assignments)):
                for group in round_.opened(position + ahead):
                    asked = [assignments[i] for i in group]
                    task = self._train_task(group, asked, recall, arrived)
                    task.what, task.clients = _named(asked), tuple(a.client for a in asked)
                    task.order = (-round_.size(group), group[0])
                    tasks.update(dict.fromkeys(group, task))
                    self._queue(task)
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
                self._forget()
                for task in tasks.values():  # of a round that was given up
                    task.stale = True
                    if not any(task in w.tasks for w in self._workers):
                        self._release(task)

    def _forget(self) -> None:
        """Drop the tasks of training that no worker has yet."""
        self._ready.clear()

    def _visits(self, assignments: Sequence[Assignment], memories: Sequence[TensorRefs]) -> list[VisitSpec]:
        """Visits as they are sent: without tensors, which go to the store."""
        store = self._tensors
        return [
            VisitSpec(
                assignment=replace_fields(a, params={}, buffers={}, slots={}),
                params=store.put(a.params),
                buffers=store.put(a.buffers),
                slots={name: store.put(slot) for name, slot in a.slots.items()},
                memory=memory,
            )
            for a, memory in zip(assignments, memories, strict=True)
        ]

    def evaluate(self, request: EvalRequest) -> Callable[[], tuple[float, float]]:
        """Begin to judge on the test set; what is returned waits for the result. Training goes on beside it."""
        assert self._test is not None
        return _PoolEvaluation(self, request, len(self._test), len(eval_batches(self._test, request.policy)))

    def judge(
        self,
        request: EvalRequest,
        which: Sequence[int],
        done: Callable[[Sequence[int], Sequence[BatchScore]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Queue some batches of the test set for evaluation."""
        self._open()
        store, bare = self._tensors, replace(request, params={}, buffers={})
        task = PoolTask(
            lambda number: EvaluateTask(number, bare, store.put(request.params), store.put(request.buffers), which),
            lambda scores: done(which, scores),
            "the evaluation",
        )
        task.failed = failed
        self._evaluations.append(task)


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


def _named(assignments: Sequence[Assignment]) -> str:
    """Whose visits these are, in a few words."""
    clients = ", ".join(str(a.client) for a in assignments[:3]) + (", …" if len(assignments) > 3 else "")
    return f"client{'s' if len(assignments) > 1 else ''} {clients}"


def _bytes(assignments: Sequence[Assignment]) -> int:
    """About the size of the largest update of a round."""
    return max((sum(a.params[n].nbytes for n in a.uploads) for a in assignments), default=0) + 4096
