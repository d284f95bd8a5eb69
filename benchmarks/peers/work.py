"""The work that every system does: workloads, data, who is sampled, in which order batches come, and the SGD steps.

Nothing here belongs to one system. The sampled clients and the order of batches follow fedstrata's own seeds, because
the other systems let us choose them and fedstrata does not.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.core.rng import derive, generator

LR = 0.05
CLASSES = 10
SEED = 0


@dataclass(frozen=True)
class Workload:
    """One federated task.

    Args:
        title: for the table's heading.
        model: a model of fedstrata's zoo.
        shape: of one image.
        clients: how many there are.
        examples: how many each of them has.
        sampled: how many of them take part in a round.
        batch: examples per step.
    """

    title: str
    model: str
    shape: tuple[int, int, int]
    clients: int
    examples: int
    sampled: int
    batch: int

    @property
    def steps(self) -> int:
        """SGD steps of a round, all clients together."""
        return self.sampled * math.ceil(self.examples / self.batch)

    @property
    def seen(self) -> int:
        """Examples of a round, all clients together."""
        return self.sampled * self.examples

    def build(self) -> nn.Module:
        """The model with the weights that every system starts from."""
        return fs.build_model(self.model, self.shape, CLASSES, seed=SEED).train()


MLP = "mlp(hidden=(64,))"
WIDE = "mlp(hidden=(4096, 3072))"
WORKLOADS = {
    "mlp-1": Workload("cross-device MLP, one step per client", MLP, (1, 28, 28), 1000, 32, 50, 32),
    "mlp-4": Workload("cross-device MLP, four steps per client", MLP, (1, 28, 28), 1000, 32, 50, 8),
    "cnn": Workload("small CNN of the FedAvg paper", "cnn2", (1, 28, 28), 100, 100, 10, 10),
    "cnn4": Workload("small CNN of 3×3 convolutions", "cnn4", (3, 32, 32), 100, 100, 10, 20),
    "resnet8": Workload("ResNet-8, width 16", "resnet8(width=16)", (3, 32, 32), 10, 200, 10, 32),
    "mlp-25m": Workload("MLP of 25 million parameters, one step per client", WIDE, (3, 32, 32), 10, 32, 10, 32),
}


@dataclass(frozen=True)
class Round:
    """What a system says of one round.

    Args:
        start: when its first client could begin, on the clock that all processes of a machine share
            (`time.perf_counter`).
        end: when it was done, on the same clock.
        seconds: how long it took.
        steps: SGD steps that were taken, counted one by one.
        examples: examples that these steps saw.
        clients: who took part.
    """

    start: float
    end: float
    seconds: float
    steps: int
    examples: int
    clients: tuple[int, ...]


def timed(start: float, count: Count, clients: Sequence[int]) -> Round:
    """A round that began at `start` and ends now."""
    end = time.perf_counter()
    return Round(start, end, end - start, count.steps, count.examples, tuple(clients))


@dataclass
class Count:
    """Steps and examples, counted where they happen."""

    steps: int = 0
    examples: int = 0

    def add(self, other: Count) -> None:
        """Fold another count in."""
        self.steps += other.steps
        self.examples += other.examples


@cache
def client_data(work: Workload) -> list[fs.TensorExamples]:
    """Every client's examples: uint8 images, as real data is held. The same in every process."""
    rng = generator("peers")
    x = torch.randint(0, 256, (work.clients * work.examples, *work.shape), dtype=torch.uint8, generator=rng)
    y = torch.randint(0, CLASSES, (work.clients * work.examples,), generator=rng)
    whole = fs.TensorExamples(x, y, mean=(0.5,) * work.shape[0], std=(0.25,) * work.shape[0])
    return [whole.select(part) for part in torch.arange(len(y)).split(work.examples)]


def sampled(work: Workload, number: int) -> list[int]:
    """Who takes part in a round: fedstrata's choice, in client order."""
    everyone = list(range(work.clients))
    return sorted(random.Random(derive(SEED, "sample", number)).sample(everyone, work.sampled))


def order(work: Workload, number: int, client: int) -> Tensor:
    """The permutation of a client's examples in a round: fedstrata's."""
    rng = generator(derive(SEED, "visit", number, client), "order")
    return torch.randperm(work.examples, generator=rng)


def steps(work: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, number: int, client: int) -> Count:
    """One client's pass over its data, as everybody writes it."""
    data, count = client_data(work)[client], Count()
    for index in order(work, number, client).split(work.batch):
        x, y = data.batch(index)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        count.steps += 1
        count.examples += len(y)
    return count


def difference(work: Workload, clients: Sequence[int], after: dict[str, Tensor]) -> tuple[float, float | None]:
    """How far weights after the first round are from a plain FedAvg of the same clients: (parameters, buffers).

    Buffers (the running statistics of BatchNorm) are None where the model has none.
    """
    begin = work.build()
    sums: dict[str, Tensor] = {}
    for client in clients:
        model = copy.deepcopy(begin)
        steps(work, model, torch.optim.SGD(model.parameters(), lr=LR), 0, client)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                sums[name] = sums.get(name, 0) + value.double() / len(clients)
    trained = {name for name, _ in begin.named_parameters()}
    gaps = {name: (after[name].double() - mean).abs().max().item() for name, mean in sums.items()}
    running = [gap for name, gap in gaps.items() if name not in trained]
    return max(gap for name, gap in gaps.items() if name in trained), max(running) if running else None
