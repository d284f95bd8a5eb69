"""What visits will cost, against what they did: FLOPs to the last one, bytes but for the digits of a loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.client.forecast import Forecast
from fedstrata.core.rng import preserve_rng
from tests.engines.worlds import EIGHT, convnet, pictures

METHODS = [
    *("fedavg", "fedavg(buffers='local')", "fedavg(buffers='drop')", EIGHT, "fedrep(head_epochs=2)", "keep", "ditto"),
    *("fedimpro(split='norm')", "ccvr(samples=20, epochs=2)", "finetune(epochs=1)", "fedspeed"),
    *("fedpart(full_rounds=0)", "select(score='gradnorm')", "select(score='snr', per='client')", "fedldf(refresh=1)"),
    "topk(share=0.1) + quantise + moon",
]


def forecasts(fed: fs.Federation) -> tuple[list[int], list[int]]:
    """(FLOPs, bytes up) of each round of a federation, foreseen before it."""
    seen = Forecast(fed._context, fed.clients)
    flops, up = [], []
    while not fed.done:
        asked = fed._server.open(fed.state, fed.sampler.sample(fed.state.round), fed._work(fed.state.round))
        before = {name: value.clone() for name, value in fed.state.params.items()}
        with preserve_rng():
            costs = [seen.cost(a, fed.memory(a.client)) for a in asked]
        assert all(torch.equal(before[name], value) for name, value in fed.state.params.items())
        flops.append(sum(cost.flops for cost in costs))
        up.append(sum(cost.up for cost in costs))
        assert sum(cost.down for cost in costs) == next(fed.rounds()).bytes_down
    return flops, up


@pytest.mark.parametrize("method", METHODS)
def test_what_is_foreseen_is_what_it_costs(method: str) -> None:
    """Over three rounds, so that clients remember something, with sizes of batches that differ."""
    clients, test = [pictures(n, n) for n in (9, 14, 21)], pictures(20, 99)
    how: dict[str, Any] = {"method": method, "rounds": 3, "epochs": 2, "batch_size": 8, "engine": "serial", "lr": 0.05}
    make = partial(fs.Federation, convnet(), clients, test, **how)
    history = make().fit()
    flops, up = forecasts(make())
    assert flops == [record.flops for record in history.records]
    for foreseen, record in zip(up, history.records, strict=True):
        assert abs(foreseen - record.bytes_up) <= 24 * len(record.clients)
