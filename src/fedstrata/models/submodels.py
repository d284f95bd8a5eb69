"""Clients of different architecture, as a run names them: `resnet10; resnet14*2; resnet18`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fedstrata.core.groups import divide_in_groups
from fedstrata.core.spec import bind, split_sum
from fedstrata.errors import UsageError
from fedstrata.models.adapted import is_part, rank_axes
from fedstrata.models.adapters import ADAPTERS
from fedstrata.models.registry import MODELS

if TYPE_CHECKING:
    from torch import nn


def shares(text: str) -> dict[str, float]:
    """Architecture → its share of the clients, from names with a semicolon between; `name*2` counts twice.

    Raises:
        UsageError: for an unknown name, a wrong argument, a weight that is no number, or a name that is given twice.
    """
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        end = part.rfind(")") + 1
        name, star, weight = part[end:].partition("*")
        name = f"{part[:end]}{name}".strip()
        model, adapter = split_adapter(name)
        bind("model", MODELS, model)
        if adapter is not None:
            bind("adapter", ADAPTERS, adapter)
        if name in weights:
            raise UsageError(f"archs names '{name}' twice; write {name}*2 for twice as many clients")
        weights[name] = _weight(weight, part) if star else 1.0
    if not math.isfinite(sum(weights.values())):
        raise UsageError("archs: the weights are too large to add up")
    if not weights:
        raise UsageError("archs names no model; write it like resnet10; resnet14; resnet18*2")
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def split_adapter(name: str) -> tuple[str, str | None]:
    """(a model's name, that of the adapters in it if there is one) of `mlp + lora(r=2)`."""
    model, *adapters = split_sum(name)
    if len(adapters) > 1:
        raise UsageError(f"'{name}' names several adapters: leave one of them")
    return model, adapters[0] if adapters else None


def _weight(text: str, part: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise UsageError(f"archs: in '{part}' the weight must be a number above 0, not '{text.strip()}'")
    return weight


def groups(share: Mapping[str, float], clients: int) -> Callable[[int], str]:
    """Client → its architecture: one group after the other, each as large as its share.

    Raises:
        UsageError: if an architecture is left without any client.
    """
    return divide_in_groups("archs", share, clients).__getitem__


def deepest(models: Mapping[str, nn.Module]) -> str:
    """The one that holds all others.

    Raises:
        UsageError: if there is none, with the first layer that does not fit.
    """
    largest = max(models, key=lambda name: sum(p.numel() for p in models[name].parameters()))
    whole = {name: p.shape for name, p in models[largest].named_parameters()}
    axes = rank_axes(models[largest])
    for arch, model in models.items():
        for name, p in model.named_parameters():
            if name not in whole:
                raise UsageError(f"archs do not nest: '{arch}' has '{name}', which '{largest}' lacks")
            if not is_part(p.shape, whole[name], axes.get(name)):
                shapes = f"{list(p.shape)} in '{arch}' and {list(whole[name])} in '{largest}'"
                raise UsageError(f"archs do not nest: '{name}' is {shapes}")
    return largest
