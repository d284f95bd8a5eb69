"""The table of engines: a new one is one file and one row, and every row keeps what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from fedstrata.config.identity import ENGINE_FIELDS
from fedstrata.config.schema import Settings
from fedstrata.core.types import Assignment, Slots, Update
from fedstrata.engines.protocol import Engine, Recall
from fedstrata.engines.registry import ENGINES, EngineRequest, EngineSpec, way_of_training
from fedstrata.engines.serial import Serial
from tests.engines.test_same_bits import CASES
from tests.engines.worlds import check_same, federation, run
from tests.small_runs import fedstrata, one_sentence, options

# A new engine: the file ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Counting(Serial):
    """Trains one client after the other, and counts them."""

    visits: int = 0
    events: list[str] = field(default_factory=list)

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[tuple[Update, Slots]]:
        for visit in super().run(assignments, recall):
            self.visits += 1
            yield visit
        self.events.append(f"{self.visits} visits so far")

    def take_events(self) -> tuple[str, ...]:
        events, self.events = tuple(self.events), []
        return events


def build_counting(request: EngineRequest) -> Counting:
    return Counting(request.context, request.clients, request.test)


# The row -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the new engine, which is in the table."""
    row = EngineSpec(help="One client after the other, counted.", build=build_counting, same_bits=True)
    monkeypatch.setitem(ENGINES, "counting", row)
    return "counting"


def test_a_new_engine_runs_by_its_name(counting: str) -> None:
    fed = run(engine=counting)
    assert fed.engine == counting
    assert isinstance(fed._engine, Counting)
    assert fed._engine.visits == 12
    assert [note for note in fed.notes if "visits" in note] == [f"{n} visits so far" for n in (4, 8, 12)]
    check_same(fed, run(engine="serial"))


def test_a_new_engine_is_known_to_the_command(counting: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It is listed, it runs, a wrong name is told from it, and what its row says it cannot do is refused."""
    assert fedstrata("list", "engines", "--json") == 0
    assert json.loads(capsys.readouterr().out)[-1] == {
        "name": counting,
        "arguments": "",
        "help": "One client after the other, counted.",
    }
    assert fedstrata("run", *options(rounds=1), "--engine", counting, "--out", tmp_path / "run", "--quiet") == 0
    assert "visits so far" in (tmp_path / "run" / "summary.json").read_text()
    capsys.readouterr()
    assert fedstrata("run", *options(), "--engine", "countin", "--out", tmp_path / "none") == 2
    assert "there is no engine 'countin' (did you mean 'counting'?)" in one_sentence(capsys)
    assert fedstrata("run", *options(), "--engine", counting, "--workers", "2", "--out", tmp_path / "none") == 2
    assert "the engine 'counting' trains one client at a time: workers must be 1, not 2" in one_sentence(capsys)


# Every row -----------------------------------------------------------------------------------------------------------

MANY = [name for name, spec in ENGINES.items() if spec.parallel and not spec.distributed]
SAME_BITS = [name for name, spec in ENGINES.items() if spec.same_bits and not spec.distributed]


@pytest.mark.parametrize("name", ENGINES)
def test_a_row_is_whole(name: str) -> None:
    spec = ENGINES[name]
    assert (spec.build is None) != (spec.choose is None)
    assert spec.help.endswith(".")
    assert {*spec.reads} <= ENGINE_FIELDS <= Settings.model_fields.keys()


@pytest.mark.parametrize(
    "case", ["everybody", "batch norm, local", "dropout", "random transforms", "states and memories"]
)
@pytest.mark.parametrize("name", SAME_BITS)
def test_a_row_that_promises_the_same_bits_has_them(name: str, case: str) -> None:
    """Also where a visit draws from this process's generators, or remembers something."""
    reference = run(**CASES[case](), engine="serial")
    check_same(run(**CASES[case](), engine=name), reference)
    if ENGINES[name].parallel:
        check_same(run(**CASES[case](), engine=name, workers=2), reference)


@pytest.mark.parametrize("name", MANY)
def test_a_row_with_many_workers_has_as_many(name: str) -> None:
    fed = federation(engine=name, workers=2)
    assert fed.workers == 2
    fed.close()


def test_a_builder_gets_the_settings_that_its_row_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EngineRequest] = []

    def build(request: EngineRequest) -> Engine:
        asked.append(request)
        return build_counting(request)

    row = EngineSpec(help="Far away.", build=build, parallel=True, distributed=True, reads=("ray_cpus",))
    monkeypatch.setitem(ENGINES, "far", row)
    federation(engine="far", workers="auto", ray_cpus=2.5, threads=3)
    assert asked[0].settings == {"ray_cpus": 2.5}
    assert asked[0].workers is None
    assert asked[0].threads == 3


def test_how_clients_are_trained() -> None:
    assert way_of_training("vmap") == "many at once"
    assert {way_of_training(name) for name in ENGINES if name != "vmap"} == {"one by one"}
    assert way_of_training("flower") == "one by one"
