"""What the means of adapters' factors miss: by hand, and against the factors that clients of a run end with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.diagnosis import diagnose
from fedstrata.probes.measures import aggregation_error
from tests.techniques.adapted_worlds import (
    SHAPES,
    Adapted,
    adapted,
    by_hand,
    counts,
    mean_products,
    means,
    run_adapted,
    unequal_ranks,
    visits,
)
from tests.techniques.worlds import parties


def test_by_hand() -> None:
    """B_1 A_1 = diag(1, 0), B_2 A_2 = diag(0, 1): their mean is diag(½, ½), the means' product ¼ everywhere."""
    one = fs.LowRank(a="a", b="b", weight="w", scale=7.0)
    strata = [fs.Stratum("x", "x", ("w", "a", "b"), (), low_rank=one), fs.Stratum("y", "y", ("v",), ())]
    first = {"a": torch.tensor([[1.0, 0.0]]), "b": torch.tensor([[1.0], [0.0]])}
    second = {"a": torch.tensor([[0.0, 1.0]]), "b": torch.tensor([[0.0], [1.0]])}
    assert aggregation_error([first, second], strata, [3.0, 3.0]) == {"x": pytest.approx(0.5**0.5)}
    assert aggregation_error([first, {**second, "a": first["a"]}], strata, [1.0, 2.0]) == {"x": 0.0}
    assert aggregation_error([first, {}], strata, [1.0, 1.0]) == {}
    assert aggregation_error([{**first, "b": 0 * first["b"]}] * 2, strata, [1.0, 1.0]) == {"x": 0.0}


def missed(ends: list[Adapted], weights: list[int]) -> dict[str, float]:
    exact, new = mean_products(ends, weights), means(ends, weights)
    return {n: np.linalg.norm(exact[n] - new.product(n)) / np.linalg.norm(exact[n]) for n in SHAPES}


def test_of_a_run() -> None:
    """Also with a client of rank 1, whose factors end where its rank does."""
    clients, start = parties(), by_hand(adapted())
    settings = {"probe": "aggregation", "rounds": 1}
    found = run_adapted("fedavg", clients, **settings).probes[0]["aggregation"]
    assert found == pytest.approx(missed([start.train(c) for c in clients], counts(clients)), rel=1e-4)
    found = run_adapted("hetlora", clients, **settings, **unequal_ranks()).probes[0]["aggregation"]
    assert found == pytest.approx(missed(visits(start, clients), counts(clients)), rel=1e-4)
    frozen = run_adapted("ffalora", clients, **settings).probes[0]["aggregation"]
    assert frozen == pytest.approx(dict.fromkeys(SHAPES, 0.0), abs=1e-12)
    kept = run_adapted("fedsalora", clients, **settings).probes[0]
    assert kept["missed"] == {"aggregation": "clients keep a factor of every adapter to themselves"}


def test_the_diagnosis_tells_of_it() -> None:
    """Where factors' means are what the method goes by; and nobody hears of it without adapters."""
    fed = run_adapted("fedavg", parties(), probe="aggregation", lr=1.0, steps=8)
    finding = next(one for one in fed.diagnose().findings if one.name == "inexact-adapters")
    assert finding.figure["error"] == pytest.approx(
        np.mean([value for row in fed.probes for value in row["aggregation"].values()]), rel=1e-3
    )
    assert next(remedy.method for remedy in finding.remedies) == "fedexlora"
    exact = diagnose(run_adapted("fedexlora", parties(), probe="aggregation").saved_run())
    assert "inexact-adapters" not in exact.looked
    plain = diagnose(run_adapted("fedavg", parties(), torch.nn.Linear(3, 3).double(), probe="all").saved_run())
    assert "adapters" not in " ".join(plain.notes)
    assert "inexact-adapters" not in plain.unmeasured
