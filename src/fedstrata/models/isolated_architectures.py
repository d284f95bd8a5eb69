"""Architectures side by side: each under a name of its own, so that groups of clients share nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fedstrata.models.copying import copy_model
from fedstrata.models.inputs import keep_hooks_apart
from fedstrata.models.stages import is_plain_sequential

ArchOf = Callable[[int], str]


class IsolatedArchitectures(nn.Module):
    """Several models in one, of which one answers."""

    def __init__(self, models: Mapping[str, nn.Module], main: str) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)
        self.main = main

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the main model answers."""
        return self.get_submodule(self.main)(*args, **kwargs)


def isolate_architectures(
    models: Mapping[str, nn.Module], arch_of: ArchOf, clients: int
) -> tuple[dict[str, nn.Module], ArchOf]:
    """The architectures that clients have, each as a stage of its own name, and a whole that holds them all.

    What is averaged by name is then averaged inside each group. The whole answers with its largest branch. Where all
    clients have the same, there is nothing to keep apart.
    """
    used = [arch for arch in models if arch in {arch_of(client) for client in range(clients)}]
    if len(used) < 2:
        return dict(models), arch_of
    names = {arch: f"{_word(arch)}_{at}" for at, arch in enumerate(used)}
    main = max(used, key=lambda arch: sum(p.numel() for p in models[arch].parameters()))
    own = {arch: _branch(names[arch], models[arch]) for arch in used}
    whole = IsolatedArchitectures({names[arch]: models[arch] for arch in used}, names[main])
    own_name = next(name for name in ("whole", *(f"whole-{at}" for at in range(2, len(used) + 2))) if name not in used)
    renamed = {arch: arch or own_name for arch in used}
    return {"": whole, **{renamed[arch]: branch for arch, branch in own.items()}}, lambda client: renamed[
        arch_of(client)
    ]


def _branch(name: str, model: nn.Module) -> nn.Module:
    """A model as the only part of another; stages stay stages, and whatever else takes what it takes by itself."""
    if is_plain_sequential(model):
        branch = nn.Sequential()
        branch.add_module(name, model)
        return branch
    return IsolatedArchitectures({name: model}, name)


def _word(arch: str) -> str:
    """An architecture's name without what a module's name cannot have."""
    return re.sub(r"\W+", "_", arch).strip("_") or "whole"


def copy_of(models: Mapping[str, nn.Module], arch: str) -> nn.Module:
    """A copy of the model of an architecture."""
    keep_hooks_apart(models[arch])
    return copy_model(models[arch])
