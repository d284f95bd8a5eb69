"""Passes of known layers without torch's tape: the bits of autograd, and never where somebody looks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.client.context import ClientContext, ModelReplica
from fedstrata.client.train import train_client
from fedstrata.core.tensors import clone
from fedstrata.core.types import Assignment, Update, Work
from fedstrata.data.examples import TensorExamples
from fedstrata.models.layer_gradients import Gradients, compose_layers
from fedstrata.models.registry import build_model
from fedstrata.tasks.classification import Classification
from fedstrata.techniques.fedavg import chain

MODELS = [
    "mlp(hidden=(16,))",
    "cnn2(width=8, hidden=16)",
    "cnn8(width=8)",
    "vgg9(width=8, hidden=16)",
    "resnet8(width=8)",
    "resnet8(width=4, stem='3x3', maxpool=False)",
    "resnet10(width=8, norm='none')",
    "resnet10(width=8, residual=False)",
    "resnet50(width=8)",
]


def replica(model: nn.Module, shape: tuple[int, ...], channels_last: bool) -> ModelReplica:
    return ClientContext(
        build=lambda arch: copy.deepcopy(model),
        method=chain(),
        sample=torch.zeros(2, *shape),
        channels_last=channels_last,
    ).replica("")


def by_autograd(there: ModelReplica, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    trained = {n: p for n, p in there.params.items() if p.requires_grad}
    outputs = there.model(x)
    grads = torch.autograd.grad(F.cross_entropy(outputs, y), list(trained.values()))
    return outputs.detach(), dict(zip(trained, grads, strict=True))


def by_layers(there: ModelReplica, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    assert there.known_layers is not None
    gradients = Gradients()
    with torch.no_grad():
        outputs, back = there.known_layers(x, False)
    assert back is not None
    (g,) = torch.autograd.grad(F.cross_entropy(outputs.requires_grad_(), y), [outputs])
    with torch.no_grad():
        assert back(g, gradients) is None
    return outputs.detach(), {n: gradients.pop(id(p)) for n, p in there.params.items() if id(p) in gradients}


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_bits_of_autograd(name: str, last: bool) -> None:
    """Also of what trains in parts: every third parameter, and none of the first layers."""
    torch.manual_seed(1)
    shape = (3, 16, 16)
    model = build_model(name, shape, 5, seed=0).train()
    one, two = replica(model, shape, last), replica(model, shape, last)
    x, y = one.inputs(torch.randn(7, *shape)), torch.randint(0, 5, (7,))
    count = len(one.params)
    for trains in (range(count), range(1, count, 3), range(count // 2, count)):
        for at, (p, q) in enumerate(zip(one.params.values(), two.params.values(), strict=True)):
            p.requires_grad_(at in trains)
            q.requires_grad_(at in trains)
        (outputs, grads), (same, found) = by_autograd(one, x, y), by_layers(two, x, y)
        assert torch.equal(outputs, same)
        assert list(grads) == list(found)
        assert all(torch.equal(g, found[n]) and g.stride() == found[n].stride() for n, g in grads.items())
        assert all(torch.equal(b, two.buffers[n]) for n, b in one.buffers.items())


def test_pooled_before_the_relu() -> None:
    """Windows of nothing but what a ReLU takes away, and ties: the gradient goes where autograd sends it."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), nn.Flatten(), nn.Linear(8, 2))
    one, two = replica(model, (1, 4, 4), False), replica(model, (1, 4, 4), False)
    x, y = torch.randint(-1, 2, (6, 1, 4, 4)).float(), torch.tensor([0, 1, 0, 1, 0, 1])
    (_, grads), (_, found) = by_autograd(one, x, y), by_layers(two, x, y)
    assert grads["0.weight"].any()
    assert all(torch.equal(g, found[n]) for n, g in grads.items())


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("moves", [True, False])
def test_running_statistics(momentum: float | None, moves: bool) -> None:
    norm = nn.BatchNorm2d(4, momentum=momentum)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    one, two = replica(model, (1, 5, 5), True), replica(model, (1, 5, 5), True)
    for there in (one, two):
        there.model[1].train(moves)  # type: ignore[operator,index]
    for _ in range(3):
        x, y = one.inputs(torch.randn(4, 1, 5, 5)), torch.tensor([0, 1, 0, 1])
        (_, grads), (_, found) = by_autograd(one, x, y), by_layers(two, x, y)
        assert all(torch.equal(g, found[n]) for n, g in grads.items())
    assert all(torch.equal(b, two.buffers[n]) for n, b in one.buffers.items())
    assert one.buffers["1.num_batches_tracked"] == (3 if moves else 0)


