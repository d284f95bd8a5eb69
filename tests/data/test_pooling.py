"""Clients' own tensors in one: which are, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.data import pooling
from fedstrata.data.examples import Split, TensorExamples
from tests.engines.worlds import check_same, flat, run


def examples(*sizes: int, kind: torch.dtype = torch.float32) -> list[TensorExamples]:
    rng = torch.Generator().manual_seed(0)
    return [
        TensorExamples(torch.randint(0, 9, (n, 3), generator=rng).to(kind), torch.randint(0, 4, (n,), generator=rng))
        for n in sizes
    ]


def test_every_client_has_its_own_examples() -> None:
    clients = examples(4, 1, 0, 7)
    found = pooling.pool_examples(clients)
    assert isinstance(found, Split)
    assert [found.size(c) for c in range(4)] == [4, 1, 0, 7]
    for client, data in enumerate(clients):
        index = torch.arange(len(data)).flip(0)
        assert all(torch.equal(a, b) for a, b in zip(found[client].batch(index), data.batch(index), strict=True))
        pooled = found.pool.batch(found.places([client], [index]))
        assert all(torch.equal(a, b) for a, b in zip(pooled, data.batch(index), strict=True))


def test_places_of_several_clients() -> None:
    """Clients of 4, 1 and 7 examples begin at 0, 4 and 5 of the pool; an index is left as it is."""
    found = pooling.pool_examples(examples(4, 1, 7))
    assert isinstance(found, Split)
    index = [torch.tensor([6, 0]), torch.tensor([3])]
    assert found.places([2, 0], index).tolist() == [11, 5, 3]
    assert index[0].tolist() == [6, 0]


def test_bytes_keep_their_scale() -> None:
    rng = torch.Generator().manual_seed(0)
    x = [torch.randint(0, 256, (3, 1, 2, 2), dtype=torch.uint8, generator=rng) for _ in range(2)]
    clients = [TensorExamples(one, torch.zeros(3, dtype=torch.int64), (0.5,), (0.25,)) for one in x]
    found = pooling.pool_examples(clients)
    assert isinstance(found, Split)
    assert torch.equal(found[1].batch(torch.arange(3))[0], clients[1].batch(torch.arange(3))[0])


OTHERS: dict[str, Any] = {
    "one client": lambda: examples(4),
    "other types": lambda: [*examples(4), *examples(4, kind=torch.float64)],
    "other shapes": lambda: [*examples(4), TensorExamples(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))],
    "other scales": lambda: [
        TensorExamples(e.x, e.y, (m,), (m,)) for e, m in zip(examples(4, 4), (0.2, 0.3), strict=True)
    ],
    "parts already": lambda: [e.select(torch.arange(2)) for e in examples(4, 4)],
    "a Dataset": lambda: [*examples(4), fs.MapExamples([(torch.zeros(3), 1)])],
}


@pytest.mark.parametrize("case", OTHERS)
def test_others_stay_as_they_are(case: str) -> None:
    clients = OTHERS[case]()
    assert pooling.pool_examples(clients) is clients


@pytest.mark.parametrize("limit", ["POOLED_CLIENT", "POOLED_ALL"])
def test_large_ones_stay_as_they_are(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = examples(4, 4)
    monkeypatch.setattr(pooling, limit, 40)
    assert pooling.pool_examples(clients) is clients


@pytest.mark.parametrize("engine", ["serial", "vmap"])
def test_training_has_the_same_bits(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(clients=flat(), engine=engine, method="scaffold")
    assert isinstance(found.clients, Split)
    monkeypatch.setattr(pooling, "POOLED_ALL", 0)
    check_same(found, run(clients=flat(), engine=engine, method="scaffold"))
