"""Pictures of the user's own: classes, clients, sizes and colours, and one sentence for each thing wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedstrata.data.datasets import load_dataset
from fedstrata.data.readers import picture_folder
from fedstrata.errors import UsageError


def picture(path: Path, value: int, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> None:
    """A picture of one colour: red of that value, or grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colour: int | tuple[int, int, int] = value if mode == "L" else (value, 0, 10)
    Image.new(mode, size, colour).save(path)


def test_classes_of_one_party(tmp_path: Path) -> None:
    """Ten pictures of each class, of different sizes; the red channel says which one it is."""
    for number in range(10):
        picture(tmp_path / "cat" / f"{number}.png", number, (number + 1, 3))
        picture(tmp_path / "dog" / f"{number}.PNG", 100 + number)
        picture(tmp_path / ".trash" / f"{number}.png", 255)
    data = load_dataset(f"folder('{tmp_path}', side=5, test=0.3)")
    assert (data.class_names, data.classes, data.groups, data.input_shape) == (("cat", "dog"), 2, (), (3, 5, 5))
    assert (len(data.train), len(data.test)) == (14, 6)
    assert torch.bincount(data.test.y).tolist() == [3, 3]
    for part in (data.train, data.test):
        assert torch.equal(part.x[:, 0, 2, 2] >= 100, part.y == 1)
        assert (part.x[:, 2] == 10).all()
    assert data.note == "20 pictures resized to 5×5, in colour, 0.3 held out for testing"


def test_clients_of_their_own(tmp_path: Path) -> None:
    for client, base in (("north", 0), ("south", 50)):
        for label in "ab":
            for number in range(4):
                picture(tmp_path / client / label / f"{number}.jpg", base + number, mode="L")
    data = load_dataset(f"folder(path='{tmp_path}', side=4, grey=True, test=0.25)")
    assert (data.group_names, data.input_shape) == (("north", "south"), (1, 4, 4))
    north, south = (data.train.x[group] for group in data.groups)
    assert (len(north), len(south)) == (6, 6)
    assert north.max() < 25 < south.min()
    assert "2 clients" in data.note
    north, south = (data.test.x[group] for group in data.test_groups)
    assert (len(north), len(south)) == (2, 2)
    assert north.max() < 25 < south.min()


def test_train_and_test_are_parts(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 2)):
        for label in "ab":
            for number in range(count):
                picture(tmp_path / part / label / f"{number}.bmp", 9 if part == "test" else 1)
    data = load_dataset(f"folder('{tmp_path}', side=2)")
    assert (len(data.train), len(data.test), data.groups) == (6, 4, ())
    assert (data.test.x[:, 0] == 9).all()
    assert "test part as in the folder" in data.note


def test_a_train_folder_alone_is_no_client(tmp_path: Path) -> None:
    for label in "ab":
        for number in range(5):
            picture(tmp_path / "train" / label / f"{number}.bmp", 1)
    assert load_dataset(f"folder('{tmp_path}', side=2)").groups == ()


def test_a_picture_is_resized_as_pillow_does(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    for label in "ab":
        for number in range(3):
            (tmp_path / label).mkdir(exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / label / f"{number}.png")
    data = load_dataset(f"folder('{tmp_path}', side=4, test=0.5)")
    expected = np.asarray(Image.fromarray(pixels).resize((4, 4), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert np.array_equal(data.train.x[0].numpy(), expected)


def two_classes(folder: Path, pixels: np.ndarray, suffix: str) -> str:
    """Three pictures of each of two classes, all alike."""
    for label in "ab":
        (folder / label).mkdir(exist_ok=True)
        for number in range(3):
            Image.fromarray(pixels).save(folder / label / f"{number}.{suffix}")
    return f"folder('{folder}', side=4, grey=True, test=0.5)"


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bits_become_eight(tmp_path: Path, suffix: str) -> None:
    """v / 257, rounded; the note says how bright they are, for 12 bits of 16 are nearly black."""
    pixels = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4111
    data = load_dataset(two_classes(tmp_path, pixels, suffix))
    assert np.array_equal(data.train.x[0, 0].numpy(), np.round(pixels / 257))
    assert "6 of them of 16 bits, divided by 257 (their brightest pixel is 61,665 of 65,535)" in data.note


def test_floats_are_from_0_to_1_or_refused(tmp_path: Path) -> None:
    shares = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)
    data = load_dataset(two_classes(tmp_path, shares, "tif"))
    assert np.array_equal(data.train.x[0, 0].numpy(), np.round(shares * 255))
    for pixels, why in (
        (shares * 255, "floats that are not from 0 to 1"),
        (np.full((4, 4), 7), "32 bits per pixel"),
    ):
        text = two_classes(tmp_path, pixels.astype(np.int32 if "32" in why else np.float32), "tif")
        with pytest.raises(UsageError, match=rf"a/0\.tif has {why}: save it with 8 or 16"):
            load_dataset(text)


def test_more_than_the_machine_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_folder, "_memory", lambda: 8 << 30)
    text = two_classes(tmp_path, np.zeros((4, 4), np.uint8), "png").replace("side=4", "side=100000")
    with pytest.raises(
        UsageError, match=r"6 pictures of 100000×100000 pixels take 55\.9 GiB.* this machine has 8\.0: ask"
    ):
        load_dataset(text)
    monkeypatch.setattr(picture_folder, "_memory", lambda: 2 * 6 * 16)
    assert load_dataset(text.replace("side=100000", "side=4")).input_shape == (1, 4, 4)


def test_a_folder_that_is_called_like_a_picture(tmp_path: Path) -> None:
    text = two_classes(tmp_path, np.zeros((4, 4), np.uint8), "png")
    (tmp_path / "a" / "old.png").mkdir()
    assert len(load_dataset(text).train) == 3 + 3 - len(load_dataset(text).test)


@pytest.mark.parametrize(
    ("files", "arguments", "message"),
    [
        ([], "", "has no pictures in it"),
        (["a.png"], "", r"a\.png is in the wrong place: all pictures are in a folder for their class"),
        (["a/1.png", "a/b/1.png"], "", "is in the wrong place"),
        (["a/1.png", "a/2.png"], "", "has pictures of one class only, 'a'"),
        (["a/1.png", "b/1.png"], ", side=0", "1 or more pixels per side, not 0"),
        (["a/1.png", "b/1.png"], ", test=1.0", "the share of test pictures is above 0 and below 1"),
        (["train/a/1.png", "train/b/1.png", "test/c/1.png", "test/a/.1.png"], "", None),
    ],
)
def test_one_sentence_for_each_thing_wrong(
    tmp_path: Path, files: list[str], arguments: str, message: str | None
) -> None:
    for file in files:
        picture(tmp_path / file, 1)
    if message is None:
        assert load_dataset(f"folder('{tmp_path}'{arguments})").classes == 3
        return
    with pytest.raises(UsageError, match=message):
        load_dataset(f"folder('{tmp_path}'{arguments})")


def test_bad_paths_and_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere"):
        load_dataset(f"folder('{tmp_path / 'nowhere'}')")
    for label in "ab":
        for number in range(3):
            picture(tmp_path / label / f"{number}.png", 1)
    (tmp_path / "b" / "0.png").write_bytes(b"no picture")
    with pytest.raises(UsageError, match=r"b/0\.png is truncated or corrupt"):
        load_dataset(f"folder('{tmp_path}', test=0.5)")
