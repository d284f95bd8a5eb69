"""Worker processes give the bits of one client after the other, whatever the run and however many workers."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.engines import pool, processes
from fedstrata.techniques.scaffold import Scaffold
from tests.contract.rows import ROWS, Row, devices_for
from tests.contract.standins import Limit
from tests.engines.worlds import (
    SIZES,
    Shaken,
    check_same,
    convnet,
    federation,
    flat,
    mlp,
    noisy,
    pictures,
    points,
    records,
    run,
    seeded,
    staged,
    tensors,
)
from tests.small_runs import LONG, config, fedstrata, options, same

WORKERS = pytest.mark.parametrize("workers", [1, 2, 3, "auto"])


def photos() -> dict[str, Any]:
    """Clients of pictures, and a convolutional net with batch norm for them."""
    return {
        "model": convnet(),
        "clients": [pictures(size, seed) for seed, size in enumerate(SIZES)],
        "test": pictures(40, 99),
    }


def shallow() -> dict[str, Any]:
    """A deep model, of which two clients hold a part."""
    return {
        "model": staged(),
        "archs": {"shallow": staged("first", "norm", "relu", "head")},
        "arch_of": lambda client: "shallow" if client in (1, 3) else "",
        "participation": 5,
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "batch norm, average": lambda: {**photos(), "buffers": "average"},
    "batch norm, local": lambda: {**photos(), "buffers": "local", "eval_clients": True},
    "batch norm, drop": lambda: {**photos(), "buffers": "drop"},
    "channels first": lambda: {**photos(), "channels_last": False},
    "momentum": lambda: {**photos(), "optimizer": "sgd(momentum=0.9, weight_decay=0.001)", "epochs": 2, "clip": 1.0},
    "adam, steps": lambda: {"optimizer": "adam", "lr": 0.01, "steps": 4, "schedule": "cosine"},
    "everybody": lambda: {"participation": 1.0},
    "one client": lambda: {"participation": 1},
    "dropout": lambda: {"model": noisy()},
    "random transforms": lambda: {"clients": [Shaken(pair) for pair in flat()], "test": Shaken(points(40, 99))},
    "sub-models": shallow,
    "evaluation every second round": lambda: {"eval_every": 2, "rounds": 5},
    "no evaluation": lambda: {"test": ()},
    "evaluation of clients": lambda: {**photos(), "eval_clients": True, "eval_every": 2},
    "target": lambda: {"target": 0.3, "rounds": 6},
    "stop at target": lambda: {"target": 0.6, "stop_at_target": True, "rounds": 20, "lr": 0.2},
    "large test set": lambda: {"test": points(1300, 99)},  # of three batches
    "states and memories": lambda: {"method": fs.chain(Scaffold(), Limit(limit=0.05)), "rounds": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_workers_gives_the_same_bits(case: str) -> None:
    reference = run(**CASES[case](), engine="serial")
    for workers in (1, 2, 3, "auto") if case in ("batch norm, average", "states and memories") else (1, 3):
        found = run(**CASES[case](), engine="processes", workers=workers)  # type: ignore[misc]
        assert found.engine == "processes"
        check_same(found, reference)


def test_the_test_above_can_fail() -> None:
    one, other = run(engine="serial"), run(engine="serial", seed=1)
    with pytest.raises(AssertionError):
        check_same(one, other)


def test_a_run_that_stops_at_its_target_stops_before_the_end() -> None:
    """So that the case above asks what it seems to ask."""
    assert 1 < len(run(**CASES["stop at target"](), engine="processes", workers=2).records) < 20


@pytest.mark.parametrize("row", ROWS, ids=[r.technique.name for r in ROWS])
def test_every_technique(row: Row) -> None:
    settings = {"model": staged(), "method": fs.chain(row.technique), "rounds": 4}
    settings |= devices_for(len(flat()), row.technique)
    check_same(run(**settings, engine="processes", workers=2), run(**settings, engine="serial"))


@pytest.mark.slow
def test_workers_of_more_than_one_thread() -> None:
    """The main process has used its own threads before: a forked copy of them must not be waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (torch.randn(500, 500) @ torch.randn(500, 500)).relu().sum()
        wide: Any = {
            "model": mlp(),
            "clients": flat(3000, 2000),
            "batch_size": 1000,
            "participation": 1.0,
            "threads": 2,
        }
        check_same(run(**wide, engine="processes", workers=2), run(**wide, engine="serial"))
    finally:
        torch.set_num_threads(before)


