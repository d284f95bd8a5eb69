"""CIFAR-10 and CIFAR-100 in upstream's "python version": pickled batches, read without trusting them.

A pickle can name any function to be called, and set the state of what it made. Here the md5 is checked first, and the
unpickler then knows only the few names by which these files rebuild an array of bytes, each as a stand-in that takes
one state: anything else ends the reading.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.data.examples import Dataset
from fedstrata.data.readers.archives import (
    Archive,
    check_md5,
    damaged_error,
    data_folder,
    find_archives,
    gather_first,
    has_file,
    incomplete_error,
    missing_error,
)
from fedstrata.data.readers.build import UNVERIFIED, Part, image_dataset, join_notes, join_parts, part_note
from fedstrata.errors import UsageError

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR10_SUMS = {
    "data_batch_1": ("c99cafc152244af753f735de768cd75f",),
    "data_batch_2": ("d4bba439e000b95fd0a9bffe97cbabec",),
    "data_batch_3": ("54ebc095f3ab1f0389bbae665268c751",),
    "data_batch_4": ("634d18415352ddfa80567beed471001a",),
    "data_batch_5": ("482c414d41f54cd18b22e5b47cb7c3cb",),
    "test_batch": ("40351d587109b95175f43aff81a1287e",),
}
# Each upstream's sum, then that of the project's fixed subset (80 + 20 images per class).
_CIFAR100_SUMS = {
    "train": ("16019d7e3df5f24257cddd939b257f8d", "28f5cafdd3f6cd6cc1436ec5160e3098"),
    "test": ("f0ef6b0ae62326f3e7ffdfab6717acfc", "fc6f46fa2505f07405792ec79dc123cd"),
    "meta": ("7973b15100ade9c7d40fb424638fde48",),
}
_CIFAR10_STATS = ((0.49140, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159))
_CIFAR100_STATS = ((0.507075, 0.486549, 0.440918), (0.267334, 0.256438, 0.276150))


def cifar10(data_dir: Path | None, *, verify: bool = True) -> Dataset:
    """Photographs, 3×32×32, 10 classes, 50,000 / 10,000 (Krizhevsky, 2009).

    Some of the five training batches are enough; the note then says which.

    Args:
        data_dir: the folder with the batches or the archive, or one that holds it.
        verify: refuse files whose md5 is not known.
    """
    name = "cifar-10"
    folder = data_folder(name, data_dir)
    pattern = re.compile(r"(^|/)(data_batch_[1-5]|test_batch)$")
    archives = find_archives(folder, has_file(*_CIFAR10_SUMS), re.compile(r"^cifar[-_]?10(?!\d)"))
    found = gather_first(archives, pattern)
    if found is None:
        raise missing_error(name, folder, "cifar-10-python.tar.gz or the folder cifar-10-batches-py")
    archive, files = found
    batches = [batch for batch in _BATCHES if batch in files]
    if not batches or "test_batch" not in files:
        raise incomplete_error(name, archive, "test_batch" if batches else "every data_batch_N")
    parts = [
        _read_part(name, archive, file, files[file], b"labels", _CIFAR10_SUMS[file], verify)
        for file in (*batches, "test_batch")
    ]
    train = join_parts(parts[:-1])
    subset = ""
    if len(batches) < len(_BATCHES):
        subset = f"{len(train[0]):,}-image subset: {', '.join(batches)} of {len(_BATCHES)}"
    note = join_notes(subset, "" if verify else UNVERIFIED)
    return image_dataset(name, train, parts[-1], CIFAR10_CLASSES, stats=_CIFAR10_STATS, note=note)


def cifar100(data_dir: Path | None, *, coarse: bool = False, verify: bool = True) -> Dataset:
    """Photographs, 3×32×32, 100 classes (or 20 coarse ones), 50,000 / 10,000 (Krizhevsky, 2009).

    Args:
        data_dir: the folder with `train`, `test` and `meta` or the archive, or one that holds it.
        coarse: label with the 20 superclasses.
        verify: refuse files whose md5 is not known.
    """
    name = "cifar-100"
    folder = data_folder(name, data_dir)
    pattern = re.compile(r"(^|/)(train|test|meta)$")
    archives = find_archives(
        folder,
        lambda f: (f / "train").is_file() and has_file("meta", "test")(f),
        re.compile(r"^cifar[-_]?100"),
    )
    found = gather_first(archives, pattern)
    if found is None:
        raise missing_error(name, folder, "cifar-100-python.tar.gz or the folder cifar-100-python")
    archive, files = found
    for file in ("train", "test"):
        if file not in files:
            raise incomplete_error(name, archive, file)
    key, classes = (b"coarse_labels", 20) if coarse else (b"fine_labels", 100)
    train, test = (
        _read_part(name, archive, file, files[file], key, _CIFAR100_SUMS[file], verify) for file in ("train", "test")
    )
    class_names: tuple[str, ...] = ()
    if "meta" in files:
        meta = _read_batch(name, archive, "meta", files["meta"], _CIFAR100_SUMS["meta"], verify)
        class_names = _names(meta.get(key.removesuffix(b"s") + b"_names"), classes, archive.where("meta"))
    counts = part_note(len(train[0]), 50_000, len(test[0]), 10_000)
    note = join_notes(f"subset: {counts}" if counts else "", "" if verify else UNVERIFIED)
    return image_dataset(name, train, test, class_names, classes=classes, stats=_CIFAR100_STATS, note=note)


def _read_part(
    name: str, archive: Archive, file: str, data: bytes, label_key: bytes, sums: tuple[str, ...], verify: bool
) -> Part:
    """Images and labels of one batch."""
    where = archive.where(file)
    batch = _read_batch(name, archive, file, data, sums, verify)
    images, labels = batch.get(b"data"), batch.get(label_key)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != 3072:
        raise damaged_error(where, "it has no rows of 3,072 bytes")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise damaged_error(where, f"it has no list of {label_key.decode()}")
    if len(labels) != len(images):
        raise damaged_error(where, f"it has {len(images):,} images but {len(labels):,} labels")
    return images.reshape(-1, 3, 32, 32), np.array(labels, np.int64)


def _read_batch(
    name: str, archive: Archive, file: str, data: bytes, sums: tuple[str, ...], verify: bool
) -> dict[bytes, Any]:
    """The dict in a batch, its keys as bytes."""
    if verify:
        check_md5(name, archive.where(file), data, sums)
    return load_batch(data, archive.where(file))


def _names(names: Any, count: int, where: str) -> tuple[str, ...]:
    if not isinstance(names, list) or len(names) != count:
        raise damaged_error(where, f"it does not name {count} classes")
    return tuple(label.decode("ascii", "replace") if isinstance(label, bytes) else str(label) for label in names)


def load_batch(data: bytes, where: str) -> dict[bytes, Any]:
    """Unpickle a CIFAR batch: a dict of numbers, strings, lists and arrays of bytes, or a refusal."""
    try:
        loaded = _BatchUnpickler(io.BytesIO(data), encoding="bytes").load()
    except _ForbiddenError as error:
        raise UsageError(f"{where} is refused: a CIFAR batch has no use for '{error}'") from None
    except Exception as error:  # a damaged pickle fails in as many ways as the unpickler has operations
        raise damaged_error(where, f"it is not a pickled batch ({type(error).__name__})") from None
    if not isinstance(loaded, dict):
        raise damaged_error(where, "it does not hold a dict")
    found = {key: value.array if isinstance(value, _Rebuilt) else value for key, value in loaded.items()}
    return {key.encode() if isinstance(key, str) else key: value for key, value in found.items()}


class _ForbiddenError(Exception):
    """A pickle asked for a name, or used one in a way, that no CIFAR batch needs."""


class _BatchUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise _ForbiddenError(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        raise _ForbiddenError("a persistent id")


_ARRAY = object()  # stands for numpy.ndarray, which a pickle could otherwise call to allocate at will
# numpy's own state of the type of bytes; the last number are flags, by which numpy might take bytes for pointers.
_PLAIN = [(3, order, None, None, None, -1, -1, 0) for order in ("|", b"|")]


class _ByteType:
    """Stands for `numpy.dtype("u1")`: a pickle never gets hold of a dtype, whose state it could set."""

    def __setstate__(self, state: object) -> None:
        if state not in _PLAIN:
            raise _ForbiddenError("a numpy.dtype in another state")


class _Rebuilt:
    """Stands for an empty array, which the pickle then fills."""

    array: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise _ForbiddenError("a numpy.ndarray in another state")
        _, shape, kind, fortran, data = state
        if not isinstance(kind, _ByteType) or not isinstance(data, bytes):
            raise _ForbiddenError("a numpy.ndarray of anything but bytes")
        if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
            raise _ForbiddenError("a numpy.ndarray of another shape")
        self.array = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Function:
    """A function that a pickle may call, and whose state it may not set."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: object) -> None:
        raise _ForbiddenError("a function in another state")


def _rebuild(kind: object, shape: object, code: object) -> _Rebuilt:
    """What numpy's `_reconstruct` is used for."""
    if kind is not _ARRAY:
        raise _ForbiddenError("numpy's _reconstruct of another type")
    return _Rebuilt()


def _byte_type(code: object, align: object, copy: object) -> _ByteType:
    """The one element type that images have; arrays of objects stay out."""
    if code not in ("u1", b"u1", "|u1", b"|u1"):
        raise _ForbiddenError(f"numpy.dtype({code!r})")
    return _ByteType()


def _latin1(text: str, encoding: object) -> bytes:
    """How Python 3 writes bytes into an old pickle: as text, to be encoded on reading."""
    if encoding not in ("latin1", "latin-1", b"latin1", b"latin-1"):
        raise _ForbiddenError(f"the encoding {encoding!r}")
    return text.encode("latin-1")


_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Function(_rebuild),
    ("numpy._core.multiarray", "_reconstruct"): _Function(_rebuild),
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _Function(_byte_type),
    ("_codecs", "encode"): _Function(_latin1),
}
