"""What a reproduction is made of: parts, each a grid of runs or work of its own, and what is found in each."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstrata.compare import Comparison, ComparisonRow
from fedstrata.compare.runner import read_records
from fedstrata.reproduce.claims import Check, Seeds
from fedstrata.runs.files import disk_errors, read_object, write_atomic
from fedstrata.runs.records import Record


def load_or_compute(path: Path, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a file holds, as JSON; where there is none, what the work gives, which is then kept there."""
    known = read_object(path)
    if not known:
        known = work()
        with disk_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(known) + "\n")
    return known


@dataclass(frozen=True)
class FindingsTable:
    """A table of words: the first columns up to `left` name a row, the others hold its figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1


@dataclass(frozen=True)
class Findings:
    """What a part found.

    Args:
        tables: as a paper prints them.
        checks: its claims.
        notes: what a reader of the tables must know.
        pictures: file name → a function that draws it into a file.
        data: figures in full precision, for report.json.
    """

    tables: tuple[FindingsTable, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    pictures: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """A part that is a comparison: its runs are made by `compare`.

    Args:
        name: for --only.
        about: one line on what is shown.
        values: the comparison's fields.
        assess: the finished comparison → what is found in it.
        draws: True if there are pictures.
    """

    name: str
    about: str
    values: Mapping[str, Any]
    assess: Callable[[Comparison], Findings]
    draws: bool = False


@dataclass(frozen=True)
class PartResources:
    """What a part's own work may use besides its settings."""

    data_dir: str | None
    workers: int


@dataclass(frozen=True)
class OwnWork:
    """A part with work of its own, seed by seed; what came of each is kept.

    Args:
        name: for --only.
        about: one line on what is shown.
        settings: all that the result depends on besides the seed, as JSON has it.
        seeds: all of them.
        work: (settings, seed, bench) → figures, as JSON has them.
        assess: seed → figures → what is found in them.
        draws: True if there are pictures.
        needs: raises a UsageError where the work could not be done here; asked before anything begins.
    """

    name: str
    about: str
    settings: Mapping[str, Any]
    seeds: Sequence[int]
    work: Callable[[Mapping[str, Any], int, PartResources], dict[str, Any]]
    assess: Callable[[Mapping[int, dict[str, Any]]], Findings]
    draws: bool = False
    needs: Callable[[], None] = lambda: None

    def file(self, out: Path, seed: int) -> Path:
        """Where a seed's figures are kept; named after all that they depend on."""
        told = json.dumps(self.settings, sort_keys=True)
        return out / f"{self.name}-seed{seed}-{hashlib.sha256(told.encode()).hexdigest()[:8]}.json"

    def figures(self, out: Path, seed: int, resources: PartResources) -> dict[str, Any]:
        """A seed's figures: read if they are there, else worked out and kept."""
        return load_or_compute(self.file(out, seed), lambda: self.work(self.settings, seed, resources))


Part = Grid | OwnWork


def figures_by_seed(row: ComparisonRow, of: Callable[[list[Record]], float | None]) -> dict[int, float]:
    """Seed → a figure of its rounds; seeds that diverged or are missing have none."""
    found = {result.seed: of(read_records(Path(result.directory))) for result in row.sound_results}
    return {seed: value for seed, value in found.items() if value is not None}


def at_round(number: int) -> Callable[[list[Record]], float | None]:
    """The accuracy after a round."""
    return lambda rounds: rounds[number - 1].accuracy if 0 < number <= len(rounds) else None


def mean_of_last(count: int) -> Callable[[list[Record]], float | None]:
    """The mean accuracy of the last few evaluations."""

    def mean(rounds: list[Record]) -> float | None:
        known = [record.accuracy for record in rounds if record.accuracy is not None][-count:]
        return statistics.fmean(known) if known else None

    return mean


def figures_by_label(comparison: Comparison, of: Callable[[list[Record]], float | None]) -> dict[str, Seeds]:
    """Method → seed → a figure, of a comparison that varies nothing else."""
    return {row.method: figures_by_seed(row, of) for row in comparison.rows}


def unfinished_note(comparison: Comparison) -> tuple[str, ...]:
    """A note on the runs that diverged or are missing, if there are any."""
    told = [f"{row.run.title} diverged with seed {seed}" for row in comparison.rows for seed in row.diverged_seeds]
    told += [f"{row.run.title} has no result for seed {seed}" for row in comparison.rows for seed in row.missing_seeds]
    return ("; ".join(told),) if told else ()
