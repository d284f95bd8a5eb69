"""Layers that the models need and torch does not have.

They are not beside the models' builders because a class needs its base when it is defined, and names of models do
without torch (`fedstrata.core.lazy`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedstrata.models.zoo.parts import Norm, sequential


class First(nn.Module):
    """The first of what a module returns, where that may be a tuple."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Whatever shape the layer gives."""
        out = self.layer(x)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first


class TakeStep(nn.Module):
    """One step of a sequence: (batch, length, features) → (batch, features)."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        """The features at `index`."""
        return x[:, self.index]


class Tokens(nn.Module):
    """A layer of Swin blocks on a fixed grid of patches: (batch, patches, features) → the same, or merged."""

    def __init__(self, layer: nn.Module, grid: tuple[int, int]) -> None:
        super().__init__()
        self.layer = layer
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks; the library's layer returns the features first, then things that are not needed here."""
        out = self.layer(x, self.grid)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first


class MeanText(nn.Module):
    """A text's class from the mean over its own tokens, as models of sentence embeddings have it; padding is left out.

    Args:
        name: of the encoder, as its library calls it inside a classifier.
        encoder: puts out `last_hidden_state`.
        head: from the mean to the classes.
        dropout: of the mean.
    """

    def __init__(self, name: str, encoder: nn.Module, head: nn.Module, dropout: float) -> None:
        super().__init__()
        self._name, self.config = name, getattr(encoder, "config", None)
        self.add_module(name, encoder)
        self.dropout = nn.Dropout(dropout)
        self.classifier = head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(batch, length) of both → (batch, classes)."""
        encoder: nn.Module = getattr(self, self._name)
        tokens = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        there = attention_mask.unsqueeze(-1).to(tokens.dtype)
        mean = (tokens * there).sum(1) / there.sum(1).clamp(min=1)
        out: Tensor = self.classifier(self.dropout(mean))
        return out


class MeanTokens(nn.Module):
    """The mean over the patches: (batch, patches, features) → (batch, features)."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean over the second axis."""
        return x.mean(dim=1)


def norm_layer(kind: Norm, channels: int) -> nn.Module:
    """The norm layer of that kind, or nothing."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        # Fewer than four channels per group would leave nothing to normalise over once the image is down to one
        # pixel.
        groups = max((g for g in range(1, 33) if channels % g == 0 and channels // g >= 4), default=1)
        return nn.GroupNorm(groups, channels)
    return nn.Identity()


def conv(inputs: int, outputs: int, kernel: int, stride: int, norm: Norm) -> nn.Conv2d:
    """A padded convolution; it has a bias only where no norm layer follows."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=norm == "none")


class Block(nn.Module):
    """relu(body(x) + shortcut(x)), or relu(body(x)) without the residual link."""

    expansion: int
    inplace: bool = False
    """True while sums and activations may overwrite what they are given (`fedstrata.models.in_place`)."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.shortcut: nn.Module | None = None

    def link(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        """Add the residual link: the identity, or a 1×1 convolution where the shape changes."""
        if stride == 1 and inputs == outputs:
            self.shortcut = nn.Identity()
        else:
            self.shortcut = sequential(
                ("conv", conv(inputs, outputs, 1, stride, norm)), ("norm", norm_layer(norm, outputs))
            )

    def body(self, x: Tensor) -> Tensor:
        """The block's convolutions, up to the last norm layer."""
        raise NotImplementedError

    def body_layers(self) -> Sequence[nn.Module]:
        """The layers that `body` runs, in their order."""
        raise NotImplementedError

    def last(self) -> nn.Conv2d:
        """The convolution whose output meets the residual link."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, height, width) → (batch, outputs, height/stride, width/stride), rounded up."""
        out = self.body(x)
        if self.shortcut is not None:
            out = out.add_(self.shortcut(x)) if self.inplace else out + self.shortcut(x)
        return self.activate(out)

    def activate(self, x: Tensor) -> Tensor:
        """ReLU."""
        return x.relu_() if self.inplace else x.relu()


class BasicBlock(Block):
    """Two 3×3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__(inputs, width, stride, norm)
        self.conv1 = conv(inputs, width, 3, stride, norm)
        self.norm1 = norm_layer(norm, width)
        self.conv2 = conv(width, width, 3, 1, norm)
        self.norm2 = norm_layer(norm, width)

    def body(self, x: Tensor) -> Tensor:
        """conv1, norm1, ReLU, conv2, norm2."""
        out: Tensor = self.norm2(self.conv2(self.activate(self.norm1(self.conv1(x)))))
        return out

    def body_layers(self) -> Sequence[nn.Module]:
        """The same as modules."""
        return self.conv1, self.norm1, nn.ReLU(), self.conv2, self.norm2

    def last(self) -> nn.Conv2d:
        """conv2."""
        return self.conv2


class Bottleneck(Block):
    """1×1, 3×3 and 1×1 convolutions, the last four times as wide; the 3×3 one has the stride."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__(inputs, width, stride, norm)
        self.conv1 = conv(inputs, width, 1, 1, norm)
        self.norm1 = norm_layer(norm, width)
        self.conv2 = conv(width, width, 3, stride, norm)
        self.norm2 = norm_layer(norm, width)
        self.conv3 = conv(width, width * self.expansion, 1, 1, norm)
        self.norm3 = norm_layer(norm, width * self.expansion)

    def body(self, x: Tensor) -> Tensor:
        """conv1, norm1, ReLU, conv2, norm2, ReLU, conv3, norm3."""
        out = self.activate(self.norm2(self.conv2(self.activate(self.norm1(self.conv1(x))))))
        final: Tensor = self.norm3(self.conv3(out))
        return final

    def body_layers(self) -> Sequence[nn.Module]:
        """The same as modules."""
        relu = nn.ReLU()
        return self.conv1, self.norm1, relu, self.conv2, self.norm2, relu, self.conv3, self.norm3

    def last(self) -> nn.Conv2d:
        """conv3."""
        return self.conv3


class Level(nn.Module):
    """A level of a U-Net: what enters, the levels below at half the size, and what leaves, joined to what entered."""

    def __init__(self, enter: nn.Module, below: nn.Module, leave: nn.Module) -> None:
        super().__init__()
        self.enter = enter
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.below = below
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, height, width) → (batch, outputs, height, width)."""
        here = self.enter(x)
        deep = F.interpolate(self.below(self.pool(here)), size=here.shape[-2:], mode="nearest")
        out: Tensor = self.leave(torch.cat([here, deep], 1))
        return out


class TokenEmbedding(nn.Module):
    """Tokens and their positions as features: (batch, length) → (batch, length, width)."""

    def __init__(self, vocab: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(length, width))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both; sequences may be shorter than the longest."""
        out: Tensor = self.token(x) + self.position[: x.shape[1]]
        return out


class CausalAttention(nn.Module):
    """Attention of several heads, in which a position sees itself and what came before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(-2, -4).unbind(-3)
        with sdpa_kernel(SDPBackend.MATH):  # plain products: counted, and vectorised over clients
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(seen.transpose(-2, -3).flatten(-2))
        return out


class CausalBlock(nn.Module):
    """x + attention(norm(x)), then x + perceptron(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = sequential(
            ("hidden", nn.Linear(width, hidden)), ("act", nn.GELU()), ("out", nn.Linear(hidden, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out
