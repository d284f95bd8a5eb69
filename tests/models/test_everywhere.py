"""Models for tables, pixels and positions: what they compute, by other means, and that methods train them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.client.vectorised import CannotVectorise
from fedstrata.models.flops import FlopCount
from fedstrata.models.registry import build_model
from fedstrata.models.stages import stages
from fedstrata.techniques.fednlr import FedNLR

MODELS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "tablemlp": ("tablemlp(hidden=(8, 6))", (5,), "regression"),
    "unet": ("unet(width=4)", (2, 5, 6), "segmentation"),
    "tokengru": ("tokengru(embedding=4, hidden=6)", (6,), "next_token"),
    "gpt": ("gpt(width=8, heads=2)", (6,), "next_token"),
}
CLASSES = 5


def examples(name: str, rows: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    _, shape, task = MODELS[name]
    if task == "next_token":
        tokens = torch.randint(CLASSES, (rows, shape[0] + 1), generator=source)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(rows, *shape, generator=source)
    if task == "segmentation":
        return x, torch.randint(CLASSES, (rows, *shape[1:]), generator=source)
    return x, torch.randn(rows, CLASSES, generator=source)


def small(name: str) -> nn.Module:
    text, shape, _ = MODELS[name]
    return build_model(text, shape, CLASSES, seed=3)


def fitted(name: str, method: Any, engine: str = "serial", rounds: int = 3) -> fs.Federation:
    source = torch.Generator().manual_seed(4)
    clients, test = [examples(name, rows, source) for rows in (4, 7)], examples(name, 5, source)
    settings: dict[str, Any] = {"rounds": rounds, "batch_size": 3, "lr": 0.05, "task": MODELS[name][2]}
    federation = fs.Federation(small(name), clients, test, method=method, engine=engine, **settings)
    federation.fit()
    return federation


# What they compute ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_shapes_stages_and_gradients(name: str) -> None:
    model = small(name)
    x, y = examples(name, 3, torch.Generator().manual_seed(0))
    out = model(x)
    shapes = {"tablemlp": (3, 5), "unet": (3, 5, 5, 6), "tokengru": (3, 6, 5), "gpt": (3, 6, 5)}
    assert out.shape == shapes[name]
    assert (
        stages(model)
        == {
            "tablemlp": ("flatten", "fc1", "fc2", "head"),
            "unet": ("stem", "levels", "head"),
            "tokengru": ("embed", "gru1", "head"),
            "gpt": ("embed", "block1", "block2", "norm", "head"),
        }[name]
    )
    out.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    assert len(y) == 3


def test_tablemlp_by_numpy() -> None:
    """Layer by layer: W·x + b, minus its mean over its deviation, times γ plus β, ReLU."""
    model = build_model("tablemlp(hidden=(4, 3), dropout=0.5)", (2, 3), 2, seed=0).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    values = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    x = np.random.default_rng(0).normal(size=(5, 2, 3))
    here = x.reshape(5, 6)
    for layer in ("fc1", "fc2"):
        here = here @ values[f"{layer}.linear.weight"].T + values[f"{layer}.linear.bias"]
        here = (here - here.mean(1, keepdims=True)) / np.sqrt(here.var(1, keepdims=True) + 1e-5)
        here = np.maximum(here * values[f"{layer}.norm.weight"] + values[f"{layer}.norm.bias"], 0)
    expected = here @ values["head.weight"].T + values["head.bias"]
    np.testing.assert_allclose(model(torch.tensor(x).float()).detach().numpy(), expected, atol=1e-5)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]


def test_unet_step_by_step() -> None:
    """One level, of an image of odd size: enlarged pixels are copies of those that they lie on, 5 of 3 rows."""
    model = build_model("unet(width=4, depth=1)", (2, 5, 7), 3, seed=0)
    w = dict(model.named_parameters())

    def conv(x: Tensor, place: str) -> Tensor:
        out = F.conv2d(x, w[f"{place}.conv.weight"], padding=1)
        groups = out.shape[1] // 4
        return F.group_norm(out, groups, w[f"{place}.norm.weight"], w[f"{place}.norm.bias"]).relu()

    x = torch.randn(2, 2, 5, 7, generator=torch.Generator().manual_seed(1))
    top = conv(conv(conv(x, "stem"), "levels.enter.first"), "levels.enter.second")
    padded = F.pad(top, (0, 1, 0, 1), value=-math.inf)
    low = padded.unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2))
    assert low.shape[2:] == (3, 4)
    low = conv(conv(low, "levels.below.first"), "levels.below.second")
    rows, columns = (torch.arange(n) * -(-n // 2) // n for n in (5, 7))
    joined = torch.cat([top, low[:, :, rows][:, :, :, columns]], 1)
    last = conv(conv(joined, "levels.leave.first"), "levels.leave.second")
    expected = torch.einsum("oc,bchw->bohw", w["head.weight"][:, :, 0, 0], last) + w["head.bias"][:, None, None]
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


def test_gpt_by_numpy() -> None:
    """One block, head by head and position by position, in double precision."""
    model = build_model("gpt(width=6, depth=1, heads=2, mlp_ratio=2.0)", (4,), 5, seed=0).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    w = {name: p.detach().numpy() for name, p in model.named_parameters()}
    tokens = np.array([3, 0, 4])  # shorter than the longest

    def norm(x: Any, place: str) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return (
            centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[f"{place}.weight"] + w[f"{place}.bias"]
        )

    def linear(x: Any, place: str) -> Any:
        return x @ w[f"{place}.weight"].T + w[f"{place}.bias"]

    x = w["embed.token.weight"][tokens] + w["embed.position"][:3]
    q, k, v = np.split(linear(norm(x, "block1.norm1"), "block1.attention.qkv"), 3, axis=-1)
    mixed = np.zeros_like(x)
    for head in (slice(0, 3), slice(3, 6)):
        for at in range(3):
            scores = np.array([q[at, head] @ k[before, head] / math.sqrt(3) for before in range(at + 1)])
            shares = np.exp(scores) / np.exp(scores).sum()
            mixed[at, head] = sum(share * v[before, head] for before, share in enumerate(shares))
    x = x + linear(mixed, "block1.attention.out")
    hidden = linear(norm(x, "block1.norm2"), "block1.mlp.hidden")
    gelu = hidden * np.array([[0.5 * (1 + math.erf(one / math.sqrt(2))) for one in row] for row in hidden])
    x = x + linear(gelu, "block1.mlp.out")
    expected = linear(norm(x, "norm"), "head")
    np.testing.assert_allclose(model(torch.tensor(tokens)[None])[0].detach().numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("name", ["tokengru", "gpt"])
def test_no_position_sees_what_comes_after_it(name: str) -> None:
    model = small(name)
    tokens = torch.tensor([[0, 1, 2, 3, 4, 0]])
    changed = tokens.clone()
    changed[0, 3] = 1
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert all(not torch.equal(before[:, at], after[:, at]) for at in (3, 4, 5))


def test_gpt_sizes_and_flops_by_hand() -> None:
    """Of 3 sequences of 6, products: 2·18·(qkv 8·24 + out 8·8 + perceptron 2·8·32 + head 8·5).

    And for each sequence and head, the scores and what is made of them: 2·6·6·4 each.
    """
    model = build_model("gpt(width=8, depth=1, heads=2)", (6,), 5, seed=0)
    assert sum(p.numel() for p in model.parameters()) == (
        (5 + 6) * 8 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8) + 3 * 16 + (8 * 5 + 5)
    )
    with FlopCount() as count:
        model(torch.zeros(3, 6, dtype=torch.int64))
    assert count.total == 2 * 18 * (8 * 24 + 8 * 8 + 2 * 8 * 32 + 8 * 5) + 3 * 2 * 2 * (2 * 6 * 6 * 4)


# That methods train them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_fedpart_trains_one_stratum_at_a_time(name: str) -> None:
    """After a full round, each round moves the parameters of one stratum, and of no other."""
    federation = fitted(name, "fedpart(full_rounds=1, rounds_per_stratum=1)", rounds=1)
    before = {n: p.detach().clone() for n, p in federation.model.named_parameters()}
    start = dict(small(name).named_parameters())
    assert all(not torch.equal(p, start[n]) for n, p in before.items())
    after = dict(fitted(name, "fedpart(full_rounds=1, rounds_per_stratum=1)", rounds=2).model.named_parameters())
    moved = {n for n, p in after.items() if not torch.equal(p, before[n])}
    assert moved in [set(stratum.params) for stratum in fs.strata(federation.model)]


class Shown(FedNLR):
    """FedNLR that shows the factors of the last client."""

    seen: list[set[str]] = []  # noqa: RUF012

    def local(self, view: fs.ClientView) -> fs.Hooks:
        hooks = super().local(view)
        self.seen.append(set(hooks.scale or {}))
        return hooks


@pytest.mark.parametrize("name", MODELS)
def test_fednlr_has_a_rate_for_each_neuron_of_dense_layers_and_convolutions(name: str) -> None:
    Shown.seen.clear()
    federation = fitted(name, fs.chain(Shown()), rounds=1)
    layers = [n for n, m in federation.model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert {f"{layer}.weight" for layer in layers} <= Shown.seen[-1]
    assert not any(part.startswith(("embed", "gru")) for part in Shown.seen[-1])


@pytest.mark.parametrize("method", ["fedavg", "fedpart(full_rounds=1, rounds_per_stratum=1)", "scaffold"])
@pytest.mark.parametrize("name", ["tablemlp", "unet", "gpt"])
def test_many_clients_at_once_are_one_by_one(name: str, method: str) -> None:
    one, many = (fitted(name, method, engine).model.state_dict() for engine in ("serial", "vmap"))
    start = small(name).state_dict()
    assert any((one[n] - start[n]).abs().max() > 1e-3 for n in one)
    for n, value in one.items():
        torch.testing.assert_close(many[n], value, atol=2e-6, rtol=1e-5)


def test_recurrent_layers_are_trained_one_by_one() -> None:
    with pytest.raises(CannotVectorise, match=r"'gru1\.layer' .* recurrent layers have no vectorised form"):
        fitted("tokengru", "fedavg", "vmap")
