"""How far apart local training takes the running statistics of norm layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from fedstrata.core.types import Stratum
from fedstrata.errors import UsageError
from fedstrata.probes.measures.reading import (
    check_names,
)

EPSILON = 1e-5
"""What norm layers add to a variance before they divide by its root."""


def statistics_spread(buffers: Sequence[Mapping[str, Tensor]], strata: Sequence[Stratum]) -> dict[str, float]:
    """Stratum name → how far clients' running means are from their average, in running standard deviations.

    The mean over the clients i of the square mean over the channels of (μ_i − μ̄)/√(σ̄² + ε), where μ̄ and σ̄² are plain
    averages over the clients that hold the statistics, and ε = 10⁻⁵ as in the norm layers, so that a channel which is
    always the same counts for nothing. Strata without running statistics are left out, as are those of one client only.

    Args:
        buffers: each client's after its training.
        strata: of the whole model.
    """
    check_names({n for mine in buffers for n in mine}, {n for s in strata for n in s.buffers}, "the strata have")
    found = {}
    for stratum in strata:
        shifts: dict[int, list[Tensor]] = {}
        for name in (n for n in stratum.buffers if n.endswith("running_mean")):
            for client, shift in _shifts(buffers, name).items():
                shifts.setdefault(client, []).append(shift)
        if shifts:
            found[stratum.name] = fmean(float(torch.cat(mine).square().mean().sqrt()) for mine in shifts.values())
    return found


def _shifts(buffers: Sequence[Mapping[str, Tensor]], mean: str) -> dict[int, Tensor]:
    """Client → (μ_i − μ̄)/√(σ̄² + ε) of one norm layer, for those that have it if they are several."""
    var = f"{mean.removesuffix('running_mean')}running_var"
    holders = [client for client, mine in enumerate(buffers) if mean in mine and var in mine]
    if len(holders) < 2:
        return {}
    means, variances = ([buffers[client][name].detach().double().cpu() for client in holders] for name in (mean, var))
    if len({tensor.shape for tensor in (*means, *variances)}) > 1:
        raise UsageError(f"the clients' tensors '{mean}' are of different shapes")
    middle = torch.stack(means).mean(0)
    deviation = (torch.stack(variances).mean(0) + EPSILON).sqrt()
    return {client: (mine - middle) / deviation for client, mine in zip(holders, means, strict=True)}
