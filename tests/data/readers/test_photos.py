"""SVHN from MATLAB files; CINIC-10 and Tiny-ImageNet from trees of pictures."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedstrata.data.datasets import load_dataset
from fedstrata.errors import UsageError


def save_mat(path: Path, **arrays: np.ndarray) -> None:
    """SciPy is imported by whoever runs these tests, and not by all who collect them."""
    from scipy.io import savemat

    savemat(path, arrays, do_compression=True)


def mat(path: Path, count: int, seed: int) -> np.ndarray:
    """Write one of SVHN's files: X is (32, 32, 3, N), labels go 1, 2, …, 10."""
    images = np.random.default_rng(seed).integers(0, 256, (32, 32, 3, count), np.uint8)
    labels = (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]
    save_mat(path, X=images, y=labels)
    return images


def test_svhn(tmp_path: Path) -> None:
    images = mat(tmp_path / "train_32x32.mat", 20, 1)
    mat(tmp_path / "test_32x32.mat", 10, 2)
    dataset = load_dataset("svhn(verify=False)", tmp_path)
    assert dataset.train.labels()[:11].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert dataset.train.x.dtype == torch.uint8
    assert dataset.input_shape == (3, 32, 32)
    assert dataset.train.x[4, 2, 5, 6] == images[5, 6, 2, 4]
    assert dataset.train.mean == pytest.approx(tuple(images.mean((0, 1, 3)) / 255))
    assert dataset.train.std == pytest.approx(tuple(images.std((0, 1, 3)) / 255))
    assert "20 of 73,257 training and 10 of 26,032 test images" in dataset.note


def test_svhn_extra(tmp_path: Path) -> None:
    mat(tmp_path / "train_32x32.mat", 20, 1)
    mat(tmp_path / "test_32x32.mat", 10, 2)
    with pytest.raises(UsageError, match=r"extra_32x32.mat is missing"):
        load_dataset("svhn(extra=True, verify=False)", tmp_path)
    mat(tmp_path / "extra_32x32.mat", 15, 3)
    assert len(load_dataset("svhn(extra=True, verify=False)", tmp_path).train) == 35


def test_svhn_refusals(tmp_path: Path) -> None:
    mat(tmp_path / "train_32x32.mat", 20, 1)
    mat(tmp_path / "test_32x32.mat", 10, 2)
    with pytest.raises(UsageError, match=r"train_32x32\.mat is not a known file of svhn"):
        load_dataset("svhn", tmp_path)
    path = tmp_path / "test_32x32.mat"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UsageError, match=r"test_32x32\.mat is truncated or corrupt"):
        load_dataset("svhn(verify=False)", tmp_path)
    save_mat(path, X=np.zeros((3, 3)), y=np.zeros((3, 1)))
    with pytest.raises(UsageError, match="X is not 32×32×3×N bytes"):
        load_dataset("svhn(verify=False)", tmp_path)


def picture(colour: tuple[int, int, int] | int, size: int, form: str) -> bytes:
    file = io.BytesIO()
    Image.new("L" if isinstance(colour, int) else "RGB", (size, size), colour).save(file, form)
    return file.getvalue()


CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cinic() -> dict[str, bytes]:
    """Two training images and one validation and test image a class; the colour says which."""
    files = {}
    for split, copies in (("valid", 1), ("train", 2), ("test", 1)):
        for number, name in reversed(list(enumerate(CLASSES))):
            for copy in range(copies):
                files[f"{split}/{name}/n{copy}-x.png"] = picture((number, copy, 200), 32, "PNG")
    return files


def tiny() -> dict[str, bytes]:
    """Three classes, out of alphabetical order; the middle one has grey pictures."""
    synsets = ("n03", "n01", "n02")
    words = "n01\tapple, fruit\nn02\tbell\nn03\tcup\nn04\tunused"
    files = {"words.txt": words.encode(), "wnids.txt": b"n03\nn01\nn02\n"}
    annotations = ""
    for number, synset in enumerate(synsets):
        colour = 90 if number == 1 else (40 * number, 0, 255)
        for copy in range(2):
            files[f"train/{synset}/images/{synset}_{copy}.JPEG"] = picture(colour, 64, "JPEG")
        files[f"train/{synset}/{synset}_boxes.txt"] = b"0 0 1 1"
        files[f"val/images/val_{number}.JPEG"] = picture(colour, 64, "JPEG")
        annotations += f"val_{number}.JPEG\t{synset}\t0\t0\t62\t62\n"
    files["val/val_annotations.txt"] = annotations.encode()
    files["test/images/test_0.JPEG"] = picture(0, 64, "JPEG")
    return files


