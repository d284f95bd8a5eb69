"""The report of a run while it goes on: a page on this machine alone that asks for news every two seconds.

Two addresses are answered, `/` and `/data.json`, both made from the run's own files; no path of a request ever
reaches the file system. The server listens on 127.0.0.1, and answers only to that name, so that no page of another
site can read a run by giving its own name this address (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from time import monotonic

from fedstrata.errors import UsageError
from fedstrata.report.page import news, page
from fedstrata.runs.reader import SavedRun
from fedstrata.system import signals

HOST = "127.0.0.1"
FILES = ("run.toml", "metrics.jsonl", "probes.jsonl", "facts.json", "summary.json", "versions.json", "tried.json")
"""The files of a run that are watched: there is news when one of them changes."""
PATIENCE = 5
"""News is made again only after so many times as long as the last took: watching takes a sixth of a core at most."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def runs_in(path: Path) -> list[Path]:
    """The directory itself if it is a run's, or those of all runs in it.

    Raises:
        UsageError: if there is no run.
    """
    if (path / "run.toml").is_file():
        return [path]
    found = sorted(inner.parent for inner in path.glob("*/run.toml")) if path.is_dir() else []
    if not found:
        raise UsageError(f"{path} is neither a run nor a directory of runs: there is no run.toml in it")
    return found


class Source:
    """The page of a directory's runs as they are now; made anew when their files have changed, but not too often."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = Lock()
        self._revision, self._news = "", ""
        self._due = 0.0
        self.read_runs()

    def read_runs(self) -> list[SavedRun]:
        """Read the runs as they are now."""
        return [SavedRun.read(path) for path in runs_in(self._directory)]

    def revision(self) -> str:
        """A hash of the state of the files."""
        seen = hashlib.sha256()
        for path in runs_in(self._directory):
            for name in FILES:
                seen.update(f"{path.name}/{name}:{_file_state(path / name)};".encode())
        return seen.hexdigest()[:20]

    def news(self) -> tuple[str, str]:
        """The revision and the page's data: the last ones until it is time for new ones."""
        with self._lock:
            revision = self.revision()
            if revision != self._revision and (not self._revision or monotonic() >= self._due):
                began = monotonic()
                self._news = news(self.read_runs())
                self._revision = revision  # taken before the files were read: what came since is news once more
                ended = monotonic()
                self._due = ended + PATIENCE * (ended - began)
            return self._revision, self._news


def _file_state(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "-"
    return f"{found.st_mtime_ns},{found.st_size}"


class _Handler(BaseHTTPRequestHandler):
    """Answers to `/` and `/data.json`."""

    server: PageServer
    server_version, sys_version = "fedstrata", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """Answer, or say why not."""
        if self.headers.get("Host", "").lower() not in self.server.names:
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to its own name only", "text/plain")
            return
        try:
            if self.path == "/":
                self._answer(HTTPStatus.OK, page(self.server.source.read_runs(), live=True), "text/html")
            elif self.path == "/data.json":
                self._data()
            else:
                self._answer(HTTPStatus.NOT_FOUND, "there is nothing here", "text/plain")
        except UsageError as error:  # a file that is being written, or is gone
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error), "text/plain")

    def _data(self) -> None:
        revision, data = self.server.source.news()
        tag = f'"{revision}"'
        if self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, "", "application/json", tag)
        else:
            self._answer(HTTPStatus.OK, data, "application/json", tag)

    def _answer(self, status: HTTPStatus, text: str, kind: str, tag: str | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in ({**_HEADERS, "ETag": tag} if tag else _HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal belongs to the user."""


class PageServer(ThreadingHTTPServer):
    """Listens on this machine alone.

    Args:
        directory: a run's, or one of runs.
        port: to listen on; 0 for any that is free.

    Raises:
        UsageError: if there is no run, or the port is taken.
    """

    daemon_threads = True

    def __init__(self, directory: Path, port: int = 0) -> None:
        self.source = Source(directory)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            why = (error.strerror or str(error)).lower() if isinstance(error, OSError) else "ports end at 65535"
            raise UsageError(f"cannot listen on port {port}: {why}") from None
        self.names = {f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"}

    @property
    def address(self) -> str:
        """What a browser opens."""
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say what went wrong; a browser that has gone away is no news."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def serve(directory: Path, port: int = 0, ready: Sequence[Callable[[str], object]] = ()) -> None:
    """Show a run, or runs, live until the user stops it with Ctrl-C.

    Args:
        directory: a run's, or one of runs.
        port: to listen on; 0 for any that is free.
        ready: called with the page's address once it can be opened.
    """
    with PageServer(directory, port) as server:
        for tell in ready:
            tell(server.address)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            signals.acknowledge_interrupt()
