"""Clients trained by actors of a Ray cluster, with the same bits as one after the other.

The server's tensors are put into Ray's object store once per round, and every actor fetches them once. A client's
examples are sent to the actor that trains it, once, and stay there: the client comes back to the same actor unless that
one is busy and another has nothing to do. What clients remember stays with the main process, so it survives actors and
nodes; those that die are replaced, and their clients are trained again.

Ray pickles what it carries between a program and its own cluster. That is one trust domain: whoever can speak to a Ray
cluster can run any code in it, so its ports must not be open to others. Nothing here unpickles anything by hand, and
nothing that came over fedstrata's own wire or from its files goes this way.
"""

from __future__ import annotations

import heapq
import os
import re
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstrata.client.context import ClientContext
from fedstrata.core.own_code import opened_folders
from fedstrata.core.parts import Parts
from fedstrata.core.stacks import Assignments, Memories
from fedstrata.core.types import Examples, replace_fields
from fedstrata.data.examples import LazyExamples, SelectedExamples, Split, TensorExamples
from fedstrata.engines.cluster import Cluster, Session, ask_nodes, import_ray, read_object, reason_of
from fedstrata.engines.grouping import ONE_BY_ONE, ArrivedVisits, Trainer
from fedstrata.engines.pool import MAX_DEATHS, PoolJob, Worker, WorkerPool
from fedstrata.engines.protocol import Engine, Recall
from fedstrata.engines.registry import EngineRequest
from fedstrata.engines.tensor_store import Bytes, OwnMemory, TensorRef, TensorStore
from fedstrata.engines.worker import EvaluateJob, Failure, MemorySpec, TrainAnswer, TrainJob, WorkerLoop
from fedstrata.errors import UsageError, one_line
from fedstrata.system.devices import HOST, accelerators, assigned
from fedstrata.system.machine import cores, keep_memory
from fedstrata.system.timing import Clock, current_clock, set_clock

START_SECONDS, BUSY_SECONDS = 60.0, 600.0
"""Seconds in which the first actor must have started: where no node is large enough, and where one is but busy."""
LOOK_SECONDS = 2.0
"""Seconds between two looks at which of them it is: nodes come and go."""
OUT, STAGE, INBOX = 0, 1, 2
"""Segments: an actor's results, what the main process is about to put, and what a job's clients remember."""
FIRST = 3
"""The first segment of the server's tensors; each put has one of its own."""


def build_ray(request: EngineRequest) -> Engine:
    """The engine `ray`."""
    s, device = request.settings, request.context.device
    if device != HOST and not s["ray_gpus"]:
        raise UsageError(f"with device = {device} each of Ray's actors wants a GPU: ray_gpus must be above 0")
    return RayActors(
        request.context,
        request.clients,
        request.test,
        request.workers,
        request.threads,
        ONE_BY_ONE,
        Cluster(s["ray_address"], s["ray_cpus"], s["ray_gpus"]),
    )


# What goes to an actor, and the actor itself ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rows:
    """A client's examples on their way: only its own rows, as plain arrays."""

    x: Any
    y: Any
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mask: str = ""

    def open(self) -> TensorExamples:
        """The examples, in memory of this process: what Ray hands over must not be written to."""
        x: Any = self.x.map(_own_tensor) if isinstance(self.x, Parts) else _own_tensor(self.x)
        return TensorExamples(x, _own_tensor(self.y), self.mean, self.std, mask=self.mask)


def _own_tensor(array: Any) -> Tensor:
    """An array as a tensor in memory of this process."""
    return torch.from_numpy(array.copy())


def pack_examples(data: Examples) -> Rows | Examples:
    """Examples for the way to an actor; a user's own are left to Ray as they are."""
    if type(data) is not TensorExamples:
        return data
    x, y = (data.x, data.y) if data.index is None else (data.x[data.index], data.y[data.index])
    try:
        inputs = x.map(_as_array) if isinstance(x, Parts) else _as_array(x)
        return Rows(inputs, _as_array(y), data.mean, data.std, data.mask)
    except TypeError:  # of numbers that NumPy does not know; a copy, for torch would pickle all that a view is part of
        return TensorExamples(x.clone(), y.clone(), data.mean, data.std, mask=data.mask)


def _as_array(tensor: Tensor) -> Any:
    return tensor.contiguous().numpy()


def unpack_examples(data: Rows | Examples) -> Examples:
    """Examples as an actor reads them."""
    return data.open() if isinstance(data, Rows) else data


