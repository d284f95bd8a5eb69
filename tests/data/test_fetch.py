"""Downloads against local servers: whole, resumed, broken, wrong."""

from __future__ import annotations

import hashlib
import itertools
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedstrata.data.fetch import fetch
from fedstrata.data.sources import SOURCES, Remote
from fedstrata.errors import UsageError

CONTENT = bytes(i * i % 251 for i in range(700_000))


@dataclass
class Server:
    """A server of one file per path, whose manners a test sets."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    """Whether Range is honoured."""
    drops: int = 0
    """How many answers still break off, each after `drop_after` bytes."""
    drop_after: int = 300_000
    statuses: list[int] = field(default_factory=list)
    """Errors to answer first, one a request."""
    lengths: bool = True
    """Whether Content-Length is sent."""
    shift: int = 0
    """How far a resumed answer starts from where it was asked to."""
    drip: str = ""
    """What comes a byte at a time, for ever: the head or the body."""
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """(path, Range) of every request."""
    url: str = ""


def handler_of(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            server.requests.append((self.path, asked))
            if server.statuses:
                self.answer(server.statuses.pop(0), b"")
                return
            if self.path not in server.files:
                self.answer(404, b"no such file")
                return
            body = server.files[self.path]
            match = re.fullmatch(r"bytes=(\d+)-", asked or "") if server.ranges else None
            if match is None:
                self.answer(200, body)
            elif int(match[1]) >= len(body):
                self.answer(416, b"", f"bytes */{len(body)}")
            else:
                start = int(match[1]) + server.shift
                self.answer(206, body[start:], f"bytes {start}-{len(body) - 1}/{len(body)}")

        def answer(self, status: int, body: bytes, content_range: str | None = None) -> None:
            if server.drip:
                self.drip(b"HTTP/1.1 200 OK\r\n" if server.drip == "head" else body)
                return
            self.send_response(status)
            if server.lengths:
                self.send_header("Content-Length", str(len(body)))
            if content_range is not None:
                self.send_header("Content-Range", content_range)
            self.end_headers()
            if server.drops and status in (200, 206):
                server.drops -= 1
                self.wfile.write(body[: server.drop_after])
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            self.wfile.write(body)

        def drip(self, data: bytes) -> None:
            """As slowly as no timeout between two bytes would notice."""
            if server.drip == "body":
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
            with suppress(OSError):
                for byte in itertools.cycle(data):
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    time.sleep(0.02)

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    return Handler


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of `mnist/big.bin` and `mnist/small.bin`, and a table that asks for both."""
    state = Server(files={"/mnist/big.bin": CONTENT, "/mnist/small.bin": CONTENT[:1000]})
    web = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(state))
    web.daemon_threads = True
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{web.server_address[1]}"
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("FEDSTRATA_MIRROR", raising=False)
    remotes = (remote("big.bin", CONTENT), remote("small.bin", CONTENT[:1000], optional=True))
    monkeypatch.setitem(SOURCES, "mnist", remotes)
    yield state
    web.shutdown()
    web.server_close()
    thread.join()


def remote(name: str, data: bytes, *, optional: bool = False) -> Remote:
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    return Remote(f"http://upstream.invalid/{name}", len(data), md5, optional)


def get(server: Server, folder: Path, *, attempts: int = 3, optional: bool = False) -> list[Path]:
    return fetch("mnist", folder, mirror=server.url, attempts=attempts, pause=0.0, optional=optional, timeout=5.0)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "mnist").iterdir())


def test_a_whole_download(server: Server, tmp_path: Path) -> None:
    told: list[tuple[int, int | None, str]] = []
    paths = fetch("mnist", tmp_path, mirror=server.url, progress=lambda *news: told.append(news))
    assert paths == [tmp_path / "mnist" / "big.bin"]
    assert paths[0].read_bytes() == CONTENT
    assert names(tmp_path) == ["big.bin"]
    assert told[-1] == (len(CONTENT), len(CONTENT), "big.bin")
    assert [done for done, _, _ in told] == sorted({done for done, _, _ in told})


