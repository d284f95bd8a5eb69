"""FedNLR, Wang et al. 2024."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

import fedstrata as fs
from fedstrata.core.tensors import Tensors
from fedstrata.models.registry import MODELS, build_model
from fedstrata.system.machine import compute_with
from fedstrata.techniques.fednlr import FedNLR, pace
from fedstrata.techniques.fedpart import FedPart
from tests.techniques.worlds import (
    CLASSES,
    HIDDEN,
    INPUTS,
    LR,
    STEPS,
    ClientData,
    Vector,
    agree,
    differ,
    flat,
    layer,
    mean,
    parties,
    pulled_back,
    run,
    softmax,
)

CUT = INPUTS * HIDDEN + HIDDEN
"""Where the first layer of `relu_net` ends in its vector."""
LAYERS = nn.Linear | nn.Conv2d | nn.ConvTranspose2d
NORMS = _BatchNorm | nn.LayerNorm


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are no faster with more threads, and much slower beside other work."""
    with compute_with(1):
        yield


# The equations --------------------------------------------------------------------------------------------


def relu_net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(8)
        return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)).double()


def slope(w: Vector, party: ClientData) -> Vector:
    """∇ of the mean cross-entropy of the two layers."""
    x, y = party
    inside = layer(w[:CUT], x, HIDDEN)
    hidden = np.maximum(inside, 0)
    error = (softmax(layer(w[CUT:], hidden)) - np.eye(CLASSES)[y]) / len(y)
    back = error @ w[CUT:-CLASSES].reshape(CLASSES, HIDDEN) * (inside > 0)
    return np.concatenate([pulled_back(back, x), pulled_back(error, hidden)])


def factors(means: Vector, mu: float) -> Vector:
    """M·q with q_m = exp(h̄_m/T)/Σ exp(h̄_i/T), T = (h̄_max − h̄_min)/ln μ."""
    if means.max() == means.min():
        return np.ones_like(means)
    powers = np.exp((means - means.max()) * np.log(mu) / (means.max() - means.min()))
    return len(means) * powers / powers.sum()


def of_client(w: Vector, party: ClientData, mu0: float, a1: float, a2: float) -> Vector:
    """The factor of every entry of w: a neuron's weights, which are a row, and its bias have the neuron's."""
    hidden = np.maximum(layer(w[:CUT], party[0], HIDDEN), 0)
    first = factors(hidden.mean(0), mu0 + a1 * 1 / 2 + a2 * np.log10(HIDDEN))
    last = factors(layer(w[CUT:], hidden).mean(0), mu0 + a1 * 2 / 2 + a2 * np.log10(CLASSES))
    return np.concatenate([first.repeat(INPUTS), first, last.repeat(HIDDEN), last])


def plain(start: Vector, clients: list[ClientData], rounds: int) -> Vector:
    """FedAvg on the two layers."""
    w = start
    for _ in range(rounds):
        ends = []
        for client in clients:
            v = w
            for _ in range(STEPS):
                v = v - LR * slope(v, client)
            ends.append(v)
        w = mean(ends, [len(y) for _, y in clients])
    return w


@pytest.mark.parametrize(("mu0", "a1", "a2"), [(1.0, 1.0, 1.0), (1.0, 0.45, 0.3), (3.0, 0.0, 2.0)])
def test_two_rounds(mu0: float, a1: float, a2: float) -> None:
    """Before its steps a client measures h̄ with the model that it received: ReLU outputs, and the logits.

    μ_l = μ0 + a1·l/L + a2·log₁₀ M_l; then w_{l,m} ← w_{l,m} − η·M_l·q_{l,m}·∇, and the server takes the weighted mean.
    """
    clients = parties((0, 0, 1, 0), (1, 2, 2, 2, 0, 2))
    fed = run(f"fednlr(mu0={mu0}, a1={a1}, a2={a2})", clients, relu_net(), rounds=2)
    w = flat(relu_net())
    for _ in range(2):
        ends = []
        for client in clients:
            rates, v = LR * of_client(w, client, mu0, a1, a2), w
            for _ in range(STEPS):
                v = v - rates * slope(v, client)
            ends.append(v)
        w = mean(ends, [len(y) for _, y in clients])
    agree(fed, w)
    differ(w, plain(flat(relu_net()), clients, 2))