class _Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 5), *more)


def hooked(attach: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = layers()
        attach(model[0])
        return model

    return make


def shared() -> nn.Module:
    one = nn.Linear(5, 5)
    return layers(one, one)


def tied() -> nn.Module:
    model = layers(nn.Linear(5, 5), nn.Linear(5, 5))
    model[5].weight = model[4].weight
    return model


def replaced(module: nn.Module) -> None:
    module.forward = lambda x: x  # type: ignore[method-assign]


UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "somebody's own module": lambda: layers(_Own()),
    "another kind of layer": lambda: layers(nn.Sigmoid()),
    "dropout": lambda: layers(nn.Dropout(0.5)),
    "a hook": hooked(lambda m: m.register_forward_hook(lambda *_: None)),
    "a hook for gradients": hooked(lambda m: m.register_full_backward_hook(lambda *_: None)),
    "a hook of a parameter": hooked(lambda m: m.weight.register_hook(lambda g: g)),  # type: ignore[operator,union-attr]
    "another forward": hooked(replaced),
    "a layer in two places": shared,
    "a weight in two layers": tied,
    "padding by reflection": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
    "padding by name": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding="same")),
    "linear layers of images": lambda: nn.Sequential(nn.Linear(16, 4), nn.Flatten()),
    "places of maxima": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, return_indices=True)),
    "an average of several": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2)),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_not_where_something_is_unknown(what: str) -> None:
    assert compose_layers(UNKNOWN[what]()) is None
    assert compose_layers(layers()) is not None


def visit(model: nn.Module, trains: str = "", **given: Any) -> Update:
    torch.manual_seed(1)
    data = TensorExamples(torch.randn(6, 3, 16, 16), torch.randint(0, 5, (6,)))
    context = ClientContext(build=lambda arch: copy.deepcopy(model), method=chain(), **given)
    params = clone(dict(model.named_parameters()))
    names, work = (
        tuple(n for n in params if n.startswith(trains)),
        Work(batch_size=3, lr=0.05, optimizer="sgd(momentum=0.9)", clip=1.0),
    )
    sent = Assignment(
        round=0, client=0, arch="", params=params, buffers={}, trains=names, uploads=names, work=work, seed=3, method=""
    )
    return train_client(context, sent, data, {})[0]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("trains", ["", "layer1", "head"])
@pytest.mark.parametrize("name", ["cnn4(width=8)", "resnet8(width=8)", "resnet8(width=8, norm='none')"])
def test_a_visit_has_the_same_bits_and_cost(
    name: str, trains: str, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen layers above what trains keep no inputs, and layers below it nothing."""
    model = build_model(name, (3, 16, 16), 5, seed=0).train()
    fast = visit(model, trains, channels_last=last)
    monkeypatch.setattr("fedstrata.client.context.compose_layers", lambda model: None)
    plain = visit(model, trains, channels_last=last)
    assert fast.delta
    assert all(torch.equal(t, plain.delta[n]) for n, t in fast.delta.items())
    assert all(torch.equal(t, plain.buffers[n]) for n, t in fast.buffers.items())
    memory = fast.metrics.pop("memory"), plain.metrics.pop("memory")
    assert memory[0] <= 1.01 * memory[1]  # nothing is kept that torch's tape lets go
    assert fast.metrics == plain.metrics


@dataclass(frozen=True, kw_only=True)
class _Overwriting(Classification):
    """A loss that works on the outputs in place, as a user's own may."""

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.div_(2.0), targets)


@dataclass(frozen=True, kw_only=True)
class _Constant(Classification):
    """A loss that no output has a part in."""

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.zeros(())


@pytest.mark.parametrize("task", [_Overwriting(), _Constant()], ids=["in place", "constant"])
def test_losses_of_a_users_own(task: Classification, monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd lets a loss do, it may do here, too."""
    model = layers()
    fast = visit(model, task=task)
    monkeypatch.setattr("fedstrata.client.context.compose_layers", lambda model: None)
    plain = visit(model, task=task)
    assert all(torch.equal(t, plain.delta[n]) for n, t in fast.delta.items())
    assert fast.metrics["train_loss"] == plain.metrics["train_loss"]


def test_a_block_whose_last_layer_needs_its_output() -> None:
    """The residual sum overwrites what a body gives, which a ReLU's gradient still needs: left to torch's tape."""
    model = build_model("resnet8(width=4)", (3, 16, 16), 10, seed=0)
    assert compose_layers(model) is not None
    block = next(m for m in model.modules() if hasattr(m, "norm2"))
    block.norm2 = nn.ReLU()
    assert compose_layers(model) is None
