"""Peak training memory: predicted before training against measured in it, for every family of models.

`python benchmarks/memory.py > docs/results/memory.md`. Nothing is timed. What is predicted and what is measured are the
same on every machine; what torch's allocator hands out differs a little from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.client.cost import resting_bytes
from fedstrata.client.memory_forecast import MemoryForecast, forecast_memory
from fedstrata.client.train import train_client
from fedstrata.core.tensors import clone
from fedstrata.core.text import bytes_text
from fedstrata.core.types import Assignment, Stratum, Work
from fedstrata.data.examples import TensorExamples
from fedstrata.tasks.registry import build_task

ROWS = 32
INTRO = """\
# Peak training memory

`python benchmarks/memory.py`: a step of 32 examples (images of 3×32×32, 80 tokens, 30 columns), float32. Predicted
before training, without numbers (`fedstrata model show --memory`); measured in a visit, storage by storage, as
`training_memory` in metrics.jsonl is. [What is in it](../fleet.md#memory). The last column is another measure: what
rests, and the most that torch's allocator hands out in a step by torch's profiler, in brackets the prediction against
it. Kernels of convolutions take copies of weights and maps for themselves, up to 4 MB in ResNet-8 and 17 MB in
ResNet-50, which no tensor shows; what was there before counts as less. This column alone differs from run to run, by up
to 6 % here.
"""

END = """\
FedPart's deepest third of ResNet-18 is the row `deepest third` of `resnet18, sgd`: its goal is 60 %.
`one` is the stratum in the middle, as in one of FedPart's rounds: what lies above it keeps what passes its
gradient on, and no inputs of frozen convolutions. `first` is the stratum next to the input: so much takes a
run of FedPart or `select` in which each stratum has its turn by itself, and as much as `all` in rounds of the
whole network (`full_rounds`). A fleet's budgets leave out what a device has no room for."""


@dataclass(frozen=True)
class Case:
    """A model and what it learns."""

    model: str
    shape: tuple[int, ...] = (3, 32, 32)
    classes: int = 10
    task: str = "classification"
    targets: tuple[int, ...] = ()
    optimizer: str = "sgd"

    def examples(self) -> tuple[Tensor, Tensor]:
        """A batch of zeros."""
        words = len(self.shape) == 1 and not self.model.startswith("tablemlp")
        inputs = torch.zeros(ROWS, *self.shape, dtype=torch.long if words else torch.float32)
        return inputs, torch.zeros(ROWS, *self.targets, dtype=torch.long)


IMAGE = (
    *("logreg", "mlp", "cnn2", "cnn4", "cnn8", "vgg9"),
    *("resnet8", "resnet8(norm='group')", "resnet18", "resnet50", "vit(depth=4)", "swin"),
)
CASES = [
    *(Case(name) for name in IMAGE),
    Case("resnet18", optimizer="adam"),
    Case("unet", classes=2, task="segmentation", targets=(32, 32)),
    Case("tablemlp", (30,), 2),
    Case("chargru", (80,), 80),
    Case("tokengru", (80,), 80, "next_token", (80,)),
    Case("gpt", (80,), 80, "next_token", (80,)),
]


def plans(strata: Sequence[Stratum]) -> dict[str, list[str]]:
    """What trains: everything, the deepest third, the stratum in the middle, and the first one."""
    moving = [s for s in strata if not s.idle]
    parts = {"all": moving, "deepest third": moving[-max(1, len(moving) // 3) :]}
    parts |= {"one": [moving[len(moving) // 2]], "first": moving[:1]}
    return {name: [n for s in part for n in s.params] for name, part in parts.items()}


def measure(told: MemoryForecast, model: nn.Module, names: list[str], x: Tensor, y: Tensor) -> float:
    """What a visit of one step takes, as its record says."""
    context = replace(told.context, replicas={}, costs={}, cache={})
    params, trains = clone(dict(model.named_parameters())), tuple(names)
    asked = Assignment(0, 0, "", params, {}, trains, trains, told.work, 1, context.method.digest)
    return train_client(context, asked, TensorExamples(x, y), {})[0].metrics["memory"]


def allocate(told: MemoryForecast, names: list[str], x: Tensor, y: Tensor) -> int:
    """What torch's allocator hands out at most in the second step of a kind, as its profiler tells, and what rests."""
    context = replace(told.context, replicas={}, costs={}, cache={})
    with told.ready(context, "", names) as steps:
        steps.step(x, y)
        steps.grads = ()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            steps.step(x, y)
        held = resting_bytes(steps) + x.nbytes + y.nbytes
    results: Any = profiler.profiler
    events = sorted((e.start_ns(), e.nbytes()) for e in results.kineto_results.events() if e.name() == "[memory]")
    return held + max(accumulate(size for _, size in events))


def rows(case: Case) -> list[list[str]]:
    """A row for each plan."""
    model = fs.build_model(case.model, case.shape, case.classes, seed=0)
    x, y = case.examples()
    work = Work(batch_size=ROWS, lr=0.01, optimizer=case.optimizer)
    told = forecast_memory(model, build_task(case.task), work, x[:1], y[:1])
    found: list[list[str]] = []
    whole = 0.0
    for plan, names in plans(told.context.strata[""]).items():
        predicted, measured = told.step("", names, ROWS).memory, measure(told, model, names, x, y)
        whole = whole or measured
        outside = allocate(told, names, x, y)
        error, share = predicted / measured - 1, measured / whole
        name = f"{case.model}, {case.optimizer}" if plan == "all" else ""
        told_of: list[Any] = [name, plan, bytes_text(predicted), bytes_text(measured), f"{error:+.1%}", f"{share:.0%}"]
        told_of.append(f"{bytes_text(outside)} ({predicted / outside - 1:+.1%})")
        found.append(told_of)
    return found


def main() -> None:
    """Print the page."""
    titles = ["model, optimiser", "trains", "predicted", "measured", "error", "of all", "torch's allocator"]
    print(INTRO)
    print(f"| {' | '.join(titles)} |\n|{'---|' * 2}{'---:|' * 5}")
    for case in CASES:
        for row in rows(case):
            print(f"| {' | '.join(row)} |", flush=True)
    print(f"\n{END}")


if __name__ == "__main__":
    main()