def test_under_adam() -> None:
    """The factor multiplies Adam's direction m̂/(√v̂ + ε); scaling the gradient would not move anything."""
    clients = parties((0, 0, 1, 0), (1, 2, 2, 2, 0, 2))
    fed = run("fednlr", clients, relu_net(), rounds=1, optimizer="adam", lr=0.05)
    start = flat(relu_net())
    ends, unscaled = [], []
    for client in clients:
        for scale, into in ((of_client(start, client, 1, 1, 1), ends), (1.0, unscaled)):
            v, first, second = start, np.zeros_like(start), np.zeros_like(start)
            for step in range(1, STEPS + 1):
                g = slope(v, client)
                first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
                direction = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
                v = v - 0.05 * scale * direction
            into.append(v)
    sizes = [len(y) for _, y in clients]
    agree(fed, mean(ends, sizes))
    differ(mean(ends, sizes), mean(unscaled, sizes))


@pytest.mark.parametrize("mu", [1.0, 1.7, 40.0])
def test_pace(mu: float) -> None:
    """Mean 1, largest over smallest μ, in the activations' order; large activations do not overflow."""
    means = torch.tensor([3.0, -1.0, 0.0, 7.5, 7.4], dtype=torch.float64) * 1e6
    scales = pace(means, mu)
    assert scales.mean().item() == pytest.approx(1)
    assert (scales.max() / scales.min()).item() == pytest.approx(mu)
    assert mu == 1 or scales.argsort().tolist() == [1, 2, 0, 4, 3]


def test_neurons_alike_have_the_same_rate() -> None:
    assert pace(torch.full((5,), 0.3), 4.0).tolist() == [1.0] * 5
    assert pace(torch.tensor([2.0]), 4.0).tolist() == [1.0]


# On every model -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shown(FedNLR):
    """FedNLR that lets a test see the factors, visit by visit."""

    seen: ClassVar[list[Tensors]] = []

    def local(self, view: fs.ClientView) -> fs.Hooks:
        hooks = super().local(view)
        self.seen.append(dict(hooks.scale or {}))
        return hooks


def activations_by_round(
    model: nn.Module, data: tuple[Tensor, Tensor], *others: fs.Technique, rounds: int = 1, **fields: Any
) -> Any:
    """What the neurons of a model have on a client with this data, round by round."""
    Shown.seen.clear()
    method = fs.chain(Shown(**fields), *others)
    fs.Federation(model, [data], method=method, rounds=rounds, steps=1, lr=1e-3, engine="serial").fit()
    return list(Shown.seen)


SMALL: dict[str, tuple[str, tuple[int, ...]]] = {
    "logreg": ("logreg", (1, 8, 8)),
    "mlp": ("mlp(hidden=(8, 6))", (1, 8, 8)),
    "tablemlp": ("tablemlp(hidden=(8, 6))", (1, 8, 8)),
    "cnn2": ("cnn2(width=4, hidden=8)", (1, 8, 8)),
    "vgg9": ("vgg9(width=4, hidden=8)", (1, 8, 8)),
    "vit": ("vit(dim=16, depth=2, heads=2)", (1, 8, 8)),
    "swin": ("swin(dim=8, window=2, depths=(2, 2), heads=(1, 2))", (3, 16, 16)),
    "chargru": ("chargru(embedding=4, hidden=8)", (6,)),
}


def zoo(name: str) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    """A small model in double precision and a client's data; a norm layer's statistics are not those of its making."""
    if name in ("vit", "swin"):
        pytest.importorskip("transformers")
    text, shape = SMALL.get(name, (f"{name}(width=4)", (3, 8, 8)))
    model = build_model(text, shape, classes=5, seed=3).double()
    source = torch.Generator().manual_seed(4)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.running_mean.normal_(generator=source)
            module.running_var.uniform_(0.5, 2, generator=source)
    x = torch.randint(5, (7, *shape), generator=source) if len(shape) == 1 else torch.randn(7, *shape, generator=source)
    return model, (x if len(shape) == 1 else x.double(), torch.randint(5, (7,), generator=source))


