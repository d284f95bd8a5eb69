"""One client, one round: batches, the local loop, freezing, costs, and every kind of hook."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.client.context import ClientContext
from fedstrata.client.train import train_client
from fedstrata.core.method import Method
from fedstrata.core.rng import preserve_rng
from fedstrata.core.technique import Batch, ClientView, Hooks, Technique, Times
from fedstrata.core.tensors import FlatTensors, Tensors, clone
from fedstrata.core.types import BUFFERS, Assignment, Examples, Into, Slots, Update, Work
from fedstrata.data.batching import batches
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError
from fedstrata.models.norms import running_statistics
from fedstrata.models.taps import stages_to
from fedstrata.techniques.fedavg import chain

# Helpers ----------------------------------------------------------------------------------------------------


def technique(name: str, local: Callable[[ClientView], Hooks]) -> Technique:
    """A technique made on the spot, with a name and what it does on a client."""

    @dataclass(frozen=True, kw_only=True)
    class Adhoc(Technique):
        def local(self, view: ClientView) -> Hooks:
            return local(view)

    Adhoc.name = name
    return Adhoc()


def hooks(name: str = "t", **given: Any) -> Technique:
    return technique(name, lambda view: Hooks(**given))


def workshop(model: nn.Module, *techniques: Technique, **base: Any) -> ClientContext:
    return ClientContext(build=lambda arch: copy.deepcopy(model), method=chain(*techniques, **base))


def assign(model: nn.Module, method: Method, trains: Sequence[str] | None = None, **given: Any) -> Assignment:
    """An assignment with the model's own parameters; other keywords are fields of Work or of Assignment."""
    params = clone(dict(model.named_parameters()))
    names = tuple(params) if trains is None else tuple(trains)
    work = Work(**{k: given.pop(k) for k in list(given) if k in Work.__dataclass_fields__})
    fields = {"round": 0, "client": 0, "arch": "", "seed": 5, "buffers": {}, "uploads": names, **given}
    return Assignment(params=params, trains=names, work=work, method=method.digest, **fields)


def visit(
    model: nn.Module,
    data: Examples,
    *techniques: Technique,
    memory: Slots | None = None,
    base: dict[str, Any] | None = None,
    **given: Any,
) -> tuple[Update, Slots]:
    """Train one client in a workshop of its own."""
    context = workshop(model, *techniques, **(base or {}))
    return train_client(context, assign(model, context.method, **given), data, memory or {})


def toy(examples: int = 10, inputs: int = 5, classes: int = 3, seed: int = 0) -> TensorExamples:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, inputs, generator=generator)
    return TensorExamples(x, torch.randint(classes, (examples,), generator=generator))


def mlp(*sizes: int, seed: int = 1) -> nn.Sequential:
    """Linear layers with ReLUs between them: 0, 2, 4, … are the linear ones."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def normed(seed: int = 1) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def seed_of(*parts: Any) -> int:
    """The documented seed of a stream: SHA-256 over the parts joined by '/', the first 8 bytes, shifted right once."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


def order(seed: int, examples: int, batch_size: int, epochs: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed_of(seed, "order"))
    split: list[Tensor] = []
    for _ in range(epochs):
        split += torch.randperm(examples, generator=generator).split(batch_size)
    return split


def equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


# Batches ----------------------------------------------------------------------------------------------------


def indices(examples: int, drop_single: bool = False, seed: int = 0, **work: Any) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [index.tolist() for index in batches(examples, Work(**work), rng, drop_single)]


@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 3))
@settings(deadline=None)
def test_every_example_once_an_epoch(examples: int, batch_size: int, epochs: int):
    found = indices(examples, epochs=epochs, batch_size=batch_size)
    each = math.ceil(examples / batch_size)
    assert len(found) == epochs * each
    for epoch in range(epochs):
        part = found[epoch * each : (epoch + 1) * each]
        assert sorted(i for index in part for i in index) == list(range(examples))
        assert all(len(index) == batch_size for index in part[:-1])


def test_batches_are_seeded_and_every_epoch_is_shuffled_anew():
    first = indices(20, epochs=2, batch_size=20)
    assert first == indices(20, epochs=2, batch_size=20)
    assert first != indices(20, epochs=2, batch_size=20, seed=1)
    assert first[0] != first[1]
    assert first[0] != list(range(20))


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 20))
@settings(deadline=None)
def test_steps_instead_of_epochs(examples: int, batch_size: int, steps: int):
    """Exactly so many steps, over as many passes as they need; the epochs count no more."""
    found = indices(examples, epochs=7, steps=steps, batch_size=batch_size)
    each = math.ceil(examples / batch_size)
    assert len(found) == steps
    whole = indices(examples, epochs=math.ceil(steps / each), batch_size=batch_size)
    assert found == whole[:steps]


@given(st.integers(0, 12), st.integers(1, 5), st.none() | st.integers(1, 12))
@settings(deadline=None)
def test_a_last_single_example_is_dropped_only_where_asked(examples: int, batch_size: int, steps: int | None):
    found = indices(examples, drop_single=True, epochs=2, steps=steps, batch_size=batch_size)
    assert all(len(index) > 1 for index in found)
    if steps is None:
        plain = indices(examples, epochs=2, batch_size=batch_size)
        assert found == [index for index in plain if len(index) > 1]
    elif min(examples, batch_size) > 1:
        assert len(found) == steps
    else:
        assert found == []


def test_a_client_of_one_example():
    assert indices(1, epochs=3, batch_size=4) == [[0], [0], [0]]
    assert indices(1, drop_single=True, epochs=3, batch_size=4) == []
    assert indices(1, drop_single=True, steps=3, batch_size=4) == []
    assert indices(0, epochs=3) == []
    assert indices(0, steps=3) == []


def test_a_single_example_is_dropped_under_batch_norm_only():
    """Five examples in twos: 3 steps, of which the last has one example; batch norm leaves it out."""
    data = toy(5)
    assert visit(mlp(5, 3), data, batch_size=2)[0].steps == 3
    assert visit(normed(), data, batch_size=2)[0].steps == 2
    assert visit(normed(), toy(1), batch_size=2)[0].steps == 0
    assert visit(mlp(5, 3), toy(1), batch_size=2)[0].steps == 1


