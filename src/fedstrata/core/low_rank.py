"""Computing with low-rank adapters, W + scale·B·A, of linear and convolutional layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from fedstrata.core.tensors import Tensors
from fedstrata.core.types import LowRank, Stratum

if TYPE_CHECKING:
    from torch import Tensor

Factor = Literal["A", "B"]


def adapters_of(strata: Iterable[Stratum]) -> tuple[LowRank, ...]:
    """The adapters of low rank, in the order of their strata."""
    return tuple(s.low_rank for s in strata if s.low_rank is not None)


def factor_names(strata: Iterable[Stratum], factor: Factor) -> tuple[str, ...]:
    """The names of all A, or of all B, in the order of their strata."""
    return tuple(one.a if factor == "A" else one.b for one in adapters_of(strata))


def rank(params: Mapping[str, Tensor], adapter: LowRank) -> int:
    """r: how many rows A has."""
    return int(params[adapter.a].shape[0])


def product(params: Mapping[str, Tensor], adapter: LowRank, weight: Tensor | None = None) -> Tensor:
    """scale·B·A in the shape of W: what the adapter adds to it.

    A [r, inputs, …] and B [outputs, r, …] are taken as matrices; of a convolution, A has its kernel and B one of 1.

    Args:
        params: A and B by name, and W where `weight` is not given.
        adapter: which they are.
        weight: W, for its shape.
    """
    like = params[adapter.weight] if weight is None else weight
    whole = params[adapter.b].flatten(1) @ params[adapter.a].flatten(1)
    return (whole.t() if adapter.transposed else whole).mul(adapter.scale).reshape(like.shape)


def merge(params: Tensors, adapters: Sequence[LowRank]) -> Tensors:
    """W + scale·B·A for every adapter without a magnitude of its own, by the name of W."""
    return {one.weight: params[one.weight] + product(params, one) for one in adapters if one.magnitude is None}
