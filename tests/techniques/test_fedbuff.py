"""FedBuff (Nguyen et al. 2022) and FedAsync (Xie et al. 2019) against an event loop that is written here.

The loop knows nothing of the library but how it draws who begins: the run's seed, the number of model changes so far,
and how many have begun since. Devices have FLOPs per second alone, so a visit of three steps with n rows takes
3 · 4 · n · 9 / rate seconds: two products of n × 3 × 3 numbers per step, 2 FLOPs each.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core.rng import derive
from fedstrata.engines.registry import ENGINES
from fedstrata.techniques.staleness import parse_staleness
from tests.engines.worlds import check_same, mlp, points
from tests.engines.worlds import flat as clients_of_points
from tests.techniques.worlds import STEPS, Vector, agree, descend, differ, federation, flat, gradient, linear, parties

LABELS = ((0, 0, 1), (1, 2, 2, 2, 0), (2, 2), (0, 1, 1, 2), (1, 1, 1))
RATES = (100.0, 1000.0, 700.0, 150.0, 900.0)
FLEET = "; ".join(f"d{client}(flops={rate})" for client, rate in enumerate(RATES))
Close = Callable[[Vector, list[tuple[Vector, Vector, int]]], Vector]
"""(w, (the model begun with, its change, staleness) of each update) → w after."""


def event_loop(close: Close, buffer: int, at_once: int, changes: int) -> tuple[Vector, list[float], list[list[int]]]:
    """(w after so many changes, when each of them came, whose updates they took)."""
    clients = parties(*LABELS)
    models, now, version, begun = [flat(linear())], 0.0, 0, 0
    flying: list[tuple[float, int, int]] = []
    held: list[tuple[int, int]] = []
    times, whose = [], []
    while version < changes:
        busy = {client for _, client, _ in flying} | {client for client, _ in held}
        idle = [client for client in range(len(clients)) if client not in busy]
        while len(flying) < at_once and idle:
            client = random.Random(derive(0, "begin", version, begun)).choice(idle)
            begun += 1
            idle.remove(client)
            seconds = STEPS * 4 * len(LABELS[client]) * 9 / RATES[client]
            heapq.heappush(flying, (now + seconds, client, version))
        now, client, since = heapq.heappop(flying)
        held.append((client, since))
        if len(held) == buffer:
            found = []
            for client, since in held:
                begin = models[since]
                end = descend(begin, lambda v, c=clients[client]: gradient(v, c))
                found.append((begin, end - begin, version - since))
            models.append(close(models[-1], found))
            times.append(now)
            whose.append(sorted(client for client, _ in held))
            version, begun, held = version + 1, 0, []
    return models[-1], times, whose


def buffered(s: Callable[[int], float], server_lr: float, w: Vector, found: list[tuple[Vector, Vector, int]]) -> Vector:
    """w + η_g · (1/K) Σ s(τ) Δ."""
    return w + server_lr * sum(s(age) * delta for _, delta, age in found) / len(found)


def mixed(s: Callable[[int], float], alpha: float, w: Vector, found: list[tuple[Vector, Vector, int]]) -> Vector:
    """(1 − α·s(τ)) w + α·s(τ) (w_τ + Δ)."""
    ((begin, delta, age),) = found
    return (1 - alpha * s(age)) * w + alpha * s(age) * (begin + delta)


def asynchronous(method: str, at_once: int = 3, rounds: int = 9) -> Any:
    fed = federation(method, parties(*LABELS), fleet=FLEET, participation=at_once, rounds=rounds, seed=0)
    fed.fit()
    return fed


def happened(fed: Any) -> tuple[list[float], list[list[int]]]:
    return [record.simulated_seconds for record in fed.records], [record.clients for record in fed.records]


@pytest.mark.parametrize("buffer", [1, 2, 3])
def test_fedbuff_is_the_event_loop(buffer: int) -> None:
    s = {
        "poly(0.5)": lambda age: (1 + age) ** -0.5,
        "hinge(a=2, b=1)": lambda age: 1.0 if age <= 1 else 1 / (2 * age - 1),
    }
    for text, formula in s.items():
        fed = asynchronous(f"fedavg(server_lr=0.7) + fedbuff(buffer={buffer}, staleness={text!r})")
        w, times, whose = event_loop(partial(buffered, formula, 0.7), buffer, 3, 9)
        agree(fed, w)
        assert happened(fed) == (pytest.approx(times), whose)
        fresh, *_ = event_loop(partial(buffered, lambda age: 1.0, 0.7), buffer, 3, 9)
        differ(w, fresh)  # some updates are stale


def test_fedasync_is_the_event_loop() -> None:
    fed = asynchronous("fedasync(alpha=0.5, staleness='poly(1.0)')")
    w, times, whose = event_loop(partial(mixed, lambda age: 1 / (1 + age), 0.5), 1, 3, 9)
    agree(fed, w)
    assert happened(fed) == (pytest.approx(times), whose)
    differ(w, event_loop(partial(mixed, lambda age: 1.0, 0.5), 1, 3, 9)[0])


def test_staleness() -> None:
    """Xie et al.'s three: constant; (1 + τ)^−a; 1 up to b, then 1/(a(τ − b) + 1)."""
    assert [parse_staleness("constant")(age) for age in (0, 9)] == [1, 1]
    assert [parse_staleness("poly(2)")(age) for age in (0, 1, 3)] == [1, 1 / 4, 1 / 16]
    assert [parse_staleness("hinge(a=10, b=4)")(age) for age in (0, 4, 5, 6)] == [1, 1, 1 / 11, 1 / 21]


