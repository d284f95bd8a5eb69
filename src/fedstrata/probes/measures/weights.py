"""Local models: how far their weights are apart, and what they are worth to others (FedImpro, §5.2 and Eq. 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import nn

from fedstrata.core.tensors import Tensors, clone, load
from fedstrata.core.types import Stratum
from fedstrata.errors import UsageError
from fedstrata.models.norms import running_statistics
from fedstrata.probes.measures.reading import (
    Data,
    batches,
    check_clients,
    check_names,
    deviations,
    per_stratum,
    scratch_copy,
)


def weight_divergence(params: Sequence[Tensors], weights: Sequence[float] | None = None) -> float:
    """(1/|S|) Σ_i ‖θ̄ − θ_i‖ (§5.2, Fig. 2b).

    Args:
        params: each client's parameters after a round, or its delta, which gives the same. A name that only some
            clients hold is compared among these.
        weights: of the mean θ̄; None for all alike.
    """
    return fmean(math.sqrt(sum(mine.values())) for mine in deviations(params, weights)[1] if mine)


def weight_divergence_by_stratum(
    params: Sequence[Tensors], strata: Sequence[Stratum], weights: Sequence[float] | None = None
) -> dict[str, float]:
    """Stratum name → its divergence (Fig. 3), in the mean over the clients that hold it.

    Strata that nobody holds, such as those that did not travel, are left out. See `weight_divergence`.
    """
    held = per_stratum(deviations(params, weights)[1], strata)
    return {name: fmean(map(math.sqrt, sums)) for name, sums in held.items()}


@dataclass(frozen=True)
class Generalisation:
    """Client → accuracy of its local model on all other clients' examples together, and on its own."""

    others: dict[int, float]
    own: dict[int, float]

    @property
    def mean(self) -> float:
        """On others' examples, in the mean over the clients."""
        return fmean(self.others.values())


def generalisation(model: nn.Module, local: Mapping[int, Tensors], clients: Sequence[Data]) -> Generalisation:
    """What local training contributes to generalisation, W_d(ρ(θ + Δ_m), D∖D_m) (Eq. 2), for each client m.

    The quality W_d is measured by accuracy instead of by the worst-case margin.

    Args:
        model: the module that the tensors belong to.
        local: client → its parameters and running statistics after training; what is missing is as in the model.
        clients: everybody's data, in any form that `Federation` takes.
    """
    held = check_clients(clients, least=2)
    if not local or not local.keys() <= set(range(len(clients))):
        raise UsageError(f"local models belong to some of the clients 0 to {len(clients) - 1}, not to {list(local)}")
    sizes = [len(data) for data in held]
    others, own = {}, {}
    with scratch_copy(model) as scratch, torch.no_grad():
        mine: Tensors = {**dict(scratch.named_parameters()), **running_statistics(scratch)}
        before = clone(mine)
        for client, tensors in local.items():
            check_names(tensors, mine, "the model has")
            if wrong := [n for n, tensor in tensors.items() if tensor.shape != mine[n].shape]:
                raise UsageError(f"client {client}'s '{wrong[0]}' has another shape than the model's")
            load(mine, {**before, **tensors})
            right = [sum(int((scratch(x).argmax(1) == y).sum()) for _, x, y in batches(scratch, d)) for d in held]
            own[client] = right[client] / sizes[client]
            others[client] = (sum(right) - right[client]) / (sum(sizes) - sizes[client])
    return Generalisation(others, own)
