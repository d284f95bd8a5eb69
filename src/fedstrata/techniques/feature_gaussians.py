"""Gaussians of features, one per class: gathered from batches, merged over clients, and sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from fedstrata.core.lazy import torch
from fedstrata.core.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor

Per = Literal["element", "channel"]


def channel_axis(axes: int) -> int:
    """Where the channels of features with so many axes are: after the rows in pictures, else last."""
    return 1 if axes == 4 else axes - 1


def rows(features: Tensor, labels: Tensor, per: Per) -> tuple[Tensor, Tensor]:
    """What one Gaussian per column describes: (rows, their labels); a channel's positions are rows of their own."""
    if per == "element" or features.dim() < 3:
        return features.flatten(1), labels
    last = features.movedim(channel_axis(features.dim()), -1)
    positions = last[0, ..., 0].numel()
    return last.reshape(-1, last.shape[-1]), labels.repeat_interleave(positions)


def shape_of(features: Tensor, per: Per) -> torch.Size:
    """The shape of a class's mean."""
    if per == "element" or features.dim() < 3:
        return features.shape[1:]
    return torch.Size([features.shape[channel_axis(features.dim())]])


def moments(values: Tensor, labels: Tensor, classes: int, real: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(n_c, mean, variance) of every class's rows; zeros for a class without any. `real` is 0 for rows to leave out."""
    member = (labels[:, None] == torch.arange(classes, device=labels.device)).to(values.dtype)
    if real is not None:
        member = member * real[:, None]
    count = member.sum(0)
    share = member.T / count.clamp(min=1)[:, None]
    mean = share @ values
    away = values - mean[labels]
    return count, mean, share @ away.mul_(away)  # not square_, which vmap does not know


def move_average(old: Tensor, new: Tensor, known: Tensor, here: Tensor, beta: float) -> Tensor:
    """β·old + (1 − β)·new for the classes that are here: Eq. 6 and 7; what was not known before is the new one."""
    keep = (~here).to(old.dtype) + beta * (here & known).to(old.dtype)
    return torch.lerp(new, old, keep.view(-1, *[1] * (old.dim() - 1)))


def draw_features(mean: Tensor, std: Tensor, shape: Sequence[int], rng: torch.Generator) -> Tensor:
    """ĥ ~ N(μ, σ²) for every row of μ and σ, in the features' shape; a channel's numbers are those of its positions."""
    noise = torch.randn(len(mean), *shape, generator=rng, dtype=mean.dtype).to(mean.device)
    if mean.shape != noise.shape:
        wide = [len(mean), *[1] * len(shape)]
        wide[channel_axis(noise.dim())] = -1
        mean, std = mean.view(wide), std.view(wide)
    return noise.mul_(std).add_(mean)


Source = tuple["Tensor", "Tensor", "Tensor"]
"""(classes, their means, their standard deviations) to sample from."""


def sample(source: Source, count: int, shape: Sequence[int], rng: torch.Generator) -> Tensors:
    """Features of classes that take turns, from a random one on, and their labels."""
    classes, mean, std = source
    first = int(torch.randint(len(classes), (), generator=rng))
    turn = (torch.arange(count, device=classes.device) + first) % len(classes)
    return {"features": draw_features(mean[turn], std[turn], shape, rng), "labels": classes[turn]}


def sample_alike(source: Source, labels: Tensor, count: int, shape: Sequence[int], rng: torch.Generator) -> Tensors:
    """Features of these labels' classes, over and over until there are enough; `real` is 0 where one is not known.

    In its place there is a row of another class, so that a batch has as many rows whatever is known.
    """
    classes, mean, std = source
    wanted = labels[torch.arange(count, device=labels.device) % len(labels)]
    turn = torch.searchsorted(classes, wanted).clamp(max=len(classes) - 1)
    features = draw_features(mean[turn], std[turn], shape, rng)
    return {"features": features, "labels": classes[turn], "real": (classes[turn] == wanted).to(mean.dtype)}


def average(total: Tensors) -> Tensors:
    """Class by class, means over clients: of means, and of variances, which the means' own variance may be added to.

    `square` is the sum of the squared means, where there is one: by the law of total variance, features of all clients
    together vary as they do within each one, in the mean, and as the clients' means do.
    """
    weight = total["weight"].clamp(min=1)
    mean, variance, *squares = (
        total[n] / weight.view(-1, *[1] * (total[n].dim() - 1)) for n in ("mean", "variance", "square") if n in total
    )
    for square in squares:
        variance = variance + (square - mean**2).clamp(min=0)
    return {"mean": mean, "variance": variance}
