"""What operations do to the axes: one rule for each kind of operation that torch runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor

from fedstrata.models.receptive.axes import Axis, Change, Trace, carry, join_traces, places, prefix


@dataclass(frozen=True)
class Operation:
    """One operation: its arguments by name, those of its tensors that carry notes, and one of its results."""

    given: Mapping[str, Any]
    sources: Sequence[tuple[Tensor, Trace]]
    result: Tensor

    @property
    def first(self) -> tuple[Tensor, Trace]:
        """For most operations, the only source."""
        return self.sources[0]

    def carry(self, to: Callable[[int], int | None], change: Change = lambda axis, dim: axis) -> Trace:
        """All sources' notes in the result, together."""
        new = self.result.shape
        return reduce(join_traces, [carry(trace, t.shape, new, to, change) for t, trace in self.sources])

    def dims(self, name: str = "dim") -> set[int]:
        """The dimensions that an argument names; all of them where it names none."""
        ndim = self.first[0].ndim
        value = self.given[name]
        chosen = [value] if isinstance(value, int) else value or range(ndim)
        return {int(dim) % max(ndim, 1) for dim in chosen}


def _layout(step: Operation) -> Trace:
    """The elements stay in order: so do the axes."""
    return step.first[1]


def _permute(step: Operation) -> Trace:
    ndim = step.first[0].ndim
    order = [dim % ndim for dim in step.given["dims"]]
    return step.carry(order.index)


def _transpose(step: Operation) -> Trace:
    ndim = step.first[0].ndim
    one, other = (step.given.get(name, default) % ndim for name, default in (("dim0", 0), ("dim1", ndim - 1)))
    return step.carry(lambda dim: {one: other, other: one}.get(dim, dim))


def _expand(source: Tensor, trace: Trace, result: Tensor) -> Trace:
    more = result.ndim - source.ndim
    return carry(trace, source.shape, result.shape, lambda dim: dim + more)


def _select(step: Operation) -> Trace:
    (gone,) = step.dims()
    return step.carry(lambda dim: None if dim == gone else dim - (dim > gone))


def _stack(step: Operation) -> Trace:
    new = step.given["dim"] % step.result.ndim
    return step.carry(lambda dim: dim + (dim >= new))


def _slice(step: Operation) -> Trace:
    source = step.first[0]
    (cut,) = step.dims()
    begin, _, stride = slice(step.given["start"], step.given["end"], step.given["step"]).indices(source.shape[cut])
    return step.carry(lambda dim: dim, lambda axis, dim: axis.window(1, stride, -begin) if dim == cut else axis)


def _product(step: Operation) -> Trace | None:
    """A matrix product with weights mixes the axis that is summed over; one with features mixes everything."""
    if len(step.sources) > 1:
        return tuple(axis.lose_positions() for axis in step.first[1])
    source = step.first[0]
    left = source is step.given.get("mat1", step.given.get("batch1", step.given.get("self")))
    summed = source.ndim - (1 if left else 2)
    return step.carry(lambda dim: None if dim == summed else dim)


def _attention(step: Operation) -> Trace:
    return tuple(axis.lose_positions() for axis in step.first[1])


def _spatial(step: Operation, count: int, change: Change, mixes: bool = False) -> Trace:
    """Change the last `count` dimensions, numbered from 0; `mixes`: the one before them, the channels, is mixed.

    An input that nothing has touched yet but its shape is the image in the shape that arrives here.
    """
    source, trace = step.first
    first = source.ndim - count
    found = places(trace, source.shape)
    fits = all(place is not None and place[0] >= first and place[1] == 1 for place in found)
    if not fits and all(axis.is_original for axis in trace):
        trace = tuple(
            Axis(source.shape[dim], prefix(source.shape, dim), source.shape[dim]) for dim in range(first, source.ndim)
        )
    return carry(
        trace,
        source.shape,
        step.result.shape,
        lambda dim: None if mixes and dim == first - 1 else dim,
        lambda axis, dim: change(axis, dim - first) if dim >= first else axis,
    )


def _each(value: int | Sequence[int], count: int) -> list[int]:
    """One number per dimension, from one for all or from a list."""
    many = [value] if isinstance(value, int) else list(value)
    return many * count if len(many) == 1 else many


def _convolution(step: Operation) -> Trace | None:
    weight = step.given["weight"]
    if step.given["transposed"] or len(step.sources) > 1:  # the kernel itself may be made from the image
        return None
    count = weight.ndim - 2
    stride, padding, dilation = (_each(step.given[name], count) for name in ("stride", "padding", "dilation"))
    kernel = weight.shape[2:]
    return _spatial(step, count, lambda a, dim: a.window(kernel[dim], stride[dim], padding[dim], dilation[dim]), True)


