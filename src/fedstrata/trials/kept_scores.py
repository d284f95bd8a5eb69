"""What trials of a federation of Python have brought so far, in a file: after Ctrl-C they go on where they were."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.runs.files import parse_object, write_atomic
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.tried import FOLDER
from fedstrata.trials.outcome import TrialScore

FILE = "scores.json"


class KeptScores:
    """Scores by what was run; they are kept if the federation has a directory, and else only remembered.

    Args:
        directory: of the federation; None for none.
        saved: its run: scores count for the same settings, model and data only.
    """

    def __init__(self, directory: Path | None, saved: SavedRun) -> None:
        self._path = None if directory is None else directory / FOLDER / FILE
        self._basis = _digest([saved.config, saved.facts])
        self._found = _read(self._path)

    def get(self, changes: Mapping[str, Any]) -> TrialScore | None:
        """What was kept of a run with these changes."""
        row = self._found.get(self._key(changes))
        return None if row is None else TrialScore(*row)

    def keep(self, changes: Mapping[str, Any], score: TrialScore) -> None:
        """Keep what came of a run."""
        self._found[self._key(changes)] = (score.score, score.bytes_sent)
        if self._path is not None:
            self._path.parent.mkdir(exist_ok=True)
            write_atomic(self._path, json.dumps(self._found, indent=1) + "\n")

    def _key(self, changes: Mapping[str, Any]) -> str:
        return f"{self._basis[:16]} {json.dumps(dict(changes), sort_keys=True, default=str)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _read(path: Path | None) -> dict[str, tuple[float | None, int]]:
    """What is in the file; rows that were edited are run again."""
    held = parse_object(path.read_bytes()) if path is not None and path.is_file() else None
    found: dict[str, tuple[float | None, int]] = {}
    for key, row in (held or {}).items():
        if isinstance(row, list) and len(row) == 2 and type(row[1]) is int and type(row[0]) in (float, int, type(None)):
            found[key] = (row[0], row[1])
    return found
