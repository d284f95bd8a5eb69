"""What FedPart costs against FedAvg: bytes, FLOPs and seconds of the same rounds.

    python benchmarks/fedpart_cost.py [--epochs 8] [--clients 4] [--examples 128] [--width 64] [--workers 2] [--json]

A FedAvg run and FedPart runs of one cycle take their rounds in turn, so that the machine's mood hits all alike; the
figures are their sums over the cycle, against FedAvg's. ResNet-8 with the paper's settings: 10 strata, 5 full rounds
and 2 for each stratum, so 25 rounds; batches of 32, Adam. Nothing is evaluated. Costs are counted for what was done:
bytes of encoded messages, FLOPs of matrix products and convolutions, and seconds of whole rounds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

import fedstrata as fs
from fedstrata.core.rng import generator

METHODS = {
    "fedavg": "fedavg",
    "fedpart": "fedpart",
    "fedpart, frozen norms": "fedpart(freeze_norm=True)",
    "fedpart, cached prefix": "fedpart(freeze_norm=True, cache_prefix=True)",
}
ROUNDS = 25
SHAPE, CLASSES = (3, 32, 32), 10


@dataclass
class Cost:
    """A run's sums over the cycle."""

    uplink: float = 0
    downlink: float = 0
    flops: float = 0
    seconds: float = 0
    full: float = 0
    partial: float = 0

    def add(self, record: fs.Record, strata: int) -> None:
        self.uplink += record.bytes_up
        self.downlink += record.bytes_down
        self.flops += record.flops
        self.seconds += record.seconds
        if len(record.active) == strata:
            self.full += record.seconds
        else:
            self.partial += record.seconds


def begin(method: str, args: argparse.Namespace) -> tuple[Iterator[fs.Record], int]:
    """A federation's rounds, and how many strata its model has."""
    rng = generator("fedpart cost")
    x = torch.randint(0, 256, (args.clients * args.examples, *SHAPE), dtype=torch.uint8, generator=rng)
    y = torch.randint(0, CLASSES, (len(x),), generator=rng)
    whole = fs.TensorExamples(x, y, mean=(0.5,) * 3, std=(0.25,) * 3)
    federation = fs.Federation(
        fs.build_model(f"resnet8(width={args.width})", SHAPE, CLASSES, seed=0),
        [whole.select(part) for part in torch.split(torch.arange(len(x)), args.examples)],
        method=method,
        rounds=ROUNDS,
        epochs=args.epochs,
        batch_size=32,
        optimizer="adam",
        lr=1e-3,
        workers=args.workers,
    )
    return federation.rounds(), len(federation.strata)


def measure(args: argparse.Namespace) -> dict[str, Cost]:
    """One cycle of every method, round by round in turn."""
    running = {name: begin(method, args) for name, method in METHODS.items()}
    costs = {name: Cost() for name in METHODS}
    for _ in range(ROUNDS):
        for name, (rounds, strata) in running.items():
            costs[name].add(next(rounds), strata)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print the sums as JSON")
    args = parser.parse_args()
    costs = measure(args)
    if args.json:
        print(json.dumps({name: asdict(cost) for name, cost in costs.items()}))
        return
    base = costs["fedavg"]
    print(f"ResNet-8 of width {args.width}, {args.clients} clients × {args.examples} images, {args.epochs} epochs")
    print(f"FedAvg: {base.seconds:.1f} s\n")
    print("| | uplink | downlink | FLOPs | seconds | of partial rounds |\n|---|--:|--:|--:|--:|--:|")
    for name, cost in costs.items():
        shares = [getattr(cost, f) / getattr(base, f) for f in ("uplink", "downlink", "flops", "seconds")]
        partial = cost.partial / 20 * 25 / base.seconds if cost.partial else 1.0
        print(f"| {name} | " + " | ".join(f"{share:.1%}" for share in (*shares, partial)) + " |")


if __name__ == "__main__":
    main()
