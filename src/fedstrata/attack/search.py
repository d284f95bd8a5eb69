"""Feature inversion, as pure functions: images from their features in a model's low part, and how near they come.

Images are (N, C, H, W) with values from 0 (black) to 1 (white). All measures are per image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedstrata.techniques.feature_gaussians import channel_axis

Per = Literal["element", "channel"]
"""Whether FedImpro shares means of every element of the features, or of every channel."""

BEST = 100.0
"""The decibels of two images that are the same: `psnr` returns no more."""

_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2


def summarise_features(features: Tensor, per: Per) -> Tensor:
    """What a shared mean averages over the images: a row of all elements, or of the means of all channels.

    Channels are where FedImpro has them.
    """
    if per == "element" or features.dim() < 3:
        return features.flatten(1)
    return features.movedim(channel_axis(features.dim()), 1).flatten(2).mean(2)


def total_variation(images: Tensor) -> Tensor:
    """(Σ |x[i+1, j] − x[i, j]| + Σ |x[i, j+1] − x[i, j]|) / (number of values)."""
    down, right = images.diff(dim=-2).abs(), images.diff(dim=-1).abs()
    return (down.sum((1, 2, 3)) + right.sum((1, 2, 3))) / images[0].numel()


def psnr(images: Tensor, originals: Tensor) -> Tensor:
    """The peak signal-to-noise ratio 10·log10(1 / MSE) in decibels, at most `BEST`."""
    error = (images.double() - originals.double()).square().mean((1, 2, 3))
    return -10 * error.clamp(min=10 ** (-BEST / 10)).log10()


def ssim(images: Tensor, originals: Tensor) -> Tensor:
    """The mean structural similarity of Wang, Bovik, Sheikh and Simoncelli (2004), averaged over the channels.

    A Gaussian window of 11×11 with σ = 1.5, wherever it lies wholly inside; K1 = 0.01, K2 = 0.03, L = 1. Where a side
    is shorter, the window has the largest odd length that fits.
    """
    x, y = images.double(), originals.double()
    mean_x, mean_y = _blur(x), _blur(y)
    var_x, var_y = _blur(x * x) - mean_x**2, _blur(y * y) - mean_y**2
    covariance = _blur(x * y) - mean_x * mean_y
    like = (2 * mean_x * mean_y + _C1) * (2 * covariance + _C2)
    return (like / ((mean_x**2 + mean_y**2 + _C1) * (var_x + var_y + _C2))).mean((1, 2, 3))


def _blur(images: Tensor) -> Tensor:
    """The local means of each channel under the Gaussian window, wherever it fits."""
    count, channels, height, width = images.shape
    flat = images.reshape(count * channels, 1, height, width)
    for axis, side in ((2, height), (3, width)):
        window = _window(side)
        flat = F.conv2d(flat, window.view(1, 1, *((-1, 1) if axis == 2 else (1, -1))))
    return flat.view(count, channels, *flat.shape[2:])


def _window(side: int) -> Tensor:
    size = min(_WINDOW, side - 1 + side % 2)
    weights = (-0.5 * ((torch.arange(size) - size // 2).double() / _SIGMA) ** 2).exp()
    return weights / weights.sum()


def grey_images(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Where every search starts: mid-grey with a little noise."""
    return (0.5 + 0.02 * torch.randn(shape, generator=random)).clamp_(0, 1)


def feature_error(found: Tensor, target: Tensor) -> Tensor:
    """‖f − t‖² / ‖t‖² for each row, computed so that no scale overflows."""
    size = target.double().square().mean(1, keepdim=True).sqrt().clamp(min=1e-12).to(target.dtype)
    return ((found - target) / size).square().mean(1)


def descend(
    features: Callable[[Tensor], Tensor], target: Tensor, start: Tensor, *, steps: int, lr: float, tv: float
) -> Iterator[Tensor]:
    """Search images whose features are `target`, by plain gradient descent; yields them after every step.

    Minimises `feature_error(features(x), target) + tv · total_variation(x)` for each image on its own: the gradient,
    divided by its root mean square, times a step that falls from `lr` to 0 along a cosine, then x clamped to [0, 1].
    Since the length of the gradient does not count, one `lr`, in units of a pixel's range, fits every model and cut.

    Args:
        features: (N, C, H, W) → (N, number of features).
        target: (N, number of features).
        start: the first images.
        steps: how many.
        lr: the first step, as the root mean square of the change of a pixel.
        tv: weight of the total variation, the prior that neighbouring pixels are alike.
    """
    x = start
    for step in range(steps):
        x = x.detach().requires_grad_()
        loss = feature_error(features(x), target) + tv * total_variation(x)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        gradient = gradient.nan_to_num(0.0, 0.0, 0.0)  # no step where the gradient gives no direction
        length = gradient.square().mean((1, 2, 3), keepdim=True).sqrt().clamp(min=1e-30)
        size = 0.5 * lr * (1 + math.cos(math.pi * step / steps))
        x = (x.detach() - size * gradient / length).clamp_(0, 1)
        yield x
