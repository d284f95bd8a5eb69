"""The zoo: shapes, sizes, nesting, seeds and refusals."""

from __future__ import annotations

import builtins
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedstrata.core import spec
from fedstrata.errors import UsageError
from fedstrata.models.registry import MODELS, build_model
from fedstrata.models.stages import run_from, stages, tap
from fedstrata.models.strata import strata
from fedstrata.models.zoo.resnets import channel_plan

IMAGES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]
SMALL = {
    "mlp": "mlp(hidden=(8,))",
    "cnn2": "cnn2(width=4, hidden=8)",
    "vgg9": "vgg9(width=2, hidden=8)",
    "vit": "vit(dim=16, depth=2, heads=2)",
    "swin": "swin(dim=8, heads=(1, 2, 4))",
    "tablemlp": "tablemlp(hidden=(8,))",
}
TOKENS = ("chargru", "tokengru", "gpt")
EVERYWHERE = ("unet", "tokengru", "gpt")
"""Models that give logits for every pixel or position: tests/models/test_everywhere.py."""


def small(name: str) -> str:
    """The model's name with arguments that make it small."""
    return SMALL.get(name, name if name == "logreg" else f"{name}(width=4)")


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def shapes(name: str, shape: tuple[int, ...] = (3, 32, 32)) -> dict[str, torch.Size]:
    return {n: p.shape for n, p in build_model(name, shape, 10).named_parameters()}


# What every model does ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", IMAGES, ids=str)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("chargru", "hf", "python", *EVERYWHERE)])
def test_image_models_run_and_learn(name: str, shape: tuple[int, ...]) -> None:
    """(batch, channels, height, width) → (batch, classes), and every parameter gets a finite gradient."""
    model = build_model(small(name), shape, 7, seed=1)
    logits = model(torch.randn(4, *shape))
    assert logits.shape == (4, 7)
    nn.functional.cross_entropy(logits, torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_chargru_runs_and_learns() -> None:
    model = build_model("chargru(vocab=11, embedding=3, hidden=5, layers=3)", (9,), 7, seed=1)
    assert stages(model) == ("embed", "gru1", "gru2", "gru3", "pool", "head")
    logits = model(torch.randint(11, (4, 9)))
    assert logits.shape == (4, 7)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert shapes("chargru", (9,))["embed.weight"] == (10, 8)


@pytest.mark.parametrize("name", ["mlp", "cnn8", "vgg9", "resnet10", "vit", "swin", "chargru", "unet", "gpt"])
def test_a_seed_decides_the_weights_and_leaves_the_random_state(name: str) -> None:
    text, shape = (name, (5,)) if name in TOKENS else (small(name), (1, 8, 8))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = build_model(text, shape, 5, seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    again = build_model(text, shape, 5, seed=1).state_dict()
    other = build_model(text, shape, 5, seed=2).state_dict()
    assert all(torch.equal(again[n], w) for n, w in first.items())
    assert not all(torch.equal(other[n], w) for n, w in first.items())


def test_without_a_seed_the_global_random_state_decides() -> None:
    torch.manual_seed(5)
    first = build_model("mlp", (4,), 2)
    torch.manual_seed(5)
    again = build_model("mlp", (4,), 2)
    assert torch.equal(first.head.weight, again.head.weight)
    assert not torch.equal(build_model("mlp", (4,), 2).head.weight, first.head.weight)


@pytest.mark.parametrize("name", MODELS)
def test_builders_have_one_line_of_help_and_typed_arguments(name: str) -> None:
    help_line = spec.summary(MODELS[name])
    assert help_line.endswith(".")
    assert len(help_line) < 110
    assert all(hint is not Any for hint, _ in spec.parameters(MODELS[name]).values())


# Sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("logreg", (1, 28, 28), 784 * 10 + 10),
        ("mlp", (1, 28, 28), 784 * 64 + 64 + 64 * 10 + 10),
        ("mlp(hidden=())", (1, 28, 28), 784 * 10 + 10),
        ("mlp(hidden=(20, 30), activation='tanh')", (5,), 5 * 20 + 20 + 20 * 30 + 30 + 30 * 10 + 10),
        ("cnn2", (1, 28, 28), 1_663_370),  # as stated in the FedAvg paper
        ("cnn4(width=2)", (1, 8, 8), (9 * 2 + 2) + (9 * 2 * 4 + 4) + (9 * 4 * 8 + 8) + (8 * 10 + 10)),
        ("vgg9", (3, 32, 32), 3_491_530),
        ("resnet18", (3, 32, 32), 11_173_962),
        ("resnet34", (3, 32, 32), 21_282_122),
        ("resnet50", (3, 32, 32), 23_520_842),
        ("chargru", (80,), 10 * 8 + (3 * 256 * (8 + 256) + 6 * 256) + (3 * 256 * 512 + 6 * 256) + 256 * 10 + 10),
    ],
)
def test_parameter_counts(name: str, shape: tuple[int, ...], parameters: int) -> None:
    assert count(build_model(name, shape, 10)) == parameters


