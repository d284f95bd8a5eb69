"""Large parameters: the same bits as those of small ones, in fewer passes; the server's tensors are only read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedstrata.client import context as client_context
from fedstrata.client import large_params
from fedstrata.client.context import ClientContext
from fedstrata.client.large_params import LargeParams
from fedstrata.client.train import train_client
from fedstrata.core.tensors import Tensors, clone
from fedstrata.core.types import Assignment, Update, Work
from fedstrata.data.examples import TensorExamples
from fedstrata.techniques.fedavg import chain
from fedstrata.techniques.fedprox import FedProx

OPTIMIZERS = ["sgd", "sgd(momentum=0.9, weight_decay=0.01)", "adam", "adamw"]


def build() -> nn.Sequential:
    """More numbers than one piece, and not a whole number of pieces."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 4001), nn.ReLU(), nn.Linear(4001, 40), nn.ReLU(), nn.Linear(40, 3))


def examples() -> TensorExamples:
    torch.manual_seed(1)
    return TensorExamples(torch.randn(12, 3, 4, 4), torch.randint(0, 3, (12,)))


def ask(model: nn.Module, work: Work, **given: Any) -> Assignment:
    params = clone(dict(model.named_parameters()))
    names = tuple(params)
    fields = {"trains": names, "uploads": names, **given}
    return Assignment(
        round=0, rounds=1, client=0, arch="", params=params, buffers={}, seed=3, work=work, method="", **fields
    )


def both(
    monkeypatch: pytest.MonkeyPatch, work: Work, make: Callable[[], nn.Module] = build, **given: Any
) -> tuple[Update, Update]:
    """A visit with all parameters small, and with those of 1,000 numbers and more large."""
    updates = []
    for limit in (1 << 30, 1000):
        monkeypatch.setattr(client_context, "LARGE", limit)
        model = make()
        context = ClientContext(build=lambda arch, model=model: copy.deepcopy(model), method=chain())  # type: ignore[misc]
        sent = ask(model, work, **given)
        before = clone(sent.params)
        update, _ = train_client(context, sent, examples(), {})
        assert bool(context.replica("").large) is (limit == 1000)
        assert all(torch.equal(before[n], t) for n, t in sent.params.items())
        updates.append(update)
    return updates[0], updates[1]


