"""From texts with class numbers to a `Dataset`: what the readers of texts do last."""

from __future__ import annotations

from typing import NamedTuple

from fedstrata.core.lazy import torch
from fedstrata.data.examples import Dataset
from fedstrata.data.readers.build import join_notes
from fedstrata.data.texts import TextOptions, TextReader, draw_texts
from fedstrata.errors import UsageError

Texts = tuple[list[str], list[int]]
"""Texts and their class numbers."""


class LabelledTexts(NamedTuple):
    """What was read from files."""

    train: Texts
    test: Texts
    class_names: tuple[str, ...]
    note: str = ""


def labelled_dataset(
    options: TextOptions, texts: LabelledTexts, examples: int | None = None, test_examples: int | None = None
) -> Dataset:
    """The dataset of texts that files hold, tokenized; of so many of them."""
    name, reader = options.dataset, TextReader(options)
    parts, said, labels = [], [], []
    for what, (rows, numbers), wanted in (
        ("training", texts.train, examples),
        ("test", texts.test, test_examples),
    ):
        if not rows:
            raise UsageError(f"{name} has no {what} texts")
        chosen = draw_texts(name, what, len(rows), wanted)
        labels.append(torch.tensor([numbers[place] for place in chosen]))
        parts.append(reader.read([rows[place] for place in chosen], labels[-1]))
        said.append("" if wanted is None else f"{wanted:,} of {len(rows):,} {what} examples")
    return Dataset(
        name,
        parts[0],
        parts[1],
        reader.vocabulary if options.next_token else len(texts.class_names),
        () if options.next_token else texts.class_names,
        note=join_notes(texts.note, *said, reader.note),
        task="next_token" if options.next_token else "classification",
        deal_by=labels[0] if options.next_token else None,
    )
