"""From a table of text to numbers: standardised columns, one-hot categories, imputed gaps with an indicator for each.

Nothing is pooled that a federation would not share: for every column each client gives its count, mean and spread, or
the names of its categories, of its training rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedstrata.core.lazy import torch
from fedstrata.core.rng import derive
from fedstrata.data.cells import Array, is_missing, number_of, numbers_or_words, plain
from fedstrata.data.client_data import draw_held_out
from fedstrata.data.examples import Dataset, TensorExamples
from fedstrata.data.learnt import guess_task, kind_of
from fedstrata.data.single_precision import as_float32, refuse_beyond
from fedstrata.errors import UsageError, did_you_mean

Standardise = Literal["federation", "client", "none"]
_CONSTANT = 1e-12
"""A deviation below this share of the mean is rounding: the column is constant."""


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of text, all of the same length, and whose row each is; '' where nobody says."""

    columns: Mapping[str, Sequence[str]]
    clients: Sequence[str]

    def __len__(self) -> int:
        return len(self.clients)


@dataclass(frozen=True)
class TableOptions:
    """How a table becomes numbers.

    Args:
        target: name of the column to predict.
        categories: columns of numbers that name categories.
        standardise: numbers to mean 0 and deviation 1 over the `federation`, per `client`, or not at all.
        test: share of each client's rows that is held out for testing, the same share of every class.
        seed: of the choice of these.
        task: what is learnt; found from the target where empty.
    """

    target: str
    categories: tuple[str, ...] = ()
    standardise: Standardise = "federation"
    test: float = 0.2
    seed: int = 0
    task: str = ""


def table_dataset(name: str, table: Table, options: TableOptions, note: str = "") -> Dataset:
    """The dataset of a table; its natural clients are those that the rows belong to."""
    _check_options(name, table, options)
    task, targets, classes = read_target(name, options.target, table.columns[options.target], options.task)
    kind = kind_of(name, task)
    dealt = targets if kind != "regression" else tenths(targets)
    whose = sorted(set(table.clients))
    natural = whose != [""]
    place = {client: number for number, client in enumerate(whose)}
    owner = np.array([place[client] for client in table.clients])
    held_out = hold_out(owner, dealt, options.test, derive(options.seed, "table", name))
    x, told = encode(name, table, options, owner, ~held_out)
    parts = []
    for rows in (~held_out, held_out):
        order = np.flatnonzero(rows)[np.argsort(owner[rows], kind="stable")]
        parts.append((order, TensorExamples(torch.from_numpy(x[order]), torch.from_numpy(targets[order]))))
    (train, examples), (test, tests) = parts
    groups, test_groups = (
        tuple(torch.from_numpy(np.flatnonzero(owner[rows] == client)) for client in range(len(whose)))
        for rows in (train, test)
    )
    remarks = _remarks(whose, owner[train], dealt[train]) if natural and kind != "regression" else []
    return Dataset(
        name,
        examples,
        tests,
        len(classes) if kind == "classification" else 1,
        tuple(classes),
        groups if natural else (),
        tuple(whose) if natural else (),
        "; ".join(part for part in (note, told, *remarks) if part),
        task,
        torch.from_numpy(dealt[train].astype(np.int64)),
        test_groups if natural else (),
    )


def _check_options(name: str, table: Table, options: TableOptions) -> None:
    for column in (options.target, *options.categories):
        if column not in table.columns:
            raise UsageError(f"{name} has no column '{column}'{did_you_mean(column, table.columns)}")
    if options.target in options.categories:
        raise UsageError(f"{name}: '{options.target}' is the target, and cannot be a category of the inputs too")
    if not 0 < options.test < 1:
        raise UsageError(f"{name}: the share of test rows is above 0 and below 1, not {options.test}")


