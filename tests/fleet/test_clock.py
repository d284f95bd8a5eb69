"""Simulated time against a loop in this file: who is drawn, who is late, when rounds end; the same after a resume."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.compare import compare
from fedstrata.compare.show import csv_text
from fedstrata.core.text import simulated_text, time_unit
from fedstrata.engines.registry import ENGINES
from fedstrata.fleet.clock import round_seconds, visit_seconds
from fedstrata.fleet.devices import Device
from fedstrata.report.figures import against_costs
from fedstrata.report.run_groups import group_runs
from fedstrata.runs.reader import SavedRun
from tests.engines.worlds import check_same, flat, mlp, points

SIZES = (9, 14, 21, 30, 12, 3)
FLEET = "slow*2(up='1kB/s', down='2kB/s', flops='5k/s'); fast*3(up='10kB/s', flops='50k/s'); free"


def build(**how: Any) -> fs.Federation:
    given = {"rounds": 4, "epochs": 2, "batch_size": 8, "engine": "serial", "lr": 0.1, "fleet": FLEET, **how}
    return fs.Federation(mlp(), flat(*SIZES), points(40, 99), **given)


def test_seconds_of_a_visit() -> None:
    """2,000 bytes at 1 kB/s, 10⁶ FLOPs at 4 MFLOP/s, 500 bytes at 250 B/s: 2 + 0.25 + 2 seconds."""
    assert visit_seconds(Device("x", None, 250.0, 1000.0, 4e6), 2000, 10**6, 500) == 4.25
    assert visit_seconds(Device("x"), 2000, 10**6, 500) == 0
    assert [round_seconds((1, 5, 3), d) for d in (None, 4, 6)] == [5, 4, 5]


def visits_by_hand(record: fs.Record, fed: fs.Federation, sent: int) -> dict[int, float]:
    """Client → seconds of its visit, from what two dense layers cost: forward 2mn per row, backward twice as much."""
    first, second = 6 * 8, 8 * 4
    found = {}
    for client in record.clients:
        flops = 2 * SIZES[client] * (2 * first + 2 * second + 2 * second * 2 + 2 * first)
        down = record.bytes_down / len(record.clients)
        device = fed.devices[client]
        found[client] = sum(
            amount / rate for amount, rate in ((down, device.down), (flops, device.flops), (sent, device.up)) if rate
        )
    return found


def test_a_round_lasts_as_long_as_its_slowest_client() -> None:
    fed = build(participation=3)
    now = 0.0
    for record in fed.fit().records:
        sent = record.bytes_up / 3
        wanted = now + max(visits_by_hand(record, fed, round(sent)).values())
        assert record.simulated_seconds == pytest.approx(wanted, abs=0.05)  # the digits of numbers in messages
        now = record.simulated_seconds or 0.0
    assert fed.state.clock == now
    assert now > 1


def test_what_comes_after_the_deadline_is_dropped() -> None:
    """Only slow devices are late: the others train as they would alone, with the same bits; FedAvg of those in time."""
    alone = build(method="moon", deadline=2.0, rounds=2)
    history = alone.fit()
    for number, record in enumerate(history.records, 1):
        assert record.late == [0, 1]
        assert [row["client"] for row in record.refused] == [0, 1]
        assert all("too late" in row["why"] for row in record.refused)
        assert record.simulated_seconds == 2.0 * number
        assert record.examples == sum(SIZES[2:])
    assert not alone.memory(0)
    assert alone.memory(2)
    others = build(method="moon", rounds=2, without="0,1").fit()
    assert [r.train_loss for r in history.records] == [r.train_loss for r in others.records]


def test_what_comes_after_the_deadline_may_be_awaited() -> None:
    """The same bits as without a deadline, and who was late is told."""
    waited, plain = build(deadline=2.0, stragglers="wait"), build()
    records = waited.fit().records
    plain.fit()
    assert [r.train_loss for r in records] == [r.train_loss for r in plain.records]
    assert [r.simulated_seconds for r in records] == [r.simulated_seconds for r in plain.records]
    assert all(record.late == [0, 1] and not record.refused for record in records)


def test_a_fleet_changes_no_bit_of_what_is_trained() -> None:
    with_fleet, without = build(participation=3), build(participation=3, fleet=None)
    assert all(record.simulated_seconds is None for record in without.fit().records)
    with_fleet.records = [replace(r, simulated_seconds=None, devices=[]) for r in with_fleet.fit().records]
    check_same(with_fleet, without)


def add_up(fed: fs.Federation, record: fs.Record) -> None:
    """What visits took by device is what the server counted, but for the digits of losses; memory is the largest."""
    uses = record.devices
    assert sum(use.flops for use in uses) == record.flops
    assert sum(use.visits for use in uses) == len(record.clients) - len(record.refused)
    assert sum(use.bytes_up for use in uses) == pytest.approx(record.bytes_up, abs=24 * len(record.clients))
    assert max((use.memory for use in uses), default=0) == record.training_memory
    names = {fed.devices[client].name for client in record.clients}
    assert {use.device for use in uses} <= names


def test_what_devices_took_adds_up() -> None:
    """Also where updates arrive one by one, and where some are late: of those nothing counts."""
    fed = build(participation=3)
    for record in fed.fit().records:
        add_up(fed, record)
        assert sum(use.bytes_down for use in record.devices) == record.bytes_down
        wanted = sum(visits_by_hand(record, fed, round(record.bytes_up / 3)).values())
        assert sum(use.seconds for use in record.devices) == pytest.approx(wanted, abs=0.15)
    for how in ({"deadline": 2.0}, {"method": "fedbuff(buffer=2)", "participation": 4}):
        fed = build(**how)
        for record in fed.fit().records:
            add_up(fed, record)


@pytest.mark.parametrize("method", ["fedavg", "fedpart(full_rounds=0, rounds_per_stratum=1)", "scaffold"])
def test_what_convolutions_took_adds_up(method: str) -> None:
    """Layers that work in place, and frozen ones that keep no inputs, are foreseen as they will be run."""
    clients, rng = [], torch.Generator().manual_seed(0)
    for size in (9, 20, 5):
        y = torch.randint(0, 5, (size,), generator=rng)
        clients.append((torch.rand(size, 3, 16, 16, generator=rng), y))
    model = fs.build_model("resnet8(width=4)", (3, 16, 16), 5, seed=0)
    how: dict[str, Any] = {"rounds": 3, "batch_size": 8, "engine": "serial", "fleet": "slow*2(up='1kB/s'); free"}
    fed = fs.Federation(model, clients, method=method, **how)
    for record in fed.fit().records:
        add_up(fed, record)


def test_everybody_may_be_late() -> None:
    fed = build(deadline=1e-3, without="2,3,4,5", rounds=2)
    start = {name: value.clone() for name, value in fed.state.params.items()}
    records = fed.fit().records
    assert [record.simulated_seconds for record in records] == [1e-3, 2e-3]
    assert all((value == start[name]).all() for name, value in fed.state.params.items())


def test_who_is_there_is_drawn(tmp_path: Path) -> None:
    """Clients 0 and 1 are there until second 10, 2 to 4 from second 100 on; then nobody ever again."""
    rows = [f"{client},0,10" for client in (0, 1)] + [f"{client},100,200" for client in (2, 3, 4)]
    (tmp_path / "t.csv").write_text("\n".join(["client,start,end", *rows]))
    fleet = f"a*6(up='100B/s', available=\"trace('{tmp_path / 't.csv'}')\")"
    fed = build(fleet=fleet, participation=2, rounds=40)
    seen: list[tuple[float, list[int]]] = []
    fed.fit(lambda record: seen.append((record.simulated_seconds or 0.0, record.clients)))
    assert f"the run ends after {len(seen)} of 40 rounds" in fed.notes[-1]
    began = [0.0] + [max(end, 100.0) if end >= 10 else end for end, _ in seen[:-1]]
    assert seen[0][1] == [0, 1]
    for begin, (_, clients) in zip(began, seen, strict=True):
        assert set(clients) <= ({0, 1} if begin < 10 else {2, 3, 4})
        assert len(clients) == 2
    assert seen[-1][0] >= 200


@pytest.mark.parametrize("engine", [name for name in ENGINES if ENGINES[name].same_bits and name != "ray"])
def test_the_clock_is_the_same_on_every_engine_and_after_a_resume(engine: str, tmp_path: Path) -> None:
    fleet = "slow*3(up='0.1B/s', flops='5k/s', available='daily(p=0.3)'); fast*3(available='daily(p=0.5, hours=2)')"
    make = partial(build, fleet=fleet, participation=3, deadline=4000.0, method="scaffold")
    whole = make()
    whole.fit()
    workers = {"workers": 2} if ENGINES[engine].parallel else {}
    other = make(engine=engine, out=tmp_path / "run", **workers)
    rounds = other.rounds()
    next(rounds), next(rounds)
    rounds.close()
    again = make(engine=engine, out=tmp_path / "run", resume=True, **workers)
    again.fit()
    check_same(again, whole)
    told = [(r.simulated_seconds, r.late, r.clients) for r in again.records]
    assert told == [(r.simulated_seconds, r.late, r.clients) for r in whole.records]
    assert any(r.late for r in whole.records)
    assert again.state.clock == whole.state.clock


def test_a_run_is_not_resumed_with_other_traces(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("client,start,end\n0,0,99\n")
    make = partial(build, fleet=f"a*6(available=\"trace('{tmp_path / 't.csv'}')\")", out=tmp_path / "run", rounds=2)
    make().fit()
    make(resume=True)
    (tmp_path / "t.csv").write_text("client,start,end\n1,0,99\n")
    with pytest.raises(fs.UsageError, match="was run with other traces"):
        make(resume=True)


@pytest.mark.parametrize("method", ["fedavg", "fedbuff(buffer=2)"])
@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_a_run_ends_when_nobody_is_ever_there_again(tmp_path: Path, engine: str, method: str) -> None:
    """With the rounds that it has, and a note; a resume finds nobody, either. A trial begins anew in second 0."""
    rows = ["0,0,10", "1,0,10", "1,50,51"]
    (tmp_path / "t.csv").write_text("\n".join(["client,start,end", *rows]))
    fleet = f"a*6(up='100B/s', available=\"trace('{tmp_path / 't.csv'}')\")"
    how: dict[str, Any] = {"method": method, "rounds": 40, "eval_every": 40, "engine": engine, "out": tmp_path / "run"}
    make = partial(build, fleet=fleet, **how)
    workers = {"workers": 2} if engine == "processes" else {}
    fed = make(**workers)
    done = len(fed.fit().records)
    assert 0 < done < 40
    (note,) = [note for note in fed.notes if "the run ends" in note]
    assert note.startswith(
        f"the run ends after {done} of 40 rounds: no client's device is there after simulated second"
    )
    summary = SavedRun.read(tmp_path / "run").summary
    assert summary["rounds"] == done
    assert [r.accuracy is not None for r in fed.records] == [False] * (done - 1) + [True]  # what it ends with is judged
    assert note in summary["notes"]
    assert fed.dry_run(2).rows
    assert len(make(resume=True, **workers).fit().records) == done


def test_what_has_no_meaning_is_refused(tmp_path: Path) -> None:
    """Before anything is written."""
    with pytest.raises(fs.UsageError, match="a deadline needs a fleet"):
        build(fleet=None, deadline=3.0)
    for stragglers in ("wait", "narrow"):
        with pytest.raises(fs.UsageError, match=f"stragglers = '{stragglers}' needs a deadline"):
            build(stragglers=stragglers)
    (tmp_path / "t.csv").write_text("client,start,end\n9,0,99\n0,0,99\n")
    with pytest.raises(fs.UsageError, match="none is ever there"):
        build(fleet=f"a*6(available=\"trace('{tmp_path / 't.csv'}')\")", without="0", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_time_to_target_is_told(tmp_path: Path) -> None:
    """In the summary, the comparison and the report, and only where there is a fleet."""
    fed = build(target=0.3, rounds=6, out=tmp_path / "run")
    history = fed.fit()
    reached = history.rounds_to(0.3)
    assert reached is not None
    assert history.summary["simulated_seconds_to_target"] == history.records[reached - 1].simulated_seconds
    assert history.summary["simulated_seconds"] == history.records[-1].simulated_seconds
    assert "simulated_seconds" not in build(fleet=None, rounds=1).fit().summary
    groups = group_runs([SavedRun.read(tmp_path / "run")])
    figure = {figure.name: figure for figure in against_costs(groups)}["accuracy-simulated"]
    times = [r.simulated_seconds or 0 for r in history.records]
    size, unit, _ = time_unit(times[-1])
    assert figure.title == f"Accuracy against simulated {unit}"
    assert list(figure.data[-1]["x"]) == pytest.approx([time / size for time in times], rel=1e-3)


def test_times_are_told_in_a_unit_that_fits() -> None:
    assert [simulated_text(time) for time in (0.25, 89.0, 90.0, 5399.0, 5400.0)] == [
        *("0.25 s", "89 s", "1.5 min", "90.0 min", "1.5 h")
    ]


def test_a_comparison_has_columns_of_simulated_time(tmp_path: Path) -> None:
    small = {"clients": 3, "rounds": 1, "steps": 1, "partition": "iid", "model": "mlp(hidden=(4,))", "workers": 1}
    found = compare({**small, "fleet": "a*2(up='1kB/s'); b", "target": 0.01}, tmp_path / "with")
    assert found.rows[0].of("simulated_seconds_to_target") == found.rows[0].of("simulated_seconds")
    assert found.rows[0].of("simulated_seconds") is not None
    assert "simulated_seconds_to_target" in csv_text(found)
    assert "simulated" not in csv_text(compare(small, tmp_path / "without"))
