"""The table of a comparison: means and standard deviations over the seeds, and gaps to centralised training."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedstrata.compare.plan import Plan, Run
from fedstrata.compare.runner import Result, find_result
from fedstrata.core.text import SHARES, metric_spread
from fedstrata.errors import FedstrataError


@dataclass(frozen=True)
class Stat:
    """The mean of some numbers and their sample standard deviation, which takes two of them."""

    mean: float
    std: float | None
    count: int


def spread(value: Stat | None, metric: str = "accuracy") -> str:
    """Mean ± standard deviation of a metric, or of a gap in it; of shares in percent."""
    return "–" if value is None else metric_spread(metric, value.mean, value.std)


def stat(values: Iterable[float | None]) -> Stat | None:
    """mean = Σx/n, std = √(Σ(x − mean)²/(n − 1)); None for no numbers."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Stat(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def gap(reference: Mapping[int, float], other: Mapping[int, float]) -> Stat | None:
    """Reference − other, seed by seed, over the seeds that both have."""
    return stat(reference[seed] - other[seed] for seed in reference if seed in other)


@dataclass(frozen=True)
class ComparisonRow:
    """One method under one combination of the other fields that are varied, over all seeds.

    A mean leaves out the seeds that are missing and those that diverged.

    Args:
        run: one of its runs, for what all of them have in common.
        seeds: all that were asked for.
        results: of the seeds that are finished.
        gap: centralised − this method; None for centralised itself, and where there is none to compare with.
    """

    run: Run
    seeds: tuple[int, ...]
    results: tuple[Result, ...]
    gap: Stat | None = None

    @property
    def method(self) -> str:
        """The method's name in the table."""
        return self.run.label

    @property
    def sound_results(self) -> list[Result]:
        """The results that count: of the seeds that did not diverge."""
        return [result for result in self.results if result.diverged is None]

    @property
    def diverged_seeds(self) -> list[int]:
        """The seeds that diverged."""
        return [result.seed for result in self.results if result.diverged is not None]

    @property
    def missing_seeds(self) -> list[int]:
        """The seeds that are not finished."""
        return [seed for seed in self.seeds if seed not in {result.seed for result in self.results}]

    @property
    def is_own(self) -> bool:
        """True if the clients' own models are judged on the whole test set, since the server has no whole one."""
        return self.run.is_incomplete

    def of(self, name: str) -> Stat | None:
        """Mean and standard deviation of a field of the results; of `rounds_to_target`, where it was reached."""
        return stat(getattr(result, name) for result in self.sound_results)

    def of_metric(self, name: str) -> Stat | None:
        """Mean and standard deviation of one of the task's metrics."""
        return stat(result.metrics.get(name) for result in self.sound_results)

    @property
    def metric(self) -> str:
        """The name of the metric that the runs are judged by."""
        return self.results[0].metric if self.results else "accuracy"

    def by_seed(self) -> dict[int, float]:
        """Seed → final primary metric."""
        return {result.seed: result.score for result in self.sound_results if result.score is not None}


