"""What a model takes and gives: inputs of several parts by name or by position, outputs in whatever they come in.

A model's own code stays. Two hooks unpack what goes in, and take out of an object, a dict or a tuple what comes out; a
model that takes one tensor and gives one has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from fedstrata.core.parts import Parts
from fedstrata.models.passes import preserve_model


def fit_model(model: nn.Module, sample: Any) -> Any:
    """Let a model take such inputs as one thing, and give one tensor: what it gives for them in evaluation.

    Raises:
        Exception: whatever the model raises on these inputs.
    """
    if isinstance(sample, Parts):
        model.register_forward_pre_hook(_unpack_inputs, with_kwargs=True)
    with preserve_model(model):
        outputs = model(sample)
    if not isinstance(outputs, Tensor):
        model.register_forward_hook(_take_outputs)
    return outputs_of(outputs)


def fit_training(model: nn.Module, sample: Any) -> Any:
    """The same in training, where a model may give more: what it gives; None if it cannot run on so few rows."""
    try:
        with preserve_model(model, training=True):
            outputs = model(sample)
    except Exception:  # training will tell, if it does not come from the size of the batch
        return None
    if not isinstance(outputs, Tensor) and _take_outputs not in model._forward_hooks.values():
        model.register_forward_hook(_take_outputs)
    return outputs_of(outputs)


def release_model(model: nn.Module) -> nn.Module:
    """The model without what `fit_model` has added."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in (_unpack_inputs, _take_outputs)]:
            del hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)
    return model


def keep_hooks_apart(model: nn.Module) -> None:
    """Let hooks that are added from now on have other numbers than those of a model from another process.

    torch counts hooks process by process, and one with a number that is taken would take the other's place.
    """
    taken = [key for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks) for key in hooks]
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(key + 1 for key in taken)])


def _unpack_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    if len(args) != 1 or not isinstance(args[0], Parts):
        return None
    parts = args[0]
    return ((), parts.tensors) if parts.named else (tuple(parts.tensors.values()), kwargs)


def _take_outputs(module: nn.Module, args: Any, outputs: Any) -> Any:
    return outputs_of(outputs)


def outputs_of(outputs: Any) -> Any:
    """The tensor among a model's outputs: its `logits`, or the first of several; a tensor is one itself."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    if isinstance(getattr(outputs, "logits", None), Tensor):
        return outputs.logits
    if isinstance(outputs, tuple | list) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    return outputs


def _flatten(parts: Parts) -> tuple[list[Any], Any]:
    return list(parts.tensors.values()), (tuple(parts.tensors), parts.named)


def _unflatten(tensors: Any, context: Any) -> Parts:
    return Parts(dict(zip(context[0], tensors, strict=True)), context[1])


pytree.register_pytree_node(Parts, _flatten, _unflatten, serialized_type_name="fedstrata.core.parts.Parts")
