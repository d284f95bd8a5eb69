"""What clients remember, as rows of tensors: the same bits as a dict per client, whoever trains them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.core.stacks import Memories, expand
from fedstrata.core.types import Slots, Update
from fedstrata.runs import client_memory
from fedstrata.runs.client_memory import RowStore
from tests.engines.worlds import check_same, federation, flat, points, seeded, staged


class DictStore:
    """A dict per client and version: what the rows stand for."""

    trusted: ClassVar[bool] = True

    def __init__(self) -> None:
        self.memories: dict[tuple[int, int], Slots] = {}

    def get(self, clients: Sequence[int], versions: Sequence[int]) -> Memories:
        pairs = zip(clients, versions, strict=True)
        return Memories.of([self.memories[pair] if pair[1] >= 0 else {} for pair in pairs])

    def put(self, clients: Sequence[int], version: int, memories: Memories, before: Sequence[int]) -> None:
        for client, memory in zip(clients, memories, strict=True):
            copied = {name: {n: t.clone() for n, t in slot.items()} for name, slot in memory.items()}
            self.memories[client, version] = copied

    def forget(self, until: int) -> None:
        """Nothing is ever dropped."""


def two_models() -> dict[str, Any]:
    """Clients of different models: their memories differ in names and shapes."""
    return {
        "model": staged(),
        "archs": {"shallow": staged("first", "norm", "relu", "head")},
        "arch_of": lambda client: "shallow" if client % 3 == 1 else "",
    }


WORLDS: dict[str, Callable[[], dict[str, Any]]] = {
    "scaffold": lambda: {"method": "scaffold"},
    "feddyn + moon": lambda: {"method": "feddyn + moon"},
    "own running statistics": lambda: {"model": staged(), "method": "fedavg(buffers='local')"},
    "two models": lambda: {**two_models(), "method": "scaffold"},
}
ENGINES: dict[str, dict[str, Any]] = {
    "serial": {"engine": "serial", "workers": 1},
    "processes": {"engine": "processes", "workers": 2},
    "vmap": {"engine": "vmap", "workers": 1},
    "vmap in workers": {"engine": "vmap", "workers": 2},
    "wire": {"engine": "wire", "workers": 1},
}
CLIENTS = (9, 14, 21, 30, 12, 3, 8, 16, 5, 11, 20, 7, 13, 6, 10, 18)


def poison(fed: fs.Federation, client: int) -> None:
    """Let a client's updates be NaN, wherever it is trained."""
    original = fed._engine.run

    def poisoned(assignments: Any, recall: Any) -> Iterator[Any]:
        for update, memory in expand(original(assignments, recall)):
            if isinstance(update, Update) and update.client == client:
                spoilt = {n: torch.full_like(t, math.nan) for n, t in update.delta.items()}
                update = replace(update, delta=spoilt, finite=False)
            yield update, memory

    fed._engine.run = poisoned  # type: ignore[method-assign]


def settings_of(world: str, engine: str) -> dict[str, Any]:
    made = {"clients": flat(*CLIENTS), "participation": 10, "rounds": 5, **WORLDS[world](), **ENGINES[engine]}
    if engine.startswith("vmap") and "model" in made:
        pytest.skip("its norm layers keep running statistics")
    return made


def check_memories(found: fs.Federation, expected: fs.Federation) -> None:
    remember = 0
    for client in range(len(CLIENTS)):
        ours, theirs = found.memory(client), expected.memory(client)
        assert {name: list(slot) for name, slot in ours.items()} == {name: list(slot) for name, slot in theirs.items()}
        assert all(torch.equal(ours[name][n], t) for name, slot in theirs.items() for n, t in slot.items())
        remember += bool(theirs)
    assert remember > 5


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("world", WORLDS)
def test_rows_have_the_bits_of_a_dict_per_client(world: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clients come more often than others, and one of them is refused each time."""
    monkeypatch.setattr(client_memory, "FIRST_ROWS", 2)  # memories of a group are in several chunks
    settings = settings_of(world, engine)
    runs = [federation(**settings, store=store) for store in (RowStore(), DictStore())]
    for fed in runs:
        poison(fed, 3)
        fed.fit()
    check_same(*runs)
    check_memories(*runs)
    assert int(runs[0].state.remembers[3]) == -1
    assert runs[0].memory(3) == {}


@pytest.mark.parametrize("engine", ["serial", "vmap in workers"])
def test_a_client_that_is_refused_later_remembers_what_it_did(engine: str) -> None:
    fed = federation(**settings_of("scaffold", engine), eval_every=100)
    rounds = fed.rounds()
    first = next(rounds)
    client = first.clients[0]
    before = fed.memory(client)
    assert before
    rounds.close()
    poison(fed, client)
    refused = [row["client"] for record in fed.rounds() for row in record.refused]
    assert client in refused
    after = fed.memory(client)
    assert all(torch.equal(after[name][n], t) for name, slot in before.items() for n, t in slot.items())


@pytest.mark.parametrize("engine", ["serial", "processes", "vmap in workers"])
def test_rows_and_files_and_a_resumed_run_remember_the_same(engine: str, tmp_path: Path) -> None:
    settings = settings_of("scaffold", engine)
    rows, files = federation(**settings), federation(**settings, out=tmp_path / "whole")
    rows.fit()
    files.fit()
    check_memories(rows, files)
    begun = federation(**settings, out=tmp_path / "parts", checkpoint_seconds=0)
    records = begun.rounds()
    for _ in range(2):
        next(records)
    records.close()
    resumed = federation(**settings, out=tmp_path / "parts", checkpoint_seconds=0, resume=True)
    assert resumed.state.round == 2
    resumed.fit()
    check_memories(resumed, rows)
    assert all(torch.equal(p, rows.state.params[n]) for n, p in resumed.state.params.items())


def test_what_was_handed_out_stays_as_it_was() -> None:
    """Rows are used again; a memory that somebody asked for is a copy."""
    fed = federation(clients=flat(8, 9), participation=1.0, rounds=6, method="scaffold", engine="serial")
    rounds = fed.rounds()
    next(rounds)
    held = fed.memory(0)
    before = {n: t.clone() for n, t in held["scaffold"].items()}
    for _ in range(3):
        next(rounds)
    assert all(torch.equal(held["scaffold"][n], t) for n, t in before.items())
    assert not all(torch.equal(fed.memory(0)["scaffold"][n], t) for n, t in before.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_results_do_not_depend_on_where_a_memory_lies(engine: str) -> None:
    """A product with a single vector rounds otherwise where its matrix does not begin a cache line, as rows may not."""

    def wide() -> nn.Module:
        model: nn.Module = seeded(lambda: nn.Sequential(nn.Linear(333, 31), nn.ReLU(), nn.Linear(31, 4)))
        return model

    clients = [points(5, seed, inputs=333) for seed in range(12)]  # the second batch of each is a single example
    world = {"model": wide(), "clients": clients, "test": points(20, 99, inputs=333), "method": "moon"}
    settings = {**world, **ENGINES[engine], "participation": 1.0, "batch_size": 4, "rounds": 4}
    rows, alone = federation(**settings), federation(**settings, store=DictStore())
    rows.fit()
    alone.fit()
    check_same(rows, alone)
