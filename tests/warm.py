"""Processes that run the command and need not import torch: forks of one that has, and has done nothing else.

Each is a process of its own, with its own streams, session, signals and end, as one that Python was started for; what
it does not do is the second or two of imports. Tests of what happens before those start Python.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import fedstrata as fs

COMMAND = "from fedstrata.__main__ import main; main()"
SERVER = """
import gc, json, os, signal, socket, sys
import fedstrata.__main__, fedstrata.cli.main, fedstrata.cli.run, fedstrata.engines.processes, fedstrata.run
import numpy.random, rich.console, rich.live, rich.panel, rich.table, rich.text

def serve(server):
    '''Fork for every request, and say what became of a fork; returns in a fork, with what it should do.'''
    gc.freeze()  # else every fork copies all that was imported when it looks for garbage at its end
    while True:
        data, streams, _, _ = socket.recv_fds(server, 1 << 20, 3)
        if not data:
            sys.exit()
        asked = json.loads(data)
        if "ended" in asked:
            pid, status = os.waitpid(asked["ended"], os.WNOHANG)
            server.sendall(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        pid = os.fork()
        if pid == 0:
            server.close()
            return asked, streams
        server.sendall(json.dumps(pid).encode())
        for stream in streams:
            os.close(stream)

def settle(asked, streams):
    '''Be the process that was asked for.'''
    os.chdir(asked["cwd"])
    if asked["session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if asked["terminal"]:
        import fcntl, termios
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if asked["nohup"] else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = ["-c", *asked["arguments"]]
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    for number, name in ((1, "stdout"), (2, "stderr")):
        shown = number == 2 or os.isatty(number)
        stream = open(number, "w", buffering=1 if shown else -1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    return asked["code"]

exec(settle(*serve(socket.socket(fileno=0))), {"__name__": "__main__"})
"""


class Warm:
    """A fork, as far as it is used like a `subprocess.Popen`."""

    def __init__(self, pid: int, server: socket.socket, pipes: list[int]) -> None:
        self.pid, self._server = pid, server
        self.returncode: int | None = None
        self._pipes = [os.fdopen(pipe) for pipe in pipes]
        self.stdout: io.TextIOBase | None = self._pipes[0] if pipes else None

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None:
            self._server.sendall(json.dumps({"ended": self.pid}).encode())
            self.returncode = json.loads(self._server.recv(1 << 10))
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit code, once it has ended."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """What it printed until its end."""
        texts = ["", ""]

        def drain(number: int) -> None:
            with self._pipes[number] as pipe:
                texts[number] = pipe.read()

        threads = [threading.Thread(target=drain, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
        assert not any(thread.is_alive() for thread in threads), "somebody else has its pipes"
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The process that forks, and the connection with it; it ends with this one, when the connection does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join([str(Path(fs.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    started = subprocess.Popen([sys.executable, "-c", SERVER], stdin=theirs, env=environment, start_new_session=True)
    theirs.close()
    return ours, started


def warm(
    *arguments: object,
    cwd: Path,
    code: str = COMMAND,
    start_new_session: bool = False,
    terminal: int | None = None,
    nohup: bool = False,
) -> Warm:
    """Start the command, or a piece of code; in a terminal, or with pipes for what it prints."""
    server, _ = _server()
    environment: Mapping[str, str] = {**os.environ, **({} if terminal is None else {"TERM": "xterm"})}
    asked: dict[str, Any] = {"arguments": [str(a) for a in arguments], "cwd": str(cwd), "code": code, "nohup": nohup}
    asked |= {"environment": environment, "terminal": terminal is not None}
    asked["session"] = start_new_session or terminal is not None
    ours: list[int] = []
    if terminal is None:
        pairs = [os.pipe(), os.pipe()]
        ours, theirs = [pair[0] for pair in pairs], [os.open(os.devnull, os.O_RDONLY), *(pair[1] for pair in pairs)]
    else:
        theirs = [os.dup(terminal) for _ in range(3)]
    socket.send_fds(server, [json.dumps(asked).encode()], theirs)
    for stream in theirs:
        os.close(stream)
    return Warm(json.loads(server.recv(1 << 10)), server, ours)