def same(one: Tensors, other: Tensors) -> bool:
    return list(one) == list(other) and all(torch.equal(t, other[n]) for n, t in one.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batch", [12, 6, 5])
def test_same_bits(monkeypatch: pytest.MonkeyPatch, optimizer: str, batch: int) -> None:
    """One step, two, three; every optimiser."""
    small, large = both(monkeypatch, Work(batch_size=batch, lr=0.05, optimizer=optimizer))
    assert same(small.delta, large.delta)
    assert large.metrics.pop("memory") <= small.metrics.pop("memory")  # a gradient that is used up is never whole
    assert small.metrics == large.metrics
    assert large.finite
    assert not small.finite


@pytest.mark.parametrize("batch", [12, 5])
@pytest.mark.parametrize("numbers", [1, 10_000])
def test_gradients_that_are_never_whole(monkeypatch: pytest.MonkeyPatch, batch: int, numbers: int) -> None:
    """As few rows at a time as there may be, and more: SGD moves along each block once it is known: the same bits."""
    monkeypatch.setattr(large_params, "BLOCK", numbers)
    taken: list[Tensor | None] = []
    move = large_params.LargeParams.move_along

    def watch(self: LargeParams, leaf: Tensor, *given: Any) -> bool:
        taken.append(leaf if move(self, leaf, *given) else None)
        return taken[-1] is not None

    monkeypatch.setattr(large_params.LargeParams, "move_along", watch)
    small, large = both(monkeypatch, Work(batch_size=batch, lr=0.05))
    assert same(small.delta, large.delta)
    assert large.finite
    steps = -(-12 // batch)
    assert [t is not None for t in taken] == [False, True, True] * steps  # the classifier is small


def test_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = both(monkeypatch, Work(batch_size=6, lr=0.05, clip=0.1))
    assert same(small.delta, large.delta)


@pytest.mark.parametrize("steps", [1, 3])
def test_only_a_part_trains_or_travels(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """What trains and stays at home is remembered; what travels and does not train has a delta of zero."""
    given = {"trains": ("1.weight", "3.weight", "5.bias"), "uploads": ("3.weight", "3.bias", "5.bias")}
    small, large = both(monkeypatch, Work(batch_size=5, steps=steps, lr=0.05), **given)
    assert same(small.delta, large.delta)
    assert not large.delta["3.bias"].any()
    assert large.delta["3.weight"].any()


def test_a_layer_that_no_loss_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no gradient, so it does not move; its delta is zero."""

    def make() -> nn.Module:
        model = build()
        model[2].add_module("idle", nn.Linear(40, 40))  # of a ReLU, which does not run it
        return model

    small, large = both(monkeypatch, Work(batch_size=6, lr=0.05), make)
    assert same(small.delta, large.delta)
    assert not large.delta["2.idle.weight"].any()


def test_into_given_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delta is computed where it is wanted, and the memory is asked for once."""
    monkeypatch.setattr(client_context, "LARGE", 1000)
    model, asked = build(), []
    context = ClientContext(build=lambda arch: copy.deepcopy(model), method=chain())

    def allocate(params: Tensors, names: Sequence[str]) -> Tensors:
        asked.append({n: torch.full_like(params[n], torch.nan) for n in names})
        return asked[-1]

    plain, _ = train_client(context, ask(model, Work(batch_size=5, lr=0.05)), examples(), {})
    context.allocate_delta = allocate
    update, _ = train_client(context, ask(model, Work(batch_size=5, lr=0.05)), examples(), {})
    assert len(asked) == 1
    assert all(update.delta[n] is t for n, t in asked[0].items())
    assert same(plain.delta, update.delta)


def test_numbers_that_are_not_finite_are_not_called_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    _, large = both(monkeypatch, Work(batch_size=6, lr=1e38))
    assert not large.finite


def test_the_replica_has_its_own_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a visit, and after one that failed in the middle."""
    monkeypatch.setattr(client_context, "LARGE", 1000)
    model = build()
    context = ClientContext(build=lambda arch: copy.deepcopy(model), method=chain())
    memory = {n: p.data_ptr() for n, p in context.replica("").params.items()}
    good, bad = examples(), examples()
    bad.y[0] = 7
    train_client(context, ask(model, Work(batch_size=5, lr=0.05)), good, {})
    with pytest.raises(Exception, match="7"):
        train_client(context, ask(model, Work(batch_size=5, lr=0.05)), bad, {})
    assert memory == {n: p.data_ptr() for n, p in context.replica("").params.items()}


def test_large_parameters_are_not_copied_when_the_replica_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others lie in one buffer, also what fills no memory of its own."""
    monkeypatch.setattr(client_context, "LARGE", 10_000)
    model = build()
    model[3].weight.data = torch.randn(40, 5000)[:, :4001]
    made = {n: p.data_ptr() for n, p in model.named_parameters()}
    context = ClientContext(build=lambda arch: model, method=chain())
    params = context.replica("").params
    assert [n for n, p in params.items() if p.data_ptr() == made[n]] == ["1.weight"]
    assert len({p.untyped_storage().data_ptr() for p in params.values()}) == 2
    assert params["3.weight"].is_contiguous()


class _Clamped(nn.Linear):
    """A layer of somebody's own, which writes to its weight whenever it runs."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


def test_code_that_may_write_to_parameters_gets_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of one's own, or a hook, could change what the server holds."""
    monkeypatch.setattr(client_context, "LARGE", 10)
    hooked = build()
    hooked[1].register_forward_pre_hook(lambda m, x: None)
    for model in (nn.Sequential(nn.Flatten(), _Clamped(48, 3)), hooked):
        context = ClientContext(build=lambda arch, model=model: copy.deepcopy(model), method=chain())  # type: ignore[misc]
        sent = ask(model, Work(batch_size=12, lr=0.05))
        before = clone(sent.params)
        train_client(context, sent, examples(), {})
        assert same(before, sent.params)
        assert not context.replica("").large


def test_hooks_of_techniques_see_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_context, "LARGE", 10)
    model, updates = build(), []
    for method in (chain(FedProx(mu=0.0)), chain()):
        context = ClientContext(build=lambda arch: copy.deepcopy(model), method=method)
        updates.append(train_client(context, ask(model, Work(batch_size=5, lr=0.05)), examples(), {})[0])
    assert same(updates[0].delta, updates[1].delta)
    assert not updates[0].finite
    assert updates[1].finite
