"""How much processor time do clients take on this machine, one after the other and many at once? Measured here."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from itertools import pairwise, product
from typing import ClassVar

import torch
from torch import nn

from fedstrata.client.context import ClientContext
from fedstrata.core.rng import preserve_rng
from fedstrata.core.stacks import Assignments, Memories
from fedstrata.core.technique import ClientView, Hooks, Technique
from fedstrata.core.types import Assignment, Work
from fedstrata.data.examples import TensorExamples
from fedstrata.engines.grouping import MAX_SIZE, MIN_SIZE, ONE_BY_ONE, VECTORISED, Trainer
from fedstrata.engines.speed_table import Cell, Family, SpeedTable
from fedstrata.errors import UsageError
from fedstrata.models.flops import count_flops
from fedstrata.system.machine import keep_memory, processor
from fedstrata.techniques.fedavg import chain

CLASSES, PIXELS = 10, 784
DENSE = ((), (64,), (256, 256), (1024, 1024))
"""Hidden layers of the dense models, from 8 thousand to 2 million parameters; of the largest, a group takes 240 MB."""
CONVOLUTIONAL = ((4, 8), (8, 14), (8, 28))
"""Channels of the first convolution, and the images' height and width."""
GRID: dict[Family, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "dense": ((8, 32, 128), (1, 8), (MIN_SIZE,)),
    "dense, torch.func": ((8, 32), (4,), (MIN_SIZE, MAX_SIZE)),
    "convolutional": ((8, 32), (4,), (MIN_SIZE, MAX_SIZE)),
}
"""Examples per step, steps per visit, and clients at once; large groups where it depends on these what is faster."""
LARGEST = 10**10
"""Floating-point operations of all forward passes that are measured together, at most."""
REPEATS = 100
"""How often a cell is measured, at most."""


@dataclass(frozen=True, kw_only=True)
class _Onlooker(Technique):
    """Changes nothing and does not promise `stacks`: with it dense models go through `torch.func`."""

    name: ClassVar[str] = "onlooker"
    vectorises: ClassVar[bool] = True

    def local(self, view: ClientView) -> Hooks:
        return Hooks(output=lambda batch: batch.logits)


@dataclass(frozen=True, eq=False)
class Subject:
    """Clients of one kind, to be measured.

    Args:
        family: of their model.
        model: that they train.
        shape: of one input.
        flops: of the model's forward pass, per example.
        batch: examples per step.
        steps: of each visit.
        clients: that are trained at once.
    """

    family: Family
    model: nn.Module
    shape: tuple[int, ...]
    flops: int
    batch: int
    steps: int
    clients: int

    @property
    def work(self) -> int:
        """Floating-point operations of all forward passes."""
        return self.flops * self.batch * self.steps * self.clients


def tune(seconds: float, progress: Callable[[int, int], None] = lambda done, total: None) -> SpeedTable:
    """Measure this machine, in about so many seconds.

    What takes least comes first, so that where time is short nothing is known of large models, and `auto` trains these
    one by one.

    Args:
        seconds: how long; the first cell is always measured.
        progress: told how many cells are done, and of how many.

    Raises:
        UsageError: if there is no time.
    """
    if not 0 < seconds < math.inf:
        raise UsageError(f"seconds = {seconds:g} does not fit: give a number above 0")
    end, cells = time.monotonic() + seconds, list[Cell]()
    keep_memory()  # as in a run
    with preserve_rng():
        subjects = build_subjects()
        for left, subject in zip(range(len(subjects), 0, -1), subjects, strict=True):
            now = time.monotonic()
            if cells and now >= end:
                break
            cells.append(measure(subject, (end - now) / left))
            progress(len(cells), len(subjects))
    return SpeedTable(tuple(cells), processor(), str(torch.__version__), date.today().isoformat())


def build_subjects() -> list[Subject]:
    """All that is measured, what takes least first."""
    subjects = []
    for family, model, shape in _build_models():
        flops = count_flops(model, torch.zeros(1, *shape))
        subjects += [Subject(family, model, shape, flops, *sizes) for sizes in product(*GRID[family])]
    return sorted((s for s in subjects if s.work <= LARGEST), key=lambda s: s.work)


def _build_models() -> Iterator[tuple[Family, nn.Module, tuple[int, ...]]]:
    """(family, model, shape of its inputs) of all models that are measured."""
    for hidden in DENSE:
        yield "dense", _build_dense(hidden), (PIXELS,)
    for hidden in DENSE[:-1]:
        yield "dense, torch.func", _build_dense(hidden), (PIXELS,)
    for width, size in CONVOLUTIONAL:
        yield "convolutional", _build_convolutional(width, size), (1, size, size)


def _build_dense(hidden: tuple[int, ...]) -> nn.Module:
    sizes = (PIXELS, *hidden, CLASSES)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _build_convolutional(width: int, size: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, width), (width, 2 * width)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * (size // 4) ** 2, CLASSES))


def measure(subject: Subject, seconds: float) -> Cell:
    """Train clients of a kind both ways in turns, for so long: the least time that each way took."""
    train = _prepare(subject)
    ways = (ONE_BY_ONE, MIN_SIZE), (VECTORISED, subject.clients)
    for way in ways:
        train(*way)  # what is done once: loading, counting FLOPs
    end, taken = time.monotonic() + seconds, list[list[float]]()
    while not taken or (time.monotonic() < end and len(taken) < REPEATS):
        taken.append([1e6 * train(*way) / subject.steps for way in ways])
    one_by_one, at_once = (max(round(min(each), 1), 0.1) for each in zip(*taken, strict=True))
    s = subject
    return Cell(s.family, s.flops, s.batch, s.steps, s.clients, one_by_one, at_once)


def _prepare(subject: Subject) -> Callable[[Trainer, int], float]:
    """What trains some of a subject's clients in a way, and tells the seconds of processor time per visit."""
    rows, clients = subject.batch * subject.steps, range(subject.clients)
    data = [TensorExamples(torch.randn(rows, *subject.shape), torch.arange(rows) % CLASSES) for _ in clients]
    method = chain(*([_Onlooker()] if subject.family == "dense, torch.func" else []))
    context = ClientContext(
        build=lambda arch: copy.deepcopy(subject.model), method=method, sample=data[0].x[:2], channels_last=True
    )
    params = {name: p.detach().clone() for name, p in subject.model.named_parameters()}
    work = Work(batch_size=subject.batch, lr=0.01)
    template = Assignment(0, 0, "", params, {}, (*params,), (*params,), work, 0, method.digest)
    everybody = Assignments((template,), [0] * len(clients), clients, clients)

    def train(way: Trainer, count: int) -> float:
        with context.computing(1):
            start = time.process_time()
            for _ in way.train(context, everybody[:count], data, Memories.of([{}] * count)):
                pass
            return (time.process_time() - start) / count

    return train
