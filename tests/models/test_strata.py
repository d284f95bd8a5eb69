"""Strata of the zoo and of users' own modules; stages; partners."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedstrata.core.types import Stratum
from fedstrata.errors import UsageError
from fedstrata.models.registry import MODELS, build_model
from fedstrata.models.stages import partners, run_from, stages, tap
from fedstrata.models.strata import strata

SMALL = {
    "logreg": ("logreg", (1, 8, 8)),
    "mlp": ("mlp(hidden=(8, 6))", (1, 8, 8)),
    "cnn2": ("cnn2(width=4, hidden=8)", (1, 8, 8)),
    "cnn4": ("cnn4(width=4)", (1, 8, 8)),
    "cnn8": ("cnn8(width=4)", (1, 8, 8)),
    "vgg9": ("vgg9(width=4, hidden=8)", (1, 8, 8)),
    **{name: (f"{name}(width=4)", (3, 16, 16)) for name in MODELS if name.startswith("resnet")},
    "vit": ("vit(dim=16, depth=2, heads=2)", (1, 8, 8)),
    "swin": ("swin(dim=8, window=2, depths=(2, 2), heads=(1, 2))", (3, 16, 16)),
    "chargru": ("chargru(embedding=4, hidden=8)", (6,)),
    "tablemlp": ("tablemlp(hidden=(8, 6), dropout=0.5)", (3, 2)),
    "unet": ("unet(width=4)", (1, 9, 10)),
    "tokengru": ("tokengru(embedding=4, hidden=8, layers=2)", (6,)),
    "gpt": ("gpt(width=8, heads=2, depth=3)", (6,)),
}
STRATA = {
    "logreg": 1,
    "mlp": 3,
    "cnn2": 4,
    "cnn4": 4,
    "cnn8": 8,
    "vgg9": 9,
    "resnet8": 10,
    "resnet10": 13,
    "resnet13": 17,
    "resnet14": 17,
    "resnet18": 21,
    "resnet22": 25,
    "resnet26": 29,
    "resnet34": 37,
    "resnet50": 54,
    "resnet101": 105,
    "chargru": 4,
    "tablemlp": 3,
    "unet": 1 + 2 * 5 + 1,
    "tokengru": 4,
    "gpt": 1 + 4 * 3 + 1,
}


def zoo(name: str) -> tuple[nn.Sequential, Tensor]:
    """A small model of the zoo and a batch of two for it."""
    spec, shape = SMALL[name]
    model = build_model(spec, shape, classes=5, seed=3)
    generator = torch.Generator().manual_seed(4)
    if len(shape) == 1:
        return model, torch.randint(5, (2, *shape), generator=generator)
    return model, torch.randn(2, *shape, generator=generator)


def names(found: tuple[Stratum, ...]) -> list[str]:
    return [s.name for s in found]


def assert_partition(model: nn.Module, found: tuple[Stratum, ...]) -> None:
    """Every parameter and every buffer lies in exactly one stratum, and no stratum is without parameters."""
    assert sorted(p for s in found for p in s.params) == sorted(n for n, _ in model.named_parameters())
    assert sorted(b for s in found for b in s.buffers) == sorted(n for n, _ in model.named_buffers())
    assert all(s.params for s in found)
    assert all(s.stage == s.name.split(".")[0] for s in found)


def first_calls(model: nn.Module, x: Tensor) -> list[str]:
    """Names of the innermost modules in the order of their first calls, found independently of `strata`."""
    model = copy.deepcopy(model).eval()
    order: list[str] = []
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(lambda *_, name=name: order.append(name))
    with torch.no_grad():
        model(x)
    return list(dict.fromkeys(order))


# The zoo --------------------------------------------------------------------------------------------------


def test_every_model_of_the_zoo_is_tested() -> None:
    assert set(SMALL) == set(MODELS) - {"hf", "python"}


@pytest.mark.parametrize("name", SMALL)
def test_zoo_strata(name: str) -> None:
    """Partition, order and the norm layers' places, checked against forward hooks; a sample changes nothing."""
    model, x = zoo(name)
    found = strata(model)
    assert_partition(model, found)
    assert strata(model, x) == found
    assert len(found) == STRATA.get(name, len(found))

    modules = dict(model.named_modules())
    opened: list[str] = []
    for called in first_calls(model, x):
        own = dict(modules[called].named_parameters(recurse=False))
        if any(p.ndim > 1 for p in own.values()):
            opened.append(called)
        else:
            home = found[len(opened) - 1]
            assert {f"{called}.{p}" for p in own} <= set(home.params)
            assert {f"{called}.{b}" for b, _ in modules[called].named_buffers(recurse=False)} <= set(home.buffers)
    assert names(found) == opened


