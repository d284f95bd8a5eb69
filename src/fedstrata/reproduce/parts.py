"""The parts of a reproduction: each a grid of runs, or work of its own; and the findings in each."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedstrata.compare import Comparison, ComparisonRow, Run
from fedstrata.compare.runner import read_finished_records
from fedstrata.reproduce.claims import Check, cell
from fedstrata.reproduce.verdicts import Seeds, differences
from fedstrata.runs.files import disk_errors, read_object, write_atomic
from fedstrata.runs.reader import read_probes
from fedstrata.runs.records import Record


def load_or_compute(path: Path, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Read a JSON file; if there is none, do the work and write its result there."""
    known = read_object(path)
    if not known:
        known = work()
        with disk_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(known) + "\n")
    return known


@dataclass(frozen=True)
class FindingsTable:
    """A table of text: the first `left` columns name a row, the others hold its figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1


@dataclass(frozen=True)
class Findings:
    """The findings of a part.

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
class Tuning:
    """A small grid of learning rates for every method of a part, on a seed that is not reported.

    Args:
        lrs: the rates that every method is tried with.
        seed: of all trials.
        score: the rounds of a trial → what its rate is chosen by, the higher the better.
        fields: those of a trial that are not the part's, such as fewer rounds, or one partition of several.
    """

    lrs: tuple[float, ...]
    seed: int
    score: Callable[[list[Record]], float | None]
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """A part that is a comparison: its runs are made by `compare`.

    Args:
        name: for --parts.
        about: one line on what is shown.
        values: the comparison's fields.
        assess: the finished comparison → its findings.
        draws: True if there are pictures.
        headline: False for what the scale `evidence` makes only if it is asked for.
        tuning: how the methods' learning rates are chosen; None if all have the one in `values`.
        round_cost: a run → what a round costs in the mean, of its first one; for estimates.
    """

    name: str
    about: str
    values: Mapping[str, Any]
    assess: Callable[[Comparison], Findings]
    draws: bool = False
    headline: bool = True
    tuning: Tuning | None = None
    round_cost: Callable[[Run], float] = lambda run: 1.0

    @property
    def seeds(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(self.values["seed"])

    def with_seeds(self, seeds: Sequence[int]) -> Grid:
        """The same part with other seeds."""
        return replace(self, values={**self.values, "seed": list(seeds)})


@dataclass(frozen=True)
class PartResources:
    """What a part's own work may use besides its settings."""

    data_dir: str | None
    workers: int


@dataclass(frozen=True)
class OwnWork:
    """A part with work of its own, seed by seed; the figures of each are kept in a file.

    Args:
        name: for --parts.
        about: one line on what is shown.
        settings: all that the result depends on besides the seed, as JSON has it.
        seeds: all of them.
        work: (settings, seed, resources) → figures, as JSON has them.
        assess: (seed → figures) → findings.
        draws: True if there are pictures.
        needs: raises a UsageError if the work cannot be done here; called before anything begins.
        headline: False for what the scale `evidence` makes only if it is asked for.
    """

    name: str
    about: str
    settings: Mapping[str, Any]
    seeds: Sequence[int]
    work: Callable[[Mapping[str, Any], int, PartResources], dict[str, Any]]
    assess: Callable[[Mapping[int, dict[str, Any]]], Findings]
    draws: bool = False
    needs: Callable[[], None] = lambda: None
    headline: bool = True

    def with_seeds(self, seeds: Sequence[int]) -> OwnWork:
        """The same part with other seeds."""
        return replace(self, seeds=tuple(seeds))

    def trainings(self) -> list[dict[str, Any]]:
        """The fields of the runs that a seed's work is made of, without what is measured besides."""
        methods, models = (list(self.settings.get(name, {}).values()) for name in ("methods", "models"))
        cases = [dict(fields) for fields in self.settings.get("cases", {}).values()]
        several: list[dict[str, Any]] = [*({"method": m} for m in methods), *({"model": m} for m in models), *cases]
        return [{**self.settings["run"], **own} for own in several or [{}]]

    def file(self, out: Path, seed: int) -> Path:
        """Where a seed's figures are kept; named after all that they depend on."""
        settings = json.dumps(self.settings, sort_keys=True)
        return out / f"{self.name}-seed{seed}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}.json"

    def figures(self, out: Path, seed: int, resources: PartResources) -> dict[str, Any]:
        """A seed's figures: read if they are there, else worked out and kept."""
        return load_or_compute(self.file(out, seed), lambda: self.work(self.settings, seed, resources))


Part = Grid | OwnWork
SeedFigures = Mapping[int, dict[str, Any]]
"""Seed → the figures of a part's own work."""
AssessedTable = tuple[FindingsTable, tuple[Check, ...]]
"""A table, and the claims that are checked by it."""

DATASETS = {
    "tiny-imagenet": "Tiny-ImageNet",
    "cifar-100": "CIFAR-100",
    "cifar-10": "CIFAR-10",
    "fashion-mnist": "Fashion-MNIST",
    "digits": "digits",
}


def dataset_name(spec: str) -> str:
    """A dataset's name as papers write it."""
    return DATASETS[spec.partition("(")[0]]


def label_methods(methods: Mapping[str, str]) -> list[dict[str, Any]]:
    """Label → method, as the entries of a comparison."""
    return [{"method": text, "label": label} for label, text in methods.items()]


def gain_rows(found: Mapping[str, Seeds], base: str) -> tuple[tuple[str, str, str], ...]:
    """Rows of a table: a label, its accuracy, and what that gains over the base."""
    return tuple((label, cell(seeds), cell(differences(seeds, found[base]))) for label, seeds in found.items())


def figures_by_seed(row: ComparisonRow, of: Callable[[list[Record]], float | None]) -> dict[int, float]:
    """Seed → a figure of its rounds; seeds that diverged or are missing have none."""
    found = {result.seed: of(read_finished_records(Path(result.directory))) for result in row.sound_results}
    return {seed: value for seed, value in found.items() if value is not None}


def mean_curve(
    row: ComparisonRow, of: Callable[[Record], float | None] = lambda record: record.accuracy
) -> dict[int, float]:
    """Round → a figure, by default the accuracy, in the mean over the seeds that have it then."""
    found: dict[int, list[float]] = {}
    for result in row.sound_results:
        for record in read_finished_records(Path(result.directory)):
            value = of(record)
            if value is not None:
                found.setdefault(record.round, []).append(value)
    return {number: statistics.fmean(values) for number, values in sorted(found.items())}


def published(directory: Path, probe: str) -> dict[int, dict[str, Any]]:
    """Round → what a probe wrote of it, of a finished run."""
    rounds = len(read_finished_records(directory))
    rows = read_probes(directory / "probes.jsonl", rounds, ended=True)
    return {row["round"]: row[probe] for row in rows if probe in row}


def at_round(number: int) -> Callable[[list[Record]], float | None]:
    """The accuracy after a round."""
    return lambda rounds: rounds[number - 1].accuracy if 0 < number <= len(rounds) else None


def best_until(number: int) -> Callable[[list[Record]], float | None]:
    """The best accuracy up to a round, for runs that have come so far."""
    return lambda rounds: highest_accuracy(rounds[:number]) if number <= len(rounds) else None


def highest_accuracy(rounds: list[Record]) -> float | None:
    """The best accuracy of a run."""
    return max((record.accuracy for record in rounds if record.accuracy is not None), default=None)


def mean_of_last(count: int) -> Callable[[list[Record]], float | None]:
    """The mean accuracy of the last few evaluations."""

    def mean(rounds: list[Record]) -> float | None:
        known = [record.accuracy for record in rounds if record.accuracy is not None][-count:]
        return statistics.fmean(known) if known else None

    return mean


def accuracy_at_end(count: int) -> Callable[[list[Record]], float | None]:
    """The mean accuracy of the last few evaluations; of a run that ends with a round in which nobody trained, its.

    Such a round is a technique's epilogue, which makes another model of the trained one.
    """
    mean = mean_of_last(count)
    return lambda rounds: mean(rounds[-1:] if rounds and not rounds[-1].steps else rounds)


def accuracy_before_epilogue(rounds: list[Record]) -> float | None:
    """The accuracy after the last round of training of a run that has an epilogue; None if it has none."""
    if len(rounds) < 2 or rounds[-1].steps:
        return None
    return [record.accuracy for record in rounds if record.steps][-1]


def figures_by_label(comparison: Comparison, of: Callable[[list[Record]], float | None]) -> dict[str, Seeds]:
    """Method → seed → a figure, of a comparison that varies nothing else."""
    return {row.method: figures_by_seed(row, of) for row in comparison.rows}


def unfinished_note(comparison: Comparison) -> tuple[str, ...]:
    """A note on the runs that diverged or are missing, if there are any."""
    lines = [_seeds_note(row.run.title, "diverged with", row.diverged_seeds) for row in comparison.rows]
    lines += [_seeds_note(row.run.title, "has no result for", row.missing_seeds) for row in comparison.rows]
    told = "; ".join(filter(None, lines))
    return (told,) if told else ()


def _seeds_note(title: str, what: str, seeds: Sequence[int]) -> str:
    return f"{title} {what} seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if seeds else ""