# The local loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "settings_"),
    [("sgd", {}), ("sgd(momentum=0.9, weight_decay=0.01)", {"momentum": 0.9, "weight_decay": 0.01})],
)
def test_training_equals_a_loop_written_by_hand(optimizer: str, settings_: dict[str, float]):
    """torch.optim.SGD over the same batches, two epochs of 4 + 4 + 2 examples: the same bits, and the mean loss."""
    model, data = mlp(5, 7, 3), toy(10)
    update, memory = visit(model, data, optimizer=optimizer, lr=0.1, epochs=2, batch_size=4)

    mine, before = copy.deepcopy(model), clone(dict(model.named_parameters()))
    sgd = torch.optim.SGD(mine.parameters(), lr=0.1, foreach=False, **settings_)
    losses = []
    for index in order(5, examples=10, batch_size=4, epochs=2):
        sgd.zero_grad()
        loss = F.cross_entropy(mine(data.x[index]), data.y[index])
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    assert equal(update.delta, {n: p.detach() - before[n] for n, p in mine.named_parameters()})
    assert update.metrics["train_loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert (update.steps, update.examples, memory, update.slots, update.buffers) == (6, 10, {}, {}, {})


def test_training_a_normed_model_equals_a_loop_written_by_hand():
    """As above, with running statistics: their values travel, not their change."""
    model, data = normed(), toy(8)
    update, _ = visit(model, data, lr=0.1, batch_size=4)
    mine = copy.deepcopy(model).train()
    sgd = torch.optim.SGD(mine.parameters(), lr=0.1, foreach=False)
    for index in order(5, examples=8, batch_size=4, epochs=1):
        sgd.zero_grad()
        F.cross_entropy(mine(data.x[index]), data.y[index]).backward()
        sgd.step()
    assert equal(
        update.delta, {n: p.detach() - q for (n, p), q in zip(mine.named_parameters(), model.parameters(), strict=True)}
    )
    assert equal(update.buffers, dict(mine.named_buffers()))
    assert update.buffers["1.num_batches_tracked"].dtype == torch.int64
    assert update.buffers["1.num_batches_tracked"].item() == 2


def test_the_update_answers_its_assignment():
    model = mlp(5, 3)
    context = workshop(model, weight="uniform")
    update, _ = train_client(context, assign(model, context.method, round=4, client=9), toy(6), {})
    assert (update.round, update.client, update.method) == (4, 9, context.method.digest)


def test_nothing_that_was_handed_over_is_changed():
    """The assignment's tensors, the data and the memory are inputs."""
    model, data = normed(), toy(8)
    context = workshop(model, buffers="local")
    sent = assign(model, context.method, epochs=2, lr=0.5)
    memory: Slots = {BUFFERS: clone(running_statistics(model)), "other": {"m": torch.ones(2)}}
    params, x, kept = clone(sent.params), data.x.clone(), {k: clone(v) for k, v in memory.items()}
    own = clone(model.state_dict())
    _, remembered = train_client(context, sent, data, memory)
    assert equal(sent.params, params)
    assert torch.equal(data.x, x)
    assert memory.keys() == kept.keys()
    assert all(equal(memory[k], kept[k]) for k in kept)
    assert equal(model.state_dict(), own)
    assert not equal(remembered[BUFFERS], kept[BUFFERS])
    assert equal(remembered["other"], kept["other"])


def test_clipping_bounds_the_whole_gradient():
    """W = 0, x = (1, 2), y = 0: gradient ((−.5, −1), (.5, 1)) of norm √2.5; clip 0.5 scales it by 0.5/√2.5."""
    update, _ = visit(flat(), point(), lr=1.0, clip=0.5)
    expected = np.array([[0.5, 1.0], [-0.5, -1.0]]) * 0.5 / math.sqrt(2.5)
    np.testing.assert_allclose(update.delta["weight"].numpy(), expected, rtol=1e-5)
    loose, _ = visit(flat(), point(), lr=1.0, clip=2.0)
    np.testing.assert_allclose(loose.delta["weight"].numpy(), [[0.5, 1.0], [-0.5, -1.0]], rtol=1e-6)


def test_clipping_is_that_of_torch():
    """One norm over all parameters, against torch.nn.utils.clip_grad_norm_, three steps."""
    model, data = mlp(5, 7, 3), toy(6)
    update, _ = visit(model, data, lr=0.1, batch_size=2, clip=0.1)
    mine = copy.deepcopy(model)
    sgd = torch.optim.SGD(mine.parameters(), lr=0.1)
    for index in order(5, examples=6, batch_size=2, epochs=1):
        sgd.zero_grad()
        F.cross_entropy(mine(data.x[index]), data.y[index]).backward()
        assert nn.utils.clip_grad_norm_(mine.parameters(), 0.1) > 0.1
        sgd.step()
    for (name, p), q in zip(mine.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(update.delta[name], p.detach() - q.detach(), rtol=1e-4, atol=1e-7)


def test_augmentation_changes_training_inputs():
    """Inputs doubled by the augmentation give the bits of inputs that were doubled before."""
    model, data = mlp(5, 3), toy(6)
    context = workshop(model)
    context.augment = lambda x: 2 * x
    doubled, _ = train_client(context, assign(model, context.method), data, {})
    expected, _ = visit(model, TensorExamples(2 * data.x, data.y))
    assert equal(doubled.delta, expected.delta)
    assert not equal(doubled.delta, visit(model, data)[0].delta)


# Random streams ---------------------------------------------------------------------------------------------


def noisy() -> nn.Sequential:
    return nn.Sequential(*mlp(5, 32, 3)[:2], nn.Dropout(0.5), nn.Linear(32, 3))


def test_dropout_is_reproducible_and_does_not_depend_on_who_ran_before():
    """A worker that has served others (another seed, frozen layers, other data) gives the bits of a new one."""
    model, data = noisy(), toy(12)
    fresh = workshop(model)
    alone, _ = train_client(fresh, assign(model, fresh.method, batch_size=4), data, {})
    used = workshop(model)
    torch.manual_seed(123)
    train_client(used, assign(model, used.method, seed=99, batch_size=5), toy(9, seed=3), {})
    train_client(used, assign(model, used.method, trains=["3.weight", "3.bias"]), toy(3, seed=4), {})
    torch.rand(7)
    after, _ = train_client(used, assign(model, used.method, batch_size=4), data, {})
    assert equal(alone.delta, after.delta)
    assert alone.metrics == after.metrics


def test_dropout_differs_between_visits():
    """One batch with all examples: only the dropout masks depend on the seed."""
    model, data = noisy(), toy(12)
    deltas = [visit(model, data, batch_size=12, seed=s)[0].delta["3.bias"] for s in (1, 2)]
    assert not torch.allclose(*deltas)
    without = [visit(mlp(5, 32, 3), data, batch_size=12, seed=s)[0].delta["2.bias"] for s in (1, 2)]
    torch.testing.assert_close(*without)


def test_a_visit_trains_in_training_mode_whatever_was_before():
    """Between visits the scratch model is evaluated; dropout and batch norm must be awake again."""
    for model in (noisy(), normed()):
        context, data = workshop(model), toy(8)
        first, _ = train_client(context, assign(model, context.method), data, {})
        context.replica("").model.eval()
        second, _ = train_client(context, assign(model, context.method), data, {})
        assert equal(first.delta, second.delta)
        assert equal(first.buffers, second.buffers)


def test_running_statistics_do_not_pass_from_client_to_client():
    model, data = normed(), toy(8)
    for policy in ("average", "local", "drop"):
        context = workshop(model, buffers=policy)
        first, kept = train_client(context, assign(model, context.method), data, {})
        train_client(context, assign(model, context.method), toy(8, seed=7), {})
        second, again = train_client(context, assign(model, context.method), data, {})
        assert equal(first.delta, second.delta)
        assert equal(first.buffers, second.buffers)
        assert equal(kept.get(BUFFERS, {}), again.get(BUFFERS, {}))


class Counting(nn.Module):
    """A layer with a counter that is no part of its state_dict, and that the forward pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


def test_buffers_outside_the_state_dict_begin_anew():
    torch.manual_seed(0)
    model, data = Counting(), toy(6)
    context = workshop(model)
    first, _ = train_client(context, assign(model, context.method), data, {})
    second, _ = train_client(context, assign(model, context.method), data, {})
    assert equal(first.delta, second.delta)


def test_own_rng_gives_the_global_stream_back():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with preserve_rng():
        visit(noisy(), toy(6))
        assert not torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(UsageError), preserve_rng():
        visit(noisy(), toy(6), hooks(features={"nowhere": lambda b, h: h}))
    assert torch.equal(torch.get_rng_state(), before)


# Frozen means frozen ----------------------------------------------------------------------------------------


def test_frozen_parameters_get_nothing():
    """No gradient, no change, no place in the delta: only layer 2 of 0, 2, 4 trains."""
    model, data = mlp(5, 7, 4, 3), toy(8)
    context = workshop(model)
    sent = assign(model, context.method, trains=["2.weight", "2.bias"], optimizer="sgd(momentum=0.9, weight_decay=0.1)")
    update, _ = train_client(context, sent, data, {})
    assert list(update.delta) == ["2.weight", "2.bias"]
    assert all(d.abs().max() > 0 for d in update.delta.values())
    replica = context.replica("")
    for name, p in replica.params.items():
        frozen = not name.startswith("2.")
        assert p.requires_grad is not frozen
        assert p.grad is None
        assert torch.equal(p.detach(), sent.params[name]) is frozen


def test_a_thawed_parameter_trains_again():
    model, data = mlp(5, 7, 3), toy(8)
    context = workshop(model)
    train_client(context, assign(model, context.method, trains=["2.weight"]), data, {})
    again, _ = train_client(context, assign(model, context.method), data, {})
    assert equal(again.delta, visit(model, data)[0].delta)


def test_what_trains_but_does_not_travel_stays_at_home():
    model, data = mlp(5, 7, 3), toy(8)
    update, _ = visit(model, data, uploads=("2.bias",))
    whole, _ = visit(model, data)
    assert list(update.delta) == ["2.bias"]
    assert torch.equal(update.delta["2.bias"], whole.delta["2.bias"])


def test_frozen_training_equals_torch_with_requires_grad_off():
    model, data = mlp(5, 7, 3), toy(8)
    update, _ = visit(model, data, trains=["0.weight"], lr=0.1, batch_size=4)
    mine = copy.deepcopy(model)
    for name, p in mine.named_parameters():
        p.requires_grad_(name == "0.weight")
    sgd = torch.optim.SGD([mine[0].weight], lr=0.1, foreach=False)
    for index in order(5, examples=8, batch_size=4, epochs=1):
        sgd.zero_grad()
        F.cross_entropy(mine(data.x[index]), data.y[index]).backward()
        sgd.step()
    assert torch.equal(update.delta["0.weight"], mine[0].weight.detach() - model[0].weight.detach())


PASSED: list[str] = []
"""Names of the spies that a gradient passed through."""


class _Spy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        PASSED.append(ctx.name)
        return grad, None


class Spy(nn.Module):
    """Lets everything pass and notes who was there on the way back."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Spy.apply(x, self.name)  # type: ignore[no-untyped-call]
        return out


@pytest.mark.parametrize(
    ("trains", "passed"),
    [("a", ["behind b", "behind a"]), ("b", ["behind b"]), ("c", []), ("abc", ["behind b", "behind a"])],
)
def test_backward_stops_at_the_shallowest_active_layer(trains: str, passed: list[str]):
    model = nn.Sequential()
    for name, module in {
        "a": nn.Linear(5, 4),
        "spy_a": Spy("behind a"),
        "b": nn.Linear(4, 4),
        "spy_b": Spy("behind b"),
        "c": nn.Linear(4, 3),
    }.items():
        model.add_module(name, module)
    PASSED.clear()
    visit(model, toy(4), trains=[f"{layer}.{kind}" for layer in trains for kind in ("weight", "bias")])
    assert passed == PASSED


class Dead(nn.Module):
    """Its second layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.dead = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


@pytest.mark.parametrize("optimizer", ["sgd(momentum=0.9, weight_decay=0.5)", "adamw(weight_decay=0.5)"])
def test_unused_layers_stay(optimizer: str):
    """No decay, no momentum: their change is an exact zero."""
    update, _ = visit(Dead(), toy(8), optimizer=optimizer, batch_size=2)
    assert list(update.delta) == ["used.weight", "used.bias", "dead.weight", "dead.bias"]
    assert not update.delta["dead.weight"].any()
    assert not update.delta["dead.bias"].any()
    assert update.delta["used.weight"].all()


def test_training_only_an_unused_layer_changes_nothing():
    """A plan may pick a layer that never runs."""
    update, _ = visit(Dead(), toy(8), trains=["dead.weight", "dead.bias"], optimizer="sgd(weight_decay=0.5)")
    assert update.steps == 1
    assert not any(d.any() for d in update.delta.values())


def test_a_visit_without_training():
    """A plan may ask for a visit without training (to collect statistics): no step, no cost, but hooks are heard."""
    technique = hooks("count", finish=lambda delta, tally: ({"n": torch.ones(1)}, {"m": torch.ones(1)}))
    update, memory = visit(mlp(5, 3), toy(8), technique, trains=[], optimizer="adam")
    assert update.delta == {}
    assert update.steps == 0
    assert update.metrics == {"train_loss": 0.0, "flops": 0.0, "memory": 0.0}
    assert update.slots["count"]["n"] == 1
    assert memory["count"]["m"] == 1


class Sometimes(nn.Module):
    """Its second layer runs only from the second training step on, as under stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(5, 3), nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        out: Tensor = self.always(x)
        return out + self.sometimes(x) if self.calls > 1 else out


def test_a_layer_that_the_first_step_skips_trains_in_the_others():
    """Two steps, the layer is used in the second one: with torch.optim it moves there."""
    torch.manual_seed(0)
    model, data = Sometimes(), toy(8)
    update, _ = visit(model, data, batch_size=4)
    mine = copy.deepcopy(model)
    sgd = torch.optim.SGD(mine.parameters(), lr=0.1, foreach=False)
    for index in order(5, examples=8, batch_size=4, epochs=1):
        sgd.zero_grad()
        F.cross_entropy(mine(data.x[index]), data.y[index]).backward()
        sgd.step()
    moved = mine.sometimes.weight.detach() - model.sometimes.weight.detach()
    assert moved.all()
    assert torch.equal(update.delta["sometimes.weight"], moved)


# Costs ------------------------------------------------------------------------------------------------------


def flops(model: nn.Module, data: Examples, *techniques: Technique, **given: Any) -> float:
    return visit(model, data, *techniques, **given)[0].metrics["flops"]


@pytest.mark.parametrize(
    ("trains", "products"),
    [
        # Forward: 5·7 + 7·4 + 4·3 = 75. Weight gradients cost 35, 28, 12; input gradients 28, 12 (none for the input).
        ("024", 75 + 35 + 28 + 12 + 28 + 12),
        ("0", 75 + 35 + 28 + 12),
        ("2", 75 + 28 + 12),
        ("4", 75 + 12),
        ("04", 75 + 35 + 12 + 28 + 12),
        ("", 0),
    ],
)
@pytest.mark.parametrize(("examples", "batch_size"), [(8, 8), (8, 2), (7, 3), (5, 4), (1, 4)])
def test_flops_of_an_mlp(trains: str, products: int, examples: int, batch_size: int):
    """2 FLOPs a product and example; ragged last batches (7 = 3 + 3 + 1) count by their examples."""
    names = [f"{layer}.{kind}" for layer in trains for kind in ("weight", "bias")]
    found = flops(mlp(5, 7, 4, 3), toy(examples), trains=names, batch_size=batch_size, epochs=2)
    assert found == 2 * products * examples * 2


def test_flops_of_a_ragged_first_visit():
    """A worker that first met a client of one example counts the next one's 6 examples right: 2·(15 + 15)·6."""
    model = mlp(5, 3)
    context = workshop(model)
    one, _ = train_client(context, assign(model, context.method), toy(1), {})
    six, _ = train_client(context, assign(model, context.method, batch_size=4), toy(6), {})
    assert one.metrics["flops"] == 2 * 30
    assert six.metrics["flops"] == 2 * 30 * 6


@pytest.mark.parametrize(
    ("trains", "expected"),
    [
        # Per example: conv 0 gives 3 maps of 5×5 from 2 maps by 3×3: 2·3·25·2·9 = 2700; conv 2 gives 4 maps of 2×2
        # (stride 2) from 3: 2·4·4·3·9 = 864; linear 2·16·2 = 64. Weight gradients cost the same, input gradients too.
        ("024", (2700 + 864 + 64) + (2700 + 864 + 64) + (864 + 64)),
        ("2", (2700 + 864 + 64) + 864 + 64),
        ("4", (2700 + 864 + 64) + 64),
    ],
)
def test_flops_of_a_convnet(trains: str, expected: int):
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, stride=2), nn.Flatten(), nn.Linear(16, 2)
    )
    generator = torch.Generator().manual_seed(0)
    data = TensorExamples(torch.randn(5, 2, 5, 5, generator=generator), torch.tensor([0, 1, 0, 1, 1]))
    names = [f"{layer}.{kind}" for layer in trains for kind in ("weight", "bias")]
    assert flops(model, data, trains=names, batch_size=2) == expected * 5


