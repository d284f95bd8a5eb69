"""A run as its files tell it, without the model and the data that made it: for diagnosis, reports and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from fedstrata.config import read_run
from fedstrata.errors import UsageError
from fedstrata.files import parsed_object, read_object
from fedstrata.history import Record
from fedstrata.kinds import facts_of, row_of, summary_of


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
        return Saved(
            name=directory.resolve().name,
            config=read_run(directory / "run.toml"),
            records=tuple(map(Record.read, rows)),
            probes=measured(directory / "probes.jsonl", len(rows)),
            facts=facts_of(read_object(directory / "facts.json")),
            summary=summary_of(read_object(directory / "summary.json")),
            versions=read_object(directory / "versions.json"),
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
    rows = map(parsed_object, text.split(b"\n")[:-1])
    return [row for row in takewhile(lambda row: row is not None, rows) if row is not None]


def measured(path: Path, rounds: int) -> tuple[dict[str, Any], ...]:
    """The lines of a probes.jsonl that are of the first `rounds` rounds."""
    found = (row for row in lines(path) if type(row.get("round")) is int and 0 < row["round"] <= rounds)
    return tuple(map(row_of, found))