def test_with_everybody_in_the_buffer_it_is_fedavg() -> None:
    """All train at once, all are awaited: the same bits as rounds that wait, and the same seconds."""
    whole = federation("fedavg(weight='uniform')", parties(*LABELS), fleet=FLEET, rounds=3)
    whole.fit()
    fed = asynchronous("fedbuff(buffer=5)", at_once=5, rounds=3)
    assert (flat(fed) == flat(whole)).all()
    assert happened(fed) == happened(whole)


def build(**how: Any) -> fs.Federation:
    """Clients that remember, parts of a model, devices that come and go."""
    fleet = (
        "slow*2(up='1kB/s', flops='5k/s'); fast*3(up='9kB/s', flops='50k/s', available='daily(p=0.5, hours=0.001)'); a"
    )
    given = {"method": "fedbuff(buffer=2) + moon + fedavgm", "rounds": 6, "epochs": 2, "batch_size": 8, "lr": 0.1}
    data = mlp(), clients_of_points(), points(40, 99)
    return fs.Federation(*data, **{**given, "participation": 3, "fleet": fleet, "engine": "serial", **how})


@pytest.mark.parametrize("engine", [name for name in ENGINES if ENGINES[name].same_bits and name != "ray"])
def test_a_resume_in_mid_flight_has_the_same_bits_on_every_engine(engine: str, tmp_path: Path) -> None:
    whole = build()
    whole.fit()
    workers = {"workers": 2} if ENGINES[engine].parallel else {}
    stopped = build(engine=engine, out=tmp_path / "run", **workers)
    rounds = stopped.rounds()
    for _ in range(3):
        next(rounds)
    rounds.close()
    assert stopped.state.flights
    assert any(flight.round < 3 for flight in stopped.state.flights) or stopped.state.versions
    resumed = build(engine=engine, out=tmp_path / "run", resume=True, **workers)
    assert resumed.state.flights == stopped.state.flights
    resumed.fit()
    check_same(resumed, whole)
    assert resumed.state.clock == whole.state.clock
    assert any(flight.round < 5 for flight in whole.state.flights)


def test_a_client_holds_the_model_that_it_began_with() -> None:
    """What changed since then has to be sent to it again: with one stratum per round, more than the last one."""
    whole, wire = (build(method="fedbuff(buffer=1) + fedpart(full_rounds=1)", engine=e) for e in ("serial", "wire"))
    began: dict[int, int] = {}
    for record in whole.rounds():
        (client,) = record.clients
        assert int(whole.state.held[client]) == began.pop(client, record.round - 1)  # or it was done at once
        began.update({flight.client: flight.round for flight in whole.state.flights})
    wire.fit()
    check_same(wire, whole)


