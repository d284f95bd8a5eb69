"""Where a dataset's files lie: a folder, a tar or a zip, found by name and read in memory, never extracted.

An *archive* is such a place. Archives are looked for in the data folder and a few levels below it; an archive is
opened only when its name speaks for the dataset.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedstrata.data.sources import how_to_get
from fedstrata.errors import UsageError

DATA_VARIABLE = "FEDSTRATA_DATA"
DEPTH = 3
"""How many levels below the data folder are searched."""

_TARS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2")
_BROKEN = (
    OSError,
    EOFError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    NotImplementedError,
)
_MIB = 1 << 20


def data_folder(name: str, data_dir: Path | None) -> Path:
    """The folder to search: the one given, else the environment's FEDSTRATA_DATA, else a refusal."""
    given = data_dir if data_dir is not None else os.environ.get(DATA_VARIABLE)
    if not given:
        raise UsageError(
            f"dataset '{name}' is read from files: say where they are with --data-dir or the environment "
            f"variable {DATA_VARIABLE}"
        )
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise UsageError(f"the data folder {folder} does not exist; {how_to_get(name)}")
    return folder


def missing_error(name: str, folder: Path, looked_for: str) -> UsageError:
    """The error for a dataset of which nothing usable was found."""
    return UsageError(
        f"no {name} in {folder} or up to {DEPTH} levels below it (looked for {looked_for}); {how_to_get(name)}"
    )


def incomplete_error(name: str, archive: Archive, lacking: str) -> UsageError:
    """The error for a dataset of which an archive has only some of the files."""
    return UsageError(f"{name} is incomplete in {archive.path}: {lacking} is missing")


def damaged_error(where: str, why: str) -> UsageError:
    """The error for a file that cannot be what it should be."""
    return UsageError(f"{where} is truncated or corrupt: {why}")


