"""A round's clients one by one, from their updates alone: how long each is, and which way it points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Stratum
from fedstrata.errors import UsageError
from fedstrata.probes.measures.divergence import inner_products
from fedstrata.probes.measures.reading import check_names, params_of
from fedstrata.probes.measures.running_statistics import EPSILON

STEPS = 100
"""Of Weiszfeld's algorithm, for a handful of unit vectors."""
NEAREST = 1e-6
"""The shortest distance between two unit vectors that counts as one."""

Column = list[float | None]
"""A number for each client, in their order; None for one that has none."""


@dataclass(frozen=True)
class VisitTable:
    """Every client's update in a few numbers; clients are in the order of the updates.

    Attributes:
        norms: stratum name → each client's ‖Δ_i‖ there.
        cosines: stratum name → the cosine of each client's update to the centre of the others'.
        norm: of each whole update.
        cosine: of each whole update to the centre of the others'.
        nearest: the largest cosine of each whole update to one other client's.
    """

    norms: dict[str, Column]
    cosines: dict[str, Column]
    norm: Column
    cosine: Column
    nearest: Column


def compare_visits(deltas: Sequence[Tensors], strata: Sequence[Stratum]) -> VisitTable:
    """Norms of clients' updates, and cosines to the geometric median of the other clients' updates of norm 1.

    Updates count by their direction alone, so that a long one weighs no more than others; the geometric median of n
    others does not follow fewer than n/2 of them. All of it is computed from inner products. An update of zero has no
    direction, and is in no centre. Strata that nobody sent are left out.

    Args:
        deltas: each client's update; some may hold fewer names than others.
        strata: to be told apart; the whole update is what is in them together.
    """
    if not any(deltas):
        raise UsageError("there are no clients with updates to compare")
    check_names({n for mine in deltas for n in mine}, params_of(strata), "the strata have")
    sent = [stratum for stratum in strata if any(n in mine for mine in deltas for n in stratum.params)]
    products = {stratum.name: inner_products(deltas, stratum.params) for stratum in sent}
    whole = [sum(parts) for parts in zip(*products.values(), strict=True)]
    dots, squares = (torch.as_tensor(part) for part in whole)
    cosines = cosine_matrix(dots, squares)
    others = cosines.clone().fill_diagonal_(-torch.inf).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return VisitTable(
        norms={name: _norms(squares) for name, (_, squares) in products.items()},
        cosines={name: centre_cosines(cosine_matrix(*pair)) for name, pair in products.items()},
        norm=_norms(squares),
        cosine=centre_cosines(cosines),
        nearest=[None if value == -torch.inf else value for value in others.amax(1).tolist()],
    )


def cosine_matrix(dots: Tensor, squares: Tensor) -> Tensor:
    """The cosine of every two; NaN where one of them is zero, or they have no name in common."""
    return dots / (squares.sqrt() * squares.T.sqrt())


def centre_cosines(cosines: Tensor) -> Column:
    """For each client i, cos(u_i, v_i), where v_i minimises Σ_{j≠i} ‖v − u_j‖ over the other clients' directions u_j.

    By Weiszfeld's algorithm: with v_i = Σ_j w_ij u_j and K the cosines of every two,
    ‖v_i − u_j‖² = 1 − 2(K w_i)_j + w_iᵀ K w_i, and w_ij becomes proportional to 1/‖v_i − u_j‖.

    Args:
        cosines: K; the diagonal is NaN for a client without a direction.
    """
    there = ~cosines.diagonal().isnan()
    inner = cosines.nan_to_num(nan=0.0)
    others = there.expand(len(there), -1).double().clone().fill_diagonal_(0.0)
    some = others.sum(1)
    weights = others / some.clamp(min=1).unsqueeze(1)
    for _ in range(STEPS):
        along = weights @ inner
        squared = 1 - 2 * along + (along * weights).sum(1, keepdim=True)
        weights = others / squared.clamp(min=NEAREST**2).sqrt()
        weights = weights / weights.sum(1, keepdim=True).clamp(min=NEAREST)
    along = weights @ inner
    length = (along * weights).sum(1).clamp(min=0).sqrt()
    known = there & (some > 0) & (length > NEAREST)
    found = along.diagonal() / length.clamp(min=NEAREST)
    return [value if ok else None for value, ok in zip(found.tolist(), known.tolist(), strict=True)]


def _norms(squares: Tensor) -> Column:
    return squares.diagonal().sqrt().tolist()


def statistics_distances(buffers: Sequence[Mapping[str, Tensor]]) -> Column:
    """How far each client's running means are from the clients' median, in running standard deviations.

    The square mean over all channels of (μ_i − med μ)/√(med σ² + ε), with medians over the clients that hold the
    statistics; None for a client without any, or if no other has them.
    """
    shifts: dict[int, list[Tensor]] = {}
    for name in dict.fromkeys(n for mine in buffers for n in mine if n.endswith("running_mean")):
        var = f"{name.removesuffix('running_mean')}running_var"
        holders = [i for i, mine in enumerate(buffers) if name in mine and var in mine]
        if len(holders) > 1:
            means, variances = (
                torch.stack([buffers[i][n].detach().double().cpu() for i in holders]) for n in (name, var)
            )
            apart = (means - means.quantile(0.5, 0)) / (variances.quantile(0.5, 0) + EPSILON).sqrt()
            for i, mine in zip(holders, apart, strict=True):
                shifts.setdefault(i, []).append(mine)
    each = (shifts.get(i) for i in range(len(buffers)))
    return [None if mine is None else float(torch.cat(mine).square().mean().sqrt()) for mine in each]