def test_flops_before_training_count_too():
    """A technique that runs the model once over the client's 7 examples adds 2·15·7 to the 2·30·7 of training."""

    def look(view: ClientView) -> Hooks:
        with torch.no_grad():
            view.model(view.data.batch(torch.arange(len(view.data)))[0])
        return Hooks()

    assert flops(mlp(5, 3), toy(7), technique("look", look), batch_size=2) == 2 * 30 * 7 + 2 * 15 * 7


def test_flops_of_hooks_count_too():
    """A loss term that multiplies (3×5)·(5×3), 2·45 FLOPs on one batch of all 6 examples: 2·30·6 + 90, and its
    backward, which needs two more such products for the weight that is on both sides."""

    def term(batch: Batch) -> Tensor:
        return (batch.params["0.weight"] @ batch.params["0.weight"].T).sum()

    assert flops(mlp(5, 3), toy(6), hooks(loss=term), batch_size=6) == 2 * 30 * 6 + 3 * 90


def test_counting_changes_no_bit():
    """The first visit is counted by torch's FlopCounterMode, the second is not."""
    model, data = normed(), toy(8)
    context = workshop(model)
    sent = assign(model, context.method, batch_size=4, optimizer="adam")
    counted, _ = train_client(context, sent, data, {})
    plain, _ = train_client(context, sent, data, {})
    assert equal(counted.delta, plain.delta)
    assert equal(counted.buffers, plain.buffers)
    assert counted.metrics == plain.metrics


