"""Convolutional networks without norm layers or residual links: cnn2, cnn4, cnn8, vgg9.

Every max-pool halves the image, rounding down, so the sides of an image must double with every pool: 8×8
is enough for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedstrata.core.lazy import nn
from fedstrata.errors import UsageError
from fedstrata.models.zoo.parts import check_images, check_positive, sequential


def _layer(channels: int, widths: Sequence[int], kernel: int = 3) -> nn.Sequential:
    """Same-size convolutions, each with a ReLU, then a max-pool that halves the image."""
    children: list[tuple[str, nn.Module]] = []
    for index, width in enumerate(widths, start=1):
        children.append((f"conv{index}", nn.Conv2d(channels, width, kernel, padding=kernel // 2)))
        children.append((f"relu{index}", nn.ReLU()))
        channels = width
    return sequential(*children, ("pool", nn.MaxPool2d(2)))


def _dense(inputs: int, outputs: int) -> nn.Sequential:
    return sequential(("linear", nn.Linear(inputs, outputs)), ("relu", nn.ReLU()))


def cnn2(input_shape: tuple[int, ...], classes: int, *, width: int = 32, hidden: int = 512) -> nn.Sequential:
    """Two 5×5 convolutions and two dense layers, the small CNN of the FedAvg paper.

    Convolutions of `width` and 2·`width` channels, each followed by a max-pool, then `hidden` units and the
    classifier (McMahan et al., AISTATS 2017): 1,663,370 parameters for 28×28 grey images and 10 classes.
    """
    channels, height, breadth = check_images("cnn2", input_shape, classes, smallest=4)
    check_positive("cnn2", width=width, hidden=hidden)
    return sequential(
        ("layer1", _layer(channels, [width], kernel=5)),
        ("layer2", _layer(width, [2 * width], kernel=5)),
        ("flatten", nn.Flatten()),
        ("fc", _dense(2 * width * (height // 4) * (breadth // 4), hidden)),
        ("head", nn.Linear(hidden, classes)),
    )


def _plain(
    model: str, input_shape: tuple[int, ...], classes: int, width: int, growth: int, convs: Sequence[int]
) -> nn.Sequential:
    """Three layers of 3×3 convolutions, `convs` in each, each `growth` times as wide as the last; the classifier."""
    channels, height, breadth = check_images(model, input_shape, classes, smallest=8)
    check_positive(model, width=width, growth=growth)
    second, third = width * growth, width * growth**2
    net = sequential(
        ("layer1", _layer(channels, [width] * convs[0])),
        ("layer2", _layer(width, [second] * convs[1])),
        ("layer3", _layer(second, [third] * convs[2])),
        ("flatten", nn.Flatten()),
        ("head", nn.Linear(third * (height // 8) * (breadth // 8), classes)),
    )
    for module in net.modules():
        if isinstance(module, nn.Conv2d):  # without norm layers, PyTorch's default lets eight layers fade out
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return net


def cnn4(input_shape: tuple[int, ...], classes: int, *, width: int = 32, growth: int = 2) -> nn.Sequential:
    """Three 3×3 convolutions and a classifier: the shallow CNN of the divergence study.

    The study ("4-layer CNN", Fig. 3) gives no widths: here `width`, 2·`width`, 4·`width`, a max-pool after
    each; with `growth` 1 all are `width`, with 3 they are `width`, 3·`width`, 9·`width`.
    """
    return _plain("cnn4", input_shape, classes, width, growth, (1, 1, 1))


def cnn8(input_shape: tuple[int, ...], classes: int, *, width: int = 32, growth: int = 2) -> nn.Sequential:
    """Seven 3×3 convolutions and a classifier: the deep CNN of the divergence study.

    As `cnn4` ("8-layer CNN", Fig. 3), with 2, 2 and 3 convolutions between the max-pools.
    """
    return _plain("cnn8", input_shape, classes, width, growth, (2, 2, 3))


def vgg9(
    input_shape: tuple[int, ...], classes: int, *, width: int = 32, hidden: int = 512, convs: int = 2
) -> nn.Sequential:
    """VGG-9: six 3×3 convolutions and three dense layers, without norm layers.

    Convolutions of w, 2w | 4w, 4w | 8w, 8w channels (w = `width`), a max-pool after each pair, then two
    layers of `hidden` units and the classifier: the VGG-9 of the federated literature, 3,491,530 parameters
    for 32×32 colour images and 10 classes. Initialised as in FedNLR: Kaiming-uniform convolutions,
    Xavier-normal linear layers; biases start at zero. With `convs` convolutions per layer instead of two (12 layers
    with 3, 15 with 4) the shallower networks are parts of the deeper ones.
    """
    channels, height, breadth = check_images("vgg9", input_shape, classes, smallest=8)
    check_positive("vgg9", width=width, hidden=hidden)
    if convs < 2:
        raise UsageError(f"model 'vgg9': convs must be 2 or more, not {convs}")
    net = sequential(
        ("layer1", _layer(channels, [width, *[2 * width] * (convs - 1)])),
        ("layer2", _layer(2 * width, [4 * width] * convs)),
        ("layer3", _layer(4 * width, [8 * width] * convs)),
        ("flatten", nn.Flatten()),
        ("fc1", _dense(8 * width * (height // 8) * (breadth // 8), hidden)),
        ("fc2", _dense(hidden, hidden)),
        ("head", nn.Linear(hidden, classes)),
    )
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return net
