"""Tables: statistics that are put together from clients' own, one-hot categories, gaps, what is held out; hospitals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.data.tables import Moments, Table, TableOptions, hold_out, read_target, table_dataset
from fedstrata.errors import UsageError

RNG = np.random.default_rng(0)
SITES = ["a"] * 30 + ["b"] * 50 + ["c"] * 20
AGE = np.concatenate([RNG.normal(50, 3, 30), RNG.normal(70, 9, 50), RNG.normal(60, 1, 20)])
COLOUR = [["red", "green", "blue"][i] for i in RNG.integers(3, size=100)]
SICK = ["yes" if flag else "no" for flag in RNG.random(100) < 0.4]


def table(**more: Any) -> Table:
    age = [f"{value!r}" for value in AGE.tolist()]
    age[3] = age[40] = "?"
    columns = {"age": age, "colour": list(COLOUR), "sick": list(SICK)} | more
    return Table(columns, SITES)


def parts(dataset: fs.Dataset) -> tuple[Any, Any]:
    return dataset.train.x.double().numpy(), dataset.test.x.double().numpy()


def rows_of(dataset: fs.Dataset) -> dict[str, list[int]]:
    """Which rows of the table are where, told by what was held out."""
    owner = np.array([["a", "b", "c"].index(site) for site in SITES])
    labels = np.array([cell == "yes" for cell in SICK]).astype(int)
    from fedstrata.core.rng import derive

    held = hold_out(owner, labels, 0.2, derive(0, "table", "mine"))
    return {"train": np.flatnonzero(~held).tolist(), "test": np.flatnonzero(held).tolist()}


def test_moments_are_those_of_everybody_together() -> None:
    whole = np.append(1e6 + AGE, np.nan)
    joined = Moments.of(whole[:30]).join(Moments.of(whole[30:80])).join(Moments.of(whole[80:]))
    assert joined.count == 100
    assert joined.mean == pytest.approx(np.nanmean(whole), rel=1e-12)
    assert joined.deviation == pytest.approx(np.nanstd(whole), rel=1e-9)
    assert Moments.of(np.array([np.nan])).join(Moments.of(np.array([2.0]))).mean == 2.0
    assert Moments.of(np.array([3.0, 3.0])).deviation == 1.0


@pytest.mark.parametrize("how", ["federation", "client", "none"])
def test_numbers_are_standardised_by_training_rows_alone(how: Any) -> None:
    """Against NumPy; missing ones lie at the mean, with an indicator."""
    made = table_dataset("mine", table(), TableOptions("sick", standardise=how))
    rows = rows_of(made)
    values = AGE.copy()
    values[[3, 40]] = np.nan
    sites = np.array(SITES)
    for part, x in zip(("train", "test"), parts(made), strict=True):
        for at, row in enumerate(rows[part]):
            same = np.array(rows["train"])
            if how == "client":
                same = same[sites[same] == sites[row]]
            mean, deviation = np.nanmean(values[same]), np.nanstd(values[same])
            gap = np.isnan(values[row])
            expected = 0.0 if gap else (values[row] - mean) / deviation
            if how == "none":
                expected = mean if gap else values[row]
            assert x[at, 0] == pytest.approx(expected, abs=1e-4)
            assert x[at, 1] == float(gap)
            assert x[at, 2:].tolist() == [float(COLOUR[row] == c) for c in ("blue", "green", "red")]


def test_what_is_held_out() -> None:
    """A fifth of every client and class, up to one row; clients are those of the column."""
    made = table_dataset("mine", table(), TableOptions("sick"))
    assert made.task == "binary"
    assert made.classes == 1
    assert made.class_names == ("no", "yes")
    assert made.group_names == ("a", "b", "c")
    rows = rows_of(made)
    assert made.train.y.tolist() == [int(SICK[row] == "yes") for row in rows["train"]]
    for number, site in enumerate("abc"):
        for answer in ("yes", "no"):
            mine = [row for row in range(100) if SITES[row] == site and SICK[row] == answer]
            out = len(set(mine) & set(rows["test"]))
            assert abs(out - 0.2 * len(mine)) < 1
        assert [SITES[rows["train"][i]] for i in made.groups[number].tolist()] == [site] * len(made.groups[number])


@pytest.mark.parametrize(
    ("cells", "task", "found", "targets"),
    [
        (["b", "a", "b"], "", "binary", [1, 0, 1]),
        (["3", "10", "3"], "", "binary", [0, 1, 0]),
        (["3", "10", "7"], "", "classification", [0, 2, 1]),
        (["0.5", "1", "2"], "", "regression", [0.5, 1.0, 2.0]),
        (["1", "2", "1"], "regression", "regression", [1.0, 2.0, 1.0]),
        (["1", "2", "1"], "classification", "classification", [0, 1, 0]),
    ],
)
def test_what_a_target_is(cells: list[str], task: str, found: str, targets: list[float]) -> None:
    got, numbers, _ = read_target("mine", "t", cells, task)
    assert (got, numbers.tolist()) == (found, targets)


def test_categories_that_no_training_row_has() -> None:
    """They are zeros, and the note says how many."""
    odd = list(COLOUR)
    rows = rows_of(table_dataset("mine", table(), TableOptions("sick")))
    odd[rows["test"][0]] = "violet"
    made = table_dataset("mine", table(colour=odd), TableOptions("sick"))
    assert made.test.x[0, 2:].tolist() == [0.0, 0.0, 0.0]
    assert "1 test rows with a category that no training row has" in made.note


def test_clients_of_one_class_are_named() -> None:
    sick = ["no" if site == "c" else cell for cell, site in zip(SICK, SITES, strict=True)]
    assert "of one class only: c" in table_dataset("mine", table(sick=sick), TableOptions("sick")).note
    nobodys = Table(table(sick=["a"] * 99 + ["b"]).columns, [""] * 100)
    assert "of one class only" not in table_dataset("mine", nobodys, TableOptions("sick", test=0.01, seed=1)).note


def test_a_tasks_arguments_come_along() -> None:
    made = table_dataset("mine", table(sick=["1", "2"] * 50), TableOptions("sick", task="regression(loss='huber')"))
    assert (made.task, made.classes, made.train.y.dtype) == ("regression(loss='huber')", 1, torch.float32)
    made = table_dataset("mine", table(), TableOptions("sick", task="classification(label_smoothing=0.1)"))
    assert (made.task, made.classes) == ("classification(label_smoothing=0.1)", 2)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (TableOptions("sik"), r"has no column 'sik' \(did you mean 'sick'\?\)"),
        (TableOptions("sick", categories=("sick",)), "is the target"),
        (TableOptions("sick", test=1.0), "above 0 and below 1"),
        (TableOptions("sick", task="regression"), "is '.*' in row 1, and regression needs a number"),
        (TableOptions("colour", task="binary"), "has 3 different values, and binary needs 2"),
        (TableOptions("age"), "the target 'age' is missing in row 4"),
        (TableOptions("sick", task="segmentation"), "a table's task is"),
        (TableOptions("sick", task="binry"), "there is no task 'binry'"),
    ],
)
def test_refusals(options: TableOptions, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        table_dataset("mine", table(), options)


@pytest.mark.parametrize(("name", "rows", "task"), [("diabetes", 442, "regression"), ("breast-cancer", 569, "binary")])
def test_tables_that_come_with_scikit_learn(name: str, rows: int, task: str) -> None:
    made = fs.load_dataset(name)
    assert (len(made.train) + len(made.test), made.task) == (rows, task)
    assert made.train.x.mean(0).abs().max() < 1e-5
    again = fs.load_dataset(name)
    assert torch.equal(made.train.x, again.train.x)
    model = fs.build_model("mlp(hidden=(8,))", made.input_shape, made.classes, seed=0)
    clients = made.train.split(fs.partition(made.labels, "dirichlet(alpha=1.0)", clients=3, seed=0))
    history = fs.Federation(model, clients, made.test, task=task, rounds=15, lr=0.05).fit()
    assert history.score is not None
    assert history.score > 0.97 if task == "binary" else history.score < 0.7


HEART = Path(os.environ.get("FEDSTRATA_DATA", Path(__file__).parents[3] / "shared" / "data")) / "heart-disease"


@pytest.mark.skipif(not HEART.is_dir(), reason="needs the four files of heart-disease")
@pytest.mark.parametrize(
    ("name", "sizes", "features"),
    [
        ("heart-disease", {"Cleveland": 303, "Budapest": 294, "Switzerland": 123, "Long Beach": 200}, 31),
        ("heart-disease(complete=True)", {"Cleveland": 303, "Budapest": 261, "Switzerland": 46, "Long Beach": 130}, 15),
    ],
)
def test_four_hospitals(name: str, sizes: dict[str, int], features: int) -> None:
    """Patients as the files have them; the second as in FLamby. A third is held out, and everybody learns together."""
    made = fs.load_dataset(name, HEART.parent)
    assert (made.task, made.input_shape, made.class_names) == ("binary", (features,), ("no", "yes"))
    assert len(made.train) + len(made.test) == sum(sizes.values())
    for place, group in zip(made.group_names, made.groups, strict=True):
        assert len(group) == pytest.approx(0.67 * sizes[place], abs=2)
    model = fs.build_model("logreg", made.input_shape, made.classes, seed=0)
    history = fs.Federation(model, made.train.split(made.groups), made.test, task=made.task, rounds=15, lr=0.1).fit()
    assert history.score is not None
    assert history.score > 0.8
