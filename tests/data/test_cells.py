"""Cells of a table: numbers and words, whatever way they are written."""

from __future__ import annotations

import numpy as np
import pytest

from fedstrata.data.cells import number_of, numbers_or_words, plain
from fedstrata.data.tables import Moments, Table, TableOptions, read_target, table_dataset
from fedstrata.errors import UsageError


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        (" yes ", "yes"),
        ("1", "1"),
        ("1.0", "1"),
        ("-20.00", "-20"),
        ("0.0", "0"),
        ("1e0", "1e0"),
        ("0.10", "0.10"),
        ("1.10", "1.10"),
        ("007.0", "007.0"),
        ("007", "007"),
        ("1_0", "1_0"),
        ("12345678901234567891", "12345678901234567891"),
        ("inf", "inf"),
    ],
)
def test_one_way_of_writing_a_value(cell: str, written: str) -> None:
    assert plain(cell) == written
    assert plain(written) == written


def test_what_is_a_number() -> None:
    assert [number_of(cell) for cell in (" 1.5 ", "-2e3", "1_0", "inf", "nan", "1O", "1,5")] == [1.5, -2000.0] + [
        None
    ] * 5


def test_targets_and_categories_that_are_written_in_two_ways() -> None:
    assert read_target("it", "y", ["0", "1", "1.0", " 1"], "")[:1] == ("binary",)
    assert read_target("it", "y", ["yes", "yes ", "no"], "")[1:][1] == ["no", "yes"]
    columns = {"c": ["1", "1.0", "2", " 2"] * 5, "y": ["a", "b"] * 10}
    made = table_dataset("it", Table(columns, [""] * 20), TableOptions("y", categories=("c",)))
    assert made.input_shape == (2,)


def numbers(count: int, *others: str) -> list[str]:
    return [str(n / 7) for n in range(count)] + list(others)


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        (numbers(9, "1O"), "is a number in most rows, but '1O' in row 10: mend it, leave it empty, or so"),
        (numbers(9, "inf", "?"), "is a number in most rows, but 'inf' in row 10"),
        (numbers(9, "1,5"), "has '1,5' in row 10, and numbers are written with a decimal point: mend it, or so"),
        (["1,5", "2,5", "?", "3,0"], "has '1,5' in row 1, and numbers are written with a decimal point"),
        (numbers(8, "x", "y"), None),
        (["a", "b", ""], None),
    ],
)
def test_a_cell_that_is_none_among_numbers(cells: list[str], why: str | None) -> None:
    if why is None:
        assert numbers_or_words("it", cells, "so") is None
        return
    with pytest.raises(UsageError, match=f"^it {why}"):
        numbers_or_words("it", cells, "so")


def test_the_sentence_says_how_to_have_it_otherwise() -> None:
    cells, labels = numbers(39, "1O"), ["a", "b"] * 20
    table = Table({"a": cells, "y": labels}, [""] * 40)
    with pytest.raises(UsageError, match=r"it: the column 'a' .* '1O' in row 40.*categories=\('a',\)"):
        table_dataset("it", table, TableOptions("y"))
    assert table_dataset("it", table, TableOptions("y", categories=("a",))).input_shape[0] > 20
    with pytest.raises(UsageError, match=r"it: the target 'a' .* '1O' in row 40.*task='classification'"):
        table_dataset("it", table, TableOptions("a"))
    with pytest.raises(UsageError, match="it: the target 'a' is '1O' in row 40, and regression needs a number"):
        table_dataset("it", table, TableOptions("a", task="regression"))
    assert table_dataset("it", table, TableOptions("a", task="classification")).classes == 40


@pytest.mark.parametrize("value", [0.1, 1e9 + 0.1, -3.3e-7, 0.0])
def test_a_constant_column_has_no_deviation_but_rounding(value: float) -> None:
    joined = Moments.of(np.full(37, value))
    for count in (11, 100, 3):
        joined = joined.join(Moments.of(np.full(count, value)))
    assert joined.deviation == 1.0
    columns = {"a": [repr(value)] * 37, "b": [str(n % 5) for n in range(37)], "y": ["u", "v", "v"] * 12 + ["u"]}
    made = table_dataset("it", Table(columns, [""] * 37), TableOptions("y"))
    assert made.train.x[:, 0].abs().max() < 1e-6
    assert Moments.of(1e9 + np.arange(3.0)).deviation == pytest.approx(np.std([0, 1, 2]))