def test_resnet_strata_are_convolutions_with_their_norm_layers() -> None:
    """Stem, block by block the convolutions with the shortcut last, head: 10 strata of ResNet-8, as FedPart counts."""
    found = strata(zoo("resnet8")[0])
    assert names(found) == [
        "stem.conv",
        "layer1.0.conv1",
        "layer1.0.conv2",
        "layer2.0.conv1",
        "layer2.0.conv2",
        "layer2.0.shortcut.conv",
        "layer3.0.conv1",
        "layer3.0.conv2",
        "layer3.0.shortcut.conv",
        "head",
    ]
    norm = "layer2.0.shortcut.norm"
    assert found[5] == Stratum(
        name="layer2.0.shortcut.conv",
        stage="layer2",
        params=("layer2.0.shortcut.conv.weight", f"{norm}.weight", f"{norm}.bias"),
        buffers=(f"{norm}.running_mean", f"{norm}.running_var", f"{norm}.num_batches_tracked"),
    )


def test_plain_resnet_has_no_shortcut_strata() -> None:
    assert len(strata(build_model("resnet18(width=4, residual=False)", (3, 16, 16), 5))) == 18


def test_vit_places() -> None:
    """Tokens go with the patch projection; a pre-norm layer goes with the weight layer that ran before it."""
    model, _ = zoo("vit")
    found = strata(model)
    assert {"patch.cls_token", "patch.position_embeddings", "block1.layer.layernorm_before.weight"} <= set(
        found[0].params
    )
    assert "pool.norm.weight" in found[-2].params
    assert found[-1].params == ("head.weight", "head.bias")


# Users' own modules ---------------------------------------------------------------------------------------


class Swapped(nn.Module):
    """Registered last to first; `mask` is optional, as in many forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Linear(3, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(self.first(x))
        if mask is not None:
            x = x * mask
        return self.last(x)


def test_order_is_that_of_execution_not_of_registration() -> None:
    model = Swapped()
    found = strata(model)
    assert names(found) == ["first", "last"]
    assert found[0].params == ("first.weight", "first.bias", "norm.weight", "norm.bias")
    assert found[0].buffers == ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert strata(model, torch.randn(2, 3)) == found
    assert_partition(model, found)


class Branching(Swapped):
    """The path depends on the data, which symbolic tracing cannot follow."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def test_where_tracing_fails_a_sample_tells_the_order() -> None:
    model = Branching()
    assert names(strata(model, torch.randn(2, 3))) == ["first", "last"]
    by_registration = strata(model)
    assert names(by_registration) == ["last", "first"]
    assert_partition(model, by_registration)


def test_tracing_goes_stage_by_stage() -> None:
    """A stage that cannot be traced does not spoil the others."""
    model = nn.Sequential(Swapped(), nn.Flatten(), Branching())
    assert names(strata(model)) == [
        "0.first",
        "0.last",
        "2.last",
        "2.first",
    ]
    assert_partition(model, strata(model))


def test_bare_layer_is_one_stratum() -> None:
    assert strata(nn.Linear(2, 3)) == (Stratum("", "", ("weight", "bias"), ()),)


def test_bare_parameters_join_the_first_weight_layer_of_their_container() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.extra = nn.ParameterList([nn.Parameter(torch.ones(4, 4))])
            self.register_buffer("shift", torch.zeros(4))
            self.b = nn.Linear(4, 4)
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x @ self.extra[0])) * self.scale + self.shift

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 4))
            self.embed = nn.Linear(3, 4)
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.embed(x) + self.token)

    model = Outer()
    found = strata(model)
    assert strata(model, torch.randn(2, 3)) == found
    assert names(found) == ["embed", "inner.a", "inner.b"]
    assert found[0].params == ("embed.weight", "embed.bias", "token")
    assert found[1].params == ("inner.a.weight", "inner.a.bias", "inner.scale", "inner.extra.0")
    assert found[1].buffers == ("inner.shift",)
    assert_partition(model, found)


