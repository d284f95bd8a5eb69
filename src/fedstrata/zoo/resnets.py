"""Residual networks: resnet8 … resnet101 (He et al., CVPR 2016), plain versions and other channel plans.

Stages: `stem`, `layer1` … `layer4` (resnet8: `layer3`), `pool`, `head`. Parameter names say nothing about the
depth (`layer2.0.conv1.weight`, `layer2.0.shortcut.conv.weight`), so a shallower network's parameters are part
of a deeper one's, by name and by shape, wherever its block counts are no larger: resnet10 ⊂ 14 ⊂ 18 ⊂ 22 ⊂ 26
⊂ 34 and resnet50 ⊂ 101. All convolutions are padded, so images may have any size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn

from fedstrata.zoo.parts import images, named, positive

Stem = Literal["3x3", "7x7"]
Plan = Literal["normal", "mean", "reversed"]
Norm = Literal["batch", "group", "none"]


def channel_plan(plan: Plan, width: int, layers: int) -> list[int]:
    """The channels of each layer: normal w, 2w, 4w, 8w; mean: their average in each; reversed 8w, 4w, 2w, w.

    The divergence study's plans (§6.3.3) are those of w = 32: (32, 64, 128, 256), (120, 120, 120, 120) and
    (256, 128, 64, 32).
    """
    normal = [width * 2**index for index in range(layers)]
    if plan == "mean":
        return [round(sum(normal) / layers)] * layers
    return normal[::-1] if plan == "reversed" else normal


def _norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        # Fewer than four channels a group would leave nothing to normalise over once the image is down to one
        # pixel.
        groups = max((g for g in range(1, 33) if channels % g == 0 and channels // g >= 4), default=1)
        return nn.GroupNorm(groups, channels)
    return nn.Identity()


def _conv(inputs: int, outputs: int, kernel: int, stride: int, norm: Norm) -> nn.Conv2d:
    """A padded convolution; it has a bias only where no norm layer follows."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=norm == "none")


class _Block(nn.Module):
    """relu(body(x) + shortcut(x)), or relu(body(x)) without the residual link."""

    expansion: int

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.shortcut: nn.Module | None = None

    def link(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        """Add the residual link: the identity, or a 1×1 convolution where the shape changes."""
        if stride == 1 and inputs == outputs:
            self.shortcut = nn.Identity()
        else:
            conv = _conv(inputs, outputs, 1, stride, norm)
            self.shortcut = named(("conv", conv), ("norm", _norm(norm, outputs)))

    def body(self, x: Tensor) -> Tensor:
        """The block's convolutions, up to the last norm layer."""
        raise NotImplementedError

    def last(self) -> nn.Conv2d:
        """The convolution whose output meets the residual link."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, height, width) → (batch, outputs, height/stride, width/stride), rounded up."""
        out = self.body(x)
        if self.shortcut is not None:
            out = out + self.shortcut(x)
        return out.relu()


class BasicBlock(_Block):
    """Two 3×3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__(inputs, width, stride, norm)
        self.conv1 = _conv(inputs, width, 3, stride, norm)
        self.norm1 = _norm(norm, width)
        self.conv2 = _conv(width, width, 3, 1, norm)
        self.norm2 = _norm(norm, width)

    def body(self, x: Tensor) -> Tensor:
        """conv1, norm1, ReLU, conv2, norm2."""
        out: Tensor = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return out

    def last(self) -> nn.Conv2d:
        """conv2."""
        return self.conv2


class Bottleneck(_Block):
    """1×1, 3×3 and 1×1 convolutions, the last four times as wide; the 3×3 one has the stride."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__(inputs, width, stride, norm)
        self.conv1 = _conv(inputs, width, 1, 1, norm)
        self.norm1 = _norm(norm, width)
        self.conv2 = _conv(width, width, 3, stride, norm)
        self.norm2 = _norm(norm, width)
        self.conv3 = _conv(width, width * self.expansion, 1, 1, norm)
        self.norm3 = _norm(norm, width * self.expansion)

    def body(self, x: Tensor) -> Tensor:
        """conv1, norm1, ReLU, conv2, norm2, ReLU, conv3, norm3."""
        out = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu())).relu()
        final: Tensor = self.norm3(self.conv3(out))
        return final

    def last(self) -> nn.Conv2d:
        """conv3."""
        return self.conv3


def _initialise(net: nn.Sequential, norm: Norm) -> None:
    """He initialisation. Without norm layers, residual branches start at zero: the signal stays bounded."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in net.modules():
        if norm == "none" and isinstance(module, _Block) and module.shortcut is not None:
            nn.init.zeros_(module.last().weight)


def _resnet(
    name: str,
    blocks: Sequence[int],
    block: type[_Block] = BasicBlock,
    *,
    note: str = "",
    default_width: int = 64,
    default_stem: Stem = "3x3",
    default_maxpool: bool = False,
) -> Callable[..., nn.Sequential]:
    """The builder of the ResNet with that many blocks a layer."""

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
        channels, _, _ = images(name, input_shape, classes)
        positive(name, width=width)
        widths = channel_plan(plan, width, len(blocks))
        first = _conv(channels, widths[0], 3, 1, norm) if stem == "3x3" else _conv(channels, widths[0], 7, 2, norm)
        pool = [("pool", nn.MaxPool2d(3, 2, padding=1))] if maxpool else []
        children: list[tuple[str, nn.Module]] = [
            ("stem", named(("conv", first), ("norm", _norm(norm, widths[0])), ("relu", nn.ReLU()), *pool))
        ]
        inputs = widths[0]
        for index, (count, planes) in enumerate(zip(blocks, widths, strict=True)):
            layer: list[nn.Module] = []
            for position in range(count):
                stride = 2 if index > 0 and position == 0 else 1
                one = block(inputs, planes, stride, norm)
                if residual:
                    one.link(inputs, planes * block.expansion, stride, norm)
                layer.append(one)
                inputs = planes * block.expansion
            children.append((f"layer{index + 1}", nn.Sequential(*layer)))
        net = named(
            *children,
            ("pool", named(("average", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()))),
            ("head", nn.Linear(inputs, classes)),
        )
        _initialise(net, norm)
        return net

    kind = "bottleneck" if block is Bottleneck else "basic"
    counts = ", ".join(map(str, blocks))
    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"""ResNet-{name.removeprefix("resnet")}: {kind} blocks [{counts}]{note}.

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
    return build


# The divergence study says only "13-layer ResNet", four layers, w = 32. Six basic blocks have 13 convolutions
# with the stem, and the same number of parameters under its normal and its mean plan (within 1 %).
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
    "resnet14": _resnet("resnet14", (1, 2, 2, 1)),
    "resnet18": _resnet("resnet18", (2, 2, 2, 2)),
    "resnet22": _resnet("resnet22", (2, 3, 3, 2)),
    "resnet26": _resnet("resnet26", (3, 3, 3, 3)),
    "resnet34": _resnet("resnet34", (3, 4, 6, 3)),
    "resnet50": _resnet("resnet50", (3, 4, 6, 3), Bottleneck),
    "resnet101": _resnet("resnet101", (3, 4, 23, 3), Bottleneck),
}