# Hooks: a linear map with W = 0, so that every class has p = ½ ------------------------------------------------


def flat() -> nn.Linear:
    """Two inputs, two classes, no bias, all weights zero."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    return model


def point() -> TensorExamples:
    """One example: x = (1, 2), y = 0. At W = 0 the gradient is (p − onehot)·xᵀ = ((−.5, −1), (.5, 1))."""
    return TensorExamples(torch.tensor([[1.0, 2.0]]), torch.tensor([0]))


GRADIENT = np.array([[-0.5, -1.0], [0.5, 1.0]])


def step(*techniques: Technique, **given: Any) -> np.ndarray:
    """The change of W after one step of size 0.1 on the point."""
    update, _ = visit(flat(), point(), *techniques, **{"lr": 0.1, **given})
    return update.delta["weight"].double().numpy()


def test_a_plain_step():
    """−0.1 · gradient; the loss of two equal classes is ln 2."""
    np.testing.assert_allclose(step(), -0.1 * GRADIENT, rtol=1e-6)
    update, _ = visit(flat(), point())
    assert update.metrics["train_loss"] == pytest.approx(math.log(2), rel=1e-6)


def test_output_hooks_are_folded_from_left_to_right():
    """`plus` adds (1, 0) to the logits, `twice` doubles them.

    plus, twice: logits 2·(z + (1, 0)) = (2, 0), dz = 2·(softmax − onehot) = 2·(e²/(e² + 1) − 1)·(1, −1).
    twice, plus: logits 2·z + (1, 0) = (1, 0), dz = 2·(e/(e + 1) − 1)·(1, −1).
    """
    plus = hooks("plus", output=lambda b: b.logits + torch.tensor([1.0, 0.0]))
    twice = hooks("twice", output=lambda b: 2 * b.logits)
    outer = np.outer([1, -1], [1, 2])
    np.testing.assert_allclose(step(plus, twice), -0.1 * 2 * (math.e**2 / (math.e**2 + 1) - 1) * outer, rtol=1e-5)
    np.testing.assert_allclose(step(twice, plus), -0.1 * 2 * (math.e / (math.e + 1) - 1) * outer, rtol=1e-5)


def test_loss_hooks_are_added():
    """Terms Σ c·W and 3·Σ W: the gradient grows by c and by 3; the reported loss is the task's alone."""
    c = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    left = hooks("left", loss=lambda b: (c * b.params["weight"]).sum())
    right = hooks("right", loss=lambda b: 3 * b.params["weight"].sum() + 100)
    expected = -0.1 * (GRADIENT + c.numpy() + 3)
    np.testing.assert_allclose(step(left, right), expected, rtol=1e-6)
    np.testing.assert_allclose(step(right, left), expected, rtol=1e-6)
    update, _ = visit(flat(), point(), left, right)
    assert update.metrics["train_loss"] == pytest.approx(math.log(2), rel=1e-6)


