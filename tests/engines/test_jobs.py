"""Visits that are trained one by one go together into jobs: the same bits, whatever is in them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.core.types import Update
from fedstrata.engines import pool
from fedstrata.engines.processes import Processes
from fedstrata.engines.tensor_store import OwnMemory, SegmentedMemory, SharedMemory
from fedstrata.engines.worker import _ResultWriter
from tests.contract.standins import Limit, Turn
from tests.engines.worlds import SIZES, check_same, convnet, federation, flat, pictures, run, staged

Worlds = dict[str, Callable[[], dict[str, Any]]]


def images() -> dict[str, Any]:
    clients = [pictures(size, seed) for seed, size in enumerate(SIZES)]
    return {"clients": clients, "test": pictures(40, 99), "model": convnet(nn.BatchNorm2d)}


WORLDS: Worlds = {
    "plain": dict,
    "running statistics": images,
    "own running statistics": lambda: {**images(), "method": "fedavg(buffers='local')"},
    "control variates": lambda: {"method": "scaffold"},
    "one layer at a time": lambda: {"method": fs.chain(Turn(), Limit(limit=0.05))},
    "noise on what travels": lambda: {"method": "perturb(noise=0.3)"},
    "only a part travels": lambda: {"method": "local"},
    "all deltas are needed": lambda: {"method": "fednova + fedavgm"},
    "a robust rule": lambda: {"method": "fedavg(reduce='median')"},
    "unequal steps": lambda: {"clients": flat(3, 20, 1, 7, 9, 2, 14, 5), "epochs": 2},
}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The positions of the visits of each job; from the second round on, as many as one job per worker would hold."""
    found: list[list[int]] = []
    inside = Processes._train_job

    def noted(self: Any, group: Any, *others: Any) -> Any:
        found.append(list(group))
        return inside(self, group, *others)

    monkeypatch.setattr(Processes, "_train_job", noted)
    monkeypatch.setattr(pool.WorkerPool, "job_seconds", 1000.0)
    monkeypatch.setattr(pool.WorkerPool, "jobs_per_worker", 1)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_jobs_of_many_visits_have_the_same_bits(world: str, jobs: list[list[int]]) -> None:
    """Also what clients remember."""
    settings: dict[str, Any] = {"participation": 1.0, "rounds": 4, **WORLDS[world]()}
    found, reference = run(**settings, engine="processes", workers=2), run(**settings, engine="serial")
    assert max(map(len, jobs)) > 2
    check_same(found, reference)
    for client in range(len(found.clients)):
        ours, theirs = found.memory(client), reference.memory(client)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name][n], t) for name, slot in theirs.items() for n, t in slot.items())


def test_a_job_holds_no_more_than_may_wait(jobs: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "AHEAD_BYTES", 0)
    run(participation=1.0, rounds=3, engine="processes", workers=2)
    assert {len(group) for group in jobs} == {1}


def test_clients_of_different_models_are_not_in_one_job(jobs: list[list[int]]) -> None:
    settings: dict[str, Any] = {
        "model": staged(),
        "archs": {"shallow": staged("first", "norm", "relu", "head")},
        "arch_of": lambda client: "shallow" if client % 2 else "",
        "clients": flat(5, 6, 7, 8, 9, 10, 11, 12),
        "participation": 1.0,
    }
    found = run(**settings, engine="processes", workers=1)
    assert max(map(len, jobs)) > 2
    assert all(len({position % 2 for position in group}) == 1 for group in jobs)
    check_same(found, run(**settings, engine="serial"))


@pytest.mark.parametrize("memory", [SharedMemory, OwnMemory])
def test_visits_of_one_job_may_send_different_things(memory: type[SegmentedMemory]) -> None:
    """What was written before a segment grew, and what is written after it, is all there."""
    segments = memory()
    writer, params = _ResultWriter(segments, 1, 0, 6), {"w": torch.zeros(2000)}
    for place in range(6):
        delta = writer.reserve(params, ("w",))
        delta["w"].fill_(place + 1)
        slots = {"t": {"s": torch.full((3000 * (place // 2 + 1),), float(place))}}
        update = Update(0, place, "m", 1, 1, delta, slots=slots, metrics={"flops": 1.0, "train_loss": 1.0})
        writer.write((place,), (update, {}))
    reports = writer.finish()
    assert [list(report.places) for report in reports] == [[0, 1], [2, 3], [4, 5]]
    for report in reports:
        stack = report.read(segments)
        for row, place in enumerate(report.places):
            assert torch.equal(stack.delta["w"][row], torch.full((2000,), float(place + 1)))
            assert stack.slots["t"]["s"][row].eq(place).all()


class Deadly:
    """A client's data that ends whoever reads it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if multiprocessing.parent_process() is not None:
            os._exit(9)
        return torch.zeros(6), 0


def test_a_client_that_ends_workers_is_found_among_the_others_of_its_job(jobs: list[list[int]]) -> None:
    clients: list[Any] = flat(*[8] * 12)
    clients[7] = Deadly()
    fed = federation(clients=clients, participation=1.0, rounds=3, engine="processes", workers=1, test=())
    fed._engine._pace = 1e-6  # type: ignore[attr-defined]
    with pytest.raises(fs.FedstrataError, match=r"^client 7: its worker process died 3 times"):
        fed.fit()
    assert max(map(len, jobs)) > 2
