"""Units: the modules of a model that are placed whole, each with the tensors that it holds; `strata` groups them.

What opens a stratum, and what joins one, is said in `fedstrata.models.strata`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstrata.core.lazy import nn

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Unit:
    """A module that is placed whole, with its tensors and those it takes over from containers around it."""

    module: nn.Module
    name: str
    opens: bool
    params: list[Tensor]
    buffers: list[Tensor]


def is_norm(module: nn.Module) -> bool:
    """Whether a module is one of torch's norm layers."""
    return isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm)


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer with an adapter of `peft`'s around it: they are one stratum."""
    return hasattr(type(module), "adapter_layer_names") and isinstance(getattr(module, "base_layer", None), nn.Module)


def is_whole(module: nn.Module) -> bool:
    """Whether a module need not be looked into: it is placed whole, or has nothing inside."""
    return _opens(module) is not None or not any(True for _ in module.children())


def find_units(model: nn.Module) -> list[Unit]:
    """The modules that are placed whole, in the order of registration, each with the tensors inside it."""
    units: list[Unit] = []
    covered: set[int] = set()
    for name, module in model.named_modules():
        opens = None if id(module) in covered or _is_bare(module) else _opens(module)
        if opens is not None:
            covered.update(map(id, module.modules()))
            units.append(Unit(module, name, opens, list(module.parameters()), list(module.buffers())))
    return units


def take_over(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Give what containers own directly to the first weight layer inside them, else to the first unit."""
    placed = {id(m) for unit in units for m in unit.module.modules()}
    containers = [m for m in model.modules() if id(m) not in placed and not _is_bare(m)]
    for container in reversed(containers):  # inner containers first: nearer things stand nearer
        params, buffers = _own_params(container), list(container.buffers(recurse=False))
        if params or buffers:
            inside = {id(m) for m in container.modules()}
            candidates = [unit for unit in units if id(unit.module) in inside] or units
            home = next((unit for unit in candidates if unit.opens), candidates[0])
            home.params.extend(params)
            home.buffers.extend(buffers)
    return list(units)


def _opens(module: nn.Module) -> bool | None:
    """True for a weight layer, False for what joins one, None for a container or what holds nothing."""
    if not any(True for _ in module.parameters()) and not any(True for _ in module.buffers()):
        return None
    if _is_weight(module):
        return True
    if is_norm(module):
        return False
    if any(True for m in _inner(module) for _ in m.parameters(recurse=False)):
        return None
    if _own_params(module):
        return any(p.ndim >= 2 for p in _own_params(module))
    return False if any(True for _ in module.buffers(recurse=False)) else None


def _is_weight(module: nn.Module) -> bool:
    """Whether a module is one of torch's weight layers, or one with an adapter."""
    dense = nn.Linear | nn.Bilinear | nn.Embedding | nn.EmbeddingBag | nn.MultiheadAttention
    return isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase | nn.RNNCellBase | dense) or is_adapted(module)


def _is_bare(module: nn.Module) -> bool:
    return isinstance(module, nn.ParameterList | nn.ParameterDict)


def _own_params(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a module owns directly, including those in its parameter lists and dicts."""
    bare = [p for child in module.children() if _is_bare(child) for p in _own_params(child)]
    return [*module.parameters(recurse=False), *bare]


def _inner(module: nn.Module) -> list[nn.Module]:
    """The modules inside a module, except parameter lists and dicts."""
    return [m for m in module.modules() if m is not module and not _is_bare(m)]
