"""Layer-wise methods on other tasks than classification: a regression, a segmentation, the next token.

Every method gets the better of the same learning rates, by its last score with seed 9, which is not reported; then
five seeds, each of which chooses the data's split (or its canvases), the partition and everything else that is random.
Runs that are there are not run again, so it goes on where it was stopped.

    python benchmarks/tasks.py [diabetes segmentation shakespeare] [--out runs/tasks] [--seeds 0 1 2 3 4]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from studies import Study, change_text, final_score, spread_text, tuned_rows

from fedstrata.core.text import SHARES, bytes_text, flops_text, metric_title
from fedstrata.system.machine import processor

ONE = "--model|unet(width=16)"
DEPTHS = "--archs|unet(width=16, convs=1); unet(width=16)"
ALL = (
    Study(
        "diabetes",
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
    Study(
        "segmentation",
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
    Study(
        "shakespeare",
        "--dataset|shakespeare(task='next_token')|--partition|natural|--clients|0|--participation|10"
        "|--model|gpt(width=64, depth=2)|--rounds|45|--batch-size|8|--eval-every|15|--clip|1.0",
        (0.3, 1.0),
        {
            name: f"--method|{name}"
            for name in ("fedavg", "fedpart(full_rounds=5, rounds_per_stratum=1)", "fednlr", "scaffold")
        },
    ),
)
STUDIES = {study.name: study for study in ALL}


def table(study: Study, seeds: Sequence[int], out: Path) -> str:
    """The rows in Markdown."""
    rates, rows = tuned_rows(study, seeds, out)
    first = next(iter(rows.values()))
    metric, metrics = first[0]["metric"], [*first[0]["metrics"]]
    titles = [metric_title(one) + (" (%)" if one in SHARES else "") for one in metrics]
    lines = [
        f"| method | lr | {' | '.join(titles)} | − first row, {metric_title(metric)}, 90 % interval | up | computed |",
        "|---|--:|" + "--:|" * (len(metrics) + 3),
    ]
    for row, summaries in rows.items():
        shown = [spread_text(one, [s["metrics"].get(one) for s in summaries]) for one in metrics]
        own = change_text(metric, [*map(final_score, summaries)], [*map(final_score, first)])
        up, flops = (statistics.fmean(s["costs"][key] for s in summaries) for key in ("bytes_up", "flops"))
        change = "" if summaries is first else own
        cells = [f"`{row}`", f"{rates[row]:g}", *shown, change, bytes_text(up), flops_text(flops)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", default=[*STUDIES])
    parser.add_argument("--out", type=Path, default=Path("runs/tasks"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    given = parser.parse_args()
    for name in given.studies:
        print(f"## {name}\n\n{processor()}\n\n{table(STUDIES[name], given.seeds, given.out)}\n", flush=True)


if __name__ == "__main__":
    main()
