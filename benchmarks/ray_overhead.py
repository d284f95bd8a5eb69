"""What Ray costs: a round in actors of a Ray on this machine over a round in as many worker processes.

Both federations live at the same time, and their rounds take turns, so the machine's mood hits both alike. Starting Ray
and its actors is not counted: it is done once per run. The ratio is that of the medians.

    python benchmarks/ray_overhead.py [--workers 2] [--rounds 20] [--models mlp cnn] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import fedstrata as fs
from fedstrata.core.rng import generator

CLIENTS, EXAMPLES, SHAPE = 16, 64, (1, 28, 28)
MODELS = {"mlp": "mlp(hidden=(64,))", "cnn": "cnn2(width=32)", "resnet": "resnet8(width=16)"}
WARM = 3


def federation(model: str, engine: str, workers: int, rounds: int) -> fs.Federation:
    """The same federation on an engine."""
    rng = generator("ray_overhead")
    clients = [
        (torch.randn(EXAMPLES, *SHAPE, generator=rng), torch.randint(0, 10, (EXAMPLES,), generator=rng))
        for _ in range(CLIENTS)
    ]
    make_model = fs.build_model(MODELS[model], SHAPE, 10, seed=0)
    settings: dict[str, Any] = {"rounds": rounds + WARM, "batch_size": 16, "lr": 0.01}
    return fs.Federation(make_model, clients, method="fedavg", engine=engine, workers=workers, **settings)


def lap(rounds: Iterator[fs.Record]) -> float:
    begin = time.perf_counter()
    next(rounds)
    return time.perf_counter() - begin


def measure(model: str, workers: int, rounds: int) -> dict[str, Any]:
    """Seconds of each engine's rounds, in turns."""
    federations = {engine: federation(model, engine, workers, rounds) for engine in ("processes", "ray")}
    running = {engine: made.rounds() for engine, made in federations.items()}
    seconds: dict[str, list[float]] = {engine: [] for engine in running}
    for number in range(rounds + WARM):
        for engine in sorted(running, reverse=bool(number % 2)):
            spent = lap(running[engine])
            if number >= WARM:
                seconds[engine].append(spent)
    same = all(
        torch.equal(federations["ray"].state.params[n], p) for n, p in federations["processes"].state.params.items()
    )
    for rest in running.values():
        rest.close()
    medians = {engine: statistics.median(taken) for engine, taken in seconds.items()}
    return {
        "model": model,
        "workers": workers,
        "rounds": rounds,
        "bytes": sum(p.nbytes for p in federations["ray"].state.params.values()),
        "ms": {engine: 1000 * median for engine, median in medians.items()},
        "ratio": medians["ray"] / medians["processes"],
        "extra_ms_a_visit": 1000 * (medians["ray"] - medians["processes"]) / CLIENTS,
        "same_bits": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn"], choices=MODELS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(model, options.workers, options.rounds) for model in options.models]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print("| model | MB | processes, ms per round | ray, ms per round | ratio | extra ms per visit | same bits |")
    print("|---|--:|--:|--:|--:|--:|---|")
    for row in rows:
        ms = row["ms"]
        print(
            f"| {row['model']} | {row['bytes'] / 1e6:.2f} | {ms['processes']:.1f} | {ms['ray']:.1f} "
            f"| {row['ratio']:.2f} | {row['extra_ms_a_visit']:.2f} | {'yes' if row['same_bits'] else 'NO'} |"
        )


if __name__ == "__main__":
    main()
