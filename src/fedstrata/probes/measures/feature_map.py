"""A map of clients' features in the plane (InCo, Figs. 9d to 9f)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstrata.core.rng import derive, generator
from fedstrata.errors import UsageError, positive
from fedstrata.probes.measures.reading import check_labelled


@dataclass(frozen=True, eq=False)
class Embedding:
    """Points in the plane, one per row; the class and the client of each, and which of the given rows it is."""

    points: Tensor
    labels: Tensor
    clients: Tensor
    rows: Tensor


def embedding(
    features: Tensor,
    labels: Tensor,
    clients: Tensor | Sequence[int],
    seed: int = 0,
    perplexity: float = 30.0,
    limit: int | None = 1000,
) -> Embedding:
    """t-SNE of features (van der Maaten and Hinton, 2008), two numbers per row, by scikit-learn (InCo, Figs. 9d to 9f).

    Args:
        features: rows first, of one or several clients' models; further axes are flattened.
        labels: the class of each row.
        clients: the client whose model each row comes from.
        seed: chooses the rows and begins the search; the same seed gives the same points.
        perplexity: about how many neighbours a point has; less than there are rows.
        limit: rows, at most, chosen at random; None for all.
    """
    check_labelled((features, labels))
    owners = torch.as_tensor(clients)
    if len(owners) != len(labels):
        raise UsageError(f"features need one client per row, not {len(owners)} clients for {len(labels)} rows")
    if limit is not None and limit < 1:
        raise UsageError(f"the limit of rows must be 1 or more, not {limit}")
    order = torch.randperm(len(labels), generator=generator("embedding", seed))
    rows = order[:limit].sort().values
    points = features.detach().cpu()[rows].reshape(len(rows), -1).float()
    _check_map(points, perplexity)
    return Embedding(_plane(points, seed, perplexity), labels.cpu()[rows], owners.cpu()[rows], rows)


def _check_map(points: Tensor, perplexity: float) -> None:
    positive("embedding", perplexity=perplexity)
    if perplexity >= len(points):
        raise UsageError(f"embedding's perplexity must be less than the {len(points)} rows, not {perplexity}")
    if points.shape[1] < 2 or not points.isfinite().all() or (points == points[0]).all():
        raise UsageError("a map needs rows of 2 or more finite numbers that are not all the same")


def _plane(points: Tensor, seed: int, perplexity: float) -> Tensor:
    """On one thread: sums then have one order, and threads that wait for each other cost more than they save."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    with threadpool_limits(1):
        search = TSNE(perplexity=perplexity, init="pca", learning_rate="auto", random_state=derive(seed) % 2**32)
        return torch.from_numpy(search.fit_transform(points.numpy()))
