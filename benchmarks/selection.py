"""Which strata to train next: selection by score against FedPart and full updates, at equal bytes.

Every row gets the best of the same learning rates, by its last accuracy with seed 9, which is not reported; then five
seeds. All selections share FedPart's cycle, so they send about a third of full updates' bytes; what they choose decides
how many exactly. Rows are compared at the bytes up that the most frugal of them took in the same seed, full updates
too. Runs that are there are not run again.

    python benchmarks/selection.py [fashion] [--data-dir DIR] [--out runs/selection]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from studies import Job, Study, change_text, final_score, spread_text, tuned_rows

from fedstrata.core.text import bytes_text, flops_text
from fedstrata.system.machine import processor

CYCLE = "full_rounds=4, rounds_per_stratum=1"
FIRST = f"fedpart({CYCLE})"
METHODS = (
    *(FIRST, "fedavg"),
    *(f"select(score='{score}', {CYCLE})" for score in ("random", "change", "divergence", "gradnorm", "snr")),
    f"select(score='divergence', temperature=0, {CYCLE})",
    f"select(score='random', per='client', {CYCLE})",
    f"select(score='divergence', per='client', {CYCLE})",
    *("fedldf(share=0.2)", "progressive(longest=10)"),
)
"""The first one is what the others are compared with."""

STUDIES = {
    study.name: study
    for study in (
        Study(
            "fashion",
            "--dataset|fashion-mnist(resolution=14, examples=2000, test_examples=1000)|--partition|dirichlet(alpha=0.3)"
            "|--clients|10|--rounds|56|--model|resnet8(width=8, stem='3x3', maxpool=False, norm='group')",
            (0.05, 0.1, 0.2),
            {method: f"--method|{method}" for method in METHODS},
        ),
    )
}


def curve(directory: Path) -> list[tuple[int, float]]:
    """(bytes up until then, accuracy) after every evaluated round."""
    sent, found = 0, list[tuple[int, float]]()
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        sent += row["bytes_up"]
        if row["accuracy"] is not None:
            found.append((sent, row["accuracy"]))
    return found


def score_at(found: Sequence[tuple[int, float]], budget: int) -> float | None:
    """The last accuracy within a budget of bytes."""
    within = [accuracy for sent, accuracy in found if sent <= budget]
    return within[-1] if within else None


def table(study: Study, seeds: Sequence[int], out: Path) -> str:
    """The rows in Markdown."""
    rates, found = tuned_rows(study, seeds, out)
    curves = {row: [curve(Job(study, row, rates[row], seed).directory(out)) for seed in seeds] for row in found}
    budgets = [min(lines[at][-1][0] for lines in curves.values()) for at in range(len(seeds))]
    equal = {row: [*map(score_at, lines, budgets)] for row, lines in curves.items()}
    lines = [
        f"| method | lr | accuracy after all rounds (%) | accuracy at {bytes_text(statistics.fmean(budgets))} up (%) "
        "| − first row there, 90 % interval | up | computed |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row, summaries in found.items():
        change = "" if row == FIRST else change_text("accuracy", equal[row], equal[FIRST])
        last = spread_text("accuracy", [*map(final_score, summaries)])
        up, flops = (statistics.fmean(s["costs"][key] for s in summaries) for key in ("bytes_up", "flops"))
        cells = [f"`{row}`", f"{rates[row]:g}", last, spread_text("accuracy", equal[row]), change]
        lines.append(f"| {' | '.join([*cells, bytes_text(up), flops_text(flops)])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", default=[*STUDIES])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/selection"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    given = parser.parse_args()
    if given.data_dir is not None:
        os.environ["FEDSTRATA_DATA"] = str(given.data_dir)
    for name in given.studies:
        print(f"## {name}\n\n{processor()}\n\n{table(STUDIES[name], given.seeds, given.out)}\n", flush=True)


if __name__ == "__main__":
    main()
