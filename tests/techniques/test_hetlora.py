"""HetLoRA in NumPy: factors of unequal rank filled up with zeros, and weighed by the norms of their products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from tests.techniques.adapted_worlds import (
    SHAPES,
    Adapted,
    adapted,
    by_hand,
    check,
    counts,
    means,
    run_adapted,
    unequal_ranks,
    visits,
)
from tests.techniques.worlds import differ, federation, parties


def by_norms(ends: list[Adapted]) -> Adapted:
    """p_k = ‖B_k·A_k‖ / Σ_j ‖B_j·A_j‖, layer by layer; a scale that all share drops out."""
    found = {n: means(ends, [float(np.linalg.norm(one.product(n))) for one in ends]) for n in SHAPES}
    return Adapted(ends[0].base, {n: f.a[n] for n, f in found.items()}, {n: f.b[n] for n, f in found.items()}, 1.5)


@pytest.mark.parametrize("by", ["norm", "weight"])
def test_three_rounds_of_unequal_ranks(by: str) -> None:
    """A row that a client lacks counts as zero; a client of scale 2.5 holds B·1.5/2.5, so that s·B·A is the same."""
    clients = parties()
    fed = run_adapted(f"hetlora(by='{by}')", clients, **unequal_ranks())
    now = by_hand(adapted())
    for _ in range(3):
        ends = visits(now, clients)
        now = by_norms(ends) if by == "norm" else means(ends, counts(clients))
    check(fed, now)
    differ(now.whole(), by_hand(run_adapted("fedavg", clients).state.params).whole())


def test_equal_ranks_are_plain() -> None:
    """With `by='weight'` FedAvg's bits; weighed by norms three rounds of that."""
    clients = parties()
    plain, weighed = run_adapted("fedavg", clients), run_adapted("hetlora(by='weight')", clients)
    assert all(torch.equal(p, weighed.state.params[n]) for n, p in plain.state.params.items())
    now = by_hand(adapted())
    for _ in range(3):
        now = by_norms([now.train(c) for c in clients])
    check(run_adapted("hetlora", clients), now)


def test_what_a_client_lacks_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of the client of rank 1 hold one row of each A and one column of each B, on the way up and down."""
    fed = federation("hetlora", parties(), adapted(), engine="wire", rounds=2, **unequal_ranks())
    shapes: dict[int, set[tuple[int, int]]] = {}
    visit = fed._engine.run

    def watched(asked: Any, recall: Any) -> Any:
        for a, (update, memory) in zip(asked, visit(asked, recall), strict=True):
            for tensors in (a.params, update.delta):
                shapes.setdefault(a.client, set()).update(tuple(t.shape) for n, t in tensors.items() if "lora" in n)
            yield update, memory

    monkeypatch.setattr(fed._engine, "run", watched)
    records = fed.fit().records
    assert shapes[1] == {(1, 3), (4, 1), (1, 4), (3, 1)}
    assert shapes[0] == {(2, 3), (4, 2), (2, 4), (3, 2)}
    numbers = 2 * 28 + 14
    assert 8 * numbers < records[0].bytes_up < 8 * numbers + 3 * 1500


def test_ranks_need_somebody_who_mixes_them() -> None:
    with pytest.raises(fs.UsageError, match=r"'small' have another rank or scale than the server's.*hetlora, hlora, "):
        federation("fedavg", parties(), adapted(), **unequal_ranks())
    with pytest.raises(fs.UsageError, match=r"'scaffold' sends tensors for each parameter, .* another scale"):
        federation("hetlora + scaffold", parties(), adapted(), **unequal_ranks())
    larger = {"archs": {"large": adapted(3)}, "arch_of": lambda client: "large"}
    with pytest.raises(fs.UsageError, match=r"of the architecture 'large' is \[3, 3\] instead of \[2, 3\]"):
        federation("hetlora", parties(), adapted(), **larger)