def test_a_loss_hook_sees_the_changed_logits():
    """The output hook makes the logits (5, 0); the loss hook's value of them is 5."""
    seen: list[list[float]] = []

    def look(batch: Batch) -> Tensor:
        seen.append(batch.logits.flatten().tolist())
        return torch.zeros(())

    step(hooks("look", loss=look), hooks("shift", output=lambda b: b.logits + torch.tensor([5.0, 0.0])))
    assert seen == [[5.0, 0.0]]


def test_corrections_are_added_and_see_the_raw_gradient():
    """g + (g + 1) + 2·g = 4·g + 1, whatever the order; chained corrections would give 6·g + 3 or so."""
    one = hooks("one", correct=lambda grads, batch: {"weight": grads["weight"] + 1})
    two = hooks("two", correct=lambda grads, batch: {"weight": 2 * grads["weight"]})
    for order_ in ((one, two), (two, one)):
        np.testing.assert_allclose(step(*order_), -0.1 * (4 * GRADIENT + 1), rtol=1e-6)
    none = hooks("none", correct=lambda grads, batch: {})
    np.testing.assert_allclose(step(none), -0.1 * GRADIENT, rtol=1e-6)


def test_a_correction_with_a_factor():
    """g + 3·1 + 2·g: in place or not, every correction sees the raw gradient, and tallies keep it."""
    ones = torch.ones(2, 2)
    three = hooks("three", correct=lambda grads, batch: Times(3.0, {"weight": ones, "stranger": ones}))
    twice = hooks("twice", correct=lambda grads, batch: Times(1.0, {"weight": 2 * grads["weight"]}))
    same = hooks("same", correct=lambda grads, batch: grads)
    np.testing.assert_allclose(step(three), -0.1 * (GRADIENT + 3), rtol=1e-6)
    for order_ in ((three, twice), (twice, three)):
        np.testing.assert_allclose(step(*order_), -0.1 * (3 * GRADIENT + 3), rtol=1e-6)
    for order_ in ((three, twice, same), (same, three, twice)):
        np.testing.assert_allclose(step(*order_), -0.1 * (4 * GRADIENT + 3), rtol=1e-6)
    raw = hooks("raw", tally=lambda total, grads, batch: grads, finish=lambda delta, tally: (tally, None))
    update, _ = visit(flat(), point(), three, raw, lr=0.1)
    np.testing.assert_allclose(update.slots["raw"]["weight"], GRADIENT, rtol=1e-6)
    assert bool((ones == 1).all())


def test_a_correction_in_place_reaches_no_other_gradient():
    """Two parameters that are added get one and the same gradient from the tape; only one of them is corrected."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.a + self.b)

    technique = hooks(correct=lambda grads, batch: Times(1.0, {"a": torch.ones(2, 2)}))
    update, _ = visit(Sum(), point(), technique, lr=0.1)
    np.testing.assert_allclose(update.delta["a"], -0.1 * (GRADIENT + 1), rtol=1e-6)
    np.testing.assert_allclose(update.delta["b"], -0.1 * GRADIENT, rtol=1e-6)


def test_corrections_of_what_does_not_train_are_passed_over():
    """A technique may speak of every parameter, whatever a plan has frozen."""
    model, data = mlp(5, 7, 3), toy(6)
    everything = hooks(correct=lambda grads, batch: {n: torch.ones_like(p) for n, p in batch.params.items()})
    update, _ = visit(model, data, everything, trains=["2.bias"], lr=0.1)
    plain, _ = visit(model, data, trains=["2.bias"], lr=0.1)
    assert list(update.delta) == ["2.bias"]
    torch.testing.assert_close(update.delta["2.bias"], plain.delta["2.bias"] - 0.1)


def test_corrections_come_before_clipping():
    """g + g = 2·g of norm 2·√2.5, clipped to norm 1: g/√2.5."""
    double = hooks(correct=lambda grads, batch: grads)
    np.testing.assert_allclose(step(double, clip=1.0), -0.1 * GRADIENT / math.sqrt(2.5), rtol=1e-5)


def test_scales_are_multiplied():
    """A scalar 2 and rows (1, 3): the rows' steps are 2 and 6 times as long, in either order, under SGD."""
    left = hooks("left", scale={"weight": torch.tensor(2.0), "stranger": torch.tensor(7.0)})
    right = hooks("right", scale={"weight": torch.tensor([[1.0], [3.0]])})
    expected = -0.1 * GRADIENT * np.array([[2.0], [6.0]])
    np.testing.assert_allclose(step(left, right), expected, rtol=1e-6)
    np.testing.assert_allclose(step(right, left), expected, rtol=1e-6)


def test_a_scale_multiplies_adams_step():
    """Adam's first step is lr·sign(g) (ε aside): rows scaled by 1 and 3 move 0.1 and 0.3."""
    scaled = step(hooks(scale={"weight": torch.tensor([[1.0], [3.0]])}), optimizer="adam")
    np.testing.assert_allclose(scaled, [[0.1, 0.1], [-0.3, -0.3]], rtol=1e-5)


def test_a_scale_for_some_names_leaves_the_others():
    model, data = mlp(5, 7, 3), toy(6)
    plain, _ = visit(model, data)
    scaled, _ = visit(model, data, hooks(scale={"0.bias": torch.tensor(0.0)}))
    assert not scaled.delta["0.bias"].any()
    assert torch.equal(scaled.delta["2.bias"], plain.delta["2.bias"])


def test_uploads_are_added_to_what_travels():
    """delta + 1 + 10; what the client itself trained does not change."""
    one = hooks("one", upload=lambda delta: {"weight": torch.ones(2, 2)})
    ten = hooks("ten", upload=lambda delta: {"weight": torch.full((2, 2), 10.0)})
    np.testing.assert_allclose(step(one, ten), -0.1 * GRADIENT + 11, rtol=1e-6)


