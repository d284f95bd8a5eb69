"""Vision transformers from Hugging Face's `transformers` (the extra `fedstrata[hf]`), cut into stages.

The layers are theirs, built from a configuration with new weights: nothing is downloaded, and there is no
dropout. Parameter names inside a block are those of the installed version of `transformers`, so parties that
train together need versions that agree. A shallower model's parameters are part of a deeper one's, by name
and by shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from fedstrata.core.extras import missing
from fedstrata.core.lazy import nn, torch
from fedstrata.errors import UsageError
from fedstrata.models.passes import calls
from fedstrata.models.zoo.parts import check_images, check_positive, sequential


def _library(model: str) -> Any:
    """The package `transformers`, imported only when a model needs it."""
    try:
        import transformers
        import transformers.models.swin.modeling_swin
        import transformers.models.vit.modeling_vit
    except ImportError:
        raise missing("transformers", f"the model '{model}' needs") from None
    return transformers


def _grid(model: str, input_shape: tuple[int, ...], classes: int, patch: int) -> tuple[int, int]:
    """How many patches an image has, down and across."""
    check_positive(model, patch=patch)
    _, height, width = check_images(model, input_shape, classes, smallest=patch)
    if height % patch or width % patch:
        raise UsageError(f"model '{model}': patches of {patch}×{patch} pixels do not tile images of {height}×{width}")
    return height // patch, width // patch


def _check_sizes(model: str, dim: int, heads: int, mlp_ratio: float) -> None:
    """Refuse sizes that blocks of `dim` features cannot have."""
    if dim % heads:
        raise UsageError(f"model '{model}': {heads} heads do not divide {dim} features")
    if not 1 <= dim * mlp_ratio < math.inf:
        raise UsageError(f"model '{model}': mlp_ratio {mlp_ratio} leaves no hidden layer between {dim} features")


def _initialise(module: nn.Module) -> None:
    """Truncated normal weights of standard deviation 0.02 and zero biases, as these models were published."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _in_call_order(net: nn.Sequential, input_shape: tuple[int, ...]) -> nn.Sequential:
    """Register every module's children anew in the order in which they run.

    The library registers a block's norm layers after its attention, and its code cannot be traced
    symbolically: this way the strata are right even without a sample.
    """
    first: dict[int, int] = {}
    for index, module in enumerate(calls(net, torch.zeros(1, *input_shape))):
        first.setdefault(id(module), index)
    for module in list(net.modules()):
        children = dict(module.named_children())
        start = {name: min(first.get(id(m), math.inf) for m in child.modules()) for name, child in children.items()}
        for name in sorted(children, key=start.__getitem__):
            delattr(module, name)
            module.add_module(name, children[name])
    return net


def vit(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    patch: int = 4,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    mlp_ratio: float = 1.0,
) -> nn.Sequential:
    """A vision transformer with a class token (needs the extra `hf`).

    The defaults are the divergence study's (patches of 4, 512 features, 6 blocks), with as many parameters as
    a ResNet-18, as it says: about 10 million. ViT-S, as in InCo Aggregation, is `vit(patch=16, dim=384,
    depth=12, heads=6, mlp_ratio=4)`, with depths 8 to 12. Stages: `patch`, `block1`, `block2`, …, `pool`
    (norm, class token), `head`.
    """
    grid = _grid("vit", input_shape, classes, patch)
    check_positive("vit", dim=dim, depth=depth, heads=heads)
    _check_sizes("vit", dim, heads, mlp_ratio)
    library = _library("vit")
    from fedstrata.models.zoo.layers import First, TakeStep

    config = library.ViTConfig(
        image_size=(grid[0] * patch, grid[1] * patch),
        patch_size=patch,
        num_channels=input_shape[0],
        hidden_size=dim,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=int(dim * mlp_ratio),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    whole = library.ViTModel(config, add_pooling_layer=False)
    blocks = [m for m in whole.modules() if isinstance(m, library.models.vit.modeling_vit.ViTLayer)]
    head = nn.Linear(dim, classes)
    _initialise(head)
    net = sequential(
        ("patch", whole.embeddings),
        *((f"block{index}", First(block)) for index, block in enumerate(blocks, start=1)),
        ("pool", sequential(("norm", whole.layernorm), ("token", TakeStep(0)))),
        ("head", head),
    )
    return _in_call_order(net, input_shape)


def swin(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    patch: int = 4,
    window: int = 4,
    dim: int = 144,
    depths: tuple[int, ...] = (2, 2, 2),
    heads: tuple[int, ...] = (3, 6, 12),
    mlp_ratio: float = 4.0,
) -> nn.Sequential:
    """A Swin transformer: attention in shifted windows (needs the extra `hf`).

    The defaults are the divergence study's (patches of 4, windows of 4, 6 blocks), with as many parameters as
    a ResNet-18, as it says: about 11 million. Each layer after the first has half the patches per side and
    twice the features; where a layer has fewer patches per side than `window`, its window is that small.
    Stages: `patch`, `layer1`, `layer2`, …, `pool` (norm, mean), `head`.
    """
    grid = _grid("swin", input_shape, classes, patch)
    check_positive("swin", window=window, dim=dim, depths=depths, heads=heads)
    _check_layers(dim, depths, heads, mlp_ratio)
    library = _library("swin")
    from fedstrata.models.zoo.layers import First, MeanTokens

    parts = library.models.swin.modeling_swin
    config = partial(
        library.SwinConfig,
        image_size=(grid[0] * patch, grid[1] * patch),
        patch_size=patch,
        num_channels=input_shape[0],
        embed_dim=dim,
        depths=list(depths),
        num_heads=list(heads),
        mlp_ratio=mlp_ratio,
        drop_path_rate=0.0,
        attn_implementation="eager",
    )
    features = dim * 2 ** (len(depths) - 1)
    net = sequential(
        ("patch", First(parts.SwinEmbeddings(config(window_size=window)))),
        *_swin_layers(parts, config, grid, window, dim, depths, heads),
        ("pool", sequential(("norm", nn.LayerNorm(features)), ("mean", MeanTokens()))),
        ("head", nn.Linear(features, classes)),
    )
    net.apply(_initialise)
    return _in_call_order(net, input_shape)


def _check_layers(dim: int, depths: tuple[int, ...], heads: tuple[int, ...], mlp_ratio: float) -> None:
    """Refuse depths and heads of a Swin transformer that do not fit together."""
    if not depths or len(depths) != len(heads):
        raise UsageError(
            f"model 'swin': depths and heads must be equally many and at least one, not {len(depths)} and {len(heads)}"
        )
    for index, number in enumerate(heads):
        _check_sizes("swin", dim * 2**index, number, mlp_ratio)


def _swin_layers(
    parts: Any,
    config: Callable[..., Any],
    grid: tuple[int, int],
    window: int,
    dim: int,
    depths: tuple[int, ...],
    heads: tuple[int, ...],
) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of a Swin transformer; each but the last halves the patches and doubles the features."""
    from fedstrata.models.zoo.layers import Tokens

    for index, (depth, number) in enumerate(zip(depths, heads, strict=True)):
        layer = parts.SwinStage(
            config=config(window_size=min(window, *grid)),
            dim=dim * 2**index,
            input_resolution=grid,
            depth=depth,
            num_heads=number,
            drop_path=[0.0] * depth,
            downsample=parts.SwinPatchMerging if index + 1 < len(depths) else None,
        )
        yield f"layer{index + 1}", Tokens(layer, grid)
        grid = (-(-grid[0] // 2), -(-grid[1] // 2))