def test_what_is_whole_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    get(server, tmp_path)
    before = (tmp_path / "mnist" / "big.bin").stat().st_mtime_ns
    get(server, tmp_path)
    assert len(server.requests) == 1
    assert (tmp_path / "mnist" / "big.bin").stat().st_mtime_ns == before


def test_a_damaged_file_is_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "big.bin").write_bytes(CONTENT[:-1] + b"x")
    (path,) = get(server, tmp_path)
    assert path.read_bytes() == CONTENT


def test_optional_files_come_on_request(server: Server, tmp_path: Path) -> None:
    assert [path.name for path in get(server, tmp_path, optional=True)] == ["big.bin", "small.bin"]


def test_the_environment_names_a_mirror(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTRATA_MIRROR", server.url + "/")
    fetch("mnist", tmp_path)
    assert server.requests == [("/mnist/big.bin", None)]


def test_a_part_is_resumed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "big.bin.part").write_bytes(CONTENT[:123_456])
    (path,) = get(server, tmp_path)
    assert server.requests == [("/mnist/big.bin", "bytes=123456-")]
    assert path.read_bytes() == CONTENT
    assert names(tmp_path) == ["big.bin"]


def test_a_complete_part_needs_no_request(server: Server, tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "big.bin.part").write_bytes(CONTENT)
    (path,) = get(server, tmp_path)
    assert server.requests == []
    assert path.read_bytes() == CONTENT


def test_a_part_that_is_too_long_is_started_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "big.bin.part").write_bytes(CONTENT + b"more")
    assert get(server, tmp_path)[0].read_bytes() == CONTENT
    assert server.requests == [("/mnist/big.bin", None)]


def test_a_dropped_connection_is_taken_up_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.drops = 2
    (path,) = get(server, tmp_path)
    assert path.read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == [None, "bytes=300000-", "bytes=600000-"]


def test_too_many_drops_end_in_one_sentence_and_keep_the_part(server: Server, tmp_path: Path) -> None:
    server.drops, server.drop_after = 3, 100_000
    with pytest.raises(UsageError, match=r"300,000 .*given up after 3 attempts; what came is kept in .*big\.bin\.part"):
        get(server, tmp_path)
    assert names(tmp_path) == ["big.bin.part"]
    assert (tmp_path / "mnist" / "big.bin.part").read_bytes() == CONTENT[:300_000]
    assert get(server, tmp_path)[0].read_bytes() == CONTENT
    assert server.requests[-1] == ("/mnist/big.bin", "bytes=300000-")


def test_a_server_that_ignores_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.ranges, server.drops = False, 1
    (path,) = get(server, tmp_path)
    assert path.read_bytes() == CONTENT
    assert len(server.requests) == 2


def test_a_server_that_resumes_elsewhere_is_not_believed(server: Server, tmp_path: Path) -> None:
    server.drops, server.shift = 1, -7
    (path,) = get(server, tmp_path)
    assert path.read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == [None, "bytes=300000-", None]


def test_wrong_bytes_are_deleted(server: Server, tmp_path: Path) -> None:
    server.files["/mnist/big.bin"] = CONTENT[::-1]
    with pytest.raises(UsageError, match="is not the file that was expected: its md5 is"):
        get(server, tmp_path)
    assert names(tmp_path) == []


def test_a_wrong_part_is_found_out_by_its_md5(server: Server, tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "big.bin.part").write_bytes(b"x" * 1000)
    with pytest.raises(UsageError, match="md5"):
        get(server, tmp_path)
    assert names(tmp_path) == []
    assert get(server, tmp_path)[0].read_bytes() == CONTENT


@pytest.mark.parametrize("body", [CONTENT + b"more", CONTENT[:-9], b"<html>an error page</html>"])
@pytest.mark.parametrize("lengths", [True, False])
def test_another_size_is_refused(server: Server, tmp_path: Path, body: bytes, lengths: bool) -> None:
    server.files["/mnist/big.bin"], server.lengths = body, lengths
    with pytest.raises(UsageError):
        get(server, tmp_path, attempts=1)
    assert "big.bin" not in names(tmp_path)


