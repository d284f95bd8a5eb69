"""Augmentations: what is done, anew on every read, to a batch of images (channels first, floats in [0, 1]).

Named like everything else, and combined with `+` from left to right: `rrc`, `cj(hue=0.0)`, `rrc + flip`.
kornia does the work of `rrc`, `cj` and `flip`; there is one draw per image, from torch's global CPU generator, so
`torch.manual_seed` fixes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fedstrata.core.extras import missing
from fedstrata.core.lazy import torch
from fedstrata.core.parts import PartsShape
from fedstrata.core.spec import bind, parse_sum
from fedstrata.core.types import Augment
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, int, int]
Steps = tuple[Augment, ...]

MOST_PIXELS = 4096
"""Of a padding or a square: more is a mistake, and would not fit in memory."""


def none(shape: Shape) -> Steps:
    """No augmentation."""
    return ()


def rrc(
    shape: Shape, *, scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)
) -> Steps:
    """Random resized crop: a random window of each image, brought back to the image's size.

    Args:
        scale: the window's area, as a share of the image's, lies between these two.
        ratio: its width over its height lies between these two.
    """
    low, high = scale
    if not 0 < low <= high <= 1:
        raise UsageError(f"augmentation 'rrc': scale must be two numbers with 0 < low ≤ high ≤ 1, not {scale}")
    low, high = ratio
    if not 0 < low <= high < math.inf:
        raise UsageError(f"augmentation 'rrc': ratio must be two numbers with 0 < low ≤ high, not {ratio}")
    crop: Augment = _kornia().RandomResizedCrop(
        shape[1:], scale=scale, ratio=ratio, align_corners=False, same_on_batch=False
    )
    return (crop,)


def cj(
    shape: Shape,
    *,
    brightness: float = 0.4,
    contrast: float = 0.4,
    saturation: float = 0.4,
    hue: float = 0.1,
) -> Steps:
    """Colour jitter: each image's brightness, contrast, saturation and hue change by random factors.

    Images without three colour channels have neither saturation nor hue: only brightness and contrast change.
    The deeper-models paper names the technique and not its strength; the defaults are the ones in common use.

    Args:
        brightness: the factor lies within 1 ± this.
        contrast: the factor lies within 1 ± this.
        saturation: the factor lies within 1 ± this.
        hue: the shift, in turns of the colour circle, lies within ± this; at most 0.5.
    """
    for name, value in (("brightness", brightness), ("contrast", contrast), ("saturation", saturation)):
        if not 0 <= value < math.inf:
            raise UsageError(f"augmentation 'cj': {name} must be 0 or more, not {value}")
    if not 0 <= hue <= 0.5:
        raise UsageError(f"augmentation 'cj': hue must be 0 to 0.5, not {hue}")
    if shape[0] != 3:
        saturation = hue = 0.0
    jitter: Augment = _kornia().ColorJitter(brightness, contrast, saturation, hue, same_on_batch=False)
    return (jitter,)


def flip(shape: Shape, *, p: float = 0.5) -> Steps:
    """Horizontal flip: each image is mirrored, or not.

    Args:
        p: the chance of being mirrored.
    """
    if not 0 <= p <= 1:
        raise UsageError(f"augmentation 'flip': p must be 0 to 1, not {p}")
    mirror: Augment = _kornia().RandomHorizontalFlip(p=p, same_on_batch=False)
    return (mirror,)


def crop(shape: Shape, *, padding: int = 4) -> Steps:
    """Random crop: each image is put on a black ground that is larger, and a window of its own size is taken.

    Args:
        padding: pixels of the ground on each side.
    """
    if not 1 <= padding <= MOST_PIXELS:
        raise UsageError(f"augmentation 'crop': padding must be 1 to {MOST_PIXELS} pixels, not {padding}")
    return (partial(shift_at_random, padding=padding),)


def shift_at_random(images: Tensor, padding: int) -> Tensor:
    """Windows of the images' own size, each at a place of its own, of the images with zeros around them."""
    count, _, height, width = images.shape
    whole = torch.nn.functional.pad(images, (padding,) * 4)
    down, right = torch.randint(2 * padding + 1, (2, count))
    rows, columns = down[:, None] + torch.arange(height), right[:, None] + torch.arange(width)
    picked = torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]
    return whole.movedim(1, -1)[picked].movedim(-1, 1).contiguous()


