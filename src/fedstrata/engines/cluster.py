"""The way into a Ray cluster, and out of it: one of our own, one that is running, or one that the program is in."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.core.extras import missing
from fedstrata.core.own_code import open_folders
from fedstrata.errors import UsageError, one_line

ANSWER_SECONDS = 5.0
"""Seconds in which a cluster must answer."""


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
        raise missing("ray", "the engine ray needs") from None
    return ray


_engines = 0
"""How many engines of this process use the Ray that one of them has started or joined."""
_users_mode: str | None = None
"""Whether the user wants a token to be used; at the next cluster Ray would take our choice, or its own, for that."""
_lock = threading.Lock()


class Session:
    """An engine's use of a cluster, which ends with `leave`. The last to leave shuts down what the first has started.

    A program that has joined a cluster itself keeps it: nothing is started, and nothing is shut down.
    """

    def __init__(self, cluster: Cluster, actors: int) -> None:
        global _engines, _users_mode
        ray = import_ray()
        with _lock:
            self._ours = _engines > 0 or not ray.is_initialized()
            if ray.is_initialized():
                _check_same(ray, cluster.address)
            else:
                _users_mode = os.environ.get(MODE)
                try:
                    _join(ray, cluster, actors)
                except BaseException:
                    _set_mode(ray, _users_mode)
                    raise
            _engines += self._ours

    def leave(self) -> None:
        """End the use of the cluster; once."""
        global _engines
        with _lock:
            if self._ours:
                self._ours, _engines = False, _engines - 1
                if not _engines:
                    import_ray().shutdown()
                    _set_mode(import_ray(), _users_mode)


def _check_same(ray: Any, address: str) -> None:
    """Refuse another cluster than the one that this process has joined: there can be only one."""
    if address in ("auto", "local"):
        return
    joined = ray.get_runtime_context().gcs_address
    ours, theirs = (place.rpartition(":") for place in (address, joined))
    if ours[2] != theirs[2] or _addresses_of(ours[0]).isdisjoint(_addresses_of(theirs[0]) | {"127.0.0.1", "::1"}):
        raise UsageError(f"this program has joined the Ray cluster {joined}: it cannot join {address} too")


def _addresses_of(host: str) -> set[str]:
    """All numeric addresses that a host's name stands for."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return {host}


def _join(ray: Any, cluster: Cluster, actors: int) -> None:
    """Start Ray, or join a cluster; refuse in one sentence where that fails."""
    wanted: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL"}
    if cluster.address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        wanted |= {"address": "local", "num_cpus": max(1, math.ceil(actors * cluster.cpus)), "include_dashboard": False}
    else:
        address = _find_running(ray) if cluster.address == "auto" else cluster.address
        if address != "auto" and os.environ.get("RAY_USE_TLS", "0") == "0":
            _choose_mode(ray, address)
        wanted |= {"address": address}
    try:
        with _keep_handlers():
            ray.init(**wanted)
    except (Exception, SystemExit) as error:  # Ray's way to give up is to leave the program
        if cluster.address == "auto":
            raise UsageError("there is no Ray cluster running here: start one, or use ray_address = 'local'") from error
        why = one_line(f"{type(error).__name__}: {error}", 200)
        what = "a Ray of our own cannot be started" if cluster.address == "local" else f"cannot join {cluster.address}"
        token = "" if cluster.address == "local" else f"; if it asks for a token, {REMEDY}, and set {MODE}=token"
        raise UsageError(f"{what}: {why}{token}") from error
    # Ray prints of every dead actor to standard output, whatever it is asked; the engine says so in its own words.
    with suppress(Exception):
        ray._private.worker.print_to_stdstream = lambda *args, **kwargs: None


@contextmanager
def _keep_handlers() -> Iterator[None]:
    """A program's own handler of SIGTERM stays; Ray takes its place."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _find_running(ray: Any) -> str:
    """The address of the cluster that `auto` means, or `auto` if that is left to Ray."""
    with suppress(Exception):
        found: str = ray._private.services.canonicalize_bootstrap_address("auto")
        if re.fullmatch(r"([^\s:/@]+|\[[^\s\]]+\]):\d{1,5}", found):
            return found
    return "auto"


# Can it read what it is given? ------------------------------------------------------------------------------------


def read_object(folders: Sequence[str], held: Sequence[Any]) -> Any:
    """An object of Ray's, fetched once the folders of the user's own modules are open: its classes may be in there.

    It comes alone in a list, for Ray fetches what is in a list only when it is asked to.
    """
    open_folders(folders)
    (found,) = import_ray().get(list(held))
    return found


def _can_read(folders: Sequence[str], held: Sequence[Any]) -> bool:
    return read_object(folders, held) is not None


def ask_nodes(ray: Any, folders: Sequence[str], held: Any, seconds: float) -> str | None:
    """Why an object cannot be read at one of a cluster's nodes, in one sentence, or None.

    A node that does not answer in time is left to the first round.
    """
    on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    ask, asked = ray.remote(_can_read), dict[Any, str]()
    for node in (node for node in ray.nodes() if node["Alive"]):
        there = ask.options(num_cpus=0, max_retries=0, scheduling_strategy=on_node(node["NodeID"], soft=False))
        asked[there.remote(folders, [held])] = node["NodeManagerAddress"]
    for answer in ray.wait(list(asked), num_returns=len(asked), timeout=seconds)[0]:
        try:
            ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            what = f"Ray's node {asked[answer]} cannot read model or data: {reason_of(error)}"
            return f"{what}; modules of your own must be at every node, in {', '.join(folders)}"
        except ray.exceptions.RayError:  # a node that is gone by now
            continue
    return None


def reason_of(error: BaseException) -> str:
    """An error of Ray's in one line: its last, which names what went wrong, and not the traceback before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(lines[-1] if lines else type(error).__name__, 300)


