"""Every moment of a run's files: what is on the disk before each change of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedstrata.runs.files import LOCK

_watchers: list[Callable[[str, tuple[Any, ...]], None]] = []
_CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.truncate"}


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watchers and event in _CHANGES:
        _watchers[0](event, args)


sys.addaudithook(_audit)  # a hook cannot be removed; without a watcher it does nothing


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, but for the lock, which reading would open."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@contextmanager
def snapshots(directory: Path) -> Iterator[list[dict[str, bytes]]]:
    """What is on the disk just before every change below a directory: what a kill at that moment would leave."""
    taken: list[dict[str, bytes]] = []

    def look(event: str, args: tuple[Any, ...]) -> None:
        if not isinstance(args[0], str | Path) or not str(args[0]).startswith(str(directory)):
            return
        watcher = _watchers.pop()  # looking opens files too
        now = contents(directory)
        if not taken or taken[-1] != now:
            taken.append(now)
        _watchers.append(watcher)

    _watchers.append(look)
    try:
        yield taken
    finally:
        _watchers.clear()


def put(files: dict[str, bytes], directory: Path) -> Path:
    """Write files below a directory; temporary ones as another process would have left them."""
    directory.mkdir(exist_ok=True)
    for name, data in files.items():
        path = directory / name.replace(f".{os.getpid()}.tmp", ".1.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory
