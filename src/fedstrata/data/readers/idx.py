"""MNIST and Fashion-MNIST: four IDX files, gzipped as upstream serves them, or unpacked."""

from __future__ import annotations

import math
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedstrata.data.examples import Dataset
from fedstrata.data.readers.archives import (
    Archive,
    check_md5,
    damaged_error,
    data_folder,
    find_archives,
    has_file,
    incomplete_error,
    md5,
    missing_error,
    nearest_name,
)
from fedstrata.data.readers.build import UNVERIFIED, Bytes, Stats, image_dataset, join_notes, part_note
from fedstrata.errors import UsageError

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

AXES = 3
"""Most axes of a file: images have a number, a height and a width."""
_UNPACKED_LIMIT = 256 << 20


@dataclass(frozen=True)
class _Set:
    """One dataset in this form; `sums` are the md5 of the unpacked files, so one serves a file however packed."""

    name: str
    key: str
    archive: str
    sums: dict[str, str]
    stats: Stats
    class_names: tuple[str, ...]


_MNIST = _Set(
    name="mnist",
    key="mnist",
    archive=r"^mnist",
    sums={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    stats=((0.1307,), (0.3081,)),
    class_names=("0", "1", "2", "3", "4", "5", "6", "7", "8", "9"),
)
_FASHION = _Set(
    name="fashion-mnist",
    key="fashionmnist",
    archive=r"^fashion[-_ ]?mnist",
    sums={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    stats=((0.2860,), (0.3530,)),
    class_names=(
        "T-shirt/top",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    ),
)


def mnist(data_dir: Path | None, *, verify: bool = True) -> Dataset:
    """Handwritten digits, 1×28×28, 10 classes, 60,000 / 10,000 (LeCun et al., 1998).

    Args:
        data_dir: the folder with the four IDX files (gzipped or not), or one that holds it.
        verify: refuse files whose md5 is not upstream's.
    """
    return _load(_MNIST, data_dir, verify)


def fashion_mnist(data_dir: Path | None, *, verify: bool = True) -> Dataset:
    """Pictures of clothing, 1×28×28, 10 classes, 60,000 / 10,000 (Xiao et al., 2017).

    Args:
        data_dir: the folder with the four IDX files (gzipped or not), or one that holds it.
        verify: refuse files whose md5 is not upstream's.
    """
    return _load(_FASHION, data_dir, verify)


def read_idx(data: bytes, where: str) -> Bytes:
    """The array in an IDX file of bytes: two zeros, the type 8, the number of axes, their lengths, the values."""
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise damaged_error(where, "it does not start as an IDX file of bytes does")
    axes = data[3]
    if axes > AXES:
        raise damaged_error(where, f"it has {axes} axes")
    start = 4 + 4 * axes
    if len(data) < start:
        raise damaged_error(where, "it ends within its head")
    shape = struct.unpack(f">{axes}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise damaged_error(where, f"it holds {len(data) - start:,} values where its head says {math.prod(shape):,}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _load(kind: _Set, data_dir: Path | None, verify: bool) -> Dataset:
    folder = data_folder(kind.name, data_dir)
    holds = has_file(*FILES, *(f"{file}.gz" for file in FILES))
    archives = nearest_name(folder, find_archives(folder, holds, re.compile(kind.archive)), kind.key)
    if not archives:
        raise missing_error(kind.name, folder, f"{FILES[0]}[.gz] and its three companions")
    archive = _choose_archive(archives, kind.sums) if verify else archives[0]
    found = _read_files(archive, FILES)
    arrays = []
    for file in FILES:
        if file not in found:
            raise incomplete_error(kind.name, archive, f"{file}[.gz]")
        where, data = found[file]
        if verify:
            check_md5(kind.name, where, data, (kind.sums[file],))
        array = read_idx(data, where)
        axes = 3 if "images" in file else 1
        if array.ndim != axes:
            raise damaged_error(where, f"it has {array.ndim} axes, not {axes}")
        arrays.append(array)
    train, test = ((arrays[i][:, None], arrays[i + 1].astype(np.int64)) for i in (0, 2))
    counts = part_note(len(train[0]), 60_000, len(test[0]), 10_000)
    note = join_notes(counts, "" if verify else UNVERIFIED)
    return image_dataset(kind.name, train, test, kind.class_names, stats=kind.stats, note=note)


def _choose_archive(archives: list[Archive], sums: dict[str, str]) -> Archive:
    """The first archive with the right training labels, which tell the datasets apart; else the first of all."""
    file = FILES[1]
    for archive in archives:
        if any(md5(data) == sums[file] for _, data in _read_files(archive, (file,)).values()):
            return archive
    return archives[0]


def _read_files(archive: Archive, files: tuple[str, ...]) -> dict[str, tuple[str, bytes]]:
    """How a message names each file, and its content unpacked; by the file's name without `.gz`."""
    pattern = re.compile(rf"(^|/)({'|'.join(files)})(\.gz)?$")
    found: dict[str, tuple[str, bytes]] = {}
    for file, data in archive.gather(pattern).items():
        if file.removesuffix(".gz") not in found:
            found[file.removesuffix(".gz")] = archive.where(file), _gunzip(data, archive.where(file))
    return found


def _gunzip(data: bytes, where: str) -> bytes:
    if data[:2] != b"\x1f\x8b":
        return data
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacker.decompress(data, _UNPACKED_LIMIT)
    except zlib.error as error:
        raise damaged_error(where, str(error)) from None
    if unpacker.unconsumed_tail:
        raise UsageError(f"{where} unpacks to more than {_UNPACKED_LIMIT:,} bytes")
    if not unpacker.eof:
        raise damaged_error(where, "it ends too early")
    return unpacked
