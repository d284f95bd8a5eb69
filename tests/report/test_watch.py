"""The live server: what it answers, to whom, and what it never reads."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedstrata.errors import UsageError
from fedstrata.report import watch
from fedstrata.report.watch import PageServer

from .synthetic import record, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", rounds=3, probes=False, ended=False)


@pytest.fixture
def server(run: Path) -> Iterator[PageServer]:
    with PageServer(run) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(server: PageServer, path: str, **headers: str) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers.get("ETag")
    finally:
        connection.close()


def test_it_listens_on_this_machine_alone(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.address == f"http://127.0.0.1:{server.server_port}/"


def test_the_page_is_live(server: PageServer) -> None:
    status, body, _ = ask(server, "/")
    assert status == 200
    assert b"data-live" in body[:200]


def test_data_is_sent_once_and_again_when_a_round_ends(
    server: PageServer, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PATIENCE", 0)
    status, body, tag = ask(server, "/data.json")
    assert (status, len(json.loads(body)["figures"]["accuracy"]["data"][0]["x"])) == (200, 3)
    assert tag
    assert ask(server, "/data.json", If_None_Match=tag)[:2] == (304, b"")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record(4, accuracy=0.5)) + "\n")
    status, body, second = ask(server, "/data.json", If_None_Match=tag)
    assert (status, len(json.loads(body)["figures"]["accuracy"]["data"][0]["x"])) == (200, 4)
    assert second != tag


def test_news_that_take_long_are_not_made_again_at_once(
    server: PageServer, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take 3 seconds here, so that the next are made 15 seconds later, as told by a clock that tests turn."""
    clock = [100.0]
    made: list[float] = []

    def slow(runs: object) -> str:
        made.append(clock[0])
        clock[0] += 3
        return f'"{len(made)}"'

    monkeypatch.setattr(watch, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watch, "news", slow)
    tag = ask(server, "/data.json")[2]
    assert tag
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record(4, accuracy=0.5)) + "\n")
    clock[0] = 117.9
    assert ask(server, "/data.json", If_None_Match=tag)[:2] == (304, b"")
    assert ask(server, "/data.json")[:2] == (200, b'"1"')
    clock[0] = 118.0
    assert ask(server, "/data.json", If_None_Match=tag)[:2] == (200, b'"2"')
    assert made == [100.0, 118.0]


@pytest.mark.parametrize(
    "path", ["/run.toml", "/../run.toml", "//etc/passwd", "/%2e%2e/run.toml", "/?x", "/data.json/"]
)
def test_nothing_else_is_there(server: PageServer, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "evil.example:80", ""])
def test_other_names_are_refused(server: PageServer, host: str) -> None:
    assert ask(server, "/data.json", Host=host)[0] == 421


def test_its_own_names_are_not(server: PageServer) -> None:
    assert ask(server, "/data.json", Host=f"localhost:{server.server_port}")[0] == 200


def test_a_run_that_is_gone_is_told(server: PageServer, run: Path) -> None:
    run.rename(run.with_name("elsewhere"))
    status, body, _ = ask(server, "/data.json")
    assert status == 503
    assert b"no run" in body


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    run = write_run(tmp_path / "new", rounds=0, probes=False, ended=False)
    (run / "metrics.jsonl").unlink()
    (run / "facts.json").unlink()
    with PageServer(run) as server:
        revision, news = server.source.news()
        assert json.loads(news)["figures"] == {}
        assert server.source.news()[0] == revision


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run"):
        PageServer(tmp_path)


def test_a_taken_port_is_told(server: PageServer, run: Path) -> None:
    with pytest.raises(UsageError, match=f"cannot listen on port {server.server_port}"):
        PageServer(run, server.server_port)


def test_it_ends_politely(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: PageServer, poll_interval: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", interrupted)
    told: list[str] = []
    watch.serve(run, ready=[told.append])
    assert told[0].startswith("http://127.0.0.1:")
