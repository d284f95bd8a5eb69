"""AG's News: what a piece of news is about, four topics (Zhang, Zhao and LeCun, 2015).

Upstream's form is `train.csv` and `test.csv`: class number from 1 on, title, description, without a header. Also read:
`train.tsv` (or, where there is none, `dev.tsv`) and `test.tsv`, a text and the name of its topic in each line.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from fedstrata.core.hugging_face import ModelName
from fedstrata.data.examples import Dataset
from fedstrata.data.readers.archives import (
    Archive,
    damaged_error,
    data_folder,
    find_archives,
    has_file,
    missing_error,
    nearest_name,
)
from fedstrata.data.readers.labelled_texts import LabelledTexts, Texts, labelled_dataset
from fedstrata.data.texts import TextOptions

_FILES = re.compile(r"(?:^|/)(train\.csv|test\.csv|train\.tsv|dev\.tsv|test\.tsv)$")
_LIMIT = 256 << 20
CLASSES = ("World", "Sports", "Business", "Sci/Tech")
WHOLE = 120_000
"""Training examples upstream."""


def ag_news(
    data_dir: Path | None,
    given_tokenizer: str = "",
    *,
    length: int | None = None,
    examples: int | None = None,
    test_examples: int | None = None,
    tokenizer: ModelName = "",
) -> Dataset:
    """News by topic, 4 classes, tokenized by the model's tokenizer (AG's News, CSV or TSV).

    Args:
        data_dir: the folder with the files, an archive of them, or one that holds it.
        given_tokenizer: the model's.
        length: tokens of a text at most; 128, or as many as the model's tokenizer allows, without it.
        examples: only so many to train on, the same in every run.
        test_examples: only so many to test.
        tokenizer: a folder or a name on the Hub, in the place of the model's own.
    """
    name = "ag-news"
    folder = data_folder(name, data_dir)
    found = find_archives(folder, has_file("test.csv", "test.tsv"), re.compile("ag.?news"))
    for archive in nearest_name(folder, found, "agnews"):
        read = _read_files(archive, archive.gather(_FILES, _LIMIT))
        if read is not None:
            trained, train, test = read
            known = len(train[0])
            part = f"a subset, {known:,} of {WHOLE:,} training examples" if known < WHOLE else ""
            note = "; ".join(filter(None, [f"trained on {trained}", part]))
            options = TextOptions(name, tokenizer or given_tokenizer, length)
            return labelled_dataset(options, LabelledTexts(train, test, CLASSES, note), examples, test_examples)
    raise missing_error(name, folder, "train.csv and test.csv, or train.tsv or dev.tsv, and test.tsv")


def _read_files(archive: Archive, files: dict[str, bytes]) -> tuple[str, Texts, Texts] | None:
    """(the file to train on, its texts, the test's); None if they are of another dataset."""
    for train, test, read in (
        ("train.csv", "test.csv", _read_csv),
        ("train.tsv", "test.tsv", _read_tsv),
        ("dev.tsv", "test.tsv", _read_tsv),
    ):
        if train in files and test in files:
            parts = [read(archive, inner, files[inner]) for inner in (train, test)]
            if parts[0] is None or parts[1] is None:
                return None
            return train, parts[0], parts[1]
    return None


def _decode(archive: Archive, inner: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise damaged_error(archive.where(inner), "it is no text in UTF-8") from None


def _read_tsv(archive: Archive, inner: str, data: bytes) -> Texts | None:
    """A text and a topic in each line; None where the first line has no topic."""
    texts: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(_decode(archive, inner, data).split("\n"), 1):
        if not line.strip():
            continue
        body, _, topic = line.rstrip("\r").rpartition("\t")
        if topic.strip() not in CLASSES:
            if not texts:
                return None
            raise damaged_error(archive.where(inner), f"line {number} does not end in one of {', '.join(CLASSES)}")
        texts.append(" ".join(body.split()))
        labels.append(CLASSES.index(topic.strip()))
    return (texts, labels) if texts else None


def _read_csv(archive: Archive, inner: str, data: bytes) -> Texts | None:
    """Class number, title and description in each row; None where the first row is of another form."""
    texts: list[str] = []
    labels: list[int] = []
    for cells in csv.reader(io.StringIO(_decode(archive, inner, data), newline="")):
        if len(cells) != 3 or cells[0] not in ("1", "2", "3", "4"):
            if not texts:
                return None
            raise damaged_error(archive.where(inner), f"row {len(texts) + 1} is no class, title and description")
        texts.append(" ".join(" ".join(cells[1:]).replace("\\", " ").split()))
        labels.append(int(cells[0]) - 1)
    return (texts, labels) if texts else None
