"""Which activations may overwrite what they are given: memory that is used again is in the cache, and needs no other.

A ReLU after a convolution or a norm layer may, since neither needs its output for its gradient; the results have the
same bits. But whoever looks at that output would see it changed. So the modules work in place only while somebody who
knows that nobody looks lets them, by their attribute `inplace`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from torch import nn

from fedstrata.models.layouts import has_own_hooks, is_foreign
from fedstrata.models.zoo.layers import Block

FRESH = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
"""Layers whose output is new memory that their gradient does not need."""


def find_in_place(model: nn.Module) -> tuple[nn.ReLU | Block, ...]:
    """The modules that may work in place while nobody looks; none where somebody's own code or hook might look."""
    if is_foreign(model) or has_own_hooks(model):
        return ()
    uses = Counter(id(child) for module in model.modules() for child in module._modules.values())
    found: list[nn.ReLU | Block] = [m for m in model.modules() if isinstance(m, Block)]
    for sequence in model.modules():
        if type(sequence) is nn.Sequential:
            found += [b for a, b in pairwise(sequence) if type(b) is nn.ReLU and type(a) in FRESH and uses[id(b)] == 1]
    return tuple(m for m in found if not m.inplace)


@contextmanager
def work_in_place(modules: Sequence[nn.ReLU | Block]) -> Iterator[None]:
    """Inside, the modules overwrite what they are given."""
    try:
        for module in modules:
            vars(module)["inplace"] = True  # a tenth of the time that a module takes to set it
        yield
    finally:
        for module in modules:
            vars(module)["inplace"] = False
