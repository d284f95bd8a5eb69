"""A U-Net, which gives a class to every pixel (Ronneberger et al., MICCAI 2015), small and with group norm."""

from __future__ import annotations

from fedstrata.core.lazy import nn
from fedstrata.models.zoo.parts import check_images, check_positive, sequential


def unet(
    input_shape: tuple[int, ...], classes: int, *, width: int = 16, depth: int = 2, convs: int = 2
) -> nn.Sequential:
    """A U-Net for images of any size: (channels, height, width) → a logit per class and pixel.

    Level by level the image is halved (rounded up) and the channels are doubled, `depth` times; on the way back it is
    enlarged (nearest neighbour) and joined to what the level began with. Each level has `convs` convolutions before and
    after that; one with fewer is part of one with more, for clients of different depth. Convolutions are padded, and
    group norm stands for the paper's none: it keeps no statistics. Stages: `stem` (the first convolution), `levels`
    (all of them, one inside the other, since they share links), `head` (a 1×1 convolution).
    """
    check_positive("unet", width=width, depth=depth, convs=convs)
    channels, *_ = check_images("unet", input_shape, classes, smallest=2**depth)
    from fedstrata.models.zoo.layers import Level

    levels = _convs(width * 2 ** (depth - 1), width * 2**depth, convs)
    for level in reversed(range(depth)):
        here, below = width * 2**level, width * 2 ** (level + 1)
        before = width if level == 0 else here // 2
        levels = Level(_convs(before, here, convs), levels, _convs(here + below, here, convs))
    net = sequential(("stem", _conv(channels, width)), ("levels", levels), ("head", nn.Conv2d(width, classes, 1)))
    for module in net.modules():
        if isinstance(module, nn.Conv2d) and module.bias is None:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    """A 3×3 convolution with its norm layer and its activation."""
    from fedstrata.models.zoo.layers import conv, norm_layer

    return sequential(
        ("conv", conv(inputs, outputs, 3, 1, "group")), ("norm", norm_layer("group", outputs)), ("relu", nn.ReLU())
    )


def _convs(inputs: int, outputs: int, convs: int) -> nn.Module:
    """Several of them."""
    names = ["first", "second", *(f"conv{n + 1}" for n in range(2, convs))][:convs]
    return sequential(*((name, _conv(outputs if n else inputs, outputs)) for n, name in enumerate(names)))
