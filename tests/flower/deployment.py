"""A Flower deployment on loopback: a SuperLink and SuperNodes as processes, with TLS and keys, and a counting wire."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fedstrata as fs
from fedstrata.flower.certs import write_certs
from fedstrata.flower.template import write_app
from tests.flower import task
from tests.forks import SERVER, write_script

PATIENCE = float(os.environ.get("FEDSTRATA_TEST_PATIENCE", "1"))
"""Factor of all limits of time, for machines that are busy."""
SITES = ("0,3,6", "1,4,7", "2,5")
"""The clients of each SuperNode: eight on three."""

FAILING = """
import time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from fedstrata.flower import client_app
from {package}.task import data, model

inner = client_app(model, data)
app = ClientApp()
app.query()(lambda message, context: inner(message, context))


@app.train()
def train(message, context):
    reply = inner(message, context)
    first, round = str(context.node_config["partition-id"])[0], int(message.metadata.group_id)
    end = time.monotonic() + {timeout} - 15
    while first == "0" and round > 2 and not Path({back!r}).exists() and time.monotonic() < end:
        time.sleep(0.2)
    if first == "1" and round == 2:
        time.sleep({timeout} / 2)
    if first == "2":
        if round == 2:
            time.sleep({timeout} + 3)
        if round in (3, 4):
            return Message(RecordDict({{"fedstrata": ConfigRecord({{"head": "garbage"}})}}), reply_to=message)
    return reply
"""
"""Client 1 takes its time in round 2, in which it is killed. Client 2 is late in it, and sends garbage in the next two;
from round 3 on, client 0 answers when a file is there or it is nearly too late.
"""

HOLDING = """
import time
from pathlib import Path
from flwr.clientapp import ClientApp
from fedstrata.flower import client_app
from {package}.task import data, model

inner = client_app(model, data, keep={keep!r})
app = ClientApp()
app.query()(lambda message, context: inner(message, context))


@app.train()
def train(message, context):
    while int(message.metadata.group_id) == 2 and not Path({keep!r}).with_name("go").exists():
        time.sleep(0.2)
    return inner(message, context)
"""
"""Clients keep their memories in a directory; in round 2 they answer when the file `go` is next to it."""


def make_app(
    directory: Path,
    width: int = task.WIDTH,
    clients: int = task.CLIENTS,
    failing: float = 0.0,
    keep: Path | None = None,
) -> None:
    """Write an app with the command's template, and with a model and data of our own.

    Args:
        directory: of the app.
        width: of the model.
        clients: how many there are.
        failing: seconds that the server waits for an answer, for an app whose clients fail as FAILING says; the file
            that it waits for is `back` next to its directory.
        keep: where clients keep their memories, if not in Flower's context, for an app whose clients wait as HOLDING
            says.
    """
    write_app(directory, "fedavg", clients)
    package = directory / directory.name
    text = Path(task.__file__).read_text()
    for name, value in {"WIDTH": width, "CLIENTS": clients}.items():
        text = text.replace(f"\n{name} = {getattr(task, name)}\n", f"\n{name} = {value}\n")
    (package / "task.py").write_text(text)
    app = package / "client_app.py"
    if failing:
        app.write_text(FAILING.format(package=directory.name, timeout=failing, back=str(directory.parent / "back")))
    if keep:
        app.write_text(HOLDING.format(package=directory.name, keep=str(keep)))


RUN = {
    "flwr-clientapp": "flwr_clientapp",
    "flwr-serverapp": "flwr_serverapp",
    "flower-superexec": "flower_superexec",
    "flower-supernode": "flower_supernode",
    "flwr": "flwr_app",
}
"""Flower's commands, and what they call: the first for every message to a client."""

IMPORTS = """
import fedstrata.flower, fedstrata.run, fedstrata.engines.serial, flwr.serverapp, flwr.clientapp, httpcore, numpy.random
from flwr.cli.app import app as flwr_app
from flwr.supercore.cli import flower_superexec
from flwr.superlink.cli import flwr_serverapp
from flwr.supernode.cli import flower_supernode, flwr_clientapp
"""
"""What they import."""
RUN_COMMAND = f"{{{', '.join(f'{name!r}: {function}' for name, function in RUN.items())}}}[sys.argv[0]]()"

COMMAND = """#!/bin/sh
mkdir '{first}' 2>/dev/null && exec '{real}' "$@"
exec '{python}' -IS '{asking}' {name} "$@"
"""
"""Stands for one of Flower's commands: the first time it is that, and then a fork that need not import anything."""


def write_commands(directory: Path, socket_path: str, path: str) -> None:
    """Write commands that stand for Flower's, but for the SuperLink: who kills that looks at what it has started."""
    directory.mkdir()
    asking = directory / "asking.py"
    write_script(asking, socket_path)
    for name in RUN:
        first, real = directory / f"first-{name}", shutil.which(name, path=path)
        text = COMMAND.format(first=first, real=real, python=sys.executable, asking=asking, name=name)
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def waited(for_what: Callable[[], Any], limit: float, what: str) -> Any:
    """What a function returns as soon as that is true."""
    end = time.monotonic() + limit * PATIENCE
    while time.monotonic() < end:
        if found := for_what():
            return found
        time.sleep(0.2)
    raise TimeoutError(f"{what}: not within {limit * PATIENCE:g} seconds")


