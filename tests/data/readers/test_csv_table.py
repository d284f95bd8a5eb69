"""Tables of the user's own: what becomes of columns, whose rows they are, and one sentence for each thing wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.data.datasets import load_dataset
from fedstrata.data.partitions import partition
from fedstrata.data.readers.csv_table import read_columns
from fedstrata.errors import UsageError

TABLE = """\
id,site,age,sex,cp,sick
1,north,50,m,1,yes
2,north,60,f,2,no
3,north,?,m,1,yes
4,north,40,f,3,no
5,south,70,m,1,yes
6,south,30,f,2,no
7,south,20,m,1,yes
8,south,90,f,2,no
9,south,10,f,1,no
10,south,35,m,1,yes
"""


def table(folder: Path, text: str = TABLE) -> Path:
    path = folder / "patients.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_columns_clients_and_targets(tmp_path: Path) -> None:
    """Ages against NumPy's mean and deviation of the training rows, over both sites and per site.

    The same rows are held out whatever is done to numbers, so those that stay as they are say which ones.
    """
    given = f"path='{table(tmp_path)}', target='sick', client='site', categories=('cp',), drop=('id',), test=0.5"
    how = {name: load_dataset(f"csv({given}, standardise='{name}')") for name in ("none", "federation", "client")}
    plain = how["none"]
    assert (plain.task, plain.classes, plain.class_names) == ("binary", 1, ("no", "yes"))
    assert plain.group_names == ("north", "south")
    assert len(plain.train) + len(plain.test) == 10
    assert torch.cat(plain.groups).tolist() == list(range(len(plain.train)))
    assert "10 rows of 2 clients, 0.5 of them held out for testing; left out: id" in plain.note
    assert "1 column of numbers standardised over the federation, 2 one-hot" in how["federation"].note
    ages = plain.train.x[:, 0].numpy().astype(np.float64)
    gap = plain.train.x[:, 1].numpy() == 1 if "indicator" in plain.note else np.zeros(len(ages), bool)
    rows_of: dict[str, list[Any]] = {"federation": [slice(None)], "client": [group.numpy() for group in plain.groups]}
    for name, rows in rows_of.items():
        found = how[name].train.x[:, 0].numpy()
        for some in rows:
            there = ages[some][~gap[some]]
            expected = np.where(gap[some], 0.0, (ages[some] - there.mean()) / (there.std() or 1.0))
            np.testing.assert_allclose(found[some], expected, atol=1e-6)


def test_one_sites_numbers_by_hand(tmp_path: Path) -> None:
    """The first column is as it is, the second one-hot in the order of the words; every row is there once."""
    rows = [(value, "ab"[value % 2], value % 3) for value in range(30)]
    text = "size;kind;label\n" + "".join(f"{a};{b};{c}\n" for a, b, c in rows)
    data = load_dataset(f"csv(path='{table(tmp_path, text)}', target='label', delimiter=';', standardise='none')")
    assert (data.task, data.classes, data.groups) == ("classification", 3, ())
    found = sorted(zip(torch.cat([data.train.x, data.test.x]).tolist(), [*data.train.y, *data.test.y], strict=True))
    assert found == [([float(a), float(b == "a"), float(b == "b")], c) for a, b, c in rows]
    assert len(data.test) == pytest.approx(6, abs=3)


def test_a_number_is_regression_and_a_task_can_be_said(tmp_path: Path) -> None:
    text = "a,y\n" + "".join(f"{n},{n / 7}\n" for n in range(40))
    assert load_dataset(f"csv(path='{table(tmp_path, text)}', target='y')").task == "regression"
    text = "a,y\n" + "".join(f"{n},{n % 5}\n" for n in range(40))
    path = table(tmp_path, text)
    assert load_dataset(f"csv(path='{path}', target='y')").task == "classification"
    assert load_dataset(f"csv(path='{path}', target='y', task='regression')").train.y.dtype == torch.float32


def test_the_file_is_read_as_spreadsheets_write_it(tmp_path: Path) -> None:
    """A byte order mark, quotes around commas, line ends of Windows, blank lines."""
    path = tmp_path / "t.csv"
    path.write_bytes('\ufeffname,y\r\n"a, b",1\r\n\r\nc,2\r\n'.encode())
    assert read_columns(path) == {"name": ["a, b", "c"], "y": ["1", "2"]}


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("", "target='y'", r"patients\.csv is empty: the first row has the names of the columns"),
        ("a,y\n", "target='y'", "has a header, but no rows"),
        ("a,y\n1,2\n3\n", "target='y'", r"row 2 \(line 3\) has 1 cell, and the header has 2"),
        ("a,y\n\n1,2,3\n", "target='y'", r"row 1 \(line 3\) has 3 cells, and the header has 2"),
        ("a,a,y\n1,2,3\n", "target='y'", "has two columns 'a'"),
        (
            "1.0,1.0,y\n1,2,3\n",
            "target='y'",
            r"two columns '1\.0': its first row must name the columns, and looks like",
        ),
        ("a,,y\n1,2,3\n", "target='y'", "column 2 has no name in the first row"),
        (TABLE, "target='ill'", "csv has no column 'ill'"),
        (TABLE, "target='sick', client='sites'", r"csv has no column 'sites' \(did you mean 'site'\?\)"),
        (TABLE, "target='sick', categories=('pc',)", r"csv has no column 'pc'"),
        (TABLE, "target='sick', drop=('sick',)", "'sick' is the target, and cannot be the client or dropped too"),
        (TABLE, "target='sick', test=1.5", "the share of test rows is above 0 and below 1, not 1.5"),
        (TABLE, "target='sick', delimiter=''", "the delimiter is one character, not ''"),
        (TABLE, "target='sick', task='segmentation'", "a table's task is binary, classification or regression"),
        (TABLE, "target='age'", "the target 'age' is missing in row 3"),
        (TABLE.replace("5,south", "5,"), "target='sick', client='site'", "the client 'site' is missing in row 5"),
        ("a,y\n1,2\n1,3\n", "target='y', test=0.001", "too few to hold out 0.001 of them"),
        ("a,y\n" + "1,yes\n2, yes\n" * 9, "target='y'", "'y' is 'yes' in every row: there is nothing to tell apart"),
        ("a;y\n1,5;2\n", "target='y'", r"has one column only, 'a;y': write delimiter=';' if that is between"),
        ("a,y\n1,2\n", "target='y', delimiter=';'", r"has one column only, 'a,y': write delimiter=','"),
        ("y\n" + "1\n2\n" * 9, "target='y'", "no column but the target"),
        ('a,y\n"1,2\n', "target='y'", "line 2: unexpected end of data"),
    ],
)
def test_one_sentence_for_each_thing_wrong(tmp_path: Path, text: str, arguments: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_dataset(f"csv(path='{table(tmp_path, text)}', {arguments})")


def test_a_column_of_one_client_is_that_client(tmp_path: Path) -> None:
    """It can be trained as such, and is told to be the only one where more are wanted, however cells are written."""
    path = table(tmp_path, "site,a,y\n" + "".join(f"{'1' if n % 3 else ' 1.0'},{n},{n % 2}\n" for n in range(30)))
    data = load_dataset(f"csv(path='{path}', target='y', client='site')")
    assert (data.group_names, "30 rows of one client only" in data.note) == (("1",), True)
    assert len(partition(data.labels, "natural", 0, 0, data.groups)) == 1
    with pytest.raises(UsageError, match="the dataset has one natural client only, not 3"):
        partition(data.labels, "natural", 3, 0, data.groups)
    assert load_dataset(f"csv(path='{path}', target='y')").groups == ()


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*nothing\.csv: no such file"):
        load_dataset(f"csv(path='{tmp_path / 'nothing.csv'}', target='y')")
    with pytest.raises(UsageError, match=r"cannot read .*: is a directory"):
        load_dataset(f"csv(path='{tmp_path}', target='y')")
    path = tmp_path / "latin.csv"
    path.write_bytes(b"a,y\n\xff,1\n")
    with pytest.raises(UsageError, match="is no text in UTF-8"):
        load_dataset(f"csv(path='{path}', target='y')")
    with pytest.raises(UsageError, match="dataset 'csv' needs the argument 'target'"):
        load_dataset(f"csv(path='{path}')")