@WORKERS
def test_vectorised_clients_have_the_same_bits_for_any_number_of_workers(workers: int | str) -> None:
    """Twenty clients, so that there is more than one group to share out."""
    settings = {"clients": flat(*range(3, 23)), "participation": 1.0, "engine": "vmap"}
    check_same(run(**settings, workers=workers), run(**settings, workers=1))


@pytest.mark.parametrize("method", ["fednlr + perturb", "fedimpro(split='1', noise=0.1) + moon + fednlr + perturb"])
def test_what_techniques_prepare_and_draw_for_vectorised_clients_has_the_same_bits(method: str) -> None:
    settings = {"clients": flat(*range(3, 23)), "participation": 1.0, "engine": "vmap", "method": method}
    check_same(run(**settings, workers=2), run(**settings, workers=1))


def test_dropout_of_vectorised_clients_has_the_same_bits() -> None:
    settings = {"clients": flat(*range(3, 23)), "participation": 1.0, "engine": "vmap", "model": noisy()}
    check_same(run(**settings, workers=2), run(**settings, workers=1))


# Stopping and going on -----------------------------------------------------------------------------------------------


def test_rounds_can_be_stopped_and_continued() -> None:
    """Stopped from outside after every round; the round that trained ahead of its turn is trained again."""
    reference = run(engine="serial", rounds=5, method=fs.chain(Scaffold()))
    stopped = federation(engine="processes", workers=2, rounds=5, method=fs.chain(Scaffold()))
    for done in range(1, 6):
        rounds = stopped.rounds()
        next(rounds)
        rounds.close()
        assert stopped.state.round == len(stopped.records) == done
    stopped.fit()
    check_same(stopped, reference)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_resuming_with_another_number_of_workers(tmp_path: Path, buffers: Any) -> None:
    """Memories go through files here: running statistics of clients under `local`, and what techniques remember."""
    out = tmp_path / "run"
    settings = {
        "model": staged(),
        "method": fs.chain(Scaffold(), Limit(limit=0.05), buffers=buffers),
        "rounds": 6,
        "checkpoint_seconds": 0,
    }
    reference = run(**settings, engine="serial", out=tmp_path / "reference")
    for engine, workers in (("processes", 3), ("serial", 1), ("processes", 1), ("processes", 2)):
        fed = federation(**settings, engine=engine, workers=workers, out=out, resume=out.exists())
        rounds = fed.rounds()
        next(rounds)
        rounds.close()
    last = federation(**settings, engine="processes", workers="auto", out=out, resume=True)
    assert last.state.round == 4
    last.fit()
    check_same(last, reference)
    assert same(out, tmp_path / "reference")


def test_the_command_with_any_number_of_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs: dict[str, list[int | str]] = {"serial": [1], "processes": [1, 2, "auto"]}
    for engine, counts in runs.items():
        for workers in counts:
            out = tmp_path / f"{engine}-{workers}"
            assert fedstrata("run", "--out", out, *options(engine=engine, workers=workers, rounds=3), "--quiet") == 0
            assert same(out, tmp_path / "serial-1")
    assert "accuracy" in capsys.readouterr().out


def test_the_command_resumes_with_other_workers(tmp_path: Path) -> None:
    from fedstrata.run import open_run

    open_run(config(workers=1, engine="serial"), tmp_path / "whole").fit()
    fed = open_run(config(workers=2), tmp_path / "run")
    rounds = fed.rounds()
    next(rounds), next(rounds)
    rounds.close()
    assert fed.engine == "processes"
    assert fedstrata("resume", tmp_path / "run", "--workers", 3, "--quiet") == 0
    assert same(tmp_path / "run", tmp_path / "whole")


