"""Texts of the user's own in a file: a table with a column of texts (CSV, TSV, JSON lines), or a text per line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstrata.core.hugging_face import ModelName
from fedstrata.core.lazy import torch
from fedstrata.core.own_code import PathText
from fedstrata.core.rng import derive
from fedstrata.data.cells import is_missing, plain
from fedstrata.data.examples import Dataset
from fedstrata.data.learnt import kind_of
from fedstrata.data.readers.build import join_notes
from fedstrata.data.readers.csv_table import read_columns
from fedstrata.data.tables import hold_out, read_target, tenths
from fedstrata.data.texts import TextOptions, TextReader
from fedstrata.errors import UsageError, did_you_mean, one_line

TEXTS = ("text", "sentence")
LABELS = ("label", "class", "target", "category", "topic")
"""Names of columns that are found by themselves, in this order."""
Columns = dict[str, list[str]]


class _Rows(NamedTuple):
    """What a file holds: a text per row, what it is labelled with, and whose it is."""

    texts: list[str]
    labels: list[str]
    owners: list[str]


def text(
    data_dir: Path | None,
    asked: str = "",
    given_tokenizer: str = "",
    *,
    path: PathText,
    test_path: PathText = "",
    text: str = "",
    label: str = "",
    client: str = "",
    test: float = 0.2,
    seed: int = 0,
    length: int | None = None,
    tokenizer: ModelName = "",
    task: str = "",
) -> Dataset:
    """Texts of your own, a file with a text and a label per row (.csv, .tsv, .jsonl), or with a text per line (.txt).

    They are tokenized by the model's tokenizer. Without labels, or if the task is `next_token`, a text's own tokens are
    what is predicted.

    Args:
        data_dir: not needed.
        asked: the task that a run asks for, which goes before `task`.
        given_tokenizer: the model's.
        path: of the file.
        test_path: of a file of the same form to test on; without it a share of the rows is held out.
        text: the column of texts; `text` or `sentence` where it is not named.
        label: the column of labels; `label`, `class`, `target`, `category` or `topic` where it is not named.
        client: the column that says whose row it is; without it the rows are dealt out by the partition.
        test: share of each client's rows that is held out, the same share of every class.
        seed: of this choice.
        length: tokens of a text at most; 128, or as many as the model's tokenizer allows, without it.
        tokenizer: a folder or a name on the Hub, in the place of the model's own.
        task: `classification`, `binary`, `regression` or `next_token`; found from the labels where empty.
    """
    if not test_path and not 0 < test < 1:
        raise UsageError(f"text: the share of test rows is above 0 and below 1, not {test}")
    files = [_read_rows(Path(one), text, label, client, asked or task) for one in (path, test_path) if one]
    learnt, targets, names = _read_labels(files, label, asked or task)
    rows = _Rows(*(list(itertools.chain(*parts)) for parts in zip(*files, strict=True)))
    owner, whose = _number_owners(rows.owners)
    if test_path:
        held_out = np.arange(len(rows.texts)) >= len(files[0].texts)
    else:
        dealt = np.zeros(len(owner), np.int64) if targets is None else _classes(targets, learnt)
        held_out = hold_out(owner, dealt, test, derive(seed, "table", "text"))
    reader = TextReader(TextOptions("text", tokenizer or given_tokenizer, length, targets is None))
    note = join_notes(f"{len(rows.texts):,} texts, {int(held_out.sum()):,} of them for testing", reader.note)
    return _build(reader, rows, (learnt, targets, names), owner, whose, held_out, note)


def _build(
    reader: TextReader,
    rows: _Rows,
    targets: tuple[str, Any, tuple[str, ...]],
    owner: Any,
    whose: tuple[str, ...],
    held_out: Any,
    note: str,
) -> Dataset:
    """The dataset of texts, client after client, a part of them held out."""
    learnt, values, names = targets
    parts, groups = [], []
    for chosen in (~held_out, held_out):
        order = np.flatnonzero(chosen)[np.argsort(owner[chosen], kind="stable")]
        labels = np.zeros(len(order), np.int64) if values is None else values[order]
        parts.append((order, reader.read([rows.texts[place] for place in order], torch.from_numpy(labels))))
        natural = range(len(whose))
        groups.append(tuple(torch.from_numpy(np.flatnonzero(owner[order] == number)) for number in natural))
    train = parts[0][0]
    if not len(train) or held_out.all() or not held_out.any():
        raise UsageError("text: there are too few rows to train on some and test on others")
    dealt = np.zeros(len(train), np.int64) if values is None else _classes(values[train], learnt)
    classes = {"classification": len(names), "next_token": reader.vocabulary}.get(kind_of("text", learnt), 1)
    has_clients = whose != ("",)
    return Dataset(
        "text",
        parts[0][1],
        parts[1][1],
        classes,
        names,
        groups[0] if has_clients else (),
        whose if has_clients else (),
        note,
        learnt,
        torch.from_numpy(dealt),
        groups[1] if has_clients else (),
    )


def _classes(targets: Any, learnt: str) -> Any:
    """A class per row, to deal them out by."""
    return tenths(targets) if kind_of("text", learnt) == "regression" else targets.astype(np.int64)


def _number_owners(owners: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """(each row's client by number, the clients' names)."""
    whose = tuple(sorted(set(owners)))
    place = {name: number for number, name in enumerate(whose)}
    return np.array([place[name] for name in owners], np.int64), whose


def _read_labels(files: Sequence[_Rows], label: str, asked: str) -> tuple[str, Any, tuple[str, ...]]:
    """(what is learnt, a number per row, the classes' names); no numbers where a text's own tokens are the targets."""
    next_token = bool(asked) and kind_of("text", asked) == "next_token"
    if next_token or not any(rows.labels for rows in files):
        return asked or "next_token", None, ()
    if not all(rows.labels for rows in files):
        raise UsageError("text: one of the two files has labels, and the other has none")
    learnt, targets, names = read_target(
        "text", label or "label", [cell for rows in files for cell in rows.labels], asked
    )
    return learnt, targets, tuple(names)


def _read_rows(path: Path, text: str, label: str, client: str, asked: str) -> _Rows:
    """The texts, labels and owners of a file."""
    columns = _read_file(path)
    bodies = columns[_find(path, columns, "text", text, TEXTS)]
    for row, body in enumerate(bodies, 1):
        if not body.strip():
            raise UsageError(f"{path}: row {row} has no text")
    wants_labels = not (asked and kind_of("text", asked) == "next_token")
    there = label or next((name for name in LABELS if name in columns), "")
    if asked and wants_labels and not there:
        raise UsageError(
            f"{path}: no column is called {' or '.join(LABELS)}: say label='…' (there are {', '.join(columns)})"
        )
    labels = columns[_find(path, columns, "label", there, LABELS)] if there and wants_labels else []
    missing = next((row for row, cell in enumerate(labels, 1) if is_missing(cell)), None)
    if missing is not None:
        raise UsageError(f"{path}: row {missing} has no label")
    owners = [""] * len(bodies)
    if client:
        owners = [plain(cell) for cell in columns[_find(path, columns, "client", client, ())]]
        gap = next((row for row, owner in enumerate(owners, 1) if is_missing(owner)), None)
        if gap is not None:
            raise UsageError(f"{path}: the client '{client}' is missing in row {gap}")
    return _Rows(bodies, labels, owners)


def _find(path: Path, columns: Columns, what: str, named: str, usual: Sequence[str]) -> str:
    """The name of a column: the one that is given, or a usual one."""
    if named:
        if named not in columns:
            raise UsageError(f"{path} has no column '{named}'{did_you_mean(named, columns)}")
        return named
    found = next((name for name in usual if name in columns), None)
    if found is None:
        raise UsageError(
            f"{path}: no column is called {' or '.join(usual)}: say {what}='…' (there are {', '.join(columns)})"
        )
    return found


def _read_file(path: Path) -> Columns:
    """The columns of a file by its form, which its name tells."""
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv"):
        return read_columns(path, "," if kind == ".csv" else "\t")
    if kind not in (".jsonl", ".txt"):
        raise UsageError(f"text: {path.name} is no .csv, .tsv, .jsonl or .txt file")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text in UTF-8") from None
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise UsageError(f"{path} is empty")
    return {"text": lines} if kind == ".txt" else _read_json(path, lines)


def _read_json(path: Path, lines: Sequence[str]) -> Columns:
    """The columns of JSON objects, one in each line, all with the same names."""
    rows: list[dict[str, str]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}: row {number} is no JSON: {one_line(str(error), 100)}") from None
        if not isinstance(row, dict) or not all(isinstance(v, str | int | float) for v in row.values()):
            raise UsageError(f"{path}: row {number} is no JSON object of texts and numbers")
        if rows and row.keys() != rows[0].keys():
            raise UsageError(f"{path}: row {number} has other names than the first one")
        rows.append({name: str(value) for name, value in row.items()})
    return {name: [row[name] for row in rows] for name in rows[0]}
