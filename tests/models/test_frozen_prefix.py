"""The cut below what trains: the same outputs, nothing that trains or changes below it, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.core.types import Into, Stratum
from fedstrata.errors import UsageError
from fedstrata.models.frozen_prefix import Cut, cut_at
from fedstrata.models.norms import running_statistics
from fedstrata.models.registry import build_model
from fedstrata.models.strata import strata
from fedstrata.models.zoo.layers import First, TakeStep
from fedstrata.system.machine import compute_with

ZOO: dict[str, tuple[str, tuple[int, ...]]] = {
    "logreg": ("logreg", (1, 8, 8)),
    "mlp": ("mlp(hidden=(8, 6))", (1, 8, 8)),
    "cnn2": ("cnn2(width=4, hidden=8)", (1, 8, 8)),
    "vgg9": ("vgg9(width=2, hidden=8)", (1, 8, 8)),
    "resnet8": ("resnet8(width=4)", (3, 8, 8)),
    "resnet50": ("resnet50(width=2)", (3, 8, 8)),
    "vit": ("vit(dim=8, depth=2, heads=2)", (1, 8, 8)),
    "swin": ("swin(dim=8, window=2, depths=(2, 2), heads=(1, 2))", (3, 16, 16)),
    "chargru": ("chargru(embedding=4, hidden=6)", (6,)),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are no faster with more threads, and much slower beside other work."""
    with compute_with(1):
        yield


def zoo(name: str) -> tuple[nn.Sequential, Tensor]:
    if name in ("vit", "swin"):
        pytest.importorskip("transformers")
    text, shape = ZOO[name]
    source = torch.Generator().manual_seed(4)
    tokens = torch.randint(5, (3, *shape), generator=source)
    return build_model(text, shape, 5, seed=3), tokens if len(shape) == 1 else torch.randn(3, *shape, generator=source)


def frozen(model: nn.Module, part: Stratum) -> tuple[str, ...]:
    """All running statistics but the stratum's."""
    return tuple(n for n in running_statistics(model) if n not in part.buffers)


