"""Norm layers and their running statistics: which there are, and how a policy has them evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedstrata.core.technique import Buffers
from fedstrata.core.tensors import Tensors, clone


def normalises_batches(model: nn.Module) -> bool:
    """True if a batch of one example cannot be used."""
    return any(isinstance(m, _BatchNorm) for m in model.modules())


def running_statistics(model: nn.Module) -> Tensors:
    """A model's buffers by name, without those that its own state_dict leaves out (constants, caches)."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def constants(model: nn.Module) -> tuple[Tensors, Tensors]:
    """(the buffers that state_dict leaves out, their first values): every visit begins with these."""
    kept = model.state_dict().keys()
    live = {name: buffer for name, buffer in model.named_buffers() if name not in kept}
    return live, clone(live)


@contextmanager
def evaluation_mode(model: nn.Module, policy: Buffers, examples: int) -> Iterator[None]:
    """The model in evaluation mode, under the policy for running statistics.

    Under `drop` there are none: norm layers use the batch at hand, unless there is but one example.
    """
    model.eval()
    norms = [m for m in model.modules() if isinstance(m, _NormBase)] if policy == "drop" and examples > 1 else []
    before = [m.momentum for m in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum


def without_statistics(model: nn.Module) -> nn.Module:
    """The model with norm layers that always use the batch at hand: what the policy `drop` trains and evaluates."""
    for norm in model.modules():
        if isinstance(norm, _NormBase):
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    return model
