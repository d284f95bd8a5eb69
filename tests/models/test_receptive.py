"""Receptive fields, against brute force: the pixels with a gradient from one output in the middle."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.errors import UsageError
from fedstrata.models.receptive import Field, receptive_fields
from fedstrata.models.registry import MODELS, build_model
from fedstrata.models.zoo.resnets import RESNETS

NARROW = 8


def smooth(model: nn.Module) -> nn.Module:
    """A copy that every path's gradient flows through and none cancels: equal weights above 0, averages for maxima."""
    model = copy.deepcopy(model).double().eval()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.MaxPool2d):
                setattr(module, name, nn.AvgPool2d(child.kernel_size, child.stride, child.padding))
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            nn.init.constant_(module.weight, 1 / module.weight[0].numel())
    return model


def brute(
    model: nn.Module, shape: tuple[int, ...], layers: set[str] | None = None, beside: int = 0
) -> dict[str, tuple[int, ...]]:
    """How far the gradient of the middle output of each convolution reaches, along every axis but the channels.

    `beside`: so many rows below the middle.
    """
    model = smooth(model)
    outputs: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d) and (layers is None or name in layers):
            module.register_forward_hook(lambda module, args, out, name=name: outputs.setdefault(name, out))
    x = torch.ones(1, *shape, dtype=torch.float64, requires_grad=True)
    model(x)
    found = {}
    for name, out in outputs.items():
        middle = [size // 2 for size in out.shape[2:]]
        middle[0] += beside
        (gradient,) = torch.autograd.grad(out[(0, 0, *middle)], x, retain_graph=True)
        touched = gradient[0].ne(0).any(0)
        axes = range(touched.ndim)
        extents = [touched.any(dim=[a for a in axes if a != axis]) if len(axes) > 1 else touched for axis in axes]
        found[name] = tuple(int(e.nonzero().max() - e.nonzero().min()) + 1 for e in extents)
    return found


def conv_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Conv1d | nn.Conv2d)]


ZOO = [
    "cnn2(width=1, hidden=1)",
    "cnn4(width=1)",
    "cnn8(width=1)",
    "vgg9(width=1, hidden=1)",
    "vgg9(width=1, hidden=1, convs=4)",
    *(
        f"{name}(width=1, stem='{stem}', maxpool={pool}, residual={link})"
        for name in ("resnet8", "resnet18")
        for stem in ("3x3", "7x7")
        for pool in (False, True)
        for link in (False, True)
    ),
    *(f"{name}(width=1)" for name in RESNETS if name not in ("resnet8", "resnet18")),
    "resnet10(width=1, norm='group')",
    "resnet10(width=1, plan='reversed', norm='none')",
    "resnet50(width=1, stem='7x7', maxpool=True, residual=False)",
    "unet(width=1, depth=1)",  # deeper ones are below: enlarged twice, a field depends on the pixel
]


