"""Personal models: whose clients are served better by parts, or whole models, of their own?

Clients are judged by test examples of their own. Every method gets the best of the same learning rates, by the mean
over the clients with seed 9, which is not reported; then five seeds, each of which chooses the held-out examples, the
partition and everything else that is random. Runs that are there are not run again.

    python benchmarks/personal.py [hospitals fashion shakespeare] [--data-dir DIR] [--out runs/personal]
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from studies import Study, Summary, change_text, spread_text, tuned_rows

from fedstrata.core.text import SHARES, bytes_text, flops_text, metric_title
from fedstrata.system.machine import processor

METHODS = (
    *("fedavg", "local", "fedavg + finetune(epochs={epochs})", "fedper", "fedrep(head_epochs={epochs})", "fedbn"),
    *("lgfedavg", "fedbabu(epochs={epochs})", "ditto", "apfl"),
)


def rows(epochs: int) -> dict[str, str]:
    """Method → its options; so many epochs for FedRep's head and for fine-tuning."""
    named = [method.replace("{epochs}", str(epochs)) for method in METHODS]
    return {name: f"--method|{name}" for name in named}


STUDIES = {
    study.name: study
    for study in (
        Study(
            "hospitals",
            "--dataset|heart-disease(seed={seed})|--partition|natural|--clients|0|--model|tablemlp(hidden=(16,))"
            "|--rounds|30|--eval-every|30",
            (0.03, 0.1, 0.3),
            rows(epochs=5),
        ),
        Study(
            "fashion",
            "--dataset|fashion-mnist(resolution=14, examples=4000, test_examples=1000)|--partition|dirichlet(alpha=0.1)"
            "|--clients|20|--participation|0.5|--model|resnet8(width=8, stem='3x3', maxpool=False)|--holdout|0.25"
            "|--rounds|30|--epochs|2|--eval-every|30",
            (0.01, 0.03, 0.1),
            rows(epochs=5),
        ),
        Study(
            "shakespeare",
            "--dataset|shakespeare(task='next_token', min_lines=60)|--partition|natural|--clients|0|--participation|10"
            "|--model|gpt(width=32, depth=1)|--holdout|0.25|--rounds|30|--batch-size|8|--eval-every|30|--clip|1.0",
            (0.3, 1.0),
            rows(epochs=2),
        ),
    )
}


def over_clients(summary: Summary) -> float | None:
    """The mean over the clients, by their own models where they have any."""
    fairness = summary.get("fairness")
    return None if fairness is None or summary["diverged"] else float(fairness["mean"])


def of(summary: Summary, kind: str, name: str) -> float | None:
    """A figure over the clients of the global model, or of their own; None where there is none."""
    apart = summary.get("global_fairness")
    own = summary.get("fairness") if apart is not None or is_own(summary) else None
    whole = apart or (None if is_own(summary) else summary.get("fairness"))
    found = own if kind == "own" else whole
    return None if found is None or summary["diverged"] else float(found[name])


def is_own(summary: Summary) -> bool:
    """True if the server has no whole model."""
    from fedstrata.techniques import method

    return method(summary["method"]).incomplete


def table(study: Study, seeds: Sequence[int], out: Path) -> str:
    """The rows in Markdown: by the clients' own test examples, the global model and their own apart."""
    rates, found = tuned_rows(study, seeds, out, over_clients)
    first = next(iter(found.values()))
    metric = first[0]["metric"]
    unit = f"{metric_title(metric)}{' (%)' if metric in SHARES else ''}"
    columns = [(kind, name) for kind in ("global", "own") for name in ("mean", "worst_tenth")]
    titles = [f"{kind} model{'s' if kind == 'own' else ''}, {name.replace('_', ' ')}" for kind, name in columns]
    lines = [
        f"| method | lr | {' | '.join(titles)} | − first row, {unit}, own where there are any, 90 % interval | up "
        "| computed |",
        "|---|--:|" + "--:|" * (len(titles) + 3),
    ]
    base = [*map(over_clients, first)]
    for row, summaries in found.items():
        shown = [spread_text(metric, [of(s, *column) for s in summaries]) for column in columns]
        change = "" if summaries is first else change_text(metric, [*map(over_clients, summaries)], base)
        up, flops = (statistics.fmean(s["costs"][key] for s in summaries) for key in ("bytes_up", "flops"))
        cells = [f"`{row}`", f"{rates[row]:g}", *shown, change, bytes_text(up), flops_text(flops)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", default=[*STUDIES])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/personal"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    given = parser.parse_args()
    if given.data_dir is not None:
        os.environ["FEDSTRATA_DATA"] = str(given.data_dir)
    for name in given.studies:
        print(f"## {name}\n\n{processor()}\n\n{table(STUDIES[name], given.seeds, given.out)}\n", flush=True)


if __name__ == "__main__":
    main()
