"""The memory layout of convolutions: channels last where that is proven safe, contiguous everywhere else.

With the channels last, convolutions are faster on CPUs. But oneDNN's kernel for the weight gradient of a 1 × 1
convolution with a stride writes beyond its scratch memory there, on processors without AVX-512, unless the number of
input channels is a whole number of vector registers. It costs a crash or, worse, nothing that one would notice.
benchmarks/convolution_layouts.py sweeps the geometries, and docs/results/convolution-layouts.md has what it found.

So the layout is chosen layer by layer, by `allows_channels_last`, on every processor alike. What it does not allow gets
contiguous operands however they arrive: a model's own code may lay out its activations as it likes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.overrides import TorchFunctionMode

SWEPT = {torch.float32}
"""Types that the sweep was made with: kernels for others are others."""
REGISTER = 8
"""float32 numbers in a vector register of AVX2, whose kernels are at fault."""


def allows_channels_last(kernel: Sequence[int], stride: Sequence[int], channels: int, transposed: bool = False) -> bool:
    """True if a convolution of this form may have its channels last.

    Args:
        kernel: lengths of the kernel's axes.
        stride: of each axis.
        channels: input channels per group.
        transposed: of a transposed convolution; none of them is laid out so, few were swept.
    """
    pointwise = all(length == 1 for length in kernel)
    return not transposed and not (pointwise and max(stride) > 1 and channels % REGISTER)


def lay_out(model: nn.Module, channels_last: bool) -> frozenset[str]:
    """Choose the layout of a model's convolutions, and see to it that those which need contiguous inputs get them.

    Args:
        model: gets hooks, which its copies have, too.
        channels_last: whether that layout is wanted at all.

    Returns:
        The names of the weights that are to have their channels last; none if the model has no use for it.
    """
    convolutions = [m for m in model.modules() if isinstance(m, _ConvNd)]
    others = [m for m in convolutions if not _module_allows(m)]
    for convolution in others:
        if not needs_contiguous(convolution):
            convolution.register_forward_pre_hook(_contiguous_inputs)
    for module in model.modules():
        if _is_foreign(module) and _enter not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave, always_call=True)
    if not channels_last:
        return frozenset()
    plain = {id(m._parameters.get("weight")) for m in others}  # a weight may be shared, or computed from others
    turned = {id(m._parameters.get("weight")) for m in convolutions if isinstance(m, nn.Conv2d)} - plain
    for module in model.modules() if turned else ():
        if type(module) in _FORGETFUL and _keep_gradient_layout not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_keep_gradient_layout)
    return frozenset(n for n, p in model.named_parameters() if id(p) in turned)


def is_foreign(model: nn.Module) -> bool:
    """True if a model has modules that neither torch nor we have written."""
    return any(map(_is_foreign, model.modules()))


def _is_foreign(module: nn.Module) -> bool:
    return not type(module).__module__.startswith(("torch.nn.", "fedstrata."))


def _module_allows(module: _ConvNd) -> bool:
    transposed = isinstance(module, _ConvTransposeNd)
    channels = module.in_channels // module.groups
    form = allows_channels_last(module.kernel_size, module.stride, channels, transposed)
    return form and module.weight.dtype in SWEPT


def _contiguous_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook."""
    return tuple(contiguous(x) if isinstance(x, Tensor) else x for x in inputs)


def needs_contiguous(module: nn.Module) -> bool:
    """True if a module was given the hook that lays out its inputs in the usual way."""
    return _contiguous_inputs in module._forward_pre_hooks.values()


def has_own_hooks(model: nn.Module) -> bool:
    """True if modules have hooks other than those that look at the inputs' layout and at nothing else."""
    hooks = (h for m in model.modules() for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values()))
    return any(hook not in (_contiguous_inputs, _keep_gradient_layout) for hook in hooks)


_FORGETFUL: dict[type[nn.Module], str] = {
    nn.Flatten: "MaxPool2DWithIndicesBackward0",
    nn.AdaptiveAvgPool2d: "ReluBackward0",
}
"""Layers whose gradient is contiguous whatever their input was, and what is slow before them if it is: torch's max-pool
makes three copies then, and a ReLU goes number by number. Both round nothing, so the layout changes no bits."""


def _keep_gradient_layout(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A hook: the gradient of an input with its channels last will have its channels last."""
    x = inputs[0]
    if not isinstance(x, Tensor) or x.dim() != 4 or x.grad_fn is None or torch.compiler.is_compiling():
        return
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    if last and x.grad_fn.name() == _FORGETFUL[type(module)]:
        x.register_hook(_channels_last)  # type: ignore[no-untyped-call]


def _channels_last(gradient: Tensor) -> Tensor:
    return gradient.contiguous(memory_format=torch.channels_last)


def contiguous(x: Tensor) -> Tensor:
    """The tensor in the usual layout, also by its strides: those of axes of length 1 count for convolutions."""
    return x if x.stride() == _contiguous_strides(x.shape) else x.clone(memory_format=torch.contiguous_format)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides))


_PLAIN = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_EITHER = (torch.convolution, torch._convolution)
_ALL = frozenset((*_PLAIN, *_TRANSPOSED, *_EITHER))
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "transposed")


class _Guard(TorchFunctionMode):
    """While it is on, convolutions that a model's own code calls get the operands that they need."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _ALL:
            args, kwargs = _operands(function, args, kwargs)
        return function(*args, **kwargs)


def _operands(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A convolution's arguments, its input and weight contiguous unless its form allows another layout."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    x, weight, stride = given.get("input"), given.get("weight"), given.get("stride", 1)
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return args, kwargs  # torch will say what is wrong
    strides = stride if isinstance(stride, Sequence) else (stride,)
    transposed = function in _TRANSPOSED or (function in _EITHER and bool(given.get("transposed")))
    if allows_channels_last(weight.shape[2:], strides, weight.shape[1], transposed) and weight.dtype in SWEPT:
        return args, kwargs
    swap = {id(t): contiguous(t) for t in (x, weight)}
    fixed = tuple(swap.get(id(a), a) for a in args)
    return fixed, {n: swap.get(id(a), a) for n, a in kwargs.items()}


class _Thread(threading.local):
    """How deep this thread is in foreign modules, and the guard that is up meanwhile."""

    def __init__(self) -> None:
        self.depth, self.up = 0, ExitStack()


_thread = _Thread()


def _enter(module: nn.Module, inputs: object) -> None:
    """A hook of modules that neither torch nor we have written: from here on their convolutions are guarded."""
    if not torch.compiler.is_compiling():  # the whole is guarded then, from outside
        _thread.depth += 1
        if _thread.depth == 1:
            _thread.up.enter_context(_Guard())


def _leave(module: nn.Module, inputs: object, outputs: object) -> None:
    """The hook of their end."""
    if not torch.compiler.is_compiling():
        _thread.depth -= 1
        if not _thread.depth:
            release_guard()


def release_guard() -> None:
    """Take the guard down; an interrupt in the middle of a model leaves it up."""
    _thread.depth = 0
    _thread.up.close()


def guard_convolutions(foreign: bool) -> AbstractContextManager[object]:
    """Inside, convolutions that are called as functions are guarded, for a model whose own hooks cannot see to it."""
    guard: AbstractContextManager[object] = _Guard()
    return guard if foreign else nullcontext()