SCORES = ("accuracy", "best_accuracy", "score", "best_score")
MEASURED = (*SCORES, "rounds_to_target", "bytes_up", "bytes_down", "flops", "seconds")
"""Fields of a Result that a table averages."""
SIMULATED = ("simulated_seconds_to_target", "simulated_seconds")
"""Those that it averages where there is a fleet."""
OVER_CLIENTS = ("global_mean", "worst", "spread")
"""Those that it averages where clients are judged for themselves, of the global model."""
OWN_OVER_CLIENTS = ("own_mean", "own_worst", "own_spread")
"""The same of clients' own models."""


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison.

    Args:
        plan: its runs.
        rows: the table, in the order given.
        failures: what went wrong, by directory.
        tuning: how the methods' settings were found, in a sentence; empty if nobody has searched.
    """

    plan: Plan
    rows: tuple[ComparisonRow, ...]
    failures: Mapping[Path, FedstrataError]
    tuning: str = ""

    def __str__(self) -> str:
        return "\n".join(f"{row.run.title}: {_score_text(row)}" for row in self.rows)

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics that some run has."""
        return list(dict.fromkeys(name for row in self.rows for result in row.results for name in result.metrics))

    @property
    def has_gap(self) -> bool:
        """True if one of the methods is the one that gaps are measured from."""
        return any(row.run.is_reference for row in self.rows)

    @property
    def has_fairness(self) -> bool:
        """True if in some run clients are judged for themselves."""
        return any(result.fairness is not None for row in self.rows for result in row.results)

    @property
    def has_own_models(self) -> bool:
        """True if in some run clients have models of their own."""
        return any(result.own_mean is not None for row in self.rows for result in row.results)

    @property
    def measured(self) -> tuple[str, ...]:
        """Fields of a Result that the table averages."""
        clock = SIMULATED if self.has_fleet else ()
        over = OVER_CLIENTS if self.has_fairness else ()
        return (*MEASURED, *clock, *over, *(OWN_OVER_CLIENTS if self.has_own_models else ()))

    @property
    def has_fleet(self) -> bool:
        """True if some run has simulated time."""
        return any(result.simulated_seconds is not None for row in self.rows for result in row.results)

    @property
    def has_target(self) -> bool:
        """True if there is a target to reach."""
        return any(row.run.config.target is not None for row in self.rows)

    @property
    def notes(self) -> list[str]:
        """What a reader of the results must know, each once."""
        return list(dict.fromkeys(note for row in self.rows for result in row.results for note in result.notes))

    def as_dict(self) -> dict[str, Any]:
        """Everything, in full precision; accuracies and gaps are fractions."""
        return {
            "out": str(self.plan.out),
            "fixed": self.plan.common,
            "varied": self.plan.axes,
            "seeds": self.plan.seeds,
            "rows": [self._row(row) for row in self.rows],
            "failed": [
                {"run": str(run), "directory": str(run.directory), "why": str(self.failures[run.directory])}
                for run in self.plan.runs
                if run.directory in self.failures
            ],
            "notes": self.notes,
            **({"tuning": self.tuning} if self.tuning else {}),
        }

    def _row(self, row: ComparisonRow) -> dict[str, Any]:
        means = {name: None if (found := row.of(name)) is None else asdict(found) for name in self.measured}
        return {
            "method": row.method,
            "spec": row.run.config.method,
            "varied": dict(row.run.varied),
            "own": dict(row.run.own),
            "buffers": row.run.buffers,
            "target": row.run.config.target,
            "metric": row.metric,
            "metrics": {name: asdict(s) for name in self.metrics if (s := row.of_metric(name)) is not None},
            "missing": row.missing_seeds,
            "diverged": row.diverged_seeds,
            **means,
            "gap": None if row.gap is None else asdict(row.gap),
            "runs": [asdict(result) for result in row.results],
        }


def _score_text(row: ComparisonRow) -> str:
    found = row.of("score")
    return "no result" if found is None else spread(found, row.metric) + (" %" if row.metric in SHARES else "")


def rows(plan: Plan, results: Mapping[Path, Result]) -> tuple[ComparisonRow, ...]:
    """One row per method and combination, from the results by directory; gaps are within a combination."""
    found: list[ComparisonRow] = []
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in plan.runs:
        groups.setdefault((run.setting, run.label), []).append(run)
    for runs in groups.values():
        there = tuple(results[run.directory] for run in runs if run.directory in results)
        found.append(ComparisonRow(runs[0], tuple(run.config.seed for run in runs), there))
    return tuple(_with_gap(row, found) for row in found)


def _with_gap(row: ComparisonRow, others: Iterable[ComparisonRow]) -> ComparisonRow:
    """The row with its gap from the first reference under the same settings."""
    beside = [other for other in others if other.run.setting == row.run.setting and other.run.is_reference]
    if not beside or row is beside[0]:
        return row
    return replace(row, gap=gap(beside[0].by_seed(), row.by_seed()))


def tabulate(plan: Plan, failures: Mapping[Path, FedstrataError] | None = None) -> Comparison:
    """The table of the runs that are finished."""
    found = {run.directory: result for run in plan.runs if (result := find_result(run)) is not None}
    return Comparison(plan, rows(plan, found), dict(failures or {}))