def test_one_bad_client_does_not_end_the_run() -> None:
    fed = build(method="fedasync", faults="nan(clients=(2,))", rounds=8)
    refused = [row["client"] for record in fed.fit().records for row in record.refused]
    assert set(refused) == {2}
    assert len(refused) < 8


def test_only_what_is_under_way_is_kept_of_earlier_states() -> None:
    fed = build(rounds=12)
    for _ in fed.rounds():
        assert {version.round for version in fed.state.versions} == {flight.round for flight in fed.state.flights}
        assert len(fed.state.flights) <= 3
    assert len({r.simulated_seconds for r in fed.records}) == 12


def test_who_has_nothing_to_train_fills_no_buffer() -> None:
    """Such a visit takes next to no time: two of them would end every round before anybody else is done."""
    fed = build(method="fedbuff(buffer=2)", fleet="phone*3(memory='1B'); pc*3(flops='1M/s')")
    assert {client for record in fed.fit().records for client in record.clients} <= {3, 4, 5}
    assert all(record.active == ["0", "2"] for record in fed.records)
    # Under FedPart, the stratum next to the input, of which a step takes 1,520 bytes, is the computer's alone.
    schedule = "fedbuff(buffer=1) + fedpart(full_rounds=0, rounds_per_stratum=2)"
    fed = build(method=schedule, fleet="phone*5(memory='1450B'); pc(flops='1M/s')", rounds=8)
    trained = [(record.active, record.clients) for record in fed.fit().records]
    assert trained[0] == (["0"], [5])
    assert all(active for active, _ in trained)


def test_a_round_that_nobody_can_train_in_passes(tmp_path: Path) -> None:
    """Only a computer that is never there could train the first stratum: an empty round spoils none after it."""
    (tmp_path / "t.csv").write_text("client,start,end\n0,0,10\n")
    schedule = "fedbuff(buffer=2) + fedpart(full_rounds=0, rounds_per_stratum=1)"
    away = f"pc(available=\"trace('{tmp_path / 't.csv'}')\")"
    fed = build(method=schedule, fleet=f"phone*5(memory='1450B', flops='1M/s'); {away}")
    assert [record.active for record in fed.fit().records] == [[], *[["2"]] * 5]
    assert [len(record.clients) for record in fed.records[:2]] == [2, 2]


def test_rounds_after_the_last_one_wait_for_everybody() -> None:
    fed = build(method="fedbuff(buffer=2) + finetune(epochs=1)", rounds=2)
    fed.fit()
    assert fed.records[-1].clients == list(range(6))
    assert not fed.state.flights


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"fleet": None}, "'fedbuff' takes updates in the order in which devices are done: it needs a fleet"),
        ({"deadline": 3.0}, "'fedbuff' waits for nobody"),
        ({"method": "fedbuff(buffer=7)"}, "'fedbuff' waits for 7 updates, each of another client, and there are 6"),
        ({"method": "fedbuff(buffer=0)"}, "fedbuff's buffer must be a whole number, 1 or more, not 0"),
        ({"method": "fedbuff(staleness='linear')"}, "there is no staleness 'linear'"),
        ({"method": "fedbuff + scaffold"}, "'fedbuff' and 'scaffold' cannot be combined: its maths needs all clients"),
        ({"method": "feddyn + fedasync"}, "'fedasync' and 'feddyn' cannot be combined"),
        ({"method": "fedbuff + fedasync"}, "each says when the model changes"),
        ({"method": "fedasync(alpha=0)"}, "fedasync's alpha must be above 0 and at most 1"),
        ({"method": "fedasync + fedadam"}, "fedasync mixes two models"),
    ],
)
def test_refusals(how: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fs.UsageError) as refusal:
        build(**how)
    assert sentence in str(refusal.value)


def test_robust_rules_stand_beside_it() -> None:
    fed = build(method="fedavg(reduce='median') + fedbuff(buffer=3)", faults="scale(1000, clients=(1,))")
    fed.fit()
    assert all(np.isfinite(p.numpy()).all() for p in fed.state.params.values())