def still(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """The model in training mode, but for the norm layers whose statistics these are."""
    model.train()
    for name in names:
        model.get_submodule(name.rpartition(".")[0]).eval()
    return model


def run_both_halves(cut: Cut, x: Tensor) -> Tensor:
    with torch.no_grad():
        crossing = cut.below(x)
    return cut.above(*crossing)


def gradients(output: Tensor, params: dict[str, Tensor], names: tuple[str, ...]) -> list[Tensor]:
    return list(torch.autograd.grad(output.logsumexp(1).sum(), [params[n] for n in names]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_both_parts_are_the_model(name: str) -> None:
    """Outputs, gradients and statistics are as without a cut, and nothing that trains is below it, for every stratum.

    Of ResNet-50 every ninth, for time.
    """
    model, x = zoo(name)
    cuts = 0
    for part in strata(model, x)[:: 9 if name == "resnet50" else 1]:
        for p_name, p in model.named_parameters():
            p.requires_grad_(p_name in part.params)
        names = frozen(model, part)
        whole = still(copy.deepcopy(model), names)
        cut = cut_at(still(model, names), part.params, names, x)
        if cut is None:
            continue
        cuts += 1
        ours, theirs = run_both_halves(cut, x), whole(x)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        params = dict(model.named_parameters()), dict(whole.named_parameters())
        for a, b in zip(
            gradients(ours, params[0], part.params), gradients(theirs, params[1], part.params), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
        for n, b in running_statistics(whole).items():
            torch.testing.assert_close(running_statistics(model)[n], b, rtol=0, atol=1e-6)
        with torch.no_grad():
            before = cut.below(x)
            for n in part.params:
                params[0][n].normal_()
            assert all(torch.equal(a, b) for a, b in zip(before, cut.below(x), strict=True))
    assert cuts >= {"logreg": 0, "mlp": 2, "chargru": 3, "cnn2": 3, "vgg9": 8, "resnet8": 9, "resnet50": 5}.get(name, 4)


def test_rows_can_be_picked() -> None:
    """Kept for all examples, the tensors that cross serve any batch of them."""
    model, x = zoo("resnet8")
    part = strata(model, x)[5]
    cut = cut_at(still(model, frozen(model, part)), part.params, frozen(model, part), x)
    assert cut is not None
    with torch.no_grad():
        crossing = cut.below(x)
        rows = torch.tensor([2, 0])
        picked = cut.above(*(t[rows] for t in crossing))
        torch.testing.assert_close(picked, model(x[rows]), rtol=0, atol=1e-5)


def test_two_tensors_cross_where_a_link_goes_around() -> None:
    """A block's input goes into its shortcut as well: layer2's second convolution needs both."""
    model, x = zoo("resnet8")
    part = next(s for s in strata(model, x) if s.name == "layer2.0.shortcut.conv")
    cut = cut_at(model, part.params, frozen(model, part), x)
    assert cut is not None
    assert sorted(tuple(t.shape) for t in cut.below(x)) == [(3, 4, 2, 2), (3, 8, 1, 1)]


def test_nothing_below_the_first_stratum() -> None:
    for name in ("mlp", "resnet8", "chargru"):
        model, x = zoo(name)
        first = strata(model, x)[0]
        cut = cut_at(model, first.params, frozen(model, first), x)
        assert cut is None or (name == "mlp" and cut.below(x)[0].shape == (3, 64))


def test_what_trains_anywhere_is_above() -> None:
    """Two strata that train: the cut is below the shallower one."""
    model, x = zoo("mlp")
    parts = strata(model, x)
    cut = cut_at(model, parts[1].params + parts[2].params, (), x)
    assert cut is not None
    assert cut.below(x)[0].shape == (3, 8)


def test_norm_layers_that_follow_the_batch_are_above() -> None:
    model, x = zoo("resnet8")
    parts = strata(model, x)
    inputs = cut_at(model, parts[-1].params, (), x)
    assert inputs is not None
    (crossing,) = inputs.below(x)
    torch.testing.assert_close(crossing, model.stem.conv(x))
    some = tuple(n for n in running_statistics(model) if not n.startswith("layer2"))
    cut = cut_at(still(model, some), parts[-1].params, some, x)
    assert cut is not None
    assert all(t.shape[1] in (4, 8) for t in cut.below(x))


def test_norm_layers_without_statistics_are_above() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(6, 4)
    cut = cut_at(model, ("3.weight", "3.bias"), (), x)
    assert cut is not None
    torch.testing.assert_close(cut.below(x)[0], model[0](x))


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_is_above_unless_it_drops_nothing(p: float) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(p), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(6, 4)
    cut = cut_at(model, ("4.weight", "4.bias"), (), x)
    assert cut is not None
    expected = model[0](x) if p else model[:4](x)
    torch.testing.assert_close(cut.below(x)[0], expected)


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
def test_dropout_inside_a_recurrent_layer(layer: type[nn.RNNBase]) -> None:
    x = torch.randn(6, 3, 4)
    for dropout in (0.0, 0.5):
        recurrent = layer(4, 5, 2, batch_first=True, dropout=dropout)
        model = nn.Sequential(nn.Linear(4, 4), First(recurrent), TakeStep(-1), nn.Linear(5, 3))
        cut = cut_at(model, ("3.weight", "3.bias"), (), x)
        assert cut is not None
        assert cut.below(x)[0].shape == ((6, 3, 4) if dropout else (6, 5))


def test_places_that_somebody_looks_at_are_above() -> None:
    """What a technique taps must run in every step: a layer's output, or what goes into it."""
    model, x = zoo("vgg9")
    head = ("head.weight", "head.bias")
    for place in ("layer2", Into("layer2")):
        cut = cut_at(model, head, (), x, [place])
        assert cut is not None
        torch.testing.assert_close(cut.below(x)[0], model[:1](x))
        seen: list[Tensor] = []
        handle = model.layer2.register_forward_hook(lambda *args: seen.append(args[2]))  # noqa: B023
        torch.testing.assert_close(run_both_halves(cut, x), model(x))
        handle.remove()
        assert len(seen) == 2
    assert cut_at(model, head, (), x, [""]) is None
    assert cut_at(model, head, (), x, ["head"]) is not None


class Own(nn.Module):
    """A user's own model: three layers, and what is done between the first two is up to a function."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.between(self, self.one(x)).relu()).relu())  # type: ignore[no-any-return]


def test_a_model_of_the_users_own() -> None:
    model, x = Own(lambda self, h: h + self.one.bias.sum()), torch.randn(6, 4)
    cut = cut_at(model, ("three.weight", "three.bias"), (), x)
    assert cut is not None
    torch.testing.assert_close(run_both_halves(cut, x), model(x))


def test_sums_over_the_batch_are_above() -> None:
    """h − mean(h) over the rows at hand: kept is h, for the rows of a later batch are others."""
    model, x = Own(lambda self, h: h - h.mean(0)), torch.randn(6, 4)
    cut = cut_at(model, ("three.weight", "three.bias"), (), x)
    assert cut is not None
    (h,) = cut.below(x)
    torch.testing.assert_close(h, model.one(x))
    torch.testing.assert_close(cut.above(h[:3]), model(x[:3]))


class Mixing(nn.Module):
    """Rows change each other."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Noise(nn.Module):
    """Random numbers in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


@pytest.mark.parametrize("odd", [Mixing, Noise])
def test_layers_that_cannot_be_kept_are_refused(odd: type[nn.Module]) -> None:
    """Whole, so that tracing sees nothing of what they do."""
    model = nn.Sequential(nn.Linear(4, 5), odd(), nn.Linear(5, 3))
    with pytest.raises(UsageError, match="it draws random numbers, or rows of a batch change each other") as refusal:
        cut_at(model, ("2.weight", "2.bias"), (), torch.randn(6, 4))
    assert "\n" not in str(refusal.value)
    cut_at(model, ("0.weight", "0.bias"), (), torch.randn(6, 4))


@pytest.mark.parametrize(
    "between",
    [
        lambda self, h: h if h.sum() > 0 else -h,
        lambda self, h: h + torch.randn(1),
    ],
    ids=["branch", "one draw for all steps"],
)
def test_code_that_cannot_be_followed(between: Any) -> None:
    """Refused as a model of its own; as a part of a Sequential, what is below that part can be kept."""
    model, x = Own(between), torch.randn(6, 4)
    with pytest.raises(UsageError, match=r"this Own cannot be .*") as refusal:
        cut_at(model, ("three.weight", "three.bias"), (), x)
    assert "\n" not in str(refusal.value)
    stages = nn.Sequential(nn.Linear(4, 4), Own(lambda self, h: h if h.sum() > 0 else -h), nn.Linear(3, 3))
    cut = cut_at(stages, ("1.three.weight", "1.three.bias"), (), x)
    assert cut is not None
    torch.testing.assert_close(cut.below(x)[0], stages[0](x))


@pytest.mark.parametrize(
    "between",
    [lambda self, h: F.dropout(h, 0.5, self.training), lambda self, h: h + torch.randn(h.shape)],
    ids=["dropout", "noise"],
)
def test_code_that_draws_random_numbers_is_above(between: Any) -> None:
    model, x = Own(between), torch.randn(6, 4)
    cut = cut_at(model, ("three.weight", "three.bias"), (), x)
    assert cut is not None
    (h,) = cut.below(x)
    torch.testing.assert_close(h, model.one(x))
    assert not torch.equal(cut.above(h), cut.above(h))


def test_the_model_is_left_as_it_was() -> None:
    """Statistics, modes, flags and random state."""
    model, x = zoo("resnet8")
    part = strata(model, x)[-1]
    still(model, frozen(model, part))
    model.head.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()], torch.get_rng_state()
    flags = [p.requires_grad for p in model.parameters()]
    cut_at(model, part.params, frozen(model, part), x)
    assert all(torch.equal(t, before[0][n]) for n, t in model.state_dict().items())
    assert [m.training for m in model.modules()] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert [p.requires_grad for p in model.parameters()] == flags


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_dropout_in_a_models_own_code(training: bool) -> None:
    """It is traced as it trains, whatever its mode when it was given, and drawn anew in every step."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = nn.functional.dropout(self.first(x).tanh(), 0.5, self.training)
            out: Tensor = self.head(self.second(h).tanh())
            return out

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net().train(training)
        clients = [(torch.randn(12, 4), torch.randint(0, 3, (12,)))]
    ends = []
    for cache in (False, True):
        method = f"fedpart(full_rounds=0, rounds_per_stratum=1, cache_prefix={cache})"
        fed = fs.Federation(model, clients, method=method, rounds=3, epochs=2, batch_size=4)
        fed.fit()
        ends.append((fed.state.params, sum(r.flops for r in fed.records)))
    assert all(torch.allclose(ends[0][0][n], ends[1][0][n], atol=1e-6) for n in ends[0][0])
    assert ends[1][1] < ends[0][1]


@pytest.mark.parametrize("kind", ["trained gain", "crossing"])
def test_changes_in_place_that_would_make_the_cut_wrong(kind: str) -> None:
    """The graph does not show them; what comes out of the two halves does."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
            self.gain = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if kind == "trained gain":
                h.mul_(self.gain)
                out: Tensor = self.head(h.relu())
            else:
                shifted = h + self.gain
                out = self.head(shifted + torch.relu_(h))
            return out

    with pytest.raises(UsageError, match="changed in place"):
        cut_at(Net(), ("gain",), (), torch.randn(6, 4))


def test_one_row_is_enough_to_find_the_cut() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), torch.randn(1, 4)
    assert cut_at(model, ("2.weight",), ("1.running_mean", "1.running_var", "1.num_batches_tracked"), x) is not None
