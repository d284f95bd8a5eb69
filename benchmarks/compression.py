"""Bytes against accuracy: FedAvg, FedPart, top-k, quantised changes, and their sums.

Every row gets the better of the same learning rates, by its last accuracy with seed 9, which is not reported; then the
seeds, each of which chooses the partition and everything else that is random. Bytes up are those of encoded messages.
Besides the last accuracy a row tells how many bytes it took up to what FedAvg has in the end, less a point. Runs that
are there are not run again, so it goes on where it was stopped.

    python benchmarks/compression.py [digits fashion-mnist] [--out runs/compression] [--seeds 0 1 2 3 4] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedstrata.core.text import bytes_text
from fedstrata.system.machine import processor

TUNING_SEED, AT_ONCE = 9, 2
"""Of the runs that choose a learning rate; runs at the same time."""
POINT = 0.01
"""How much less than FedAvg's last accuracy is as good."""
PART = "fedpart(full_rounds=4, rounds_per_stratum=1)"
ROWS = (
    "fedavg",
    PART,
    *(f"topk(share={share})" for share in (0.1, 0.01)),
    "topk(share=0.01, feedback=False)",
    "topk(share=0.01, rates=(('head', 0.5),))",
    *("quantise(bits=8)", "quantise(bits=4)", "quantise(bits=4, rounding='nearest', feedback=True)"),
    *("topk(share=0.1) + quantise(bits=8)", "topk(share=0.01) + quantise(bits=8)"),
    *(f"{PART} + topk(share=0.1)", f"{PART} + quantise(bits=4)", f"{PART} + topk(share=0.1) + quantise(bits=8)"),
)
"""Methods; the first one is what the others are compared with."""
STUDIES = {
    "digits": (
        ("--dataset|digits|--partition|dirichlet(alpha=0.3)|--clients|10|--model|cnn2(width=16)|--epochs|2", 60),
        (0.05, 0.1, 0.2),
    ),
    "fashion-mnist": (
        (
            "--dataset|fashion-mnist(resolution=14, examples=2000, test_examples=1000)|--partition|dirichlet(alpha=0.3)"
            "|--clients|10|--model|resnet8(width=8, stem='3x3', maxpool=False, norm='group')|--epochs|1",
            60,
        ),
        (0.05, 0.1, 0.2),
    ),
}
"""Study → ((what all its runs share, rounds), learning rates)."""


@dataclass(frozen=True)
class Job:
    """One run."""

    study: str
    method: str
    rate: float
    seed: int
    rounds: int

    def options(self) -> list[str]:
        """The command's, but for where it writes."""
        (shared, _), _ = STUDIES[self.study]
        own = f"--method|{self.method}|--rounds|{self.rounds}|--lr|{self.rate}|--seed|{self.seed}|--engine|serial"
        return f"{shared}|{own}".split("|")

    def run(self, out: Path) -> list[dict[str, Any]]:
        """The run's rounds, from its directory if it is there; those up to where it diverged."""
        directory = out / self.study / sha256(json.dumps(self.options()).encode()).hexdigest()[:12]
        if not (directory / "summary.json").exists():
            rest = ["resume", str(directory)]  # where it was stopped
            if not directory.exists():
                rest = ["run", *self.options(), "--out", str(directory), "--no-report"]
            command = [sys.executable, "-m", "fedstrata", *rest, "--quiet"]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            if done.returncode and not (directory / "summary.json").exists():
                raise SystemExit(done.stdout + done.stderr)
        rounds = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        last = rounds[-1]["accuracy"] if rounds else None
        print(f"{self.study} {self.method} lr {self.rate} seed {self.seed}: {last}", file=sys.stderr, flush=True)
        return rounds


def run_all(jobs: Iterable[Job], out: Path) -> dict[Job, list[dict[str, Any]]]:
    """Every job's rounds."""
    jobs = list(jobs)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(jobs, pool.map(lambda job: job.run(out), jobs), strict=True))


def accuracy(rounds: Sequence[dict[str, Any]], planned: int) -> float:
    """The last one; 0 for a run that diverged."""
    return float(rounds[-1]["accuracy"] or 0.0) if len(rounds) == planned else 0.0


def bytes_to(rounds: Sequence[dict[str, Any]], target: float) -> int | None:
    """Bytes up until an accuracy is reached; None if it never is."""
    total = 0
    for row in rounds:
        total += row["bytes_up"]
        if row["accuracy"] is not None and row["accuracy"] >= target:
            return total
    return None


def table(study: str, seeds: Sequence[int], planned: int | None, out: Path) -> str:
    """The rows in Markdown."""
    (_, usual), rates = STUDIES[study]
    rounds = planned or usual
    tuning = run_all((Job(study, m, rate, TUNING_SEED, rounds) for m in ROWS for rate in rates), out)
    best = {
        m: max(rates, key=lambda r, m=m: accuracy(tuning[Job(study, m, r, TUNING_SEED, rounds)], rounds)) for m in ROWS
    }
    found = run_all((Job(study, m, best[m], seed, rounds) for m in ROWS for seed in seeds), out)
    runs = {m: [found[Job(study, m, best[m], seed, rounds)] for seed in seeds] for m in ROWS}
    first = runs[ROWS[0]]
    lines = [
        "| method | lr | accuracy (%) | − FedAvg | bytes up | of FedAvg's | of FedAvg's to the same accuracy |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for m, mine in runs.items():
        last = [100 * accuracy(run, rounds) for run in mine]
        apart = [one - 100 * accuracy(other, rounds) for one, other in zip(last, first, strict=True)]
        sent, whole = (statistics.fmean(sum(r["bytes_up"] for r in run) for run in some) for some in (mine, first))
        cells = [f"`{m}`", f"{best[m]:g}", spread(last), f"{statistics.fmean(apart):+.1f}"]
        cells += [bytes_text(sent), f"{100 * sent / whole:.3g} %", reached(mine, first, rounds)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """The mean, and the deviation where there is one."""
    beside = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{beside}"


def reached(mine: Sequence[Any], first: Sequence[Any], rounds: int) -> str:
    """The mean share of FedAvg's bytes, seed by seed, and how many seeds got there."""
    targets = [accuracy(other, rounds) - POINT for other in first]
    pairs = [(bytes_to(run, t), bytes_to(other, t)) for run, other, t in zip(mine, first, targets, strict=True)]
    shares = [one / other for one, other in pairs if one and other]
    if not shares:
        return "never"
    return f"{100 * statistics.fmean(shares):.3g} %" + f" ({len(shares)} of {len(pairs)})" * (len(shares) < len(pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", default=[*STUDIES])
    parser.add_argument("--out", type=Path, default=Path("runs/compression"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, help="of each run, instead of the study's")
    given = parser.parse_args()
    for name in given.studies:
        text = table(name, given.seeds, given.rounds, given.out)
        print(f"## {name}\n\n{processor()}\n\n{text}\n", flush=True)


if __name__ == "__main__":
    main()
