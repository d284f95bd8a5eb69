"""The mean, folded as updates arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, ClassVar

from fedstrata.aggregation.arithmetic import cast_back, compute_dtype
from fedstrata.core.lazy import torch
from fedstrata.core.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor


class RunningMean:
    """The weighted mean, name by name, over the updates that hold the name: Σ n_k x_k / Σ n_k, folded in order.

    Half-precision tensors are summed in single precision; integers in double, and rounded, so they stay integers.
    """

    def __init__(self) -> None:
        self._sums: Tensors = {}
        self._weights: dict[str, float] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Fold one client's tensors in."""
        if not tensors:
            return
        sums = self._open(tensors)
        values = [t if t.dtype == s.dtype else t.to(s.dtype) for t, s in zip(tensors.values(), sums, strict=True)]
        torch._foreach_add_(sums, values, alpha=weight)
        for name in tensors:
            self._weights[name] += weight

    def add_rows(self, stacked: Mapping[str, Tensor], rows: Sequence[int], weights: Sequence[float]) -> None:
        """Fold many clients' tensors in, one after the other: the same sums, to the bit, as adding each alone."""
        if not stacked:
            return
        sums = self._open({name: tensor[0] for name, tensor in stacked.items()})
        same = [t if t.dtype == s.dtype else t.to(s.dtype) for t, s in zip(stacked.values(), sums, strict=True)]
        each = list(zip(*(tensor.unbind() for tensor in same), strict=True))
        for row, weight in zip(rows, weights, strict=True):
            torch._foreach_add_(sums, each[row], alpha=weight)
        before = {self._weights[name] for name in stacked}
        after = {total: reduce(add, weights, total) for total in before}  # `sum` rounds otherwise from Python 3.12 on
        for name in stacked:
            self._weights[name] = after[self._weights[name]]

    def _open(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The sums of some names; those that are new begin at zero."""
        for name in (n for n in tensors if n not in self._sums):
            tensor = tensors[name]
            self._dtypes[name], self._weights[name] = tensor.dtype, 0.0
            self._sums[name] = torch.zeros_like(tensor, dtype=compute_dtype(tensor.dtype))
        return [self._sums[n] for n in tensors]

    def result(self) -> Tensors:
        """The mean of what was folded in."""
        if not self._sums:
            return {}
        means = torch._foreach_div(list(self._sums.values()), list(self._weights.values()))
        return {name: cast_back(mean, dtype) for (name, dtype), mean in zip(self._dtypes.items(), means, strict=True)}


def mean_of(clients: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """The weighted mean, name by name, over the clients of a weight above 0 that hold the name."""
    mean = RunningMean()
    for tensors, weight in zip(clients, weights, strict=True):
        if weight > 0:
            mean.add(tensors, weight)
    return mean.result()


@dataclass(frozen=True, kw_only=True)
class WeightedMean:
    """The mean, weighted by the clients' weights: Σ n_k x_k / Σ n_k, name by name.

    McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", AISTATS 2017. One client that lies can move it anywhere.
    """

    by_name: ClassVar[bool] = False
    trusts: ClassVar[bool] = False
    per: ClassVar[str] = "model"

    def __call__(
        self, deltas: Sequence[Tensors], buffers: Sequence[Tensors], weights: Sequence[float]
    ) -> tuple[Tensors, Tensors]:
        """The weighted mean, name by name."""
        return mean_of(deltas, weights), mean_of(buffers, weights)
