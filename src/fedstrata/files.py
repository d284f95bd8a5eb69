"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedstrata.errors import FedstrataError, UsageError

_MAGIC = b"fedstrata-1\n"


class Damaged(FedstrataError):
    """A file that was truncated or edited."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A full or forbidden disk becomes one clear sentence."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from error


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file so that at every moment either the old or the whole new one is there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut; Windows has no such call."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append_line(path: Path, line: str) -> None:
    """Append one line and flush it to the disk."""
    with disk_errors(path), open(path, "ab") as file:
        whole = file.tell()
        try:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(whole)
            raise


def write_sealed(path: Path, data: bytes) -> None:
    """Write bytes with their SHA-256, so that `read_sealed` notices every change."""
    write_atomic(path, _MAGIC + hashlib.sha256(data).digest() + data)


def read_sealed(path: Path) -> bytes:
    """The bytes of `write_sealed`.

    Raises:
        Damaged: if the file is not whole.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    start = len(_MAGIC) + 32
    data = content[start:]
    if content[: len(_MAGIC)] != _MAGIC or content[len(_MAGIC) : start] != hashlib.sha256(data).digest():
        raise Damaged(f"{path} is damaged")
    return data
