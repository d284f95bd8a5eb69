"""Whether gradients reach all of a network: their size stratum by stratum, and units that are never active."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedstrata.core.task import Task
from fedstrata.core.tensors import whole_norm
from fedstrata.core.types import Stratum
from fedstrata.data.examples import TensorExamples
from fedstrata.probes.measures.gradients import client_gradients
from fedstrata.probes.measures.reading import device_of, scratch_copy
from fedstrata.tasks.classification import CLASSIFICATION
from fedstrata.techniques.feature_gaussians import channel_axis

_RECTIFIERS = ("relu", "relu_", "hardtanh", "hardtanh_")
"""Operations that put out zero, and pass no gradient on, where they are given less."""


def relative_gradients(
    model: nn.Module, strata: Sequence[Stratum], inputs: Tensor, targets: Tensor, task: Task = CLASSIFICATION
) -> dict[str, float]:
    """Stratum name → ‖∇_L F‖/‖w_L‖: by which share of itself a step of length 1 would change it.

    The gradient is of the mean loss over all examples, in evaluation mode; of what is frozen neither it nor the weights
    count. Strata whose weights are all zero are left out, as are idle and frozen ones.
    """
    (gradient,) = client_gradients(model, [TensorExamples(inputs, targets)], task=task)
    params = dict(model.named_parameters())
    found = {}
    for stratum in (one for one in strata if not one.idle and set(one.params) <= gradient.keys()):
        names = [n for n in stratum.params if params[n].requires_grad]
        weight = float(whole_norm({n: params[n].detach() for n in names})) if names else 0.0
        if weight > 0:
            found[stratum.name] = float(whole_norm({n: gradient[n] for n in names})) / weight
    return found


def dead_units(model: nn.Module, strata: Sequence[Stratum], inputs: Tensor) -> dict[str, float]:
    """Stratum name → the share of its units whose rectifier (ReLU, ReLU6) is at zero on all examples.

    A unit is a neuron, or a channel in all places. Rectifiers belong to the stratum that ran last before them, whether
    they are modules or functions; strata without any are left out.
    """
    places = {stratum.name for stratum in strata if stratum.name}
    with scratch_copy(model) as scratch, torch.no_grad():
        watch = _Rectifiers()
        with _follow(scratch, places, watch), watch:
            scratch(inputs.to(device_of(scratch)))
    return {name: 1 - float(torch.cat(active).double().mean()) for name, active in watch.active.items()}


class _Rectifiers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which units of every rectifier were active, by the stratum that ran last."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: str | None = None
        self.active: dict[str, list[Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.place is not None and func.overloadpacket.__name__ in _RECTIFIERS and out.dim() > 1:
            rows = out.movedim(channel_axis(out.dim()), -1)
            self.active.setdefault(self.place, []).append((rows > 0).reshape(-1, rows.shape[-1]).any(0).cpu())
        return out


@contextmanager
def _follow(model: nn.Module, places: set[str], watch: _Rectifiers) -> Iterator[None]:
    """Inside, the watch knows which stratum ran last."""

    def note(place: str, *_: Any) -> None:
        watch.place = place

    named = [(name, module) for name, module in model.named_modules() if name in places]
    hooks: list[Callable[[], None]] = [m.register_forward_hook(partial(note, name)).remove for name, m in named]
    try:
        yield
    finally:
        for remove in hooks:
            remove()
