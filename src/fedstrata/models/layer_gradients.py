"""Forward and backward passes of models whose layers' gradients are known here, without torch's tape.

Between the kernels, a step of a small model spends a sixth of its time in calls of modules and in autograd's engine.
Here the same kernels are called in the same order, so every bit is the same, but for less around them. A ReLU
overwrites what it is given, and comes after a max-pool that follows it: of what does not fall, the maximum is the same,
and so is its gradient, for a quarter of the numbers.

What a layer keeps for its gradient is what this needs: of a frozen convolution or linear map no input, of a pooling
its form. It is gone as soon as the gradient has passed.

It is for steps at which nobody looks: no hook of a module is run, and nothing can be tapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.models.layouts import contiguous, has_own_hooks, is_foreign, needs_contiguous
from fedstrata.models.zoo.layers import BasicBlock, Block, Bottleneck

aten = torch.ops.aten


class Gradients(dict[int, Tensor]):
    """`id` of a parameter → its gradient."""

    def take_product(self, weight: Tensor, left: Tensor, right: Tensor) -> None:
        """Take leftᵀ·right as the gradient of a matrix that this pass has no more use for."""
        self[id(weight)] = left.t().mm(right)


Back = Callable[[Tensor, Gradients], Tensor | None]
"""Takes the gradient of a layer's output, notes those of its parameters, and gives that of its input if wanted."""
Layer = Callable[[Tensor, bool], tuple[Tensor, Back | None]]
"""(input, whether its gradient is wanted) → (output, what passes gradients on; None where nobody wants any)."""


def compose_layers(model: nn.Module) -> Layer | None:
    """A model as one layer; None if one of its layers is not known, or if somebody's own code or hook might look."""
    if is_foreign(model) or has_own_hooks(model) or _has_backward_hooks(model):
        return None
    layers = _unfold(model)
    used = [id(p) for layer in layers for m in layer.modules() for p in m._parameters.values() if p is not None]
    if len(used) != len(set(used)):  # autograd decides in which order the gradients of a shared weight are added
        return None
    kinds = [type(layer) for layer in layers]
    if nn.Linear in kinds and nn.Flatten not in kinds[: kinds.index(nn.Linear)]:  # of matrices alone
        return None
    return _compose(layers)


def _has_backward_hooks(model: nn.Module) -> bool:
    """True if somebody is told of gradients, or has put another `forward` in a module's place."""
    modules = tuple(model.modules())
    told = any(m._backward_hooks or m._backward_pre_hooks or "forward" in vars(m) for m in modules)
    return told or any(p._backward_hooks for p in model.parameters())


def _unfold(module: nn.Module) -> list[nn.Module]:
    """A model's layers in the order in which they run."""
    if type(module) is not nn.Sequential:
        return [] if type(module) is nn.Identity else [module]
    return [layer for child in module for layer in _unfold(child)]


def _compose(modules: Sequence[nn.Module]) -> Layer | None:
    """Layers one after the other."""
    modules = _pool_first(modules)
    layers: list[Layer] = []
    for before, module in zip((None, *modules), modules, strict=False):
        build = _KNOWN.get(type(module))
        layer = None if build is None else build(module, type(before) in _FRESH)
        if layer is None:
            return None
        layers.append(layer)
    return _Sequence(layers)


