"""What techniques for low-rank adapters share: which of them train, what each client made of them, sums of products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedstrata.core.low_rank import RankCut, adapters_of, cut_ranks, pad_ranks, product, rank
from fedstrata.core.technique import RoundView, Setting
from fedstrata.core.tensors import Tensors, scale
from fedstrata.core.types import LowRank
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

MIXED = "both say what the factors of all clients come to"
OPTIMISERS = ("fedavgm", "fedadagrad", "fedadam", "fedyogi")
REMEMBERS = ("scaffold", "feddyn", "fedspeed", "fednova", *OPTIMISERS, "ditto", "apfl", "inco")
"""Techniques that remember, measure, mix or cross directions in the factors."""
TURNS = "it makes other factors of a product in every round, in which the other's directions mean nothing"
"""Why they are refused beside a technique that gives all clients new factors."""
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
    """A_k and B_k of every client that sent both, with what it counts in the mean.

    All have the server's rank and scale, with zeros beyond the client's own rank.
    """
    names = {adapter.a, adapter.b}
    came = zip(round.weights, round.updates, round.asked, strict=True)
    sent = [(weight, u.delta, rank(asked.params, adapter)) for weight, u, asked in came if names <= u.delta.keys()]
    total = sum(weight for weight, _, _ in sent)
    starts = {held: first_ranks(round.params, adapter, held) for held in {held for _, _, held in sent}}
    return [(weight / total, {n: t + delta[n] for n, t in starts[held].items()}) for weight, delta, held in sent]


def first_ranks(params: Tensors, adapter: LowRank, held: int) -> Tensors:
    """A and B with zeros beyond their first rows and columns, `held` of them."""
    whole = rank(params, adapter)
    cuts = {n: RankCut(axis, held, whole, 1.0) for axis, n in enumerate((adapter.a, adapter.b))}
    own = {n: params[n] for n in cuts}
    return own if held == whole else pad_ranks(cut_ranks(own, cuts), cuts)


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