# Is it Ray, and does it ask for a token? --------------------------------------------------------------------------

MODE = "RAY_AUTH_MODE"
REMEDY = "copy its head's (`ray get-auth-token` prints it) to ~/.ray/auth_token here"
OPEN, ASKS = 0, 16
"""What Ray answers with, as gRPC's codes: it is well, or it wants a token, or another."""


def _choose_mode(ray: Any, address: str) -> None:
    """Speak to a cluster with a token if it asks for one, and only then: Ray itself does not look, and fails late.

    With a token that nobody asked for it joins, but no actor of the cluster can answer then.
    """
    mode, token = os.environ.get(MODE), _read_token()
    if _ask(address) == OPEN:
        if mode is not None and mode.lower() == "token":
            raise UsageError(f"the Ray cluster at {address} was started without a token: unset {MODE}")
        _set_mode(ray, mode)
        return
    asks = f"the Ray cluster at {address} asks for a token"
    if mode is not None and mode.lower() != "token":
        raise UsageError(f"{asks}, but {MODE} = {mode}: set it to token, or unset it")
    if not token and mode is None:
        raise UsageError(f"{asks}, and there is none: {REMEDY}")
    if token and _ask(address, token) != OPEN:
        raise UsageError(f"{asks}, and refuses the one that is here: {REMEDY}")
    _set_mode(ray, "token")


def _read_token() -> str:
    """The token that Ray will use, or nothing."""
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if token:
        return token
    with suppress(OSError, ValueError):
        return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser().read_text().strip()
    return ""


def _set_mode(ray: Any, mode: str | None) -> None:
    """Tell Ray whether to use a token, also if it has looked, and has used one for an earlier cluster."""
    if mode is None:
        os.environ.pop(MODE, None)
    else:
        os.environ[MODE] = mode
    with suppress(Exception):
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """A frame of HTTP/2."""
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def _build_question(token: str) -> bytes:
    """A whole request to Ray, "are you alive?", as gRPC, which is HTTP/2: hello, headers and an empty message."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/ray.rpc.NodeInfoGcsService/CheckAlive",
        ":authority": "ray",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    if token:
        headers["authorization"] = f"Bearer {token}"
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"")
    return hello + _frame(1, 4, 1, block) + _frame(0, 1, 1, bytes(5))


def _text(text: str) -> bytes:
    """A text in a header of HTTP/2: its length, and itself."""
    data = text.encode()
    return _length(len(data)) + data


def _length(number: int) -> bytes:
    """A length in a header of HTTP/2: seven bits, and if those are full the rest in sevens, the lowest first."""
    if number < 127:
        return bytes([number])
    rest, more = number - 127, [127]
    while rest > 127:
        more.append(rest % 128 + 128)
        rest //= 128
    return bytes([*more, rest])


STATUS = re.compile(rb"\x0bgrpc-status(?:\x01(\d)|\x02(\d\d))")
MAX_ANSWER = 1 << 16
"""Bytes of an answer in which the status must have come."""


def _ask(address: str, token: str = "") -> int:
    """Whether a cluster would take us, `OPEN` or `ASKS`. Refuses an address where nobody speaks as Ray does.

    Ray itself would try for up to five minutes, and print a line every second.
    """
    host, _, port = address.rpartition(":")
    wrong = f"there is no Ray cluster at {address}"
    answer, end = b"", time.monotonic() + ANSWER_SECONDS
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS) as pipe:
            pipe.sendall(_build_question(token))
            while not (status := STATUS.search(answer)) and len(answer) < MAX_ANSWER:
                pipe.settimeout(max(0.01, end - time.monotonic()))
                new = pipe.recv(4096)
                if not new:
                    break
                answer += new
    except (OSError, OverflowError) as error:
        why = "something else answers there" if answer else getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{wrong}: {one_line(why, 200).lower()}") from None
    code = int(status[1] or status[2]) if status else None
    if code not in (OPEN, ASKS):
        raise UsageError(f"{wrong}: something else answers there")
    return code
