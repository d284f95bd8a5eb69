"""CIFAR batches: read without trusting them."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.data.datasets import load_dataset
from fedstrata.data.readers import cifar
from fedstrata.data.readers.archives import md5
from fedstrata.data.readers.cifar import load_batch
from fedstrata.errors import UsageError


def pixels(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), np.uint8)


def batch10(count: int, seed: int) -> dict[bytes, Any]:
    return {b"data": pixels(count, seed), b"labels": [i % 10 for i in range(count)], b"batch_label": b"one"}


def batch100(count: int, seed: int) -> dict[bytes, Any]:
    fine = [i % 100 for i in range(count)]
    return {b"data": pixels(count, seed), b"fine_labels": fine, b"coarse_labels": [i // 5 for i in fine]}


META = {
    b"fine_label_names": [f"fine{i}".encode() for i in range(100)],
    b"coarse_label_names": [f"coarse{i}".encode() for i in range(20)],
}


def write(folder: Path, files: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def write_tar(path: Path, folder: str, files: dict[str, Any]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            data = pickle.dumps(content, protocol=2)
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


TEN = {"data_batch_1": batch10(20, 1), "data_batch_3": batch10(30, 3), "test_batch": batch10(10, 6)}
HUNDRED = {"train": batch100(200, 1), "test": batch100(100, 2), "meta": META}


@pytest.mark.parametrize("form", ["folder", "archive"])
def test_some_batches_of_cifar_10(form: str, tmp_path: Path) -> None:
    if form == "folder":
        write(tmp_path / "data" / "cifar-10-batches-py", TEN)
    else:
        write_tar(tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py", TEN)
    dataset = load_dataset("cifar-10(verify=False)", tmp_path)
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (50, 10, 10)
    assert dataset.input_shape == (3, 32, 32)
    assert dataset.train.x.dtype == torch.uint8
    assert np.array_equal(dataset.train.x[20:].numpy().reshape(-1, 3072), TEN["data_batch_3"][b"data"])
    assert dataset.note.startswith("50-image subset: data_batch_1, data_batch_3 of 5")


def test_known_sums_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, TEN)
    with pytest.raises(UsageError, match=r"data_batch_1 is not a known file of cifar-10.*verify=False"):
        load_dataset("cifar-10", tmp_path)
    for name in TEN:
        monkeypatch.setitem(cifar._CIFAR10_SUMS, name, (md5((tmp_path / name).read_bytes()),))
    assert "not checked" not in load_dataset("cifar-10", tmp_path).note


def test_cifar_10_needs_both_parts(tmp_path: Path) -> None:
    write(tmp_path, {"data_batch_1": TEN["data_batch_1"]})
    with pytest.raises(UsageError, match="test_batch is missing"):
        load_dataset("cifar-10(verify=False)", tmp_path)


@pytest.mark.parametrize("form", ["folder", "archive"])
@pytest.mark.parametrize("coarse", [False, True])
def test_cifar_100(form: str, coarse: bool, tmp_path: Path) -> None:
    if form == "folder":
        write(tmp_path / "cifar-100-python", HUNDRED)
    else:
        write_tar(tmp_path / "cifar-100-python.tar.gz", "cifar-100-python", HUNDRED)
    dataset = load_dataset(f"cifar-100(coarse={coarse}, verify=False)", tmp_path)
    assert dataset.classes == len(dataset.class_names) == (20 if coarse else 100)
    assert dataset.class_names[7] == ("coarse7" if coarse else "fine7")
    assert dataset.train.labels()[7] == (1 if coarse else 7)
    assert "200 of 50,000 training and 100 of 10,000 test images" in dataset.note


def test_cifar_10_is_not_taken_from_an_archive_of_cifar_100(tmp_path: Path) -> None:
    write_tar(tmp_path / "cifar-100-python.tar.gz", "cifar-100-python", HUNDRED)
    with pytest.raises(UsageError, match="no cifar-10 in"):
        load_dataset("cifar-10(verify=False)", tmp_path)


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "evil",
    [Evil(os.mkdir, "made-by-a-pickle"), Evil(eval, "1 + 1"), Evil(np.load, "x"), Evil(np.zeros, 1), np.float64(1.0)],
    ids=["mkdir", "eval", "np.load", "np.zeros", "scalar"],
)
def test_a_pickle_that_asks_for_more_is_refused(
    evil: Any, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps({b"data": evil, b"labels": []}, protocol=protocol)
    with pytest.raises(UsageError, match="data_batch_1 is refused: a CIFAR batch has no use for"):
        load_batch(data, "data_batch_1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("array", [np.zeros(3, np.float32), np.array([{}, None], object), np.zeros(2, "i2,u1")])
def test_arrays_of_anything_but_bytes_are_refused(array: np.ndarray) -> None:
    with pytest.raises(UsageError, match=r"is refused: a CIFAR batch has no use for 'numpy.dtype"):
        load_batch(pickle.dumps({b"data": array}, protocol=2), "x")


def test_a_malicious_pickle_is_refused_even_unverified(tmp_path: Path) -> None:
    write(tmp_path, TEN | {"data_batch_2": {b"data": Evil(os.mkdir, str(tmp_path / "made"))}})
    with pytest.raises(UsageError, match="data_batch_2 is refused"):
        load_dataset("cifar-10(verify=False)", tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "does not hold a dict"),
        ({b"labels": [1]}, "no rows of 3,072 bytes"),
        ({b"data": np.zeros((1, 3071), np.uint8), b"labels": [1]}, "no rows of 3,072 bytes"),
        ({b"data": pixels(1, 0), b"labels": ["1"]}, "no list of labels"),
        ({b"data": pixels(1, 0), b"labels": [1, 2]}, "1 images but 2 labels"),
        ({b"data": pixels(1, 0), b"labels": [10]}, "labels outside 0 to 9"),
    ],
)
def test_batches_of_another_content(content: Any, words: str, tmp_path: Path) -> None:
    write(tmp_path, TEN | {"data_batch_1": content})
    with pytest.raises(UsageError, match=words):
        load_dataset("cifar-10(verify=False)", tmp_path)


def test_truncated_batches_are_named() -> None:
    data = pickle.dumps(batch10(3, 0), protocol=2)
    for kept in (0, 1, 10, len(data) // 2, len(data) - 1):
        with pytest.raises(UsageError, match="batch-x is truncated or corrupt: it is not a pickled batch"):
            load_batch(data[:kept], "batch-x")


def test_text_keys_are_read_as_bytes() -> None:
    assert load_batch(pickle.dumps({"labels": [1]}, protocol=4), "x") == {b"labels": [1]}


class State:
    """numpy's own way to pickle a type or an array, with another state."""

    def __init__(self, call: Any, arguments: tuple[Any, ...], state: Any) -> None:
        self.parts = call, arguments, state

    def __reduce__(self) -> Any:
        return self.parts