def activations(model: nn.Module, x: Tensor) -> dict[tuple[str, ...], Vector]:
    """(layer, the norm layer that takes its output) → h̄ of its neurons, in the order of the calls.

    Measured by plain forward hooks, in evaluation mode.
    """
    model = copy.deepcopy(model).eval()
    modules = dict(model.named_modules())
    calls: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {}
    for name, module in modules.items():
        module.register_forward_hook(lambda m, args, out, name=name: calls.__setitem__(name, (args, out)))
    with torch.no_grad():
        model(x)
    layers = [name for name in calls if isinstance(modules[name], LAYERS)]
    means = {}
    for name in layers:
        taken = [n for n, (args, _) in calls.items() if isinstance(modules[n], NORMS) and args[0] is calls[name][1]]
        out = calls[[name, *taken][-1]][1]
        out = out if name == layers[-1] else out.relu()
        axis = -1 if isinstance(modules[name], nn.Linear) else 1
        means[name, *taken] = out.movedim(axis, 0).flatten(1).mean(1).numpy()
    return means


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("hf", "python", "unet", "tokengru", "gpt")])
def test_every_model_of_the_zoo(name: str) -> None:
    """In each layer: mean 1, largest over smallest μ_l, the activations' order; for all that a neuron has, no more."""
    model, (x, y) = zoo(name)
    (scales,) = activations_by_round(model, (x, y))
    measured = activations(model, x)
    expected: set[str] = set()
    for index, ((place, *norm), means) in enumerate(measured.items(), 1):
        mu = 1 + index / len(measured) + np.log10(len(means))
        weight = scales[f"{place}.weight"]
        factor = weight.flatten().numpy()
        assert weight.shape == (len(means), *[1] * (model.get_submodule(place).weight.dim() - 1))
        assert factor.mean() == pytest.approx(1)
        if means.max() > means.min():
            assert factor.max() / factor.min() == pytest.approx(mu)
        assert (np.diff(factor[np.argsort(means)]) >= -1e-9).all()
        np.testing.assert_allclose(factor, factors(means, mu), rtol=1e-6)
        mine = {f"{owner}.{n}" for owner in (place, *norm) for n, _ in model.get_submodule(owner).named_parameters()}
        assert all(torch.equal(scales[n], weight.flatten()) for n in mine - {f"{place}.weight"})
        expected |= mine
    assert scales.keys() == expected
    assert name == "swin" or all(
        len(owners) == 1 + name.startswith(("resnet", "tablemlp")) for owners in list(measured)[:-1]
    )
    assert any(means.max() > means.min() for means in measured.values())


def test_what_has_the_plain_rate() -> None:
    """Embeddings, recurrent layers, the norm layers and the class token of a transformer: said by name."""
    model, data = zoo("chargru")
    assert activations_by_round(model, data)[0].keys() == {"head.weight", "head.bias"}
    model, data = zoo("vit")
    rest = {n for n, _ in model.named_parameters()} - activations_by_round(model, data)[0].keys()
    assert {"patch.cls_token", "patch.position_embeddings", "pool.norm.weight"} <= rest
    assert all("norm" in n or n.startswith("patch.") for n in rest)


@pytest.mark.parametrize("name", ["logreg", "mlp", "cnn2", "vgg9", "resnet8", "vit", "swin", "chargru"])
def test_equal_activations_are_fedavg(name: str) -> None:
    """All weights and biases of the layers 0, and each layer's outputs alike: every factor is exactly 1."""
    model, data = zoo(name)
    for module in model.modules():
        if isinstance(module, LAYERS | _BatchNorm):
            for kind, value in (*module.named_parameters(), *module.named_buffers()):
                if value.is_floating_point():
                    nn.init.constant_(value, 1.0 if isinstance(module, _BatchNorm) and "var" in kind else 0.0)
    (scales,) = activations_by_round(model, data)
    assert scales
    assert all(torch.equal(s, torch.ones_like(s)) for s in scales.values())


