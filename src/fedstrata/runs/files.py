"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedstrata.errors import UsageError

if sys.platform != "win32":
    import fcntl

_MAGIC = b"fedstrata-1\n"
LOCK = ".lock"
"""The file in a directory that a Claim holds."""


class Damaged(UsageError):
    """A file that was truncated or edited."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A full or forbidden disk becomes one clear sentence."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from error


def write_atomic(path: Path, data: bytes | str, mode: int = 0o666) -> None:
    """Write a file so that at every moment either the old or the whole new one is there; `mode` as `os.open` has it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def leftovers(directory: Path) -> list[Path]:
    """What a `write_atomic` that was killed left behind in a directory."""
    return list(directory.glob(".*.tmp")) if directory.is_dir() else []


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut; Windows has no such call."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system syncs directories
            os.fsync(handle)
    finally:
        os.close(handle)


class Claim:
    """Keeps other processes out of a directory for as long as it lives, and nobody here opens its lock."""

    def __init__(self, directory: Path) -> None:
        with disk_errors(directory):
            handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, handle)
        if sys.platform != "win32":
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock: not inherited by workers
            except (BlockingIOError, PermissionError):
                raise UsageError(f"another process is at work in {directory}") from None
            except OSError:
                pass  # a file system without locks


_claims: weakref.WeakValueDictionary[Path, Claim] = weakref.WeakValueDictionary()


def claim(directory: Path) -> Claim:
    """Claim a directory; within one process any number may do so."""
    key = directory.resolve()
    held = _claims.get(key)
    if held is None:
        held = _claims[key] = Claim(directory)
    return held


def append_line(path: Path, line: str) -> None:
    """Append one line, the whole of it or nothing, and flush it to the disk."""
    rest = memoryview(line.encode() + b"\n")
    with disk_errors(path), open(path, "ab", buffering=0) as file:
        whole = file.tell()
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except BaseException:
            with suppress(OSError):
                file.truncate(whole)
            raise


def parse_json(text: bytes | str) -> Any:
    """What JSON says, in a file that may have been edited; a number too large for a float is infinite.

    Raises:
        ValueError: if it is no JSON, or nested more deeply than can be read.
    """
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) < 300 else float(digits)


def parse_object(text: bytes | str) -> dict[str, Any] | None:
    """The JSON object that a text is, or None."""
    try:
        found = parse_json(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read_object(path: Path) -> dict[str, Any]:
    """What a file of one JSON object holds; nothing where it is missing or was edited."""
    try:
        return parse_object(path.read_bytes()) or {}
    except OSError:
        return {}


def write_sealed(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write bytes with their SHA-256, so that `read_sealed` notices every change."""
    write_atomic(path, _MAGIC + hashlib.sha256(data).digest() + data, mode)


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
