"""Plays and LEAF's windows as next-character examples."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstrata.data.datasets import load_dataset
from fedstrata.data.readers.shakespeare import ALPHABET, UNKNOWN, decode, encode, windows
from fedstrata.errors import UsageError


def speech(speakers: str, *lines: str) -> str:
    names = "".join(f"<SPEAKER>{name}</SPEAKER>" for name in speakers.split("+"))
    return f"<SPEECH>{names}{''.join(f'<LINE>{line}</LINE>' for line in lines)}</SPEECH>"


def play(*speeches: str) -> bytes:
    return f"<?xml version='1.0'?><PLAY><TITLE>T</TITLE><ACT><SCENE>{''.join(speeches)}</SCENE></ACT></PLAY>".encode()


def long(word: str, count: int) -> list[str]:
    return [f"{word} line number {i}" for i in range(count)]


FIRST = play(
    speech("ANN", *long("first", 30)),
    speech("BOB", "too short"),
    speech("ANN + BOB", *long("joint", 3)),
    speech("Ann", "<STAGEDIR>Aside</STAGEDIR> and   one &amp; all <STAGEDIR>dies</STAGEDIR>!"),
)
SECOND = play(speech("ANN", *long("other", 40)))


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def test_the_alphabet_has_eighty_symbols_and_one_for_the_rest() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    assert ALPHABET[0] == UNKNOWN
    text = 'To be, or not -- "to be":\n[Exit]; O! (2) & don\'t_.?'
    assert decode(encode(text)) == text
    assert encode("é~\U0001f600a\x00").tolist() == [0, 0, 0, ALPHABET.index("a"), 0]


def test_windows_by_hand() -> None:
    """Six tokens, windows of two, stride two: (0,1)→2 and (2,3)→4; the window at 4 has no next token."""
    x, y = windows(np.arange(6), 2, 2)
    assert x.tolist() == [[0, 1], [2, 3]]
    assert y.tolist() == [2, 4]
    assert [len(part) for part in windows(np.arange(2), 2, 1)] == [0, 0]


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_plays(form: str, tmp_path: Path) -> None:
    files = {"one.xml": FIRST, "two.xml": SECOND, "style.xml": b"<sheet/>", "play.dtd": b"<!ELEMENT PLAY>"}
    if form == "folder":
        write(tmp_path / "plays", files)
    else:
        with zipfile.ZipFile(tmp_path / "shakespeare-plays.zip", "w") as archive:
            for name, data in files.items():
                archive.writestr(f"shakespeare/{name}", data)
    dataset = load_dataset("shakespeare(length=10, stride=4, test=0.25, min_lines=5)", tmp_path)
    assert dataset.group_names == ("one/ANN", "two/ANN")
    assert dataset.note == "2 plays, 2 of 3 roles; 1 with fewer than 5 lines or too little text left out"
    assert dataset.input_shape == (10,)
    assert dataset.train.x.dtype == dataset.train.y.dtype == torch.long
    assert dataset.classes == len(dataset.class_names) == 80
    assert torch.equal(torch.cat(dataset.groups), torch.arange(len(dataset.train)))
    text = "\n".join([*long("first", 30), *long("joint", 3), "and one & all !"]) + "\n"
    cut = len(text) - round(len(text) * 0.25)
    group = dataset.groups[0]
    assert len(group) == len(range(0, cut - 10, 4))
    for k in (0, 1, len(group) - 1):
        x, y = dataset.train.batch(group[k : k + 1])
        assert decode(x[0].numpy()) + decode(y.numpy()) == text[4 * k : 4 * k + 11]
    x, y = dataset.test.batch(torch.tensor([0]))
    assert decode(x[0].numpy()) + decode(y.numpy()) == text[cut : cut + 11]


def test_a_role_needs_a_window_in_each_part(tmp_path: Path) -> None:
    write(tmp_path, {"one.xml": play(speech("ANN", *long("few", 3)), speech("BOB", *long("many", 40)))})
    dataset = load_dataset("shakespeare(length=40, min_lines=0)", tmp_path)
    assert dataset.group_names == ("one/BOB",)
    with pytest.raises(UsageError, match="no role has 50 lines"):
        load_dataset("shakespeare(min_lines=50)", tmp_path)


def test_damaged_plays_are_named(tmp_path: Path) -> None:
    write(tmp_path, {"one.xml": FIRST, "two.xml": SECOND[:-20]})
    with pytest.raises(UsageError, match=r"two\.xml is truncated or corrupt"):
        load_dataset("shakespeare", tmp_path)
    bomb = b'<!DOCTYPE PLAY [<!ENTITY a "aaaa">]><PLAY>&a;</PLAY>'
    write(tmp_path, {"two.xml": bomb})
    with pytest.raises(UsageError, match=r"two\.xml is refused"):
        load_dataset("shakespeare", tmp_path)


def leaf(users: dict[str, str]) -> bytes:
    data = {
        user: {"x": [text[i : i + 80] for i in range(len(text) - 80)], "y": list(text[80:])}
        for user, text in users.items()
    }
    return json.dumps({"users": list(data), "num_samples": [], "user_data": data}).encode()


def test_leafs_windows(tmp_path: Path) -> None:
    text = "".join(long("leaf", 8))
    files = {"train/a.json": leaf({"b": text, "a": text[:90]}), "test/a.json": leaf({"a": text[5:100], "b": text[:80]})}
    write(tmp_path / "shakespeare/data", files)
    dataset = load_dataset("shakespeare", tmp_path)
    assert dataset.group_names == ("a", "b")
    assert [len(group) for group in dataset.groups] == [10, len(text) - 80]
    assert len(dataset.test) == 15
    x, y = dataset.train.batch(dataset.groups[1][3:4])
    assert decode(x[0].numpy()) == text[3:83]
    assert decode(y.numpy()) == text[83]
    assert "do not apply" in dataset.note
    short = load_dataset("shakespeare(length=20)", tmp_path)
    assert decode(short.train.x[0].numpy()) == text[60:80]
    with pytest.raises(UsageError, match="strings of at least 81 characters"):
        load_dataset("shakespeare(length=81)", tmp_path)


@pytest.mark.parametrize("form", ["plays", "leaf"])
def test_the_next_character_at_every_position(form: str, tmp_path: Path) -> None:
    """x and y are the same text, one character apart; windows of a play do not overlap; dealt by the last target."""
    text = "".join(long("leaf", 8))
    if form == "plays":
        write(tmp_path, {"one.xml": FIRST})
    else:
        write(tmp_path / "shakespeare", {"train/a.json": leaf({"a": text}), "test/a.json": leaf({"a": text})})
    arguments = "length=10, test=0.25, min_lines=5" if form == "plays" else "length=10"
    plain = load_dataset(f"shakespeare({arguments}, stride=10)", tmp_path)
    dataset = load_dataset(f"shakespeare({arguments}, task='next_token')", tmp_path)
    assert (dataset.task, dataset.classes) == ("next_token", 80)
    assert torch.equal(dataset.train.x, plain.train.x)
    for part, before in ((dataset.train, plain.train), (dataset.test, plain.test)):
        assert torch.equal(part.y[:, :-1], part.x[:, 1:])
        assert torch.equal(part.y[:, -1], before.y)
    assert torch.equal(dataset.labels, plain.train.y)
    assert dataset.group_names == plain.group_names
