"""Workers that die or raise: the run goes on with the same bits, or ends with one sentence; it never hangs."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedstrata as fs
from fedstrata.core.technique import ClientView, Hooks, Technique
from fedstrata.techniques import TECHNIQUES
from fedstrata.techniques.scaffold import Scaffold
from tests.contract.standins import Limit
from tests.engines.worlds import check_same, children, federation, flat, points, run
from tests.following import OnVisit
from tests.small_runs import fedstrata, one_sentence, options

MAIN = os.getpid()
"""Of this process; a forked worker knows by it that it is none."""


def once(marker: Path) -> bool:
    """True for the first who asks, in any process."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def die(how: int) -> None:
    """End this worker by a signal; pytest's own report of a crash would only look like a failure."""
    faulthandler.disable()
    os.kill(os.getpid(), how)


class Fatal:
    """A client's examples; reading them kills the worker, the first time or (without a marker) every time."""

    def __init__(self, data: tuple[Tensor, Tensor], how: int, marker: Path | None = None) -> None:
        self.x, self.y, self.how, self.marker = *data, how, marker

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if os.getpid() != MAIN and (self.marker is None or once(self.marker)):
            die(self.how)
        return self.x[index], int(self.y[index])


class Wrong(Fatal):
    """A client's examples; reading them in a worker raises what it is told to."""

    error: BaseException = ValueError("row 3 is unreadable")

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if os.getpid() != MAIN:
            raise self.error
        return self.x[index], int(self.y[index])


def with_client(client: int, made: Any) -> list[Any]:
    """The usual clients, one of them replaced."""
    clients: list[Any] = flat()
    clients[client] = made
    return clients


def plain(client: int) -> list[Any]:
    """The same clients without anything that kills; a Dataset in the same place, for the same random streams."""
    x, y = flat()[client]
    return with_client(client, [(x[i], int(y[i])) for i in range(len(y))])


# Death, once ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV], ids=["killed", "crashed"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_once_leaves_no_trace(tmp_path: Path, how: signal.Signals, workers: int) -> None:
    """With memories and states, which must not be written twice."""
    settings: dict[str, Any] = {"participation": 1.0, "method": fs.chain(Scaffold(), Limit(limit=0.05))}
    marker = tmp_path / "dead"
    clients = with_client(2, Fatal(flat()[2], how, marker))
    found = run(clients=clients, engine="processes", workers=workers, **settings)
    assert marker.exists()
    check_same(found, run(clients=plain(2), engine="serial", **settings))


def test_a_worker_that_dies_in_an_evaluation(tmp_path: Path) -> None:
    test = Fatal(points(40, 99), signal.SIGKILL, tmp_path / "dead")
    found = run(test=test, engine="processes", workers=2)
    assert (tmp_path / "dead").exists()
    check_same(found, run(engine="serial"))


def test_a_worker_that_dies_with_a_group(tmp_path: Path) -> None:
    clients = with_client(2, Fatal(flat()[2], signal.SIGKILL, tmp_path / "dead"))
    found = run(clients=clients, engine="vmap", workers=2, participation=1.0)
    assert (tmp_path / "dead").exists()
    check_same(found, run(clients=plain(2), engine="vmap", participation=1.0))


@dataclass(frozen=True, kw_only=True)
class Doomed(Technique):
    """Ends its worker when a certain client is visited: the first time, or (without a marker) every time."""

    name: ClassVar[str] = "doomed"
    client: int = 2
    marker: str = ""
    how: int = signal.SIGKILL

    def local(self, view: ClientView) -> Hooks:
        dies = view.assignment.client == self.client and os.getpid() != MAIN
        if dies and (not self.marker or once(Path(self.marker))):
            die(self.how)
        return Hooks()


def test_a_technique_that_kills_its_worker_once(tmp_path: Path) -> None:
    method = fs.chain(Scaffold(), Doomed(marker=str(tmp_path / "dead")))
    found = run(method=method, engine="processes", workers=3, participation=1.0)
    assert (tmp_path / "dead").exists()
    check_same(found, run(method=method, engine="serial", participation=1.0))


def test_workers_killed_from_outside_between_rounds() -> None:
    """One after the first round, all after the second; what they were evaluating is evaluated by others."""
    fed = federation(engine="processes", workers=2, rounds=4, method=fs.chain(Scaffold()), test=points(1300, 99))
    for record in fed.rounds():
        workers = sorted(multiprocessing.active_children(), key=lambda p: p.pid or 0)
        assert len(workers) == 2
        for worker in workers[: record.round]:
            worker.kill()
    check_same(fed, run(engine="serial", rounds=4, method=fs.chain(Scaffold()), test=points(1300, 99)))


