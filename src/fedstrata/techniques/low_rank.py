"""What techniques for low-rank adapters share: which of them train, what each client made of them, sums of products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedstrata.core.low_rank import adapters_of, product
from fedstrata.core.technique import RoundView, Setting
from fedstrata.core.tensors import Tensors, scale
from fedstrata.core.types import LowRank
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Factors = Sequence[tuple[float, Tensors]]
"""Of each client its weight, with a sum of 1, and its factors by name."""


def check_adapters(name: str, setting: Setting) -> None:
    """Refuse a model without a low-rank adapter that trains."""
    if not any({one.a, one.b} <= setting.movable for one in adapters_of(setting.strata)):
        where = f"the model '{setting.arch}'" if setting.arch else "the model"
        raise UsageError(
            f"'{name}' is for low-rank adapters, and {where} has none that trains: adapter = 'lora(r=8)' gives it some"
        )


def check_products(name: str, setting: Setting) -> None:
    """The same, and refuse adapters of which clients keep a factor: their products never reach the server."""
    check_adapters(name, setting)
    if not any({one.a, one.b} <= setting.movable - setting.kept for one in adapters_of(setting.strata)):
        raise UsageError(f"'{name}' needs both factors of an adapter, and clients keep one of each to themselves")


def arrived_adapters(round: RoundView) -> list[LowRank]:
    """The adapters of which both factors came from somebody."""
    return [one for one in adapters_of(round.strata) if {one.a, one.b} <= round.arrived.keys()]


def collect_factors(round: RoundView, adapter: LowRank) -> Factors:
    """A_k and B_k of every client that sent both, with what it counts in the mean."""
    names = (adapter.a, adapter.b)
    sent = [(w, u.delta) for w, u in zip(round.weights, round.updates, strict=True) if set(names) <= u.delta.keys()]
    total = sum(weight for weight, _ in sent)
    return [(weight / total, {n: round.params[n] + delta[n] for n in names}) for weight, delta in sent]


def mean_factors(factors: Factors) -> Tensors:
    """Σ p_k A_k and Σ p_k B_k, by name."""
    p, first = factors[0]
    means = scale(first, p)
    for p, own in factors[1:]:
        means = {n: total.add_(own[n], alpha=p) for n, total in means.items()}
    return means


def mean_product(factors: Factors, adapter: LowRank, weight: Tensor) -> Tensor:
    """Σ p_k · scale·B_k·A_k, in the shape of the weight W that it is added to."""
    first, *others = ((p, product(own, adapter, weight)) for p, own in factors)
    total = first[0] * first[1]
    for p, one in others:
        total = total.add_(one, alpha=p)
    return total
