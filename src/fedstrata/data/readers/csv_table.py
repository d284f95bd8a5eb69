"""A table of the user's own in a text file: a header, then a row per example."""

from __future__ import annotations

import csv
from pathlib import Path

from fedstrata.core.own_code import PathText
from fedstrata.data.cells import is_missing, number_of, plain
from fedstrata.data.examples import Dataset
from fedstrata.data.readers.build import join_notes
from fedstrata.data.tables import Standardise, Table, TableOptions, table_dataset
from fedstrata.errors import UsageError, did_you_mean, one_line


def csv_table(
    data_dir: Path | None,
    asked: str = "",
    *,
    path: PathText,
    target: str,
    client: str = "",
    categories: tuple[str, ...] = (),
    drop: tuple[str, ...] = (),
    standardise: Standardise = "federation",
    test: float = 0.2,
    seed: int = 0,
    delimiter: str = ",",
    task: str = "",
) -> Dataset:
    """A table of your own, a CSV file with column names in its first row (columns of words become categories).

    Numbers are standardised, categories one-hot, missing values at the mean with an indicator; a run's header says what
    was done. Statistics are each client's count, mean and spread, of its training rows alone.

    Args:
        data_dir: not needed.
        asked: the task that a run asks for, which goes before `task`.
        path: of the file.
        target: the column to predict.
        client: the column that says whose row it is; without it the rows are dealt out by the partition.
        categories: columns of numbers that name categories.
        drop: columns to leave out, such as a patient's number.
        standardise: numbers to mean 0 and deviation 1 over the `federation`, per `client`, or not at all.
        test: share of each client's rows that is held out, the same share of every class.
        seed: of this choice.
        delimiter: between two cells.
        task: `binary`, `classification` or `regression`, with arguments where wanted; found from the target where
            empty.
    """
    if len(delimiter) != 1 or delimiter in '\n\r"':
        raise UsageError(f"csv: the delimiter is one character, not {delimiter!r}")
    columns = read_columns(Path(path), delimiter)
    for column in (*([client] if client else []), *drop):
        if column not in columns:
            raise UsageError(f"csv has no column '{column}'{did_you_mean(column, columns)}")
    if target in (client, *drop):
        raise UsageError(f"csv: '{target}' is the target, and cannot be the client or dropped too")
    rows = len(next(iter(columns.values())))
    owners = [plain(cell) for cell in columns[client]] if client else [""] * rows
    gaps = [row for row, owner in enumerate(owners, 1) if client and is_missing(owner)]
    if gaps:
        raise UsageError(f"csv: the client '{client}' is missing in row {gaps[0]}")
    kept = {name: cells for name, cells in columns.items() if name not in (client, *drop)}
    options = TableOptions(target, categories, standardise, test, seed, asked or task)
    count = len(set(owners))
    whose = f" of {'one client only' if count == 1 else f'{count} clients'}" if client else ""
    left_out = f"left out: {', '.join(drop)}" if drop else ""
    note = join_notes(f"{rows:,} rows{whose}, {test:g} of them held out for testing", left_out)
    return table_dataset("csv", Table(kept, owners), options, note)


def read_columns(path: Path, delimiter: str = ",") -> dict[str, list[str]]:
    """The columns by name; every row has as many cells as the header.

    Raises:
        UsageError: if the file cannot be read, is empty, or is no such table, with the first row that is wrong.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header, delimiter)
            rows: list[list[str]] = []
            for cells in reader:
                if len(cells) != len(header) and cells:
                    cells_text = f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}"
                    raise UsageError(
                        f"{path}: row {len(rows) + 1} (line {reader.line_num}) has {cells_text}, and the header has "
                        f"{len(header)}"
                    )
                if cells:
                    rows.append(cells)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text in UTF-8") from None
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: {one_line(str(error), 200)}") from None
    if not rows:
        raise UsageError(f"{path} has a header, but no rows")
    return {name: [cells[at] for cells in rows] for at, name in enumerate(header)}


def _check_header(path: Path, header: list[str], delimiter: str) -> None:
    """Refuse a header without names, with one that is there twice, or that was written with another delimiter."""
    if not header:
        raise UsageError(f"{path} is empty: the first row has the names of the columns")
    other = next((mark for mark in ";,\t|" if mark != delimiter and mark in header[0]), None)
    if len(header) == 1 and other is not None:
        shown = one_line(repr(header[0]), 60)
        raise UsageError(f"{path} has one column only, {shown}: write delimiter={other!r} if that is between two cells")
    for number, name in enumerate(header, 1):
        if not name:
            raise UsageError(f"{path}: column {number} has no name in the first row")
        if header.count(name) > 1:
            data = "" if number_of(name) is None else ": its first row must name the columns, and looks like data"
            raise UsageError(f"{path} has two columns '{name}'{data}")