def test_a_worker_killed_while_a_visit_is_handed_over() -> None:
    """The main process is at work between two visits; dead workers are noticed at the next one."""
    fed = federation(engine="processes", workers=2, participation=1.0, rounds=2)
    killed: list[int] = []

    def kill(done: int, total: int) -> None:
        if done == 2:
            victim = multiprocessing.active_children()[0]
            victim.kill()
            victim.join()  # else the next round may be over before it is gone
            killed.append(victim.pid or 0)

    fed.fit(OnVisit(kill))
    assert len(set(killed)) == 2
    check_same(fed, run(engine="serial", participation=1.0, rounds=2))


def test_a_run_survives_many_single_deaths(tmp_path: Path) -> None:
    """Every client kills one worker in its first visit; lives are counted for each task, not for the run."""
    clients: list[Any] = [Fatal(d, signal.SIGKILL, tmp_path / str(c)) for c, d in enumerate(flat())]
    found = run(clients=clients, engine="processes", workers=2, participation=1.0)
    assert len(list(tmp_path.iterdir())) == 6
    reference = [[(x[i], int(y[i])) for i in range(len(y))] for x, y in flat()]
    check_same(found, run(clients=reference, engine="serial", participation=1.0))


# Death, every time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "why"),
    [(signal.SIGKILL, "killed, perhaps because memory ran out"), (signal.SIGSEGV, "signal SIGSEGV")],
    ids=["killed", "crashed"],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_that_kills_every_worker(how: signal.Signals, why: str, workers: int) -> None:
    before = children()
    clients = with_client(3, Fatal(flat()[3], how))
    fed = federation(clients=clients, engine="processes", workers=workers, participation=1.0)
    with pytest.raises(fs.FedstrataError, match=re.escape(f"client 3: its worker process died 3 times ({why})")) as e:
        fed.fit()
    assert not isinstance(e.value, fs.UsageError)
    assert "\n" not in str(e.value)
    assert children() <= before
    assert fed.state.round == 0


def test_a_group_that_kills_every_worker_names_its_clients() -> None:
    clients = with_client(2, Fatal(flat()[2], signal.SIGKILL))
    fed = federation(clients=clients, engine="vmap", workers=2, participation=1.0)
    with pytest.raises(fs.FedstrataError, match=r"clients [\d, …]+: its worker process died 3 times"):
        fed.fit()


def test_an_evaluation_that_kills_every_worker() -> None:
    fed = federation(test=Fatal(points(40, 99), signal.SIGKILL), engine="processes", workers=2)
    with pytest.raises(fs.FedstrataError, match="the evaluation: its worker process died 3 times"):
        fed.fit()


def test_a_dataset_that_exits() -> None:
    """`sys.exit` in a worker is no answer either."""

    class Leaves(Fatal):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            if os.getpid() != MAIN:
                sys.exit(7)
            return self.x[index], int(self.y[index])

    fed = federation(clients=with_client(1, Leaves(flat()[1], 0)), engine="processes", workers=2, participation=1.0)
    with pytest.raises(fs.FedstrataError, match=r"client 1: .*exit code 7"):
        fed.fit()


def test_a_run_can_go_on_after_its_workers_died(tmp_path: Path) -> None:
    """The state is that of the last whole round, on disk too: without what killed them, the same run goes on."""
    marker = tmp_path / "armed"

    class Later(Fatal):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            if os.getpid() != MAIN and marker.exists():
                die(signal.SIGKILL)
            return self.x[index], int(self.y[index])

    settings: dict[str, Any] = {"participation": 1.0, "rounds": 4, "eval_every": 4, "method": fs.chain(Limit())}
    clients = with_client(4, Later(flat()[4], 0))
    fed = federation(clients=clients, engine="processes", workers=2, out=tmp_path / "run", **settings)

    def arm(record: fs.Record) -> None:
        if record.round == 2:
            marker.touch()

    with pytest.raises(fs.FedstrataError, match="client 4"):
        fed.fit(arm)
    assert fed.state.round == 2
    marker.unlink()
    resumed = run(clients=clients, engine="processes", workers=3, out=tmp_path / "run", resume=True, **settings)
    check_same(resumed, run(clients=plain(4), engine="serial", **settings))
    fed.fit()  # and so does the very object
    check_same(fed, resumed)


