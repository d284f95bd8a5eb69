"""Handwritten digits that come with scikit-learn: one an image, or several on a canvas with a class for every pixel."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedstrata.core.rng import derive
from fedstrata.data.examples import Dataset, TensorExamples
from fedstrata.data.readers.build import Bytes, Integers, channel_stats, image_dataset, tensor_of
from fedstrata.errors import UsageError

SIDE = 8
"""Pixels per side of a digit."""
INK = 60
"""A pixel of at least so much ink, of 240, belongs to the digit."""


def digits(data_dir: Path | None) -> Dataset:
    """Small handwritten digits that come with scikit-learn, 1×8×8, 10 classes, 1,442 / 355; needs no files.

    Upstream's values 0 to 16 are multiplied by 15, which uint8 holds exactly. Every fifth image of each
    class, in upstream's order, is a test image.

    Args:
        data_dir: not needed.
    """
    train, test = _split_digits()
    return image_dataset("digits", train, test, tuple(str(digit) for digit in range(10)))


def _split_digits() -> tuple[tuple[Bytes, Integers], tuple[Bytes, Integers]]:
    """The training and the test images, with their labels."""
    images, labels = _digits()
    pixels = (images * 15).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = labels.astype(np.int64)
    held_out = np.zeros(len(labels), bool)
    for digit in range(10):
        held_out[np.flatnonzero(labels == digit)[4::5]] = True
    train, test = ((pixels[part], labels[part]) for part in (~held_out, held_out))
    return train, test


@cache
def _digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(images of 64 pixels from 0 to 16, labels), as scikit-learn ships them.

    Its file is read without importing it, which would take longer than a small run's first round; and once, for it is
    text, and a comparison opens it for every run. Nobody may write to what all of them share.
    """
    spec = importlib.util.find_spec("sklearn")
    places = [] if spec is None else spec.submodule_search_locations or []
    for place in places:
        path = Path(place) / "datasets" / "data" / "digits.csv.gz"
        if path.exists():
            rows = np.loadtxt(path, delimiter=",")
            rows.flags.writeable = False
            return rows[:, :-1], rows[:, -1]
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    for array in (images, labels):
        array.flags.writeable = False
    return images, labels


@dataclass(frozen=True, eq=False)
class Canvases:
    """Images (N, 1, side, side), a class for every pixel (N, side, side), and the digit with most pixels of each."""

    images: Bytes
    masks: Integers
    largest: Integers


def digits_segmentation(
    data_dir: Path | None,
    *,
    side: int = 16,
    digits: int = 3,
    examples: int = 1000,
    test_examples: int = 200,
    classes: Literal["digits", "ink"] = "digits",
    seed: int = 0,
) -> Dataset:
    """Digits at random places of a canvas, a class for every pixel (0 is background); needs no files.

    A canvas has one to `digits` of scikit-learn's digits, which may overlap: a pixel shows the one with more ink there,
    and is of its class where that is a quarter of the most or more. Training canvases are made of the training images
    of `digits`, test canvases of its test images. Where a partition wants a class per example, it is that of the digit
    with most pixels.

    Args:
        data_dir: not needed.
        side: pixels per side of a canvas, 16 or more.
        digits: on a canvas, at most.
        examples: training canvases.
        test_examples: test canvases.
        classes: background and ten `digits`, or background and `ink`.
        seed: of the digits and their places.
    """
    name = "digits-segmentation"
    if side < 2 * SIDE or digits < 1 or examples < 1 or test_examples < 1:
        raise UsageError(
            f"{name} needs a side of at least {2 * SIDE}, and at least one digit and one canvas in each part"
        )
    whole = _split_digits()
    train, test = (
        draw_canvases(*part, side, digits, count, derive(seed, name, kind))
        for part, count, kind in zip(whole, (examples, test_examples), ("train", "test"), strict=True)
    )
    stats = channel_stats(train.images)
    parts = [
        TensorExamples(
            tensor_of(c.images), tensor_of(c.masks if classes == "digits" else np.minimum(c.masks, 1)), *stats
        )
        for c in (train, test)
    ]
    names = ("background", *(map(str, range(10)) if classes == "digits" else ("ink",)))
    return Dataset(name, parts[0], parts[1], len(names), names, task="segmentation", deal_by=tensor_of(train.largest))


def draw_canvases(images: Bytes, labels: Integers, side: int, digits: int, count: int, seed: int) -> Canvases:
    """So many canvases, each with one to `digits` of the images at random places."""
    rng = np.random.default_rng(seed)
    ink = np.zeros((count, side, side), np.uint8)
    masks = np.zeros((count, side, side), np.int64)
    largest = np.zeros(count, np.int64)
    for canvas in range(count):
        chosen = rng.integers(len(images), size=rng.integers(1, digits + 1))
        for image, (top, left) in zip(chosen, rng.integers(side - SIDE + 1, size=(len(chosen), 2)), strict=True):
            place = canvas, slice(top, top + SIDE), slice(left, left + SIDE)
            over = images[image, 0] > ink[place]
            mine = np.where(images[image, 0] >= INK, labels[image] + 1, 0)
            masks[place] = np.where(over, mine, masks[place])
            ink[place] = np.maximum(images[image, 0], ink[place])
        seen = np.bincount(masks[canvas].ravel(), minlength=11)[1:]
        largest[canvas] = seen.argmax() if seen.any() else labels[chosen[-1]]
    return Canvases(ink[:, None], masks, largest)
