"""Bytes against accuracy: FedAvg, FedPart, top-k, quantised changes, and their sums.

Every row gets the best of the same learning rates, by its last accuracy with seed 9, which is not reported; then five
seeds, each of which chooses the partition and everything else that is random. Bytes up are those of encoded messages.
Besides the last accuracy a row tells how many bytes it took up to FedAvg's last accuracy less a point. Runs that are
there are not run again.

    python benchmarks/compression.py [digits fashion] [--data-dir DIR] [--out runs/compression]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from studies import Job, Study, change_text, final_score, spread_text, tuned_rows

from fedstrata.core.text import bytes_text
from fedstrata.system.machine import processor

POINT = 0.01
"""How much less than FedAvg's last accuracy is as good."""
PART = "fedpart(full_rounds=4, rounds_per_stratum=1)"
METHODS = (
    *("fedavg", PART, "topk(share=0.1)", "topk(share=0.01)", "topk(share=0.01, feedback=False)"),
    *("topk(share=0.01, rates=(('head', 0.5),))", "quantise(bits=8)", "quantise(bits=4)"),
    "quantise(bits=4, rounding='nearest', feedback=True)",
    *("topk(share=0.1) + quantise(bits=8)", "topk(share=0.01) + quantise(bits=8)"),
    *(f"{PART} + topk(share=0.1)", f"{PART} + quantise(bits=4)", f"{PART} + topk(share=0.1) + quantise(bits=8)"),
)
"""The first one is what the others are compared with."""


def build_studies(rounds: int) -> dict[str, Study]:
    """The tables, with runs of so many rounds."""
    rows = {method: f"--method|{method}" for method in METHODS}
    shared = f"--partition|dirichlet(alpha=0.3)|--clients|10|--rounds|{rounds}"
    options = {
        "digits": f"{shared}|--dataset|digits|--model|cnn2(width=16)|--epochs|2",
        "fashion": (
            f"{shared}|--dataset|fashion-mnist(resolution=14, examples=2000, test_examples=1000)"
            "|--model|resnet8(width=8, stem='3x3', maxpool=False, norm='group')|--epochs|1"
        ),
    }
    return {name: Study(name, text, (0.05, 0.1, 0.2), rows) for name, text in options.items()}


def bytes_to(directory: Path, target: float) -> int | None:
    """Bytes up until a run reaches an accuracy; None if it never does."""
    total = 0
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        total += row["bytes_up"]
        if row["accuracy"] is not None and row["accuracy"] >= target:
            return total
    return None


def table(study: Study, seeds: Sequence[int], out: Path) -> str:
    """The rows in Markdown."""
    rates, found = tuned_rows(study, seeds, out)
    scores = {row: [*map(final_score, summaries)] for row, summaries in found.items()}
    sent = {row: statistics.fmean(s["costs"]["bytes_up"] for s in summaries) for row, summaries in found.items()}
    first = METHODS[0]
    lines = [
        "| method | lr | accuracy (%) | − first row, 90 % interval | up | of the first row's "
        "| of the first row's until it is as good less a point |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found:
        change = "" if row == first else change_text("accuracy", scores[row], scores[first])
        cells = [f"`{row}`", f"{rates[row]:g}", spread_text("accuracy", scores[row]), change, bytes_text(sent[row])]
        cells.append(f"{100 * sent[row] / sent[first]:.3g} %")
        shares = []
        for seed, goal in zip(seeds, scores[first], strict=True):
            jobs = (Job(study, name, rates[name], seed) for name in (row, first))
            mine, whole = (bytes_to(job.directory(out), (goal or 0.0) - POINT) for job in jobs)
            shares += [mine / whole] if mine and whole else []
        some = f" ({len(shares)} of {len(seeds)} seeds)" if len(shares) < len(seeds) else ""
        cells.append(f"{100 * statistics.fmean(shares):.3g} %{some}" if shares else "never")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", default=["digits", "fashion"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/compression"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    if given.data_dir is not None:
        os.environ["FEDSTRATA_DATA"] = str(given.data_dir)
    for name in given.studies:
        study = build_studies(given.rounds)[name]
        print(f"## {name}\n\n{processor()}\n\n{table(study, given.seeds, given.out)}\n", flush=True)


if __name__ == "__main__":
    main()
