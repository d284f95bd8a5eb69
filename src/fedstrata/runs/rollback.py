"""A run's files as they were before a change, until the change has come to something.

As long as they lie in the run's directory, the change can be undone, also by the next process after a kill.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedstrata.runs.files import disk_errors, sync_directory

_FOLDER, _UNFINISHED = ".before", ".before-unfinished"
_STATE = ("checkpoints", "memory")
"""Folders that hold nothing but the run's state."""


def keep_files(run: Path, names: Sequence[str], grow: Sequence[str]) -> None:
    """Keep the state of a run, and these files of its directory, as they are now.

    Files are replaced and never changed in place, so a second name keeps what they hold, at no cost; those in `grow`
    are appended to, and copied.
    """
    kept, unfinished = run / _FOLDER, run / _UNFINISHED
    with disk_errors(kept):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        for name in (*names, *grow):
            if (run / name).is_file():
                _second_name(run / name, unfinished / name, copy=name in grow)
        for folder in _STATE:
            (unfinished / folder).mkdir()
            for path in _files(run / folder):
                _second_name(path, unfinished / folder / path.name)
        os.replace(unfinished, kept)
        sync_directory(run)


def drop_kept(run: Path) -> None:
    """Let the change count: from here on it cannot be undone."""
    if (run / _FOLDER).exists():
        with disk_errors(run):
            os.replace(run / _FOLDER, run / _UNFINISHED)
            sync_directory(run)
    shutil.rmtree(run / _UNFINISHED, ignore_errors=True)


def restore_kept(run: Path) -> bool:
    """Undo a change that has come to nothing; True if there was one.

    What is kept stays until all of it is in its place again, so that this may be killed, too.
    """
    kept = run / _FOLDER
    if kept.is_dir():
        with disk_errors(run):
            _restore(kept, run)
            for folder in _STATE:
                if (run / folder).is_dir() or _files(kept / folder):
                    _restore(kept / folder, run / folder)
                    for path in _files(run / folder):
                        if not (kept / folder / path.name).exists():
                            path.unlink(missing_ok=True)
        drop_kept(run)
        return True
    shutil.rmtree(run / _UNFINISHED, ignore_errors=True)
    return False


def _restore(kept: Path, place: Path) -> None:
    """Put files where they were."""
    place.mkdir(exist_ok=True)
    for path in _files(kept):
        target, temporary = place / path.name, place / f".{path.name}.{os.getpid()}.tmp"
        if not (target.exists() and target.samefile(path)):  # two names of one file would not replace each other
            temporary.unlink(missing_ok=True)
            _second_name(path, temporary)
            os.replace(temporary, target)
    sync_directory(place)


def _files(folder: Path) -> list[Path]:
    """The files right in a folder, but for what a kill left there."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_file() and path.suffix != ".tmp"]


def _second_name(path: Path, other: Path, copy: bool = False) -> None:
    """Give a file a second name, or copy it; not every file system has second names."""
    if not copy:
        with suppress(OSError):
            os.link(path, other)
            return
    shutil.copy2(path, other)
