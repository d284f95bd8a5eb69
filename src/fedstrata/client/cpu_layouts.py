"""Layers on torch's device meta as they are on the CPU, where some keep the layout that they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def cpu_layouts() -> Iterator[None]:
    """Inside, convolutions and group norms on the device meta make the tensors that they make on the CPU."""
    with _Convolutions(), _GroupNorms():
        yield


class _Convolutions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, convolutions put out the layout that they do on the CPU: some layers copy others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `FlopCount`: torch would import its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.convolution.default or out.dim() != 4:
            return out
        if torch.channels_last not in map(suggest_memory_format, args[:2]):
            return out
        _, c, h, w = out.shape
        return out.as_strided(out.shape, (c * h * w, 1, c * w, c))


class _GroupNorms(TorchFunctionMode):
    """Inside, group norms copy nothing: anywhere but on the CPU torch lays out their inputs and gradients anew."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (_group_norm if func is F.group_norm else func)(*args, **(kwargs or {}))


def _group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """`F.group_norm` by the shapes alone."""
    if x.device.type != "meta":
        return F.group_norm(x, groups, weight, bias, eps)
    x = x.contiguous(memory_format=suggest_memory_format(x))
    out: Tensor = _ShapesOfGroupNorm.apply(x, groups, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _ShapesOfGroupNorm(torch.autograd.Function):
    """What the CPU's kernels of a group norm make and keep: as many numbers in the same layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        mean, deviation = x.new_empty(len(x), groups), x.new_empty(len(x), groups)
        ctx.save_for_backward(x, weight, mean, deviation)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *_ = ctx.saved_tensors
        first, _, *rest = ctx.needs_input_grad
        own = [x.new_empty(x.shape[1]) if needed else None for needed in rest]
        return torch.empty_like(x) if first else None, None, *own
