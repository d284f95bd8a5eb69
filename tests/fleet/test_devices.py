"""Fleets as text: what they read as, what they are written as, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import fedstrata as fs
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.errors import UsageError
from fedstrata.fleet.availability import Daily, Trace, parse_availability
from fedstrata.fleet.devices import Device, Fleet, Group, parse_fleet
from fedstrata.fleet.quantities import RATES, SIZES, SPEEDS, parse_quantity, quantity_text
from tests.engines.worlds import flat, mlp, points

WHOLE = "phone*6(memory='60MB', up='1MB/s', down='4MB/s', flops='2G/s', available='daily(p=0.3)'); gateway*3; server"


def test_a_fleet_is_read_group_by_group() -> None:
    phone = Device("phone", 60_000_000, 1e6, 4e6, 2e9, Daily(p=0.3))
    fleet = parse_fleet(WHOLE)
    assert fleet == Fleet((Group(phone, 6), Group(Device("gateway"), 3), Group(Device("server"), 1)))
    assert [device.name for device in fleet.devices(10)] == ["phone"] * 6 + ["gateway"] * 3 + ["server"]


def test_shares_are_dealt_out_as_architectures_are() -> None:
    fleet = parse_fleet("phone*0.6(up='8Mbit/s'); pc*0.4")
    assert [device.name for device in fleet.devices(5)] == ["phone"] * 3 + ["pc"] * 2
    assert fleet.devices(5)[0].up == 1e6
    with pytest.raises(UsageError, match="fleet: with 1 clients none has 'pc'"):
        fleet.devices(1)


@pytest.mark.parametrize(
    "text",
    [
        WHOLE,
        "a*0.5(memory=12345.6); b*0.5(up=0.1, flops='1.7T/s')",
        "a(memory='1GiB', available=\"trace('/tmp/a;b (c).csv', every=60)\"); b*2(down='3kbit/s')",
    ],
)
def test_what_is_written_reads_back(text: str) -> None:
    fleet = parse_fleet(text)
    assert parse_fleet(str(fleet)) == fleet
    assert str(parse_fleet(str(fleet))) == str(fleet)


def test_quantities() -> None:
    """MB are 10⁶ bytes, MiB 2²⁰; a megabit is an eighth of a megabyte."""
    assert parse_quantity("x", "60MB", SIZES, "") == 60e6
    assert parse_quantity("x", "1.5 GiB", SIZES, "") == 1.5 * 2**30
    assert parse_quantity("x", "8Mbit/s", RATES, "") == 1e6
    assert parse_quantity("x", "2G/s", SPEEDS, "") == 2e9
    assert [quantity_text(v, SIZES) for v in (60e6, 2**30, 1234.5, 1 / 3)] == ["60MB", "1GiB", "1234.5B", f"{1 / 3}B"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "fleet names no device"),
        (" ; ", "fleet names no device"),
        ("phone; phone", "fleet names 'phone' twice"),
        ("phone(up='1MB/s')*6", "cannot be read; write it like phone*6("),
        ("phone*0", "in phone*0 the number must be a whole one"),
        ("phone*-1", "in phone*-1 the number must be a whole one"),
        ("phone*six", "in phone*six the number must be a whole one"),
        ("phone*1.5", "or a share up to 1.0"),
        ("phone*6; server*0.4", "a whole number of clients, or every group a share"),
        ("phone*0.6; server*0.3", "the shares come to 0.9, not to 1"),
        ("phone(memory='60mb')", "phone's memory must be above 0, written like '60MB', not '60mb'"),
        ("phone(memory='60MB/s')", "phone's memory must be above 0"),
        ("phone(up='-1MB/s')", "phone's up must be above 0, written like '1MB/s'"),
        ("phone(up=0)", "phone's up must be above 0"),
        (f"phone(flops={'9' * 400})", "phone's flops must be above 0"),
        ("phone(ram='60MB')", "device 'phone' has no argument 'ram'"),
        ("phone(available='daily')", "availability 'daily' needs the argument 'p'"),
        ("phone(available='daily(p=0)')", "daily's p must be above 0"),
        ("phone(available='daily(p=2)')", "daily's p must be above 0 and at most 1"),
        ("phone(available='nightly')", "there is no availability 'nightly'"),
        ("phone(available='daily(p=1e-9)')", "daily(p=1e-09) is there for less than a thousandth of a second a day"),
        ("phone(available='daily(p=1, hours=1e-320)')", "is there for less than a thousandth of a second a day"),
        ("phone(available=\"trace('t.csv', every=1e-9)\")", "every must be a thousandth of a second or more"),
        ("phone(up=1e-320)", "phone's up must be above 0"),
        ("phone(up='1MB/s'", "cannot be read"),
        ("phone('60MB', memory='60MB')", "argument 'memory' is given twice"),
    ],
)
def test_what_cannot_be_read(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_fleet(text)
    assert sentence in str(refusal.value)
    with pytest.raises(UsageError, match="fleet = "):
        validate_settings(RunConfig, {"fleet": text})


def test_a_fleet_has_as_many_devices_as_there_are_clients() -> None:
    with pytest.raises(UsageError, match="the fleet has 10 devices, and there are 9 clients"):
        parse_fleet(WHOLE).devices(9)


def test_a_setting_is_kept_as_it_is_written() -> None:
    config = validate_settings(RunConfig, {"fleet": " phone *1( '1000kB' );pc "})
    assert config.fleet == "phone*1(memory='1MB'); pc*1"


def test_daily_is_there_for_its_share_of_every_day() -> None:
    """Of 600 moments of each of 20 days: a third, for every client; nothing is there before the next time."""
    daily, day = Daily(p=1 / 3), 86400.0
    for client in (0, 7):
        moments = [day * i / 600 for i in range(20 * 600)]
        there = [daily.next_time(client, moment, 5) == moment for moment in moments]
        assert all(abs(sum(there[600 * d : 600 * (d + 1)]) - 200) <= 1 for d in range(20))
        for moment, is_there in zip(moments[:1800], there, strict=False):
            later = daily.next_time(client, moment, 5)
            assert is_there or later > moment
            assert daily.next_time(client, later, 5) == later
            assert later == moment or daily.next_time(client, (moment + later) / 2, 5) == later
    firsts = [daily.next_time(client, 0.0, 5) for client in range(6)]
    assert firsts != [daily.next_time(client, 0.0, 6) for client in range(6)]
    assert len({*firsts}) > 3


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "there.csv"
    path.write_text("client,start,end\n1,50,60\n0,10,20\n0,0,5\n")
    once, again = Trace(path=str(path)), Trace(path=str(path), every=100.0)
    times = [(0, 0.0), (0, 5.0), (0, 19.0), (0, 20.0), (1, 0.0), (2, 0.0)]
    assert [once.next_time(*pair, 0) for pair in times] == [0, 10, 19, math.inf, 50, math.inf]
    assert [again.next_time(*pair, 0) for pair in times] == [0, 10, 19, 100, 50, math.inf]
    assert again.next_time(1, 365.0, 0) == 450


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("", "has no rows"),
        ("client,start\n0,1\n", "row 1: it needs numbers"),
        ("client,start,end\n0,1,2\n0,five,9\n", "row 2: it needs numbers"),
        ("client,start,end\n0,5,5\n", "row 1: a client, 0 or more, and a start before an end"),
        ("client,start,end\n0,5,200\n", "goes on after second 200"),
    ],
)
def test_a_trace_that_is_none(tmp_path: Path, rows: str, sentence: str) -> None:
    (tmp_path / "t.csv").write_text(rows)
    with pytest.raises(UsageError, match=sentence):
        Trace(path=str(tmp_path / "t.csv"), every=100.0).next_time(0, 0.0, 0)
    with pytest.raises(UsageError, match="cannot read"):
        Trace(path=str(tmp_path / "none.csv")).next_time(0, 0.0, 0)


def test_a_trace_means_the_same_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(parse_availability("trace('t.csv')")) == f"trace(path={str(tmp_path / 't.csv')!r})"


def test_a_federation_checks_its_fleet_before_anything_is_written(tmp_path: Path) -> None:
    data = [mlp(), flat(), points(40, 99)]
    clients = len(flat())
    assert [device.name for device in fs.Federation(*data, fleet=f"a*{clients - 1}; b").devices][-2:] == ["a", "b"]
    with pytest.raises(UsageError, match=f"the fleet has 1 devices, and there are {clients} clients"):
        fs.Federation(*data, fleet="a", out=tmp_path / "run")
    with pytest.raises(UsageError, match="a fleet needs clients: 'centralised' has one party"):
        fs.Federation(*data, fleet=f"a*{clients}", method="centralised", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