def test_uploads_of_what_does_not_travel_are_passed_over():
    """As with corrections and scales: a technique may speak of every parameter."""
    model, data = mlp(5, 7, 3), toy(6)
    everything = hooks(upload=lambda delta: {n: torch.ones_like(p) for n, p in model.named_parameters()})
    update, _ = visit(model, data, everything, trains=["0.bias", "2.bias"], uploads=("2.bias",))
    plain, _ = visit(model, data, trains=["0.bias", "2.bias"], uploads=("2.bias",))
    assert list(update.delta) == ["2.bias"]
    torch.testing.assert_close(update.delta["2.bias"], plain.delta["2.bias"] + 1)


def test_uploads_do_not_see_each_other():
    """Only `output` and `apply` have an order: d + d + 1, not d + 1 + (d + 1)."""
    one = hooks("one", upload=lambda delta: {"weight": torch.ones(2, 2)})
    again = hooks("again", upload=lambda delta: {"weight": delta["weight"].clone()})
    np.testing.assert_allclose(step(again, one), -0.2 * GRADIENT + 1, rtol=1e-6)
    np.testing.assert_allclose(step(one, again), -0.2 * GRADIENT + 1, rtol=1e-6)


def test_uploads_do_not_reach_into_memories():
    """`finish` keeps the delta that was trained, −0.1·g; the upload of 1 is for the wire alone."""
    keep = hooks("keep", finish=lambda delta, tally: (delta, delta))
    one = hooks("one", upload=lambda delta: {"weight": torch.ones(2, 2)})
    update, memory = visit(flat(), point(), keep, one, lr=0.1)
    np.testing.assert_allclose(update.delta["weight"].numpy(), -0.1 * GRADIENT + 1, rtol=1e-6)
    np.testing.assert_allclose(memory["keep"]["weight"].numpy(), -0.1 * GRADIENT, rtol=1e-6)
    np.testing.assert_allclose(update.slots["keep"]["weight"].numpy(), -0.1 * GRADIENT, rtol=1e-6)


def test_finish_says_what_travels_and_what_stays():
    """`left` sends 2·delta and remembers its count + 1; `right` sends nothing and keeps what it had; `new` forgets."""

    def counting(view: ClientView) -> Hooks:
        count = view.memory.get("count", torch.zeros(()))
        return Hooks(finish=lambda delta, tally: ({"twice": 2 * delta["weight"]}, {"count": count + 1}))

    left = technique("left", counting)
    right = hooks("right", finish=lambda delta, tally: ({}, None))
    new = hooks("new", finish=lambda delta, tally: ({}, {}))
    memory = {"right": {"kept": torch.tensor(7.0)}, "new": {"old": torch.tensor(1.0)}}
    update, first = visit(flat(), point(), left, right, new, lr=0.1, memory=memory)
    assert list(update.slots) == ["left"]
    np.testing.assert_allclose(update.slots["left"]["twice"].numpy(), -0.2 * GRADIENT, rtol=1e-6)
    assert first["left"]["count"].item() == 1
    assert first["right"]["kept"].item() == 7
    assert first["new"] == {}
    _, second = visit(flat(), point(), left, right, new, memory=first)
    assert second["left"]["count"].item() == 2
    assert first["left"]["count"].item() == 1


def test_features_take_the_place_of_a_modules_output():
    """h = x through the identity, doubled: the head sees (2, 4), so its gradient is (p − onehot)·(2, 4)."""
    update, _ = visit(two_stages(), point(), hooks(features={"low": lambda b, h: 2 * h}), lr=0.1)
    np.testing.assert_allclose(update.delta["high.weight"].numpy(), -0.1 * 2 * GRADIENT, rtol=1e-6)


def test_features_of_two_techniques_follow_each_other():
    """(h + 1) · 2 = (4, 6), or h · 2 + 1 = (3, 5): from left to right."""
    plus = hooks("plus", features={"low": lambda b, h: h + 1})
    twice = hooks("twice", features={"low": lambda b, h: 2 * h})
    for order_, seen in (((plus, twice), [4.0, 6.0]), ((twice, plus), [3.0, 5.0])):
        update, _ = visit(two_stages(), point(), *order_, lr=0.1)
        np.testing.assert_allclose(update.delta["high.weight"].numpy(), 0.1 * np.outer([0.5, -0.5], seen), rtol=1e-6)


def two_stages() -> nn.Sequential:
    """`low` is the identity, `high` is zero."""
    model = nn.Sequential()
    model.add_module("low", nn.Linear(2, 2, bias=False))
    model.add_module("high", flat())
    nn.init.eye_(model.low.weight)
    return model


def test_features_may_add_rows_that_output_takes_off_again():
    """A second row e = (3, 1) of class 1 is put behind h = x = (1, 2); its logits are taken off for the task loss.

    The head's gradient: (p − onehot₀)·x + (p − onehot₁)·e = ((−.5, −1), (.5, 1)) + ((1.5, .5), (−1.5, −.5)).
    The task's loss stays that of one example, ln 2.
    """

    def inject(view: ClientView) -> Hooks:
        extra: list[Tensor] = []

        def features(batch: Batch, h: Tensor) -> Tensor:
            return torch.cat([h, torch.tensor([[3.0, 1.0]])])

        def output(batch: Batch) -> Tensor:
            extra[:] = [batch.logits[len(batch.y) :]]
            return batch.logits[: len(batch.y)]

        def loss(batch: Batch) -> Tensor:
            return F.cross_entropy(extra[0], torch.tensor([1]))

        return Hooks(features={"low": features}, output=output, loss=loss)

    seen: list[tuple[int, ...]] = []
    look = hooks("look", output=lambda b: seen.append(tuple(b.logits.shape)) or b.logits)
    update, _ = visit(two_stages(), point(), technique("inject", inject), look, lr=0.1)
    np.testing.assert_allclose(
        update.delta["high.weight"].numpy(), -0.1 * np.array([[1.0, -0.5], [-1.0, 0.5]]), rtol=1e-6
    )
    assert update.metrics["train_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert seen == [(1, 2)]


def test_features_of_a_module_that_is_not_there():
    with pytest.raises(UsageError, match="no module 'middle'"):
        visit(two_stages(), point(), hooks(features={"middle": lambda b, h: h}))


def test_feature_hooks_are_gone_after_the_visit():
    model = two_stages()
    context = workshop(model, hooks(features={"low": lambda b, h: 2 * h}))
    train_client(context, assign(model, context.method), point(), {})
    assert not any(m._forward_hooks for m in context.replica("").model.modules())
    failing = workshop(model, hooks(features={"low": lambda b, h: h[:, :1]}))
    with pytest.raises(RuntimeError):
        train_client(failing, assign(model, failing.method), point(), {})
    assert not any(m._forward_hooks for m in failing.replica("").model.modules())


def test_a_batch_shows_the_step():
    """Three steps over 3 examples in ones: x and y of the step, its number, and parameters that move."""
    seen: list[Batch] = []
    weights: list[Tensor] = []

    def look(batch: Batch) -> Tensor:
        seen.append(batch)
        weights.append(batch.params["weight"].detach().clone())
        return torch.zeros(())

    data = TensorExamples(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 1, 0]))
    visit(flat(), data, hooks(loss=look), batch_size=1)
    assert [b.step for b in seen] == [0, 1, 2]
    expected = order(5, examples=3, batch_size=1, epochs=1)
    assert [b.x.tolist() for b in seen] == [data.x[i].tolist() for i in expected]
    assert [b.y.tolist() for b in seen] == [data.y[i].tolist() for i in expected]
    assert not weights[0].any()
    assert weights[1].any()
    assert not torch.equal(weights[1], weights[2])


