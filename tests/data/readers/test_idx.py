"""IDX files: gzipped, unpacked, archived; damaged ones are named."""

from __future__ import annotations

import gzip
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstrata.data.datasets import load_dataset
from fedstrata.data.readers.idx import FILES, read_idx
from fedstrata.errors import UsageError


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def small(seed: int = 0) -> dict[str, bytes]:
    """Thirty training and ten test images."""
    random = np.random.default_rng(seed)
    files = {}
    for part, count in (("train", 30), ("t10k", 10)):
        files[f"{part}-images-idx3-ubyte"] = idx(random.integers(0, 256, (count, 28, 28), np.uint8))
        files[f"{part}-labels-idx1-ubyte"] = idx((np.arange(count) % 10).astype(np.uint8))
    return files


def write(folder: Path, files: dict[str, bytes], *, packed: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("place", ["", "mnist", "MNIST/raw"])
def test_read_from_a_folder(place: str, packed: bool, tmp_path: Path) -> None:
    files = small()
    write(tmp_path / place, files, packed=packed)
    dataset = load_dataset("mnist(verify=False)", tmp_path)
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (30, 10, 10)
    assert dataset.input_shape == (1, 28, 28)
    assert dataset.train.x.dtype == torch.uint8
    assert dataset.train.x[3].numpy().tobytes() == files[FILES[0]][16:][3 * 784 : 4 * 784]
    assert dataset.train.labels()[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert "30 of 60,000 training" in dataset.note
    assert "not checked" in dataset.note


def test_read_from_an_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "fashion-mnist.zip", "w") as archive:
        for name, data in small().items():
            archive.writestr(f"inside/{name}.gz", gzip.compress(data))
    assert len(load_dataset("fashion-mnist(verify=False)", tmp_path).train) == 30


def test_the_folder_tells_mnist_from_fashion_mnist(tmp_path: Path) -> None:
    write(tmp_path / "fashion-mnist", small(1), packed=True)
    write(tmp_path / "mnist", small(2), packed=True)
    for name, seed in (("fashion-mnist", 1), ("mnist", 2)):
        dataset = load_dataset(f"{name}(verify=False)", tmp_path)
        assert dataset.train.x.numpy().tobytes() == small(seed)[FILES[0]][16:]


def test_unknown_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, small(), packed=True)
    with pytest.raises(UsageError, match=r"train-images-idx3-ubyte\.gz is not a known file of mnist.*verify=False"):
        load_dataset("mnist", tmp_path)


def test_damage_is_named(tmp_path: Path) -> None:
    files = small()
    write(tmp_path, files, packed=True)
    path = tmp_path / f"{FILES[2]}.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:2000])
    with pytest.raises(UsageError, match=r"t10k-images-idx3-ubyte\.gz is truncated or corrupt: it ends too early"):
        load_dataset("mnist(verify=False)", tmp_path)
    path.write_bytes(whole[:1000] + bytes(100) + whole[1100:])
    with pytest.raises(UsageError, match="is truncated or corrupt"):
        load_dataset("mnist(verify=False)", tmp_path)
    path.write_bytes(gzip.compress(files[FILES[3]]))
    with pytest.raises(UsageError, match="it has 1 axes, not 3"):
        load_dataset("mnist(verify=False)", tmp_path)
    path.unlink()
    with pytest.raises(UsageError, match=r"mnist is incomplete in .*t10k-images-idx3-ubyte\[\.gz\] is missing"):
        load_dataset("mnist(verify=False)", tmp_path)


def test_counts_and_labels_must_fit(tmp_path: Path) -> None:
    write(tmp_path, small() | {FILES[1]: idx(np.zeros(29, np.uint8))}, packed=False)
    with pytest.raises(UsageError, match="30 training images but 29 labels"):
        load_dataset("mnist(verify=False)", tmp_path)
    write(tmp_path, small() | {FILES[1]: idx(np.full(30, 10, np.uint8))}, packed=False)
    with pytest.raises(UsageError, match="labels outside 0 to 9"):
        load_dataset("mnist(verify=False)", tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"\0\0\x0d\1", b"\0\0\x08\3\0\0", idx(np.zeros(5, np.uint8))[:-1], b"\0\0\x08\xff"]
)
def test_read_idx_refuses(data: bytes) -> None:
    with pytest.raises(UsageError, match="file-x is truncated or corrupt"):
        read_idx(data, "file-x")


@pytest.mark.parametrize("axes", [4, 33, 65, 255])
def test_more_axes_than_images_have(axes: int) -> None:
    """numpy itself has no more than 32 or 64, and says so with an error of its own."""
    data = bytes([0, 0, 8, axes]) + b"\0\0\0\1" * axes + b"x"
    with pytest.raises(UsageError, match=f"x is truncated or corrupt: it has {axes} axes"):
        read_idx(data, "x")
