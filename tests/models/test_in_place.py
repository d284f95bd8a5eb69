"""Activations that overwrite what they are given: the same bits, and never where somebody looks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.client.context import ClientContext
from fedstrata.client.train import train_client
from fedstrata.core.technique import ClientView, Hooks, Technique
from fedstrata.core.tensors import clone
from fedstrata.core.types import Assignment, Update, Work
from fedstrata.data.examples import TensorExamples
from fedstrata.models.in_place import find_in_place, work_in_place
from fedstrata.models.registry import build_model
from fedstrata.techniques.fedavg import chain

SHAPE = (3, 16, 16)
MODELS = [
    "cnn2(width=8, hidden=16)",
    "cnn8(width=8)",
    "vgg9(width=8, hidden=16)",
    "resnet8(width=8)",
    "resnet10(width=8, norm='group')",
    "resnet10(width=8, norm='none')",
    "resnet10(width=8, residual=False)",
    "resnet50(width=8)",
]


def build(name: str) -> nn.Module:
    return build_model(name, SHAPE, 5, seed=0).train()


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(6, *SHAPE), torch.randint(0, 5, (6,))
    outputs = model(x)
    return [outputs, *torch.autograd.grad(F.cross_entropy(outputs, y), list(model.parameters()))]


@pytest.mark.parametrize("name", MODELS)
def test_same_bits(name: str) -> None:
    model = build(name)
    found = find_in_place(model)
    assert found
    plain = gradients(copy.deepcopy(model))
    with work_in_place(found):
        there = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, there, strict=True))


def test_only_where_asked() -> None:
    """Also after an error nothing is left to work in place."""
    model = build("resnet8(width=8)")
    found = find_in_place(model)
    with work_in_place(found):
        assert all(m.inplace for m in found)
    with pytest.raises(RuntimeError), work_in_place(found):
        model(torch.zeros(1))
    assert not any(m.inplace for m in found)


class _Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 5), *more)


def hooked() -> nn.Module:
    model = layers()
    model[0].register_forward_hook(lambda m, x, out: None)
    return model


def shared() -> nn.Module:
    """One ReLU in two places, the second of which must not overwrite: a sigmoid needs its output."""
    relu = nn.ReLU()
    return nn.Sequential(nn.Conv2d(3, 4, 3), relu, nn.Flatten(), nn.Linear(784, 9), nn.Sigmoid(), relu, nn.Linear(9, 5))


@pytest.mark.parametrize(
    "make", [lambda: layers(_Own()), hooked, shared, lambda: nn.Sequential(nn.Sigmoid(), nn.ReLU())]
)
def test_not_where_somebody_might_look(make: Callable[[], nn.Module]) -> None:
    assert find_in_place(make()) == ()
    assert len(find_in_place(layers())) == 1


def visit(model: nn.Module, *techniques: Technique, **given: Any) -> Update:
    torch.manual_seed(1)
    data = TensorExamples(torch.randn(6, *SHAPE), torch.randint(0, 5, (6,)))
    context = ClientContext(build=lambda arch: copy.deepcopy(model), method=chain(*techniques), **given)
    params = clone(dict(model.named_parameters()))
    names, work = tuple(params), Work(batch_size=3, lr=0.05)
    sent = Assignment(
        round=0, client=0, arch="", params=params, buffers={}, trains=names, uploads=names, work=work, seed=3, method=""
    )
    return train_client(context, sent, data, {})[0]


def test_a_technique_that_looks_sees_what_was_there() -> None:
    """What it keeps of a convolution's outputs still has its negative numbers when the step is over."""
    kept: list[Tensor] = []

    @dataclass(frozen=True, kw_only=True)
    class Looks(Technique):
        def local(self, view: ClientView) -> Hooks:
            return Hooks(features={"layer1.conv1": lambda batch, there: (kept.append(there.detach()), there)[1]})

    Looks.name = "looks"
    model = build("cnn4(width=8)")
    seen, plain = visit(model, Looks()), visit(model)
    assert len(kept) == 2
    assert all((there < 0).any() for there in kept)
    assert all(torch.equal(t, plain.delta[n]) for n, t in seen.delta.items())


@pytest.mark.parametrize(
    "name", ["cnn4(width=8)", "resnet8(width=8, stem='3x3', maxpool=False)", "resnet10(norm='none')"]
)
def test_gradients_keep_their_layout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the channels last, flattening and the last average do not change the bits of what they are faster for."""
    model = build(name)
    fast = visit(model, channels_last=True)
    monkeypatch.setattr("fedstrata.models.layouts._FORGETFUL", {})
    plain = visit(model, channels_last=True)
    assert all(torch.equal(t, plain.delta[n]) for n, t in fast.delta.items())
    assert all(torch.equal(t, plain.buffers[n]) for n, t in fast.buffers.items())
