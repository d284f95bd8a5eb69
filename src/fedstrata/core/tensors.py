"""Arithmetic on named tensors, with torch's foreach kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedstrata.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Tensors = dict[str, "Tensor"]
"""Tensors by name, such as a model's parameters."""
LINE = 64
"""Bytes of a cache line, at whose beginning torch's own tensors lie."""


class FlatTensors(Tensors):
    """Tensors of one type that lie in one buffer, in order, each at the beginning of a cache line.

    What is between them is filled up; nobody reads it.
    """

    def __init__(self, tensors: Mapping[str, Tensor], flat: Tensor) -> None:
        super().__init__(tensors)
        self.flat = flat


def whole_lines(count: int, dtype: torch.dtype) -> int:
    """How many elements the cache lines hold that `count` elements fill, the last one perhaps in part."""
    line = LINE // dtype.itemsize
    return -(-count // line) * line


def align(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it if it does not lie at the beginning of a cache line: products may round otherwise."""
    return tensor.clone() if tensor.data_ptr() % LINE else tensor


PIECE = 1 << 17
"""Numbers of each tensor that are gone through at once where several passes are to find them in the cache."""

_alone = False


@contextmanager
def one_by_one() -> Iterator[None]:
    """Inside, `each` works tensor by tensor: `torch.func.vmap` knows no foreach kernels."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def each(operation: str, tensors: Sequence[Tensor], *others: Any, alpha: float | Tensor | None = None) -> list[Tensor]:
    """An operation on every tensor of a list (`add`, or `add_` in place), with a foreach kernel where there is one.

    The others are lists beside it, or one thing for all; `alpha` multiplies what is added.
    """
    if not _alone:
        kernel = getattr(torch, f"_foreach_{operation}")
        out = kernel(tensors, *others) if alpha is None else kernel(tensors, *others, alpha=alpha)
        return list(tensors) if out is None else list(out)
    results = []
    for i, tensor in enumerate(tensors):
        beside = [other[i] if isinstance(other, list | tuple) else other for other in others]
        if alpha is not None:  # not as an argument: compiled, `add(x, a @ b, alpha=s)` forgets it
            beside = [beside[0] * alpha]
        if operation == "addcmul_":
            results.append(tensor.add_(beside[0] * beside[1] * beside[2]))
        elif operation == "lerp_":
            results.append(tensor.add_((beside[0] - tensor) * beside[1]))
        else:
            results.append(getattr(tensor, operation)(*beside))
    return results


def norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each tensor."""
    return each("norm", list(tensors))


def whole_norm(tensors: Mapping[str, Tensor]) -> Tensor:
    """The Euclidean norm of all of them together."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms(tensors.values())))
    return norm


def subtract(
    left: Mapping[str, Tensor], right: Mapping[str, Tensor], names: Sequence[str], out: Tensors | None = None
) -> Tensors:
    """left − right, for the given names; into the tensors of `out` where they are given."""
    if out is not None:
        return {n: torch.sub(left[n], right[n], out=out[n]) for n in names}
    if not names:
        return {}
    return dict(zip(names, each("sub", [left[n] for n in names], [right[n] for n in names]), strict=True))


def write_difference(start: Tensor, direction: Tensor, alpha: float, minus: Tensor, out: Tensor) -> float:
    """(start + alpha·direction) − minus into `out`, piece by piece so that memory is gone through once: its sum."""
    tensors = (start, direction, minus, out)
    whole = not all(t.is_contiguous() for t in tensors)  # kernels round alike only where they go through alike
    pieces = [[t] if whole else torch.split(t.view(-1), PIECE) for t in tensors]
    total = torch.zeros((), dtype=out.dtype)
    for begin, step, end, to in zip(*pieces, strict=True):
        torch.add(begin, step, alpha=alpha, out=to)
        total += to.sub_(end).sum()
    return float(total)


def add(left: Mapping[str, Tensor], right: Mapping[str, Tensor], alpha: float = 1.0) -> Tensors:
    """left + alpha·right; names that are missing on the right pass unchanged (the same tensor objects)."""
    names = [n for n in left if n in right]
    out = dict(left)
    if names:
        sums = each("add", [left[n] for n in names], [right[n] for n in names], alpha=alpha)
        out.update(zip(names, sums, strict=True))
    return out


def add_(left: Tensors, right: Mapping[str, Tensor], alpha: float = 1.0) -> Tensors:
    """left + alpha·right in the memory of left, which is the caller's own; in other memory under `one_by_one`."""
    if _alone:
        return add(left, right, alpha)
    names = [n for n in left if n in right]
    if names:
        torch._foreach_add_([left[n] for n in names], [right[n] for n in names], alpha=alpha)
    return left


def scale(tensors: Mapping[str, Tensor], factor: float | Tensor) -> Tensors:
    """factor · tensors."""
    if not tensors:
        return {}
    return dict(zip(tensors, each("mul", list(tensors.values()), factor), strict=True))


def match_layout(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensors:
    """The same, in memory as others of the same names are: kernels are fastest on tensors of one layout."""
    return {n: t if t.stride() == like[n].stride() else torch.empty_like(like[n]).copy_(t) for n, t in tensors.items()}


def load(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy named values into a model's own tensors."""
    if values:
        with torch.no_grad():
            torch._foreach_copy_([into[n] for n in values], list(values.values()))


@contextmanager
def swap_values(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, a model's own tensors have other values; nothing is copied, so every bit comes back."""
    before = [(own[n], own[n].data) for n in values]
    for (tensor, _), value in zip(before, values.values(), strict=True):
        tensor.data = value
    try:
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def are_disjoint(tensors: Mapping[str, Tensor], others: Mapping[str, Mapping[str, Tensor]]) -> bool:
    """True if none of the tensors is held by others."""
    if not others:
        return True
    held = {id(t) for other in others.values() for t in other.values()}
    return held.isdisjoint(map(id, tensors.values()))


def zeros_like(tensors: Mapping[str, Tensor]) -> Tensors:
    """A zero for every tensor."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def clone(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copies that share nothing with the originals."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """True if no floating-point tensor holds a NaN or an infinity."""
    floats = [t for t in tensors if t.is_floating_point() and t.numel()]
    # A sum is six times faster than looking at each number. It may overflow although all are finite, so look then.
    if math.isfinite(sum(t.sum().item() for t in floats)):
        return True
    return all(bool(torch.isfinite(t).all()) for t in floats)


def mismatch(expected: Sequence[str], like: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str | None:
    """Why named tensors are not the expected ones, in a few words, or None if they are."""
    if len(given) != len(expected) or any(n not in given for n in expected):
        missing, extra = set(expected) - given.keys(), given.keys() - set(expected)
        return f"it lacks '{min(missing)}'" if missing else f"it has an unexpected '{min(extra)[:100]}'"
    for name in expected:
        tensor, model = given[name], like[name]
        if tensor.shape != model.shape or tensor.dtype != model.dtype:
            return f"'{name}' is {_shape(tensor)} instead of {_shape(model)}"
    return None


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
