"""Validation data: a part of the training examples that takes the test set's place, to choose settings by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedstrata.core.lazy import torch
from fedstrata.core.rng import derive
from fedstrata.data.client_data import draw_held_out
from fedstrata.data.examples import Dataset
from fedstrata.data.readers.build import join_notes
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


def set_aside(dataset: Dataset, share: float) -> Dataset:
    """The dataset without its test set: a share of the training examples is judged by, and nobody trains on it.

    The choice depends on the dataset alone, not on a run's seed, so that all runs are judged by the same examples. The
    same share of every class is taken, and of every natural client, who is judged by its own.

    Raises:
        UsageError: if that leaves nothing to train on, or nothing to judge by.
    """
    labels = dataset.labels
    classes = (
        labels.numpy() if labels.dim() == 1 and not labels.is_floating_point() else np.zeros(len(labels), np.int64)
    )
    held_out = np.zeros(len(classes), dtype=bool)
    for number, rows in enumerate(_blocks(dataset)):
        random = np.random.default_rng(derive(dataset.name, "validation", number))
        held_out[rows] = draw_held_out(random, classes[rows], share)
    taken, left = int(held_out.sum()), int((~held_out).sum())
    if not taken or not left:
        raise UsageError(f"validation = {share:g} leaves {left} examples to train on and {taken} to judge by")
    aside = torch.from_numpy(held_out)
    return replace(
        dataset,
        train=dataset.train.select((~aside).nonzero().flatten()),
        test=dataset.train.select(aside.nonzero().flatten()),
        groups=_parts_of(dataset.groups, ~aside),
        deal_by=None if dataset.deal_by is None else dataset.deal_by[~aside],
        test_groups=_parts_of(dataset.groups, aside) if dataset.test_groups else (),
        client_test=None,
        note=join_notes(dataset.note, f"{taken:,} of {taken + left:,} training examples are the validation set"),
    )


def _blocks(dataset: Dataset) -> Iterator[np.ndarray]:
    """Places of each natural client's examples, and of all that are nobody's."""
    others = np.ones(len(dataset.labels), dtype=bool)
    for group in dataset.groups:
        others[group.numpy()] = False
        yield group.numpy()
    if others.any():
        yield others.nonzero()[0]


def _parts_of(groups: tuple[Tensor, ...], chosen: Tensor) -> tuple[Tensor, ...]:
    """The chosen examples of each group, by their places among all that are chosen."""
    place = chosen.cumsum(0) - 1
    return tuple(place[group[chosen[group]]] for group in groups)
