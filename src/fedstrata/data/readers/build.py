"""From arrays to a `Dataset`: what every reader of images does last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedstrata.core.lazy import torch
from fedstrata.data.examples import Dataset, TensorExamples
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]
Part = tuple[Bytes, Integers]
"""Images (N, C, H, W) and their labels."""

Stats = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, in [0, 1]."""


def channel_stats(images: Bytes) -> Stats:
    """Mean and standard deviation of each channel, in [0, 1], exactly (from counts of the 256 values).

    A channel of one value has no deviation to divide by; it gets 1.
    """
    values = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(images.shape[1]):
        counts = np.bincount(images[:, channel].ravel(), minlength=256)
        share = counts / counts.sum()
        mean = float(share @ values)
        means.append(mean)
        deviations.append(float(np.sqrt(share @ (values - mean) ** 2)) or 1.0)
    return tuple(means), tuple(deviations)


def tensor_of(array: npt.NDArray[np.generic]) -> Tensor:
    """The array as a tensor, copied only where torch could not own it (read-only, or not in order)."""
    owned = array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C")
    return torch.from_numpy(owned)


def image_dataset(
    name: str,
    train: Part,
    test: Part,
    class_names: tuple[str, ...],
    *,
    classes: int | None = None,
    stats: Stats | None = None,
    groups: tuple[Tensor, ...] = (),
    group_names: tuple[str, ...] = (),
    note: str = "",
    test_groups: tuple[Tensor, ...] = (),
) -> Dataset:
    """A `Dataset` of uint8 images; `stats` are computed on the train part where None."""
    count = len(class_names) if classes is None else classes
    for part, (images, labels) in (("training", train), ("test", test)):
        if len(images) == 0:
            raise UsageError(f"{name} has no {part} images")
        if len(images) != len(labels):
            raise UsageError(f"{name} has {len(images):,} {part} images but {len(labels):,} labels")
        if labels.min() < 0 or labels.max() >= count:
            raise UsageError(f"{name} has {part} labels outside 0 to {count - 1}")
    mean, std = channel_stats(train[0]) if stats is None else stats
    train_examples, test_examples = (
        TensorExamples(tensor_of(images), tensor_of(labels), mean, std) for images, labels in (train, test)
    )
    return Dataset(
        name,
        train_examples,
        test_examples,
        count,
        class_names,
        groups,
        group_names,
        note,
        test_groups=test_groups,
    )


def join_parts(parts: Sequence[Part]) -> Part:
    """Several parts as one, in order; a single one is not copied."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def part_note(train: int, full_train: int, test: int, full_test: int) -> str:
    """What a reader of results must know of an incomplete dataset; empty where it is complete."""
    if train == full_train and test == full_test:
        return ""
    return f"{train:,} of {full_train:,} training and {test:,} of {full_test:,} test images"


def join_notes(*notes: str) -> str:
    """The notes that say something, as one."""
    return "; ".join(note for note in notes if note)


UNVERIFIED = "files not checked against known md5 sums"
"""The note of a dataset read with `verify=False`."""