def test_the_gradient_at_other_parameters():
    """W' with logits W'x = (ln 3, 0) for x = (1, 2): p = (¾, ¼), gradient ((−¼)·x, ¼·x); added to that at W = 0."""
    other = {"weight": torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])}
    found = step(hooks(correct=lambda grads, batch: batch.gradient(other)))
    np.testing.assert_allclose(found, -0.1 * (GRADIENT + np.outer([-0.25, 0.25], [1, 2])), rtol=1e-5)


def test_the_gradient_at_other_parameters_has_the_techniques_terms():
    """The loss term ½‖W‖² adds W' there, and W = 0 here; the output hook doubles the logits in both places.

    At W' with doubled logits (2·½·ln 3, 0): p = (¾, ¼) and the gradient is 2·((−¼)·x, ¼·x) + W'.
    """
    other = {"weight": torch.tensor([[math.log(3) / 2, 0.0], [0.0, 0.0]])}
    found = step(
        hooks("look", correct=lambda grads, batch: batch.gradient(other)),
        hooks("ridge", loss=lambda b: b.params["weight"].square().sum() / 2),
        hooks("twice", output=lambda b: 2 * b.logits),
    )
    there = 2 * np.outer([-0.25, 0.25], [1, 2]) + other["weight"].numpy()
    np.testing.assert_allclose(found, -0.1 * (2 * GRADIENT + there), rtol=1e-5)


def test_the_gradient_at_other_parameters_leaves_no_trace():
    """Running statistics, parameters and the batch are as without the look."""
    model, data = normed(), toy(8)

    def correct(grads: Tensors, batch: Batch) -> Tensors:
        before = batch.logits
        batch.gradient({n: p.detach() + 1 for n, p in batch.params.items()})
        assert batch.logits is before
        return {}

    looked, _ = visit(model, data, hooks(correct=correct), batch_size=4)
    plain, _ = visit(model, data, batch_size=4)
    assert equal(looked.delta, plain.delta)
    assert equal(looked.buffers, plain.buffers)


def test_features_at_other_parameters_by_hand():
    """A doubled first layer doubles what leaves it; hooks stay silent, and running statistics do not move."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    heard: list[Tensor] = []
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def loss(batch: Batch) -> Tensor:
        double = {n: 2 * p for n, p in batch.params.items() if n.startswith("0.")}
        before = {n: b.clone() for n, b in model_buffers().items()}
        with torch.no_grad():
            seen.append((batch.forward(double, "0"), batch.forward({}, "0"), batch.forward({}, "")))
        assert all(torch.equal(before[n], b) for n, b in model_buffers().items())
        return batch.logits.sum() * 0

    def join(batch: Batch, features: Tensor) -> Tensor:
        heard.append(features)
        return features

    context = workshop(model, hooks("tap", features={"0": join}, loss=loss))

    def model_buffers() -> Tensors:
        return context.replica("").buffers

    x = toy(6).x
    first = nn.functional.linear(x, model[0].weight, model[0].bias).detach()
    train_client(context, assign(model, context.method, batch_size=6), toy(6), {})
    assert len(heard) == 1
    (double, same, logits) = seen[0]
    torch.testing.assert_close(double.sort(0).values, (2 * first).sort(0).values)
    torch.testing.assert_close(same.sort(0).values, first.sort(0).values)
    assert logits.shape == (6, 3)


@pytest.mark.parametrize("policy", ["average", "local", "drop"])
def test_other_parameters_are_run_as_in_an_evaluation(policy: str):
    """No dropout and no random numbers; the given running statistics, or those that training has moved by now, and
    under `drop` the batch's own. Training goes on in its own modes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    mine = {"1.running_mean": torch.full((4,), 0.7), "1.running_var": torch.full((4,), 2.0)}
    seen: list[tuple[Tensor, Tensor]] = []

    def loss(batch: Batch) -> Tensor:
        before, params = torch.get_rng_state(), {n: p.detach() for n, p in batch.params.items()}
        for grad in (True, False):  # two ways through the model
            with torch.set_grad_enabled(grad):
                given = batch.forward({**params, **mine}, Into("2")).detach()
                current = batch.forward({}, Into("2")).detach()
            h = F.linear(batch.x, params["0.weight"], params["0.bias"])
            stats = [mine["1.running_mean"], mine["1.running_var"]]
            now = [0.1 * h.mean(0), 0.9 + 0.1 * h.var(0)]  # after this batch, from 0 and 1
            for found, (mean, var) in ((given, stats), (current, now)):
                if policy == "drop":
                    mean, var = h.mean(0), h.var(0, unbiased=False)
                torch.testing.assert_close(found, (h - mean) / (var + 1e-5).sqrt())
            assert given.shape == (6, 4)
        assert torch.equal(torch.get_rng_state(), before)
        seen.append((given, current))
        return batch.logits.sum() * 0

    base = {"buffers": policy}
    looked, _ = visit(model, toy(6), hooks(loss=loss), base=base, batch_size=6)
    plain, _ = visit(model, toy(6), base=base, batch_size=6)
    assert len(seen) == 1
    assert equal(looked.delta, plain.delta)
    assert equal(looked.buffers, plain.buffers)


def test_running_statistics_at_both_ends_of_a_visit():
    heard: list[Tensors] = []

    def local(view: ClientView) -> Hooks:
        heard.append(view.statistics())
        return Hooks(finish=lambda delta, tally: ({}, heard.append(view.statistics())))

    start = {n: b + 1 for n, b in running_statistics(normed()).items()}
    update, _ = visit(normed(), toy(), technique("t", local), buffers=start)
    assert equal(heard[0], start)
    assert equal(heard[1], update.buffers)
    visit(normed(), toy(), technique("t", local), base={"buffers": "drop"})
    assert heard[2:] == [{}, {}]


