"""The real files, where they are: FEDSTRATA_DATA, or `shared/data` beside the repository."""

from __future__ import annotations

import os
import tarfile
from functools import cache
from pathlib import Path

import pytest
import torch

from fedstrata.data.datasets import load_dataset
from fedstrata.data.examples import Dataset
from fedstrata.data.readers.shakespeare import decode

ROOT = Path(os.environ.get("FEDSTRATA_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def need(folder: str) -> Path:
    if not (ROOT / folder).is_dir():
        pytest.skip(f"no {folder} in {ROOT}")
    return ROOT


@cache
def load(text: str) -> Dataset:
    return load_dataset(text, ROOT)


def overlap(dataset: Dataset) -> int:
    """Training and test inputs that are equal byte for byte."""
    train, test = ({row.numpy().tobytes() for row in part.x} for part in (dataset.train, dataset.test))
    return len(train & test)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "folder", "train", "test", "shape", "classes", "note"),
    [
        ("mnist", "mnist", 60_000, 10_000, (1, 28, 28), 10, ""),
        ("fashion-mnist", "fashion-mnist", 60_000, 10_000, (1, 28, 28), 10, ""),
        (
            "cifar-10",
            "cifar-10-subset",
            20_000,
            10_000,
            (3, 32, 32),
            10,
            "20,000-image subset: data_batch_1, data_batch_2 of 5",
        ),
        (
            "cifar-100",
            "cifar-100-subset",
            8_000,
            2_000,
            (3, 32, 32),
            100,
            "subset: 8,000 of 50,000 training and 2,000 of 10,000 test images",
        ),
        (
            "tiny-imagenet",
            "tiny-imagenet-200-subset",
            2_000,
            500,
            (3, 64, 64),
            20,
            "subset: 20 of 200 classes; 2,000 of 100,000 training and 500 of 10,000 test images",
        ),
    ],
)
def test_images(text: str, folder: str, train: int, test: int, shape: tuple[int, ...], classes: int, note: str) -> None:
    need(folder)
    dataset = load(text)
    assert (len(dataset.train), len(dataset.test)) == (train, test)
    assert dataset.input_shape == shape
    assert dataset.classes == len(dataset.class_names) == classes
    assert dataset.note == note
    for part in (dataset.train, dataset.test):
        assert part.x.dtype == torch.uint8
        assert part.y.dtype == torch.long
        assert sorted(part.labels().unique().tolist()) == list(range(classes))
    x, _ = dataset.train.batch(torch.arange(2000))
    assert x.mean((0, 2, 3)).abs().max() < 0.05
    assert (x.std((0, 2, 3)) - 1).abs().max() < 0.05


def test_class_counts() -> None:
    need("mnist")
    assert torch.bincount(load("mnist").train.labels()).tolist() == MNIST_COUNTS
    need("fashion-mnist")
    assert torch.bincount(load("fashion-mnist").train.labels()).tolist() == [6000] * 10
    need("cifar-100-subset")
    assert torch.bincount(load("cifar-100").train.labels()).tolist() == [80] * 100
    need("tiny-imagenet-200-subset")
    assert torch.bincount(load("tiny-imagenet").test.labels()).tolist() == [25] * 20


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("mnist", "mnist"),
        ("cifar-10", "cifar-10-subset"),
        ("cifar-100", "cifar-100-subset"),
        ("tiny-imagenet", "tiny-imagenet-200-subset"),
    ],
)
def test_no_image_is_in_both_parts(text: str, folder: str) -> None:
    need(folder)
    assert overlap(load(text)) == 0


def test_coarse_classes_join_five_fine_ones() -> None:
    need("cifar-100-subset")
    fine, coarse = load("cifar-100"), load("cifar-100(coarse=True)")
    assert torch.equal(fine.train.x, coarse.train.x)
    assert torch.bincount(coarse.train.labels()).tolist() == [400] * 20
    pairs = torch.stack([fine.train.labels(), coarse.train.labels()], 1).unique(dim=0)
    assert len(pairs) == 100
    assert coarse.class_names[0] == "aquatic_mammals"


def test_a_dataset_folder_is_a_data_folder_too() -> None:
    root = need("mnist")
    assert torch.equal(load_dataset("mnist", root / "mnist").test.x, load("mnist").test.x)


def test_an_extracted_archive_reads_the_same(tmp_path: Path) -> None:
    root = need("tiny-imagenet-200-subset")
    (archive,) = (root / "tiny-imagenet-200-subset").glob("*.tar")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    extracted, archived = load_dataset("tiny-imagenet", tmp_path), load("tiny-imagenet")
    assert torch.equal(extracted.train.x, archived.train.x)
    assert torch.equal(extracted.test.labels(), archived.test.labels())


def test_shakespeare_roles() -> None:
    need("shakespeare")
    dataset = load("shakespeare")
    assert dataset.note.startswith("8 plays, 143 of 295 roles; 152 with fewer than 20 lines or too little text")
    assert len(dataset.groups) == len(dataset.group_names) == len(set(dataset.group_names)) == 143
    assert torch.equal(torch.cat(dataset.groups).sort().values, torch.arange(len(dataset.train)))
    assert dataset.input_shape == (80,)
    assert dataset.train.x.dtype == torch.long
    assert int(dataset.train.x.min()) > 0
    assert int(dataset.train.x.max()) < dataset.classes == 80
    hamlet = dataset.groups[dataset.group_names.index("hamlet/HAMLET")]
    assert decode(dataset.train.x[hamlet[0]].numpy()).startswith("A little more than kin, and less than kind.")
    assert len(hamlet) == max(map(len, dataset.groups))
    assert 0.08 < len(dataset.test) / (len(dataset.train) + len(dataset.test)) < 0.1