def md5(data: bytes) -> str:
    """The checksum that upstream files are known by (a name for bytes, no proof against malice)."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def check_md5(name: str, where: str, data: bytes, known: Collection[str]) -> None:
    """Refuse bytes whose md5 is not among the known ones."""
    found = md5(data)
    if found not in known:
        raise UsageError(
            f"{where} is not a known file of {name} (its md5 is {found}): it is damaged or another file; "
            f"{how_to_get(name)}, and {name}(verify=False) reads it anyway"
        )


@dataclass(frozen=True)
class Archive:
    """A folder or an archive that holds a dataset's files.

    Args:
        path: the folder, or the archive file.
        deep: read folders below a folder too (trees of pictures), not only its own files.
    """

    path: Path
    deep: bool = False

    def where(self, inner: str) -> str:
        """How a message names one of the files."""
        return str(self.path / inner) if self.path.is_dir() else f"{inner} in {self.path}"

    def walk(self, pattern: re.Pattern[str], limit: int = 512 * _MIB) -> Iterator[tuple[str, bytes]]:
        """(inner path, content) of every file whose inner path fits `pattern`, in one pass, in stored order.

        A file longer than `limit` bytes is refused: a few bytes of archive can stand for very many.
        """
        if self.path.is_dir():
            yield from self._walk_folder(pattern, limit)
        elif self.path.suffix.lower() == ".zip":
            yield from self._walk_zip(pattern, limit)
        else:
            yield from self._walk_tar(pattern, limit)

    def gather(self, pattern: re.Pattern[str], limit: int = 512 * _MIB) -> dict[str, bytes]:
        """The fitting files by their own names; of several with one name, the first."""
        found: dict[str, bytes] = {}
        for inner, data in self.walk(pattern, limit):
            found.setdefault(inner.rpartition("/")[2], data)
        return found

    def _walk_folder(self, pattern: re.Pattern[str], limit: int) -> Iterator[tuple[str, bytes]]:
        for root, folders, files in os.walk(self.path):
            folders.sort()
            if not self.deep or len(Path(root).relative_to(self.path).parts) > DEPTH:
                folders.clear()
            for file in sorted(files):
                inner = Path(root, file).relative_to(self.path).as_posix()
                if pattern.search(inner):
                    try:
                        self._check_size(inner, os.path.getsize(os.path.join(root, file)), limit)
                        data = Path(root, file).read_bytes()
                    except OSError as error:
                        raise UsageError(f"cannot read {self.where(inner)}: {error.strerror}") from None
                    yield inner, data

    def _walk_zip(self, pattern: re.Pattern[str], limit: int) -> Iterator[tuple[str, bytes]]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                for info in archive.infolist():
                    inner = _tidy(info.filename)
                    if not info.is_dir() and pattern.search(inner):
                        self._check_size(inner, info.file_size, limit)
                        yield inner, archive.read(info)
        except _BROKEN as error:
            raise damaged_error(str(self.path), _words(error)) from None
        except RuntimeError:
            raise UsageError(f"{self.path} is locked with a password") from None

    def _walk_tar(self, pattern: re.Pattern[str], limit: int) -> Iterator[tuple[str, bytes]]:
        try:
            with tarfile.open(self.path) as archive:
                for member in archive:
                    inner = _tidy(member.name)
                    if member.isreg() and pattern.search(inner):
                        self._check_size(inner, member.size, limit)
                        file = archive.extractfile(member)
                        yield inner, file.read() if file is not None else b""
        except _BROKEN as error:
            raise damaged_error(str(self.path), _words(error)) from None

    def _check_size(self, inner: str, size: int, limit: int) -> None:
        """Refuse a file that is longer than it may be."""
        if size > limit:
            raise UsageError(f"{self.where(inner)} has {size:,} bytes where at most {limit:,} are expected")


def find_archives(
    folder: Path, holds: Callable[[Path], bool], archive: re.Pattern[str], *, deep: bool = False
) -> list[Archive]:
    """The folders that `holds` says yes to, and the archives whose names fit `archive`; the nearest first.

    Hidden folders are passed over, as are folders that may not be read and, where they are `deep`, those
    inside one.
    """
    found: list[Archive] = []
    level = [folder]
    for depth in range(DEPTH + 1):
        below: list[Path] = []
        archives: list[Archive] = []
        for here in level:
            try:
                entries = sorted(os.scandir(here), key=lambda entry: entry.name)
            except OSError:
                continue
            for entry in entries:
                name = entry.name.lower()
                if archive.search(name) and name.endswith((*_TARS, ".zip")) and entry.is_file():
                    archives.append(Archive(Path(entry.path)))
            try:
                held = holds(here)
            except OSError:
                continue
            if held:
                found.append(Archive(here, deep))
            if depth < DEPTH and not (held and deep):
                below.extend(Path(e.path) for e in entries if e.is_dir() and not e.name.startswith("."))
        found.extend(archives)
        level = below
    return found


def gather_first(
    archives: list[Archive], pattern: re.Pattern[str], limit: int = 512 * _MIB
) -> tuple[Archive, dict[str, bytes]] | None:
    """The first archive that has files that fit `pattern`, and these by name; None where none has any."""
    for archive in archives:
        if files := archive.gather(pattern, limit):
            return archive, files
    return None


def nearest_name(folder: Path, archives: list[Archive], key: str) -> list[Archive]:
    """The archives, those first whose path (from the data folder's own name on) has a part that starts with `key`.

    Datasets that share their file names are told apart by the names of their folders.
    """

    def foreign(archive: Archive) -> bool:
        parts = (folder.resolve().name, *archive.path.relative_to(folder).parts)
        return not any(re.sub("[^a-z0-9]", "", part.lower()).startswith(key) for part in parts)

    return sorted(archives, key=foreign)


def has_file(*names: str) -> Callable[[Path], bool]:
    """A test for `find_archives`: the folder has one of these files."""
    return lambda folder: any((folder / name).is_file() for name in names)


def _tidy(inner: str) -> str:
    return inner.replace("\\", "/").removeprefix("./")


def _words(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
