"""A model with adapters as files that others read: an adapter directory of `peft`'s, and the merged model.

Nothing is pickled: weights are written as safetensors, settings as JSON.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from fedstrata.core.hugging_face import reading
from fedstrata.errors import UsageError
from fedstrata.models.adapted import adapted_layers, base_names

_PREFIX = "base_model.model."
TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "LMHeadModel": "CAUSAL_LM",
    "ForCausalLM": "CAUSAL_LM",
}
"""How a class of Hugging Face's ends → what peft calls its task."""


def merge_adapters(model: nn.Module) -> nn.Module:
    """A copy of a model with its adapters added to the layers beneath, and without them."""
    merged = copy.deepcopy(model)
    for name, layer in list(adapted_layers(merged)):
        layer.merge(safe_merge=True)
        parent, _, own = name.rpartition(".")
        setattr(merged.get_submodule(parent), own, layer.get_base_layer())
    vars(merged).pop("peft_config", None)
    return merged.requires_grad_(True)


def write_model(model: nn.Module, folder: Path) -> None:
    """Write a model's weights; of a model of Hugging Face's also its configuration, so that it can be loaded."""
    folder.mkdir(parents=True)
    save: Any = getattr(model, "save_pretrained", None)
    if save is not None:
        with reading("export", folder):
            save(folder)
        return
    shared = {n: t.detach().contiguous().clone() for n, t in model.state_dict().items()}
    save_file(shared, folder / "model.safetensors", {"format": "pt"})
    config: Any = getattr(model, "config", None)  # of an encoder of Hugging Face's inside
    if config is not None and hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)


def write_adapter(model: Any, folder: Path) -> None:
    """Write adapters, and what trained beside them, as a directory that `peft.PeftModel.from_pretrained` loads.

    Raises:
        UsageError: if the model has none that are peft's.
    """
    kept = getattr(model, "peft_config", {})
    if len(kept) != 1:
        raise UsageError("there are no adapters to export")
    ((name, config),) = kept.items()
    config = copy.deepcopy(config)
    beside = sorted(set(_trained_modules(model)))
    config.modules_to_save = beside or None
    config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
    config.task_type = next((task for end, task in TASKS.items() if type(model).__name__.endswith(end)), None)
    config.inference_mode = True
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_file(_adapter_tensors(model, name, beside), folder / "adapter_model.safetensors", {"format": "pt"})


def _trained_modules(model: nn.Module) -> Iterator[str]:
    """The modules that train beside the adapters."""
    inside = tuple(f"{name}." for name, _ in adapted_layers(model))
    frozen = base_names(model)
    for name, _ in model.named_parameters():
        if name not in frozen and not name.startswith(inside):
            yield name.rpartition(".")[0]


def _adapter_tensors(model: nn.Module, adapter: str, beside: list[str]) -> dict[str, Tensor]:
    """What is no part of the frozen base, under peft's names; running statistics of what trains among them."""
    inside = tuple(f"{name}." for name, _ in adapted_layers(model))
    frozen, whole = base_names(model), tuple(f"{name}." for name in beside)
    found = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(whole) or (name.startswith(inside) and name not in frozen and ".base_layer." not in name):
            found[_PREFIX + name.replace(f".{adapter}", "")] = tensor.detach().contiguous().clone()
    return found
