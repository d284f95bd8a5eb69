"""Which engine runs, what each refuses and how it says so, and workers that are spawned as on macOS."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.engines import auto
from fedstrata.engines.auto import FASTER, FEWEST, WORTH, find_usual_visit
from fedstrata.engines.known_speeds import table_path
from fedstrata.engines.registry import ENGINES, EngineRequest
from fedstrata.engines.speed_table import Cell, Family, SpeedTable
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
    return {"clients": [pictures(9, n) for n in range(3)], "test": pictures(9, 3), "participation": 3}


def convolution(width: int, **about: Any) -> nn.Module:
    layers = nn.Conv2d(3, width, **{"kernel_size": 3, **about}), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(width, 4))


def table(*cells: Cell) -> SpeedTable:
    return SpeedTable(cells, "a processor", "2.0", "2026-01-31")


def cell(family: Family = "dense", at_once: float = 0.1, flops: int = 10**6, clients: int = 8) -> Cell:
    """What nearly everything is most like: a second of processor time per step one by one, and so little at once."""
    return Cell(family, flops, 5, 3, clients, 1e6, 1e6 * at_once)


FAST = table(cell("dense"), cell("dense, torch.func"), cell("convolutional"))


@pytest.fixture
def go_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[SpeedTable], None]:
    """Let `auto` choose by a table."""
    return lambda table: monkeypatch.setattr(auto, "load_table", lambda: (table, ""))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 60_000), nn.ReLU(), nn.Linear(60_000, 4))  # 1.2 million FLOPs


@pytest.mark.parametrize(
    ("world", "serial", "processes"),
    [
        (dict, "vmap", "vmap"),
        (lambda: {"method": fs.chain(Pull(), Scaffold(), FedAvgM(), Turn())}, "vmap", "vmap"),
        (lambda: {"method": fs.chain(FedImpro(split="1", form="released"))}, "serial", "processes"),
        (lambda: {"method": "fedrep"}, "serial", "processes"),
        (lambda: {"model": staged()}, "serial", "processes"),
        (lambda: {"model": noisy()}, "vmap", "vmap"),
        (lambda: {"model": wide()}, "serial", "processes"),
        (lambda: {**images(), "model": convnet()}, "serial", "processes"),
        (lambda: {**images(), "model": convnet(lambda c: nn.GroupNorm(2, c))}, "vmap", "vmap"),
    ],
    ids=["dense", "techniques", "fedimpro", "turns", "batch norm", "dropout", "wide", "convolutions", "group norm"],
)
def test_auto_takes_what_is_fastest(
    world: Any, serial: str, processes: str, go_by: Callable[[SpeedTable], None]
) -> None:
    go_by(FAST)
    assert federation(**world()).engine == serial
    assert federation(**world(), workers=2).engine == processes
    go_by(table(*(replace(cell, at_once=1e6) for cell in FAST.cells)))
    assert federation(**world()).engine == "serial"
    assert federation(**world(), workers=2).engine == "processes"


@pytest.mark.parametrize(
    ("settings", "family"),
    [
        ({}, "dense"),
        ({"method": "fedprox", "steps": 3}, "dense"),
        ({"method": "fedprox"}, "dense, torch.func"),  # clients take unlike numbers of steps
        ({"method": "fedlc", "steps": 3}, "dense, torch.func"),
        ({"method": "local"}, "dense, torch.func"),
        ({"precision": "bf16"}, "dense, torch.func"),
        ({"model": seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)))}, None),
        ({**images(), "model": convnet(lambda c: nn.GroupNorm(2, c))}, "convolutional"),
        ({**images(), "model": seeded(lambda: convolution(4))}, "convolutional"),
        ({**images(), "model": seeded(lambda: convolution(4, kernel_size=1))}, "convolutional"),
        ({**images(), "model": seeded(lambda: convolution(4, kernel_size=1, stride=2))}, None),
        ({**images(), "model": seeded(lambda: convolution(6, groups=3))}, None),
    ],
    ids=str,
)
def test_what_decides_is_what_clients_would_be_trained_by(
    settings: dict[str, Any], family: Family | None, go_by: Callable[[SpeedTable], None]
) -> None:
    """Of all cells only the one of their own family counts."""
    for name in get_args(Family):
        go_by(table(*(replace(cell, at_once=1.0 if cell.family == name else 1e7) for cell in FAST.cells)))
        assert federation(**settings).engine == ("vmap" if name == family else "serial")


def test_the_size_of_groups_decides(go_by: Callable[[SpeedTable], None]) -> None:
    """Of 40 clients per round ten go together, of 100 twenty-five; sixteen would be half-way from 8 to 32."""
    go_by(table(cell(at_once=2.0, clients=8), cell(at_once=0.5, clients=32)))
    assert federation(clients=flat(*[9] * 40), participation=1.0).engine == "serial"
    assert federation(clients=flat(*[9] * 100), participation=1.0).engine == "vmap"


def test_a_small_gain_is_none(go_by: Callable[[SpeedTable], None]) -> None:
    go_by(table(cell(at_once=FASTER)))
    assert federation().engine == "vmap"
    go_by(table(cell(at_once=FASTER + 0.01)))
    assert federation().engine == "serial"


def test_auto_does_not_vectorise_a_short_run(go_by: Callable[[SpeedTable], None]) -> None:
    """100 µs less per step, 4 clients per round, 3 steps of the usual one: 166 rounds gain just less than 0.2 s."""
    assert WORTH["dense"] == 0.2
    go_by(table(Cell("dense", 10**6, 5, 3, 8, 150.0, 50.0)))
    assert federation(rounds=166).engine == "serial"
    assert federation(rounds=167).engine == "vmap"
    assert "too short a run" in federation(rounds=166).engine_reason


def test_one_model_that_is_slower_at_once_is_enough(go_by: Callable[[SpeedTable], None]) -> None:
    go_by(table(cell(flops=1_000, at_once=2.0), cell()))
    parts: dict[str, Any] = {"archs": {"small": seeded(lambda: nn.Sequential(nn.Linear(6, 4)))}}
    whole = seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 20_000), nn.Linear(20_000, 4)))
    assert federation(whole).engine == "vmap"
    assert federation(whole, **parts, arch_of=lambda client: "small" if client == 1 else "").engine == "serial"


def test_few_clients_per_round_are_trained_one_by_one(go_by: Callable[[SpeedTable], None]) -> None:
    go_by(FAST)
    assert federation(participation=FEWEST).engine == "vmap"
    assert federation(participation=FEWEST - 1).engine == "serial"
    assert federation(method="centralised").engine == "serial"


@pytest.mark.parametrize(
    ("work", "batch", "steps", "even"),
    [
        ({}, 5, 3, False),  # of 3, 9, 12, 14, 21 and 30 examples the fourth has 14
        ({"batch_size": 20}, 14, 1, False),
        ({"epochs": 2}, 5, 6, False),
        ({"steps": 7}, 5, 7, True),
        ({"batch_size": 30}, 14, 1, True),
    ],
)
def test_the_usual_visit(work: dict[str, Any], batch: int, steps: int, even: bool) -> None:
    fed = federation()
    given = EngineRequest(fed._context, fed.clients, work=fs.Work(**{"batch_size": 5, **work}))
    assert find_usual_visit(given) == auto.UsualVisit(batch, steps, even)


def test_the_usual_visit_of_many_clients() -> None:
    """A thousand of them are looked at, from the first to the last."""
    everybody = fs.TensorExamples(torch.zeros(7_500, 6), torch.zeros(7_500, dtype=torch.int64))
    parts = [torch.arange(1 if client < 2_000 else 2) for client in range(2_500)]
    request = EngineRequest(federation()._context, everybody.split(parts), work=fs.Work(batch_size=1))
    assert find_usual_visit(request) == auto.UsualVisit(1, 1, even=False)


def test_why_auto_chose(go_by: Callable[[SpeedTable], None], tmp_path: Path) -> None:
    """In a sentence, by the attribute, in versions.json and, in a terminal, in the header of the run."""
    go_by(FAST)
    fed = federation(out=tmp_path / "run")
    assert fed.engine_reason == (
        "100000 µs of processor time per step at once, 1000000 one by one (measured here on 2026-01-31)"
    )
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["engine"] == f"vmap: {fed.engine_reason}"
    assert federation(engine="serial").engine_reason == ""
    assert "such layers" in federation(staged()).engine_reason
    assert "as large" in federation(wide()).engine_reason
    assert "cannot run 'fedimpro'" in federation(method=fs.chain(FedImpro(split="1", form="released"))).engine_reason
    assert federation(participation=1).engine_reason == "only 1 client per round"


def test_a_damaged_table_is_a_note_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path))
    table_path().write_text("{")
    assert [note for note in federation().notes if f"{table_path()} is damaged" in note]
    assert not federation(engine="serial").notes
    table_path().unlink()
    assert not federation().notes


def test_auto_is_one_of_the_others(go_by: Callable[[SpeedTable], None]) -> None:
    go_by(FAST)
    check_same(run(engine="auto"), run(engine="vmap"))
    check_same(run(staged(), engine="auto", workers=2), run(staged(), engine="serial"))


SLOW = table(*(replace(cell, at_once=1e7) for cell in FAST.cells))


def test_a_run_that_was_short_goes_on_as_it_began_and_says_so(
    go_by: Callable[[SpeedTable], None], tmp_path: Path
) -> None:
    go_by(table(*(replace(cell, one_by_one=1000.0, at_once=10.0) for cell in FAST.cells)))
    many = next(rounds for rounds in (10**n for n in range(1, 9)) if federation(rounds=rounds).engine == "vmap")
    assert federation(rounds=1, out=tmp_path / "run").engine == "serial"
    federation(rounds=1, out=tmp_path / "run", resume=True).fit()
    longer = federation(rounds=many, out=tmp_path / "run", resume=True)
    assert longer.engine == "serial"
    (note,) = longer.notes
    assert note.startswith(f"engine: a new run of {many} rounds would train clients many at once")
    assert federation(rounds=2, out=tmp_path / "run", resume=True).notes == ()


@pytest.mark.parametrize(
    ("first", "then", "engines"),
    [(FAST, SLOW, ("vmap", "vmap")), (SLOW, FAST, ("serial", "processes"))],
    ids=["at once", "one by one"],
)
def test_a_run_goes_on_as_it_began_whatever_the_table_says_by_then(
    first: SpeedTable,
    then: SpeedTable,
    engines: tuple[str, str],
    go_by: Callable[[SpeedTable], None],
    tmp_path: Path,
) -> None:
    """To the same bits, with another number of workers, and without a note."""
    go_by(first)
    whole = run()
    assert whole.engine == engines[0]
    rounds = federation(out=tmp_path / "run", checkpoint_seconds=0.0).rounds()
    next(rounds)
    rounds.close()
    go_by(then)
    assert federation().engine != engines[0]
    resumed = federation(out=tmp_path / "run", checkpoint_seconds=0.0, resume=True, workers=2)
    assert (resumed.engine, resumed.notes) == (engines[1], ())
    assert resumed.engine_reason.endswith("as the run began")
    resumed.fit()
    check_same(resumed, whole)


def test_a_run_that_tells_no_way_is_resumed_by_the_table(go_by: Callable[[SpeedTable], None], tmp_path: Path) -> None:
    """As one of which versions.json was edited or lost; who asks for an engine gets it, and a note."""
    go_by(FAST)
    settings: dict[str, Any] = {"out": tmp_path / "run", "checkpoint_seconds": 0.0}
    rounds = federation(**settings).rounds()
    next(rounds)
    rounds.close()
    del rounds
    asked = federation(**settings, resume=True, engine="serial")
    assert asked.engine == "serial"
    assert asked.notes == ("begun with clients trained many at once, now trained one by one: the last bits may differ",)
    go_by(SLOW)
    about = tmp_path / "run" / "versions.json"
    about.write_text(about.read_text().replace("trained many at once", "trained with care"))
    edited = federation(**settings, resume=True)
    assert edited.engine == "serial"
    assert "begun with clients trained with care, now trained one by one" in edited.notes[0]


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
