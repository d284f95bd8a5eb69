"""Shakespeare's plays: predict the next character; one natural client per role.

Two formats are read. *Plays* in Jon Bosak's XML: a role is a (play, speaker) pair, its speeches stand in the
order of the play, and the end of its text is its test part: no test window shares a character with a training
window. *LEAF's* JSON (Caldas et al., 2018): windows of 80 characters and the next one, as its
preprocessing stored them.

The alphabet has 80 symbols: id 0 stands for every character outside it; then come line end, space,
punctuation, digits and letters, in the order of `ALPHABET`.
"""

from __future__ import annotations

import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np

from fedstrata.core.lazy import torch
from fedstrata.data.examples import Dataset, TensorExamples
from fedstrata.data.readers.archives import Archive, damaged_error, data_folder, missing_error
from fedstrata.data.readers.build import Integers, join_notes, tensor_of
from fedstrata.data.readers.leaf import has_leaf, leaf_archives, read_users, spans
from fedstrata.errors import UsageError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
ALPHABET = UNKNOWN + "\n " + "!\"&'(),-.:;?[]_" + string.digits + string.ascii_uppercase + string.ascii_lowercase
"""The symbols in the order of their ids."""

Windows = tuple[Integers, Integers]
"""Windows of tokens (N, length) and the token after each (N,)."""

_CODES = np.zeros(128, np.int64)
_CODES[[ord(symbol) for symbol in ALPHABET[1:]]] = np.arange(1, len(ALPHABET))
_PLAY = re.compile(r"(?:^|/)[^/.][^/]*\.xml$")
_PLAY_LIMIT = 16 << 20


def shakespeare(
    data_dir: Path | None,
    *,
    length: int = 80,
    stride: int | None = None,
    test: float = 0.1,
    min_lines: int = 20,
    task: Literal["classification", "next_token"] = "classification",
) -> Dataset:
    """Next character in Shakespeare's plays, 80 symbols, one natural client per role (XML plays, LEAF's JSON).

    `stride`, `test` and `min_lines` cut plays into windows; LEAF's windows are taken as they are. With the task
    `next_token` the target is the next character at every position of a window, not only after its end.

    Args:
        data_dir: the folder with the plays, or with LEAF's `train/` and `test/`, or an archive of either, or
            one that holds it.
        length: characters the model sees; of LEAF's 80, the last ones.
        stride: characters from the start of one window to that of the next; by default 8, and `length` for
            `next_token`, which has each character as a target once.
        test: the last share of each role's text, kept for testing.
        min_lines: a role with fewer lines is left out, as is one too short for a window in either part.
        task: the character after a window, or at every position.
    """
    name = "shakespeare"
    if stride is None:
        stride = length if task == "next_token" else 8
    if length < 1 or stride < 1 or min_lines < 0:
        raise UsageError(f"{name} needs length and stride of at least 1 and min_lines of at least 0")
    if not 0 < test < 1:
        raise UsageError(f"{name} needs a test share between 0 and 1, not {test}")
    folder = data_folder(name, data_dir)
    for archive in leaf_archives(folder, name, lambda f: _has_plays(f) or has_leaf(f), re.compile("shakes|shaks")):
        roles, plays = read_plays(archive)
        if roles:
            return _as_task(_from_plays(name, roles, plays, length, stride, test, min_lines), task)
        train, held_out = read_users(archive, lambda x, y: _stored_windows(x, y, length))
        if train and held_out:
            note = "LEAF's windows as stored: stride, test and min_lines do not apply"
            return _as_task(_dataset(name, train, held_out, note), task)
    raise missing_error(name, folder, "plays in XML, or LEAF's train/*.json and test/*.json")


def _as_task(dataset: Dataset, task: str) -> Dataset:
    """The dataset with a target for each window, or for every position of it."""
    if task == "classification":
        return dataset
    parts = [replace(part, y=torch.cat([part.x[:, 1:], part.y[:, None]], 1)) for part in (dataset.train, dataset.test)]
    return replace(dataset, train=parts[0], test=parts[1], task=task, deal_by=dataset.labels)


def encode(text: str) -> Integers:
    """The ids of a text's characters."""
    points = np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)
    return np.where(points < 128, _CODES[np.minimum(points, 127)], 0)


def decode(ids: Integers) -> str:
    """The text of ids; what was outside the alphabet is a replacement character."""
    return "".join(ALPHABET[int(number)] for number in ids)