def test_every_model_with_convolutions_is_below() -> None:
    names = {text.partition("(")[0] for text in ZOO}
    assert set(MODELS) - names == {
        "logreg",
        "mlp",
        "tablemlp",
        "vit",
        "swin",
        "chargru",
        "tokengru",
        "gpt",
        "hf",
        "python",
    }


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_against_brute_force(name: str) -> None:
    """On narrow images, tall enough that no border cuts the middle output's field; then on low and wide ones."""
    tallest = max(field.field[0] for field in receptive_fields(build_model(name, (1, 64, 64), 2, seed=0), (1, 64, 64)))
    tall = -(-2 * tallest // 64) * 64 + 64
    for axis, shape in enumerate([(1, tall, NARROW), (1, NARROW, tall)]):
        model = build_model(name, shape, 2, seed=0)
        fields = {field.layer: field for field in receptive_fields(model, shape)}
        assert sorted(fields) == sorted(conv_names(model))
        every = max(1, len(fields) // 40)
        validate_settings = {*list(fields)[::every], list(fields)[-1]}  # some of the layers where there are a hundred
        if (
            "group" in name or "unet" in name
        ):  # group norms: these average over the whole image, which is no part of the formula
            model = without_norms(model)
        seen = {layer: extents[axis] for layer, extents in brute(model, shape, validate_settings).items()}
        assert {layer: fields[layer].field[axis] for layer in validate_settings} == seen
        assert all(field.input == shape[1:] for field in fields.values())


@pytest.mark.parametrize(("depth", "convs"), [(1, 1), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1)])
def test_behind_enlarged_images_the_largest_field_counts(depth: int, convs: int) -> None:
    """Of as many pixels in a row as the image was halved and enlarged to, one sees the most."""
    shape = (1, 2 ** (depth + 5) * convs, 2**depth)
    model = build_model(f"unet(width=1, depth={depth}, convs={convs})", shape, 2, seed=0)
    fields = {field.layer: field.field[0] for field in receptive_fields(model, shape)}
    seen = [brute(without_norms(model), shape, beside=beside) for beside in range(2**depth)]
    assert fields == {layer: max(found[layer][0] for found in seen) for layer in fields}
    assert depth == 1 or any(found != seen[0] for found in seen)


def without_norms(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.GroupNorm):
                setattr(module, name, nn.Identity())
    return model


def test_the_papers_formula_by_hand() -> None:
    """7×7 stride 2, pool 3 stride 2, then 3×3 twice: 7, 7 + 2·2 + 2·4 = 19, 19 + 2·4 = 27; a link changes nothing."""
    model = build_model("resnet8(width=4)", (3, 32, 32), 10, seed=0)
    first, second, third, *_ = receptive_fields(model, (3, 32, 32))
    assert (first, second, third) == (
        Field("stem.conv", (7, 7), (32, 32)),
        Field("layer1.0.conv1", (19, 19), (32, 32)),
        Field("layer1.0.conv2", (27, 27), (32, 32)),
    )
    assert not third.exceeds
    assert receptive_fields(model, (3, 32, 24))[2].exceeds
    assert third.as_dict() == {"layer": "layer1.0.conv2", "field": [27, 27], "input": [32, 32]}


def test_they_do_not_depend_on_the_images_size() -> None:
    model = build_model("resnet18(width=2)", (3, 32, 32), 10, seed=0)
    small, large = (receptive_fields(model, (3, side, side)) for side in (2, 96))
    assert [f.field for f in small] == [f.field for f in large]
    assert small[-1] == Field("layer4.1.conv2", (109, 109), (2, 2))


@pytest.mark.parametrize("name", ["vit(dim=16, depth=2, heads=2)", "swin(dim=8, heads=(1, 2, 4))"])
def test_patches_have_a_field(name: str) -> None:
    (patch,) = receptive_fields(build_model(name, (3, 32, 32), 10, seed=0), (3, 32, 32))
    assert patch.field == (4, 4)


@pytest.mark.parametrize("name", ["mlp", "logreg"])
def test_models_without_convolutions_have_none(name: str) -> None:
    assert receptive_fields(build_model(name, (3, 32, 32), 10, seed=0), (3, 32, 32)) == []


def test_tokens_without_convolutions() -> None:
    assert receptive_fields(build_model("chargru(hidden=4)", (20,), 10, seed=0), (20,)) == []


# A user's models ----------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Convolutions a, b, c, … on one channel, put together by a function."""

    def __init__(self, forward: Callable[..., Tensor], *convs: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, conv in zip("abcdef", convs, strict=False):
            self.add_module(name, conv)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, *self.children())


def conv(kernel: object = 3, inputs: int = 1, outputs: int = 1, **more: object) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, **more)  # type: ignore[arg-type]


def next_(x: Tensor, a: nn.Module, b: nn.Module) -> Tensor:
    """Channels last, and a dense layer in place of a 1×1 convolution, as in ConvNeXt."""
    y = F.linear(a(x).permute(0, 2, 3, 1), x.new_ones(3, 2))
    return b(x + F.silu(y).permute(0, 3, 1, 2).sum(1, keepdim=True))


def shuffle_channels(x: Tensor, a: nn.Module, b: nn.Module) -> Tensor:
    """Channels split, passed, shuffled and joined, as in ShuffleNet."""
    one, other = a(x).chunk(2, dim=1)
    y = torch.cat([one, other], 1)
    return b(y.view(1, 2, 2, *y.shape[2:]).transpose(1, 2).flatten(1, 2))