# Updates that wait for their turn ------------------------------------------------------------------------------------


class Patient:
    """A client's examples, which leave a mark when they are read; the first client's come only after many others'."""

    def __init__(self, data: tuple[Tensor, Tensor], marks: Path, client: int, others: int) -> None:
        self.x, self.y, self.marks, self.client, self.others = *data, marks, client, others

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        mark = self.marks / str(self.client)
        if self.marks.exists() and not mark.exists():
            if self.client == 0:
                self.wait()
            mark.write_text(str(len(list(self.marks.iterdir()))))
        return self.x[index], int(self.y[index])

    def wait(self) -> None:
        """Until all that may come have come, and a little longer for those that must not."""
        seen, end = 0, time.monotonic() + LONG
        while seen < self.others and time.monotonic() < end:
            seen = len(list(self.marks.iterdir()))
            time.sleep(0.01)
        time.sleep(0.3)


def impatient(marks: Path, others: int, count: int = 30) -> list[Patient]:
    sizes = [40 if client % 7 == 0 else 1 + client % 3 for client in range(count)]
    return [Patient(points(size, client), marks, client, others) for client, size in enumerate(sizes)]


def test_few_updates_wait_for_a_slow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, thirty clients of very unequal size, the first one slow: the others come up to the window only."""
    window = pool.AHEAD * 2
    settings = {"participation": 1.0, "rounds": 1, "test": ()}
    reference = run(clients=impatient(tmp_path / "none", 0), engine="serial", **settings)
    monkeypatch.setattr(pool, "AHEAD_BYTES", 0)
    marks = tmp_path / "marks"
    fed = federation(clients=impatient(marks, window - 2), engine="processes", workers=2, **settings)
    marks.mkdir()
    fed.fit()
    check_same(fed, reference)
    before_the_first = int((marks / "0").read_text())
    assert before_the_first == window - 2  # one has to stay behind the first, in the same worker
    segments = fed._engine._next_segment - processes.STORE - 1  # type: ignore[attr-defined]
    assert 0 < segments <= window + pool.QUEUE * 2


def test_small_updates_may_all_wait(tmp_path: Path) -> None:
    """Where memory is no concern the others do not stop for the slow one; so the test above can fail."""
    marks = tmp_path / "marks"
    fed = federation(clients=impatient(marks, 28), participation=1.0, rounds=1, engine="processes", workers=2)
    marks.mkdir()
    fed.fit()
    assert int((marks / "0").read_text()) == 28


def test_many_small_updates_wait_within_a_usual_limit_of_open_files(tmp_path: Path) -> None:
    """As 1500 of them would under the usual limit of 1024."""
    marks, count = tmp_path / "marks", 200
    clients = impatient(marks, count - 2, count)
    fed = federation(clients=clients, participation=1.0, rounds=1, engine="processes", workers=2, test=())
    marks.mkdir()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, before[1]))
    try:
        fed.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert int((marks / "0").read_text()) == count - 2


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_many_clients_of_unequal_size_in_a_narrow_window(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [60 if client % 9 == 8 else 1 + client % 4 for client in range(40)]
    settings: dict[str, Any] = {"clients": flat(*sizes), "participation": 1.0, "method": fs.chain(Limit(), Scaffold())}
    reference = run(**settings, engine="serial")
    monkeypatch.setattr(pool, "AHEAD_BYTES", 0)
    found = run(**settings, engine="processes", workers=workers)
    check_same(found, reference)
    segments = found._engine._next_segment - processes.STORE - 1  # type: ignore[attr-defined]
    assert 0 < segments <= (pool.AHEAD + pool.QUEUE) * workers


def test_a_narrow_window_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"clients": flat(*range(3, 43)), "participation": 1.0, "engine": "vmap"}
    reference = run(**settings)
    monkeypatch.setattr(pool, "AHEAD_BYTES", 0)
    check_same(run(**settings, workers=2), reference)


def test_models_much_larger_than_their_data() -> None:
    """Updates of some megabytes, so that segments of the shared memory have to grow, and differ from each other."""
    model = nn.Sequential(nn.Linear(6, 700), nn.ReLU(), nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 4))
    settings: dict[str, Any] = {
        "model": model,
        "rounds": 2,
        "method": fs.chain(Limit()),
        "optimizer": "adam",
        "lr": 1e-3,
    }
    check_same(run(**settings, engine="processes", workers=2), run(**settings, engine="serial"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "vmap"])
def test_messages_longer_than_a_pipe(engine: str) -> None:
    """Many layers with long names, and slots for all of them: neither side may wait for the other to read."""
    layers = 100  # a pipe holds 64 KiB, and each name has a thousand letters

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 4)
            self.shifts = nn.ParameterDict({f"{'shift' * 200}{i}": nn.Parameter(torch.zeros(1)) for i in range(layers)})

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(x)
            return logits + sum(self.shifts.values(), torch.zeros(1)) / layers

    model = seeded(Deep)
    settings: dict[str, Any] = {
        "model": model,
        "clients": flat(*[2] * 20),
        "participation": 1.0,
        "rounds": 2,
        "method": fs.chain(Scaffold(), Limit()),
    }
    reference = run(**settings, engine="serial" if engine == "processes" else "vmap")
    check_same(run(**settings, engine=engine, workers=2), reference)


def test_sub_models_of_very_different_size() -> None:
    """A segment that held a large update holds a small one next, and the other way round."""
    torch.manual_seed(0)  # some first weights of so wide a model diverge
    wide = nn.Sequential()
    wide.add_module("first", nn.Linear(6, 8))
    wide.add_module("middle", nn.Sequential(nn.Linear(8, 9000), nn.ReLU(), nn.Linear(9000, 8)))
    wide.add_module("head", nn.Linear(8, 4))
    thin = nn.Sequential()
    thin.add_module("first", nn.Linear(6, 8))
    thin.add_module("head", nn.Linear(8, 4))
    settings: dict[str, Any] = {
        "model": wide,
        "archs": {"thin": thin},
        "arch_of": lambda client: "thin" if client % 2 else "",
        "rounds": 4,
        "participation": 3,
    }
    check_same(run(**settings, engine="processes", workers=2), run(**settings, engine="serial"))


def test_nothing_that_was_handed_out_changes_later() -> None:
    """States and memories of earlier rounds are the server's own, not views of what workers write into."""
    fed = federation(engine="processes", workers=2, rounds=4, method=fs.chain(Scaffold(), Limit()), model=staged())
    seen: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    memories: list[tuple[Any, Any]] = []
    for _ in fed.rounds():
        now = tensors(fed)
        seen.append((now, {n: v.clone() for n, v in now.items()}))
        for client in range(len(SIZES)):
            memory = fed.memory(client)
            memories.append((memory, {t: {n: v.clone() for n, v in slot.items()} for t, slot in memory.items()}))
    assert any(memory for memory, _ in memories)
    for now, copy in seen:
        assert all(torch.equal(now[n], copy[n]) for n in now)
    for now, copy in memories:
        assert all(torch.equal(now[t][n], copy[t][n]) for t in now for n in now[t])


def test_a_diverging_run_ends_in_the_same_round() -> None:
    said, kept = [], []
    for engine, workers in (("serial", 1), ("processes", 2)):
        fed = federation(engine=engine, workers=workers, lr=1e30, rounds=6, test=points(600, 99))
        with pytest.raises(fs.Diverged) as error:
            fed.fit()
        said.append(str(error.value))
        kept.append((fed.state.round, records(fed)))
    assert said[0] == said[1]
    assert kept[0] == kept[1]


def test_the_users_model_and_random_numbers_are_untouched() -> None:
    model = mlp()
    before, rng = {n: p.clone() for n, p in model.state_dict().items()}, torch.get_rng_state()
    run(model, engine="processes", workers=2)
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
