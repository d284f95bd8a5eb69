"""Folders and archives: what is found, in which order, and what a damaged archive says."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from fedstrata.data.readers.archives import Archive, find_archives, has_file, nearest_name
from fedstrata.errors import UsageError

FILES = {"set/b.txt": b"second", "set/a.txt": b"first", "set/deep/c.txt": b"third", "set/d.bin": b"no"}
TEXT = re.compile(r"\.txt$")


def write_tar(path: Path, files: dict[str, bytes], mode: str) -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def write_folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def make(form: str, where: Path, files: dict[str, bytes]) -> Path:
    where.mkdir(exist_ok=True)
    if form == "folder":
        return write_folder(where, files)
    if form == "zip":
        return write_zip(where / "set.zip", files)
    return write_tar(
        where / f"set.{form}", files, {"tar": "w", "tar.gz": "w:gz", "tgz": "w:gz", "tar.xz": "w:xz"}[form]
    )


@pytest.mark.parametrize("form", ["folder", "zip", "tar", "tar.gz", "tgz", "tar.xz"])
def test_every_form_gives_the_same_files(form: str, tmp_path: Path) -> None:
    archive = Archive(make(form, tmp_path / "x", FILES), deep=True)
    wanted = {name: data for name, data in FILES.items() if name.endswith(".txt")}
    assert dict(archive.walk(TEXT)) == wanted
    assert archive.gather(TEXT) == {name.rpartition("/")[2]: data for name, data in wanted.items()}


def test_a_shallow_folder_gives_only_its_own_files(tmp_path: Path) -> None:
    write_folder(tmp_path, FILES)
    assert Archive(tmp_path / "set").gather(TEXT) == {"a.txt": b"first", "b.txt": b"second"}


def test_links_and_hidden_leaders_in_archives(tmp_path: Path) -> None:
    path = tmp_path / "set.tar"
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("set/a.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
        info = tarfile.TarInfo("./set/b.txt")
        info.size = 2
        archive.addfile(info, io.BytesIO(b"ok"))
    assert dict(Archive(path).walk(TEXT)) == {"set/b.txt": b"ok"}


@pytest.mark.parametrize("form", ["folder", "zip", "tar"])
def test_a_file_above_the_limit_is_refused(form: str, tmp_path: Path) -> None:
    archive = Archive(make(form, tmp_path / "x", {"a.txt": bytes(1001)}))
    assert len(archive.gather(TEXT, limit=1001)) == 1
    with pytest.raises(UsageError, match="1,001 bytes where at most 1,000"):
        archive.gather(TEXT, limit=1000)


@pytest.mark.parametrize("form", ["zip", "tar", "tar.gz", "tar.xz"])
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.8])
def test_truncated_archives_are_named(form: str, kept: float, tmp_path: Path) -> None:
    noise = bytes(i * i * 7 % 251 for i in range(60_000))
    path = make(form, tmp_path / "x", {"a.txt": noise, "b.txt": noise[::-1]})
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(UsageError, match=rf"set\.{form} is truncated or corrupt"):
        Archive(path).gather(TEXT)


def test_a_zip_with_a_bad_checksum_is_named(tmp_path: Path) -> None:
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", b"plain text, stored")
    path.write_bytes(path.read_bytes().replace(b"plain", b"plait"))
    with pytest.raises(UsageError, match=r"set\.zip is truncated or corrupt"):
        Archive(path).gather(TEXT)


def test_places_are_found_near_before_far_and_not_too_far(tmp_path: Path) -> None:
    for folder in ("one", "one/two", "one/two/three", "one/two/three/four", ".hidden"):
        write_folder(tmp_path / folder, {"mark": b""})
    write_zip(tmp_path / "SET-2.ZIP", {})
    write_zip(tmp_path / "other.zip", {})
    (tmp_path / "set.txt").write_text("no archive")
    found = find_archives(tmp_path, has_file("mark"), re.compile("^set"))
    paths = [archive.path.relative_to(tmp_path).as_posix() for archive in found]
    assert paths == ["SET-2.ZIP", "one", "one/two", "one/two/three"]


def test_the_name_of_a_folder_decides_between_equals(tmp_path: Path) -> None:
    for folder in ("a", "b/Fashion-MNIST/raw", "c/mnist"):
        write_folder(tmp_path / folder, {"mark": b""})
    found = find_archives(tmp_path, has_file("mark"), re.compile("^$"))
    assert nearest_name(tmp_path, found, "mnist")[0].path == tmp_path / "c/mnist"
    assert nearest_name(tmp_path, found, "fashionmnist")[0].path == tmp_path / "b/Fashion-MNIST/raw"
    assert nearest_name(tmp_path, found, "other")[0].path == tmp_path / "a"
