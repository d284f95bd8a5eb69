"""Clients' gradients at one model, and how far they are apart (FedImpro, §4); distributions of their entries (InCo)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstrata.client.gradients import compute_gradient
from fedstrata.core.task import Task
from fedstrata.core.tensors import Tensors, add_, scale, zeros_like
from fedstrata.core.types import Stratum
from fedstrata.errors import UsageError, not_negative, positive
from fedstrata.models.stages import run_from
from fedstrata.probes.measures.reading import (
    BATCH,
    Data,
    batches,
    check_clients,
    check_labelled,
    check_names,
    deviations,
    device_of,
    names_of,
    per_stratum,
    scratch_copy,
)
from fedstrata.tasks.classification import CLASSIFICATION


def client_gradients(
    model: nn.Module,
    clients: Sequence[Data],
    batch_size: int = BATCH,
    training: bool = False,
    task: Task = CLASSIFICATION,
) -> list[Tensors]:
    """g_m = ∇F_m(θ) (Eq. 1): for each client, the gradient of the task's mean loss over all of its data.

    All are taken at the model's own parameters, frozen or not. In evaluation mode norm layers use their running
    statistics, so that the gradient is exact: it does not depend on batches. With `training` they use the batch's, as
    a client's steps do, and dropout drops: the gradient then belongs to batches of this size in a fixed random order.
    Clients' data may be in any form that `Federation` takes.
    """
    held = check_clients(clients, task=task)
    with scratch_copy(model, training) as scratch:
        found = []
        for data in held:
            passes = ((partial(scratch, x), y) for _, x, y in batches(scratch, data, batch_size))
            found.append(_gradient(scratch, passes, len(data), task))
        return found


def shared_gradient(model: nn.Module, features: Tensor, labels: Tensor, place: str) -> Tensors:
    """ĝ = ∇E_ĥ f(θ; ĥ, y) (Eq. 4): the gradient of the mean cross-entropy if `place` had put these features out.

    What lies below the place has a gradient of zero. The model is an `nn.Sequential`, as for `run_from`.
    """
    check_labelled((features, labels))
    with scratch_copy(model) as scratch:
        parts = zip(*(torch.split(t.to(device_of(scratch)), BATCH) for t in (features, labels)), strict=True)
        passes = ((partial(run_from, scratch, h, place), y) for h, y in parts)
        return _gradient(scratch, passes, len(labels), CLASSIFICATION)


def with_shared(gradient: Tensors, shared: Tensors, high: Iterable[str], examples: float, sampled: float) -> Tensors:
    """∇f̂_m (Eq. 23): client m's gradient where n̂_m features, sampled from what all share, join its own n_m examples.

    high: n_m/(n_m + n̂_m)·g_m + n̂_m/(n_m + n̂_m)·ĝ; low: g_m. The clients' weights become p̂_m = (n_m + n̂_m)/(N + N̂).
    With n̂_m in proportion to n_m the high part of `gradient_variance` is N²/(N + N̂)² of what it was (Theorem 4.2).

    This is the mean over own and sampled rows. A local loss that adds the two means, g_m + λ·ĝ, moves all clients'
    gradients alike: their variance stays, and is smaller only in comparison with their length.

    Args:
        gradient: g_m.
        shared: ĝ, which has all names of the high part.
        high: names of the parameters above the cut.
        examples: n_m.
        sampled: n̂_m.
    """
    high = names_of(high)
    positive("with_shared", examples=examples)
    not_negative("with_shared", sampled=sampled)
    check_names(high, gradient, "the gradient has")
    check_names(high, shared, "the shared gradient has")
    own = examples / (examples + sampled)
    return {n: own * g + (1 - own) * shared[n] if n in high else g for n, g in gradient.items()}


@dataclass(frozen=True)
class Variance:
    """Inter-client gradient variance of the parts below and above a cut (Eq. 3)."""

    low: float
    high: float

    @property
    def total(self) -> float:
        """Of the whole model."""
        return self.low + self.high


def gradient_variance(
    gradients: Sequence[Tensors], high: Iterable[str], weights: Sequence[float] | None = None
) -> Variance:
    """CGV(F, θ) = Σ p_m ‖g_m − Σ p_k g_k‖² (Def. 4.2), as the sum of a low and a high part (Eq. 3).

    Args:
        gradients: one for each client, all of the same names.
        high: names of the parameters above the cut; all others are low.
        weights: n_m, or anything in proportion to p_m; None for all alike.
    """
    high, by_name = names_of(high), _variances(gradients, weights)
    check_names(high, by_name, "the gradients have")
    return Variance(*(sum(v for n, v in by_name.items() if (n in high) is above) for above in (False, True)))


def gradient_variance_by_stratum(
    gradients: Sequence[Tensors], strata: Sequence[Stratum], weights: Sequence[float] | None = None
) -> dict[str, float]:
    """Stratum name → its part of CGV(F, θ); the parts add up to the whole. See `gradient_variance`."""
    return {name: held[0] for name, held in per_stratum([_variances(gradients, weights)], strata).items()}


@dataclass(frozen=True, eq=False)
class Distribution:
    """How a stratum's entries are distributed: a density for each bin, the bins' edges, one more, and moments."""

    density: Tensor
    edges: Tensor
    mean: float
    std: float
    entries: int


def gradient_distribution(
    tensors: Tensors | Sequence[Tensors], strata: Sequence[Stratum], bins: int | Sequence[float] = 100
) -> dict[str, Distribution]:
    """Stratum name → the distribution of all entries of its gradients or updates (InCo, Figs. 2c, 2d and 3).

    Strata that nobody holds are left out. The standard deviation is that of the entries themselves, over n.

    Args:
        tensors: one update, or several whose entries are pooled; some may hold fewer names than others.
        strata: of the deepest model.
        bins: their number, from the smallest entry to the largest, or their edges, which make densities of several
            calls comparable. Entries outside of the edges count in n only, so that densities add up to less than 1.
    """
    clients = [tensors] if isinstance(tensors, Mapping) else tensors
    if not any(clients):
        raise UsageError("there are no tensors to take a distribution of")
    names = {n for stratum in strata for n in stratum.params}
    check_names((n for mine in clients for n in mine), names, "the strata have")
    found = {}
    for stratum in strata:
        entries = [mine[n].detach().flatten().double().cpu() for mine in clients for n in stratum.params if n in mine]
        if any(map(len, entries)):
            found[stratum.name] = _distribution(stratum.name, torch.cat(entries).numpy(), bins)
    return found


def _distribution(
    name: str, entries: np.ndarray[Any, np.dtype[np.float64]], bins: int | Sequence[float]
) -> Distribution:
    if not np.isfinite(entries).all():
        raise UsageError(f"stratum '{name}' has entries that are not finite, which have no distribution")
    edges = _edges(entries.min(), entries.max(), bins) if isinstance(bins, int) else np.asarray(bins, dtype=np.float64)
    if edges.ndim != 1 or len(edges) < 2 or not (np.diff(edges) > 0).all():
        raise UsageError(f"bins are 1 or more, or 2 or more increasing edges, not {bins}")
    density = np.histogram(entries, edges)[0] / (len(entries) * np.diff(edges))
    mean, std = float(entries.mean()), float(entries.std())
    return Distribution(torch.from_numpy(density), torch.from_numpy(edges), mean, std, len(entries))


def _edges(low: float, high: float, bins: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of bins that are equally wide, around the one number where all entries are the same."""
    edges = np.linspace(low, high, max(bins, 0) + 1)
    return edges if (np.diff(edges) > 0).all() else np.linspace(low - 0.5, high + 0.5, bins + 1)


def _gradient(
    model: nn.Module, passes: Iterable[tuple[Callable[[], Tensor], Tensor]], examples: int, task: Task
) -> Tensors:
    """The gradient of the task's mean loss over passes of (outputs, targets)."""
    leaves: Tensors = dict(model.named_parameters())
    total = zeros_like(leaves)
    weights: list[float] = []

    def loss(outputs: Callable[[], Tensor], targets: Tensor) -> Tensor:
        losses, weight = task.sums(outputs(), targets)
        weights.append(weight)
        return losses / examples

    for outputs, targets in passes:
        total = add_(total, compute_gradient(partial(loss, outputs, targets), leaves))
    return total if sum(weights) == examples else scale(total, examples / max(sum(weights), 1e-12))


def _variances(gradients: Sequence[Tensors], weights: Sequence[float] | None) -> dict[str, float]:
    """Name → Σ p_m ‖g_m − Σ p_k g_k‖² of that parameter alone."""
    shares, squares = deviations(gradients, weights)
    for mine in squares:
        check_names(squares[0], mine, "another client's gradient has")
        check_names(mine, squares[0], "the first client's gradient has")
    return {n: sum(p * mine[n] for p, mine in zip(shares, squares, strict=True)) for n in squares[0]}
