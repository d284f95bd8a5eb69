"""What benchmarks of several methods, seeds and learning rates share: runs that resume, tuning, paired intervals."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from scipy import stats

from fedstrata.core.text import SHARES

LEVEL, TUNING_SEED, AT_ONCE = 0.9, 9, 2
"""Of the interval; of the runs that choose a learning rate; runs at the same time."""

Summary = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """One table.

    Args:
        name: of its directory.
        options: what all its runs share, with `|` between the command's words; `{seed}` stands for the run's seed.
        rates: learning rates to choose from.
        rows: name of a row → what it adds.
        places: what stands in braces in them → where it is on this machine, which is not in a run's name.
    """

    name: str
    options: str
    rates: tuple[float, ...]
    rows: Mapping[str, str] = field(hash=False)
    places: Mapping[str, str] = field(hash=False, default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One run."""

    study: Study
    row: str
    rate: float
    seed: int

    def options(self) -> list[str]:
        """The command's, but for where it writes."""
        text = f"{self.study.options}|{self.study.rows[self.row]}|--lr|{self.rate}|--seed|{self.seed}|--engine|serial"
        return text.replace("{seed}", str(self.seed)).split("|")

    def _options_here(self) -> list[str]:
        """The same, with this machine's places."""
        found = self.options()
        for name, place in self.study.places.items():
            found = [word.replace(f"{{{name}}}", place) for word in found]
        return found

    def directory(self, out: Path) -> Path:
        """Where the run is."""
        return out / self.study.name / sha256(json.dumps(self.options()).encode()).hexdigest()[:12]

    def run(self, out: Path) -> Summary:
        """The run's summary, from its directory if it is there."""
        directory = self.directory(out)
        summary = directory / "summary.json"
        if not summary.exists():
            rest = ["resume", str(directory)]  # where it was stopped
            if not directory.exists():
                rest = ["run", *self._options_here(), "--out", str(directory), "--no-report"]
            command = [sys.executable, "-m", "fedstrata", *rest, "--quiet"]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            if done.returncode and not summary.exists():
                raise SystemExit(done.stdout + done.stderr)
        found: Summary = json.loads(summary.read_text())
        about = f"{self.study.name} {self.row} lr {self.rate} seed {self.seed}"
        print(f"{about}: {found['metrics']}, {found['costs']['seconds']:.0f} s", file=sys.stderr, flush=True)
        return found


def run_all(jobs: Iterable[Job], out: Path) -> dict[Job, Summary]:
    """Every job's summary."""
    jobs = list(jobs)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(jobs, pool.map(lambda job: job.run(out), jobs), strict=True))


def final_score(summary: Summary) -> float | None:
    """The last score of the metric that judges the run."""
    score: float | None = summary["score"]
    return score


def best_rates(study: Study, out: Path, score: Callable[[Summary], float | None] = final_score) -> dict[str, float]:
    """Row → the learning rate with the best score; one that diverged has none."""
    found = run_all((Job(study, row, rate, TUNING_SEED) for row in study.rows for rate in study.rates), out)

    def goodness(job: Job) -> float:
        value = score(found[job])
        if value is None or found[job]["diverged"]:
            return float("-inf")
        return value if found[job]["better"] == "higher" else -value

    return {row: max((job for job in found if job.row == row), key=goodness).rate for row in study.rows}


def tuned_rows(
    study: Study, seeds: Sequence[int], out: Path, score: Callable[[Summary], float | None] = final_score
) -> tuple[dict[str, float], dict[str, list[Summary]]]:
    """(row → its learning rate, row → its summaries, seed by seed)."""
    rates = best_rates(study, out, score)
    found = run_all((Job(study, row, rates[row], seed) for row in rates for seed in seeds), out)
    return rates, {row: [found[Job(study, row, rate, seed)] for seed in seeds] for row, rate in rates.items()}


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and a paired t interval around it."""
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(differences) - 1)) * error
    return mean, mean - half, mean + half


def _unit(metric: str) -> tuple[float, str]:
    """What a metric is multiplied by, and how it is written."""
    return (100, ".1f") if metric in SHARES else (1, ".3f")


def spread_text(metric: str, values: Sequence[float | None]) -> str:
    """Of all seeds; a row of which one diverged has no mean."""
    if all(value is None for value in values):
        return "–"
    if lost := sum(value is None for value in values):
        return f"diverged in {lost} of {len(values)}"
    factor, form = _unit(metric)
    there = [factor * value for value in values if value is not None]
    return f"{statistics.fmean(there):{form}} ± {statistics.stdev(there):{form}}"


def change_text(metric: str, values: Sequence[float | None], first: Sequence[float | None]) -> str:
    """The paired difference with its interval; nothing where a seed is missing."""
    pairs = [(a, b) for a, b in zip(values, first, strict=True) if a is not None and b is not None]
    if len(pairs) < len(values):
        return ""
    factor, form = _unit(metric)
    mean, low, high = interval([factor * (a - b) for a, b in pairs])
    return f"{mean:+{form}} [{low:+{form}}, {high:+{form}}]"
