"""A run as its files tell it, without the model and the data that made it: for diagnosis, reports and plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.config.schema import read_run
from fedstrata.errors import UsageError
from fedstrata.runs.field_types import evaluation_of, facts_of, row_of, summary_of
from fedstrata.runs.files import parse_object, read_object
from fedstrata.runs.records import Record

if TYPE_CHECKING:
    from fedstrata.core.method import Method


@dataclass(frozen=True, eq=False)
class SavedRun:
    """One run.

    Args:
        name: of its directory.
        config: what run.toml says; what it does not say is not in it.
        records: one per round.
        probes: one per measured round: `{"round": …, "clients": […], "seconds": {probe: …}, probe: what it found, …}`.
        facts: of model and data, as in facts.json; empty for runs of older versions.
        summary: as in summary.json; empty for a run that has not ended.
        evaluation: what the final model does on the test set, as in evaluation.json; empty where a task shows nothing.
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
    evaluation: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(directory: Path) -> SavedRun:
        """The run of a directory, finished or going on.

        Raises:
            UsageError: if there is none, or its files cannot be read.
        """
        if not (directory / "run.toml").is_file():
            raise UsageError(f"{directory} has no run.toml: there is no run")
        summary = summary_of(read_object(directory / "summary.json"))  # first: what it tells of is written by then
        ended = bool(summary)
        records = read_records(directory / "metrics.jsonl", ended)
        return SavedRun(
            name=directory.resolve().name,
            config=read_run(directory / "run.toml"),
            records=records,
            probes=read_probes(directory / "probes.jsonl", len(records), ended),
            facts=facts_of(read_object(directory / "facts.json")),
            summary=summary,
            versions=read_object(directory / "versions.json"),
            evaluation=evaluation_of(read_object(directory / "evaluation.json")) if ended else {},
            path=directory,
        )

    @property
    def method(self) -> str:
        """As it is written."""
        return str(self.config.get("method", "fedavg"))

    @property
    def is_own(self) -> bool:
        """True if the clients' own models are judged, in the mean, since the server has no whole one."""
        found = self._parsed_method()
        return found is not None and found.incomplete

    @property
    def is_reference(self) -> bool:
        """True if it pools everybody's data: what methods are measured against, and none of them."""
        found = self._parsed_method()
        return found is not None and found.centralised

    @property
    def epochs_per_visit(self) -> int | None:
        """Passes over a client's data in a visit, where the method says it and not the configuration."""
        found = self._parsed_method()
        return None if found is None else found.epochs_per_visit

    def _parsed_method(self) -> Method | None:
        """The method; None if it is of a version that has other techniques."""
        from fedstrata.techniques import method

        try:
            return method(self.method)
        except UsageError:
            return None

    def latest(self, probe: str) -> Any:
        """What a probe found last; None where it was not used."""
        return next((row[probe] for row in reversed(self.probes) if probe in row), None)

    def series(self, probe: str) -> dict[int, Any]:
        """Round → what a probe found then."""
        return {row["round"]: row[probe] for row in self.probes if probe in row}


def read_lines(path: Path, ended: bool = False) -> list[dict[str, Any]]:
    """The lines of a file of JSON objects.

    Args:
        path: the file; one that is missing has no lines.
        ended: True if nobody is writing it any more; until then the last line is left out if it has no end yet.

    Raises:
        UsageError: if any other line is no JSON object.
    """
    found = (path.read_bytes() if path.is_file() else b"").split(b"\n")
    if not ended or not found[-1]:
        found.pop()
    rows = []
    for number, line in enumerate(found, 1):
        row = parse_object(line)
        if row is None:
            raise UsageError(f"line {number} of {path} is not a JSON object: the file was edited or damaged")
        rows.append(row)
    return rows


def read_records(path: Path, ended: bool = False) -> tuple[Record, ...]:
    """The rounds of a metrics.jsonl; `ended` as in `read_lines`.

    Raises:
        UsageError: if a line is no round, or not the next one.
    """
    return check_records(read_lines(path, ended), path)


def check_records(rows: Iterable[Mapping[str, Any]], path: Path) -> tuple[Record, ...]:
    """The rounds that the lines of a metrics.jsonl tell of.

    Raises:
        UsageError: if a line is no round, or not the next one.
    """
    records = []
    for number, row in enumerate(rows, 1):
        records.append(Record.read(row, f"line {number} of {path}"))
        if records[-1].round != number:
            raise UsageError(f"line {number} of {path} says round = {records[-1].round}: it must be round {number}")
    return tuple(records)


def read_probes(path: Path, rounds: int, ended: bool = False) -> tuple[dict[str, Any], ...]:
    """The lines of a probes.jsonl that are of the first `rounds` rounds; `ended` as in `read_lines`.

    Raises:
        UsageError: if a line is no JSON object.
    """
    found = (row for row in read_lines(path, ended) if type(row.get("round")) is int and 0 < row["round"] <= rounds)
    return tuple(map(row_of, found))
