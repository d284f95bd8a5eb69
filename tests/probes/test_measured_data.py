"""Probes take clients' data in every form that a federation takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedstrata as fs
from fedstrata.core.tensors import Tensors
from fedstrata.errors import UsageError
from fedstrata.probes import measures

X = [torch.randn(8, 4, generator=torch.Generator().manual_seed(client)) for client in range(2)]
Y = torch.arange(8) % 3

FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a pair": lambda x, y: (x, y),
    "a list of two": lambda x, y: [x, y],
    "arrays": lambda x, y: (x.numpy(), y.numpy()),
    "labels in a list": lambda x, y: (x, y.tolist()),
    "a dataset": TensorDataset,
    "rows": lambda x, y: list(zip(x, y, strict=True)),
    "a function": lambda x, y: lambda: (x, y),
}


def model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return same(vars(one), vars(other))
    return bool(one == other)


def local() -> dict[int, Tensors]:
    return {client: {n: p + client for n, p in model().named_parameters()} for client in range(2)}


PROBES: dict[str, Callable[[list[Any]], Any]] = {
    "client_gradients": lambda data: measures.client_gradients(model(), data),
    "features_at": lambda data: measures.features_at(model(), data[0], "1"),
    "gradient_trace": lambda data: measures.gradient_trace(model(), model(), data[0], fs.strata(model()), steps=2),
    "generalisation": lambda data: measures.generalisation(model(), local(), data),
    "layer_similarity": lambda data: measures.layer_similarity([model(), model()], data[0]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("probe", PROBES)
def test_every_form_gives_the_same(probe: str, form: str) -> None:
    if (probe, form) == ("layer_similarity", "a function"):
        pytest.skip("it takes inputs, not a client's data")
    expected = PROBES[probe]([fs.TensorExamples(x, Y) for x in X])
    assert same(PROBES[probe]([FORMS[form](x, Y) for x in X]), expected)


def test_feature_distance_takes_pairs() -> None:
    pytest.importorskip("ot")
    expected = measures.feature_distance(model(), [fs.TensorExamples(x, Y) for x in X], "1")
    assert measures.feature_distance(model(), [(x, Y) for x in X], "1") == expected


def test_a_split_is_taken_as_it_is() -> None:
    whole = fs.TensorExamples(torch.cat(X), torch.cat([Y, Y]))
    found = measures.client_gradients(model(), whole.split([torch.arange(8), torch.arange(8, 16)]))
    assert same(found, measures.client_gradients(model(), [(x, Y) for x in X]))


@pytest.mark.parametrize("label", [0.5, -100, 3])
def test_labels_are_looked_at(label: float) -> None:
    labels = [0, 1, label, *[2] * 5]
    with pytest.raises(UsageError, match="label"):
        measures.client_gradients(model(), [(X[0], Y), (X[1], labels)])
    with pytest.raises(UsageError, match="label"):
        measures.client_gradients(model(), [fs.TensorExamples(X[1], torch.tensor(labels))])
