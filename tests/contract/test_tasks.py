"""Every technique on every kind of target: it runs, with the same bits through messages, or is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.techniques.fedavg import chain
from tests.contract.rows import ROWS, Row, devices_for

OUTPUTS = {"binary": 1, "multilabel": 3, "regression": 1}


def rows(task: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    targets = {"binary": x.sum(1) > 0, "multilabel": x[:, :3] > 0, "regression": x.sum(1)}
    return x, targets[task] if task == "regression" else targets[task].long()


def federation(row: Row, task: str, engine: str) -> fs.Federation:
    """As in the matrix: a stage with two layers of the same shape, and a norm layer."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        net = nn.Sequential()
        net.add_module("first", nn.Linear(6, 8))
        net.add_module("norm", nn.BatchNorm1d(8))
        net.add_module("relu", nn.ReLU())
        net.add_module("second", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        net.add_module("head", nn.Linear(8, OUTPUTS[task]))
    clients = [rows(task, size, size) for size in (9, 6, 5, 14)]
    settings = {"method": chain(row.technique), "participation": 3, "batch_size": 5, "lr": 0.05, "rounds": 3}
    settings |= devices_for(len(clients), row.technique)
    return fs.Federation(net, clients, rows(task, 20, 99), task=task, engine=engine, **settings)


@pytest.mark.parametrize("task", OUTPUTS)
@pytest.mark.parametrize("row", ROWS, ids=[r.technique.name for r in ROWS])
def test_on_every_task(row: Row, task: str) -> None:
    if row.technique.needs_classes:
        with pytest.raises(
            fs.UsageError, match=f"'{row.technique.name}' needs classes, and the task '{task}' has none"
        ):
            federation(row, task, "serial")
        return
    serial, wired = federation(row, task, "serial"), federation(row, task, "wire")
    found = [run.fit() for run in (serial, wired)]
    assert found[0].score is not None
    assert [r.metrics for r in found[0].records] == [r.metrics for r in found[1].records]
    assert all(torch.equal(t, wired.state.params[n]) for n, t in serial.state.params.items())
