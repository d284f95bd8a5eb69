"""FedAvg against a loop that was written without looking at ours: the same bits, on real data."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedstrata as fs
from tests.real_data import DATA


def seed_of(*parts: object) -> int:
    """The documented rule: the first 8 bytes of SHA-256 over the parts joined by '/', shifted right once."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


def fedavg(
    model: nn.Module,
    clients: list[tuple[torch.Tensor, torch.Tensor]],
    rounds: int,
    share: float,
    batch: int,
    epochs: int,
    lr: float,
    seed: int,
) -> nn.Module:
    """w ← w + Σ n_k (w_k − w) / Σ n_k, with torch.optim.SGD on every client; forty lines, nothing of fedstrata."""
    model = copy.deepcopy(model)
    for t in range(rounds):
        chosen = random.Random(seed_of(seed, "sample", t)).sample(range(len(clients)), round(share * len(clients)))
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        change = {n: torch.zeros_like(p) for n, p in start.items()}
        total = 0
        for k in sorted(chosen):
            x, y = clients[k]
            local = copy.deepcopy(model).train()
            optimizer = torch.optim.SGD(local.parameters(), lr=lr)
            order = torch.Generator().manual_seed(seed_of(seed_of(seed, "visit", t, k), "order"))
            for _ in range(epochs):
                for index in torch.randperm(len(y), generator=order).split(batch):
                    optimizer.zero_grad()
                    F.cross_entropy(local(x[index]), y[index]).backward()
                    optimizer.step()
            for n, p in local.named_parameters():
                change[n].add_(p.detach() - start[n], alpha=len(y))
            total += len(y)
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(start[n] + change[n] / total)
    return model.eval()


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return sum(
            (model(a).argmax(1) == b).sum().item() for a, b in zip(x.split(500), y.split(500), strict=True)
        ) / len(y)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Sums in another order have other last bits; the federation trains with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_cnn() -> nn.Module:
    """Two strided convolutions: a CNN that goes several times over thousands of images in seconds."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(400, 10),
        )


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "fashion-mnist").is_dir(), reason="needs the real Fashion-MNIST files")
@pytest.mark.usefixtures("_one_thread")
def test_fashion_mnist() -> None:
    """15,000 images, 20 clients, Dirichlet(0.1), a small CNN, 8 rounds: the same bits, hence the same accuracy."""
    data = fs.load_dataset("fashion-mnist(examples=15000)", DATA)
    parts = fs.partition(data.train.labels(), "dirichlet(alpha=0.1)", clients=20, seed=1)
    model = small_cnn()
    settings = {"rounds": 8, "epochs": 1, "lr": 0.1, "seed": 3}
    how = {"participation": 0.5, "batch_size": 32, "workers": "auto", "channels_last": False, "eval_every": 8}
    federation = fs.Federation(model, [data.train.select(p) for p in parts], data.test, **how, **settings)
    history = federation.fit()

    clients = [data.train.batch(p) for p in parts]  # whole clients, normalised once: the same numbers as batch by batch
    independent = fedavg(model, clients, share=0.5, batch=32, **settings)
    for name, p in independent.named_parameters():
        assert torch.equal(p, federation.state.params[name]), name
    theirs = accuracy(independent, *data.test.batch(torch.arange(len(data.test))))
    assert history.accuracy == pytest.approx(theirs, abs=1e-9)
    assert theirs > 0.7, "both loops must really learn for the comparison to mean something"


@pytest.mark.usefixtures("_one_thread")
def test_digits() -> None:
    """The same on the embedded digits, so that it runs everywhere."""
    data = fs.load_dataset("digits")
    parts = fs.partition(data.train.labels(), "shards(classes=3)", clients=6, seed=0)
    model = fs.build_model("mlp(hidden=(20,))", data.input_shape, data.classes, seed=0)
    settings = {"rounds": 5, "epochs": 3, "lr": 0.1, "seed": 11}
    how = {"participation": 0.5, "batch_size": 16, "engine": "serial"}
    federation = fs.Federation(model, [data.train.select(p) for p in parts], data.test, **how, **settings)
    federation.fit()
    independent = fedavg(model, [data.train.batch(p) for p in parts], share=0.5, batch=16, **settings)
    for name, p in independent.named_parameters():
        assert torch.equal(p, federation.state.params[name]), name
