"""SST-2: sentences of film reviews, good or bad (Socher et al., 2013), in GLUE's form (Wang et al., 2019).

The files are `train.tsv`, `dev.tsv` and `test.tsv` with the columns `sentence` and `label`. GLUE's own `test.tsv` has
no labels: the test part is then `dev.tsv`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

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
from fedstrata.data.readers.build import join_notes
from fedstrata.data.readers.labelled_texts import LabelledTexts, labelled_dataset
from fedstrata.data.texts import TextOptions

_FILES = re.compile(r"(?:^|/)(train|dev|test)\.tsv$")
_LIMIT = 64 << 20
CLASSES = ("negative", "positive")


def sst2(
    data_dir: Path | None,
    given_tokenizer: str = "",
    *,
    length: int | None = None,
    examples: int | None = None,
    test_examples: int | None = None,
    tokenizer: ModelName = "",
    task: Literal["classification", "next_token"] = "classification",
) -> Dataset:
    """Sentences of film reviews, good or bad, 2 classes, tokenized by the model's tokenizer (GLUE's SST-2).

    Args:
        data_dir: the folder with the files, an archive of them, or one that holds it.
        given_tokenizer: the model's.
        length: tokens of a text at most; 128, or as many as the model's tokenizer allows, without it.
        examples: only so many to train on, the same in every run.
        test_examples: only so many to test.
        tokenizer: a folder or a name on the Hub, in the place of the model's own.
        task: good or bad, or the next token at every position.
    """
    name = "sst-2"
    folder = data_folder(name, data_dir)
    found = find_archives(folder, has_file("train.tsv"), re.compile("sst"))
    for archive in nearest_name(folder, found, "sst"):
        parts = {inner.removesuffix(".tsv"): data for inner, data in archive.gather(_FILES, _LIMIT).items()}
        read = {part: _read(archive, f"{part}.tsv", data) for part, data in parts.items()}
        tests = [part for part in ("test", "dev") if read.get(part) is not None]
        train = read.get("train")
        if train is not None and tests:
            test = read[tests[0]]
            assert test is not None
            options = TextOptions(name, tokenizer or given_tokenizer, length, task == "next_token")
            texts = LabelledTexts(train, test, CLASSES, join_notes(f"tested on {tests[0]}.tsv"))
            return labelled_dataset(options, texts, examples, test_examples)
    raise missing_error(name, folder, "train.tsv, dev.tsv, test.tsv with the columns sentence and label")


def _read(archive: Archive, inner: str, data: bytes) -> tuple[list[str], list[int]] | None:
    """The sentences and labels of a file; None if it is of another form, or has no labels."""
    try:
        header, *lines = data.decode("utf-8-sig").splitlines()
    except (UnicodeDecodeError, ValueError):
        return None
    columns = [name.strip() for name in header.split("\t")]
    if sorted(columns) != ["label", "sentence"]:
        return None
    texts, labels = [], []
    for number, line in enumerate(lines, 2):
        cells = line.split("\t")
        if len(cells) != 2 or cells[columns.index("label")].strip() not in ("0", "1"):
            raise damaged_error(archive.where(inner), f"line {number} is no sentence with a label of 0 or 1")
        texts.append(cells[columns.index("sentence")].strip())
        labels.append(int(cells[columns.index("label")]))
    return texts, labels
