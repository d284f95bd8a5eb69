"""What is frozen is not measured, and stays: by hand, with adapters of unequal rank, and in a transformer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.models.strata import strata
from fedstrata.probes.measures import gradient_trace, relative_gradients
from tests.techniques.adapted_worlds import (
    LOW_RANK,
    LOW_SCALE,
    PLACES,
    SHAPES,
    adapted,
    by_hand,
    run_adapted,
    unequal_ranks,
)
from tests.techniques.worlds import ClientData, Vector, parties, slopes


def gradient(client: ClientData, rank: int, scale: float) -> dict[str, Vector]:
    """∂A = s·Bᵀ·G and ∂B = s·G·Aᵀ of the first ranks, with zeros for the others, in the server's s; as one vector."""
    whole = by_hand(adapted())
    own = whole.cut(rank, scale)
    slope, found = slopes(own.whole(), client), {}
    for n, place in PLACES.items():
        g = slope[place].reshape(SHAPES[n])
        a, b = whole.scale * whole.b[n].T @ g, whole.scale * g @ whole.a[n].T
        a[rank:], b[:, rank:] = 0, 0
        found[n] = np.concatenate([a.ravel(), b.ravel()])
    return found


def test_divergence_of_adapters_of_unequal_rank() -> None:
    """(1/N) Σ √(‖g_i − ḡ‖²/d) over A and B; the base is in no gradient."""
    clients = parties()
    held = [(2, 1.5), (LOW_RANK, LOW_SCALE), (2, 1.5)]
    each = [gradient(client, *one) for client, one in zip(clients, held, strict=True)]
    found = run_adapted("hetlora", clients, probe="divergence", rounds=1, **unequal_ranks()).probes[0]["divergence"]
    expected = {}
    for n in SHAPES:
        rows = np.stack([one[n] for one in each])
        expected[n] = np.sqrt(((rows - rows.mean(0)) ** 2).sum(1) / rows.shape[1]).mean()
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_trace_moves_only_what_trains() -> None:
    """On top of a frozen layer a trace is that of the rest on what this layer puts out."""
    draw = torch.Generator().manual_seed(0)
    below, above = nn.Linear(4, 5), nn.Linear(5, 3)
    x, y = torch.randn(16, 4, generator=draw), torch.arange(16) % 3
    whole = nn.Sequential(below.requires_grad_(False), above)
    found = gradient_trace(whole, whole, (x, y), strata(whole), steps=6, batch_size=8, lr=0.5)
    alone = nn.Sequential(above)
    features = (below(x), y)
    expected = gradient_trace(alone, alone, features, strata(alone), steps=6, batch_size=8, lr=0.5)
    assert found.alone.keys() == {"1"}
    assert found.alone["1"] == pytest.approx(expected.alone["0"], rel=1e-5)
    assert relative_gradients(whole, strata(whole), x, y).keys() == {"1"}


def test_a_transformer_with_adapters(tmp_path: Path) -> None:
    """Gradients are measured where something trains; features are compared block by block."""
    tiny = pytest.importorskip("tests.tiny_transformers")
    bert, texts = tiny.write_bert(tmp_path / "bert"), tiny.write_texts(tmp_path / "texts.tsv", rows=45)
    data = fs.load_dataset(f"text(path='{texts}')", tokenizer=str(bert))
    model = fs.build_model(f"hf('{bert}')", data.input_shape, data.classes, seed=0)
    fs.adapt(model, tiny.LORA, seed=1)
    clients = data.train.split(fs.partition(data.labels, "iid", 3))
    probe = "divergence gradnorm depth cka"
    fed = fs.Federation(model, clients, data.test, rounds=1, probe=probe, lr=0.2, batch_size=5)
    fed.fit()
    row = fed.probes[0]
    trained = {s.name for s in fed.strata if s.low_rank or s.classifies}
    measured = (row["divergence"], row["gradnorm"]["alone"], row["gradnorm"]["averaged"], row["depth"]["gradient"])
    assert all(set(found) == trained for found in measured)
    assert list(row["cka"]["mean"]) == ["bert.encoder.layer.0", "bert.encoder.layer.1", "dropout", "classifier"]
