"""What InCo's step on the server costs, as a share of a round, with all five depths at full width.

    python benchmarks/inco_cost.py [--width 64] [--images 64] [--rounds 3]

ResNet-10, 14, 18, 22 and 26, one client each, `--images` images and as many in a batch: the least that a client can do
in a round, one step. Seconds of `apply`, of all rounds but the first, against those of the whole round; more local work
makes the share smaller. One thread, nothing evaluated.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, ClassVar

import torch

import fedstrata as fs
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Tensors
from fedstrata.techniques.inco import InCo

DEPTHS = ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26")
SHAPE, CLASSES = (3, 32, 32), 10


class Timed(InCo):
    """InCo with a clock."""

    spent: ClassVar[list[float]] = []

    def apply(self, state: Tensors, delta: Tensors, round: fs.RoundView) -> tuple[Tensors, Tensors]:
        begin = time.process_time()
        result = super().apply(state, delta, round)
        Timed.spent.append(time.process_time() - begin)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    models: dict[str, Any] = {n: fs.build_model(f"{n}(width={args.width})", SHAPE, CLASSES, seed=0) for n in DEPTHS}
    rng = generator("inco cost")
    clients = [
        (torch.randn(args.images, *SHAPE, generator=rng), torch.randint(0, CLASSES, (args.images,), generator=rng))
        for _ in DEPTHS
    ]
    print("| form | round, s | InCo's step, s | share |\n|---|--:|--:|--:|")
    for form in ("paper", "theorem", "released"):
        Timed.spent.clear()
        federation = fs.Federation(
            models[DEPTHS[-1]],
            clients,
            method=fs.chain(Timed(form=form)),
            archs=models,
            arch_of=DEPTHS.__getitem__,
            rounds=args.rounds + 1,
            batch_size=args.images,
            optimizer="adam",
            lr=1e-3,
            engine="serial",
        )
        rounds = []
        for _ in federation.rounds():
            rounds.append(time.process_time())
        seconds = (rounds[-1] - rounds[0]) / args.rounds
        step = sum(Timed.spent[1:]) / args.rounds
        print(f"| {form} | {seconds:.2f} | {step:.3f} | {step / seconds:.1%} |")


if __name__ == "__main__":
    main()
