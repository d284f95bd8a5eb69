"""SVHN, CINIC-10 and Tiny-ImageNet: colour images from MATLAB files and from trees of PNG or JPEG files."""

from __future__ import annotations

import io
import re
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
    gather_first,
    has_file,
    incomplete_error,
    missing_error,
)
from fedstrata.data.readers.build import (
    UNVERIFIED,
    Bytes,
    Integers,
    Part,
    image_dataset,
    join_notes,
    join_parts,
    part_note,
)
from fedstrata.data.readers.cifar import CIFAR10_CLASSES
from fedstrata.data.sources import SOURCES
from fedstrata.errors import UsageError

_SVHN_COUNTS = {"train_32x32.mat": 73_257, "extra_32x32.mat": 531_131, "test_32x32.mat": 26_032}
_CINIC_COUNT = 90_000
_MAT_LIMIT = 2 << 30
_PICTURE_LIMIT = 4 << 20
_TINY = re.compile(
    r"(?:^|/)(?:wnids\.txt|words\.txt|val/val_annotations\.txt"
    r"|train/(n\d+)/(?:images/)?[^/.][^/]*\.jpe?g|val/images/([^/.][^/]*\.jpe?g))$",
    re.IGNORECASE,
)


def svhn(data_dir: Path | None, *, extra: bool = False, verify: bool = True) -> Dataset:
    """House numbers, 3×32×32, 10 classes, 73,257 / 26,032 (Netzer et al., 2011).

    Upstream labels the digit 0 with 10; here it is 0.

    Args:
        data_dir: the folder with `train_32x32.mat` and `test_32x32.mat`, or one that holds it.
        extra: join the 531,131 images of `extra_32x32.mat` to the train part.
        verify: refuse files whose md5 is not upstream's.
    """
    name = "svhn"
    folder = data_folder(name, data_dir)
    wanted = ("train_32x32.mat", *(("extra_32x32.mat",) if extra else ()), "test_32x32.mat")
    pattern = re.compile(rf"(^|/)({'|'.join(map(re.escape, wanted))})$")
    found = gather_first(find_archives(folder, has_file(*wanted), re.compile(r"^svhn")), pattern, _MAT_LIMIT)
    if found is None:
        raise missing_error(name, folder, " and ".join(wanted))
    archive, files = found
    sums = {remote.name: remote.md5 for remote in SOURCES[name]}
    parts: list[Part] = []
    for file in wanted:
        if file not in files:
            raise incomplete_error(name, archive, file)
        known = sums[file]
        if verify and known is not None:
            check_md5(name, archive.where(file), files[file], (known,))
        parts.append(_read_mat(files.pop(file), archive.where(file)))
    train = join_parts(parts[:-1])
    full = sum(_SVHN_COUNTS[file] for file in wanted[:-1])
    counts = part_note(len(train[0]), full, len(parts[-1][0]), _SVHN_COUNTS[wanted[-1]])
    note = join_notes(counts, "" if verify else UNVERIFIED)
    return image_dataset(name, train, parts[-1], tuple(str(digit) for digit in range(10)), note=note)


def _read_mat(data: bytes, where: str) -> Part:
    """Images `X` (H, W, C, N) and labels `y` (N, 1) of one of SVHN's files."""
    from scipy.io import loadmat  # slow to import, and only this dataset needs it

    try:
        content = loadmat(io.BytesIO(data), variable_names=["X", "y"])
        images, labels = content["X"], content["y"].reshape(-1).astype(np.int64)
    except Exception as error:  # the reader fails in as many ways as the format has fields
        raise damaged_error(where, f"it is not a MATLAB file with X and y ({type(error).__name__})") from None
    if images.dtype != np.uint8 or images.shape[:3] != (32, 32, 3) or images.ndim != 4:
        raise damaged_error(where, "its X is not 32×32×3×N bytes")
    if len(labels) != images.shape[3]:
        raise damaged_error(where, f"it has {images.shape[3]:,} images but {len(labels):,} labels")
    labels[labels == 10] = 0
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels


def cinic10(data_dir: Path | None, *, valid: bool = False) -> Dataset:
    """CIFAR-10 and ImageNet pictures, 3×32×32, 10 classes, 90,000 / 90,000 (Darlow et al., 2018).

    Args:
        data_dir: the folder with `train/`, `valid/` and `test/` or the archive, or one that holds it.
        valid: join the 90,000 validation images to the train part.
    """
    name = "cinic-10"
    folder = data_folder(name, data_dir)
    splits = ("train", "valid", "test") if valid else ("train", "test")
    pattern = re.compile(rf"(?:^|/)({'|'.join(splits)})/({'|'.join(CIFAR10_CLASSES)})/[^/.][^/]*\.png$")
    archives = find_archives(
        folder, lambda f: (f / "train" / CIFAR10_CLASSES[0]).is_dir(), re.compile(r"^cinic[-_]?10"), deep=True
    )
    for archive in archives:
        found = {split: _Pictures(32) for split in splits}
        for inner, data in archive.walk(pattern, _PICTURE_LIMIT):
            split, label = re.findall(pattern, inner)[0]
            found[split].add(inner, data, CIFAR10_CLASSES.index(label), archive)
        if any(pictures.names for pictures in found.values()):
            break
    else:
        raise missing_error(name, folder, "CINIC-10.tar.gz or a folder with train/airplane and its companions")
    parts = {split: pictures.part() for split, pictures in found.items()}
    if valid and not len(parts["valid"][0]):
        raise incomplete_error(name, archive, "valid")
    train = join_parts([parts[split] for split in splits[:-1]])
    note = part_note(len(train[0]), _CINIC_COUNT * (len(splits) - 1), len(parts["test"][0]), _CINIC_COUNT)
    return image_dataset(name, train, parts["test"], CIFAR10_CLASSES, note=note)


