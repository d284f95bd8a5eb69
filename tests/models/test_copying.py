"""A copy of a model is the one that deepcopy makes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.models import copying
from fedstrata.models.copying import copy_model


def same(a: Any, b: Any, seen: dict[int, int]) -> bool:
    """True if two values are of the same types and contents, and share what they share."""
    if id(a) in seen:
        return seen[id(a)] == id(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, (nn.Module, dict, list, tuple, set, torch.Tensor)):
        assert isinstance(a, tuple) or a is not b
        seen[id(a)] = id(b)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.requires_grad == b.requires_grad and a.stride() == b.stride()
    if isinstance(a, nn.Module):
        return same(vars(a), vars(b), seen)
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[name], b[name], seen) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, seen) for x, y in zip(a, b, strict=True))
    return callable(a) or bool(a == b)


class Tied(nn.Module):
    """Shares a layer, a parameter and a table; keeps a list of its modules, a frozen parameter and hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Linear(3, 3)]  # not registered, and met before the layer is
        self.first = self.again = self.parts[0]
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.absent: nn.Module | None
        self.register_module("absent", None)
        self.one: dict[str, int] = {}
        self.other = self.one
        self.register_forward_hook(lambda m, args, out: out)
        self.bounds = torch.eye(2), {"a": [1, 2]}


class Own(nn.Linear):
    """Says itself how it is copied."""

    def __deepcopy__(self, memo: Any) -> Own:
        return memo.setdefault(id(self), Own(1, 1))  # type: ignore[no-any-return]


class Loaded(nn.Linear):
    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.told = True


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "in a sequence": lambda: nn.Sequential(Tied(), nn.ReLU(), nn.ModuleDict({"a": Tied()}), nn.ParameterList([1.0])),
    "recurrent": lambda: nn.Sequential(nn.LSTM(3, 4), nn.GRU(3, 4)),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "parametrised": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    **{
        name: lambda name=name: fs.build_model(name, (3, 16, 16), 10, seed=0)  # type: ignore[misc]
        for name in ("cnn2", "resnet10(width=2)", "vit(patch=4, dim=8, depth=1, heads=2)", "unet(width=2)")
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_copy_that_deepcopy_makes(name: str) -> None:
    model = MODELS[name]()
    made = copy_model(model)
    assert same(copy.deepcopy(model), made, {})
    assert name == "recurrent" or same(model, made, {})  # which keeps references to its weights by place
    assert not {id(t) for t in model.parameters()} & {id(t) for t in made.parameters()}


def test_who_has_a_say_is_asked() -> None:
    """Also inside of one who has none."""
    model = nn.Sequential(Own(2, 2), Loaded(2, 2))
    made = copy_model(model)
    assert made[0].weight.shape == (1, 1)  # type: ignore[index]
    assert made[1].told  # type: ignore[index]
    assert [*map(copying._is_copied_by_attributes, (Own, Loaded, nn.Linear))] == [False, False, True]
