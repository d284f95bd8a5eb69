"""Engines by name: what each can do, and how it is built."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedstrata.core.lazy import nn
from fedstrata.core.spec import Registry, lookup
from fedstrata.engines.cluster import Cluster
from fedstrata.engines.protocol import Engine
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from fedstrata.client.context import ClientContext
    from fedstrata.core.types import Examples


def _auto() -> None:
    """What is fastest for the model and the number of workers: one of those below."""


def _serial() -> None:
    """One client after the other, in this process."""


def _processes() -> None:
    """Clients at the same time in worker processes; the same bits as `serial`, for any number of workers."""


def _vmap() -> None:
    """Many clients at once in one vectorised computation, in every worker; equals `serial` up to rounding."""


def _ray() -> None:
    """Clients at the same time in actors of a Ray cluster (extra `ray`); the same bits as `serial`."""


def _wire() -> None:
    """One after the other, with every message encoded and decoded as across a network; slow, for tests."""


ENGINES: Registry = {
    "auto": _auto,
    "serial": _serial,
    "processes": _processes,
    "vmap": _vmap,
    "ray": _ray,
    "wire": _wire,
}


def build_engine(
    name: str,
    workers: int | str,
    threads: int,
    context: ClientContext,
    clients: Sequence[Examples],
    test: Examples | None,
    visits: int,
    cluster: Cluster | None = None,
) -> tuple[str, Engine]:
    """(the name of the engine, the engine); `workers` is how many clients train at once in a run of so many visits."""
    from fedstrata.engines.grouping import ONE_BY_ONE, VECTORISED
    from fedstrata.engines.processes import Processes
    from fedstrata.engines.ray import RayActors
    from fedstrata.engines.serial import Serial, Wire

    lookup("engine", ENGINES, name)
    if name == "ray":
        actors = workers if isinstance(workers, int) else None
        return name, RayActors(context, clients, test, actors, threads, ONE_BY_ONE, cluster or Cluster())
    count = workers if isinstance(workers, int) else _fitting(name, context)
    if name == "auto":
        name = "vmap" if visits >= MANY and _vectorised_is_faster(context) else "serial" if count == 1 else "processes"
    elif name == "vmap":
        _check_vmap(context)
    if name in ("serial", "wire"):
        if count != 1:
            raise UsageError(f"the engine '{name}' trains one client at a time: workers must be 1, not {count}")
        return name, (Serial if name == "serial" else Wire)(context, clients, test)
    trainer = VECTORISED if name == "vmap" else ONE_BY_ONE
    if name == "vmap" and count == 1:
        return name, Serial(context, clients, test, trainer)
    return name, Processes(context, clients, test, count, threads, trainer)


def _check_vmap(context: ClientContext) -> None:
    from fedstrata.client.vectorised import check_vectorises

    if context.device.type != "cpu":
        raise UsageError(f"the engine 'vmap' trains on the CPU; with device = {context.device} use 'serial'")
    for arch in context.archs:
        check_vectorises(context.method, context.build(arch), context.sample)


MANY = 1_000
"""Visits of the shortest run that `auto` vectorises; below, loading torch's part for it takes longer than it saves."""


SMALL = 300_000
"""Parameters of the largest dense model that `auto` vectorises; beyond, copies of it no longer fit the caches."""


def _vectorised_is_faster(context: ClientContext) -> bool:
    """True for small dense models, where the costs of a step outweigh its arithmetic; the same for every round."""
    for model in map(context.build, context.archs):
        holders = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
        if not all(isinstance(m, nn.Linear) for m in holders) or sum(p.numel() for p in model.parameters()) > SMALL:
            return False
    try:
        _check_vmap(context)
    except UsageError:
        return False
    return True


def _fitting(name: str, context: ClientContext) -> int:
    """How many workers `auto` means here."""
    from fedstrata.system.machine import cores

    alone = name in ("serial", "wire") or context.device.type != "cpu" or sys.platform == "win32"
    return 1 if alone else cores()
