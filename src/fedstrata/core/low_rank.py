"""Computing with low-rank adapters, W + scale·B·A, of linear and convolutional layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class RankCut:
    """What a sub-model of a lower rank holds of a factor: its first rows or columns, in a scale of its own.

    Attributes:
        axis: of the rank, 0 of A and 1 of B.
        rank: the sub-model's.
        whole: the server's.
        factor: what the server's are multiplied by there: 1 for A, and for B its scale over the sub-model's, so that
            scale·B·A is the same in both.
    """

    axis: int
    rank: int
    whole: int
    factor: float


RankCuts = Mapping[str, RankCut]
"""Of the factors of which a sub-model holds a part, by name."""


def find_rank_cuts(
    whole: Iterable[Stratum], part: Iterable[Stratum], params: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> dict[str, RankCut]:
    """What a sub-model holds less of than the server's model, or in another scale.

    Args:
        whole: the server's strata.
        part: the sub-model's.
        params: the server's parameters, for their shapes.
        own: the sub-model's.
    """
    ours = {one.a: one for one in adapters_of(whole)}
    found: dict[str, RankCut] = {}
    for theirs in adapters_of(part):
        one = ours.get(theirs.a)
        if one is None:
            continue
        ranks = rank(own, theirs), rank(params, one)
        factor = one.scale / theirs.scale
        if ranks[0] != ranks[1]:
            found[one.a] = RankCut(0, *ranks, 1.0)
        if ranks[0] != ranks[1] or factor != 1:
            found[one.b] = RankCut(1, *ranks, factor)
    return found


def cut_ranks(tensors: Tensors, cuts: RankCuts, scaled: bool = True) -> Tensors:
    """The server's tensors as a sub-model of a lower rank has them: their first rows or columns.

    Args:
        tensors: by the names of parameters; of other names, and of another shape, they stay as they are.
        cuts: what the sub-model holds of factors.
        scaled: True for values and changes of factors, which are in each model's own scale.
    """
    if not cuts:
        return tensors
    return {n: _cut(t, cuts[n], scaled) if n in cuts else t for n, t in tensors.items()}


def pad_ranks(tensors: Tensors, cuts: RankCuts, scaled: bool = True) -> Tensors:
    """The way back: zeros where the sub-model holds nothing."""
    if not cuts:
        return tensors
    return {n: _pad(t, cuts[n], scaled) if n in cuts else t for n, t in tensors.items()}


def _cut(tensor: Tensor, cut: RankCut, scaled: bool) -> Tensor:
    if tensor.dim() <= cut.axis or tensor.shape[cut.axis] != cut.whole:
        return tensor
    held = tensor.narrow(cut.axis, 0, cut.rank).contiguous()
    return held * cut.factor if scaled and cut.factor != 1 else held


def _pad(tensor: Tensor, cut: RankCut, scaled: bool) -> Tensor:
    if tensor.dim() <= cut.axis or tensor.shape[cut.axis] != cut.rank:
        return tensor
    own = tensor / cut.factor if scaled and cut.factor != 1 else tensor
    shape = [*tensor.shape]
    shape[cut.axis] = cut.whole
    padded = tensor.new_zeros(shape)
    padded.narrow(cut.axis, 0, cut.rank).copy_(own)
    return padded


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
