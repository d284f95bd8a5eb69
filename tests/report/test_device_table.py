"""What a report says of each kind of device: against means and extremes worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from fedstrata.core.results import DeviceUse
from fedstrata.report.device_table import device_table
from fedstrata.report.run_groups import group_runs
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.records import Record

from .synthetic import config, record, saved

FLEET = "phone*2(up='1kB/s'); server"


def use(device: str, visits: int, up: int, seconds: float, memory: int) -> DeviceUse:
    counts = {"bytes_down": 0, "flops": 10 * visits, "memory": memory}
    return DeviceUse(device=device, visits=visits, bytes_up=up, seconds=seconds, **counts)


def fleet_run() -> SavedRun:
    """In round 1 phones 0 and 1 visit and the server, in round 2 phone 1 is late."""
    scores = [{"accuracy": value} for value in (0.2, 0.6, 0.9)]
    rows = [Record.read(record(1, clients=[0, 1, 2])), Record.read(record(2, clients=[0, 1, 2], client_metrics=scores))]
    phones, server = use("phone", 2, 4000, 4.0, 5_000_000), use("server", 1, 2000, 0.0, 9_000_000)
    rows[0] = replace(rows[0], devices=[phones, server])
    rows[1] = replace(rows[1], devices=[use("phone", 1, 800, 0.8, 6_000_000), server], late=[1])
    return SavedRun("run", config(fleet=FLEET, clients=3), rows, (), {"clients": 3})


def test_a_row_per_device() -> None:
    """Phones: 4,800 bytes and 4.8 s in three visits, one of four late, of clients with 0.2 and 0.6."""
    table = device_table(group_runs([fleet_run()]))
    assert table is not None
    phone, server = (dict(zip(table.head, row, strict=True)) for row in table.rows)
    assert (phone["device"], phone["clients"], phone["visits"], phone["in time"]) == ("phone", "2", "3", "75%")
    assert (phone["up"], phone["simulated time"], phone["memory"]) == ("1.6 kB", "1.6 s", "6.0 MB")
    assert (phone["global model, mean score"], phone["global model, worst score"]) == ("40.00 %", "20.00 %")
    assert (server["visits"], server["simulated time"]) == ("2", "0 s")
    assert server["global model, worst score"] == "90.00 %"
    assert not any("own models" in name for name in table.head)


def test_no_column_holds_global_and_own_models() -> None:
    """Each client's own model is right in 10 % more than the global one; of `fedper` there is no whole one."""
    both, own = fleet_run(), fleet_run()
    theirs = [{"accuracy": value} for value in (0.3, 0.7, 1.0)]
    both = replace(both, records=[both.records[0], replace(both.records[1], own_metrics=theirs)])
    own = replace(own, records=[own.records[0], replace(own.records[1], own_metrics=theirs, client_metrics=None)])
    runs = [replace(run, config={**run.config, "method": name}) for name, run in (("ditto", both), ("fedper", own))]
    table = device_table(group_runs(runs))
    assert table is not None
    phones = [dict(zip(table.head, row, strict=True)) for row in table.rows[::2]]
    assert [row["global model, mean score"] for row in phones] == ["40.00 %", "–"]
    assert [row["own models, mean score"] for row in phones] == ["50.00 %", "50.00 %"]
    assert [row["own models, worst score"] for row in phones] == ["30.00 %", "30.00 %"]


def test_nothing_without_a_fleet_that_fits() -> None:
    other = replace(fleet_run(), config=config(fleet="phone*5"))
    assert device_table(group_runs([saved([0.1]), other])) is None


def test_a_trace_need_not_be_here() -> None:
    gone = replace(fleet_run(), config=config(fleet="phone*3(available=\"trace('nowhere.csv')\")"))
    table = device_table(group_runs([gone]))
    assert table is not None
    assert [row[:4] for row in table.rows] == [("fedavg", "phone", "3", "3")]
