"""What the rule for layouts costs: seconds of a training step, against all channels last and against contiguous.

    python benchmarks/layout_cost.py [--repeats 40]

The variants take the same steps one after the other in every repeat, with one thread, and a figure is the median over
the repeats of the ratio to the rule. All channels last is what the rule forbids: run that on a processor with AVX-512,
whose kernels are not at fault. The guard for convolutions that are called as functions is measured on a model of the
user's own, with the guard and without.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.client.context import ClientContext
from fedstrata.system.machine import processor

STEPS = 5
MODELS = ("resnet8(width=4)", "resnet18(width=4)", "resnet18(width=12)", "resnet8(width=16)", "resnet50(width=4)")


class Own(nn.Module):
    """A small CNN as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(32 * 64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        out: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return out


def steps(model: nn.Module, last: bool) -> Callable[[], None]:
    """Some SGD steps on the same batch."""
    x, y = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def take() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return take


def ruled(model: nn.Module) -> nn.Module:
    """As federations train it."""
    context = ClientContext(lambda arch: copy.deepcopy(model), fs.method("fedavg"), channels_last=True)
    return context.replica("").model


def ratios(variants: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Name \u2192 median ratio to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 2):
        for name, take in variants.items():
            begin = time.perf_counter()
            take()
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - begin)
    first = next(iter(seconds.values()))
    return {n: statistics.median(a / b for a, b in zip(mine, first, strict=True)) for n, mine in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print(f"{processor()}, torch {torch.__version__}\n")
    print("| model | the rule | all channels last | contiguous |\n|---|--:|--:|--:|")
    for name in MODELS:
        model = fs.build_model(name[:-1] + ", stem='3x3', maxpool=False)", (3, 32, 32), 10, seed=0)
        every = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        variants = {
            "rule": steps(ruled(model), True),
            "last": steps(every, True),
            "contiguous": steps(copy.deepcopy(model), False),
        }
        print(f"| {name} | " + " | ".join(f"{r:.2f}" for r in ratios(variants, repeats).values()) + " |", flush=True)
    bare = ruled(Own())
    for module in bare.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    own = {"without": steps(bare, True), "with": steps(ruled(Own()), True)}
    print(f"\nthe guard on a model of one's own: {ratios(own, repeats)['with']:.3f}")


if __name__ == "__main__":
    main()
