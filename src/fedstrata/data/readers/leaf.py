"""LEAF's JSON files (Caldas et al., 2018), as its `preprocess.sh` leaves them; and FEMNIST, its handwriting.

Each file in `train/` and `test/` is `{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}`.
A user is a natural client.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedstrata.core.lazy import torch
from fedstrata.data.examples import Dataset
from fedstrata.data.readers.archives import (
    Archive,
    damaged_error,
    data_folder,
    find_archives,
    incomplete_error,
    missing_error,
    nearest_name,
)
from fedstrata.data.readers.build import Part, image_dataset, join_parts, tensor_of
from fedstrata.errors import UsageError

T = TypeVar("T")

_JSON = re.compile(r"(?:^|/)(train|test)/[^/.][^/]*\.json$")
_JSON_LIMIT = 4 << 30
_WRITERS, _IMAGES = 3_550, 805_263
_DATASETS = ("femnist", "shakespeare", "celeba", "sent140", "reddit", "synthetic")


def femnist(data_dir: Path | None) -> Dataset:
    """Handwritten characters, 1×28×28, 62 classes, one natural client per writer (LEAF; Caldas et al., 2018).

    Classes are 0–9, A–Z, a–z. LEAF stores each pixel as a fraction of 255, so uint8 loses nothing.

    Args:
        data_dir: the folder with LEAF's `train/` and `test/` or an archive of it, or one that holds it.
    """
    name = "femnist"
    folder = data_folder(name, data_dir)
    for archive in leaf_archives(folder, name, has_leaf, re.compile("^femnist")):
        train, test = read_users(archive, _images)
        if train:
            break
    else:
        raise missing_error(name, folder, "LEAF's train/*.json and test/*.json")
    if not test:
        raise incomplete_error(name, archive, "test/*.json")
    writers = tuple(sorted(writer for writer, (_, labels) in train.items() if len(labels)))
    groups = spans([len(train[writer][1]) for writer in writers])
    parts = [join_parts([users[user] for user in sorted(users)]) for users in (train, test)]
    images = len(parts[0][0]) + len(parts[1][0])
    note = ""
    if images < _IMAGES:
        found = len({*train, *test})
        note = f"{images:,} images of {found:,} writers (LEAF's whole set: {_IMAGES:,} of {_WRITERS:,})"
    class_names = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
    return image_dataset(name, parts[0], parts[1], class_names, groups=groups, group_names=writers, note=note)


def has_leaf(folder: Path) -> bool:
    """Whether LEAF's two folders of JSON files are in `folder`."""
    return all(any((folder / part).glob("*.json")) for part in ("train", "test"))


def leaf_archives(folder: Path, name: str, holds: Callable[[Path], bool], archive: re.Pattern[str]) -> list[Archive]:
    """The places that may hold LEAF's dataset `name`.

    All of LEAF's datasets look alike: folders named after another are left out, those named after this one
    come first.
    """
    others = {dataset for dataset in _DATASETS if dataset != name}
    archives = find_archives(folder, holds, archive, deep=True)
    own = [archive for archive in archives if others.isdisjoint(archive.path.relative_to(folder).parts)]
    return nearest_name(folder, own, name)


def read_users(archive: Archive, convert: Callable[[Any, Any], T]) -> tuple[dict[str, T], dict[str, T]]:
    """What `convert(x, y)` makes of each user's examples: (train, test), by user."""
    splits: dict[str, dict[str, T]] = {"train": {}, "test": {}}
    for inner, data in archive.walk(_JSON, _JSON_LIMIT):
        where = archive.where(inner)
        users = splits[inner.rpartition("/")[0].rpartition("/")[2]]
        for user, content in _users(data, where):
            if user in users:
                raise UsageError(f"the user {user} is in two files of {archive.path}")
            try:
                users[user] = convert(content["x"], content["y"])
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise damaged_error(where, f"user {user}: {error}") from None
    return splits["train"], splits["test"]


def _users(data: bytes, where: str) -> Iterator[tuple[str, Any]]:
    try:
        content = json.loads(data)
        found = [(user, content["user_data"][user]) for user in content["users"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged_error(where, f"it is not LEAF's JSON ({type(error).__name__})") from None
    yield from found


def _images(x: Any, y: Any) -> Part:
    pixels = np.asarray(x, np.float64)
    if pixels.size == 0:
        pixels = pixels.reshape(0, 784)
    if pixels.ndim != 2 or pixels.shape[1] != 784:
        raise ValueError("x is not rows of 784 numbers")
    if not ((pixels >= 0) & (pixels <= 1)).all():
        raise ValueError("x is not between 0 and 1")
    labels = np.asarray(y, np.int64)
    if labels.shape != pixels.shape[:1]:
        raise ValueError(f"{len(pixels)} images but {labels.size} labels")
    return np.rint(pixels * 255).astype(np.uint8).reshape(-1, 1, 28, 28), labels


def spans(sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """Consecutive indices, `sizes[k]` of them for the k-th client."""
    ends = np.cumsum([0, *sizes])
    return tuple(tensor_of(np.arange(a, b)) for a, b in pairwise(ends.tolist()))
