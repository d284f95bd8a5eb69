"""Clients' features: reading them, and their conditional distance (FedImpro, Def. 4.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.core.extras import missing
from fedstrata.core.rng import generator, preserve_rng
from fedstrata.core.types import Examples
from fedstrata.data.examples import as_examples
from fedstrata.errors import UsageError
from fedstrata.models.taps import value_at
from fedstrata.probes.measures.reading import Data, Labelled, batches, check_clients, check_labelled, scratch_copy

LIMIT = 200
"""Examples of a class that are transported, at most: the cost of a class grows faster than its square."""


@dataclass(frozen=True)
class Distance:
    """A conditional Wasserstein distance, and the share of the examples whose class both sides have."""

    value: float
    covered: float


def features_at(model: nn.Module, data: Data, place: str, index: Tensor | None = None) -> Labelled:
    """(what a module puts out for a client's examples, or for those at `index`, in their order; their labels).

    The place is a module's name, `Into` a module, or "" for the model's outputs. Features keep the module's own shape.
    """
    held = as_examples(data)
    if not len(held) or (index is not None and not len(index)):
        raise UsageError("there are no examples to take features of")
    with scratch_copy(model) as scratch, torch.no_grad():
        parts = [
            (rows, value_at(scratch, place, partial(scratch, x)).cpu(), y.cpu())
            for rows, x, y in batches(scratch, held, index=index)
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
    check_labelled(left)
    check_labelled(right)
    found = _distance(*(_by_class(labels, limit, seed, features.__getitem__) for features, labels in (left, right)))
    if found is None:
        raise UsageError("the two sides have no class in common")
    return found


def feature_distance(
    model: nn.Module, clients: Sequence[Data], place: str, limit: int | None = LIMIT, seed: int = 0
) -> Distance:
    """The mean of `conditional_wasserstein` over all pairs of clients, of their features at a place of the model.

    Pairs without a common class are left out, and lower what is `covered`.
    """
    examples = check_clients(clients, least=2)

    def read_features(data: Examples, index: Tensor) -> Tensor:
        return features_at(model, data, place, index)[0]

    with preserve_rng():  # a dataset's own transforms may draw random numbers
        held = [_by_class(data.labels(), limit, seed, partial(read_features, data)) for data in examples]
    return _over_pairs(held)


def mean_wasserstein(clients: Sequence[Labelled], limit: int | None = LIMIT, seed: int = 0) -> Distance:
    """The same for features that are at hand: the mean of `conditional_wasserstein` over all pairs."""
    for labelled in clients:
        check_labelled(labelled)
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
        raise UsageError(f"the limit of examples per class must be 1 or more, not {limit}")
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
        raise missing("ot", "Wasserstein distances need") from None
    if left.shape[1] != right.shape[1]:
        raise UsageError(f"features of {left.shape[1]} and of {right.shape[1]} numbers have no distance")
    middle = left.mean(0)  # small numbers lose less in the squares that distances are computed from
    cost = ot.dist(left - middle, right - middle, metric="euclidean")
    return float(ot.emd2([], [], cost, numItermax=10_000_000))
