"""Which datasets' files seem to be in a data folder, by their names: nothing is opened."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fedstrata.data.readers.archives import DEPTH
from fedstrata.data.sources import ELSEWHERE, SOURCES

MOST = 20_000
"""Entries that are looked at: a folder of a million pictures is no dataset of ours."""


def find_by_name(folder: Path) -> dict[str, Path]:
    """Dataset → the nearest folder, archive or file that is called like it, or like a file of its upstream's."""
    wanted = {name: _key(name) for name in (*SOURCES, *ELSEWHERE)}
    files = {remote.name.lower(): name for name, remotes in SOURCES.items() for remote in remotes}
    shared = {remote.name.lower() for remote in SOURCES["mnist"]} & {r.name.lower() for r in SOURCES["fashion-mnist"]}
    found: dict[str, Path] = {}
    level, seen = [folder], 0
    for _ in range(DEPTH + 1):
        below: list[Path] = []
        for entry in (entry for here in level for entry in _entries(here)):
            seen += 1
            if seen > MOST:
                return found
            own = entry.name.lower()
            named = None if own in shared else files.get(own)
            for name in (named, *(name for name, key in wanted.items() if _is_called(own, key))):
                if name is not None:
                    found.setdefault(name, Path(entry.path))
            if entry.is_dir() and not own.startswith("."):
                below.append(Path(entry.path))
        level = below
    return {name: found[name] for name in wanted if name in found}


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, by name; nothing where it may not be read."""
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []


def _key(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _is_called(entry: str, key: str) -> bool:
    """True for a name that begins with the key: cifar-10 is not the beginning of cifar-100."""
    found = _key(entry)
    return found.startswith(key) and not (key[-1].isdigit() and found[len(key) :][:1].isdigit())