def read_target(name: str, column: str, cells: Sequence[str], task: str) -> tuple[str, Array, list[str]]:
    """(the task, the targets as numbers, the names of the classes), of which no cell may be missing."""
    what = f"the target '{column}'"
    gaps = [row for row, cell in enumerate(cells) if is_missing(cell)]
    if gaps:
        raise UsageError(f"{name}: {what} is missing in row {gaps[0] + 1}")
    found = task or _guess_task(name, what, cells)
    kind = kind_of(name, found)
    if kind == "regression":
        return found, _target_numbers(name, what, cells), []
    if kind not in ("binary", "classification"):
        raise UsageError(f"{name}: a table's task is binary, classification or regression, not '{found}'")
    values = [plain(cell) for cell in cells]
    known = {value: number_of(value) for value in set(values)}
    numbers = None not in known.values()
    distinct = sorted(known, key=lambda value: (known[value] or 0.0 if numbers else 0.0, value))
    if len(distinct) == 1:
        raise UsageError(f"{name}: {what} is '{distinct[0]}' in every row: there is nothing to tell apart")
    if kind == "binary" and len(distinct) != 2:
        raise UsageError(f"{name}: {what} has {len(distinct)} different values, and binary needs 2")
    place = {value: number for number, value in enumerate(distinct)}
    return found, np.array([place[value] for value in values], dtype=np.int64), distinct


def _guess_task(name: str, what: str, cells: Sequence[str]) -> str:
    numbers = numbers_or_words(f"{name}: {what}", cells, "write task='classification' to have each value as a class")
    return guess_task(np.array([plain(cell) for cell in cells]) if numbers is None else numbers)


def _target_numbers(name: str, what: str, cells: Sequence[str]) -> Array:
    """A number per row."""
    numbers = [number_of(cell) for cell in cells]
    if None in numbers:
        row = numbers.index(None)
        raise UsageError(f"{name}: {what} is '{cells[row].strip()}' in row {row + 1}, and regression needs a number")
    return as_float32(name, np.array(numbers, dtype=np.float64), lambda row: f"{name}: {what} in row {row + 1}")


def tenths(targets: Array) -> Array:
    """The tenth of all targets that each one lies in, to hold out and to deal by."""
    order = np.argsort(np.argsort(targets, kind="stable"), kind="stable")
    return order * 10 // len(targets)


def hold_out(owner: Array, classes: Array, share: float, seed: int) -> Array:
    """Which rows are for testing: of each client and class the share of them, rounded up or down by lot.

    Every client keeps a row to train on.
    """
    rng = np.random.default_rng(seed)
    held_out = np.zeros(len(owner), dtype=bool)
    for client in range(int(owner.max()) + 1):
        mine = owner == client
        held_out[mine] = draw_held_out(rng, classes[mine], share)
    if not held_out.any():
        raise UsageError(f"{len(owner)} rows are too few to hold out {share:g} of them for testing")
    return held_out


@dataclass(frozen=True, eq=False)
class Moments:
    """How many numbers somebody has, their mean, and the sum of their squared distances from it: all that is shared."""

    count: int
    mean: float
    spread: float

    @staticmethod
    def of(values: Array) -> Moments:
        """Of numbers, without those that are missing."""
        there = values[~np.isnan(values)]
        mean = float(there.mean()) if len(there) else 0.0
        return Moments(len(there), mean, float(((there - mean) ** 2).sum()))

    def join(self, other: Moments) -> Moments:
        """Of both together (Chan, Golub and LeVeque)."""
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count
        return Moments(count, mean, self.spread + other.spread + apart**2 * self.count * other.count / count)

    @property
    def deviation(self) -> float:
        """The standard deviation; 1 where there is none to divide by, but for rounding."""
        found = math.sqrt(self.spread / self.count) if self.count else 0.0
        return found if found > _CONSTANT * abs(self.mean) else 1.0


