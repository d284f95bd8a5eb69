"""Modules that are imported when they are first used, torch above all.

`import torch` takes two seconds, and much of what the command does needs none of it: help, lists, reports and
diagnoses of stored runs. So modules that hold names and settings (whatever stands in a table, and what it imports) say

    from fedstrata.core.lazy import nn, torch

and use both as always inside functions; types that only annotations name are imported under `TYPE_CHECKING`. Modules
that only compute import torch itself. `tests/cli/test_start.py` fails when torch has crept in.
"""

from __future__ import annotations

import importlib
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any


class Lazy(ModuleType):
    """A module of that name, which is imported when any of its attributes is first asked for."""

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self.__name__)
        vars(self).update(vars(module))
        vars(self)["__getattr__"] = partial(getattr, module)  # what the module gets later
        self.__class__ = ModuleType  # type: ignore[assignment]  # for attributes as quick as the module's own
        return getattr(module, name)


if TYPE_CHECKING:
    import numpy as numpy
    import torch as torch
    from torch import nn as nn
    from torch.nn import functional as functional
else:
    numpy, torch, nn, functional = map(Lazy, ("numpy", "torch", "torch.nn", "torch.nn.functional"))
