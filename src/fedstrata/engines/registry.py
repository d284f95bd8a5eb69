"""The table of engines: name → what it is, what it can do, and what builds it.

To add an engine takes one file and one row here. The file has a class that keeps to `fedstrata.engines.protocol.Engine`
and a function that builds it from an `EngineRequest`. Nothing else knows engines by their names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedstrata.core.spec import lookup
from fedstrata.core.types import Work
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    import torch

    from fedstrata.client.context import ClientContext
    from fedstrata.core.types import Examples
    from fedstrata.engines.protocol import Engine

WayOfTraining = Literal["one by one", "many at once"]
"""How the clients that one worker has are trained. The bits of the two differ in rounding."""


@dataclass(frozen=True, eq=False)
class EngineRequest:
    """All that an engine may be built from.

    Args:
        context: what models are made from, and how they are trained.
        clients: everybody's data.
        test: the test set; None if nothing is evaluated.
        workers: how many clients train at the same time; None for as many as there is room for. A builder gets None
            only if its engine is distributed, and must then count itself.
        threads: threads of each worker.
        rounds: how many there will be, about.
        per_round: how many clients take part in each.
        work: how clients train in the first round.
        way: how the run's clients were trained so far, for an engine that chooses: it keeps to it. None for a new run.
        settings: settings by name; a builder gets those that its row says it reads.
        devices: that workers are dealt out to, in turn; the first is the context's own. Empty for that one alone.
        began: the engine that a run began with, and why it was chosen; empty for a new run.
    """

    context: ClientContext
    clients: Sequence[Examples]
    test: Examples | None = None
    workers: int | None = 1
    threads: int = 1
    rounds: int = 1
    per_round: int = 1
    work: Work = field(default_factory=Work)
    way: WayOfTraining | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    devices: Sequence[torch.device] = ()
    began: str = ""


@dataclass(frozen=True)
class Choice:
    """An engine by name, why it was chosen among others, and what a reader of the run must know of that."""

    name: str
    why: str = ""
    notes: tuple[str, ...] = ()


Builder = Callable[[EngineRequest], "Engine"]


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """A row of the table.

    Args:
        help: one line for `fedstrata list engines`.
        build: makes the engine; `import_when_called` imports the engine's module when it is called.
        choose: chooses another row, which is taken instead; then `build` is not needed.
        parallel: True if it may have more than one worker.
        distributed: True if its workers are in a cluster: it counts itself how many there is room for.
        same_bits: True if its results have the same bits as those of `serial`, for any number of workers.
        way: how clients of one worker are trained.
        reads: settings that are for this engine.
    """

    help: str
    build: Builder | None = None
    choose: Callable[[EngineRequest], Choice] | None = None
    parallel: bool = False
    distributed: bool = False
    same_bits: bool = False
    way: WayOfTraining = "one by one"
    reads: tuple[str, ...] = ()


def import_when_called(module: str, function: str) -> Callable[[EngineRequest], Any]:
    """A function of a module that is imported when it is called: a look at the table loads no engine."""

    def build(request: EngineRequest) -> Any:
        return getattr(importlib.import_module(module), function)(request)

    return build


ENGINES: dict[str, EngineSpec] = {
    "auto": EngineSpec(
        help="What was measured to be fastest for such a model, and fits the number of workers: one of those below.",
        choose=import_when_called("fedstrata.engines.auto", "choose_fastest"),
        parallel=True,
    ),
    "serial": EngineSpec(
        help="One client after the other, in this process.",
        build=import_when_called("fedstrata.engines.serial", "build_serial"),
        same_bits=True,
    ),
    "processes": EngineSpec(
        help="Clients at the same time in worker processes; the same bits as `serial`, for any number of workers.",
        build=import_when_called("fedstrata.engines.processes", "build_processes"),
        parallel=True,
        same_bits=True,
    ),
    "vmap": EngineSpec(
        help="Many clients at once in one vectorised computation, in every worker; equals `serial` up to rounding.",
        build=import_when_called("fedstrata.engines.vmap", "build_vmap"),
        parallel=True,
        way="many at once",
    ),
    "ray": EngineSpec(
        help="Clients at the same time in actors of a Ray cluster (extra `ray`); the same bits as `serial`.",
        build=import_when_called("fedstrata.engines.ray", "build_ray"),
        parallel=True,
        distributed=True,
        same_bits=True,
        reads=("ray_address", "ray_cpus", "ray_gpus"),
    ),
    "wire": EngineSpec(
        help="One after the other, with every message encoded and decoded as across a network; slow, for tests.",
        build=import_when_called("fedstrata.engines.serial", "build_wire"),
        same_bits=True,
    ),
}


def build_engine(name: str, request: EngineRequest) -> tuple[Choice, Engine]:
    """(which engine it is, the engine): another than that of the name where its row chooses among others.

    Raises:
        UsageError: if there is no such engine, or it cannot do what is asked.
    """
    spec = lookup("engine", ENGINES, name)
    request = replace(request, workers=_count_workers(spec, request))
    _check_devices(name, spec, request)
    chosen = Choice(name)
    if spec.choose is not None:
        chosen = spec.choose(request)
        spec = lookup("engine", ENGINES, chosen.name)
    _check_capabilities(chosen.name, spec, request)
    assert spec.build is not None
    return chosen, spec.build(replace(request, settings={read: request.settings[read] for read in spec.reads}))


def way_of_training(name: str) -> WayOfTraining:
    """How an engine trains the clients of one worker; one that is not in the table, such as Flower's, one by one."""
    return ENGINES[name].way if name in ENGINES else "one by one"


def parse_way(told: str) -> WayOfTraining | None:
    """The way of training that a run's files tell of, as in "trained one by one"; None if they tell of none."""
    return next((way for way in get_args(WayOfTraining) if told == f"trained {way}"), None)


def _count_workers(spec: EngineSpec, request: EngineRequest) -> int | None:
    """How many workers an engine gets: as many as were asked for, or as this machine has room for."""
    if request.workers is not None or spec.distributed:
        return request.workers
    if not spec.parallel or sys.platform == "win32":
        return 1
    from fedstrata.system.machine import cores

    return max(cores() if request.context.device.type == "cpu" else 1, len(request.devices))


def _check_capabilities(name: str, spec: EngineSpec, request: EngineRequest) -> None:
    """Refuse in one sentence what an engine cannot do, before it is built."""
    if not spec.parallel and request.workers != 1:
        raise UsageError(f"the engine '{name}' trains one client at a time: workers must be 1, not {request.workers}")


def _check_devices(name: str, spec: EngineSpec, request: EngineRequest) -> None:
    """Refuse in one sentence more devices than an engine, or its workers, can use."""
    count, workers = len(request.devices), request.workers
    if count < 2:
        return
    if spec.distributed:
        raise UsageError(f"the engine '{name}' trains where its cluster says: device must name one, not {count}")
    if not spec.parallel:
        raise UsageError(f"the engine '{name}' trains on one device: device must name one, not {count}")
    if workers is not None and workers < count:
        raise UsageError(f"workers = {workers} cannot use {count} devices: give {count} or more, or auto")