SIMPLE = {
    "rectangles, strides, dilation": Model(
        lambda x, a, b, c: c(b(a(x))),
        conv((3, 5), stride=(2, 1)),
        conv((1, 3), dilation=(1, 4), padding=(0, 2)),
        conv((5, 3), dilation=2),
    ),
    "the longer of two paths": Model(
        lambda x, a, b, c: c(a(x) + b(x).relu()), conv(7, padding=3), conv(3, padding=1), conv(3)
    ),
    "paths that lie aside": Model(
        lambda x, a, b: b(a(x)[:, :, :-4, :-4] + a(x)[:, :, 4:, 4:].clone().relu_()), conv(3), conv(3)
    ),
    "a cut residual link": Model(lambda x, a, b, c: c(b(a(x)) + x[:, :, 2:-2, 2:-2]), conv(3), conv(3), conv(3)),
    "branches joined by channel": Model(
        lambda x, a, b, c: c(torch.cat([a(x), b(x), F.avg_pool2d(x, 3, 1, 1)], 1)),
        conv(5, padding=2),
        conv(1),
        conv(3, inputs=3),
    ),
    "pools as functions": Model(lambda x, a, b: b(F.avg_pool2d(F.avg_pool2d(a(x), 3, 2, 1), 2)), conv(3), conv(3)),
    "padding as a function": Model(lambda x, a, b: b(F.pad(a(x), (0, 3))), conv(3), conv(5, padding="same")),
    "reflected padding": Model(lambda x, a, b: b(F.pad(a(x), (2, 2, 1, 1), mode="reflect")), conv(3), conv(5)),
    "every other pixel": Model(
        lambda x, a, b: b(a(torch.cat([x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)], 1))),
        conv(3, inputs=4),
        conv(3),
    ),
    "channels last": Model(next_, conv(7, outputs=2, padding=3), conv(3)),
    "channels shuffled": Model(shuffle_channels, conv(3, outputs=4), conv(3, inputs=4)),
    "steps in depth": Model(
        lambda x, a, b: b(a(x)), conv(3, outputs=4), conv(3, inputs=4, outputs=4, groups=4, stride=2)
    ),
    "a norm over channels by hand": Model(
        lambda x, a, b: b(a(x) - a(x).mean(1, keepdim=True) / 2), conv(3, outputs=2), conv(3, inputs=2)
    ),
    "twice as large": Model(lambda x, a, b: b(F.interpolate(a(x), scale_factor=2.0)), conv(3), conv(3)),
    "numbers before": Model(lambda x, a, b: b(a((x - 0.5) / 0.25)), conv(3), conv(3)),
}


@pytest.mark.parametrize("name", SIMPLE)
def test_users_models_against_brute_force(name: str) -> None:
    fields = receptive_fields(SIMPLE[name], (1, 64, 48))
    assert {f.layer: f.field for f in fields} == brute(SIMPLE[name], (1, 64, 48))
    assert all(f.input == (64, 48) for f in fields)


def test_sequences_against_brute_force() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 5, stride=2), nn.MaxPool1d(3, 2), nn.Conv1d(3, 3, 3, dilation=2))
    smoothed = copy.deepcopy(model)
    smoothed[1] = nn.AvgPool1d(3, 2)
    fields = receptive_fields(model, (2, 100))
    assert {f.layer: f.field for f in fields} == brute(smoothed, (2, 100)) == {"0": (5,), "2": (25,)}
    assert {f.input for f in fields} == {(100,)}


def test_characters() -> None:
    """Embedded tokens, features moved before the positions."""
    layers = nn.Embedding(9, 4), nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3)
    model = Model(lambda x, a, b, c: c(b(a(x).transpose(1, 2))), *layers)
    assert [(f.field, f.input) for f in receptive_fields(model, (30,))] == [((3,), (30,)), ((5,), (30,))]


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm((4, 30, 30))], ids=repr
)
def test_norm_layers_are_taken_to_see_one_pixel(norm: nn.Module) -> None:
    model = nn.Sequential(conv(3, outputs=4), norm, nn.Dropout(), nn.PReLU(), conv(3, inputs=4))
    assert [f.field for f in receptive_fields(model, (1, 32, 32))] == [(3, 3), (5, 5)]


def test_images_that_come_as_vectors_or_without_a_channel() -> None:
    flat = nn.Sequential(nn.Unflatten(1, (1, 28, 28)), conv(3), nn.MaxPool2d(2), conv(3))
    assert receptive_fields(flat, (784,)) == [Field("1", (3, 3), (28, 28)), Field("3", (8, 8), (28, 28))]
    plain = Model(lambda x, a: a(x[:, None]), conv(3))
    assert receptive_fields(plain, (28, 20)) == [Field("a", (3, 3), (28, 20))]


GLOBAL = {
    "squeeze and excitation": lambda x, a, b: b(a(x) * F.adaptive_avg_pool2d(a(x), 1).sigmoid()),
    "a mean, and dense": lambda x, a, b: b(a(x) * F.linear(a(x).mean((2, 3)), torch.ones(1, 1))[:, :, None, None]),
    "a maximum": lambda x, a, b: b(a(x) / a(x).amax((2, 3), keepdim=True)),
    "one number": lambda x, a, b: b(a(x) / a(x).max()),
    "attention": lambda x, a, b: b(
        F.scaled_dot_product_attention(*[a(x).flatten(2).transpose(1, 2)] * 3).transpose(1, 2).view_as(a(x))
    ),
    "attention by hand": lambda x, a, b: b(
        ((t := a(x).flatten(2).transpose(1, 2)) @ t.transpose(1, 2) @ t).transpose(1, 2).view_as(a(x))
    ),
    "a dense layer over pixels": lambda x, a, b: b((a(x).flatten(1) @ torch.ones(900, 900)).view_as(a(x))),
    "softmax over the image": lambda x, a, b: b(a(x).flatten(2).softmax(-1).view_as(a(x))),
}


