"""Digits on a canvas: every pixel's class against the digits that were put there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedstrata.data.datasets import load_dataset
from fedstrata.data.readers.digits import draw_canvases
from fedstrata.errors import UsageError


def test_canvases_against_another_way_of_drawing() -> None:
    """Digit by digit and pixel by pixel, with the same draws: the digit with most ink has the pixel.

    Ink below 60 belongs to no digit.
    """
    source = np.random.default_rng(1)
    images = source.integers(0, 241, (5, 1, 8, 8)).astype(np.uint8)
    labels = np.array([3, 1, 4, 1, 9])
    found = draw_canvases(images, labels, 17, 3, 20, seed=7)
    rng = np.random.default_rng(7)
    for image, mask, largest in zip(found.images[:, 0], found.masks, found.largest, strict=True):
        chosen = rng.integers(5, size=rng.integers(1, 4))
        places = rng.integers(10, size=(len(chosen), 2))
        for row in range(17):
            for column in range(17):
                inks = [(0, 0)]
                for which, (top, left) in zip(chosen, places, strict=True):
                    if top <= row < top + 8 and left <= column < left + 8:
                        inks.append((int(images[which, 0, row - top, column - left]), int(labels[which]) + 1))
                ink, kind = max(inks, key=lambda pair: pair[0])
                assert image[row, column] == ink
                assert mask[row, column] == (kind if ink >= 60 else 0)
        counts = {label: int((mask == label + 1).sum()) for label in range(10)}
        assert counts[int(largest)] == max(counts.values())


def test_the_dataset() -> None:
    data = load_dataset("digits-segmentation(side=20, examples=60, test_examples=12)")
    assert (data.task, data.classes, data.input_shape) == ("segmentation", 11, (1, 20, 20))
    assert data.class_names[:2] == ("background", "0")
    assert data.train.y.shape == (60, 20, 20)
    assert data.train.y.dtype == torch.int64
    assert (len(data.test), len(data.labels)) == (12, 60)
    assert 0 <= data.labels.min() <= data.labels.max() <= 9
    shown = data.train.x[:, 0] >= 60
    assert torch.equal(shown, data.train.y > 0)
    x, _ = data.train.batch(torch.arange(60))
    assert abs(float(x.mean())) < 1e-4
    again = load_dataset("digits-segmentation(side=20, examples=60, test_examples=12)")
    other = load_dataset("digits-segmentation(side=20, examples=60, test_examples=12, seed=1)")
    assert torch.equal(again.train.x, data.train.x)
    assert not torch.equal(other.train.x, data.train.x)


def test_ink_alone() -> None:
    """The same canvases, and every digit is 1."""
    both = [load_dataset(f"digits-segmentation(examples=9, test_examples=3, classes='{c}')") for c in ("digits", "ink")]
    assert (both[1].classes, both[1].class_names) == (2, ("background", "ink"))
    assert torch.equal(both[1].train.y, both[0].train.y.clamp(max=1))
    assert torch.equal(both[1].labels, both[0].labels)


@pytest.mark.parametrize("text", ["side=15", "digits=0", "examples=0", "test_examples=0"])
def test_bad_arguments(text: str) -> None:
    with pytest.raises(UsageError, match="digits-segmentation needs a side of at least 16, and at least one digit"):
        load_dataset(f"digits-segmentation({text})")