def test_404_is_final(server: Server, tmp_path: Path) -> None:
    server.files.clear()
    with pytest.raises(UsageError, match=r"big\.bin cannot be fetched: the server answers 404"):
        get(server, tmp_path)
    assert len(server.requests) == 1
    assert names(tmp_path) == []


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.statuses = [503, 429]
    assert get(server, tmp_path)[0].read_bytes() == CONTENT
    assert len(server.requests) == 3


def test_without_size_and_md5_the_servers_own_length_is_checked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, "mnist", (Remote("http://upstream.invalid/big.bin"),))
    server.drops = 1
    (path,) = get(server, tmp_path)
    assert path.read_bytes() == CONTENT
    path.rename(path.with_name("big.bin.part"))
    assert get(server, tmp_path)[0].read_bytes() == CONTENT  # the server says 416: nothing is lacking
    assert len(server.requests) == 3


def test_no_server(tmp_path: Path, server: Server) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UsageError, match=r"no answer \(.*\), given up after 2 attempts$"):
            fetch("mnist", tmp_path, mirror=address, attempts=2, pause=0.0, timeout=2.0)


def test_two_downloads_into_one_folder(server: Server, tmp_path: Path) -> None:
    def nested(done: int, total: int | None, name: str) -> None:
        with pytest.raises(UsageError, match=r"another download into .* is under way"):
            get(server, tmp_path)

    fetch("mnist", tmp_path, mirror=server.url, progress=nested)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("femnist", "no files of 'femnist' to fetch: make LEAF's"),
        ("shakespeare", "no files of 'shakespeare' to fetch"),
        ("mnits", "nothing to fetch for 'mnits' .did you mean 'mnist'"),
        ("digits", "nothing to fetch for 'digits'"),
    ],
)
def test_names_without_files(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        fetch(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not an http or https address"):
        fetch("mnist", tmp_path, mirror="file:///etc")
    with pytest.raises(UsageError, match="at least one attempt"):
        fetch("mnist", tmp_path, attempts=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot make the folder"):
        fetch("mnist", tmp_path / "file")


def test_the_table_is_sound() -> None:
    for name, remotes in SOURCES.items():
        assert len({remote.name for remote in remotes}) == len(remotes), name
        for entry in remotes:
            assert entry.url.startswith(("http://", "https://"))
            assert re.fullmatch("[0-9a-f]{32}", entry.md5 or "")
            assert entry.size


@pytest.mark.parametrize("drip", ["head", "body"])
def test_a_dripping_server_is_given_up(server: Server, tmp_path: Path, drip: str) -> None:
    """A byte every 20 ms never lets a timeout of 5 s pass; 700,000 of them would take four hours."""
    server.drip = drip
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"it came too slowly, \d+ bytes in \d+ seconds, given up") as caught:
        fetch("mnist", tmp_path, mirror=server.url, timeout=5.0, grace=0.4, slowest=10_000.0)
    assert time.monotonic() - began < 60  # a busy machine may take some seconds
    assert ("is kept in" in str(caught.value)) == (drip == "body")
    assert names(tmp_path) == (["big.bin.part"] if drip == "body" else [])


def test_what_dripped_is_gone_on_with(server: Server, tmp_path: Path) -> None:
    server.drip = "body"
    with pytest.raises(UsageError, match="too slowly"):
        fetch("mnist", tmp_path, mirror=server.url, grace=0.4, slowest=10_000.0)
    come = (tmp_path / "mnist" / "big.bin.part").stat().st_size
    server.drip = ""
    assert get(server, tmp_path)[0].read_bytes() == CONTENT
    assert server.requests[-1] == ("/mnist/big.bin", f"bytes={come}-")


def test_pauses_count_too(server: Server, tmp_path: Path) -> None:
    """A server that is busy for ever is not asked for longer than a file may take."""
    server.statuses = [503] * 100
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"too slowly, 0 bytes in \d+ seconds"):
        fetch("mnist", tmp_path, mirror=server.url, attempts=100, pause=0.2, grace=0.5)
    assert time.monotonic() - began < 15  # a hundred pauses are 20 seconds at least
