"""Small federations for the engines' tests, and what makes two of them the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedstrata as fs
from fedstrata.core.tensors import Tensors

Pair = tuple[Tensor, Tensor]

SIZES = (9, 14, 21, 30, 12, 3)

EIGHT = (
    "fedprox + scaffold + feddyn(alpha=0.1) + moon + fedlc + fednlr + fednova "
    "+ fedpart(full_rounds=1, rounds_per_stratum=1)"
)
"""Techniques with memories, slots both ways, partial parameters, states on the server."""


def seeded(build: Callable[[], nn.Module], seed: int = 7) -> Any:
    """What a function builds from a fixed seed, with the caller's random numbers left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def points(size: int, seed: int, inputs: int = 6, classes: int = 4) -> Pair:
    """Points with skewed labels."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (size,), generator=rng) + seed % (classes - 1)
    return torch.randn(size, inputs, generator=rng) + y[:, None], y


def pictures(size: int, seed: int) -> Pair:
    """Small pictures, as bytes."""
    rng = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 256, (size, 3, 6, 6), generator=rng, dtype=torch.uint8),
        torch.randint(0, 4, (size,), generator=rng),
    )


def flat(*sizes: int) -> list[Pair]:
    """Clients of points, of these sizes."""
    return [points(size, seed) for seed, size in enumerate(sizes or SIZES)]


def mlp() -> nn.Sequential:
    """Two dense layers."""
    model: nn.Sequential = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))
    return model


def noisy() -> nn.Sequential:
    """Dense layers with dropout."""
    layers = lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4))  # noqa: E731
    model: nn.Sequential = seeded(layers)
    return model


def convnet(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    """Two convolutions with normalisation between them."""

    def build() -> nn.Module:
        net = nn.Sequential()
        net.add_module("first", nn.Conv2d(3, 8, 3, padding=1))
        net.add_module("norm", norm(8))
        net.add_module("relu", nn.ReLU())
        net.add_module("second", nn.Conv2d(8, 8, 3, stride=2))
        net.add_module("flat", nn.Flatten())
        net.add_module("head", nn.Linear(32, 4))
        return net

    model: nn.Sequential = seeded(build)
    return model


def staged(*names: str) -> nn.Sequential:
    """A model of stages, any of which may be left out."""

    def build() -> nn.Module:
        stages = {
            "first": nn.Linear(6, 8),
            "norm": nn.BatchNorm1d(8),
            "relu": nn.ReLU(),
            "second": nn.Linear(8, 8),
            "head": nn.Linear(8, 4),
        }
        net = nn.Sequential()
        for name, stage in stages.items():
            if not names or name in names:
                net.add_module(name, stage)
        return net

    model: nn.Sequential = seeded(build)
    return model


@dataclass(frozen=True, kw_only=True)
class Paced(fs.Technique):
    """A loss that depends on the learning rate."""

    name: ClassVar[str] = "paced"
    vectorises: ClassVar[bool] = True

    def local(self, view: fs.ClientView) -> fs.Hooks:
        lr = view.assignment.work.lr
        return fs.Hooks(loss=lambda batch: lr * torch.stack([p.square().sum() for p in batch.params.values()]).sum())


def paced() -> dict[str, Any]:
    """A federation whose second round has another learning rate than its first, and whose technique reads it."""
    return {
        "clients": flat(8, 8, 8),
        "method": fs.chain(Paced()),
        "rounds": 2,
        "schedule": "step(every=1, factor=0.1)",
        "lr": 0.5,
        "batch_size": 8,
        "participation": 1.0,
    }


class Shaken(Dataset[tuple[Tensor, int]]):
    """A dataset with random transforms that draw from every generator there is, as many do."""

    def __init__(self, data: Pair) -> None:
        self.x, self.y = data

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = self.x[index] + 0.1 * torch.randn(self.x.shape[1:])
        return (x if random.random() < 0.5 else -x), int(self.y[index])


def federation(
    model: nn.Module | None = None, clients: Sequence[Any] | None = None, test: Any = None, **settings: Any
) -> fs.Federation:
    """A federation of unequal clients; dense layers on points unless something else is given."""
    clients = flat() if clients is None else clients
    test = points(40, 99) if test is None else test
    settings = {"rounds": 3, "participation": 4, "batch_size": 5, "lr": 0.05, **settings}
    return fs.Federation(mlp() if model is None else model, clients, test or None, **settings)


def run(*world: Any, **settings: Any) -> fs.Federation:
    """A federation that has run all its rounds."""
    made = federation(*world, **settings)
    made.fit()
    return made


def tensors(fed: fs.Federation) -> Tensors:
    """Everything that a federation knows: parameters, running statistics, technique states, who holds what."""
    states = {f"{t}:{n}": v for t, s in fed.state.techniques.items() for n, v in s.items()}
    who = {"(held)": fed.state.held, "(remembers)": fed.state.remembers}
    return {**fed.state.params, **fed.state.buffers, **states, **who}


def records(fed: fs.Federation) -> list[dict[str, Any]]:
    """The records, without what differs from one execution to the next."""
    rows = [asdict(record) for record in fed.records]
    return [{name: value for name, value in row.items() if name not in ("seconds", "memory")} for row in rows]


def check_same(fed: fs.Federation, reference: fs.Federation, memory: float = 0.0) -> None:
    """Two federations have the same bits everywhere, and the same records, but for a share of the memory."""
    ours, theirs = tensors(fed), tensors(reference)
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []
    for row, expected in zip(records(fed), records(reference), strict=True):
        assert row.pop("training_memory") == pytest.approx(expected.pop("training_memory"), rel=memory, abs=0)
        assert row == expected


def check_close(fed: fs.Federation, reference: fs.Federation, tolerance: float = 1e-5, memory: float = 0.2) -> None:
    """Two federations agree up to rounding, and count the same costs.

    But for a few bytes: messages write the training loss as text, and other last digits may be more or fewer. And where
    many train at once, what one of them would hold alone is an estimate, without what is cached or drawn for all steps.
    """
    ours, theirs = tensors(fed), tensors(reference)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
    for row, expected in zip(records(fed), records(reference), strict=True):
        for name in [name for name, value in expected.items() if isinstance(value, float) and name != "accuracy"]:
            found, wanted = row.pop(name), expected.pop(name)
            assert found is not None and abs(found - wanted) <= tolerance, name  # noqa: PT018
        assert abs(row.pop("bytes_up") - expected.pop("bytes_up")) <= 16 * len(row["clients"])
        assert row.pop("training_memory") == pytest.approx(expected.pop("training_memory"), rel=memory)
        for name in ("accuracy", "client_accuracy"):  # an example on the border may fall to either side
            row.pop(name), expected.pop(name)
        assert row == expected


def children(pid: int | str = "self") -> set[int]:
    """The processes that a process started and that are still there, zombies included."""
    return {
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    }