def make(form: str, folder: Path, name: str, files: dict[str, bytes]) -> None:
    """Write files as a folder, a zip or a tar.gz; inside one more folder, as upstream does."""
    if form == "folder":
        for inner, data in files.items():
            (folder / name / inner).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / inner).write_bytes(data)
    elif form == "zip":
        with zipfile.ZipFile(folder / f"{name}.zip", "w") as archive:
            for inner, data in files.items():
                archive.writestr(f"{name}/{inner}", data)
                archive.writestr(f"__MACOSX/{name}/{Path(inner).parent}/._{Path(inner).name}", b"mac")
    else:
        with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as tar:
            for inner, data in files.items():
                info = tarfile.TarInfo(f"./{inner}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("form", ["folder", "zip", "tar.gz"])
@pytest.mark.parametrize("valid", [False, True])
def test_cinic_10(form: str, valid: bool, tmp_path: Path) -> None:
    make(form, tmp_path, "CINIC-10", cinic())
    dataset = load_dataset(f"cinic-10(valid={valid})", tmp_path)
    assert len(dataset.train) == (30 if valid else 20)
    assert len(dataset.test) == 10
    assert dataset.class_names == CLASSES
    assert dataset.input_shape == (3, 32, 32)
    assert dataset.train.labels()[:4].tolist() == [0, 0, 1, 1]
    assert torch.equal(dataset.train.x[:, 0, 3, 4].long(), dataset.train.labels())
    assert dataset.train.x[:4, 1, 0, 0].tolist() == [0, 1, 0, 1]
    assert f"of {180_000 if valid else 90_000:,} training and 10 of 90,000 test" in dataset.note


def test_cinic_10_refusals(tmp_path: Path) -> None:
    files = cinic()
    make("folder", tmp_path, "cinic", files)
    bad = tmp_path / "cinic/train/cat/n0-x.png"
    bad.write_bytes(files["train/cat/n0-x.png"][:60])
    with pytest.raises(UsageError, match=r"train/cat/n0-x\.png is truncated or corrupt"):
        load_dataset("cinic-10", tmp_path)
    bad.write_bytes(picture(0, 33, "PNG"))
    with pytest.raises(UsageError, match="is 33×33, not 32×32"):
        load_dataset("cinic-10", tmp_path)


def test_cinic_10_without_its_validation_part(tmp_path: Path) -> None:
    make("folder", tmp_path, "cinic", {name: data for name, data in cinic().items() if not name.startswith("valid")})
    assert len(load_dataset("cinic-10", tmp_path).train) == 20
    with pytest.raises(UsageError, match="valid is missing"):
        load_dataset("cinic-10(valid=True)", tmp_path)


@pytest.mark.parametrize("form", ["folder", "zip", "tar.gz"])
def test_tiny_imagenet(form: str, tmp_path: Path) -> None:
    make(form, tmp_path, "tiny-imagenet-200", tiny())
    dataset = load_dataset("tiny-imagenet", tmp_path)
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (6, 3, 3)
    assert dataset.class_names == ("cup", "apple", "bell")
    assert dataset.input_shape == (3, 64, 64)
    assert dataset.train.labels().tolist() == [1, 1, 2, 2, 0, 0]
    assert dataset.test.labels().tolist() == [0, 1, 2]
    assert dataset.train.x[0].unique().tolist() == [90]
    assert (dataset.test.x[2, 0].int() - 80).abs().max() <= 3
    assert dataset.note.startswith("subset: 3 of 200 classes; 6 of 100,000 training and 3 of 10,000 test images")


@pytest.mark.parametrize("lacking", ["wnids.txt", "val/val_annotations.txt"])
def test_tiny_imagenet_needs_its_lists(lacking: str, tmp_path: Path) -> None:
    files = {name: data for name, data in tiny().items() if name != lacking}
    make("zip", tmp_path, "tiny-imagenet-200", files)
    with pytest.raises(UsageError, match=f"{lacking.rpartition('/')[2]} is missing"):
        load_dataset("tiny-imagenet", tmp_path)


def test_tiny_imagenet_refuses_classes_outside_its_list(tmp_path: Path) -> None:
    make("zip", tmp_path, "tiny-imagenet-200", tiny() | {"wnids.txt": b"n03 n02"})
    with pytest.raises(UsageError, match=r"the class n01 in .* is not in its wnids\.txt"):
        load_dataset("tiny-imagenet", tmp_path)
