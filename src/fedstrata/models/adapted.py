"""Models with adapters of `peft`'s: which layers have one, and what is the frozen base beneath them.

Read from the modules alone, so that a model that its user has adapted with peft is as good as one of `adapt`'s, and
nothing here needs peft to be installed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedstrata.core.lazy import nn, torch
from fedstrata.core.types import LowRank
from fedstrata.errors import UsageError
from fedstrata.models.units import is_adapted

if TYPE_CHECKING:
    from torch import Tensor

_WRAPPED = ".base_layer."
_OUTER = "base_model.model."


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of all layers with an adapter."""
    return ((name, module) for name, module in model.named_modules() if is_adapted(module))


def base_names(model: nn.Module) -> frozenset[str]:
    """The parameters of the frozen base of a model with adapters; none of a model without."""
    if not any(True for _ in adapted_layers(model)):
        return frozenset()
    return frozenset(n for n, p in model.named_parameters() if not p.requires_grad)


def name_in_base(name: str) -> str:
    """What a parameter of the base is called in the model without adapters."""
    return name.removeprefix(_OUTER).replace(_WRAPPED, ".")


def share_base(models: Mapping[str, nn.Module]) -> None:
    """Give sub-models, which are changed, the server's frozen base beneath their adapters; "" is the server's model.

    Where weights are drawn, models of other depth have drawn others.
    """
    whole = dict(models[""].named_parameters())
    with torch.no_grad():
        for arch, model in models.items():
            own = dict(model.named_parameters())
            for name in base_names(model) if arch else ():
                if name in whole and whole[name].shape == own[name].shape:
                    own[name].copy_(whole[name])


def rank_axes(model: nn.Module) -> dict[str, int]:
    """Factor of a low-rank adapter → the axis of its rank."""
    found = find_low_rank(model).values()
    return {one.a: 0 for one in found} | {one.b: 1 for one in found}


def is_part(shape: Sequence[int], whole: Sequence[int], axis: int | None) -> bool:
    """True if a tensor can be part of another one: all of it or, along the axis of its rank, some of it."""
    if axis is None or len(shape) != len(whole) or shape[axis] > whole[axis]:
        return tuple(shape) == tuple(whole)
    return all(own == of for at, (own, of) in enumerate(zip(shape, whole, strict=True)) if at != axis)


def base_digest(model: nn.Module) -> str:
    """Sixteen hex digits of the frozen base, by names, types, shapes and numbers; empty where there is none.

    What never runs is no part of it: peft keeps a head as it was at first beside the one that trains, and its numbers
    were drawn anew by everybody.
    """
    names = base_names(model) - _replaced_names(model)
    if not names:
        return ""
    params: dict[str, Tensor] = {name_in_base(n): p for n, p in model.named_parameters() if n in names}
    digest = hashlib.sha256()
    for name in sorted(params):
        tensor = params[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _replaced_names(model: nn.Module) -> frozenset[str]:
    """The parameters of modules in whose place peft runs a copy."""
    around = [(name, m) for name, m in model.named_modules() if hasattr(m, "original_module") and _has_copy(m)]
    return frozenset(
        f"{name}.original_module.{n}" for name, m in around for n, _ in m.original_module.named_parameters()
    )


def _has_copy(module: Any) -> bool:
    copies = getattr(module, "modules_to_save", ())
    return any(adapter in copies for adapter in getattr(module, "active_adapters", ()))


def find_low_rank(model: nn.Module) -> dict[str, LowRank]:
    """Layer → its adapter, of those that have one of low rank."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = ((name, _low_rank_of(name, layer, names)) for name, layer in adapted_layers(model))
    return {name: adapter for name, adapter in found if adapter is not None}


def _low_rank_of(name: str, layer: Any, names: dict[int, str]) -> LowRank | None:
    """A layer's adapter, if it has one of low rank, and W + scale·B·A is one matrix.

    It is not where channels of a convolution go by groups, nor where several weights are in one layer, as in attention.
    """
    active = [adapter for adapter in layer.active_adapters if adapter in getattr(layer, "lora_A", ())]
    base = layer.get_base_layer()
    if not active or id(getattr(base, "weight", None)) not in names or getattr(base, "groups", 1) > 1:
        return None
    if len(active) > 1:
        raise UsageError(
            f"the layer '{name}' has several adapters at once, {', '.join(active)}: leave one of them active"
        )
    chosen = active[0]
    magnitudes = getattr(layer, "lora_magnitude_vector", {})
    return LowRank(
        a=names[id(layer.lora_A[chosen].weight)],
        b=names[id(layer.lora_B[chosen].weight)],
        weight=names[id(base.weight)],
        scale=float(layer.scaling[chosen]),
        transposed=bool(getattr(layer, "fan_in_fan_out", False)),
        magnitude=names[id(magnitudes[chosen].weight)] if chosen in magnitudes else None,
    )