def _pool_first(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers, every max-pool before the ReLU that it follows, if that was given new memory."""
    found = list(modules)
    for at in range(1, len(found) - 1):
        relu, pool = found[at : at + 2]
        if type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and type(found[at - 1]) in _FRESH:
            found[at : at + 2] = [pool, relu]
    return found


class _Sequence:
    """Layers one after the other."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers

    def __call__(self, x: Tensor, wanted: bool) -> tuple[Tensor, Back | None]:
        backs: list[Back] = []
        for layer in self._layers:
            x, back = layer(x, wanted or bool(backs))
            if back is not None:
                backs.append(back)

        def pass_back(gradient: Tensor, gradients: Gradients) -> Tensor | None:
            g: Tensor | None = gradient
            while backs:  # each with all that it keeps is gone when it has run
                assert g is not None
                g = backs.pop()(g, gradients)
            return g

        return x, pass_back if backs else None


def _trained(*params: Tensor | None) -> list[bool]:
    return [p is not None and p.requires_grad for p in params]


def _note(gradients: Gradients, param: Tensor | None, gradient: Tensor | None) -> None:
    if gradient is not None and param is not None:
        gradients[id(param)] = gradient


def _convolution(module: nn.Module, fresh: bool) -> Layer | None:
    assert isinstance(module, nn.Conv2d)
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return None
    stride, padding, dilation = list(module.stride), list(module.padding), list(module.dilation)
    groups, plain = module.groups, needs_contiguous(module)

    def run(x: Tensor, wanted: bool) -> tuple[Tensor, Back | None]:
        weight, bias = module.weight, module.bias
        x = contiguous(x) if plain else x
        out = torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
        mask = [wanted, *_trained(weight, bias)]
        kept, form = (x, _NO_FORM) if mask[1] else (None, _form_of(x))

        def back(g: Tensor, gradients: Gradients) -> Tensor | None:
            sizes = None if bias is None else [len(bias)]
            below = kept if kept is not None else g.new_empty_strided(*form)  # nobody reads its numbers
            found = aten.convolution_backward(
                g, below, weight, sizes, stride, padding, dilation, False, [0, 0], groups, mask
            )
            for wants, param, gradient in zip(mask[1:], (weight, bias), found[1:], strict=True):
                _note(gradients, param, gradient if wants else None)
            return found[0] if wanted else None

        return out, back if any(mask) else None

    return run


def _linear(module: nn.Module, fresh: bool) -> Layer:
    assert isinstance(module, nn.Linear)

    def run(x: Tensor, wanted: bool) -> tuple[Tensor, Back | None]:
        weight, bias = module.weight, module.bias
        out = F.linear(x, weight, bias)
        trains, shifts = _trained(weight, bias)
        kept = x if trains else None

        def back(g: Tensor, gradients: Gradients) -> Tensor | None:
            below = g.mm(weight) if wanted else None
            if shifts:
                gradients[id(bias)] = g.sum(0)
            if kept is not None:
                gradients.take_product(weight, g, kept)
            return below

        return out, back if wanted or trains or shifts else None

    return run


def _batch_norm(module: nn.Module, fresh: bool) -> Layer:
    assert isinstance(module, nn.BatchNorm2d)

    def run(x: Tensor, wanted: bool) -> tuple[Tensor, Back | None]:
        weight, bias = module.weight, module.bias
        mean, var, batch, factor = _open_statistics(module, x)
        out, centre, scale = torch.native_batch_norm(x, weight, bias, mean, var, batch, factor, module.eps)
        mask = [wanted, *_trained(weight, bias)]

        def back(g: Tensor, gradients: Gradients) -> Tensor | None:
            found = aten.native_batch_norm_backward(g, x, weight, mean, var, centre, scale, batch, module.eps, mask)
            for wants, param, gradient in zip(mask[1:], (weight, bias), found[1:], strict=True):
                _note(gradients, param, gradient if wants else None)
            return found[0] if wanted else None

        return out, back if any(mask) else None

    return run


def _open_statistics(norm: nn.BatchNorm2d, x: Tensor) -> tuple[Tensor | None, Tensor | None, bool, float]:
    """(running mean, running variance, whether the batch's own are used, how far those running move), as torch does."""
    factor = 0.0 if norm.momentum is None else norm.momentum
    if norm.training and norm.track_running_stats and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            factor = 1.0 / float(norm.num_batches_tracked)
    batch = norm.training or (norm.running_mean is None and norm.running_var is None)
    if batch and x.numel() == x.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
    held = not norm.training or norm.track_running_stats
    return norm.running_mean if held else None, norm.running_var if held else None, batch, factor


def _relu(module: nn.Module, fresh: bool) -> Layer:
    def run(x: Tensor, wanted: bool) -> tuple[Tensor, Back | None]:
        out = x.relu_() if fresh else x.relu()
        return out, (lambda g, gradients: aten.threshold_backward.default(g, out, 0)) if wanted else None

    return run


def _max_pool(module: nn.Module, fresh: bool) -> Layer | None:
    assert isinstance(module, nn.MaxPool2d)
    if module.return_indices:
        return None
    given = module.kernel_size, module.stride, module.padding, module.dilation
    form = [*([n, n] if isinstance(n, int) else list(n) for n in given), module.ceil_mode]

    def run(x: Tensor, wanted: bool) -> tuple[Tensor, Back | None]:
        out, places = F.max_pool2d_with_indices(x, *form)  # type: ignore[arg-type]
        below = _form_of(x)

        def back(g: Tensor, gradients: Gradients) -> Tensor:
            # The places say it all: nobody reads the numbers that were looked at.
            found: Tensor = aten.max_pool2d_with_indices_backward(g, g.new_empty_strided(*below), *form, places)
            return found

        return out, back if wanted else None

    return run


def _flatten(module: nn.Module, fresh: bool) -> Layer | None:
    assert isinstance(module, nn.Flatten)
    if (module.start_dim, module.end_dim) != (1, -1):
        return None

    def run(x: Tensor, wanted: bool) -> tuple[Tensor, Back | None]:
        shape, layout = x.shape, _layout_of(x)
        back = lambda g, gradients: g.reshape(shape).contiguous(memory_format=layout)  # noqa: E731
        return x.flatten(1), back if wanted else None

    return run


def _average(module: nn.Module, fresh: bool) -> Layer | None:
    assert isinstance(module, nn.AdaptiveAvgPool2d)
    if module.output_size not in (1, (1, 1)):
        return None

    def run(x: Tensor, wanted: bool) -> tuple[Tensor, Back | None]:
        shape, pixels, layout = x.shape, x.shape[2] * x.shape[3], _layout_of(x)

        def back(g: Tensor, gradients: Gradients) -> Tensor:
            return (g / pixels).expand(shape).contiguous(memory_format=layout)

        return F.adaptive_avg_pool2d(x, 1), back if wanted else None

    return run


_Form = tuple[tuple[int, ...], tuple[int, ...]]
_NO_FORM: _Form = ((), ())


def _form_of(x: Tensor) -> _Form:
    """Shape and strides: what a kernel needs of a tensor whose numbers it does not read."""
    return tuple(x.shape), x.stride()


def _layout_of(x: Tensor) -> torch.memory_format:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _block(module: nn.Module, fresh: bool) -> Layer | None:
    assert isinstance(module, Block)
    layers = [layer for part in module.body_layers() for layer in _unfold(part)]
    body = _compose(layers) if type(layers[-1]) in _FRESH else None  # the sum and the ReLU overwrite what it gives
    link = None if module.shortcut is None else _compose(_unfold(module.shortcut))
    if body is None or (module.shortcut is not None and link is None):
        return None

    def run(x: Tensor, wanted: bool) -> tuple[Tensor, Back | None]:
        out, body_back = body(x, wanted)
        link_back: Back | None = None
        if link is not None:
            beside, link_back = link(x, wanted)
            out.add_(beside)
        out.relu_()

        def back(g: Tensor, gradients: Gradients) -> Tensor | None:
            g = aten.threshold_backward.default(g, out, 0)
            found = None if body_back is None else body_back(g, gradients)
            if link is None or not wanted:
                if link_back is not None:
                    link_back(g, gradients)
                return found
            other = g if link_back is None else link_back(g, gradients)
            assert other is not None
            return other if found is None else found.add_(other)

        return out, back if wanted or body_back is not None or link_back is not None else None

    return run


_KNOWN: dict[type[nn.Module], Callable[[nn.Module, bool], Layer | None]] = {
    nn.Conv2d: _convolution,
    nn.Linear: _linear,
    nn.BatchNorm2d: _batch_norm,
    nn.ReLU: _relu,
    nn.MaxPool2d: _max_pool,
    nn.Flatten: _flatten,
    nn.AdaptiveAvgPool2d: _average,
    BasicBlock: _block,
    Bottleneck: _block,
}
_FRESH = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.MaxPool2d)
"""Layers whose output is new memory that their gradient does not need."""
