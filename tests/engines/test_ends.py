"""However a run ends, its workers end with it, and nothing is left: no process, no file descriptor, no memory."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.run import open_run, resume_run
from fedstrata.techniques.scaffold import Scaffold
from tests.engines.worlds import check_same, children, federation, flat, mlp, points, run
from tests.following import OnVisit
from tests.small_runs import LONG, config, fedstrata, metrics, options, process, sentence, shorten, strays
from tests.warm import Warm, warm

pytestmark = pytest.mark.slow


def alive(pid: int) -> bool:
    """True if a process is there and not merely waiting for its parent to look at it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def eventually(condition: Callable[[], Any], what: str) -> None:
    """Wait until something is so."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def begun(tmp_path: Path, **changes: Any) -> tuple[Warm, Path, set[int]]:
    """The command, a long way from its last round, in a process group of its own as under a terminal."""
    run_ = tmp_path / "run"
    settings = options(**{"rounds": 100_000, "checkpoint_seconds": 1e6, "workers": 2, **changes})
    child = warm("run", "--out", run_, *settings, cwd=tmp_path, start_new_session=True)
    rows = run_ / "metrics.jsonl"
    try:
        eventually(
            lambda: child.poll() is not None or (rows.exists() and rows.read_text().count("\n") >= 2), "no rounds"
        )
        workers = children(child.pid)
        assert len(workers) == 2, child.communicate() if child.poll() is not None else workers
        assert all(map(alive, workers))
    except BaseException:
        child.kill()
        raise
    return child, run_, workers


# Ctrl-C and worse ----------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_all_processes_and_the_run_goes_on_later(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole group: the workers must leave it to the main process."""
    child, run_, workers = begun(tmp_path)
    os.killpg(child.pid, signal.SIGINT)
    _, error = child.communicate(timeout=LONG)
    assert child.returncode == 130
    said = re.fullmatch(rf"stopped after round (\d+); go on with: fedstrata resume {quote(str(run_))}", sentence(error))
    assert said, error
    done = int(said[1])
    assert done >= 1
    eventually(lambda: not any(map(alive, workers)), "a worker is left")
    assert not strays(run_)
    assert resume_run(run_).state.round == done == len(metrics(run_))
    shorten(run_, done + 1)
    assert fedstrata("resume", run_, "--workers", 3, "--quiet") == 0
    reference = tmp_path / "reference"
    open_run(config(rounds=done + 1, checkpoint_seconds=1e6, workers=1), reference).fit()
    assert (run_ / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()
    for row, expected in zip(metrics(run_), metrics(reference), strict=True):
        assert row | {"bytes_down": 0} == expected | {"bytes_down": 0}  # messages tell the number of rounds


def test_workers_end_when_the_main_process_is_killed(tmp_path: Path) -> None:
    """And the run goes on later, from its last checkpoint."""
    child, run_, workers = begun(tmp_path, checkpoint_seconds=0.0)
    child.kill()
    child.communicate(timeout=LONG)
    eventually(lambda: not any(map(alive, workers)), "a worker is left")
    done = resume_run(run_).state.round
    assert done >= 1
    shorten(run_, done + 1)
    assert fedstrata("resume", run_, "--quiet") == 0
    open_run(config(workers=1, rounds=done + 1, checkpoint_seconds=1e6), tmp_path / "reference").fit()
    models = [(path / "model.safetensors").read_bytes() for path in (run_, tmp_path / "reference")]
    assert models[0] == models[1]


BUSY = """
import os, sys, threading, time, torch, fedstrata as fs
from multiprocessing import parent_process
from pathlib import Path
from torch.utils.data import Dataset

class Endless(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if parent_process() is not None:
            Path(f"{os.getpid()}.busy").touch()
            while True:
                sum(range(1000))
        return torch.ones(6), index % 2

def fit():
    settings = dict(engine="processes", workers=2, threads=int(sys.argv[2]))
    fs.Federation(torch.nn.Linear(6, 2), [Endless() for _ in range(4)], **settings).fit()

def tell():
    while len(busy := list(Path().glob("*.busy"))) < 2:
        time.sleep(0.01)
    print(*(path.stem for path in busy), flush=True)

if __name__ == "__main__":
    threading.Thread(target=tell, daemon=True).start()
    if sys.argv[1] == "thread":
        thread = threading.Thread(target=fit)
        thread.start()
        thread.join()
    else:
        fit()
"""


@pytest.mark.parametrize(
    ("where", "threads"), [("main", 1), ("thread", 1), ("main", 2)], ids=["forked", "from a thread", "spawned"]
)
def test_workers_end_at_once_when_the_main_process_is_killed(where: str, threads: int, tmp_path: Path) -> None:
    """In the middle of a visit that would never end."""
    (tmp_path / "busy.py").write_text(BUSY)
    start: Any = process if threads > 1 else warm  # what spawns workers tells them how Python was started
    child = start(where, threads, cwd=tmp_path, code="import runpy; runpy.run_path('busy.py', run_name='__main__')")
    assert child.stdout is not None
    workers = [int(pid) for pid in child.stdout.readline().split()]
    assert len(workers) == 2, child.communicate()
    assert all(map(alive, workers))
    child.kill()
    child.wait(LONG)  # a worker that lives on would keep the pipes open
    try:
        eventually(lambda: not any(map(alive, workers)), "a worker is left")  # its visit never ends, so it must be told
    finally:
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)
        child.communicate(timeout=LONG)


ABANDON = """
import multiprocessing, torch, fedstrata as fs
pairs = [(torch.randn(20, 6), torch.randint(0, 4, (20,))) for _ in range(6)]
federation = fs.Federation(torch.nn.Linear(6, 4), pairs, pairs[0], rounds=50, engine="processes", workers=2)
rounds = federation.rounds()
next(rounds)
print(*(w.pid for w in multiprocessing.active_children()))
"""


