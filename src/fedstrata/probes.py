"""Measures of how far clients are apart: pure functions that change nothing they are given.

The formulas are those of FedImpro (Tang et al., ICLR 2024); symbols: client m with n_m examples, N = Σ n_m,
p_m = n_m/N, gradient g_m. Whatever takes a model works on a copy of it in evaluation mode, and gives the random
generators back as they were.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.crew import by_autograd, seen_at
from fedstrata.data.examples import Examples, TensorExamples
from fedstrata.errors import UsageError, did_you_mean, not_negative, positive
from fedstrata.strata import Stratum, run_from
from fedstrata.tensors import Tensors, add_, clone, derive, generator, load, zeros_like
from fedstrata.workshop import own_rng, running, seed_global, sheets, task_loss

BATCH = 512
"""Examples that go through a model at once."""
LIMIT = 200
"""Examples of a class that are transported, at most: the cost of a class grows faster than its square."""

Labelled = tuple[Tensor, Tensor]
"""(features, rows first; labels)."""


# Gradients --------------------------------------------------------------------------------------------------


def client_gradients(
    model: nn.Module, clients: Sequence[Examples], batch_size: int = BATCH, training: bool = False
) -> list[Tensors]:
    """g_m = ∇F_m(θ) (Eq. 1): for each client, the gradient of the mean cross-entropy over all of its data.

    All are taken at the model's own parameters, frozen or not. In evaluation mode norm layers use their running
    statistics, so that the gradient is exact: it does not depend on batches. With `training` they use the batch's, as
    a client's steps do, and dropout drops: the gradient then belongs to batches of this size in a fixed random order.
    """
    _check_clients(clients)
    with _reading(model, training) as scratch:
        return [
            _gradient(scratch, ((partial(scratch, x), y) for _, x, y in _batches(scratch, data, batch_size)), len(data))
            for data in clients
        ]


def shared_gradient(model: nn.Module, features: Tensor, labels: Tensor, place: str) -> Tensors:
    """ĝ = ∇E_ĥ f(θ; ĥ, y) (Eq. 4): the gradient of the mean cross-entropy if `place` had put these features out.

    What lies below the place has a gradient of zero. The model is an `nn.Sequential`, as for `run_from`.
    """
    _check_labelled((features, labels))
    with _reading(model) as scratch:
        parts = zip(*(torch.split(t.to(_device(scratch)), BATCH) for t in (features, labels)), strict=True)
        return _gradient(scratch, ((partial(run_from, scratch, h, place), y) for h, y in parts), len(labels))


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
    high = _names(high)
    positive("with_shared", examples=examples)
    not_negative("with_shared", sampled=sampled)
    _check_names(high, gradient, "the gradient has")
    _check_names(high, shared, "the shared gradient has")
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
    high, by_name = _names(high), _variances(gradients, weights)
    _check_names(high, by_name, "the gradients have")
    return Variance(*(sum(v for n, v in by_name.items() if (n in high) is above) for above in (False, True)))


def gradient_variance_by_stratum(
    gradients: Sequence[Tensors], strata: Sequence[Stratum], weights: Sequence[float] | None = None
) -> dict[str, float]:
    """Stratum name → its part of CGV(F, θ); the parts add up to the whole. See `gradient_variance`."""
    return {name: held[0] for name, held in _per_stratum([_variances(gradients, weights)], strata).items()}


def _gradient(model: nn.Module, passes: Iterable[tuple[Callable[[], Tensor], Tensor]], examples: int) -> Tensors:
    """The gradient of the mean loss over passes of (logits, labels)."""
    leaves: Tensors = dict(model.named_parameters())
    total = zeros_like(leaves)

    def loss(logits: Callable[[], Tensor], labels: Tensor) -> Tensor:
        return task_loss(logits(), labels, "sum") / examples

    for logits, labels in passes:
        total = add_(total, by_autograd(partial(loss, logits, labels), leaves))
    return total


def _variances(gradients: Sequence[Tensors], weights: Sequence[float] | None) -> dict[str, float]:
    """Name → Σ p_m ‖g_m − Σ p_k g_k‖² of that parameter alone."""
    shares, squares = _squares(gradients, weights)
    for mine in squares:
        _check_names(squares[0], mine, "another client's gradient has")
        _check_names(mine, squares[0], "the first client's gradient has")
    return {n: sum(p * mine[n] for p, mine in zip(shares, squares, strict=True)) for n in squares[0]}


# Weights ----------------------------------------------------------------------------------------------------


def weight_divergence(params: Sequence[Tensors], weights: Sequence[float] | None = None) -> float:
    """(1/|S|) Σ_i ‖θ̄ − θ_i‖ (§5.2, Fig. 2b).

    Args:
        params: each client's parameters after a round, or its delta, which gives the same. A name that only some
            clients hold is compared among these.
        weights: of the mean θ̄; None for all alike.
    """
    return fmean(math.sqrt(sum(mine.values())) for mine in _squares(params, weights)[1] if mine)


def weight_divergence_by_stratum(
    params: Sequence[Tensors], strata: Sequence[Stratum], weights: Sequence[float] | None = None
) -> dict[str, float]:
    """Stratum name → its divergence (Fig. 3), in the mean over the clients that hold it.

    Strata that nobody holds, such as those that did not travel, are left out. See `weight_divergence`.
    """
    held = _per_stratum(_squares(params, weights)[1], strata)
    return {name: fmean(map(math.sqrt, sums)) for name, sums in held.items()}


def _squares(clients: Sequence[Tensors], weights: Sequence[float] | None) -> tuple[list[float], list[dict[str, float]]]:
    """(the clients' weights, adding up to 1; for each client, name → ‖θ̄ − θ_i‖², θ̄ over those that hold the name)."""
    if not any(clients):
        raise UsageError("there are no clients with tensors to compare")
    given = [1.0] * len(clients) if weights is None else [float(weight) for weight in weights]
    if len(given) != len(clients):
        raise UsageError(f"there are {len(given)} weights for {len(clients)} clients")
    for weight in given:
        positive("a client", weight=weight)
    found: list[dict[str, float]] = [{} for _ in clients]
    for name in dict.fromkeys(n for tensors in clients for n in tensors):
        held = {i: tensors[name].detach() for i, tensors in enumerate(clients) if name in tensors}
        if len({tensor.shape for tensor in held.values()}) > 1:
            raise UsageError(f"the clients' tensors '{name}' are of different shapes")
        mean = sum(given[i] * tensor.double() for i, tensor in held.items()) / sum(given[i] for i in held)
        for i, tensor in held.items():
            found[i][name] = float((tensor.double() - mean).square().sum())
    return [weight / sum(given) for weight in given], found


def _per_stratum(figures: Sequence[Mapping[str, float]], strata: Sequence[Stratum]) -> dict[str, list[float]]:
    """Stratum name → the sum over its names, for each client that holds any of them; without those nobody holds."""
    _check_names(
        {n for mine in figures for n in mine}, {n for stratum in strata for n in stratum.params}, "the strata have"
    )
    held = {s: [[mine[n] for n in s.params if n in mine] for mine in figures] for s in strata}
    return {s.name: [sum(values) for values in mine if values] for s, mine in held.items() if any(mine)}


# Features ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distance:
    """A conditional Wasserstein distance, and the share of the examples whose class both sides have."""

    value: float
    covered: float


def features_at(model: nn.Module, data: Examples, place: str, index: Tensor | None = None) -> Labelled:
    """(what a module puts out for a client's examples, or for those at `index`, in their order; their labels).

    The place is a module's name, `Into` a module, or "" for the model's outputs. Features keep the module's own shape.
    """
    if not len(data) or (index is not None and not len(index)):
        raise UsageError("there are no examples to take features of")
    with _reading(model) as scratch, torch.no_grad():
        parts = [
            (rows, seen_at(scratch, place, partial(scratch, x)).cpu(), y.cpu())
            for rows, x, y in _batches(scratch, data, index=index)
        ]
    rows, features, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    return features[rows.argsort()], labels[rows.argsort()]


def conditional_wasserstein(left: Labelled, right: Labelled, limit: int | None = LIMIT, seed: int = 0) -> Distance:
    """C_d(D, D') = ½ E_{y~D} W₁(D|y, D'|y) + ½ E_{y~D'} W₁(D|y, D'|y) (Def. 4.1), d the Euclidean distance.

    W₁ is exact optimal transport between the samples (extra `probes`). It exists for the classes that both sides have:
    others are left out, and the rest is weighed as if it were all; `covered` tells how much that is. Samples of one
    distribution are not at distance 0 either, and the further apart the fewer they are: compare at one `limit`.

    Args:
        left: features and labels of D.
        right: those of D'.
        limit: examples of a class and side, at most; None for all.
        seed: chooses them.
    """
    _check_labelled(left)
    _check_labelled(right)
    found = _distance(*(_by_class(labels, limit, seed, features.__getitem__) for features, labels in (left, right)))
    if found is None:
        raise UsageError("the two sides have no class in common")
    return found


def feature_distance(
    model: nn.Module, clients: Sequence[Examples], place: str, limit: int | None = LIMIT, seed: int = 0
) -> Distance:
    """The mean of `conditional_wasserstein` over all pairs of clients, of their features at a place of the model.

    Pairs without a common class are left out, and lower what is `covered`.
    """
    _check_clients(clients, least=2)

    def read(data: Examples, index: Tensor) -> Tensor:
        return features_at(model, data, place, index)[0]

    with own_rng():  # a dataset's own transforms may draw random numbers
        held = [_by_class(data.labels(), limit, seed, partial(read, data)) for data in clients]
    return _over_pairs(held)


def mean_wasserstein(clients: Sequence[Labelled], limit: int | None = LIMIT, seed: int = 0) -> Distance:
    """The same for features that are at hand: the mean of `conditional_wasserstein` over all pairs."""
    for labelled in clients:
        _check_labelled(labelled)
    return _over_pairs([_by_class(labels, limit, seed, features.__getitem__) for features, labels in clients])


def _over_pairs(held: Sequence[_Classes]) -> Distance:
    pairs = [_distance(*pair) for pair in combinations(held, 2)]
    found = [pair for pair in pairs if pair is not None]
    if not found:
        raise UsageError("no two clients have a class in common")
    return Distance(fmean(pair.value for pair in found), sum(pair.covered for pair in found) / len(pairs))


_Classes = dict[int, tuple[float, Any]]
"""Class → (its share of the examples, the features of the chosen ones as an array of float64)."""


def _by_class(labels: Tensor, limit: int | None, seed: int, read: Callable[[Tensor], Tensor]) -> _Classes:
    """One side's classes; `read` gives the features at an index. The choice is the same for equal sides."""
    if limit is not None and limit < 1:
        raise UsageError(f"the limit of examples a class must be 1 or more, not {limit}")
    own = {c: torch.nonzero(labels == c).flatten() for c in sorted(set(labels.tolist()))}
    chosen = [at[torch.randperm(len(at), generator=generator(seed, c))[:limit]] for c, at in own.items()]
    features = read(torch.cat(chosen)).detach().flatten(1).double().cpu()
    points = torch.split(features, [len(at) for at in chosen])
    return {c: (len(at) / len(labels), part.numpy()) for (c, at), part in zip(own.items(), points, strict=True)}


def _distance(left: _Classes, right: _Classes) -> Distance | None:
    """Def. 4.1 over the common classes; None where there are none."""
    common = {c: _transport(left[c][1], right[c][1]) for c in left if c in right}
    if not common:
        return None
    covered = [math.fsum(side[c][0] for c in common) for side in (left, right)]
    value = sum((left[c][0] / covered[0] + right[c][0] / covered[1]) / 2 * cost for c, cost in common.items())
    return Distance(value, fmean(covered))


def _transport(left: Any, right: Any) -> float:
    """W₁ between two samples, every point of a sample weighing the same."""
    try:
        import ot
    except ImportError:
        raise UsageError("Wasserstein distances need the package POT: pip install 'fedstrata[probes]'") from None
    if left.shape[1] != right.shape[1]:
        raise UsageError(f"features of {left.shape[1]} and of {right.shape[1]} numbers have no distance")
    middle = left.mean(0)  # small numbers lose less in the squares that distances are computed from
    cost = ot.dist(left - middle, right - middle, metric="euclidean")
    return float(ot.emd2([], [], cost, numItermax=10_000_000))


# Generalisation ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generalisation:
    """Client → accuracy of its local model on all other clients' examples together, and on its own."""

    others: dict[int, float]
    own: dict[int, float]

    @property
    def mean(self) -> float:
        """On others' examples, in the mean over the clients."""
        return fmean(self.others.values())


def generalisation(model: nn.Module, local: Mapping[int, Tensors], clients: Sequence[Examples]) -> Generalisation:
    """What local training contributes to generalisation, W_d(ρ(θ + Δ_m), D∖D_m) (Eq. 2), for each client m.

    The quality W_d is measured by accuracy instead of by the worst-case margin.

    Args:
        model: the module that the tensors belong to.
        local: client → its parameters and running statistics after training; what is missing is as in the model.
        clients: everybody's data.
    """
    _check_clients(clients, least=2)
    if not local or not local.keys() <= set(range(len(clients))):
        raise UsageError(f"local models belong to some of the clients 0 to {len(clients) - 1}, not to {list(local)}")
    sizes = [len(data) for data in clients]
    others, own = {}, {}
    with _reading(model) as scratch, torch.no_grad():
        mine: Tensors = {**dict(scratch.named_parameters()), **running(scratch)}
        before = clone(mine)
        for client, tensors in local.items():
            _check_names(tensors, mine, "the model has")
            if wrong := [n for n, tensor in tensors.items() if tensor.shape != mine[n].shape]:
                raise UsageError(f"client {client}'s '{wrong[0]}' has another shape than the model's")
            load(mine, {**before, **tensors})
            right = [sum(int((scratch(x).argmax(1) == y).sum()) for _, x, y in _batches(scratch, d)) for d in clients]
            own[client] = right[client] / sizes[client]
            others[client] = (sum(right) - right[client]) / (sum(sizes) - sizes[client])
    return Generalisation(others, own)


# Reading ----------------------------------------------------------------------------------------------------


@contextmanager
def _reading(model: nn.Module, training: bool = False) -> Iterator[nn.Module]:
    """A copy of the model to run; random generators are as before afterwards."""
    with own_rng():
        yield copy.deepcopy(model).train(training)


def _batches(
    model: nn.Module, data: Examples, batch_size: int = BATCH, index: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(rows of the index, inputs, labels), batch by batch; random transforms are the same in every pass."""
    index = torch.arange(len(data)) if index is None else index
    device = _device(model)
    seed_global(derive("probes"), device, everything=not isinstance(data, TensorExamples))
    by_batch = any(isinstance(m, _BatchNorm) and (m.training or m.running_mean is None) for m in model.modules())
    if by_batch and len(index) == 1:
        raise UsageError("a client with one example has no batch statistics, which this model normalises by")
    for rows in sheets(TensorExamples(index, index), "drop" if by_batch else "average", batch_size):
        x, y = data.batch(index[rows])
        yield rows, x.to(device), y.to(device)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _check_clients(clients: Sequence[Examples], least: int = 1) -> None:
    empty = [client for client, data in enumerate(clients) if not len(data)]
    if len(clients) < least or empty:
        which = f", and client {empty[0]} has none" if empty else ""
        raise UsageError(f"this needs {least} or more clients with examples; there are {len(clients)}{which}")


def _names(high: Iterable[str]) -> frozenset[str]:
    if isinstance(high, str):
        raise UsageError(f"the high part is several names of parameters, not '{high}'")
    return frozenset(high)


def _check_names(names: Iterable[str], known: Collection[str], who: str) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{who} no '{name}'{did_you_mean(name, known)}")


def _check_labelled(rows: Labelled) -> None:
    features, labels = rows
    if not len(labels) or len(features) != len(labels):
        raise UsageError(f"features need one label a row, not {len(labels)} labels for {len(features)} rows")