def cutout(shape: Shape, *, size: int = 16, fill: tuple[float, ...] = (0.0,)) -> Steps:
    """Cutout (DeVries and Taylor, 2017): a square of each image is painted over; its middle may be any pixel.

    Args:
        size: the square's side; what would lie beyond the image is cut off. Even.
        fill: its colour, one number for all channels or one for each; authors who cut out after standardising paint it
            in the mean colour of their dataset.
    """
    if not (2 <= size <= MOST_PIXELS and size % 2 == 0):
        raise UsageError(f"augmentation 'cutout': size must be an even number from 2 to {MOST_PIXELS}, not {size}")
    if len(fill) not in (1, shape[0]) or not all(0 <= value <= 1 for value in fill):
        raise UsageError(
            f"augmentation 'cutout': fill must be one number from 0 to 1, or {shape[0]}, one for each channel, "
            f"not {fill}"
        )
    return (partial(paint_squares, size=size, fill=fill),)


def paint_squares(images: Tensor, size: int, fill: tuple[float, ...]) -> Tensor:
    """The images, each with a square of that side painted over around a pixel of its own."""
    count, _, height, width = images.shape
    middle = torch.stack([torch.randint(height, (count,)), torch.randint(width, (count,))])
    inside = []
    for begin, side in zip(middle - size // 2, (height, width), strict=True):
        place = torch.arange(side) - begin[:, None]
        inside.append((place >= 0) & (place < size))
    square = inside[0][:, None, :, None] & inside[1][:, None, None, :]
    return torch.where(square, torch.tensor(fill, dtype=images.dtype)[:, None, None], images)


def both(shape: Shape) -> Steps:
    """Random resized crop, then colour jitter: the mixture of the deeper-models paper (its Table 5)."""
    return rrc(shape) + cj(shape)


AUGMENTS: dict[str, Callable[..., Steps]] = {
    "none": none,
    "rrc": rrc,
    "cj": cj,
    "flip": flip,
    "both": both,
    "crop": crop,
    "cutout": cutout,
}


@dataclass(frozen=True)
class Augmentation:
    """Steps in a row on a batch of images; the result has the same shape."""

    steps: Steps

    def __call__(self, images: Tensor) -> Tensor:
        """The images after all steps."""
        with torch.no_grad():
            for step in self.steps if len(images) else ():
                images = step(images)
        return images


def build_augment(spec: str, input_shape: Sequence[int]) -> Augment | None:
    """The augmentation of that name for images of that shape; None for `none`.

    Args:
        spec: names with arguments (see `AUGMENTS`), joined by `+`.
        input_shape: shape of one input: channels, height, width.

    Raises:
        UsageError: for an unknown name, an impossible value, inputs that are no images, or where kornia is
            missing.
    """
    calls = [bind("augmentation", AUGMENTS, call) for call in parse_sum(spec)]
    if all(function is none for function, _ in calls):
        return None
    if isinstance(input_shape, PartsShape) or len(input_shape) != 3 or min(input_shape) < 1:
        shape = input_shape if isinstance(input_shape, PartsShape) else tuple(input_shape)
        raise UsageError(f"augmentation '{spec}' needs images (channels, height, width), not inputs of shape {shape}")
    channels, height, width = input_shape
    steps = [step for function, given in calls for step in function((channels, height, width), **given)]
    return Augmentation(tuple(steps))


def _kornia() -> Any:
    """kornia's augmentations, imported where first needed (it takes two seconds)."""
    try:
        import kornia.augmentation
    except ImportError:
        raise missing("kornia", "augmentation needs") from None
    return kornia.augmentation
