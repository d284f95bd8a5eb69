"""The table of datasets, what needs no files, and what a user is told when files are missing."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstrata.core import spec
from fedstrata.data.datasets import DATASETS, READ_AS_TEXT, READ_FOR_TASK, load_dataset
from fedstrata.data.examples import Dataset
from fedstrata.data.readers.build import channel_stats
from fedstrata.data.sources import ELSEWHERE, SOURCES
from fedstrata.errors import UsageError

OWN = {"csv", "npz", "folder", "python", "text"}
FROM_FILES = sorted(set(DATASETS) - {"digits", "digits-segmentation", "synthetic", "diabetes", "breast-cancer"} - OWN)


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)


def rows(dataset: Dataset) -> tuple[set[bytes], set[bytes]]:
    """The distinct inputs of each part, as bytes."""
    train, test = ({row.numpy().tobytes() for row in part.x} for part in (dataset.train, dataset.test))
    return train, test


@pytest.mark.parametrize("name", sorted(set(DATASETS) - OWN))
def test_every_entry_has_the_form_that_the_table_promises(name: str) -> None:
    function = DATASETS[name]
    first, *others = inspect.signature(function).parameters.values()
    assert first.name == "data_dir"
    assert first.kind is first.POSITIONAL_OR_KEYWORD
    if name in READ_AS_TEXT:
        tokenizer, *others = others
        assert tokenizer.name == "given_tokenizer"
        assert tokenizer.kind is tokenizer.POSITIONAL_OR_KEYWORD
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in others)
    assert spec.summary(function).endswith((").", "; needs no files."))
    assert spec.bind("dataset", DATASETS, name) == (function, {})


@pytest.mark.parametrize("name", sorted(OWN))
def test_data_of_ones_own_must_be_named(name: str) -> None:
    function = DATASETS[name]
    first, *others = inspect.signature(function).parameters.values()
    assert first.name == "data_dir"
    assert (others[0].name == "asked") == (name in READ_FOR_TASK)
    second = others[(name in READ_FOR_TASK) + (name in READ_AS_TEXT)]
    assert second.kind is second.KEYWORD_ONLY
    assert second.default is second.empty
    assert spec.summary(function).endswith(").")
    with pytest.raises(UsageError, match=f"dataset '{name}' needs the argument '{second.name}'"):
        load_dataset(name)


def test_every_dataset_from_files_says_how_to_get_it() -> None:
    assert sorted({*SOURCES, *ELSEWHERE}) == FROM_FILES
    assert not set(SOURCES) & set(ELSEWHERE)


def test_digits() -> None:
    dataset = load_dataset("digits")
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (1442, 355, 10)
    assert dataset.input_shape == (1, 8, 8)
    assert dataset.train.x.dtype == torch.uint8
    assert dataset.train.y.dtype == torch.long
    assert dataset.train.x.max() == 240
    assert (dataset.train.x % 15 == 0).all()
    for part, share in ((dataset.train, 0.8), (dataset.test, 0.2)):
        counts = torch.bincount(part.labels(), minlength=10)
        assert (counts / torch.bincount(torch.cat([dataset.train.y, dataset.test.y])) - share).abs().max() < 0.01
    train, test = rows(dataset)
    assert len(train) == 1442
    assert not train & test


def test_digits_are_the_same_every_time_and_scaled_by_their_own_statistics() -> None:
    first, second = load_dataset("digits"), load_dataset("digits")
    assert torch.equal(first.train.x, second.train.x)
    x, y = first.train.batch(torch.arange(len(first.train)))
    assert x.dtype == torch.float32
    assert abs(float(x.mean())) < 1e-4
    assert abs(float(x.std()) - 1) < 1e-3
    assert torch.equal(y, first.train.labels())


def test_channel_stats_by_hand() -> None:
    """One channel holds 0 and 255 (mean 1/2, deviation 1/2), the other is constant (deviation replaced by 1)."""
    images = np.array([[[[0, 255]], [[51, 51]]]], np.uint8)
    mean, std = channel_stats(images)
    assert mean == pytest.approx((0.5, 0.2))
    assert std == pytest.approx((0.5, 1.0))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 2, 5), (7,), (4, 4), (2, 2, 2, 2)])
def test_synthetic_has_any_shape_and_balanced_classes(shape: tuple[int, ...]) -> None:
    dataset = load_dataset(f"synthetic(shape={shape}, classes=3, examples=31, test_examples=9)")
    assert dataset.input_shape == shape
    assert dataset.train.x.dtype == torch.float32
    assert sorted(torch.bincount(dataset.train.labels()).tolist()) == [10, 10, 11]
    assert torch.bincount(dataset.test.labels()).tolist() == [3, 3, 3]


def test_synthetic_follows_its_seed() -> None:
    first, same, other = (load_dataset(f"synthetic(seed={seed})") for seed in (1, 1, 2))
    assert torch.equal(first.train.x, same.train.x)
    assert torch.equal(first.test.y, same.test.y)
    assert not torch.equal(first.train.x, other.train.x)


@pytest.mark.parametrize(("separation", "least", "most"), [(1.0, 0.95, 1.0), (0.0, 0.0, 0.25)])
def test_synthetic_is_learnable_as_far_as_classes_lie_apart(separation: float, least: float, most: float) -> None:
    """The nearest class mean of the train part finds the test part's classes, or nothing where they coincide."""
    dataset = load_dataset(f"synthetic(separation={separation})")
    x, y = dataset.train.x.flatten(1), dataset.train.y
    means = torch.stack([x[y == label].mean(0) for label in range(10)])
    guess = torch.cdist(dataset.test.x.flatten(1), means).argmin(1)
    assert least <= float((guess == dataset.test.y).float().mean()) <= most


