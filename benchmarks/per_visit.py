"""Microseconds of processor time per visit, phase by phase, on the device workload of benchmarks/peers/work.py.

    python benchmarks/per_visit.py [--rounds 20] [--repeats 5] [--compile] [--json FILE]

Clients are pairs of tensors, as an outside user brings them. Engines take turns in every repeat, and a figure is the
median over repeats. The clock of `Federation(profile=True)` is set to processor time, so that other processes of the
machine are not counted; with it `wait for workers` is what waiting costs, and not how long it takes. To read that
clock takes 0.7 µs, 26 times per visit where clients are trained one by one and 7 times where they are vectorised.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

import fedstrata as fs
from fedstrata.system import timing

sys.path.append(str(Path(__file__).parent / "peers"))
from work import LR, SEED, WORKLOADS, client_data

WORK = WORKLOADS["device"]
ENGINES = {
    "serial": {"engine": "serial", "workers": 1},
    "processes": {"engine": "processes", "workers": 2},
    "vmap": {"engine": "vmap", "workers": 1},
    "vmap, 2 workers": {"engine": "vmap", "workers": 2},
}
ORDER = (
    "open the round",
    "hand out jobs",
    "wait for workers",
    "load the model",
    "batches",
    "forward",
    "backward",
    "optimiser",
    "techniques",
    "vectorised visits",
    "difference",
    "hand over",
    "everything else",
    "check updates",
    "count bytes",
    "fold updates",
    "keep memories",
    "train and close",
    "write to disk",
)
"""Phases in the order of a visit; others come after them."""
Spent = dict[str, dict[str, float]]
"""Who → phase → microseconds per visit."""


class Subject:
    """A federation with one engine, and what its phases have taken so far."""

    def __init__(self, engine: dict[str, object], compile: bool) -> None:
        self.federation = fs.Federation(
            WORK.build(),
            list(client_data(WORK)),
            rounds=10**6,
            participation=WORK.sampled,
            batch_size=WORK.batch,
            lr=LR,
            seed=SEED,
            compile=compile,
            profile=True,
            **engine,  # type: ignore[arg-type]
        )
        self.records = self.federation.rounds()
        self.before = self.spent()

    def spent(self) -> Spent:
        """Seconds so far."""
        main, workers = self.federation.spent
        return {"main": main, "workers": workers}

    def measure(self, rounds: int) -> Spent:
        """Some rounds more."""
        for _ in range(rounds):
            next(self.records)
        before, self.before = self.before, self.spent()
        visits = rounds * WORK.sampled
        return {
            who: {phase: 1e6 * (now - before[who].get(phase, 0.0)) / visits for phase, now in spent.items()}
            for who, spent in self.before.items()
        }


def median(found: list[Spent]) -> Spent:
    """Phase by phase, over repeats."""
    return {
        who: {phase: statistics.median(each[who].get(phase, 0.0) for each in found) for phase in found[-1][who]}
        for who in ("main", "workers")
    }


def table(found: dict[str, Spent]) -> str:
    """Markdown: a column per engine and place, a row per phase."""
    columns = {
        name if not spent["workers"] else f"{name}: {who}": spent[who]
        for name, spent in found.items()
        for who in ("main", "workers")
        if spent[who]
    }
    phases = {phase for column in columns.values() for phase in column}
    known = [*(phase for phase in ORDER if phase in phases), *sorted(phases.difference(ORDER))]
    lines = [f"| phase | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    for phase in known:
        cells = (f"{column[phase]:.1f}" if phase in column else "" for column in columns.values())
        lines.append(f"| {phase} | {' | '.join(cells)} |")
    sums = (f"**{sum(column.values()):.1f}**" for column in columns.values())
    return "\n".join([*lines, f"| **all** | {' | '.join(sums)} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    timing.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    subjects = {name: Subject(engine, options.compile) for name, engine in ENGINES.items()}
    for subject in subjects.values():
        subject.measure(3)  # what is done once: counting FLOPs, compiling, starting workers
    found: dict[str, list[Spent]] = {name: [] for name in subjects}
    for _ in range(options.repeats):
        for name, subject in subjects.items():
            found[name].append(subject.measure(options.rounds))
    for subject in subjects.values():
        subject.federation.close()
    figures = {name: median(each) for name, each in found.items()}
    print(
        f"Microseconds of processor time per visit; {WORK.sampled} visits per round, {WORK.title}.\n\n{table(figures)}"
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