def test_forward_to_a_module_that_is_not_there():
    technique = hooks(loss=lambda batch: batch.forward({}, "hed").sum())
    with pytest.raises(UsageError, match="no module 'hed'"):
        visit(mlp(5, 3), toy(4), technique)


def test_the_gradient_at_other_parameters_with_an_unused_layer():
    update, _ = visit(Dead(), toy(4), hooks(correct=lambda grads, b: b.gradient({n: b.params[n] for n in grads})))
    assert update.steps == 1
    update, _ = visit(Dead(), toy(4), hooks(correct=lambda grads, b: b.gradient(b.params) and {}))
    assert update.steps == 1


def test_a_technique_sees_its_own_and_nothing_else():
    views: dict[str, ClientView] = {}

    def look(name: str) -> Technique:
        return technique(name, lambda view: views.update({name: view}) or Hooks())

    memory = {"left": {"m": torch.tensor(1.0)}, "right": {"m": torch.tensor(2.0)}}
    slots = {"right": {"s": torch.tensor(3.0)}}
    model, data = mlp(5, 7, 3), toy(4)
    visit(model, data, look("left"), look("right"), memory=memory, slots=slots)
    assert views["left"].memory is memory["left"]
    assert views["right"].memory is memory["right"]
    assert views["left"].slot == {}
    assert views["right"].slot is slots["right"]
    assert views["left"].data is data
    assert [s.name for s in views["left"].strata] == ["0", "2"]
    assert views["left"].assignment.slots is slots
    assert views["left"].model.training


def test_a_technique_has_a_random_stream_of_its_own():
    """The same in the same visit, another one for another visit or another technique; and no effect on training."""

    def draws(name: str, seed: int) -> list[float]:
        found: list[float] = []
        visit(
            flat(),
            point(),
            technique(name, lambda v: found.extend(torch.rand(3, generator=v.rng)) or Hooks()),
            seed=seed,
        )
        return [float(f) for f in found]

    assert draws("a", 1) == draws("a", 1)
    assert len({tuple(draws(name, seed)) for name in ("a", "b") for seed in (1, 2)}) == 4


def test_a_technique_that_draws_from_the_global_stream_does_not_disturb_dropout():
    model, data = noisy(), toy(6)
    drawn, _ = visit(model, data, technique("draws", lambda view: torch.rand(9) is not None and Hooks()))
    plain, _ = visit(model, data)
    assert equal(drawn.delta, plain.delta)


# Running statistics -----------------------------------------------------------------------------------------


def test_where_running_statistics_come_from_and_go_to():
    """One batch of all 8 examples, momentum 0.1: mean ← 0.9·before + 0.1·batch mean, `before` as the policy says.

    average: the assignment's (5); local: the client's own (7), or the model's initial ones (0) at first; drop: initial,
    and nothing is sent.
    """
    model, data = normed(), toy(8)
    with torch.no_grad():
        batch_mean = model[0](data.x).mean(0).double().numpy()
    initial = running_statistics(model)
    sent = {**clone(initial), "1.running_mean": torch.full((4,), 5.0)}
    own = {BUFFERS: {**clone(initial), "1.running_mean": torch.full((4,), 7.0)}}

    def mean_after(policy: str, buffers: Tensors, memory: Slots) -> tuple[Update, Slots]:
        return visit(model, data, base={"buffers": policy}, buffers=buffers, memory=memory, batch_size=8)

    update, kept = mean_after("average", sent, {})
    np.testing.assert_allclose(update.buffers["1.running_mean"].numpy(), 4.5 + 0.1 * batch_mean, rtol=1e-5)
    assert kept == {}

    update, kept = mean_after("local", {}, own)
    np.testing.assert_allclose(update.buffers["1.running_mean"].numpy(), 6.3 + 0.1 * batch_mean, rtol=1e-5)
    assert equal(kept[BUFFERS], update.buffers)

    update, kept = mean_after("local", {}, {})
    np.testing.assert_allclose(update.buffers["1.running_mean"].numpy(), 0.1 * batch_mean, rtol=1e-5, atol=1e-7)
    assert equal(kept[BUFFERS], update.buffers)

    update, kept = mean_after("drop", {}, {})
    assert update.buffers == {}
    assert kept == {}


def test_the_next_visit_does_not_change_what_the_last_one_returned():
    """Scratch tensors are copied out."""
    model = normed()
    context = workshop(model, buffers="local")
    update, kept = train_client(context, assign(model, context.method), toy(8), {})
    delta, buffers = clone(update.delta), clone(kept[BUFFERS])
    train_client(context, assign(model, context.method, lr=9.0), toy(8, seed=9), {})
    assert equal(update.delta, delta)
    assert equal(kept[BUFFERS], buffers)
    assert equal(update.buffers, buffers)


def test_kernels_of_one_channel_have_the_strides_of_their_layout():
    """Convolutions choose their layout by the strides, also where both layouts are the same memory."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(1, 1, 5, 5))
    for last, strides in ((True, (9, 1, 3, 1)), (False, (9, 9, 3, 1))):
        context = ClientContext(build=lambda arch: copy.deepcopy(model), method=chain(), channels_last=last)
        kernel = context.replica("").params["0.weight"]
        assert kernel.stride() == strides
        assert torch.equal(kernel, model[0].weight)


def test_where_stages_lead_to_a_place_no_hook_is_needed() -> None:
    """Up to a stage, or to what goes into one; not inside stages, nor where somebody hooks the whole model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()), nn.Linear(2, 2))
    assert stages_to(model, "1") == [model[0], model[1]]
    assert stages_to(model, Into("1")) == [model[0]]
    assert stages_to(model, Into("0")) == stages_to(model, "1.0") == stages_to(model, "") == []
    assert stages_to(nn.Linear(2, 2), "0") == []
    model.register_forward_pre_hook(lambda module, args: None)
    assert stages_to(model, "1") == []


def test_a_delta_into_one_buffer_of_another_order():
    """What travels may be named in another order than the model's: each difference goes to its own name."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    context = workshop(model)
    names = tuple(reversed(context.replica("").params))

    def allocate(params: Tensors, asked: Sequence[str]) -> Tensors:
        flat = torch.full((16 * len(asked),), float("nan"))
        parts = zip(asked, flat.split(16), strict=True)
        return FlatTensors({n: part[: params[n].numel()].view(params[n].shape) for n, part in parts}, flat)

    sent = assign(model, context.method, uploads=names, lr=0.1)
    first = train_client(context, sent, toy(inputs=2, classes=2), {})[0]
    context.allocate_delta = allocate
    for _ in range(2):  # from the second time on the server's parameters are in one buffer
        again = train_client(context, sent, toy(inputs=2, classes=2), {})[0]
        assert equal(first.delta, again.delta)