def windows(tokens: Integers, length: int, stride: int) -> Windows:
    """Every `stride`-th window of `length` tokens, and the token that follows it."""
    if len(tokens) <= length:
        return np.empty((0, length), np.int64), np.empty(0, np.int64)
    views = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::stride]
    return views[:, :-1], views[:, -1]


def read_plays(archive: Archive) -> tuple[dict[str, list[str]], int]:
    """The lines of each role, keyed `play/SPEAKER`, and the number of plays.

    Names that differ in case or spaces are one role. A speech of several speakers belongs to the first; stage
    directions within a line are left out. XML files that are no plays are passed over.
    """
    roles: dict[str, list[str]] = {}
    plays = 0
    for inner, data in sorted(archive.walk(_PLAY, _PLAY_LIMIT)):
        if b"<PLAY" not in data:
            continue
        if b"<!ENTITY" in data:
            raise UsageError(f"{archive.where(inner)} is refused: a play has no use for XML entities of its own")
        try:
            play = ElementTree.fromstring(data)
        except ElementTree.ParseError as error:
            raise damaged_error(archive.where(inner), str(error)) from None
        plays += 1
        title = inner.rpartition("/")[2].removesuffix(".xml")
        for speech in play.iter("SPEECH"):
            speaker = " ".join((speech.findtext("SPEAKER") or "").upper().split())
            lines = roles.setdefault(f"{title}/{speaker}", [])
            lines.extend(_line(line) for line in speech.findall("LINE"))
    return roles, plays


def _line(line: ElementTree.Element) -> str:
    text = (line.text or "") + "".join(child.tail or "" for child in line)
    return " ".join(text.split())


def _has_plays(folder: Path) -> bool:
    """Whether `folder` has plays: told by the head of its first few XML files, as many things are XML."""
    for path in sorted(folder.glob("*.xml"))[:3]:
        with path.open("rb") as file:
            if b"<PLAY" in file.read(4096):
                return True
    return False


def _from_plays(
    name: str, roles: dict[str, list[str]], plays: int, length: int, stride: int, test: float, min_lines: int
) -> Dataset:
    train: dict[str, Windows] = {}
    held_out: dict[str, Windows] = {}
    for role, lines in roles.items():
        tokens = encode("\n".join(lines) + "\n")
        cut = len(tokens) - round(len(tokens) * test)
        first, last = (windows(part, length, stride) for part in (tokens[:cut], tokens[cut:]))
        if len(lines) >= min_lines and len(first[1]) and len(last[1]):
            train[role], held_out[role] = first, last
    if not train:
        raise UsageError(f"{name}: no role has {min_lines} lines and text for a window of {length} in both parts")
    note = f"{plays} {'play' if plays == 1 else 'plays'}, {len(train)} of {len(roles)} roles"
    short = len(roles) - len(train)
    left_out = f"{short} with fewer than {min_lines} lines or too little text left out" if short else ""
    return _dataset(name, train, held_out, join_notes(note, left_out))


def _stored_windows(x: Any, y: Any, length: int) -> Windows:
    """One LEAF user's windows, each cut to its last `length` characters."""
    if len(x) != len(y):
        raise ValueError(f"{len(x)} windows but {len(y)} next characters")
    if not all(isinstance(text, str) and len(text) >= length for text in x):
        raise ValueError(f"x is not strings of at least {length} characters")
    if not all(isinstance(symbol, str) and len(symbol) == 1 for symbol in y):
        raise ValueError("y is not single characters")
    return encode("".join(text[-length:] for text in x)).reshape(-1, length), encode("".join(y))


def _dataset(name: str, train: dict[str, Windows], held_out: dict[str, Windows], note: str) -> Dataset:
    roles = tuple(sorted(role for role, (_, labels) in train.items() if len(labels)))
    parts = []
    for users in (train, held_out):
        pairs = [users[role] for role in sorted(users)]
        x, y = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
        if not len(y):
            raise UsageError(f"{name} has no windows in its {'training' if users is train else 'test'} part")
        parts.append(TensorExamples(tensor_of(x), tensor_of(y)))
    groups: tuple[torch.Tensor, ...] = spans([len(train[role][1]) for role in roles])
    names = tuple({"\n": "\\n", " ": "space", UNKNOWN: "unknown"}.get(symbol, symbol) for symbol in ALPHABET)
    return Dataset(name, parts[0], parts[1], len(ALPHABET), names, groups, roles, note)