# Which neurons --------------------------------------------------------------------------------------------


def small_client(*shape: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(9)
    return torch.randn(10, *shape, generator=source).double(), torch.randint(classes, (10,), generator=source)


def test_the_classifier_is_judged_by_its_logits() -> None:
    """Logits −1, −2, −3, which a ReLU would make equal: μ over 3 neurons of factors 2 : √2 : 1."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.copy_(torch.tensor([-1.0, -2.0, -3.0]))
    (scales,) = activations_by_round(model, small_client(4), mu=2.0)
    powers = torch.tensor([2.0, 2.0**0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(scales["2.bias"], 3 * powers / powers.sum())


def test_a_norm_layer_counts_if_it_takes_the_layers_output() -> None:
    """After a ReLU it does not: its neurons are not said to be the layer's, and the layer is measured before it."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        close = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
        apart = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    for model in (close, apart):
        for norm in (m for m in model if isinstance(m, nn.BatchNorm1d)):
            with torch.no_grad():
                norm.bias.copy_(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]))
                norm.weight.fill_(0.0)
    x, y = small_client(4)
    (scales,) = activations_by_round(close, (x, y), mu=4.0)
    assert {"1.weight", "1.bias"} <= scales.keys()
    expected = factors(np.array([5.0, 4.0, 3.0, 2.0, 1.0]), 4.0)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        np.testing.assert_allclose(scales[name].flatten(), expected)
    (scales,) = activations_by_round(apart, (x, y), mu=4.0)
    assert scales.keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}
    hidden = apart[0](x).relu().mean(0).detach().numpy()
    np.testing.assert_allclose(scales["0.bias"], factors(hidden, 4.0))


def test_channels_of_a_transposed_convolution() -> None:
    """Its weight has the outputs on its second axis."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.ConvTranspose2d(2, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)).double()
    data = small_client(2, 3, 3)
    (scales,) = activations_by_round(model, data)
    assert scales["0.weight"].shape == (1, 4, 1, 1)
    means = activations(model, data[0])["0",]
    np.testing.assert_allclose(scales["0.bias"], factors(means, 1 + 1 / 2 + np.log10(4)))


def test_layers_that_never_run() -> None:
    """They are no layers of the network: the classifier is the last that runs, and L counts those that do."""

    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head, self.spare = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.first(x).relu())  # type: ignore[no-any-return]

    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Spare().double()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([-1.0, -2.0, -3.0]))
    (scales,) = activations_by_round(model, small_client(4))
    assert scales.keys() == {"first.weight", "first.bias", "head.weight", "head.bias"}
    np.testing.assert_allclose(scales["head.bias"], factors(np.array([-1.0, -2.0, -3.0]), 1 + 1 + np.log10(3)))


@pytest.mark.parametrize("between", [nn.PReLU(), nn.LayerNorm(4)], ids=["prelu", "rows"])
def test_what_joins_a_stratum_without_a_neuron_of_its_own(between: nn.Module) -> None:
    """One slope for all channels, or a norm layer along another axis: its parameters have the plain rate."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), between, nn.Flatten(), nn.Linear(96, 3)).double()
    (scales,) = activations_by_round(model, small_client(1, 4, 4))
    assert scales.keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}