def test_synthetic_has_unit_variance() -> None:
    dataset = load_dataset("synthetic(shape=(3, 16, 16), classes=50, examples=500, separation=3, noise=4)")
    assert abs(float(dataset.train.x.std()) - 1) < 0.05


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("digitz", "did you mean 'digits'"),
        ("digits(foo=1)", "has no argument .foo."),
        ("femnist(foo=1)", "takes none"),
        ("synthetic(shape=())", "positive lengths"),
        ("synthetic(shape=(3, 0))", "positive lengths"),
        ("synthetic(classes=1)", "two classes"),
        ("synthetic(separation=0.0, noise=0.0)", "not both 0"),
        ("synthetic(noise=1e999)", "not negative"),
        ("synthetic(seed=-1)", "seed"),
        ("synthetic(classes='ten')", "does not fit"),
        ("shakespeare(test=1.5)", "between 0 and 1"),
        ("shakespeare(length=0)", "at least 1"),
    ],
)
def test_bad_names_and_arguments(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_dataset(text)


@pytest.mark.parametrize("name", FROM_FILES)
def test_without_a_data_folder_both_ways_to_give_one_are_named(name: str) -> None:
    with pytest.raises(UsageError, match=r"--data-dir.*FEDSTRATA_DATA"):
        load_dataset(name)


@pytest.mark.parametrize("name", FROM_FILES)
def test_missing_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path))
    way = ELSEWHERE.get(name, f"`fedstrata data fetch {name}`")
    with pytest.raises(UsageError, match=f"no {name} in .*looked for") as caught:
        load_dataset(name)
    assert way in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(UsageError, match="nowhere does not exist"):
        load_dataset(name, tmp_path / "nowhere")


# A part of a dataset ------------------------------------------------------------------------------------------


def test_a_part_is_drawn_once_and_for_all():
    whole, part = load_dataset("digits"), load_dataset("digits(examples=200, test_examples=50)")
    assert (len(part.train), len(part.test)) == (200, 50)
    assert part.note == "200 of 1,442 training examples; 50 of 355 test examples"
    assert whole.note == ""
    images = {row.numpy().tobytes() for row in whole.train.x}
    x, y = part.train.batch(torch.arange(200))
    again = load_dataset("digits(examples=200, test_examples=50)").train.batch(torch.arange(200))
    assert torch.equal(x, again[0])
    assert torch.equal(y, again[1])
    assert torch.bincount(part.train.labels()).min() >= 5  # of all classes, also where a dataset is sorted by them
    chosen = part.train.x if part.train.index is None else part.train.x[part.train.index]
    drawn = {row.numpy().tobytes() for row in chosen}
    assert drawn <= images
    assert len(drawn) > 150


def test_all_of_a_part_is_the_part():
    whole, part = load_dataset("digits"), load_dataset("digits(examples=1442)")
    every = torch.arange(1442)
    assert torch.equal(part.train.batch(every)[0], whole.train.batch(every)[0])
    assert len(part.test) == 355


@pytest.mark.parametrize("text", ["digits(examples=0)", "digits(test_examples=356)", "digits(examples=-1)"])
def test_a_part_that_is_not_there(text: str):
    with pytest.raises(UsageError, match="ask for 1 or more, not"):
        load_dataset(text)


@pytest.mark.parametrize("name", sorted(set(FROM_FILES) - {"femnist", "shakespeare", "heart-disease"}))
def test_every_image_dataset_can_be_asked_for_in_part(name: str):
    assert {"examples", "test_examples"} <= spec.parameters(DATASETS[name]).keys()