PLAIN = (3, "|", None, None, None, -1, -1, 0)


def byte_type(state: Any) -> State:
    return State(np.dtype, ("u1", False, True), state)


def array(kind: Any, shape: Any = (1, 3072), data: Any = bytes(3072)) -> State:
    reconstruct, arguments, _ = np.zeros(1, np.uint8).__reduce__()
    return State(reconstruct, arguments, (1, shape, kind, False, data))


def test_the_one_state_that_a_type_of_bytes_has() -> None:
    """Else the refusals below would prove nothing."""
    found = load_batch(pickle.dumps({b"data": array(byte_type(PLAIN))}, protocol=2), "x")[b"data"]
    assert (found.shape, found.dtype) == ((1, 3072), np.uint8)
    fortran = np.asfortranarray(pixels(2, 0))
    assert np.array_equal(load_batch(pickle.dumps({b"data": fortran}, protocol=2), "x")[b"data"], fortran)


@pytest.mark.parametrize("flags", [1, 4, 0x3F, 0x1B])
def test_flags_of_a_type_are_refused(flags: int) -> None:
    """With the flag of objects, numpy would take the bytes of an image for pointers, and follow them."""
    with pytest.raises(UsageError, match=r"no use for 'a numpy.dtype in another state'"):
        load_batch(pickle.dumps({b"data": array(byte_type((*PLAIN[:-1], flags)))}, protocol=2), "x")


@pytest.mark.parametrize(
    "state", [(3, ">", *PLAIN[2:]), (4, *PLAIN[1:], {}), (*PLAIN[:5], 8, 1, 0), (), (3,), {"a": 1}, "x"]
)
def test_other_states_of_a_type_are_refused(state: Any) -> None:
    with pytest.raises(UsageError, match=r"no use for 'a numpy.dtype in another state'"):
        load_batch(pickle.dumps({b"data": array(byte_type(state))}, protocol=2), "x")


@pytest.mark.parametrize(
    ("shape", "data"), [((2**40,), b"x"), ((-1, 7), bytes(3072)), ("x", b"x"), ((1,), [1]), ((1,), "x"), (None, b"xy")]
)
def test_arrays_that_are_none(shape: Any, data: Any) -> None:
    with pytest.raises(UsageError, match="x is"):
        load_batch(pickle.dumps({b"data": array(byte_type(PLAIN), shape, data)}, protocol=2), "x")


def test_a_function_keeps_its_state() -> None:
    """A pickle could otherwise leave other defaults behind for the next one."""
    data = b"\x80\x02cnumpy\ndtype\n}U\x01aK\x01sb."
    with pytest.raises(UsageError, match="no use for 'a function in another state'"):
        load_batch(data, "x")
