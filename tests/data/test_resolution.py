"""`resolution`: image datasets in another size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import interpolate

from fedstrata.config.overrides import assign
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.core import spec
from fedstrata.data.datasets import DATASETS, load_dataset
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError
from fedstrata.run import open_run

IMAGES = ["digits", "mnist", "fashion-mnist", "cifar-10", "cifar-100", "svhn", "cinic-10", "tiny-imagenet"]


@pytest.mark.parametrize("name", IMAGES)
def test_every_image_dataset_has_it(name: str) -> None:
    assert spec.parameters(DATASETS[name])["resolution"] == (int | None, None)
    assert "resolution=None" in spec.signature(DATASETS[name])


@pytest.mark.parametrize("side", [4, 12, 16, 1])
def test_digits_in_another_size(side: int) -> None:
    before, after = load_dataset("digits"), load_dataset(f"digits(resolution={side})")
    assert after.input_shape == (1, side, side)
    assert after.train.x.dtype == torch.uint8
    assert torch.equal(after.train.labels(), before.train.labels())
    assert (after.train.mean, after.train.std) == (before.train.mean, before.train.std)
    assert after.note == f"images resized from 8×8 to {side}×{side}"
    x, _ = after.train.batch(torch.arange(5))
    assert x.shape == (5, 1, side, side)
    exact = interpolate(before.train.x.float(), (side, side), mode="bilinear", antialias=True)
    assert float((after.train.x - exact).abs().max()) <= 0.501


def test_the_same_size_changes_nothing() -> None:
    before, after = load_dataset("digits"), load_dataset("digits(resolution=8)")
    assert torch.equal(after.train.x, before.train.x)
    assert after.note == before.note == ""


def test_half_the_size_by_hand() -> None:
    """Antialiased to a half, a pixel weighs 4 across with 1, 3, 3, 1; at the border one is missing: (3, 3, 1)/7."""
    row = torch.tensor([0, 80, 160, 240], dtype=torch.uint8)
    images = TensorExamples(row.expand(1, 1, 4, 4).clone(), torch.tensor([0]))
    small = images.resize(2)
    left, right = (0 * 3 + 80 * 3 + 160) / 7, (80 + 160 * 3 + 240 * 3) / 7
    assert small.x.tolist() == [[[[round(left), round(right)]] * 2]]


def test_floats_stay_floats_and_parts_stay_parts() -> None:
    x, y = torch.randn(5, 2, 4, 4), torch.arange(5)
    part = TensorExamples(x, y).select(torch.tensor([3, 1])).resize(2)
    assert part.x.dtype == torch.float32
    assert torch.equal(part.x, TensorExamples(x, y).resize(2).x[[3, 1]])
    assert part.labels().tolist() == [3, 1]


def test_many_images_are_resized_in_pieces_alike() -> None:
    x = torch.randint(0, 256, (2300, 1, 4, 4), dtype=torch.uint8)
    whole = TensorExamples(x, torch.zeros(2300, dtype=torch.int64)).resize(3).x
    single = TensorExamples(x[[2299]], torch.zeros(1, dtype=torch.int64)).resize(3).x
    assert torch.equal(whole[[2299]], single)


def test_with_a_part_of_the_examples() -> None:
    """The same ones as without, and only these are resized and held."""
    plain = load_dataset("digits(examples=50, test_examples=20)")
    small = load_dataset("digits(examples=50, test_examples=20, resolution=4)")
    assert small.train.x.shape == (50, 1, 4, 4)
    assert small.test.x.shape == (20, 1, 4, 4)
    assert torch.equal(small.train.labels(), plain.train.labels())
    assert small.note == f"{plain.note}; images resized from 8×8 to 4×4"


@pytest.mark.parametrize("side", [0, -3])
def test_impossible_sizes(side: int) -> None:
    with pytest.raises(UsageError, match=f"digits: a resolution is 1 or more pixels per side, not {side}"):
        load_dataset(f"digits(resolution={side})")


def test_more_than_fits_into_memory() -> None:
    with pytest.raises(UsageError, match="not enough memory for 1,797 images of 10000000×10000000 pixels"):
        load_dataset("digits(resolution=10000000)")


def test_one_option_of_a_run(tmp_path: Path) -> None:
    values = assign({"dataset": "digits(examples=40)", "clients": 2, "partition": "iid"}, ["dataset.resolution=16"])
    assert values["dataset"] == "digits(examples=40, resolution=16)"
    small = {"model": "cnn2(width=2, hidden=4)", "rounds": 1, "workers": 1}
    federation = open_run(validate_settings(RunConfig, values | small), tmp_path / "run")
    assert any("images resized from 8×8 to 16×16" in note for note in federation.notes)
    assert federation.state.params["fc.linear.weight"].shape == (4, 4 * 4 * 4)
    assert len(federation.fit().records) == 1