def test_a_norm_layer_over_channels_and_places() -> None:
    """Its affine parameters are one for every channel and place: if they are the channel's, they have its rate."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        conv, norm = nn.Conv2d(1, 6, 3, padding=1), nn.LayerNorm((6, 4, 4))
        model = nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)).double()
    (scales,) = activations_by_round(model, small_client(1, 4, 4))
    channels = scales["0.bias"].view(6, 1, 1).expand(6, 4, 4)
    assert all(torch.equal(scales[n].expand(6, 4, 4), channels) for n in scales if n.startswith("1."))


def test_one_ratio_for_all() -> None:
    model, data = zoo("resnet8")
    (scales,) = activations_by_round(model, data, mu=2.5)
    assert len(scales) == len(list(model.parameters()))
    assert all((s.max() / s.min()).item() == pytest.approx(2.5) for s in scales.values())


def test_rates_that_are_dealt_by_lot() -> None:
    """Each layer has the same rates as without; a neuron's weights and bias still share one, and visits differ."""
    model, data = zoo("mlp")
    (whole,) = activations_by_round(model, data)
    first, second = activations_by_round(model, data, rounds=2, shuffle=True)
    assert first.keys() == whole.keys()
    for name in whole:
        assert torch.equal(first[name].flatten().sort().values, whole[name].flatten().sort().values)
    assert not torch.equal(first["fc1.linear.bias"], whole["fc1.linear.bias"])
    assert torch.equal(first["fc1.linear.weight"].flatten(), first["fc1.linear.bias"])
    assert first["fc1.linear.bias"].argsort().tolist() != second["fc1.linear.bias"].argsort().tolist()


def test_some_layers_only() -> None:
    """The others have the plain rate; those named keep their place in the depth."""
    model, data = zoo("mlp")
    (whole,) = activations_by_round(model, data)
    (some,) = activations_by_round(model, data, layers=("fc2*", "head"))
    assert some.keys() == {"fc2.linear.weight", "fc2.linear.bias", "head.weight", "head.bias"}
    assert all(torch.equal(some[n], whole[n]) for n in some)
    with pytest.raises(fs.UsageError, match=r"no layer of neurons is called 'fc2' .*fc2.linear"):
        fs.Federation(model, [data], method="fednlr(layers=('fc2',))")


def test_a_pattern_may_name_what_only_some_clients_hold() -> None:
    data = zoo("mlp")[1]
    shallow = build_model("mlp(hidden=(8,))", (1, 8, 8), 5, seed=3).double()
    deep = build_model("mlp(hidden=(8, 8))", (1, 8, 8), 5, seed=3).double()
    Shown.seen.clear()
    settings: dict[str, Any] = {"archs": {"shallow": shallow}, "arch_of": lambda c: "shallow" if c else ""}
    method = fs.chain(Shown(layers=("fc2*",)))
    fs.Federation(deep, [data, data], method=method, rounds=1, engine="serial", **settings).fit()
    assert [set(scales) for scales in Shown.seen] == [{"fc2.linear.weight", "fc2.linear.bias"}, set()]


def test_one_stratum_at_a_time() -> None:
    """Beside FedPart only the active stratum's neurons are scaled, as they would be in a full round."""
    model, data = zoo("mlp")
    (whole,) = activations_by_round(model, data)
    turns = activations_by_round(model, data, FedPart(full_rounds=0, rounds_per_stratum=1), rounds=3)
    parts = [("fc1.linear.weight", "fc1.linear.bias"), ("fc2.linear.weight", "fc2.linear.bias")]
    assert [tuple(scales) for scales in turns] == [*parts, ("head.weight", "head.bias")]
    assert all(torch.equal(turns[0][n], whole[n]) for n in parts[0])


# The pass -------------------------------------------------------------------------------------------------


def forward_flops(model: nn.Module, x: Tensor) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.eval()(x)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", ["mlp", "vgg9", "resnet8", "vit", "chargru"])
def test_the_pass_is_counted(name: str) -> None:
    """A round costs FedAvg's FLOPs and one forward pass over each client's data, as torch counts it."""
    model, (x, y) = zoo(name)
    clients = [(x, y), (x[:4], y[:4])]
    settings: dict[str, Any] = {"rounds": 2, "epochs": 2, "batch_size": 3, "lr": 1e-3, "engine": "serial"}
    runs = [fs.Federation(model, clients, method=m, **settings).fit() for m in ("fedavg", "fednlr", "fednlr(mu=1.0)")]
    plain, ours, neutral = ([r.flops for r in history.records] for history in runs)
    extra = sum(forward_flops(copy.deepcopy(model), x) for x, _ in clients)
    assert extra > 0
    assert [b - a for a, b in zip(plain, ours, strict=True)] == [extra, extra]
    assert neutral == plain