def _pool(step: Operation) -> Trace:
    kernel = _each(step.given["kernel_size"], 2)
    stride = _each(step.given["stride"] or kernel, 2)
    padding, dilation = _each(step.given["padding"], 2), _each(step.given.get("dilation", 1), 2)
    return _spatial(step, 2, lambda a, dim: a.window(kernel[dim], stride[dim], padding[dim], dilation[dim]))


def _adaptive(step: Operation) -> Trace:
    """Output i of m averages the positions from ⌊i·n/m⌋ to ⌈(i + 1)·n/m⌉ − 1 of n."""
    before, after = step.first[0].shape[-2:], step.result.shape[-2:]

    def change(axis: Axis, dim: int) -> Axis:
        n, m = before[dim], after[dim]
        kernel = max(-(-(i + 1) * n // m) - i * n // m for i in range(m))
        return axis.see_all() if m == 1 else axis.window(kernel, n / m)

    return _spatial(step, 2, change)


def _pad(step: Operation) -> Trace:
    pads = step.given["pad"] if "pad" in step.given else step.given["padding"]
    before = dict(zip(range(step.result.ndim - 1, -1, -1), pads[::2], strict=False))  # the last dimension's come first
    return step.carry(lambda dim: dim, lambda axis, dim: axis.window(1, 1, before.get(dim, 0)))


def _resize(taps: int, antialias: bool = False) -> Callable[[Operation], Trace]:
    """Interpolation between that many pixels, or that many times the scale where it is antialiased."""

    def rule(step: Operation) -> Trace:
        before, after = step.first[0].shape[2:], step.result.shape[2:]
        scale = [n / m for n, m in zip(before, after, strict=True)]
        reach = [taps * max(1.0, s) if antialias else taps for s in scale]
        return _spatial(step, len(scale), lambda axis, dim: axis.resize(reach[dim], scale[dim]))

    return rule


def _reduction(step: Operation) -> Trace:
    """Sums, means and the like over some dimensions."""
    source = step.first[0]
    over = step.dims() if "dim" in step.given else set(range(source.ndim))
    if step.given.get("keepdim"):
        return step.carry(lambda dim: dim, lambda axis, dim: axis.see_all() if dim in over else axis)
    return step.carry(lambda dim: None if dim in over else dim - sum(gone < dim for gone in over))


def _along(step: Operation) -> Trace | None:
    """What works along some dimensions: softmax, cumulative sums, cat, split, flip."""
    source = step.first[0]
    along = step.dims("dim" if "dim" in step.given else "dims")
    if any(source.shape[dim] != step.result.shape[dim] for dim in range(source.ndim) if dim not in along):
        return None
    return step.carry(lambda dim: dim, lambda axis, dim: axis.see_all() if dim in along else axis)


def _pointwise(step: Operation) -> Trace:
    """Activations, sums, norm layers: aligned from the last dimension on, as broadcasting does."""
    return reduce(join_traces, [_expand(source, trace, step.result) for source, trace in step.sources])


_RULES: dict[str, Callable[[Operation], Trace | None]] = {
    **dict.fromkeys(
        ("view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "alias", "detach", "embedding"), _layout
    ),
    "permute": _permute,
    "transpose": _transpose,
    "t": _transpose,
    "expand": _pointwise,
    **dict.fromkeys(("index", "grid_sampler_2d"), lambda step: None),  # positions from anywhere
    "select": _select,
    "unbind": _select,
    "stack": _stack,
    "slice": _slice,
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
    "convolution": _convolution,
    "max_pool2d_with_indices": _pool,
    "avg_pool2d": _pool,
    "_adaptive_avg_pool2d": _adaptive,
    "adaptive_max_pool2d": _adaptive,
    **dict.fromkeys(
        ("constant_pad_nd", *(f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2))), _pad
    ),
    **dict.fromkeys(
        (f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2)), _resize(1)
    ),
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d"), _resize(2)),
    "upsample_bicubic2d": _resize(4),
    "_upsample_bilinear2d_aa": _resize(2, antialias=True),
    "_upsample_bicubic2d_aa": _resize(4, antialias=True),
}
"""What operations do that their arguments' names and shapes alone do not tell."""


def rule_for(name: str, step: Operation) -> Callable[[Operation], Trace | None] | None:
    """What an operation does: by its name, or else by its arguments and shapes; None if neither tells."""
    if name in _RULES:
        return _RULES[name]
    if "scaled_dot_product" in name:
        return _attention
    if "keepdim" in step.given or not step.result.ndim:
        return _reduction
    if ("dim" in step.given or "dims" in step.given) and step.result.ndim == step.first[0].ndim:
        return _along
    return _pointwise if all(_broadcasts(t.shape, step.result.shape) for t, _ in step.sources) else None


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of one shape can stand for one of the other."""
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))
