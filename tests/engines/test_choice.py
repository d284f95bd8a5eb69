"""Which engine runs, what each refuses and how it says so, and workers that are spawned as on macOS."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.engines.auto import MANY_VISITS, SMALL_MODEL
from fedstrata.engines.registry import ENGINES
from fedstrata.system.machine import cores
from fedstrata.techniques.fedavgm import FedAvgM
from fedstrata.techniques.fedimpro import FedImpro
from fedstrata.techniques.perturb import Perturb
from fedstrata.techniques.scaffold import Scaffold
from tests.contract.standins import Pull, Turn
from tests.engines.worlds import (
    Shaken,
    check_same,
    children,
    convnet,
    federation,
    flat,
    noisy,
    pictures,
    run,
    seeded,
    staged,
)
from tests.small_runs import LONG, fedstrata, one_sentence, options

# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, -1, True, "many", 1.5, None, "2"], ids=repr)
def test_workers_that_are_no_number_of_processes(workers: Any) -> None:
    with pytest.raises(
        fs.UsageError, match=r"workers = .* does not fit: give a number of processes, 1 or more, or auto"
    ):
        federation(engine="processes", workers=workers)


@pytest.mark.parametrize("engine", ["serial", "wire"])
def test_one_client_at_a_time_has_one_worker(engine: str) -> None:
    with pytest.raises(fs.UsageError, match=f"the engine '{engine}' trains one client at a time: .* 1, not 2"):
        federation(engine=engine, workers=2)
    assert federation(engine=engine, workers="auto").engine == engine


class Recurrent(nn.Module):
    """A recurrent layer on points taken for a sequence."""

    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(1, 5, batch_first=True)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cells(x[..., None])[0][:, -1])
        return logits


class Choosy(nn.Module):
    """Looks at its inputs' values, which nobody can do for many clients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x)
        return -logits if x.sum() > 1e9 else logits


class Dropping(nn.Module):
    """Code of its own, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.drop(self.layer(x))
        return logits


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (staged, r"the layer 'norm' \(BatchNorm1d\): .* batch"),
        (
            lambda: nn.Sequential(nn.Linear(6, 8), nn.AlphaDropout(0.5), nn.Linear(8, 4)),
            r"'1' \(AlphaDropout\): .* random",
        ),
        (lambda: Dropping(), r"the layer 'drop' \(Dropout\): .* random"),
        (lambda: Recurrent(nn.LSTM), r"the layer 'cells' \(LSTM\)"),
        (lambda: Recurrent(nn.GRU), r"the layer 'cells' \(GRU\)"),
        (Choosy, "cannot train this model: "),
    ],
    ids=["batch norm", "another dropout", "dropout in own code", "lstm", "gru", "own code"],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_layers_that_cannot_be_vectorised(model: Any, says: str, workers: int, tmp_path: Path) -> None:
    """One sentence with the layer's name, before anything is written; other engines take them."""
    with pytest.raises(fs.UsageError, match=says) as error:
        federation(model(), engine="vmap", workers=workers, out=tmp_path / "run")
    assert str(error.value).startswith("the engine 'vmap' cannot train ")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
    assert federation(model(), engine="auto").engine == "serial"


def test_a_layer_of_a_sub_model_that_cannot_be_vectorised() -> None:
    whole = nn.Sequential()
    whole.add_module("first", nn.Linear(6, 8))
    whole.add_module("head", nn.Linear(8, 4))
    part = nn.Sequential()
    part.add_module("first", nn.Linear(6, 8))
    part.add_module("drop", nn.FeatureAlphaDropout(0.1))
    part.add_module("head", nn.Linear(8, 4))
    settings: dict[str, Any] = {"archs": {"part": part}, "arch_of": lambda client: "part"}
    with pytest.raises(fs.UsageError, match="layer 'drop'"):
        federation(whole, engine="vmap", **settings)
    assert federation(whole, **settings).engine == "serial"


def test_a_technique_that_cannot_be_vectorised() -> None:
    with pytest.raises(fs.UsageError, match="the engine 'vmap' cannot run 'fedimpro': its hooks"):
        federation(engine="vmap", method=fs.chain(Pull(), FedImpro(split="1", form="released")))


def test_dropout_beside_what_draws_in_steps() -> None:
    with pytest.raises(
        fs.UsageError, match=r"cannot train the layer '1' \(Dropout\) with 'fedimpro': both draw random"
    ):
        federation(noisy(), engine="vmap", method=fs.chain(FedImpro(split="1")))


