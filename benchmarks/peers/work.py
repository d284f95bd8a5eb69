"""The work that every system does: workloads, data, who is sampled, in which order batches come, and the SGD steps.

Nothing here belongs to one system. The sampled clients and the order of batches follow fedstrata's own seeds, because
the other systems let us choose them and fedstrata does not.

Clients' data comes through one of two doors (DOORS), the same numbers in either, and every system takes its batches
from what the door gives.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.core.rng import derive, generator

LR = 0.05
CLASSES = 10
SEED = 0
DOORS = {
    "plain": "pairs of tensors, inputs in single precision and scaled already, as an outside user brings them",
    "examples": "uint8 images, scaled batch by batch, as fedstrata's own datasets hold them",
}
Data = tuple[Tensor, Tensor] | fs.TensorExamples


@dataclass(frozen=True)
class Workload:
    """One federated task.

    Args:
        name: what the command calls it.
        title: for the table's heading.
        model: a model of fedstrata's zoo, or of MODELS.
        shape: of one image.
        clients: how many there are.
        examples: how many each of them has.
        sampled: how many of them take part in a round.
        batch: examples per step.
        door: how clients' data is held, one of DOORS.
    """

    name: str
    title: str
    model: str
    shape: tuple[int, int, int]
    clients: int
    examples: int
    sampled: int
    batch: int
    door: str = "plain"

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
        if self.model not in MODELS:
            return fs.build_model(self.model, self.shape, CLASSES, seed=SEED).train()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(SEED)
            return MODELS[self.model](self.shape, CLASSES).train()


def small_cnn(shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Two 3×3 convolutions of 16 and 32 channels, a max-pool after each, and a classifier; not in the zoo."""
    channels, height, breadth = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (breadth // 4), classes),
    )


MODELS: dict[str, Callable[[tuple[int, int, int], int], nn.Module]] = {"two 3×3 convolutions": small_cnn}
MLP = "mlp(hidden=(64,))"
WIDE = "mlp(hidden=(4096, 3072))"
ALL = (
    Workload("device", "cross-device MLP, two steps per client", MLP, (1, 28, 28), 1000, 32, 50, 16),
    Workload("mlp-1", "cross-device MLP, one step per client", MLP, (1, 28, 28), 1000, 32, 50, 32),
    Workload("mlp-4", "cross-device MLP, four steps per client", MLP, (1, 28, 28), 1000, 32, 50, 8),
    Workload(
        "small-cnn", "small CNN, convolutions of 16 and 32 channels", next(iter(MODELS)), (1, 28, 28), 100, 100, 10, 20
    ),
    Workload("cnn", "small CNN of the FedAvg paper", "cnn2", (1, 28, 28), 100, 100, 10, 10),
    Workload("cnn4", "small CNN of three 3×3 convolutions", "cnn4", (3, 32, 32), 100, 100, 10, 20),
    Workload("resnet8", "ResNet-8, width 16", "resnet8(width=16)", (3, 32, 32), 10, 200, 10, 32),
    Workload("resnet8-64", "ResNet-8, width 16, batches of 64", "resnet8(width=16)", (3, 32, 32), 10, 200, 10, 64),
    Workload("mlp-25m", "MLP of 25 million parameters, one step per client", WIDE, (3, 32, 32), 10, 32, 10, 32),
)
WORKLOADS = {work.name: work for work in ALL}


def workload(name: str, door: str) -> Workload:
    """The workload of a name, its data held as the door says."""
    return replace(WORKLOADS[name], door=door)


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
def client_data(work: Workload) -> Sequence[Data]:
    """Every client's examples, the same in every process."""
    rng = generator("peers")
    x = torch.randint(0, 256, (work.clients * work.examples, *work.shape), dtype=torch.uint8, generator=rng)
    y = torch.randint(0, CLASSES, (work.clients * work.examples,), generator=rng)
    whole = fs.TensorExamples(x, y, mean=(0.5,) * work.shape[0], std=(0.25,) * work.shape[0])
    parts = torch.arange(len(y)).split(work.examples)
    return [whole.batch(part) if work.door == "plain" else whole.select(part) for part in parts]


def batch(data: Data, index: Tensor) -> tuple[Tensor, Tensor]:
    """A client's inputs and labels at some places."""
    return (data[0][index], data[1][index]) if isinstance(data, tuple) else data.batch(index)


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
        x, y = batch(data, index)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        count.steps += 1
        count.examples += len(y)
    return count


def plain_fedavg(work: Workload, clients: Sequence[int]) -> dict[str, Tensor]:
    """What the first round of some clients comes to, averaged in double precision."""
    begin = work.build()
    sums: dict[str, Tensor] = {}
    for client in clients:
        model = copy.deepcopy(begin)
        steps(work, model, torch.optim.SGD(model.parameters(), lr=LR), 0, client)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                sums[name] = sums.get(name, 0) + value.double() / len(clients)
    return sums


def difference(work: Workload, plain: dict[str, Tensor], after: dict[str, Tensor]) -> tuple[float, float | None]:
    """How far weights after the first round are from a plain FedAvg of the same clients: (parameters, buffers).

    Buffers (the running statistics of BatchNorm) are None where the model has none.
    """
    trained = {name for name, _ in work.build().named_parameters()}
    gaps = {name: (after[name].double() - mean).abs().max().item() for name, mean in plain.items()}
    running = [gap for name, gap in gaps.items() if name not in trained]
    return max(gap for name, gap in gaps.items() if name in trained), max(running) if running else None