def test_the_pass_leaves_no_trace() -> None:
    """Running statistics, training mode and the dropout's random numbers are those of FedAvg.

    With a ratio of 1 + 1e-9 the steps are FedAvg's too, up to that; another seed's dropout is far away.
    """
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
        ).double()
    clients = [small_client(4), tuple(t[:6] for t in small_client(4))]

    def end(method: str, **settings: Any) -> Tensors:
        fed = fs.Federation(model, clients, method=method, rounds=3, batch_size=4, engine="serial", **settings)
        fed.fit()
        return {**fed.state.params, **fed.state.buffers}

    for buffers in ("average", "local"):
        plain, ours = end("fedavg", buffers=buffers), end("fednlr(mu=1.000000001)", buffers=buffers)
        for name, value in plain.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-7)
    assert (end("fedavg", seed=1)["0.weight"] - plain["0.weight"]).abs().max() > 1e-3


def test_activations_are_those_of_the_received_model() -> None:
    """Measured with the running statistics that the server sends, over all batches, before the first step."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    source = torch.Generator().manual_seed(1)
    x, y = torch.randn(300, 4, generator=source).double(), torch.randint(3, (300,), generator=source)
    Shown.seen.clear()
    fed = fs.Federation(model, [(x, y)], method=fs.chain(Shown()), rounds=2, steps=3, lr=0.5, engine="serial")
    for _ in fed.rounds():
        before = copy.deepcopy(model).eval()
        model = copy.deepcopy(fed.model)
        with torch.no_grad():
            hidden = before[:3](x).mean(0).numpy()
            logits = before(x).mean(0).numpy()
        scales = Shown.seen[-1]
        np.testing.assert_allclose(scales["1.bias"], factors(hidden, 1 + 0.5 + np.log10(8)), rtol=1e-6)
        np.testing.assert_allclose(scales["3.bias"], factors(logits, 1 + 1 + np.log10(3)), rtol=1e-6)
    assert len(Shown.seen) == 2
    assert not torch.equal(Shown.seen[0]["3.bias"], Shown.seen[1]["3.bias"])


@pytest.mark.parametrize("beside", ["fedrs", "fedlc", "fednova", "feddyn", "scaffold"])
def test_rides_on_others(beside: str) -> None:
    """With a ratio of all but 1 it is the other technique alone; with the paper's it is not."""
    clients = parties()
    alone, tiny, ours = (
        flat(run(m, clients, relu_net())) for m in (beside, f"{beside} + fednlr(mu=1.000000001)", f"{beside} + fednlr")
    )
    np.testing.assert_allclose(tiny, alone, atol=1e-7)
    differ(ours, alone)


def test_defaults() -> None:
    assert fs.method("fednlr") == fs.method("fednlr(mu0=1.0, a1=1.0, a2=1.0)")
    assert FedNLR().ratio(3, 9, 100) == pytest.approx(1 + 1 / 3 + 2)


def test_a_residual_link_that_is_added_in_place() -> None:
    """The activation is the layer's own, however the model goes on with it."""

    class Block(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            self.body, self.head, self.in_place = nn.Linear(6, 6), nn.Linear(6, 3), in_place

        def forward(self, x: Tensor) -> Tensor:
            out = self.body(x)
            if self.in_place:
                out += 3 + x
            else:
                out = out + 3 + x
            logits: Tensor = self.head(out.relu())
            return logits

    with torch.random.fork_rng():
        torch.manual_seed(2)
        plain, other = Block(False).double(), Block(True).double()
    other.load_state_dict(plain.state_dict())
    seen = [activations_by_round(model, small_client(6))[0] for model in (plain, other)]
    assert all(torch.equal(seen[0][n], seen[1][n]) for n in seen[0])


def test_a_model_that_is_one_layer() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Linear(4, 3).double()
    data = small_client(4)
    (scales,) = activations_by_round(model, data)
    with torch.no_grad():
        means = model(data[0]).mean(0).numpy()
    assert scales.keys() == {"weight", "bias"}
    np.testing.assert_allclose(scales["bias"], factors(means, 2 + np.log10(3)))