def test_dropout_of_nothing_can_be_vectorised() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 4)))
    assert federation(model, engine="vmap").engine == "vmap"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engine", "serial", "--workers", "2"], "the engine 'serial' trains one client at a time"),
        (["--workers", "many"], "workers = 'many' does not fit"),
        (["--workers", "1.5"], "workers = 1.5 does not fit"),
        (["--engine", "vmap"], "the engine 'vmap' cannot train the layer"),
    ],
)
def test_the_command_refuses(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedstrata("run", *options(), *arguments, "--out", tmp_path / "run") == 2
    assert says in one_sentence(capsys)
    assert not (tmp_path / "run").exists()


# The choice ----------------------------------------------------------------------------------------------------------


def images() -> dict[str, Any]:
    return {"clients": [pictures(9, 1), pictures(8, 2)], "test": pictures(9, 3), "participation": 2}


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, SMALL_MODEL // 10), nn.ReLU(), nn.Linear(SMALL_MODEL // 10, 4))


@pytest.mark.parametrize(
    ("world", "serial", "processes"),
    [
        (dict, "vmap", "vmap"),
        (lambda: {"method": fs.chain(Pull(), Scaffold(), FedAvgM(), Turn())}, "vmap", "vmap"),
        (lambda: {"method": fs.chain(FedImpro(split="1", form="released"))}, "serial", "processes"),
        (lambda: {"model": staged()}, "serial", "processes"),
        (lambda: {"model": noisy()}, "vmap", "vmap"),
        (lambda: {"model": wide()}, "serial", "processes"),
        (lambda: {**images(), "model": convnet()}, "serial", "processes"),
        (lambda: {**images(), "model": convnet(lambda c: nn.GroupNorm(2, c))}, "serial", "processes"),
    ],
    ids=["dense", "techniques", "fedimpro", "batch norm", "dropout", "wide", "convolutions", "group norm"],
)
def test_auto_takes_what_is_fastest(world: Any, serial: str, processes: str) -> None:
    assert federation(**world(), rounds=MANY_VISITS).engine == serial
    assert federation(**world(), rounds=MANY_VISITS, workers=2).engine == processes


def test_auto_does_not_vectorise_a_short_run() -> None:
    assert federation(rounds=MANY_VISITS // 3, participation=3).engine == "serial"
    assert federation(rounds=MANY_VISITS // 3 + 1, participation=3).engine == "vmap"


def test_auto_is_one_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.engines.auto.MANY_VISITS", 1)
    check_same(run(engine="auto"), run(engine="vmap"))
    check_same(run(staged(), engine="auto", workers=2), run(staged(), engine="serial"))


def test_auto_workers_are_one_a_core() -> None:
    before = children()
    fed = federation(engine="processes", workers="auto")
    rounds = fed.rounds()
    next(rounds)
    assert len(children() - before) == cores()
    rounds.close()


def test_the_command_with_auto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`auto` for the workers is the default of the command, is kept in run.toml, and is a word of `resume` too."""
    assert fedstrata("run", *options(rounds=1), "--workers", "auto", "--out", tmp_path / "a", "--quiet") == 0
    assert fedstrata("run", *options(rounds=1), "--out", tmp_path / "b", "--quiet") == 0
    for name in "ab":
        assert 'workers = "auto"' in (tmp_path / name / "run.toml").read_text()
    assert fedstrata("resume", tmp_path / "a", "--workers", "auto", "--quiet") == 0
    capsys.readouterr()


def test_the_list_of_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert fedstrata("list", "engines", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["auto", "serial", "processes", "vmap", "ray", "wire"] == list(ENGINES)
    assert all(row["help"].endswith(".") or ":" in row["help"] for row in rows)
    assert fedstrata("list", "engines") == 0
    assert "worker processes" in " ".join(capsys.readouterr().out.split())


# Spawned workers -----------------------------------------------------------------------------------------------------


def spawning(fed: fs.Federation) -> fs.Federation:
    """The federation, with workers that begin as fresh interpreters."""
    fed._engine._multiprocessing = torch.multiprocessing.get_context("spawn")  # type: ignore[attr-defined]
    return fed


@pytest.mark.slow
def test_spawned_workers_give_the_same_bits() -> None:
    """Model, data, method and techniques reach them by pickle. One run for all, since starting takes seconds."""
    settings: dict[str, Any] = {
        "model": staged(),
        "clients": [Shaken(pair) for pair in flat()[:3]] + flat()[3:],
        "method": fs.chain(Scaffold(), Perturb()),
        "participation": 1.0,
        "archs": {"shallow": staged("first", "norm", "relu", "head")},
        "arch_of": lambda client: "shallow" if client == 4 else "",  # stays in the main process
    }
    before = children()
    fed = spawning(federation(**settings, engine="processes", workers=2))
    rounds = fed.rounds()
    next(rounds)
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children() - before]
    assert sum("spawn_main" in command for command in commands) == 2
    list(rounds)
    check_same(fed, run(**settings, engine="serial"))


def command_of(pid: int) -> str:
    """A process's command line; that of a harmless one if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return "resource_tracker"


class Mapped(Shaken):
    """A dataset with a transform that somebody wrote where it is used."""

    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        super().__init__(data)
        self.transform = lambda x: x + 1

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.x[index]), int(self.y[index])


def test_what_cannot_reach_a_spawned_worker() -> None:
    """One sentence, and no process left; a forked worker takes it."""
    before = children()
    settings: dict[str, Any] = {"clients": [Mapped(pair) for pair in flat()], "engine": "processes", "workers": 2}
    fed = spawning(federation(**settings))
    with pytest.raises(
        fs.UsageError, match=r"model or data cannot be handed to worker processes \(.*\): workers must be 1"
    ):
        fed.fit()
    deadline = time.monotonic() + LONG
    while others := [p for p in children() - before if "resource_tracker" not in command_of(p)]:
        assert time.monotonic() < deadline, others  # multiprocessing's own tracker may not have begun yet
        time.sleep(0.01)
    check_same(run(**settings), run(clients=[Mapped(pair) for pair in flat()], engine="serial"))