def test_own_parameter_beside_norm_layers_goes_with_them() -> None:
    """A container without a weight layer behaves like a norm layer; so do RMS norms, layer scales and PReLU."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(1, 4))
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) * self.gamma

    class LayerScale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gamma

    model = nn.Sequential(nn.Linear(3, 4), Scaled(), nn.PReLU(), LayerScale(), nn.RMSNorm(4), nn.Linear(4, 2))
    found = strata(model)
    assert strata(model, torch.randn(2, 3)) == found
    assert names(found) == ["0", "5"]
    assert found[0].params == (
        "0.weight",
        "0.bias",
        "1.norm.weight",
        "1.norm.bias",
        "1.gamma",
        "2.weight",
        "3.gamma",
        "4.weight",
    )


def test_own_class_with_a_matrix_is_a_weight_layer() -> None:
    class Dense(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.zeros(inputs, outputs))
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:  # tracing must not look inside
                x = -x
            return self.act(x @ self.kernel)

    assert names(strata(nn.Sequential(Dense(3, 4), nn.BatchNorm1d(4), Dense(4, 2)))) == ["0", "2"]
    assert names(strata(Dense(3, 4))) == [""]


class Tied(nn.Module):
    """A language model whose decoder, registered first, shares the embedding's weight."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.decoder = nn.Linear(4, 7, bias=bias)
        self.embed = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(7)
        self.embed.weight = self.decoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.decoder(self.mix(self.embed(x))))


@pytest.mark.parametrize("sample", [None, torch.zeros(2, 5, dtype=torch.long)])
def test_tied_weight_belongs_to_its_first_user(sample: Tensor | None) -> None:
    found = strata(Tied(bias=True), sample)
    assert names(found) == ["embed", "mix", "decoder"]
    assert found[0].params == ("decoder.weight",)
    assert found[2].params == ("decoder.bias", "norm.weight", "norm.bias")
    without = strata(Tied(bias=False), sample)  # the decoder has nothing of its own: no empty stratum
    assert names(without) == ["embed", "mix"]
    assert without[1].params == ("mix.weight", "mix.bias", "norm.weight", "norm.bias")


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.idle_norm = nn.LayerNorm(4)
        self.idle = nn.Linear(4, 4)
        self.idle_after = nn.BatchNorm1d(4)
        self.used = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.used(x))


@pytest.mark.parametrize("sample", [None, torch.zeros(2, 4)])
def test_unused_layers_come_last(sample: Tensor | None) -> None:
    model = Unused()
    found = strata(model, sample)
    assert names(found) == ["used", "idle_norm", "idle"]
    assert found[0].params == ("used.weight", "used.bias", "norm.weight", "norm.bias")
    assert found[2].params == ("idle.weight", "idle.bias", "idle_after.weight", "idle_after.bias")
    assert_partition(model, found)


def test_norm_layers_before_any_weight_layer_join_the_first() -> None:
    model = nn.Sequential(nn.LayerNorm(3), nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Linear(4, 2))
    found = strata(model)
    assert found[0] == Stratum(
        "2",
        "2",
        ("2.weight", "2.bias", "0.weight", "0.bias", "1.weight", "1.bias"),
        ("1.running_mean", "1.running_var", "1.num_batches_tracked"),
    )
    assert strata(model, torch.randn(2, 3)) == found


def test_norm_layers_alone_are_one_stratum() -> None:
    model = nn.Sequential(nn.LayerNorm(3), nn.BatchNorm1d(3))
    found = strata(model)
    assert names(found) == ["0"]
    assert_partition(model, found)


def test_a_module_used_twice_counts_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Linear(3, 3)
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(self.a(x)))

    model = Twice()
    assert names(strata(model)) == names(strata(model, torch.zeros(1, 3))) == ["a", "b"]
    shared = nn.Linear(3, 3)
    found = strata(nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(3, 2)))
    assert names(found) == ["0", "3"]


def test_attention_is_one_layer() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.embed = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return self.norm(self.attention(x, x, x)[0])

    model = Attending()
    found = strata(model)
    assert strata(model, torch.randn(2, 5, 3)) == found
    assert names(found) == ["embed", "attention"]
    assert set(found[1].params) == {
        "attention.in_proj_weight",
        "attention.in_proj_bias",
        "attention.out_proj.weight",
        "attention.out_proj.bias",
        "norm.weight",
        "norm.bias",
    }


def test_a_sample_looks_into_torch_encoder_layers() -> None:
    """In eval mode PyTorch has a fast path that calls no submodule: it must not be taken."""
    model = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, batch_first=True)
    found = strata(model, torch.randn(2, 5, 4))
    assert names(found) == ["self_attn", "linear1", "linear2"]
    assert "norm1.weight" in found[0].params
    assert "norm2.weight" in found[2].params
    assert torch.backends.mha.get_fastpath_enabled()
    assert_partition(model, strata(model))


def test_parametrised_layers_stay_whole() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    found = strata(model)
    assert names(found) == ["0", "1"]
    assert_partition(model, found)