@dataclass(frozen=True, eq=False)
class JobBundle:
    """A job with all that its actor lacks for it.

    Args:
        job: what is to be done.
        inbox: what the job's clients remember, as bytes.
        segments: which segments the tensors are for that come along.
        dropped: segments that nobody needs any more.
        clients: examples of clients that the actor has not seen yet.
        test: the test set, if it has not seen that.
    """

    job: TrainJob | EvaluateJob
    inbox: Bytes
    segments: tuple[int, ...]
    dropped: tuple[int, ...]
    clients: dict[int, Rows | Examples]
    test: Rows | Examples | None


class RayWorker:
    """An actor: keeps scratch models, the server's tensors and clients' examples, and does one job after the other."""

    def __init__(
        self, folders: Sequence[str], context: Sequence[Any], trainer: Trainer, threads: int, profile: bool
    ) -> None:  # the context as `read_object` takes it
        keep_memory()
        self._clock = Clock() if profile else None
        self._threads, self._memory = threads, OwnMemory()
        self._clients: dict[int, Examples] = {}
        held: ClientContext = read_object(folders, context)
        self._loop = WorkerLoop(held, self._clients, None, self._memory, trainer, profile)

    def ping(self) -> int:
        """The number of the actor's process: an answer says that it has started."""
        return os.getpid()

    def work(self, bundle: JobBundle, *tensors: Bytes) -> tuple[int, Any, dict[str, float]]:
        """Do a job: (its number, what came of it, seconds by phase)."""
        for segment in bundle.dropped:
            self._memory.drop(segment)
        for segment, data in zip(bundle.segments, tensors, strict=True):
            self._memory.fill(segment, data)
        self._memory.fill(INBOX, bundle.inbox)
        self._memory.clear(OUT)
        self._clients.update((client, unpack_examples(data)) for client, data in bundle.clients.items())
        if bundle.test is not None:
            self._loop.test = unpack_examples(bundle.test)
        set_clock(self._clock)
        # Every time: threads of a pool may differ in what they do with denormal numbers.
        with self._loop.context.computing(self._threads):
            result: Any = self._loop.answer(bundle.job)
        if isinstance(bundle.job, TrainJob) and not isinstance(result, Failure):
            result = (result, self._memory.bytes(OUT))
        return bundle.job.number, result, {} if self._clock is None else self._clock.take()


# The main process -------------------------------------------------------------------------------------------------


class _ObjectStore(TensorStore):
    """The server's tensors in Ray's object store: segment → the object."""

    def __init__(self, put: Callable[[Bytes], Any]) -> None:
        self._stage = OwnMemory()
        super().__init__(self._stage, STAGE)
        self._put, self._next = put, FIRST
        self.objects: dict[int, Any] = {}

    def _write(self, tensors: Mapping[str, Tensor]) -> TensorRef:
        self._stage.clear(STAGE)
        layout, _ = self._stage.write(STAGE, tensors)
        segment, self._next = self._next, self._next + 1
        self.objects[segment] = self._put(self._stage.bytes(STAGE))
        return segment, layout

    def _remove(self, ref: TensorRef) -> None:
        del self.objects[ref[0]]


@dataclass(eq=False, kw_only=True)
class _Actor(Worker):
    """An actor, the answers that it owes, and what it has: segments, clients' examples, the test set.

    `start` is its first answer, until the actor has started; `cause` says why it died.
    """

    handle: Any
    start: Any
    place: int
    answers: list[Any] = field(default_factory=list)
    segments: set[int] = field(default_factory=set)
    clients: set[int] = field(default_factory=set)
    test: bool = False
    cause: str = ""


