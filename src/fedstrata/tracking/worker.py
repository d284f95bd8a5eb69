"""A tracker's process: reads what the run tells, line by line, and passes it on to the tracker's library.

It outlives a run that is killed for as long as it takes to hand on what it was told, and no longer.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fedstrata.errors import UsageError
from fedstrata.runs.files import write_atomic
from fedstrata.tracking.kinds import MLflow, TensorBoard, TrackerKind, Wandb, build_kind

if sys.platform != "win32":
    import fcntl

Values = Mapping[str, float]
PATIENCE = 60.0
"""Seconds that a process waits for another one that still writes down the same run."""


class Backend(Protocol):
    """A tracker's library, with one of its runs."""

    def begin(self, told: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Open a run, or go on with the kept one: (what to keep to find it again, its last round)."""
        ...

    @property
    def link(self) -> str | None:
        """Where the run is shown, if that is an address in a network."""
        ...

    def log(self, number: int, values: Values) -> None:
        """Write down a round."""
        ...

    def end(self, status: str, summary: Values, clients: list[dict[str, Any]], files: Mapping[str, str]) -> None:
        """Close the run: `finished`, `failed` (by an error) or `stopped` (by a user, or a kill)."""
        ...


class Session:
    """One run in one tracker.

    Args:
        reply: sends a message to the run.
    """

    def __init__(self, reply: Callable[[dict[str, Any]], None]) -> None:
        self._reply = reply
        self._backend: Backend | None = None
        self._kept: dict[str, Any] = {}
        self._path: Path | None = None
        self._round = 0

    def begin(self, told: Mapping[str, Any]) -> None:
        """Open the run, and write down the rounds that it lacks."""
        kind = build_kind(told["kind"])
        if told["out"] is not None:
            self._path = Path(told["out"]) / "tracking" / f"{kind.name}.json"
            self._path.parent.mkdir(exist_ok=True)
            self._lock = _lock(self._path.with_suffix(".lock"))
        backend = open_backend(kind)
        found, self._round = backend.begin(told)
        self._kept = {"kind": str(kind), **found}
        self._backend = backend
        self._keep()
        if backend.link is not None:
            self._reply({"link": backend.link})
        for number, values in told["rounds"]:
            self.log(number, values)

    def log(self, number: int, values: Values) -> None:
        """Write down a round, unless the tracker has it: what is done again after a kill has the same numbers."""
        if self._backend is not None and number > self._round:
            self._backend.log(number, values)
            self._round = number
            self._keep()

    def end(self, told: Mapping[str, Any]) -> None:
        """Close the run."""
        if self._backend is not None:
            self._backend.end(told["status"], told["summary"], told["clients"], told["files"])
        self._backend = None
        self._reply({"ended": True})

    @property
    def running(self) -> bool:
        """Whether a run is open."""
        return self._backend is not None

    def _keep(self) -> None:
        """Write down which run it is, and how far."""
        kept = {**self._kept, "round": self._round}
        self._reply({"kept": kept})
        if self._path is not None:
            write_atomic(self._path, json.dumps(kept) + "\n", mode=0o600)  # an address may hold a password


def open_backend(kind: TrackerKind) -> Backend:
    """What writes with the library of a tracker, which is imported here."""
    if isinstance(kind, Wandb):
        from fedstrata.tracking.wandb_run import WandbRun

        return WandbRun(kind)
    if isinstance(kind, MLflow):
        from fedstrata.tracking.mlflow_run import MLflowRun

        return MLflowRun(kind)
    assert isinstance(kind, TensorBoard)
    from fedstrata.tracking.tensorboard_run import TensorBoardRun

    return TensorBoardRun(kind)


def follow(lines: Iterable[bytes], session: Session) -> None:
    """Do what the lines say, to their end; a run that was killed has said no last word."""
    for line in _until_reset(lines):
        told = json.loads(line)
        if told["do"] == "begin":
            session.begin(told)
        elif told["do"] == "round":
            session.log(told["round"], told["values"])
        else:
            session.end(told)
    if session.running:
        session.end({"status": "stopped", "summary": {}, "clients": [], "files": {}})


def _until_reset(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines; a run that was killed, and had not read all answers, ends them by an error."""
    with suppress(ConnectionError):
        yield from lines


def main(handle: int) -> None:
    """Follow the run at the other end of a socket."""
    threading.Thread(target=_leave_in_the_end, args=(os.getppid(),), daemon=True).start()
    with socket.socket(fileno=handle) as pipe:

        def reply(message: dict[str, Any]) -> None:
            try:
                pipe.sendall(json.dumps(message).encode() + b"\n")
            except OSError:  # nobody listens any more: go on all the same
                return

        try:
            with pipe.makefile("rb") as lines:
                follow(lines, Session(reply))
        except BaseException as error:
            reply({"failed": str(error) or type(error).__name__})
            os._exit(1)  # at once: whatever the library would do at its exit may hang


def _leave_in_the_end(parent: int) -> None:
    """End this process some time after the run's: a library that hangs must not stay for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(PATIENCE * 5)
    os._exit(1)


def _lock(path: Path) -> Any:
    """Hold a file, once another process that still writes down the same run has let go of it.

    Raises:
        UsageError: if it does not.
    """
    file = path.open("a")
    end = time.monotonic() + PATIENCE
    while sys.platform != "win32":
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() > end:
                raise UsageError("another process is still writing this run down") from None
            time.sleep(0.1)
            continue
        except OSError:  # a file system without locks
            pass
        break
    return file