def test_resnet8_has_the_size_that_fedpart_reports() -> None:
    """FedPart's poster: 4.83, 4.92 and 5.02 GB per cycle of full updates for 10, 100 and 200 classes.

    A cycle is 25 rounds of 40 clients; in units of 1024·10⁶ bytes, 4 bytes a parameter.
    """
    for classes, reported in ((10, 4.83), (100, 4.92), (200, 5.02)):
        size = count(build_model("resnet8", (3, 32, 32), classes))
        assert round(size * 4 * 25 * 40 / (1024 * 10**6), 2) == reported


@pytest.mark.parametrize(("name", "blocks"), [("resnet50", (3, 4, 6, 3)), ("resnet101", (3, 4, 23, 3))])
def test_bottleneck_parameter_formula(name: str, blocks: tuple[int, ...]) -> None:
    """A block that c channels enter: c·w + 9·w² + 4·w² weights, 12·w norm parameters; its shortcut 4·c·w + 8·w."""
    w, total, inputs = 4, 27 * 4 + 2 * 4, 4
    for index, number in enumerate(blocks):
        width = w * 2**index
        total += 4 * inputs * width + 8 * width
        for _ in range(number):
            total += inputs * width + 13 * width**2 + 12 * width
            inputs = 4 * width
    assert count(build_model(f"{name}(width=4)", (3, 8, 8), 10)) == total + inputs * 10 + 10


def test_transformers_are_as_large_as_a_resnet18() -> None:
    """The divergence study's claim about its ViT and Swin, which our defaults are chosen to meet (within 16 %)."""
    for name in ("vit", "swin"):
        assert count(build_model(name, (3, 64, 64), 10)) == pytest.approx(11_173_962, rel=0.16)


# ResNets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ["width=4", "width=4, stem='7x7', maxpool=True", "width=4, residual=False"])
def test_shallower_resnets_are_part_of_deeper_ones(arguments: str) -> None:
    chain = [shapes(f"resnet{depth}({arguments})") for depth in (10, 14, 18, 22, 26, 34)]
    for inner, outer in pairwise(chain):
        assert inner.items() < outer.items()
    assert shapes(f"resnet50({arguments})").items() < shapes(f"resnet101({arguments})").items()


def test_channel_plans_are_the_papers() -> None:
    assert channel_plan("normal", 32, 4) == [32, 64, 128, 256]
    assert channel_plan("mean", 32, 4) == [120, 120, 120, 120]
    assert channel_plan("reversed", 32, 4) == [256, 128, 64, 32]
    normal, mean = (count(build_model(f"resnet13(plan='{plan}')", (3, 8, 8), 10)) for plan in ("normal", "mean"))
    assert mean == pytest.approx(normal, rel=0.01)


