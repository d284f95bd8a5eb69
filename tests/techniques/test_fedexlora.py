"""FedEx-LoRA in NumPy: the merged weights are the mean of the clients' merged weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

import fedstrata as fs
from fedstrata.core.low_rank import adapters_of, product
from fedstrata.models.adapted import base_names
from tests.techniques.adapted_worlds import (
    PLACES,
    Adapted,
    adapted,
    by_hand,
    check,
    counts,
    mean_products,
    means,
    run_adapted,
)
from tests.techniques.worlds import ClientData, differ, parties


def one_round(now: Adapted, clients: list[ClientData]) -> Adapted:
    """W ← W + s·(Σ p_k B_k·A_k − B·A) beside the means of the factors."""
    ends = [now.train(c) for c in clients]
    new, exact = means(ends, counts(clients)), mean_products(ends, counts(clients))
    base = now.base.copy()
    for n, place in PLACES.items():
        base[place] += (exact[n] - new.product(n)).ravel()
    return replace(new, base=base)


def test_three_rounds() -> None:
    clients = parties()
    fed = run_adapted("fedexlora", clients)
    now = by_hand(adapted())
    for _ in range(3):
        now = one_round(now, clients)
    check(fed, now)
    differ(now.whole(), by_hand(run_adapted("fedavg", clients).state.params).whole())


def test_a_round_is_the_mean_of_whole_matrices() -> None:
    """Merged, a round of FedEx-LoRA is FedAvg of the merged weights; that of factors by themselves is not."""
    clients = parties()
    start = by_hand(adapted())
    whole = np.average([start.train(c).whole() for c in clients], axis=0, weights=counts(clients))
    found = by_hand(run_adapted("fedexlora", clients, rounds=1).state.params).whole()
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-12)
    differ(by_hand(run_adapted("fedavg", clients, rounds=1).state.params).whole(), whole)


def test_in_single_precision_and_a_convolution() -> None:
    """To 1e-6, also where W is not a matrix."""
    fed = fs.Federation(convolution(), pictures(), method="fedexlora", rounds=2, epochs=3, lr=0.5, engine="serial")
    one = adapters_of(fed.strata)[0]
    merged: list[torch.Tensor] = []
    visit = fed._engine.run

    def watched(asked: Any, recall: Any) -> Any:
        for a, (update, memory) in zip(asked, visit(asked, recall), strict=True):
            own = {n: a.params[n] + update.delta.get(n, 0) for n in (one.a, one.b, one.weight)}
            merged.append(own[one.weight] + product(own, one))
            yield update, memory

    fed._engine.run = watched  # type: ignore[method-assign]
    fed.fit()
    whole = torch.stack(merged[-3:]).double().mean(0)
    after = fed.state.params[one.weight] + product(fed.state.params, one)
    torch.testing.assert_close(after.double(), whole, rtol=0, atol=1e-6)
    assert one.weight in base_names(fed.model)


def convolution() -> nn.Module:
    """A convolution and a dense layer with adapters; the dense one is the classifier, and trains as it is."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(108, 4))
    return fs.adapt(layers, "lora(r=2)", torch.zeros(1, 1, 6, 6), seed=1)


def pictures() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three clients with as many pictures each, of other classes."""
    draw = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 1, 6, 6, generator=draw), torch.arange(8) % (k + 2)) for k in range(3)]
