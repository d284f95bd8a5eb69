"""The process of a tracker, seen from the run: messages are lines of JSON, and nothing here ever waits for it.

Whatever the tracker's library does, it does it there: it hangs, crashes, prints, draws random numbers, takes signals.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

_PROGRAM = "import sys; from fedstrata.tracking.worker import main; main(int(sys.argv[1]))"
_SIZE = 1 << 16
_ending: list[subprocess.Popen[bytes]] = []
"""Processes that end by themselves, and that this one is still the parent of."""


@atexit.register
def _leave() -> None:
    """Let Python not complain of processes that are to go on when this one ends."""
    for process in _ending:
        process.returncode = process.poll() or 0


class Link:
    """A tracker's process, started with the object.

    Raises:
        OSError: if no process can be started.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as on_failure:
            on_failure.callback(ours.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": _import_path()},
                start_new_session=True,  # Ctrl-C is for the run, which says what it means
            )
            on_failure.pop_all()
        ours.setblocking(False)
        self._socket, self._unsent, self._unread, self._open = ours, bytearray(), bytearray(), True

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, as far as there is room; the rest goes with the next one."""
        self._unsent += json.dumps(message, default=str).encode() + b"\n"
        self._push()

    def _push(self) -> None:
        try:
            while self._unsent and self._open:
                del self._unsent[: self._socket.send(memoryview(bytes(self._unsent[:_SIZE])))]
        except BlockingIOError:
            pass
        except OSError:  # nobody is there any more; what it still has said is read
            self._unsent.clear()

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have come by now."""
        with suppress(BlockingIOError):
            while self._open:
                try:
                    found = self._socket.recv(_SIZE)
                except ConnectionError:
                    found = b""
                self._open = bool(found)
                self._unread += found
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        for line in lines:
            yield json.loads(line)

    @property
    def open(self) -> bool:
        """Whether the process may still say something."""
        return self._open

    def wait(self, seconds: float) -> Iterator[dict[str, Any]]:
        """What comes until the process has ended, or so many seconds have passed."""
        end = time.monotonic() + seconds
        while self._open and (left := end - time.monotonic()) > 0:
            self._push()
            self._await(left)
            yield from self.receive()

    def _await(self, seconds: float) -> None:
        """Return as soon as the process has said something, or takes more; whatever the socket's number is."""
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0))
            waiting.select(seconds)

    def how_it_ended(self) -> str:
        """Why the process is gone, where it did not say so itself."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(5)
            return (
                f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended ({code})"
            )
        return "its process does not answer"

    def kill(self) -> None:
        """End the process, and those that it has started."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Let go of the process, which ends by itself when it has done what it was sent."""
        self._socket.close()
        self._open = False
        _ending[:] = [process for process in (*_ending, self._process) if process.poll() is None]


def _import_path() -> str:
    """PYTHONPATH with which the process finds this package, also where a program has found it by a path of its own."""
    root = Path(__file__).parents[2]
    given = os.environ.get("PYTHONPATH", "")
    return given if root.name == "site-packages" else os.pathsep.join(filter(None, (str(root), given)))
