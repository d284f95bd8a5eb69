"""What takes less processor time, one client after the other or many at once: a table of what was measured."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal, get_args

FORMAT = 1
"""Of the file. Raise it too where what is measured becomes much faster or slower: older tables are then not found."""

Family = Literal["dense", "dense, torch.func", "convolutional"]
"""What many clients' models are trained at once by: products of stacks, `torch.func`, the same with convolutions."""

Sizes = tuple[int, int, int, int]
"""Floating-point operations of a forward pass per example, examples per step, steps per visit, clients at once."""


class DamagedTable(Exception):
    """A file that holds no table; `str(error)` says what is wrong with it."""


@dataclass(frozen=True)
class Cell:
    """Clients of one kind, trained both ways.

    Args:
        family: of the model.
        flops: floating-point operations of the model's forward pass, per example.
        batch: examples per step.
        steps: of each visit.
        clients: that are trained at once.
        one_by_one: microseconds of processor time per step, what a visit takes besides its steps included.
        at_once: the same where many clients are trained at once.
        built_in: True if it came with the package.
    """

    family: Family
    flops: int
    batch: int
    steps: int
    clients: int
    one_by_one: float
    at_once: float
    built_in: bool = False

    @property
    def share(self) -> float:
        """What is left of the time if many are trained at once: below 1 where that is faster."""
        return self.at_once / self.one_by_one

    @property
    def place(self) -> tuple[Family, Sizes]:
        """What was measured, without what came of it."""
        return self.family, (self.flops, self.batch, self.steps, self.clients)

    def distance(self, sizes: Sizes) -> float:
        """How unlike clients of other sizes are: the factors by which these differ, as logarithms, added up."""
        return sum(abs(math.log(there / here)) for there, here in zip(sizes, self.place[1], strict=True))


@dataclass(frozen=True)
class SpeedTable:
    """Cells, and where they were measured.

    Args:
        cells: what was measured, here or by those who made the package.
        processor: of this machine, as `fedstrata.system.machine.processor` tells it.
        torch: its version.
        measured: the day on which this machine was, such as "2026-01-31"; empty if it never was.
    """

    cells: tuple[Cell, ...]
    processor: str
    torch: str
    measured: str = ""

    def find_nearest(self, family: Family, sizes: Sizes) -> Cell | None:
        """The cell that clients are most like; None where no model of the family was measured that is as large."""
        cells = [cell for cell in self.cells if cell.family == family]
        if sizes[0] > max((cell.flops for cell in cells), default=0):
            return None
        return min(cells, key=lambda cell: cell.distance(sizes))

    def tell_source(self, cell: Cell) -> str:
        """Where a cell was measured, in a few words."""
        return "the built-in table" if cell.built_in else f"measured here on {self.measured}"

    def to_json(self) -> str:
        """What was measured here as a file's text, a line per cell."""
        head = {"format": FORMAT, "processor": self.processor, "torch": self.torch, "measured": self.measured}
        rows = [{name: getattr(cell, name) for name in FIELDS} for cell in self.cells if not cell.built_in]
        lines = ",\n  ".join(map(json.dumps, rows))
        return f'{json.dumps(head)[:-1]}, "cells": [\n  {lines}\n]}}\n'


FIELDS = {
    "family": str,
    "flops": int,
    "batch": int,
    "steps": int,
    "clients": int,
    "one_by_one": float,
    "at_once": float,
}
"""What a file tells of a cell."""
LIMIT = 1e18
"""No number of a cell is as large."""


def parse_table(text: bytes | str) -> SpeedTable:
    """The table that a file holds.

    Raises:
        DamagedTable: if it holds none.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedTable("it is no JSON") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DamagedTable(f"it is no table of the format {FORMAT}")
    about = [found.get(name) for name in ("processor", "torch", "measured")]
    rows = found.get("cells")
    if not all(isinstance(value, str) for value in about) or not isinstance(rows, list) or not rows:
        raise DamagedTable("parts of it are missing")
    try:
        date.fromisoformat(about[-1])  # type: ignore[arg-type]
    except ValueError:
        raise DamagedTable("its day is none") from None
    return SpeedTable(tuple(_parse_cell(row) for row in rows), *about)  # type: ignore[arg-type]


def _parse_cell(row: Any) -> Cell:
    whole = isinstance(row, dict) and row.keys() == FIELDS.keys() and all(type(row[n]) is k for n, k in FIELDS.items())
    if not (
        whole
        and row["family"] in get_args(Family)
        and all(0 < row[name] < LIMIT for name in FIELDS if name != "family")
    ):
        raise DamagedTable("a cell of it was edited")
    return Cell(**row)
