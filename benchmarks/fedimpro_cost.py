"""What a FedImpro round costs against a FedAvg round: seconds, against what the arithmetic of sampled features says.

    python benchmarks/fedimpro_cost.py [--width 64] [--repeats 15] [--clients 2] [--examples 256] [--json]

ResNet-8 cut after `--split`: half of the FLOPs lie above layer1, a quarter above layer2. Batches of 32. FedAvg and
FedImpro take their rounds in turn, so that the machine's mood hits all alike, and every pair of neighbouring rounds
gives one ratio of seconds; the median is told. The arithmetic: as many sampled features as real ones pass the upper
part, so a round may take 1 + FLOPs of the upper part / FLOPs of the model times as long, and the goal is 1.1 times
that. Seconds are the process's own (`process_time`), one thread, serial; nothing is evaluated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator

import torch

import fedstrata as fs
from fedstrata.core.rng import generator
from fedstrata.models.flops import FlopCount

SHAPE, CLASSES = (3, 32, 32), 10
WARM_UP = 2
"""Rounds before the first measured one: FLOPs are counted, and there is nothing to sample from at first."""


def begin(method: str, args: argparse.Namespace) -> Iterator[fs.Record]:
    """A federation's rounds."""
    rng = generator("fedimpro cost")
    x = torch.randint(0, 256, (args.clients * args.examples, *SHAPE), dtype=torch.uint8, generator=rng)
    y = torch.randint(0, CLASSES, (len(x),), generator=rng)
    whole = fs.TensorExamples(x, y, mean=(0.5,) * 3, std=(0.25,) * 3)
    return fs.Federation(
        fs.build_model(f"resnet8(width={args.width})", SHAPE, CLASSES, seed=0),
        [whole.select(part) for part in torch.split(torch.arange(len(x)), args.examples)],
        method=method,
        rounds=WARM_UP + args.repeats,
        batch_size=32,
        lr=0.01,
        engine="serial",
    ).rounds()


def share_above(args: argparse.Namespace) -> float:
    """FLOPs of the upper part over those of the model, forward and backward, on a batch."""
    model = fs.build_model(f"resnet8(width={args.width})", SHAPE, CLASSES, seed=0)
    x = torch.randn(32, *SHAPE)
    with FlopCount() as whole:
        model(x).sum().backward()
    features = fs.tap(model, x, args.split).detach()
    with FlopCount() as upper:
        fs.run_from(model, features, args.split).sum().backward()
    return upper.total / whole.total


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Method → seconds of every measured round."""
    methods = {form: f"fedimpro(split={args.split!r}, form={form!r})" for form in ("paper", "released")}
    running = {name: begin(method, args) for name, method in {"fedavg": "fedavg", **methods}.items()}
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for number in range(WARM_UP + args.repeats):
        for name, rounds in running.items():
            start = time.process_time()
            next(rounds)
            if number >= WARM_UP:
                seconds[name].append(time.process_time() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--split", default="layer1")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="print the seconds as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds, share = measure(args), share_above(args)
    if args.json:
        print(json.dumps({"seconds": seconds, "share": share}))
        return
    base = seconds.pop("fedavg")
    print(f"ResNet-8 of width {args.width}, split after {args.split}, {args.clients} clients × {args.examples} images")
    print(f"FedAvg: {statistics.median(base):.3f} s per round; upper part: {share:.1%} of the FLOPs\n")
    print("| form | seconds / FedAvg's | arithmetic | of the arithmetic | goal |\n|---|--:|--:|--:|--:|")
    for name, own in seconds.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(own, base, strict=True))
        print(f"| {name} | {ratio:.3f} | {1 + share:.3f} | {ratio / (1 + share):.3f} | 1.1 |")


if __name__ == "__main__":
    main()
