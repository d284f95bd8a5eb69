"""The way into a Ray cluster, and out of it: one of our own, one that is running, or one that the program is in."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fedstrata.errors import UsageError, one_line

REACH = 5.0
"""Seconds in which a cluster must answer."""
ADDRESS = re.compile(r"[^\s:/@]+:\d{1,5}|\[[0-9a-fA-F:.]+\]:\d{1,5}")


@dataclass(frozen=True)
class Cluster:
    """Where Ray is, and what each actor takes of it.

    Args:
        address: `local` for a Ray of our own, `auto` for the one that is running here, or HOST:PORT.
        cpus: that each actor takes.
        gpus: that each actor takes.
    """

    address: str = "local"
    cpus: float = 1.0
    gpus: float = 0.0

    def room(self, resources: Mapping[str, float]) -> int:
        """How many actors there is room for; at least one."""
        wants = {"CPU": self.cpus, "GPU": self.gpus}
        return max(1, int(min(resources.get(name, 0) / wanted for name, wanted in wants.items() if wanted)))


def import_ray() -> Any:
    """The package, which is an extra."""
    try:
        import ray
    except ImportError:
        raise UsageError('Ray is not installed: pip install "fedstrata[ray]"') from None
    return ray


def check_address(address: str) -> str:
    """The address, if it is one."""
    if address not in ("auto", "local") and not ADDRESS.fullmatch(address):
        raise ValueError("give local, auto or the HOST:PORT of a Ray cluster")
    return address


_own = 0
"""How many engines of this process use the Ray that one of them has started or joined."""
_lock = threading.Lock()


class Session:
    """A stay in a cluster, which ends with `leave`. The last to leave shuts down what the first has started.

    A program that has joined a cluster itself keeps it: nothing is started, and nothing is shut down.
    """

    def __init__(self, cluster: Cluster, actors: int) -> None:
        global _own
        ray = import_ray()
        with _lock:
            self._ours = _own > 0 or not ray.is_initialized()
            if ray.is_initialized():
                _check_same(ray, cluster.address)
            else:
                _join(ray, cluster, actors)
            _own += self._ours

    def leave(self) -> None:
        """End the stay; once."""
        global _own
        with _lock:
            if self._ours:
                self._ours, _own = False, _own - 1
                if not _own:
                    import_ray().shutdown()


def _check_same(ray: Any, address: str) -> None:
    """Refuse another cluster than the one that this process has joined: there can be only one."""
    if address in ("auto", "local"):
        return
    joined = ray.get_runtime_context().gcs_address
    ours, theirs = (place.rpartition(":") for place in (address, joined))
    if ours[2] != theirs[2] or _numeric(ours[0]).isdisjoint(_numeric(theirs[0]) | {"127.0.0.1", "::1"}):
        raise UsageError(f"this program has joined the Ray cluster {joined}: it cannot join {address} too")


def _numeric(host: str) -> set[str]:
    """All numbers that a host's name stands for."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return {host}


def _join(ray: Any, cluster: Cluster, actors: int) -> None:
    wanted: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL"}
    if cluster.address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        wanted |= {"address": "local", "num_cpus": max(1, math.ceil(actors * cluster.cpus)), "include_dashboard": False}
    else:
        told = os.environ.get("RAY_ADDRESS", "") if cluster.address == "auto" else cluster.address
        if ADDRESS.fullmatch(told):
            _check_answers(told)
        wanted |= {"address": cluster.address}
    try:
        with _same_handlers():
            ray.init(**wanted)
    except (Exception, SystemExit) as error:  # Ray's way to give up is to leave the program
        if cluster.address == "auto":
            raise UsageError("there is no Ray cluster running here: start one, or use ray_address = 'local'") from error
        why = one_line(f"{type(error).__name__}: {error}", 200)
        what = "a Ray of our own cannot be started" if cluster.address == "local" else f"cannot join {cluster.address}"
        raise UsageError(f"{what}: {why}") from error
    # Ray prints of every dead actor to standard output, whatever it is told; the engine tells it in its own words.
    with suppress(Exception):
        ray._private.worker.print_to_stdstream = lambda *args, **kwargs: None


@contextmanager
def _same_handlers() -> Iterator[None]:
    """A program's own handler of SIGTERM stays; Ray takes its place."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How gRPC, which Ray speaks, begins; the other side answers with a frame of type 4."""


def _check_answers(address: str) -> None:
    """Refuse an address where nobody speaks as Ray does; Ray itself would try for five minutes."""
    host, _, port = address.rpartition(":")
    wrong = f"there is no Ray cluster at {address}"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=REACH) as pipe:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            pipe.settimeout(REACH)
            pipe.sendall(HELLO)
            answer = pipe.recv(9)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{wrong}: {one_line(why, 200).lower()}") from None
    if len(answer) < 4 or answer[3] != 4:
        raise UsageError(f"{wrong}: something else answers there")
