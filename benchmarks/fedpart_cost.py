"""What FedPart costs against FedAvg: bytes, FLOPs and seconds of the same rounds.

    python benchmarks/fedpart_cost.py [--engine processes] [--model "resnet8(width=64)"] [--epochs 8] [--clients 4]
        [--examples 128] [--optimizer adam] [--workers 2] [--json]

A FedAvg run and FedPart runs of one cycle take their rounds in turn, so that the machine's mood hits all alike; the
figures are their sums over the cycle, against FedAvg's. The paper's settings: 5 full rounds and 2 for each stratum, of
which ResNet-8 has 10, so 25 rounds; batches of 32, Adam. Nothing is evaluated. Costs are counted for what was done:
bytes of encoded messages, FLOPs of matrix products and convolutions, and seconds of whole rounds. The first round of
every run, in which workers start, and the first of each stratum, in which FLOPs are counted and models are cut, are
left out of the seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch

import fedstrata as fs
from fedstrata.core.rng import generator

METHODS = {
    "fedavg": "fedavg",
    "fedpart": "fedpart",
    "fedpart, frozen norms": "fedpart(freeze_norm=True)",
    "fedpart, cached prefix": "fedpart(freeze_norm=True, cache_prefix=True)",
}
FULL, EACH = 5, 2
"""Rounds of the whole network, and of each stratum."""
SHAPE, CLASSES = (3, 32, 32), 10


@dataclass
class Cost:
    """A run's sums over the cycle; of seconds, means over the rounds that are timed."""

    uplink: float = 0
    downlink: float = 0
    flops: float = 0
    full: list[float] = field(default_factory=list)
    partial: list[float] = field(default_factory=list)

    def add(self, record: fs.Record, strata: int, first: bool) -> None:
        """Take a round; the first with these strata does what is done once."""
        self.uplink += record.bytes_up
        self.downlink += record.bytes_down
        self.flops += record.flops
        if not first:
            (self.full if len(record.active) == strata else self.partial).append(record.seconds)

    def seconds(self, strata: int) -> float:
        """Of a cycle."""
        partial = statistics.mean(self.partial) if self.partial else statistics.mean(self.full)
        return FULL * statistics.mean(self.full) + EACH * strata * partial


def begin(method: str, args: argparse.Namespace) -> tuple[Iterator[fs.Record], int]:
    """A federation's rounds, and how many strata its model has."""
    rng = generator("fedpart cost")
    x = torch.randint(0, 256, (args.clients * args.examples, *SHAPE), dtype=torch.uint8, generator=rng)
    y = torch.randint(0, CLASSES, (len(x),), generator=rng)
    whole = fs.TensorExamples(x, y, mean=(0.5,) * 3, std=(0.25,) * 3)
    federation = fs.Federation(
        fs.build_model(args.model, SHAPE, CLASSES, seed=0),
        [whole.select(part) for part in torch.split(torch.arange(len(x)), args.examples)],
        method=method,
        rounds=10**6,
        epochs=args.epochs,
        batch_size=32,
        optimizer=args.optimizer,
        lr=1e-3,
        engine=args.engine,
        workers=args.workers,
        ray_cpus=1 / len(METHODS),  # all runs have their actors at the same time, and one of them works at a time
    )
    return federation.rounds(), len(federation.strata)


def measure(args: argparse.Namespace) -> tuple[dict[str, Cost], int]:
    """One cycle of every method, round by round in turn: (what each cost, how many strata the model has)."""
    running = {name: begin(method, args) for name, method in METHODS.items()}
    costs, strata = {name: Cost() for name in METHODS}, running["fedavg"][1]
    seen: dict[str, set[tuple[str, ...]]] = {name: set() for name in METHODS}
    for _ in range(FULL + EACH * strata):
        for name, (rounds, _) in running.items():
            record = next(rounds)
            costs[name].add(record, strata, tuple(record.active) not in seen[name])
            seen[name].add(tuple(record.active))
    return costs, strata


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--model", default="resnet8(width=64)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print the sums as JSON")
    args = parser.parse_args()
    costs, strata = measure(args)
    if args.json:
        print(json.dumps({name: asdict(cost) for name, cost in costs.items()}))
        return
    base = costs["fedavg"]
    print(f"{args.engine}: {args.model}, {args.clients} clients × {args.examples} images, {args.epochs} epochs")
    print(f"FedAvg: {base.seconds(strata):.1f} s\n")
    print("| | uplink | downlink | FLOPs | seconds | a partial round |\n|---|--:|--:|--:|--:|--:|")
    for name, cost in costs.items():
        shares = [getattr(cost, f) / getattr(base, f) for f in ("uplink", "downlink", "flops")]
        partial = statistics.mean(cost.partial) / statistics.mean(base.full) if cost.partial else 1.0
        shares += [cost.seconds(strata) / base.seconds(strata), partial]
        print(f"| {name} | " + " | ".join(f"{share:.1%}" for share in shares) + " |")


if __name__ == "__main__":
    main()
