"""A run as its files tell it, without the model and the data that made it: for diagnosis, reports and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstrata.config import read_toml
from fedstrata.errors import UsageError
from fedstrata.history import Record


@dataclass(frozen=True, eq=False)
class Saved:
    """One run.

    Args:
        name: of its directory.
        config: what run.toml says; what it does not say is not in it.
        records: one a round.
        probes: one a probed round: `{"round": …, "clients": […], "seconds": {probe: …}, probe: what it found, …}`.
        facts: of model and data, as in facts.json; empty for runs of older versions.
        summary: as in summary.json; empty for a run that has not ended.
        versions: as in versions.json.
        path: the directory; None for a run that has none.
    """

    name: str
    config: Mapping[str, Any]
    records: Sequence[Record]
    probes: Sequence[Mapping[str, Any]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None

    @staticmethod
    def read(directory: Path) -> Saved:
        """The run of a directory, finished or going on.

        Raises:
            UsageError: if there is none, or its files cannot be read.
        """
        if not (directory / "run.toml").is_file():
            raise UsageError(f"{directory} has no run.toml: there is no run")
        rows = lines(directory / "metrics.jsonl")
        probes = lines(directory / "probes.jsonl")
        return Saved(
            name=directory.resolve().name,
            config=read_toml(directory / "run.toml"),
            records=tuple(map(Record.read, rows)),
            probes=tuple(row for row in probes if isinstance(row.get("round"), int) and row["round"] <= len(rows)),
            facts=_object(directory / "facts.json"),
            summary=_object(directory / "summary.json"),
            versions=_object(directory / "versions.json"),
            path=directory,
        )

    @property
    def method(self) -> str:
        """As it is written."""
        return str(self.config.get("method", "fedavg"))

    def latest(self, probe: str) -> Any:
        """What a probe found last; None where it was not used."""
        return next((row[probe] for row in reversed(self.probes) if probe in row), None)

    def series(self, probe: str) -> dict[int, Any]:
        """Round → what a probe found then."""
        return {row["round"]: row[probe] for row in self.probes if probe in row}


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON objects; one that is being written is left out."""
    text = path.read_bytes() if path.is_file() else b""
    found = []
    for line in text.split(b"\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict):
            break
        found.append(row)
    return found


def _object(path: Path) -> dict[str, Any]:
    """What a file of one JSON object holds; nothing where it is missing or was edited."""
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
