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

_ATEN = torch.ops.aten


@contextmanager
def cpu_layouts() -> Iterator[None]:
    """Inside, convolutions and norm layers on the device meta make the tensors that they make on the CPU."""
    with _Kernels(), _GroupNorms():
        yield


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, convolutions and batch norms put out the layout that they do on the CPU: some layers copy others.

    Of batch norms torch would work out on meta every step of the formula, which is most of a step's time there.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `FlopCount`: torch would import its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.native_batch_norm.default and _is_meta(args[0]):
            return _batch_norm(*args, **kwargs)
        if func is _ATEN.native_batch_norm_backward.default and _is_meta(args[0]):
            return _batch_norm_backward(*args, **kwargs)
        out = func(*args, **kwargs)
        return _lay_out(out, args[:2]) if func is _ATEN.convolution.default and out.dim() == 4 else out


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def _lay_out(out: Tensor, given: Sequence[Tensor]) -> Tensor:
    """A convolution's output in the layout that its input and its weight ask for."""
    if torch.channels_last not in map(suggest_memory_format, given):
        return out
    _, c, h, w = out.shape
    return out.as_strided(out.shape, (c * h * w, 1, c * w, c))


def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: float) -> Any:
    """(output, mean, deviation) by the shapes alone; not in training, when a gradient needs the running ones."""
    size = x.shape[1] if training else 0
    return torch.empty_like(x), x.new_empty(size), x.new_empty(size)


def _batch_norm_backward(grad: Tensor, x: Tensor, *rest: Any) -> Any:
    """The gradients that are asked for of (input, weight, bias)."""
    made = torch.empty_like(x), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
    return tuple(tensor if asked else None for tensor, asked in zip(made, rest[-1], strict=True))


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
    if not _is_meta(x):
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