class Counter:
    """Passes bytes on between SuperNodes and the SuperLink, and counts them."""

    def __init__(self, port: int, to: int) -> None:
        self.up = self.down = 0
        self._port, self._to = port, to
        self.open()

    def open(self) -> None:
        """Listen; connections are passed on from now on."""
        self._server = socket.create_server(("127.0.0.1", self._port))
        threading.Thread(target=self._serve, args=(self._server,), daemon=True).start()

    def _serve(self, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = server.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        """Pass on what either side says until one of them ends it."""
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as far:
            while ready := select.select([near, far], [], [])[0]:
                for source in ready:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    self.up += len(data) if source is near else 0
                    self.down += len(data) if source is far else 0
                    (far if source is near else near).sendall(data)

    def close(self) -> None:
        """Listen no longer: whoever connects is refused. Connections last until one side ends them."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # else the thread that accepts would keep it open
        self._server.close()


class Deployment:
    """A SuperLink, its SuperNodes and a wire between them that counts bytes; `with` ends all their processes."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.keys = directory, directory / "keys"
        self.link, self.wire, *self.ports = free_ports(7)
        self.counter = Counter(self.wire, self.link)
        self.groups: list[subprocess.Popen[bytes]] = []
        self.nodes: list[subprocess.Popen[bytes]] = []
        write_certs(self.keys, [], 4, 1)
        home = directory / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink.loop]\naddress = "127.0.0.1:{self.link}"\nroot-certificates = "{self.keys}/ca.crt"\n'
        )
        path = os.pathsep.join([str(Path(fs.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": path,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)  # many processes import everything
        self._sockets = tempfile.TemporaryDirectory(prefix="apps-", dir="/tmp")  # paths of sockets must be short
        self._socket = Path(self._sockets.name, "apps")
        write_commands(directory / "bin", str(self._socket), self.environment["PATH"])
        self.environment["PATH"] = os.pathsep.join([str(directory / "bin"), self.environment["PATH"]])

    def __enter__(self) -> Deployment:
        self.start("apps", sys.executable, "-c", SERVER, str(self._socket), IMPORTS, RUN_COMMAND)
        self.superlink = self.start_superlink()
        waited(self._socket.exists, 180, "the process that forks")
        return self

    def __exit__(self, *_: object) -> None:
        for group in self.groups:
            kill(group)
        self.counter.close()
        self._sockets.cleanup()
        time.sleep(0.5)  # connections end with their other sides

    def start_superlink(self) -> subprocess.Popen[bytes]:
        """Start the SuperLink, or start it again: what it knows of nodes and runs is on disk."""
        tls = {f"--ssl-{name}file": f"{self.keys}/{file}" for name, file in TLS.items()}
        options = [word for pair in tls.items() for word in pair]
        started = self.start(
            "superlink",
            *("flower-superlink", "--host", "127.0.0.1", "--port", str(self.link), *options),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--database", str(self.directory / "state.db")),
        )
        waited(lambda: self._listens(self.link), 180, "the SuperLink")
        return started

    def kill_superlink(self) -> None:
        """Kill the SuperLink, with the servers that it has started.

        The wire goes first: a SuperNode that is accepted by a wire without a SuperLink takes the end of the handshake
        for a certificate that is refused, and gives up for good.
        """
        self.counter.close()
        started = descendants(self.superlink.pid)  # in sessions of their own: they would outlive it, and try to tell it
        kill(self.superlink)
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def revive_superlink(self) -> None:
        """Start the SuperLink again, and then the wire."""
        self.superlink = self.start_superlink()
        self.counter.open()

    def _listens(self, port: int) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """A process, in a group of its own with all that it starts; its output goes into a file."""
        program = shutil.which(command[0], path=self.environment["PATH"])
        assert program is not None
        with open(self.directory / f"{name}.log", "ab") as log:
            started = subprocess.Popen(
                [program, *command[1:]],
                cwd=self.directory,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.groups.append(started)
        return started

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def node(self, number: int, *options: str, name: str = "node", clients: str = "") -> subprocess.Popen[bytes]:
        """Start a SuperNode; with other options than the right ones, if any are given."""
        right = ("--root-certificates", f"{self.keys}/ca.crt")
        right += ("--auth-supernode-private-key", f"{self.keys}/node-{number}.key")
        return self.start(
            f"{name}{number}",
            *("flower-supernode", "--superlink", f"127.0.0.1:{self.wire}", "--port", str(self.ports[number])),
            *("--node-config", f'partition-id="{clients or number}"', *(options or right)),
        )

    def flwr(self, *arguments: str, limit: float = 300) -> str:
        """Flower's command; what it prints."""
        done = subprocess.run(
            [str(shutil.which("flwr", path=self.environment["PATH"])), *arguments],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit * PATIENCE,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def register(self, *numbers: int) -> None:
        for number in numbers:
            self.flwr("supernode", "register", f"{self.keys}/node-{number}.pub", "loop", "--format", "json")

    def run(self, app: Path, **config: Any) -> None:
        """Start a run, and do not wait for it."""
        words = " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in config.items())
        said = self.flwr("run", str(app), "loop", "--run-config", words, "--format", "json")
        assert json.loads(said)["success"], said

    def finished(self, out: Path, limit: float = 450) -> None:
        """Wait for a run's last file."""
        waited(lambda: (out / "summary.json").exists(), limit, f"the run in {out.name}")


TLS = {"ca-cert": "ca.crt", "cert": "server.crt", "key": "server.key"}


def descendants(pid: int) -> list[int]:
    """What a process has started, and what that has, as long as they live."""
    children = [
        int(child) for tasks in Path(f"/proc/{pid}/task").glob("*/children") for child in tasks.read_text().split()
    ]
    return children + [other for child in children for other in descendants(child)]


def kill(group: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, at once."""
    with suppress(ProcessLookupError):
        os.killpg(group.pid, signal.SIGKILL)
    group.wait()