class RayActors(WorkerPool[_Actor]):
    """Trains clients in actors of a Ray cluster.

    Args:
        workers: how many actors; None for as many as there is room for.
        cluster: where it is, and what each actor takes of it. It is joined at once, but one of our own is started with
            the first round.
    """

    kind: ClassVar[str] = "Ray actor"
    job_seconds: ClassVar[float] = 0.1
    """A call of an actor and its answer take some milliseconds."""
    jobs_per_worker: ClassVar[int] = 1

    def __init__(
        self,
        context: ClientContext,
        clients: Sequence[Examples],
        test: Examples | None,
        workers: int | None,
        threads: int,
        trainer: Trainer,
        cluster: Cluster,
    ) -> None:
        self._ray = import_ray()
        self._cluster = cluster
        self._session: Session | None = None
        if cluster.address == "local":
            workers = workers or cluster.room({"CPU": cores(), "GPU": accelerators()})
        else:
            self._join()
            workers = workers or cluster.room(self._ray.cluster_resources())
        super().__init__(context, clients, test, workers, threads, trainer)
        for data in () if isinstance(clients, Split) else clients:
            if isinstance(data, LazyExamples | SelectedExamples):
                data.forget()  # it was looked at before, and is needed elsewhere
        self._home: dict[int, int] = {}  # client → the place of the actor that has its examples
        self._queues: list[list[tuple[int, int, PoolJob]]] = [[] for _ in range(workers)]
        self._store = _ObjectStore(self._ray.put)
        self._context_object: Any = None
        if self._session is not None and opened_folders():
            self._check_nodes()

    # Actors.

    def _join(self, actors: int = 0) -> None:
        if self._session is None:
            self._session = Session(self._cluster, actors)
            self._closer = weakref.finalize(self, self._session.leave)

    def _open(self) -> None:
        if self._workers:
            return
        ray = self._ray
        self._join(self.workers)
        self._deaths = (
            ray.exceptions.RayActorError,
            ray.exceptions.ObjectLostError,
            ray.exceptions.NodeDiedError,
            ray.exceptions.WorkerCrashedError,
            ray.exceptions.OutOfMemoryError,
        )
        self._failures, self._since = 0, time.monotonic()
        resources = {"num_cpus": self._cluster.cpus, "num_gpus": self._cluster.gpus}
        self._actor_class = ray.remote(RayWorker).options(**resources, max_restarts=0, max_task_retries=0)
        self._put_context()
        self._workers.extend(self._start_worker(place) for place in range(self.workers))

    def _put_context(self) -> None:
        if self._context_object is not None:
            return
        context = self._context.for_worker(assigned(self._context.device))
        try:
            self._context_object = self._ray.put(context)
        except Exception as error:
            self.close()
            raise _refuse_to_send(error) from None

    def _check_nodes(self) -> None:
        """Refuse a cluster that cannot read the user's own classes, before anything is written.

        A Ray of our own has the files that we have.
        """
        self._put_context()
        why = ask_nodes(self._ray, opened_folders(), self._context_object, START_SECONDS)
        if why is not None:
            self.close()
            raise UsageError(why)

    @property
    def _tensors(self) -> TensorStore:
        return self._store

    def _start_worker(self, place: int) -> _Actor:
        profile = current_clock() is not None
        about = [self._context_object], self._trainer, self._threads, profile
        handle = self._actor_class.remote(opened_folders(), *about)
        return _Actor(handle=handle, start=handle.ping.remote(), place=place)

    def _reap(self, worker: _Actor) -> str:
        with suppress(Exception):
            self._ray.kill(worker.handle)
        return worker.cause

    def close(self) -> None:
        """End all actors; they hold nothing that would be lost. The next round starts new ones."""
        for worker in self._workers:
            self._reap(worker)
        self._forget_workers()
        self._home.clear()
        self._clear_queues()
        if self._session is None:
            return
        self._session = self._context_object = None
        self._store = _ObjectStore(self._ray.put)  # lets go of the objects
        self._closer()

    # Messages.

    def _send(self, worker: _Actor, message: Any) -> None:
        """Send a job with what its actor lacks; Ray lets it wait for tensors that are still on their way."""
        job, inbox = message if isinstance(message, tuple) else (message, _NOTHING)
        objects = self._store.objects
        new = sorted(_segments(job) - worker.segments)
        dropped = tuple(worker.segments - objects.keys())
        worker.segments -= set(dropped)
        worker.segments |= set(new)
        clients: dict[int, Rows | Examples] = {}
        test = None
        if isinstance(job, TrainJob):
            asked = set(job.asked.clients)
            clients = {client: pack_examples(self._clients[client]) for client in asked - worker.clients}
            worker.clients |= asked
        elif not worker.test:
            assert self._test is not None
            test, worker.test = pack_examples(self._test), True
        bundle = JobBundle(job, inbox, tuple(new), dropped, clients, test)
        try:
            answer = worker.handle.work.remote(bundle, *(objects[segment] for segment in new))
        except Exception as error:
            raise _refuse_to_send(error) from None
        worker.answers.append(answer)

    def _accepts_jobs(self, worker: _Actor) -> bool:
        return worker.start is None

    def _wait(self) -> Sequence[_Actor]:
        waits = {w.start if w.start is not None else w.answers[0]: w for w in self._workers if w.start or w.answers}
        nobody = all(w.start is not None for w in self._workers)
        done, rest = list[Any](), list[Any]()
        while not done:
            done, rest = self._ray.wait(list(waits), num_returns=1, timeout=LOOK_SECONDS if nobody else None)
            if not done and (waited := time.monotonic() - self._since) > self._start_limit():
                raise UsageError(self._no_room(waited))
        done += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0] if rest else []
        answered = [waits[answer] for answer in done]
        return [w for w in answered if w.start is None or not self._take_start(w)]

    def _start_limit(self) -> float:
        """Seconds to wait for the first actor: longer if it only has to wait for its turn, or for a slow start."""
        wanted = {"CPU": self._cluster.cpus, "GPU": self._cluster.gpus}
        has = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return BUSY_SECONDS if any(all(one.get(n, 0) >= w for n, w in wanted.items()) for one in has) else START_SECONDS

    def _no_room(self, seconds: float) -> str:
        """Why no actor could be started in some time, in one sentence."""
        there, free = self._ray.cluster_resources(), self._ray.available_resources()
        has = f"{there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs"
        has += f", {free.get('CPU', 0):g} and {free.get('GPU', 0):g} of them free"
        wanted = f"each wants ray_cpus = {self._cluster.cpus:g} and ray_gpus = {self._cluster.gpus:g}"
        return f"no Ray actor could be started in {seconds:.0f} seconds: {wanted}, and the cluster has {has}"

    def _take_start(self, worker: _Actor) -> bool:
        """Take an actor's first answer: True if it has started; it may have died instead."""
        try:
            self._ray.get(worker.start)
        except Exception as error:
            worker.cause = _cause(error)
            self._failures += 1
            if self._failures >= MAX_DEATHS:
                raise UsageError(f"Ray's actors cannot be started: {reason_of(error)}") from None
            return False
        worker.start, self._failures = None, 0
        return True

    def _receive(self, worker: _Actor) -> tuple[int, Any, dict[str, float]] | None:
        if worker.start is not None:
            return None
        try:
            answer: tuple[int, Any, dict[str, float]] = self._ray.get(worker.answers[0])
        except self._deaths as error:
            worker.cause = _cause(error)
            self._since = time.monotonic()
            return None
        except self._ray.exceptions.RayTaskError as error:  # what clients' own code raises comes as a Failure
            raise _refuse_to_send(error) from None
        worker.answers.pop(0)
        return answer

    # Tasks.

    def _queue(self, job: PoolJob) -> None:
        """Let a job wait for the actor that has its client's examples, or for any if none has."""
        home = self._home.get(job.clients[0])
        heapq.heappush(self._ready if home is None else self._queues[home], (*job.order, job))

    def _choose(self, worker: _Actor) -> PoolJob | None:
        """An actor's own clients first, then those that nobody has; with nothing to do it takes over another's."""
        queue = self._queues[worker.place] or self._ready
        if not queue and not worker.jobs:
            queue = max(self._queues, key=len)
        if not queue:
            return None
        job = heapq.heappop(queue)[2]
        self._home.update(dict.fromkeys(job.clients, worker.place))
        return job

    def _homes_of(self, clients: Sequence[int]) -> Iterable[int | None]:
        return map(self._home.get, clients)

    def _clear_queues(self) -> None:
        super()._clear_queues()
        for queue in self._queues:
            queue.clear()

    def _train_job(self, group: Sequence[int], asked: Assignments, recall: Recall, arrived: ArrivedVisits) -> PoolJob:
        def build_message(number: int) -> tuple[TrainJob, Bytes]:
            """The job as it is sent, and what its clients remember, which is read no earlier than this."""
            memory = OwnMemory()
            memories, _ = MemorySpec.write(memory, INBOX, Memories.of(recall(asked.clients)))
            bare = replace_fields(asked, templates=())
            return TrainJob(number, OUT, 0, self._templates(asked), bare, memories), memory.bytes(INBOX)

        def take_result(result: tuple[TrainAnswer, Bytes]) -> None:
            """Put the updates into `arrived`."""
            memory = OwnMemory()
            memory.fill(OUT, result[1])
            self._take_pace(result[0], len(asked))
            for report in result[0].reports:
                arrived.add([group[place] for place in report.places], report.read(memory))

        return PoolJob(build_message, take_result)


_NOTHING = OwnMemory().bytes(INBOX)


def _segments(job: TrainJob | EvaluateJob) -> set[int]:
    """The segments that the server's tensors of a job are in."""
    if isinstance(job, EvaluateJob):
        refs = [job.params, job.buffers]
    else:
        refs = [ref for template in job.templates for ref in template.refs]
    return {segment for segment, layout in refs if layout}


def _refuse_to_send(error: BaseException) -> UsageError:
    """The refusal of what cannot be pickled."""
    return UsageError(f"model or data cannot be handed to Ray's actors: {reason_of(error)}")


def _cause(error: BaseException) -> str:
    """Why an actor died, in a few words."""
    if type(error).__name__ == "ActorUnavailableError":
        return "it cannot be reached"
    said = re.search(r"(?:dead|died) because (?:the |its )?([^.\n]*)", str(error))
    return one_line(said[1].replace("`", "") if said else type(error).__name__, 120)
