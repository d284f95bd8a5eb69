"""Layer-wise methods on other tasks than classification: a regression, a segmentation, the next token.

Every method gets the better of the same learning rates, by its last score with seed 9, which is not reported; then
five seeds, each of which chooses the data's split (or its canvases), the partition and everything else that is random.
Runs that are there are not run again, so it goes on where it was stopped.

    python benchmarks/tasks.py [diabetes segmentation shakespeare] [--out runs/tasks] [--seeds 0 1 2 3 4]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from scipy import stats

from fedstrata.core.text import SHARES, bytes_text, flops_text, metric_title
from fedstrata.system.machine import processor

LEVEL, TUNING_SEED, AT_ONCE = 0.9, 9, 2
"""Of the interval; of the runs that choose a learning rate; runs at the same time."""


@dataclass(frozen=True)
class Study:
    """One table: what all its runs share, and what each row adds; `{seed}` stands for the run's seed."""

    options: str
    rates: tuple[float, ...]
    rows: Mapping[str, str]


ONE = "--model|unet(width=16)"
DEPTHS = "--archs|unet(width=16, convs=1); unet(width=16)"
STUDIES = {
    "diabetes": Study(
        "--dataset|diabetes(seed={seed})|--partition|dirichlet(alpha=0.3)|--clients|6|--model|tablemlp(hidden=(16,))"
        "|--rounds|30",
        (0.01, 0.03, 0.1),
        {
            name: f"--method|{name}"
            for name in (
                *("fedavg", "fedprox", "scaffold", "feddyn", "fednlr"),
                *("fedpart(full_rounds=2, rounds_per_stratum=1)", "local", "centralised"),
            )
        },
    ),
    "segmentation": Study(
        "--dataset|digits-segmentation(digits=2, examples=1200, seed={seed})|--partition|dirichlet(alpha=0.5)"
        "|--clients|4|--rounds|40|--epochs|2|--batch-size|16|--optimizer|adam|--eval-every|10",
        (0.002, 0.005),
        {
            "fedavg": f"{ONE}|--method|fedavg",
            "fedpart(full_rounds=8, rounds_per_stratum=1)": (
                f"{ONE}|--method|fedpart(full_rounds=8, rounds_per_stratum=1)"
            ),
            "groupavg, two depths": f"{DEPTHS}|--method|groupavg",
            "heteroavg, two depths": f"{DEPTHS}|--method|heteroavg",
            "heteroavg + inco, two depths": f"{DEPTHS}|--method|heteroavg + inco",
        },
    ),
    "shakespeare": Study(
        "--dataset|shakespeare(task='next_token')|--partition|natural|--clients|0|--participation|10"
        "|--model|gpt(width=64, depth=2)|--rounds|45|--batch-size|8|--eval-every|15|--clip|1.0",
        (0.3, 1.0),
        {
            name: f"--method|{name}"
            for name in ("fedavg", "fedpart(full_rounds=5, rounds_per_stratum=1)", "fednlr", "scaffold")
        },
    ),
}


@dataclass(frozen=True)
class Job:
    """One run."""

    study: str
    row: str
    rate: float
    seed: int

    def options(self) -> list[str]:
        """The command's, but for where it writes."""
        study = STUDIES[self.study]
        text = f"{study.options}|{study.rows[self.row]}|--lr|{self.rate}|--seed|{self.seed}|--engine|serial"
        return text.replace("{seed}", str(self.seed)).split("|")

    def run(self, out: Path) -> dict[str, Any]:
        """The run's summary, from its directory if it is there."""
        directory = out / self.study / sha256(json.dumps(self.options()).encode()).hexdigest()[:12]
        summary = directory / "summary.json"
        if not summary.exists():
            rest = ["resume", str(directory)]  # where it was stopped
            if not directory.exists():
                rest = ["run", *self.options(), "--out", str(directory), "--no-report"]
            command = [sys.executable, "-m", "fedstrata", *rest, "--quiet"]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            if done.returncode and not summary.exists():
                raise SystemExit(done.stdout + done.stderr)
        found: dict[str, Any] = json.loads(summary.read_text())
        print(f"{self.study} {self.row} lr {self.rate} seed {self.seed}: {found['metrics']}", file=sys.stderr)
        return found