@pytest.mark.parametrize("plan", ["normal", "mean", "reversed"])
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("name", ["resnet10", "resnet50"])
def test_resnet_options_run(name: str, norm: str, plan: str) -> None:
    model = build_model(f"{name}(width=4, norm='{norm}', plan='{plan}')", (3, 16, 16), 5, seed=0)
    model(torch.randn(3, 3, 16, 16)).sum().backward()
    kinds = {type(m) for m in model.modules()}
    assert (nn.BatchNorm2d in kinds) == (norm == "batch")
    assert (nn.GroupNorm in kinds) == (norm == "group")
    assert (model.stem.conv.bias is None) == (norm != "none")
    groups = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert all(m.num_channels // m.num_groups >= 4 for m in groups)


def test_signal_stays_bounded_without_norm_layers() -> None:
    model = build_model("resnet101(width=4, norm='none')", (3, 16, 16), 5, seed=0)
    assert model(torch.randn(3, 3, 16, 16)).abs().max() < 100


def test_stems() -> None:
    """The 7×7 stem and the max-pool each halve the image; the layers after the first halve it again."""
    x = torch.zeros(1, 3, 32, 32)
    for arguments, side in (("stem='3x3'", 32), ("stem='7x7'", 16), ("stem='7x7', maxpool=True", 8)):
        model = build_model(f"resnet10(width=4, {arguments})", (3, 32, 32), 5).eval()
        assert tap(model, x, "stem").shape == (1, 4, side, side)
        assert tap(model, x, "layer2").shape == (1, 8, side // 2, side // 2)
        assert tap(model, x, "pool").shape == (1, 32)
    assert tap(build_model("resnet8(width=4)", (3, 32, 32), 5), x, "stem").shape == (1, 4, 8, 8)


def test_residual_links_are_sums() -> None:
    """With a zero residual branch, a block without a shortcut convolution is the ReLU of its input."""
    block = build_model("resnet18(width=4)", (3, 8, 8), 5, seed=0).eval().layer1[0]
    nn.init.zeros_(block.norm2.weight)
    x = torch.randn(2, 4, 8, 8)
    assert torch.equal(block(x), x.relu())
    plain = build_model("resnet18(width=4, residual=False)", (3, 8, 8), 5, seed=0).eval().layer1[0]
    nn.init.zeros_(plain.norm2.weight)
    assert not plain(x).any()


# Other families -------------------------------------------------------------------------------------------


def test_vgg9_is_initialised_as_in_fednlr() -> None:
    """Kaiming-uniform: |w| ≤ √(6/fan_in), and it comes near; Xavier-normal: variance 2/(fan_in + fan_out)."""
    model = build_model("vgg9", (3, 32, 32), 10, seed=0)
    conv = model.layer3.conv2.weight
    bound = math.sqrt(6 / (256 * 9))
    assert 0.99 * bound < conv.abs().max() <= bound
    linear = model.fc2.linear.weight
    assert linear.std().item() == pytest.approx(math.sqrt(2 / 1024), rel=0.02)
    assert not any(b.any() for n, b in model.named_parameters() if n.endswith("bias"))


def test_cnn8_keeps_its_signal() -> None:
    """Eight layers without norm layers neither fade out nor blow up."""
    model = build_model("cnn8", (1, 28, 28), 10, seed=0)
    assert 0.1 < tap(model, torch.randn(8, 1, 28, 28), "layer3").std() < 10


@pytest.mark.parametrize(("growth", "widths"), [(1, [4] * 7), (2, [4, 4, 8, 8, 16, 16, 16])])
def test_plain_cnns_grow_or_keep_their_width(growth: int, widths: list[int]) -> None:
    model = build_model(f"cnn8(width=4, growth={growth})", (1, 8, 8), 10, seed=0)
    assert [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)] == widths
    assert model.head.in_features == widths[-1]


def test_plain_cnns_double_their_width_unless_told() -> None:
    default, told = (build_model(f"cnn4({text})", (1, 8, 8), 10, seed=0) for text in ("width=4", "width=4, growth=2"))
    assert all(torch.equal(*pair) for pair in zip(default.parameters(), told.parameters(), strict=True))


def test_split_after_layer2_is_possible() -> None:
    for name in ("cnn2", "cnn4", "vgg9", "resnet8", "resnet18", "swin"):
        model = build_model(small(name), (3, 32, 32), 5, seed=0).eval()
        x = torch.randn(2, 3, 32, 32)
        assert torch.equal(run_from(model, tap(model, x, "layer2"), "layer2"), model(x))


def test_shallower_transformers_are_part_of_deeper_ones() -> None:
    chain = [shapes(f"vit(dim=16, depth={depth}, heads=2)") for depth in (8, 9, 12)]
    assert chain[0].items() < chain[1].items() < chain[2].items()
    inner, outer = (shapes(f"swin(dim=8, depths={depths}, heads=(1, 2))") for depths in ((2, 2), (2, 6)))
    assert inner.items() < outer.items()


def test_vit_equals_the_librarys() -> None:
    transformers = pytest.importorskip("transformers")
    model = build_model("vit(dim=16, depth=2, heads=2, mlp_ratio=2)", (3, 8, 12), 5, seed=0).eval()
    config = transformers.ViTConfig(
        image_size=(8, 12),
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    theirs = transformers.ViTModel(config, add_pooling_layer=False).eval()
    blocks = "layers" if hasattr(theirs, "layers") else "encoder.layer"
    renamed = {"patch.": "embeddings.", "pool.norm.": "layernorm."}
    renamed |= {f"block{i + 1}.layer.": f"{blocks}.{i}." for i in range(2)}
    theirs.load_state_dict(rename(model, renamed))
    x = torch.randn(2, 3, 8, 12)
    torch.testing.assert_close(tap(model, x, "pool"), theirs(x).last_hidden_state[:, 0])


def test_swin_equals_the_librarys() -> None:
    """Where every layer has at least a window of patches, the model is the library's; below, theirs would fail."""
    transformers = pytest.importorskip("transformers")
    model = build_model("swin(dim=8, window=2, depths=(2, 2), heads=(1, 2))", (3, 20, 24), 5, seed=0).eval()
    config = transformers.SwinConfig(
        image_size=(20, 24),
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[1, 2],
        window_size=2,
    )
    theirs = transformers.SwinModel(config).eval()
    renamed = {"patch.layer.": "embeddings.", "pool.norm.": "layernorm."}
    renamed |= {f"layer{i + 1}.layer.": f"encoder.layers.{i}." for i in range(2)}
    theirs.load_state_dict(rename(model, renamed))
    x = torch.randn(2, 3, 20, 24)
    torch.testing.assert_close(tap(model, x, "pool"), theirs(x).pooler_output)


def rename(model: nn.Module, prefixes: dict[str, str]) -> dict[str, Tensor]:
    """The model's state, the head left out, under other prefixes."""
    state = {}
    for name, value in model.state_dict().items():
        for ours, others in prefixes.items():
            if name.startswith(ours):
                state[others + name.removeprefix(ours)] = value
    return state


def test_swin_windows_shrink_with_the_image() -> None:
    """8×8 pixels are 2×2 patches, then 1×1: windows of 2 and of 1, with (2·2 − 1)² and 1 relative positions."""
    model = build_model("swin(dim=8, depths=(2, 2), heads=(1, 2))", (1, 8, 8), 5, seed=0)
    tables = [p.shape[0] for n, p in model.named_parameters() if n.endswith("relative_position_bias_table")]
    assert tables == [9, 9, 1, 1]
    assert len(strata(model)) == len(strata(model, torch.zeros(1, 1, 8, 8)))


# Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet88", (3, 32, 32), r"no model 'resnet88' \(did you mean 'resnet"),
        ("resnet8(widht=3)", (3, 32, 32), r"no argument 'widht' \(did you mean 'width'\?\)"),
        ("resnet8(width=0)", (3, 32, 32), "model 'resnet8': width must be at least 1, not 0"),
        ("resnet8(width=1.5)", (3, 32, 32), "argument 'width': 1.5 does not fit"),
        ("resnet8(stem='5x5')", (3, 32, 32), "argument 'stem': '5x5' does not fit .*'3x3' or '7x7'"),
        ("mlp(hidden=(8, -1))", (3, 32, 32), "model 'mlp': hidden must be at least 1, not -1"),
        ("mlp(activation='sin')", (3, 32, 32), "argument 'activation'"),
        ("cnn4", (10,), r"model 'cnn4' takes images \(channels, height, width\), not inputs of shape 10"),
        ("resnet18", (28, 28), "model 'resnet18' takes images .* not inputs of shape 28×28"),
        ("vgg9", (3, 4, 32), "model 'vgg9' needs images of at least 8×8 pixels with these arguments, not 4×32"),
        ("cnn2", (3, 3, 3), "model 'cnn2' needs images of at least 4×4"),
        ("vit(patch=16)", (3, 8, 8), "model 'vit' needs images of at least 16×16"),
        ("vit(patch=5)", (3, 32, 32), "model 'vit': patches of 5×5 pixels do not tile images of 32×32"),
        ("vit(heads=7)", (3, 32, 32), "model 'vit': 7 heads do not divide 512 features"),
        ("vit(depth=0)", (3, 32, 32), "model 'vit': depth must be at least 1"),
        ("vit(mlp_ratio=0)", (3, 32, 32), "model 'vit': mlp_ratio 0.0 leaves no hidden layer"),
        ("vit(mlp_ratio=1e999)", (3, 32, 32), "model 'vit': mlp_ratio"),
        ("swin(heads=(3, 6))", (3, 32, 32), "depths and heads must be equally many and at least one, not 3 and 2"),
        ("swin(depths=(), heads=())", (3, 32, 32), "depths and heads must be equally many and at least one"),
        ("swin(dim=10)", (3, 32, 32), "model 'swin': 3 heads do not divide 10 features"),
        ("chargru", (3, 32, 32), r"model 'chargru' takes token sequences \(length,\), not inputs of shape 3×32×32"),
        ("chargru(layers=0)", (80,), "model 'chargru': layers must be at least 1"),
        ("tablemlp(dropout=1.0)", (4,), "model 'tablemlp': dropout must be at least 0 and below 1, not 1.0"),
        ("tablemlp(hidden=(0,))", (4,), "model 'tablemlp': hidden must be at least 1, not 0"),
        ("unet", (7,), "model 'unet' takes images"),
        ("unet(depth=3)", (1, 7, 8), "model 'unet' needs images of at least 8×8 pixels with these arguments, not 7×8"),
        ("unet(width=0)", (1, 8, 8), "model 'unet': width must be at least 1"),
        ("tokengru", (3, 4), "model 'tokengru' takes token sequences"),
        ("tokengru(layers=0)", (4,), "model 'tokengru': layers must be at least 1"),
        ("gpt", (3, 4), "model 'gpt' takes token sequences"),
        ("gpt(heads=5)", (4,), "model 'gpt': 5 heads do not divide 64 features"),
        ("gpt(mlp_ratio=0.0)", (4,), "model 'gpt': mlp_ratio 0.0 leaves no hidden layer"),
        ("mlp", (), "the shape of an example must be whole numbers"),
        ("mlp", (3.0,), "the shape of an example must be whole numbers"),
        ("mlp", 3, "the shape of an example must be whole numbers"),
        ("mlp", {"a": (3,), "b": "x"}, "the shape of an example must be whole numbers"),
        ("mlp", ((3,), (2, "x")), "the shape of an example must be whole numbers"),
        ("mlp", {"a": (3,), "b": (2, 4)}, "model 'mlp' takes one tensor, and an input has 2 parts: a 3, b 2×4"),
        ("cnn2", ((3,), (), (2, 4)), "'cnn2' takes one tensor, and an input has 3 parts: 3 and one number and 2×4"),
        ("mlp", (0, 8), "model 'mlp': input_shape must be at least 1, not 0"),
    ],
)
def test_bad_models_get_one_clear_sentence(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_model(name, shape, 10)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("hf", "python")])
def test_there_must_be_classes(name: str) -> None:
    with pytest.raises(UsageError, match=f"model '{name}': classes must be at least 1, not 0"):
        build_model(name, (5,) if name in TOKENS else (3, 32, 32), 0)


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_missing_transformers_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.startswith("transformers"):
            raise ModuleNotFoundError(module)
        return real(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install 'fedstrata\[hf\]'"):
        build_model(name, (3, 32, 32), 10)