def test_a_program_that_ends_in_the_middle_of_a_run(tmp_path: Path) -> None:
    child = warm(cwd=tmp_path, code=ABANDON)
    printed, error = child.communicate(timeout=LONG)
    assert (child.returncode, error) == (0, "")
    workers = [int(pid) for pid in printed.split()]
    assert len(workers) == 2
    eventually(lambda: not any(map(alive, workers)), "a worker is left")


# Nothing is left -----------------------------------------------------------------------------------------------------


def held() -> tuple[set[int], list[str], list[str], set[str]]:
    """What this process holds: children, files, mappings of shared memory; and what is in the shared file system."""
    gc.collect()
    files = []
    for name in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # of the listing itself
            continue
    with open("/proc/self/maps") as lines:
        maps = [line.split(maxsplit=5)[-1].strip() for line in lines if "memfd:" in line or "/dev/shm" in line]
    return children(), sorted(re.sub(r"\d+", "", f) for f in files), sorted(maps), set(os.listdir("/dev/shm"))


SETTINGS: dict[str, Any] = {"engine": "processes", "workers": 2, "method": fs.chain(Scaffold())}


@pytest.fixture(scope="module")
def _opened() -> None:
    """A federation has run once, so that torch has opened what it opens once."""
    run(**SETTINGS)


@pytest.fixture
def before(_opened: None) -> tuple[set[int], list[str], list[str], set[str]]:
    """What this process holds before a test."""
    return held()


def test_nothing_is_left_of_a_finished_run(before: Any) -> None:
    fed = run(**SETTINGS)
    assert held() == before
    assert torch.isfinite(fed.state.params["0.weight"]).all()


def test_something_is_held_during_a_run(before: Any) -> None:
    """So the tests here can fail: workers, pipes and shared memory are there, and seen."""
    fed = federation(**SETTINGS)
    rounds = fed.rounds()
    next(rounds)
    now = held()
    assert len(now[0] - before[0]) == 2
    assert any("memfd:fedstrata" in name for name in now[1])
    assert any("memfd:fedstrata" in name for name in now[2])
    rounds.close()
    assert held() == before
    fed.fit()
    assert held() == before


def test_nothing_is_left_of_a_run_that_nobody_finished(before: Any) -> None:
    fed = federation(**SETTINGS)
    rounds = fed.rounds()
    next(rounds)
    del fed, rounds
    assert held() == before


def test_nothing_is_left_of_an_engine_that_nobody_closed(before: Any) -> None:
    """Without the generator of the rounds, and with work in its workers' hands: it cleans up itself when it goes."""
    fed = federation(clients=flat(*range(43, 3, -1)), **SETTINGS)  # the first goes first
    visits = fed._engine.run(
        fed._server.open(fed.state, range(40), fed._work(0)), lambda clients: [{} for _ in clients]
    )
    next(visits)
    assert len(children() - before[0]) == 2
    del visits, fed
    assert held() == before


def test_nothing_is_left_of_a_federation_that_never_ran(before: Any) -> None:
    fed = federation(**SETTINGS)
    assert held() == before
    del fed
    assert held() == before


def test_nothing_is_left_after_an_exception(before: Any) -> None:
    fed = federation(**SETTINGS)

    def stop(record: fs.Record) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fed.fit(stop)
    del fed
    assert held() == before


def test_nothing_is_left_after_a_divergence(before: Any) -> None:
    fed = federation(**{**SETTINGS, "lr": 1e30})
    with pytest.raises(fs.Diverged):
        fed.fit()
    assert held() == before


def test_nothing_is_left_of_dead_workers(before: Any) -> None:
    """Neither zombies nor the pipes of those that were replaced."""
    fed = federation(**{**SETTINGS, "rounds": 6})
    for _ in fed.rounds():
        for worker in children() - before[0]:
            os.kill(worker, signal.SIGKILL)
    assert held() == before


def test_an_interrupt_in_a_visit_ends_the_workers(before: Any) -> None:
    """Ctrl-C in the main process, while workers are in the middle of something."""
    fed = federation(**SETTINGS)

    def interrupt(done: int, total: int) -> None:
        if fed.state.round == 1 and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fed.fit(OnVisit(interrupt))
    assert held() == before
    fed.fit()
    check_same(fed, run(engine="serial", method=fs.chain(Scaffold())))


def test_two_federations_at_the_same_time(before: Any) -> None:
    """Their rounds in turns; the workers of one hold nothing of the other that would keep it alive."""
    one, two = (
        federation(**SETTINGS),
        federation(mlp(), flat(8, 9, 10), points(30, 1), **{**SETTINGS, "participation": 2}),
    )
    turns = [one.rounds(), two.rounds()]
    for _ in range(2):
        for rounds in turns:
            next(rounds)
    assert len(children() - before[0]) == 4
    turns[0].close()
    assert len(children() - before[0]) == 2
    next(turns[1])
    turns[1].close()
    one.fit(), two.fit()
    check_same(one, run(engine="serial", method=fs.chain(Scaffold())))
    assert held() == before


def test_a_federation_that_is_closed_between_two_rounds_goes_on(before: Any) -> None:
    """What it had begun to evaluate, or to train ahead, is begun again by new workers."""
    fed = federation(**SETTINGS, test=points(1300, 99))
    rounds = fed.rounds()
    next(rounds)
    fed.close()
    assert held() == before
    list(rounds)
    check_same(fed, run(engine="serial", method=fs.chain(Scaffold()), test=points(1300, 99)))
    fed.close()
    assert held() == before
