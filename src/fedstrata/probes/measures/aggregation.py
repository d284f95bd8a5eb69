"""What the mean of low-rank factors misses: Σ p_k B_k·A_k is not (Σ p_k B_k)·(Σ p_k A_k).

Singhal, Ponkshe and Vepakomma, "FedEx-LoRA", ACL 2025, and Sun et al., "Improving LoRA in Privacy-preserving Federated
Learning", ICLR 2024, say why: the difference is the covariance of the clients' factors.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedstrata.core.tensors import Tensors
from fedstrata.core.types import LowRank, Stratum
from fedstrata.probes.measures.divergence import relative_length


def aggregation_error(
    factors: Sequence[Tensors], strata: Sequence[Stratum], weights: Sequence[float]
) -> dict[str, float]:
    """Stratum name → ‖Σ p_k B_k·A_k − (Σ p_k B_k)·(Σ p_k A_k)‖ / ‖Σ p_k B_k·A_k‖, over the clients that hold it.

    It is 0 where all clients have the same A, or the same B, and where the mean of the products is zero. Strata without
    an adapter, and those that fewer than two clients hold, are left out.

    Args:
        factors: each client's A and B after its training, by name, in one rank and scale.
        strata: of the whole model.
        weights: what each client counts in the mean.
    """
    found: dict[str, float] = {}
    for stratum in strata:
        one = stratum.low_rank
        if one is None:
            continue
        held = [(w, own) for w, own in zip(weights, factors, strict=True) if {one.a, one.b} <= own.keys()]
        if len(held) > 1:
            found[stratum.name] = _error(held, one)
    return found


def _error(held: Sequence[tuple[float, Tensors]], adapter: LowRank) -> float:
    """Of one adapter; computed from the factors' distances to their means, which does not cancel."""
    total = sum(weight for weight, _ in held)
    a, b = ([own[name].flatten(1).double() for _, own in held] for name in (adapter.a, adapter.b))
    shares = [weight / total for weight, _ in held]
    mean_a, mean_b = _mean(a, shares), _mean(b, shares)
    gap = _mean([(y - mean_b) @ (x - mean_a) for x, y in zip(a, b, strict=True)], shares)
    whole = gap + mean_b @ mean_a
    return relative_length(float(gap.square().sum()), float(whole.square().sum()))


def _mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    total = shares[0] * tensors[0]
    for share, tensor in zip(shares[1:], tensors[1:], strict=True):
        total = total + share * tensor
    return total
