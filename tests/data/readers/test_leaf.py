"""LEAF's JSON: FEMNIST and its writers."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.data.datasets import load_dataset
from fedstrata.errors import UsageError


def user(count: int, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (count, 784)) / 255
    return {"x": pixels.tolist(), "y": random.integers(0, 62, count).tolist()}


def content(users: dict[str, dict[str, Any]]) -> bytes:
    counts = [len(data["y"]) for data in users.values()]
    return json.dumps({"users": list(users), "num_samples": counts, "user_data": users}).encode()


TRAIN = {"w2": user(3, 2), "w1": user(5, 1)}
MORE = {"w0": user(2, 3), "idle": {"x": [], "y": []}}
TEST = {"w1": user(1, 4), "w2": user(2, 5)}
FILES = {
    "train/all_data_0_keep_0_train_9.json": content(TRAIN),
    "train/all_data_1_keep_0_train_9.json": content(MORE),
    "test/all_data_0_keep_0_test_9.json": content(TEST),
    "all_data/all_data_0.json": b"not read",
}


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_femnist(form: str, tmp_path: Path) -> None:
    if form == "folder":
        write(tmp_path / "femnist" / "data", FILES)
    else:
        with zipfile.ZipFile(tmp_path / "femnist.zip", "w") as archive:
            for name, data in FILES.items():
                archive.writestr(f"data/{name}", data)
    dataset = load_dataset("femnist", tmp_path)
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (10, 3, 62)
    assert dataset.input_shape == (1, 28, 28)
    assert dataset.train.x.dtype == torch.uint8
    assert dataset.class_names[9:12] == ("9", "A", "B")
    assert dataset.class_names[36] == "a"
    assert dataset.group_names == ("w0", "w1", "w2")
    assert torch.equal(torch.cat(dataset.groups), torch.arange(10))
    for name, group in zip(dataset.group_names, dataset.groups, strict=True):
        original = (TRAIN | MORE)[name]
        assert dataset.train.labels()[group].tolist() == original["y"]
        assert np.array_equal(dataset.train.x[group].numpy().reshape(-1, 784) / 255, original["x"])
    assert dataset.note == "13 images of 4 writers (LEAF's whole set: 805,263 of 3,550)"


def test_the_folder_tells_leafs_datasets_apart(tmp_path: Path) -> None:
    write(tmp_path / "shakespeare", FILES)
    with pytest.raises(UsageError, match="no femnist in"):
        load_dataset("femnist", tmp_path)
    write(tmp_path / "femnist", FILES)
    assert len(load_dataset("femnist", tmp_path).groups) == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "it is not LEAF's JSON"),
        (b"[" * 100_000, "it is not LEAF's JSON"),
        (b'{"users": ["a"]}', "it is not LEAF's JSON"),
        (content({"a": {"x": [[0.0] * 783], "y": [1]}}), "user a: x is not rows of 784 numbers"),
        (content({"a": {"x": [["z"] * 784], "y": [1]}}), "user a: could not convert"),
        (content({"a": {"x": [[1.5] * 784], "y": [1]}}), "user a: x is not between 0 and 1"),
        (content({"a": {"x": [[0.5] * 784], "y": [1, 2]}}), "user a: 1 images but 2 labels"),
        (content({"a": {"x": [[0.5] * 784], "y": [62]}}), "labels outside 0 to 61"),
        (content({"w1": user(1, 0)}), "the user w1 is in two files"),
    ],
)
def test_femnist_refusals(data: bytes, words: str, tmp_path: Path) -> None:
    write(tmp_path, FILES | {"train/z.json": data})
    with pytest.raises(UsageError, match=words):
        load_dataset("femnist", tmp_path)