@pytest.mark.parametrize("name", GLOBAL)
def test_what_mixes_all_positions_sees_the_whole_image(name: str) -> None:
    first, second = receptive_fields(Model(GLOBAL[name], conv(3), conv(3)), (1, 32, 32))
    assert first.field == (3, 3)
    assert second.field == (32, 32)
    assert not second.exceeds


def test_a_local_path_that_sees_more_than_the_image_still_counts() -> None:
    model = Model(lambda x, a, b: b(a(x) * a(x).mean((2, 3), keepdim=True)), conv(9, padding=4), conv(3, padding=1))
    assert receptive_fields(model, (1, 8, 8))[1].field == (11, 11)


def test_adaptive_pools() -> None:
    """From 32 to 8 positions: windows of 4, stride 4. To 5: up to 8, stride 6.4: 3 + 7 + 6.4 = 16.4, rounded up."""
    model = nn.Sequential(conv(3, padding=1), nn.AdaptiveAvgPool2d((8, 5)), conv(2))
    assert receptive_fields(model, (1, 32, 32))[1].field == (3 + 3 + 4, 17)
    assert receptive_fields(nn.Sequential(nn.AdaptiveMaxPool2d(1), conv(1)), (1, 32, 32))[0].field == (32, 32)


def test_an_image_enlarged_sevenfold_is_measured_in_its_own_pixels() -> None:
    """Bilinear: 2 pixels; the 3×3 kernel reaches 2/7 further, so 3 of them. Antialiased, to a half: 4, then 4 + 2·2."""
    large = Model(lambda x, a: a(F.interpolate(x, size=224, mode="bilinear")), conv(3))
    assert receptive_fields(large, (1, 32, 32))[0].field == (3, 3)
    small = Model(lambda x, a: a(F.interpolate(x, size=16, mode="bilinear", antialias=True)), conv(3))
    assert receptive_fields(small, (1, 32, 32))[0].field == (8, 8)


def test_control_flow_that_depends_on_data() -> None:
    model = Model(lambda x, a, b: b(a(x)) if x.sum() == 0 else a(x), conv(3), conv(3))
    assert [f.field for f in receptive_fields(model, (1, 32, 32))] == [(3, 3), (5, 5)]


def test_a_layer_that_runs_twice_shows_the_most_it_sees() -> None:
    (field,) = receptive_fields(Model(lambda x, a: a(a(x)), conv(3)), (1, 32, 32))
    assert field.field == (5, 5)


def test_a_layer_that_never_runs_is_not_listed() -> None:
    assert [f.layer for f in receptive_fields(Model(lambda x, a, b: a(x), conv(3), conv(3)), (1, 32, 32))] == ["a"]


UNKNOWN = {
    "unfold": lambda x, a, b: b(F.unfold(a(x), 2)[:, :1].view(1, 1, 29, 29)),
    "a part overwritten": lambda x, a, b: b(write_in_place(a(x))),
    "positions from anywhere": lambda x, a, b: b(a(x)[:, :, torch.arange(29, -1, -1)]),
    "a kernel made from the image": lambda x, a, b: b(F.conv2d(a(x), a(x)[:, :, :3, :3])),
    "transposed": lambda x, a, b: b(F.conv_transpose2d(a(x), torch.ones(1, 1, 2, 2), stride=2)),
}


def write_in_place(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :, 1:] = x[:, :, :-1]
    return x + out


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_understood_is_left_out_and_not_guessed(name: str) -> None:
    assert [f.layer for f in receptive_fields(Model(UNKNOWN[name], conv(3), conv(3)), (1, 32, 32))] == ["a"]


def test_the_model_stays_as_it_was() -> None:
    model = build_model("resnet8(width=4)", (3, 32, 32), 10, seed=0).train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    receptive_fields(model, (3, 32, 32))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_double_precision_and_channels_last() -> None:
    model = build_model("cnn4(width=2)", (3, 32, 32), 10, seed=0)
    expected = receptive_fields(model, (3, 32, 32))
    changed = model.double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert receptive_fields(changed, (3, 32, 32)) == expected


def test_a_shape_that_does_not_fit() -> None:
    with pytest.raises(UsageError, match="cannot run on a sample of shape"):
        receptive_fields(build_model("cnn4(width=2)", (3, 32, 32), 10), (3, 16, 16))
