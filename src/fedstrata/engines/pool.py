"""Workers that train clients at the same time, whatever they are: who gets which job, and in which order.

Updates are handed on in client order as they arrive. Clients with more examples go first, but only so far ahead that
few updates wait for their turn. A worker that dies is replaced, and its clients are trained again.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, repeat
from typing import Any, ClassVar, Generic, TypeVar

from fedstrata.client.context import ClientContext
from fedstrata.core.stacks import Assignments, Visits, pick
from fedstrata.core.task import Task
from fedstrata.core.types import Assignment, Examples, replace_fields
from fedstrata.data.batching import eval_batches
from fedstrata.data.examples import sizes_of
from fedstrata.engines.grouping import ArrivedVisits, Trainer
from fedstrata.engines.protocol import Recall
from fedstrata.engines.tensor_store import TensorStore
from fedstrata.engines.worker import EvaluateJob, Failure, TemplateSpec, TrainAnswer
from fedstrata.errors import FedstrataError
from fedstrata.evaluation.evaluate import BatchScore, EvalRequest, Scores, combine_scores
from fedstrata.system.timing import Clock, timed

QUEUE = 2
"""Tasks that a worker has at most: one that it works on and one that waits, so that it never idles between two."""
AHEAD = 4
"""Updates, for each worker, that may wait for their turn; more where they are small."""
AHEAD_BYTES = 64 << 20
"""Memory that waiting updates may take anyway."""
MAX_DEATHS = 3
"""How many workers may die of a job before the run gives up."""


@dataclass(eq=False)
class PoolJob:
    """A job, how far it has come, and how many workers died of it.

    Args:
        build_message: number → the job as it is sent under that number.
        take_result: is called with what came of it.
        what: its name in a sentence.
        clients: whose visits it holds; empty for an evaluation.
        order: the smallest comes first: (minus the amount of work, position).
        take_error: is called with an exception that it ended with, before that is raised.
        number: under which it was last sent.
        segment: where its results are.
        deaths: how many workers died while they worked on it.
        stale: True if nobody waits for it any more.
        split: queues its visits one by one instead; None if they belong together.
    """

    build_message: Callable[[int], Any]
    take_result: Callable[[Any], None]
    what: str = ""
    clients: tuple[int, ...] = ()
    order: tuple[int, int] = (0, 0)
    take_error: Callable[[BaseException], None] | None = None
    number: int = -1
    segment: int | None = None
    deaths: int = 0
    stale: bool = False
    split: Callable[[int], None] | None = None


@dataclass(eq=False)
class Worker:
    """A worker and its jobs, the running one first."""

    jobs: list[PoolJob] = field(default_factory=list)


W = TypeVar("W", bound=Worker)


class _PoolEvaluation:
    """An evaluation under way; it begins anew if the workers are ended in between."""

    def __init__(self, pool: WorkerPool[Any], request: EvalRequest, task: Task, parts: int) -> None:
        self._pool, self._request, self._task = pool, request, task
        self._scores: list[BatchScore | None] = [None] * parts
        self._error: BaseException | None = None
        self._begin()

    def _begin(self) -> None:
        """Queue the batches that have no score yet."""
        self._era = self._pool.era
        missing = [part for part, result in enumerate(self._scores) if result is None]
        pieces = min(len(missing), 2 * self._pool.workers)
        for piece in range(pieces):
            self._pool.queue_evaluation(self._request, missing[piece::pieces], self._take_scores, self._take_error)

    def _take_error(self, error: BaseException) -> None:
        self._error = error

    def _take_scores(self, parts: Sequence[int], scores: Sequence[BatchScore]) -> None:
        for part, result in zip(parts, scores, strict=True):
            self._scores[part] = result

    def __call__(self) -> Scores:
        """The scores, when it is done."""
        while None in self._scores:
            if self._error is not None:
                raise self._error
            if self._era != self._pool.era:
                self._begin()
            self._pool.pump()
        return combine_scores(self._task, [result for result in self._scores if result is not None])


class WorkerPool(ABC, Generic[W]):
    """Trains clients in workers of some kind.

    Args:
        context: what each worker makes its scratch models from.
        clients: everybody's data.
        test: the test set.
        workers: how many.
        threads: of each worker.
        trainer: how the clients of one job are trained.

    `era` counts how often all workers were ended: whoever waits for jobs of an earlier era waits in vain.
    """

    overlaps = True
    kind: ClassVar[str] = "worker"
    """What a worker is called."""
    job_seconds: ClassVar[float] = 0.02
    """Visits that are trained one by one go together into jobs of so many seconds: handing out one takes as long as a
    tiny visit."""
    jobs_per_worker: ClassVar[int] = 3
    """So many at least in a round, so that the last ones end together."""

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
        self._evaluations: list[PoolJob] = []
        self._ready: list[tuple[int, int, PoolJob]] = []
        self._numbers = iter(range(1 << 62))
        self.spent = Clock()
        self._events: list[str] = []
        self._number = 0
        self._pace: float | None = None
        self.era = 0

    # What every kind of worker does in its own way.

    @abstractmethod
    def _open(self) -> None:
        """Start what is not running yet."""

    @abstractmethod
    def _start_worker(self, place: int) -> W:
        """A new worker in a place, that of a dead one or one that is empty."""

    @abstractmethod
    def _reap(self, worker: W) -> str:
        """Make sure that nothing of a dead worker is left; why it died."""

    @abstractmethod
    def _send(self, worker: W, message: Any) -> None:
        """Send a job to a worker that has it on its list."""

    @abstractmethod
    def _wait(self) -> Sequence[W]:
        """Wait until workers answer or die: those that did."""

    @abstractmethod
    def _receive(self, worker: W) -> tuple[int, Any, dict[str, float]] | None:
        """An answer (number of the job, result, seconds by phase), or None if the worker is dead."""

    @abstractmethod
    def _train_job(
        self,
        group: Sequence[int],
        asked: Assignments,
        recall: Recall,
        arrived: ArrivedVisits,
    ) -> PoolJob:
        """The visits of a group as a job; what comes of them is put into `arrived`."""

    def _release(self, job: PoolJob) -> None:
        """The results of a job are not needed any more."""

    @property
    @abstractmethod
    def _tensors(self) -> TensorStore:
        """Where the server's tensors are."""

    @abstractmethod
    def close(self) -> None:
        """End all workers; they hold nothing that would be lost. The next round starts new ones."""

    def _forget_workers(self) -> None:
        """Drop all workers, which have ended, and all jobs."""
        self._workers.clear()
        self._evaluations.clear()
        self._ready.clear()
        self.era += 1

    def take_events(self) -> tuple[str, ...]:
        """What has happened to workers since the last time, for a run's notes."""
        events, self._events = tuple(self._events), []
        return events

    # Tasks.

    def _replace_dead(self, worker: W) -> None:
        """Put a new worker in a dead one's place, and its jobs back into the queue."""
        cause = self._reap(worker)
        place = self._workers.index(worker)
        jobs = worker.jobs
        what = f"{jobs[0].what}: its {self.kind}" if jobs else f"a {self.kind}"
        self._events.append(f"round {self._number}: {what} died ({cause}) and was replaced")
        if jobs:
            jobs[0].deaths += 1
            if jobs[0].deaths >= MAX_DEATHS:
                raise FedstrataError(f"{what} died {MAX_DEATHS} times ({cause})")
        self._workers[place] = self._start_worker(place)
        self._queue_again(jobs)

    def _queue_again(self, jobs: Sequence[PoolJob]) -> None:
        """Put a dead worker's jobs back into the queue."""
        for job in reversed(jobs):
            if job.stale:
                self._release(job)
            elif job.deaths and job.split is not None:  # so that the one client that costs workers is found
                self._release(job)
                job.split(job.deaths)
            elif job.clients:
                self._queue(job)
            else:
                self._evaluations.insert(0, job)

    def _give(self, worker: W, job: PoolJob) -> None:
        """Send a job to a worker."""
        with timed("hand out jobs"):
            job.number = next(self._numbers)
            message = job.build_message(job.number)
            worker.jobs.append(job)
            self._send(worker, message)

    def _queue(self, job: PoolJob) -> None:
        """Let a job of training wait for a worker."""
        heapq.heappush(self._ready, (*job.order, job))

    def _accepts_jobs(self, worker: W) -> bool:
        """True if a worker can be sent jobs."""
        return True

    def _choose(self, worker: W) -> PoolJob | None:
        """The job of training that a worker should do next."""
        return heapq.heappop(self._ready)[2] if self._ready else None

    def _dispatch(self) -> None:
        """Give work to every worker that has room for it, evenly; evaluation fills what training leaves."""
        for depth in range(QUEUE):
            for worker in self._workers:
                if len(worker.jobs) == depth and self._accepts_jobs(worker):
                    job = self._choose(worker)
                    if job is not None:
                        self._give(worker, job)
                    elif self._evaluations:
                        self._give(worker, self._evaluations.pop(0))

    def pump(self) -> None:
        """Hand out jobs, wait until a worker answers or dies, and take up what came."""
        self._dispatch()
        with timed("wait for workers"):
            answered = self._wait()
        for worker in answered:
            answer = self._receive(worker)
            if answer is None:
                self._replace_dead(worker)
                continue
            number, result, spent = answer
            job = worker.jobs.pop(0)
            assert job.number == number
            self.spent.add(spent)
            if job.stale:
                self._release(job)
            elif isinstance(result, Failure):
                self._release(job)
                if job.take_error is not None:
                    job.take_error(result.error)
                result.error.add_note(f"in a {self.kind}:\n{result.trace}")
                raise result.error
            else:
                job.take_result(result)

    # Rounds.

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[Visits]:
        """Visits in client order, each with what its client will remember; good until the next are asked for."""
        self._open()
        asked = Assignments.of(assignments)
        self._number = asked.templates[0].round + 1 if len(asked) else self._number
        era = self.era
        self._tensors.sweep()
        round_ = _Round(asked, self._groups(asked), self._clients)
        ahead = max(AHEAD * self.workers, AHEAD_BYTES // _largest_update(asked))
        position = 0
        try:
            while position < len(asked):
                for group in round_.take_groups(position + ahead):
                    self._queue_group(group, round_, recall)
                while position not in round_.arrived:
                    self.pump()
                self._dispatch()
                visits, after = round_.arrived.take(position)
                yield visits
                for job in round_.hand_on(range(position, after)):
                    self._release(job)
                position = after
        finally:
            if self.era == era:  # else those workers are gone, and another round may have begun with new ones
                self._give_up(round_.jobs.values())

    def _groups(self, asked: Assignments) -> Sequence[Sequence[int]]:
        """The positions of the visits of each job."""
        if self._trainer.groups is not None:
            return self._trainer.groups(asked, self._clients)
        size = self._job_size(asked)
        alike: dict[tuple[int, int | None], list[int]] = {}
        for position, key in enumerate(zip(asked.kinds, self._homes_of(asked.clients), strict=True)):
            alike.setdefault(key, []).append(position)
        return [group for places in alike.values() for group in _divide(places, max(1, round(len(places) / size)))]

    def _job_size(self, asked: Assignments) -> int:
        """How many visits that are trained one by one go together into a job."""
        if self._pace is None:
            return 1
        most = len(asked) // (self.jobs_per_worker * self.workers), AHEAD_BYTES // 2 // _largest_update(asked)
        return max(1, min(int(self.job_seconds / self._pace), *most))

    def _homes_of(self, clients: Sequence[int]) -> Iterable[int | None]:
        """The place of the only worker that has each client's examples; None if any may train it."""
        return repeat(None, len(clients))

    def _take_pace(self, answer: TrainAnswer, visits: int) -> None:
        """Learn how long a visit takes, so that jobs of many short ones can be made; results do not depend on it."""
        now = answer.seconds / max(visits, 1)
        self._pace = now if self._pace is None else 0.7 * self._pace + 0.3 * now

    def _queue_group(self, group: Sequence[int], round_: _Round, recall: Recall, deaths: int = 0) -> None:
        """Let the visits of a group wait for a worker, as one job; so many workers have died of it."""
        asked = round_.asked.select(group)
        job = self._train_job(group, asked, recall, round_.arrived)
        job.what, job.clients = _clients_text(asked.clients), tuple(asked.clients)
        job.order, job.deaths = (-round_.size(group), group[0]), deaths
        if len(group) > 1 and self._trainer.groups is None:
            job.split = partial(self._queue_each, group, round_, recall)
        round_.add(group, job)
        self._queue(job)

    def _queue_each(self, group: Sequence[int], round_: _Round, recall: Recall, deaths: int) -> None:
        """Let the visits of a group wait for a worker one by one."""
        for position in group:
            self._queue_group([position], round_, recall, deaths)

    def _give_up(self, jobs: Iterable[PoolJob]) -> None:
        """Nobody waits for these jobs any more, nor for any that no worker has yet."""
        self._clear_queues()
        for job in jobs:
            job.stale = True
            if not any(job in worker.jobs for worker in self._workers):
                self._release(job)

    def _clear_queues(self) -> None:
        """Drop the jobs of training that no worker has yet."""
        self._ready.clear()

    def _templates(self, asked: Assignments) -> tuple[TemplateSpec, ...]:
        """What visits of each kind have in common, as it is sent: without tensors, which go to the store."""
        store = self._tensors
        return tuple(
            TemplateSpec(
                assignment=replace_fields(a, params={}, buffers={}, slots={}),
                params=store.put(a.params),
                buffers=store.put(a.buffers),
                slots={name: store.put(slot) for name, slot in a.slots.items()},
            )
            for a in asked.templates
        )

    def evaluate(self, request: EvalRequest) -> Callable[[], Scores]:
        """Begin to evaluate on the test set; what is returned waits for the result. Training goes on beside it."""
        assert self._test is not None
        return _PoolEvaluation(self, request, self._context.task, len(eval_batches(self._test, request.policy)))

    def queue_evaluation(
        self,
        request: EvalRequest,
        which: Sequence[int],
        take_scores: Callable[[Sequence[int], Sequence[BatchScore]], None],
        take_error: Callable[[BaseException], None],
    ) -> None:
        """Let the evaluation of some batches of the test set wait for a worker, as one job."""
        self._open()
        store, bare = self._tensors, replace(request, params={}, buffers={})
        job = PoolJob(
            lambda number: EvaluateJob(number, bare, store.put(request.params), store.put(request.buffers), which),
            lambda scores: take_scores(which, scores),
            "the evaluation",
        )
        job.take_error = take_error
        self._evaluations.append(job)


class _Round:
    """A round under way: its groups, which become jobs in the order in which their first updates are needed.

    `arrived` holds updates that wait for their turn; `jobs` are by position, those whose updates were not handed on
    yet.
    """

    def __init__(self, asked: Assignments, groups: Sequence[Sequence[int]], clients: Sequence[Examples]) -> None:
        self.asked = asked
        self.arrived = ArrivedVisits()
        self.jobs: dict[int, PoolJob] = {}
        self._left: dict[PoolJob, int] = {}  # how many of a job's updates were not handed on yet
        self._waiting = sorted(groups, key=min, reverse=True)
        self._sizes = sizes_of(clients, asked.clients)
        counts_steps = [a.work.steps is not None for a in asked.templates]
        if any(counts_steps):
            kinds = zip(self._sizes, asked.kinds, strict=True)
            self._sizes = [1 if counts_steps[kind] else size for size, kind in kinds]

    def size(self, group: Sequence[int]) -> int:
        """How much there is to train: the examples of its clients, or 1 each where all take the same steps."""
        return sum(pick(self._sizes, group))

    def take_groups(self, until: int) -> Iterator[Sequence[int]]:
        """The groups that may be trained now: those with an update that is needed before `until`; each once."""
        while self._waiting and min(self._waiting[-1]) < until:
            yield self._waiting.pop()

    def add(self, group: Sequence[int], job: PoolJob) -> None:
        """Note the job that a group has become."""
        self.jobs.update(dict.fromkeys(group, job))
        self._left[job] = len(group)

    def hand_on(self, positions: Sequence[int]) -> Iterator[PoolJob]:
        """Note that updates were handed on: the jobs of which these were the last."""
        for job, count in Counter(map(self.jobs.pop, positions)).items():
            self._left[job] -= count
            if not self._left[job]:
                yield job


def _divide(places: Sequence[int], parts: int) -> Iterator[Sequence[int]]:
    """Places in so many parts of about the same length, one after the other."""
    ends = [len(places) * part // parts for part in range(parts + 1)]
    return (places[begin:end] for begin, end in pairwise(ends))


def _clients_text(clients: Sequence[int]) -> str:
    """Whose visits these are, in a few words."""
    some = ", ".join(map(str, clients[:3])) + (", …" if len(clients) > 3 else "")
    return f"client{'s' if len(clients) > 1 else ''} {some}"


def _largest_update(asked: Assignments) -> int:
    """About the size of the largest update of a round, in bytes."""
    return max((sum(a.params[n].nbytes for n in a.uploads) for a in asked.templates), default=0) + 4096
