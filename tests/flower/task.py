"""The model and the data of an app; `make_app` writes this file into it, with other numbers if asked for."""

import torch
from torch import Tensor, nn

WIDTH = 8
CLIENTS = 8


def points(size: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (size,), generator=rng) + seed % 3
    return torch.randn(size, WIDTH, generator=rng) + y[:, None], y


def model() -> nn.Module:
    net = nn.Sequential()
    with torch.random.fork_rng():
        torch.manual_seed(7)
        net.add_module("first", nn.Linear(WIDTH, WIDTH))
        net.add_module("norm", nn.BatchNorm1d(WIDTH))
        net.add_module("relu", nn.ReLU())
        for name, outputs in {"second": WIDTH, "third": WIDTH, "head": 4}.items():
            net.add_module(name, nn.Linear(WIDTH, outputs))
    return net


def data(partition: int) -> tuple[Tensor, Tensor]:
    return points(10 + 3 * partition, partition)


def test() -> tuple[Tensor, Tensor]:
    return points(40, 99)