def tiny_imagenet(data_dir: Path | None) -> Dataset:
    """A small ImageNet, 3×64×64, 200 classes, 100,000 / 10,000 (Stanford's CS231n, 2015).

    Classes stand in the order of `wnids.txt`. The test part is upstream's validation set: its test labels
    were never published. Grey pictures are turned into colour ones.

    Args:
        data_dir: the folder with `wnids.txt`, `train/` and `val/` or the archive, or one that holds it.
    """
    name = "tiny-imagenet"
    folder = data_folder(name, data_dir)
    archives = find_archives(folder, has_file("wnids.txt"), re.compile(r"^tiny[-_]?imagenet"), deep=True)
    found = next((files for files in map(_read_tiny, archives) if files.train.names), None)
    if found is None:
        raise missing_error(name, folder, "tiny-imagenet-200.zip or a folder with wnids.txt and train/")
    for text in ("wnids.txt", "val_annotations.txt"):
        if text not in found.texts:
            raise incomplete_error(name, found.archive, text)
    order = {synset: number for number, synset in enumerate(found.texts["wnids.txt"].split())}
    rows = (line.split("\t") for line in found.texts["val_annotations.txt"].splitlines() if "\t" in line)
    annotated = {row[0]: row[1].strip() for row in rows}
    found.train.labels = [_synset(order, synset, found.archive) for synset in found.synsets]
    found.test.labels = [_synset(order, annotated.get(file, f"of {file}"), found.archive) for file in found.files]
    words = dict(line.split("\t", 1) for line in found.texts.get("words.txt", "").splitlines() if "\t" in line)
    class_names = tuple(words.get(synset, synset).split(",")[0].strip() for synset in order)
    parts = found.train.part(), found.test.part()
    counts = part_note(len(parts[0][0]), 100_000, len(parts[1][0]), 10_000)
    classes = f"{len(order)} of 200 classes" if len(order) < 200 else ""
    note = join_notes(f"subset: {classes}" if classes else "", counts)
    return image_dataset(name, *parts, class_names, note=note)


@dataclass(frozen=True, eq=False)
class _TinyFiles:
    """What an archive holds of Tiny-ImageNet: its text files by name, and its pictures, not labelled yet.

    Args:
        archive: where all this is.
        texts: `wnids.txt` and the like.
        train: the training pictures, in stored order.
        synsets: the class of each of these.
        test: the validation pictures, in stored order.
        files: the name of each of these.
    """

    archive: Archive
    texts: dict[str, str]
    train: _Pictures
    synsets: list[str]
    test: _Pictures
    files: list[str]


def _read_tiny(archive: Archive) -> _TinyFiles:
    """Decode all pictures of an archive, in one pass."""
    found = _TinyFiles(archive, {}, _Pictures(64), [], _Pictures(64), [])
    for inner, data in archive.walk(_TINY, _PICTURE_LIMIT):
        match = _TINY.search(inner)
        if match is None or (match[1] is None and match[2] is None):
            found.texts[inner.rpartition("/")[2]] = data.decode("utf-8", "replace")
        elif match[1] is not None:
            found.synsets.append(match[1])
            found.train.add(inner, data, 0, archive)
        else:
            found.files.append(match[2])
            found.test.add(inner, data, 0, archive)
    return found


def _synset(order: dict[str, int], synset: str, archive: Archive) -> int:
    """The number of a class."""
    if synset not in order:
        raise UsageError(f"the class {synset} in {archive.path} is not in its wnids.txt")
    return order[synset]


class _Pictures:
    """Decoded pictures of one size, gathered as they come and handed out in the order of their names."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.names: list[str] = []
        self.labels: list[int] = []
        self._pixels = bytearray()

    def add(self, inner: str, data: bytes, label: int, archive: Archive) -> None:
        """Decode one picture."""
        from PIL import Image

        try:
            with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
                shape = image.size
                pixels = image.convert("RGB").tobytes() if shape == (self.size, self.size) else b""
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise damaged_error(archive.where(inner), str(error) or type(error).__name__) from None
        if not pixels:
            raise UsageError(f"{archive.where(inner)} is {shape[0]}×{shape[1]}, not {self.size}×{self.size}")
        self.names.append(inner)
        self.labels.append(label)
        self._pixels += pixels

    def part(self) -> Part:
        """Images (N, 3, size, size) and labels, the same for a folder, a tar and a zip of the same files."""
        rows: Bytes = np.frombuffer(self._pixels, np.uint8).reshape(-1, self.size, self.size, 3)
        order = np.array(sorted(range(len(self.names)), key=self.names.__getitem__), np.int64)
        labels: Integers = np.array(self.labels, np.int64)[order]
        images = np.empty((len(order), 3, self.size, self.size), np.uint8)
        for channel in range(3):
            images[:, channel] = rows[order, :, :, channel]
        return images, labels