def test_buffers_without_parameters_join_like_norm_layers() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("by", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.by

    found = strata(nn.Sequential(Shift(), nn.Linear(3, 3), Shift(), nn.Linear(3, 2)))
    assert [s.buffers for s in found] == [("0.by", "2.by"), ()]


class Restless(nn.Module):
    """Changes everything that a run can change: statistics, counters, attributes, random state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.BatchNorm1d(3).eval()
        self.register_buffer("runs", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(3))
        self.seen: object = None

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.seen = x
        self.train()
        x = self.frozen(self.norm(self.first(x) + torch.randn(3)))
        self.mean = x.mean(0)
        return x


@pytest.mark.parametrize("sample", [None, torch.randn(4, 3)])
def test_nothing_in_the_model_changes(sample: Tensor | None) -> None:
    model = Restless()
    before = copy.deepcopy(model.state_dict())
    buffers = dict(model.named_buffers())
    flags = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    strata(model, sample)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == flags
    assert model.seen is None
    assert all(b is buffers[name] for name, b in model.named_buffers())
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert torch.is_grad_enabled()


def test_running_statistics_survive_a_sample() -> None:
    model, x = zoo("resnet8")
    before = copy.deepcopy(model.state_dict())
    strata(model, 100 * x)
    assert model.training
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_refusals() -> None:
    with pytest.raises(UsageError, match="at least one parameter; this ReLU has none"):
        strata(nn.ReLU())
    with pytest.raises(UsageError, match="lazy layers"):
        strata(nn.Sequential(nn.LazyLinear(3)))
    model = Swapped()
    with pytest.raises(UsageError, match=r"cannot run on a sample of shape \(2, 9\)"):
        strata(model, torch.zeros(2, 9))
    assert model.training


# Stages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_tap_and_run_from_compose_to_the_model(name: str) -> None:
    model, x = zoo(name)
    model.eval()
    whole = model(x)
    for stage in stages(model):
        assert torch.equal(run_from(model, tap(model, x, stage), stage), whole)
    assert stages(model)[-1] == "head"
    features = tap(model, x, stages(model)[-2])
    if name == "unet":
        assert isinstance(model.head, nn.Conv2d)
        assert features.shape == (2, model.head.in_channels, *x.shape[2:])
        return
    assert isinstance(model.head, nn.Linear)
    assert features.shape == (2, *(x.shape[1:] if name in ("tokengru", "gpt") else ()), model.head.in_features)


def test_any_sequential_is_staged() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 2))
    assert stages(model) == ("0", "1", "2", "3", "4")
    x = torch.randn(5, 3)
    for stage in stages(model):
        assert torch.equal(run_from(model, tap(model, x, stage), stage), model(x))


class Reversed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("model", [Swapped(), Reversed(nn.Linear(2, 2))])
@pytest.mark.parametrize(
    "call", [stages, lambda m: tap(m, torch.zeros(1), "0"), lambda m: run_from(m, torch.zeros(1), "0")]
)
def test_only_plain_sequentials_have_stages(model: nn.Module, call: Callable[[nn.Module], object]) -> None:
    with pytest.raises(UsageError, match=f"a {type(model).__name__} has no stages"):
        call(model)


def test_unknown_stage() -> None:
    model, x = zoo("resnet8")
    with pytest.raises(UsageError, match=r"no stage 'layer9' \(did you mean 'layer"):
        tap(model, x, "layer9")
    with pytest.raises(UsageError, match=r"no stage 'xyz' \(known: head, layer1"):
        run_from(model, x, "xyz")


# Partners -------------------------------------------------------------------------------------------------


def test_partners_are_the_earliest_of_their_shape_in_the_stage() -> None:
    """ResNet-18: layer1's four convolutions have one shape; in a later layer, all but the first two."""
    model = zoo("resnet18")[0]
    assert partners(dict(model.named_parameters()), strata(model)) == {
        "layer1.0.conv2.weight": "layer1.0.conv1.weight",
        "layer1.1.conv1.weight": "layer1.0.conv1.weight",
        "layer1.1.conv2.weight": "layer1.0.conv1.weight",
        **{f"layer{k}.1.conv{i}.weight": f"layer{k}.0.conv2.weight" for k in (2, 3, 4) for i in (1, 2)},
    }


def test_partners_keep_to_their_stage_and_to_execution_order() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Linear(3, 3)
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model = nn.Sequential(Stage(), nn.Linear(3, 3), Stage())
    assert partners(dict(model.named_parameters()), strata(model)) == {
        "0.b.weight": "0.a.weight",
        "2.b.weight": "2.a.weight",
    }
    repeated = nn.Sequential(Stage(), Stage())
    later = ["0.b.weight", "1.a.weight", "1.b.weight"]
    assert partners(dict(repeated.named_parameters()), strata(repeated)) == dict.fromkeys(later, "0.a.weight")