@pytest.fixture
def _techniques(monkeypatch: pytest.MonkeyPatch) -> None:
    for technique in (Doomed, Raises):
        monkeypatch.setitem(TECHNIQUES, technique.name, technique)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_techniques")
def test_the_command_says_which_client_kills_its_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = children()
    settings = options(method="doomed(client=3)", participation=1.0, workers=2)
    assert fedstrata("run", "--out", tmp_path / "run", "--quiet", *settings) == 1
    assert one_sentence(capsys).startswith("client 3: its worker process died 3 times (killed,")
    assert children() <= before


# Exceptions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["processes", "vmap"])
def test_an_exception_in_a_dataset_reaches_the_main_process(engine: str) -> None:
    before = children()
    fed = federation(clients=with_client(2, Wrong(flat()[2], 0)), engine=engine, workers=2, participation=1.0)
    with pytest.raises(ValueError, match="row 3 is unreadable") as error:
        fed.fit()
    assert type(error.value) is ValueError
    notes = "".join(error.value.__notes__)
    assert "in a worker process" in notes
    assert "__getitem__" in notes  # it says where
    assert children() <= before
    assert fed.state.round == 0


def test_an_exception_in_an_evaluation_reaches_the_main_process() -> None:
    fed = federation(test=Wrong(points(40, 99), 0), engine="processes", workers=2)
    with pytest.raises(ValueError, match="row 3 is unreadable"):
        fed.fit()


class Shy(Exception):
    """An exception that pickle makes, but cannot make again."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


class Local(Wrong):
    """Raises an exception of a class that pickle cannot find."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        class Hidden(Exception):
            pass

        if os.getpid() != MAIN:
            raise Hidden("hidden away")
        return self.x[index], int(self.y[index])


class Bashful(Wrong):
    error = Shy("rain", "Spain")


@pytest.mark.parametrize(("data", "says"), [(Local, "hidden away"), (Bashful, "rain in Spain")])
def test_an_exception_that_cannot_be_sent(data: type[Wrong], says: str) -> None:
    """Its text arrives all the same."""
    fed = federation(clients=with_client(2, data(flat()[2], 0)), engine="processes", workers=2, participation=1.0)
    with pytest.raises(Exception, match=says):
        fed.fit()


@dataclass(frozen=True, kw_only=True)
class Raises(Technique):
    """Refuses a client's visit."""

    name: ClassVar[str] = "raises"
    usage: bool = True

    def local(self, view: ClientView) -> Hooks:
        if view.assignment.client == 1:
            raise fs.UsageError("client 1 has nothing to learn") if self.usage else ValueError("something odd")
        return Hooks()


@pytest.mark.usefixtures("_techniques")
@pytest.mark.parametrize(
    ("usage", "code", "says"),
    [(True, 2, "client 1 has nothing to learn"), (False, 1, "internal error: ValueError: something odd")],
)
def test_the_command_ends_as_the_exception_in_a_worker_says(
    usage: bool, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = children()
    settings = options(method=f"raises(usage={usage})", participation=1.0, workers=2)
    assert fedstrata("run", "--out", tmp_path / "run", "--quiet", *settings) == code
    assert says in one_sentence(capsys)
    assert children() <= before


def test_a_usage_error_stays_one() -> None:
    """A label beyond the outputs is found only when its batch is read: the sentence is the one of `serial`."""
    x, y = flat()[2]

    class Rows:
        def __len__(self) -> int:
            return len(y)

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return x[index], 4 if index == 20 else int(y[index])

    said = []
    for engine, workers in (("serial", 1), ("processes", 2)):
        fed = federation(clients=with_client(2, Rows()), engine=engine, workers=workers, participation=1.0)
        with pytest.raises(fs.UsageError, match=r"label 4 \(client 2, example 20\), but the model has 4") as error:
            fed.fit()
        said.append(str(error.value))
    assert said[0] == said[1]


def test_after_an_exception_the_federation_can_go_on(tmp_path: Path) -> None:
    """Work of the failed round that workers still had is not taken for that of the next."""
    marker = tmp_path / "broken"

    class Sometimes(Fatal):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            if os.getpid() != MAIN and once(marker):
                raise OSError("the disk is away")
            return self.x[index], int(self.y[index])

    clients = with_client(2, Sometimes(flat()[2], 0))
    fed = federation(clients=clients, engine="processes", workers=2, participation=1.0)
    with pytest.raises(OSError, match="the disk is away"):
        fed.fit()
    fed.fit()
    check_same(fed, run(clients=plain(2), engine="serial", participation=1.0))
    assert torch.isfinite(next(iter(fed.state.params.values()))).all()
