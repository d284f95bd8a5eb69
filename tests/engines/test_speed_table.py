"""The table that `auto` chooses by: the nearest cell, its file, and files that hold none."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from fedstrata.engines import known_speeds
from fedstrata.engines.built_in_speeds import BUILT_IN
from fedstrata.engines.grouping import MAX_SIZE, MIN_SIZE
from fedstrata.engines.known_speeds import load_table, table_path
from fedstrata.engines.speed_table import FORMAT, Cell, DamagedTable, Family, SpeedTable, parse_table
from fedstrata.engines.tuning import build_subjects
from fedstrata.system.machine import processor

SMALL = Cell("dense", 1_000, 10, 1, 8, 100.0, 50.0)
LARGE = Cell("dense", 100_000, 10, 1, 8, 1_000.0, 1_100.0)
LONG = replace(SMALL, steps=16)
TABLE = SpeedTable((SMALL, LARGE, LONG), processor(), "2.0", "2026-01-31")


def here() -> SpeedTable:
    """The same table, as if it had been measured on this machine."""
    return replace(TABLE, torch=str(torch.__version__))


def write(text: str | bytes) -> Path:
    """A file where this machine's table is looked for."""
    path = table_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# The nearest cell ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "nearest"),
    [
        ((1_000, 10, 1, 8), SMALL),
        ((1, 1, 1, 32), SMALL),
        ((9_999, 10, 1, 8), SMALL),  # √(1,000 · 100,000) = 10,000 is half-way
        ((10_001, 10, 1, 8), LARGE),
        ((1_000, 10, 3, 8), SMALL),  # √16 = 4 is half-way
        ((1_000, 10, 5, 8), LONG),
        ((9_999, 10, 3, 8), SMALL),
        ((20_000, 10, 400, 8), LONG),  # twenty times as large as LONG, or five times smaller and 400 times longer
    ],
)
def test_the_nearest_cell_is_the_one_with_the_smallest_factors(sizes: Any, nearest: Cell) -> None:
    assert TABLE.find_nearest("dense", sizes) is nearest


def test_distances_by_hand() -> None:
    """log 2 for twice the FLOPs, log 5 for a fifth of the batch, log 3 for three times the steps, none for clients."""
    assert SMALL.distance((2_000, 2, 3, 8)) == pytest.approx(math.log(2 * 5 * 3))
    assert SMALL.share == 0.5


def test_nothing_is_near_a_model_that_is_larger_than_all_or_of_another_family() -> None:
    assert TABLE.find_nearest("dense", (100_000, 10, 1, 8)) is LARGE
    assert TABLE.find_nearest("dense", (100_001, 10, 1, 8)) is None
    assert TABLE.find_nearest("convolutional", (1_000, 10, 1, 8)) is None


# The file ------------------------------------------------------------------------------------------------------------


def test_a_table_is_read_as_it_was_written() -> None:
    assert parse_table(TABLE.to_json()) == TABLE
    built_in = replace(SMALL, flops=7, built_in=True)
    assert parse_table(replace(TABLE, cells=(*TABLE.cells, built_in)).to_json()) == TABLE
    assert json.loads(TABLE.to_json())["format"] == FORMAT


def test_what_was_measured_here_goes_before_what_is_built_in() -> None:
    assert load_table() == (SpeedTable(BUILT_IN, processor(), here().torch), "")
    mine = replace(BUILT_IN[3], one_by_one=1.0, at_once=2.0, built_in=False)
    write(replace(here(), cells=(mine,)).to_json())
    table, note = load_table()
    assert note == ""
    assert table.measured == "2026-01-31"
    assert table.cells == (mine, *BUILT_IN[:3], *BUILT_IN[4:])
    assert table.tell_source(mine) == "measured here on 2026-01-31"
    assert table.tell_source(BUILT_IN[0]) == "the built-in table"


def edited(**changes: Any) -> str:
    """The file with other values in its first cell."""
    told = json.loads(here().to_json())
    told["cells"][0].update(changes)
    return json.dumps(told)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        b"\xff\xfe",
        "[" * 100_000,
        "[]",
        "{}",
        json.dumps({**json.loads(TABLE.to_json()), "format": FORMAT + 1}),
        json.dumps({**json.loads(TABLE.to_json()), "cells": []}),
        json.dumps({**json.loads(TABLE.to_json()), "cells": ["dense"]}),
        json.dumps({**json.loads(TABLE.to_json()), "measured": "once upon a\ntime"}),
        json.dumps({**json.loads(TABLE.to_json()), "torch": None}),
        TABLE.to_json()[:-40],
        edited(family="dance"),
        edited(family=["dense"]),
        edited(flops=0),
        edited(flops=10**400),
        edited(flops=True),
        edited(batch=1.5),
        edited(at_once=-1.0),
        edited(at_once=math.nan),
        edited(at_once=math.inf),
        edited(more=1),
    ],
    ids=lambda text: repr(text[:40]),
)
def test_a_file_that_holds_no_table(text: str | bytes) -> None:
    """It is refused by whoever reads it; a run goes by the built-in table and says so."""
    with pytest.raises(DamagedTable):
        parse_table(text)
    path = write(text)
    table, note = load_table()
    assert table.cells == BUILT_IN
    assert note.startswith(f"{path} is damaged (")
    assert note.endswith("): the built-in table is used; 'fedstrata machine tune' measures anew")
    assert "\n" not in note


def test_a_table_of_another_machine_is_not_used() -> None:
    """Files of other kinds have other names; one that was copied to this name is told by what is in it."""
    path = write(replace(here(), processor="Another, AVX9").to_json())
    table, note = load_table()
    assert table.cells == BUILT_IN
    assert note.startswith(f"{path} is of another kind of machine: ")
    write(replace(here(), torch="0.4").to_json())
    assert "another kind of machine" in load_table()[1]
    write(here().to_json())
    assert load_table()[1] == ""


def test_a_table_that_cannot_be_read() -> None:
    table_path().mkdir(parents=True)
    table, note = load_table()
    assert table.cells == BUILT_IN
    assert "cannot be read (is a directory): the built-in table is used" in note


def test_every_kind_of_machine_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    before = table_path()
    assert before.parent == cache
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")  # which is part of what `processor` tells
    limited = table_path()
    monkeypatch.setattr(known_speeds, "FORMAT", FORMAT + 1)
    assert len({before, limited, table_path()}) == 3


# What is built in ----------------------------------------------------------------------------------------------------


def test_the_built_in_table_is_what_is_measured() -> None:
    """Cell by cell: else what a machine measures would not take the place of what is built in."""
    subjects = [(s.family, (s.flops, s.batch, s.steps, s.clients)) for s in build_subjects()]
    assert sorted(cell.place for cell in BUILT_IN) == sorted(subjects)
    assert len(set(subjects)) == len(subjects)
    assert {cell.family for cell in BUILT_IN} == set(get_args(Family))
    assert all(cell.built_in and cell.clients in (MIN_SIZE, MAX_SIZE) for cell in BUILT_IN)