def run_all(jobs: Iterable[Job], out: Path) -> dict[Job, dict[str, Any]]:
    """Every job's summary."""
    jobs = list(jobs)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(jobs, pool.map(lambda job: job.run(out), jobs), strict=True))


def best_rates(name: str, out: Path) -> dict[str, float]:
    """Row → the learning rate with the best last score; one that diverged has none."""
    study = STUDIES[name]
    found = run_all((Job(name, row, rate, TUNING_SEED) for row in study.rows for rate in study.rates), out)

    def goodness(job: Job) -> float:
        summary = found[job]
        score = summary["score"]
        if score is None or summary["diverged"]:
            return float("-inf")
        return float(score) if summary["better"] == "higher" else -float(score)

    return {row: max((job for job in found if job.row == row), key=goodness).rate for row in study.rows}


def interval(differences: list[float]) -> tuple[float, float, float]:
    """The mean, and a paired t interval around it."""
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(differences) - 1)) * error
    return mean, mean - half, mean + half


def table(name: str, seeds: list[int], out: Path) -> str:
    """The rows in Markdown."""
    rates = best_rates(name, out)
    found = run_all((Job(name, row, rates[row], seed) for row in rates for seed in seeds), out)
    rows = {row: [found[Job(name, row, rate, seed)] for seed in seeds] for row, rate in rates.items()}
    first = next(iter(rows.values()))
    metric, metrics = first[0]["metric"], [*first[0]["metrics"]]
    titles = [metric_title(one) + (" (%)" if one in SHARES else "") for one in metrics]
    lines = [
        f"| method | lr | {' | '.join(titles)} | − first row, {metric_title(metric)}, 90 % interval | up | computed |",
        "|---|--:|" + "--:|" * (len(metrics) + 3),
    ]
    for row, summaries in rows.items():
        shown = [_spread(one, [s["metrics"].get(one) for s in summaries]) for one in metrics]
        change = "" if summaries is first else _change(metric, summaries, first)
        up, flops = (statistics.fmean(s["costs"][key] for s in summaries) for key in ("bytes_up", "flops"))
        cells = [f"`{row}`", f"{rates[row]:g}", *shown, change, bytes_text(up), flops_text(flops)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _unit(metric: str) -> tuple[float, str]:
    """What a metric is multiplied by, and how it is written."""
    return (100, ".1f") if metric in SHARES else (1, ".3f")


def _spread(metric: str, values: list[float | None]) -> str:
    """Of all seeds; a row of which one diverged has no mean."""
    if lost := sum(value is None for value in values):
        return f"diverged in {lost} of {len(values)}"
    factor, form = _unit(metric)
    there = [factor * value for value in values if value is not None]
    return f"{statistics.fmean(there):{form}} ± {statistics.stdev(there):{form}}"


def _change(metric: str, summaries: list[dict[str, Any]], first: list[dict[str, Any]]) -> str:
    if any(one["score"] is None for one in (*summaries, *first)):
        return ""
    factor, form = _unit(metric)
    pairs = [(one["score"] - other["score"]) * factor for one, other in zip(summaries, first, strict=True)]
    mean, low, high = interval(pairs)
    return f"{mean:+{form}} [{low:+{form}}, {high:+{form}}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", default=[*STUDIES])
    parser.add_argument("--out", type=Path, default=Path("runs/tasks"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    given = parser.parse_args()
    for name in given.studies:
        print(f"## {name}\n\n{processor()}\n\n{table(name, given.seeds, given.out)}\n", flush=True)


if __name__ == "__main__":
    main()