def encode(name: str, table: Table, options: TableOptions, owner: Array, train: Array) -> tuple[Array, str]:
    """(the inputs, a row per row of the table; what was done, in a few words)."""
    parts: list[Array] = []
    counts = {"numbers": 0, "one-hot": 0, "gaps": 0}
    unseen = 0
    for column, cells in table.columns.items():
        if column == options.target:
            continue
        numbers = None if column in options.categories else _input_numbers(name, column, cells)
        gaps = np.array([is_missing(cell) for cell in cells])
        if numbers is None:
            made, strange = _one_hot([plain(cell) for cell in cells], gaps, train)
            unseen += strange
            counts["one-hot"] += 1
        else:
            made = _standardise(numbers, owner, train, options.standardise)
            _check_made(f"{name}: the column '{column}'", made)
            counts["numbers"] += 1
        parts.append(made)
        if gaps[train].any():
            parts.append(gaps[:, None].astype(np.float64))
            counts["gaps"] += 1
    if not parts:
        raise UsageError("the table has no column but the target")
    return np.concatenate(parts, 1).astype(np.float32), _told(counts, options.standardise, unseen)


def _check_made(what: str, made: Array) -> None:
    """Refuse a number that lies too many deviations from the mean."""
    refuse_beyond(made, lambda row: f"{what}, standardised, in row {row + 1}")


def _input_numbers(name: str, column: str, cells: Sequence[str]) -> Array | None:
    """A column's numbers; None if it has words."""
    what = f"{name}: the column '{column}'"
    found = numbers_or_words(what, cells, f"write categories=('{column}',) to have each value as a category")
    if found is not None:
        refuse_beyond(found, lambda row: f"{what} in row {row + 1}")
    return found


def _standardise(numbers: Array, owner: Array, train: Array, how: Standardise) -> Array:
    """A column of numbers, missing ones at the mean."""
    clients = range(int(owner.max()) + 1)
    own = [Moments.of(numbers[train & (owner == client)]) for client in clients]
    everybody = own[0]
    for other in own[1:]:
        everybody = everybody.join(other)
    made = np.empty(len(numbers))
    for client in clients:
        rows = owner == client
        used = own[client] if how == "client" and own[client].count else everybody
        centred = np.where(np.isnan(numbers[rows]), 0.0, numbers[rows] - used.mean)
        made[rows] = centred + used.mean if how == "none" else centred / used.deviation
    return made[:, None]


def _one_hot(cells: Sequence[str], gaps: Array, train: Array) -> tuple[Array, int]:
    """(a column for each category that a training row has, how many other rows have one that none of these has)."""
    known = sorted({cell for cell, gap, mine in zip(cells, gaps, train, strict=True) if mine and not gap})
    place = {cell: number for number, cell in enumerate(known)}
    made = np.zeros((len(cells), len(known)))
    strange = 0
    for row, (cell, gap) in enumerate(zip(cells, gaps, strict=True)):
        if cell in place and not gap:
            made[row, place[cell]] = 1.0
        elif not gap:
            strange += 1
    return made, strange


def _told(counts: Mapping[str, int], how: Standardise, unseen: int) -> str:
    """What was done to the columns."""
    over = {"federation": "standardised over the federation", "client": "standardised per client"}
    columns = "column" if counts["numbers"] == 1 else "columns"
    said = [f"{counts['numbers']} {columns} of numbers {over.get(how, 'as they are')}"] * bool(counts["numbers"])
    said += [f"{counts['one-hot']} one-hot"] * bool(counts["one-hot"])
    said += [f"{counts['gaps']} with missing values, at the mean with an indicator"] * bool(counts["gaps"])
    said += [f"{unseen} test rows with a category that no training row has"] * bool(unseen)
    return ", ".join(said)


def _remarks(whose: Sequence[str], owner: Array, classes: Array) -> list[str]:
    """Clients of one class, by name."""
    single = [name for client, name in enumerate(whose) if len(np.unique(classes[owner == client])) == 1]
    return [f"of one class only: {', '.join(single[:5])}{', …' * (len(single) > 5)}"] if single else []
