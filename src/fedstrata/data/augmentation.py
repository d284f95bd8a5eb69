"""Augmentations: what is done, anew on every read, to a batch of images (channels first, floats in [0, 1]).

Named like everything else, and combined with `+` from left to right: `rrc`, `cj(hue=0.0)`, `rrc + flip`.
kornia does the work, with one draw per image; the draws come from torch's global CPU generator, so
`torch.manual_seed` fixes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def both(shape: Shape) -> Steps:
    """Random resized crop, then colour jitter: the mixture of the deeper-models paper (its Table 5)."""
    return rrc(shape) + cj(shape)


AUGMENTS: dict[str, Callable[..., Steps]] = {"none": none, "rrc": rrc, "cj": cj, "flip": flip, "both": both}


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
