"""Residual networks: resnet8 … resnet101 (He et al., CVPR 2016), plain versions and other channel plans.

Stages: `stem`, `layer1` … `layer4` (resnet8: `layer3`), `pool`, `head`. Parameter names say nothing about the
depth (`layer2.0.conv1.weight`, `layer2.0.shortcut.conv.weight`), so a shallower network's parameters are part
of a deeper one's, by name and by shape, wherever its block counts are no larger: resnet10 ⊂ 14 ⊂ 18 ⊂ 22 ⊂ 26
⊂ 34 and resnet50 ⊂ 101. All convolutions are padded, so images may have any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from fedstrata.core.lazy import nn
from fedstrata.models.zoo.parts import Norm, check_images, check_positive, sequential

if TYPE_CHECKING:
    from fedstrata.models.zoo.layers import Block

Kind = Literal["basic", "bottleneck"]
Stem = Literal["3x3", "7x7"]
Plan = Literal["normal", "mean", "reversed"]


def channel_plan(plan: Plan, width: int, layers: int) -> list[int]:
    """The channels of each layer: normal w, 2w, 4w, 8w; mean: their average in each; reversed 8w, 4w, 2w, w.

    The divergence study's plans (§6.3.3) are those of w = 32: (32, 64, 128, 256), (120, 120, 120, 120) and
    (256, 128, 64, 32).
    """
    normal = [width * 2**index for index in range(layers)]
    if plan == "mean":
        return [round(sum(normal) / layers)] * layers
    return normal[::-1] if plan == "reversed" else normal


def _initialise(net: nn.Sequential, norm: Norm) -> None:
    """He initialisation. Without norm layers, residual branches start at zero: the signal stays bounded."""
    from fedstrata.models.zoo.layers import Block

    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in net.modules():
        if norm == "none" and isinstance(module, Block) and module.shortcut is not None:
            nn.init.zeros_(module.last().weight)


def _stem(channels: int, width: int, kind: Stem, maxpool: bool, norm: Norm) -> nn.Sequential:
    """The first convolution with its norm layer, its activation and, where wanted, a max-pool."""
    from fedstrata.models.zoo.layers import conv, norm_layer

    first = conv(channels, width, 3, 1, norm) if kind == "3x3" else conv(channels, width, 7, 2, norm)
    pool = [("pool", nn.MaxPool2d(3, 2, padding=1))] if maxpool else []
    return sequential(("conv", first), ("norm", norm_layer(norm, width)), ("relu", nn.ReLU()), *pool)


def _layers(
    block: type[Block], blocks: Sequence[int], widths: Sequence[int], residual: bool, norm: Norm
) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of a ResNet; the first block of each layer but the first halves the image."""
    inputs = widths[0]
    for index, (count, planes) in enumerate(zip(blocks, widths, strict=True)):
        outputs = planes * block.expansion
        layer: list[nn.Module] = []
        for position in range(count):
            stride = 2 if index > 0 and position == 0 else 1
            one = block(inputs, planes, stride, norm)
            if residual:
                one.link(inputs, outputs, stride, norm)
            layer.append(one)
            inputs = outputs
        yield f"layer{index + 1}", nn.Sequential(*layer)


def _help(name: str, blocks: Sequence[int], kind: Kind, note: str) -> str:
    """The docstring of a builder."""
    return f"""ResNet-{name.removeprefix("resnet")}: {kind} blocks [{", ".join(map(str, blocks))}]{note}.

    Args:
        input_shape: (channels, height, width) of an image.
        classes: how many logits to give.
        width: w in the channel plan.
        stem: `3x3` with stride 1 for small images, or `7x7` with stride 2 for large ones.
        maxpool: whether a 3×3 max-pool with stride 2 ends the stem.
        residual: whether the blocks have their links; without, the network is plain and has no shortcut
            convolutions.
        plan: channels of the layers: `normal` w, 2w, 4w, 8w; `mean`, their average in each; `reversed`.
        norm: `batch`, `group` (at most 32 groups of at least 4 channels) or `none`.
    """


def _resnet(
    name: str,
    blocks: Sequence[int],
    kind: Kind = "basic",
    *,
    note: str = "",
    default_width: int = 64,
    default_stem: Stem = "3x3",
    default_maxpool: bool = False,
) -> Callable[..., nn.Sequential]:
    """The builder of the ResNet with that many blocks per layer."""

    def build(
        input_shape: tuple[int, ...],
        classes: int,
        *,
        width: int = default_width,
        stem: Stem = default_stem,
        maxpool: bool = default_maxpool,
        residual: bool = True,
        plan: Plan = "normal",
        norm: Norm = "batch",
    ) -> nn.Sequential:
        from fedstrata.models.zoo.layers import BasicBlock, Bottleneck

        block = BasicBlock if kind == "basic" else Bottleneck
        channels, _, _ = check_images(name, input_shape, classes)
        check_positive(name, width=width)
        widths = channel_plan(plan, width, len(blocks))
        net = sequential(
            ("stem", _stem(channels, widths[0], stem, maxpool, norm)),
            *_layers(block, blocks, widths, residual, norm),
            ("pool", sequential(("average", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()))),
            ("head", nn.Linear(widths[-1] * block.expansion, classes)),
        )
        _initialise(net, norm)
        return net

    build.__name__ = build.__qualname__ = name
    build.__doc__ = _help(name, blocks, kind, note)
    return build


# The divergence study says only "13-layer ResNet", four layers, w = 32. Six basic blocks have 13 convolutions
# with the stem, and the same number of parameters under its normal and its mean plan (within 1 %).
# resnet10, 14, 18, 22 and 26 are InCo Aggregation's family, with the blocks of its authors' code.
RESNETS: dict[str, Callable[..., nn.Sequential]] = {
    "resnet8": _resnet(
        "resnet8",
        (1, 1, 1),
        note=", FedPart's, with its large stem",
        default_stem="7x7",
        default_maxpool=True,
    ),
    "resnet10": _resnet("resnet10", (1, 1, 1, 1)),
    "resnet13": _resnet("resnet13", (1, 2, 2, 1), note=" and half width, the divergence study's", default_width=32),
    "resnet14": _resnet("resnet14", (1, 1, 2, 2)),
    "resnet18": _resnet("resnet18", (2, 2, 2, 2)),
    "resnet22": _resnet("resnet22", (2, 2, 3, 3)),
    "resnet26": _resnet("resnet26", (3, 3, 3, 3)),
    "resnet34": _resnet("resnet34", (3, 4, 6, 3)),
    "resnet50": _resnet("resnet50", (3, 4, 6, 3), "bottleneck"),
    "resnet101": _resnet("resnet101", (3, 4, 23, 3), "bottleneck"),
}
