"""FedPart, Wang et al. 2024."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fedstrata as fs
from fedstrata.core.optim import Adam
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import BUFFERS, Assignment, Stratum, Update
from fedstrata.models.registry import build_model
from fedstrata.models.strata import strata
from fedstrata.system.machine import compute_with
from fedstrata.techniques.fedpart import FedPart
from fedstrata.wire.messages import encode
from fedstrata.wire.packing import unpack

ONE_EACH = "fedpart(full_rounds=1, rounds_per_stratum=1)"
MODELS: dict[str, tuple[str, tuple[int, ...]]] = {
    "mlp": ("mlp(hidden=(8, 6))", (1, 8, 8)),
    "vgg9": ("vgg9(width=2, hidden=8)", (1, 8, 8)),
    "resnet8": ("resnet8(width=4)", (3, 8, 8)),
    "vit": ("vit(dim=8, depth=1, heads=2)", (1, 8, 8)),
    "chargru": ("chargru(embedding=4, hidden=6)", (6,)),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are no faster with more threads, and much slower beside other work."""
    with compute_with(1):
        yield


def zoo(name: str, sizes: tuple[int, ...] = (6, 9)) -> tuple[nn.Sequential, list[tuple[Tensor, Tensor]]]:
    """A small model and clients of these sizes."""
    if name == "vit":
        pytest.importorskip("transformers")
    text, shape = MODELS[name]
    source = torch.Generator().manual_seed(4)
    clients = []
    for size in sizes:
        tokens = torch.randint(5, (size, *shape), generator=source)
        x = tokens if len(shape) == 1 else torch.randn(size, *shape, generator=source)
        clients.append((x, torch.randint(5, (size,), generator=source)))
    return build_model(text, shape, classes=5, seed=3), clients


def federation(model: nn.Module, clients: Any, method: str, **settings: Any) -> fs.Federation:
    settings = {"rounds": 4, "batch_size": 3, "lr": 0.05, "engine": "serial", **settings}
    return fs.Federation(model, clients, method=method, **settings)


def overheard(fed: fs.Federation, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Assignment, Update]]:
    """The messages of the round at hand, to be cleared after it."""
    messages: list[tuple[Assignment, Update]] = []
    original = fed._engine.run

    def listen(assignments: Any, recall: Any) -> Iterator[Any]:
        for assignment, (update, memory) in zip(assignments, original(assignments, recall), strict=True):
            messages.append((assignment, update))
            yield update, memory

    monkeypatch.setattr(fed._engine, "run", listen)
    return messages


# The schedule ---------------------------------------------------------------------------------------------

LETTERS = tuple(Stratum(name=n, stage=n, params=(f"{n}.weight",), buffers=(f"{n}.mean",)) for n in "abc")


def turns(rounds: int, run_seed: int = 0, **fields: Any) -> list[str]:
    """What is active in each round; "*" for the whole network."""
    groups = (FedPart(**fields).active(number, run_seed, LETTERS) for number in range(rounds))
    return ["*" if group is None else "".join(s.name for s in group) for group in groups]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "* * * * * a a b b c c * * * * * a a b b c c * *"),
        ({"full_rounds": 2, "rounds_per_stratum": 1}, "* * a b c * * a b c *"),
        ({"full_rounds": 0, "rounds_per_stratum": 3}, "a a a b b b c c c a a"),
        ({"full_rounds": 1, "order": "reverse"}, "* c c b b a a * c c b b a a *"),
        ({"full_rounds": 1, "rounds_per_stratum": 1, "warmup": 3}, "* * * * a b c * a b c *"),
        ({"full_rounds": 0, "rounds_per_stratum": 1, "warmup": 2}, "* * a b c a b c"),
        ({"full_rounds": 1, "rounds_per_stratum": 2, "group": 2}, "* ab ab c c * ab ab c c *"),
        ({"full_rounds": 1, "rounds_per_stratum": 1, "group": 2, "order": "reverse"}, "* c ab * c ab"),
        ({"full_rounds": 1, "rounds_per_stratum": 1, "group": 7}, "* abc * abc"),
        ({"full_rounds": 1, "rounds_per_stratum": 1, "cycles": 2}, "* a b c * a b c * * * * *"),
        ({"full_rounds": 0, "rounds_per_stratum": 1, "cycles": 1, "warmup": 1}, "* a b c * * * *"),
        ({"cycles": 0}, "* * * * * * * *"),
        ({"full_rounds": 1, "rounds_per_stratum": 1, "strata": ("c", "a")}, "* c a * c a"),
        ({"full_rounds": 1, "rounds_per_stratum": 2, "strata": ("[bc]",)}, "* bc bc * bc bc"),
        ({"full_rounds": 0, "rounds_per_stratum": 1, "strata": ("a", "*"), "order": "reverse"}, "abc a abc a"),
    ],
)
def test_schedule(fields: dict[str, Any], expected: str) -> None:
    assert turns(len(expected.split()), **fields) == expected.split()


def test_random_order() -> None:
    """Every cycle is a permutation of its own, which the run's seed alone decides."""
    fields: dict[str, Any] = {"full_rounds": 1, "rounds_per_stratum": 2, "order": "random"}
    rounds = turns(7 * 20, run_seed=5, **fields)
    cycles = ["".join(rounds[start : start + 7]) for start in range(0, len(rounds), 7)]
    assert all(cycle[0] == "*" and cycle[1::2] == cycle[2::2] for cycle in cycles)
    orders = [cycle[1::2] for cycle in cycles]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) == 6
    assert turns(7 * 20, run_seed=5, **fields) == rounds
    assert turns(7 * 20, run_seed=6, **fields) != rounds


def test_a_plan_narrows_what_trains_travels_and_reports() -> None:
    base = Assignment(1, 0, "", {}, {}, ("x",), ("x",), fs.Work(), 0, "")
    part = {"full_rounds": 1, "rounds_per_stratum": 1}
    planned = FedPart(**part, freeze_norm=True, cache_prefix=True).plan(base, LETTERS, {})
    assert (planned.trains, planned.uploads, planned.upload_buffers) == (("a.weight",), ("a.weight",), ("a.mean",))
    assert (planned.update_buffers, planned.cache_prefix) == (("a.mean",), True)
    planned = FedPart(**part).plan(base, LETTERS, {})
    assert (planned.update_buffers, planned.cache_prefix) == (None, False)
    assert FedPart(**part).plan(replace(base, round=0), LETTERS, {}).trains == ("x",)


def test_a_run_follows_the_schedule() -> None:
    model, clients = zoo("mlp")
    whole = ["fc1.linear", "fc2.linear", "head"]
    fed = federation(model, clients, "fedpart(full_rounds=1, rounds_per_stratum=1, order='reverse')", rounds=6)
    assert [r.active for r in fed.fit().records] == [whole, ["head"], ["fc2.linear"], ["fc1.linear"], whole, ["head"]]
    fed = federation(model, clients, "fedpart(full_rounds=0, rounds_per_stratum=2, strata=('fc*',), warmup=1)")
    assert [r.active for r in fed.fit().records] == [whole, *[whole[:2]] * 3]


def test_random_order_is_the_seeds_on_every_engine() -> None:
    model, clients = zoo("mlp", sizes=(3, 3))
    method = "fedpart(full_rounds=0, rounds_per_stratum=1, order='random')"
    settings: dict[str, Any] = {"rounds": 12}
    runs = [
        [tuple(r.active) for r in federation(model, clients, method, **settings, **own).fit().records]
        for own in ({}, {"engine": "wire"}, {"engine": "processes", "workers": 2}, {"seed": 1})
    ]
    assert runs[0] == runs[1] == runs[2] != runs[3]
    assert all(len(set(runs[0][start : start + 3])) == 3 for start in (0, 3, 6, 9))


def test_defaults_and_patterns_as_text() -> None:
    full = "fedpart(full_rounds=5, rounds_per_stratum=2, order='sequential', warmup=0, group=1, freeze_norm=False)"
    assert fs.method("fedpart") == fs.method(full)
    method = fs.method("fedpart(strata=('stem*', 'layer1*'), cycles=3)")
    assert fs.method(str(method)) == method
    (technique,) = method.techniques
    assert isinstance(technique, FedPart)
    assert technique.strata == ("stem*", "layer1*")


# What travels ---------------------------------------------------------------------------------------------


def plan_rounds(name: str, rounds: int) -> list[tuple[fs.Federation, Assignment]]:
    """A client's assignments in the first rounds, without training."""
    model = build_model(name, (3, 32, 32), 10, seed=0)
    fed = federation(model, [(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))], "fedpart", rounds=rounds)
    states = (replace(fed.state, round=number) for number in range(rounds))
    return [(fed, fed._server.open(state, [0], fed._work(0))[0]) for state in states]


@pytest.mark.parametrize(("name", "rounds"), [("resnet8", 25), ("resnet18(width=8)", 47)])
def test_a_cycle_sends_what_seven_full_rounds_would(name: str, rounds: int) -> None:
    """5 rounds of everything, then 2 of every stratum, which are everything twice: 7 of 25, or of 47, rounds' worth.

    Whole messages, with running statistics, names and headers, are within 0.2 points of it.
    """
    cycle = plan_rounds(name, rounds)
    size = {n: p.numel() for n, p in cycle[0][1].params.items()}
    sent = [sum(size[n] for n in a.uploads) for _, a in cycle]
    assert sum(sent) == 7 * sum(size.values())
    assert [count == sum(size.values()) for count in sent] == [True] * 5 + [False] * (rounds - 5)
    assert all(a.trains == a.uploads for _, a in cycle)

    def message(fed: fs.Federation, a: Assignment) -> int:
        names = fed.state.buffers if a.upload_buffers is None else a.upload_buffers
        values = {n: fed.state.buffers[n] for n in names}
        delta = {n: a.params[n] for n in a.uploads}
        return len(encode(Update(a.round, 0, a.method, 2, 1, delta, values, metrics={"train_loss": 1.0, "flops": 1.0})))

    lengths = [message(*one) for one in cycle]
    share = 100 * sum(lengths) / (rounds * lengths[0])
    assert abs(share - 100 * 7 / rounds) < 0.2


def test_resnet8_by_name() -> None:
    """Ten strata, shallow to deep, each for two rounds."""
    order = [a.uploads[0].removesuffix(".weight") for _, a in plan_rounds("resnet8(width=4)", 25)[5:]]
    names = ["stem.conv", "layer1.0.conv1", "layer1.0.conv2"]
    for block in ("layer2.0", "layer3.0"):
        names += [f"{block}.conv1", f"{block}.conv2", f"{block}.shortcut.conv"]
    assert order == [n for n in [*names, "head"] for _ in range(2)]


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("name", MODELS)
def test_frozen_means_frozen(name: str, buffers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a partial round the active stratum moves, with its statistics; all else on the server keeps its bits.

    Statistics of frozen layers move on the clients. Under `local` all come back, for the model to be judged by.
    """
    model, clients = zoo(name)
    parts = strata(model, clients[0][0][:2])
    fed = federation(model, clients, ONE_EACH, rounds=1 + len(parts), buffers=buffers)
    messages = overheard(fed, monkeypatch)
    before = {**fed.state.params, **fed.state.buffers}
    turn = iter([None, *parts])
    for record in fed.rounds():
        part = next(turn)
        after = {**fed.state.params, **fed.state.buffers}
        moved = {n for n in before if not torch.equal(before[n], after[n])}
        active = parts if part is None else (part,)
        assert record.active == [s.name for s in active]
        told = parts if buffers == "local" else active
        params, values = {n for s in active for n in s.params}, {n for s in told for n in s.buffers}
        assert moved <= params | values
        assert moved >= values
        assert moved & params
        assert all(set(update.delta) == params and set(update.buffers) == values for _, update in messages)
        assert all(torch.isfinite(t).all() for t in after.values())
        messages.clear()
        before = after
    assert next(turn, None) is None


def test_downlink() -> None:
    """A client receives what changed since it last took part: after a partial round, one stratum."""
    clients = zoo("resnet8", sizes=(4, 4))[1]
    model = build_model("resnet8(width=16)", (3, 8, 8), 5, seed=3)
    parts = strata(model, clients[0][0][:2])
    fed = federation(model, clients, ONE_EACH, participation=1, rounds=11, seed=3)
    size = {n: t.numel() * t.element_size() for n, t in {**fed.state.params, **fed.state.buffers}.items()}
    names = [{n for s in parts for n in s.params + s.buffers}, *({*s.params, *s.buffers} for s in parts)]
    last: dict[int, int] = {}
    expected, together = [], []
    for record in fed.rounds():
        now, (client,) = record.round - 1, record.clients
        since = last.get(client)
        lacks = names[0] if since is None else set().union(*names[since:now])
        expected.append(sum(size[n] for n in lacks))
        together.append(since == now - 1)
        last[client] = now
        assert expected[-1] <= record.bytes_down <= expected[-1] + 100 * len(lacks) + 600
    assert any(together[2:])
    assert not all(together[1:])


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_messages_hold_what_changed(buffers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes themselves: parameters, and running statistics where the server's mean is sent."""
    model, clients = zoo("resnet8")
    parts = strata(model, clients[0][0][:2])
    fed = federation(model, clients, ONE_EACH, rounds=5, buffers=buffers)
    messages = overheard(fed, monkeypatch)
    for record in fed.rounds():
        for assignment, update in messages:
            down, up = (unpack(encode(message))[1] for message in (assignment, update))
            if record.round > 2:
                before = parts[record.round - 3]
                assert {n for n in down if n.startswith("param/")} == {f"param/{n}" for n in before.params}
                assert any(n.endswith("running_mean") for n in down) == (buffers == "average")
                assert all(n.partition("/")[2] in {*before.params, *before.buffers} for n in down)
            active = parts if record.round == 1 else parts[record.round - 2 : record.round - 1]
            told = parts if buffers == "local" else active
            expected = {n for s in active for n in s.params} | {n for s in told for n in s.buffers}
            assert {n.partition("/")[2] for n in up} == expected
        messages.clear()


# What is computed -----------------------------------------------------------------------------------------


def test_adam_on_the_active_stratum_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is torch's Adam, made anew, on the stratum's parameters; nothing is kept for the others."""
    held: list[int] = []
    original = Adam.start

    def counting(self: Adam, params: list[Tensor], *rest: Any) -> Any:
        held.append(sum(p.numel() for p in params))
        return original(self, params, *rest)

    monkeypatch.setattr(Adam, "start", counting)
    model, (one, _) = zoo("mlp")
    model, data = model.double(), (one[0].double(), one[1])
    method = "fedpart(full_rounds=0, rounds_per_stratum=1)"
    fed = federation(model, [data], method, rounds=3, steps=4, batch_size=100, optimizer="adam", lr=0.01)
    fed.fit()
    reference = copy.deepcopy(model)
    layers = [reference.fc1.linear, reference.fc2.linear, reference.head]
    for part in layers:
        optimiser = torch.optim.Adam(part.parameters(), lr=0.01)
        for _ in range(4):
            optimiser.zero_grad()
            F.cross_entropy(reference(data[0]), data[1]).backward()
            optimiser.step()
    for name, value in reference.named_parameters():
        torch.testing.assert_close(fed.state.params[name], value.detach(), rtol=0, atol=1e-9)
        assert (value - dict(model.named_parameters())[name]).abs().max() > 1e-3
    assert held == [sum(p.numel() for p in part.parameters()) for part in layers]


def step_flops(model: nn.Module, trains: tuple[str, ...], x: Tensor) -> int:
    """Forward and backward pass with some parameters training, as torch counts them."""
    model = copy.deepcopy(model).train()
    for name, p in model.named_parameters():
        p.requires_grad_(name in trains)
    counter = FlopCounterMode(display=False)
    with counter:
        F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)).backward()
    return int(counter.get_total_flops())


def test_backward_stops_at_the_active_stratum() -> None:
    """The paper's ResNet-8, one cycle: every round costs what torch counts, and all 25 at most 60 % of full rounds."""
    model = build_model("resnet8", (3, 32, 32), 10, seed=0)
    x, y = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    records = federation(model, [(x, y)], "fedpart", rounds=25, lr=1e-4).fit().records
    full = step_flops(model, tuple(n for n, _ in model.named_parameters()), x)
    each = [step_flops(model, s.params, x) for s in strata(model, x)]
    assert [r.flops for r in records] == [full] * 5 + [flops for flops in each for _ in range(2)]
    assert sum(r.flops for r in records) <= 0.6 * 25 * full
    assert min(each) == each[-1] < 0.36 * full


# Norm layers ----------------------------------------------------------------------------------------------


def normalised_model() -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    """Strata `0` with a norm layer, `3` with another, `6`; statistics that are not the data's."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Linear(4, 5),
            nn.BatchNorm1d(5),
            nn.ReLU(),
            nn.Linear(5, 5),
            nn.BatchNorm1d(5),
            nn.ReLU(),
            nn.Linear(5, 3),
        ).double()
        for norm in (model[1], model[4]):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
        return model, (torch.randn(8, 4).double(), torch.randint(3, (8,)))


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_frozen_norm_layers(buffers: str, freeze: bool) -> None:
    """By default they use the batch and move their statistics; with freeze_norm they are as in evaluation.

    A step on stratum 3 is worked out with torch: the norm layer after 0 is frozen, the one after 3 is not.
    """
    model, data = normalised_model()
    method = f"fedpart(full_rounds=0, rounds_per_stratum=1, strata=('3',), freeze_norm={freeze})"
    fed = federation(model, [data], method, rounds=1, steps=2, batch_size=8, lr=0.5, buffers=buffers)
    fed.fit()
    reference = copy.deepcopy(model).train()
    reference[1].train(not freeze)
    own = [*reference[3].parameters(), *reference[4].parameters()]
    for _ in range(2):
        grads = torch.autograd.grad(F.cross_entropy(reference(data[0]), data[1]), own)
        with torch.no_grad():
            for p, g in zip(own, grads, strict=True):
                p -= 0.5 * g
    for name, value in reference.named_parameters():
        torch.testing.assert_close(fed.state.params[name], value.detach(), rtol=0, atol=1e-9)
    for name in ("4.running_mean", "4.running_var"):
        torch.testing.assert_close(fed.state.buffers[name], reference.get_buffer(name), rtol=0, atol=1e-9)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        there = reference if buffers == "local" else model  # under `average` they do not travel
        torch.testing.assert_close(fed.state.buffers[name], there.get_buffer(name), rtol=0, atol=1e-9)
    if buffers == "local":
        kept = fed._recorder.store.get([0], [0])[0][BUFFERS]
        for name, value in reference.named_buffers():
            torch.testing.assert_close(kept[name], value, rtol=0, atol=1e-9)
        assert torch.equal(kept["1.running_mean"], model[1].running_mean) == freeze


def test_frozen_norm_layers_train_again_in_full_rounds() -> None:
    model, data = normalised_model()
    method = "fedpart(full_rounds=1, rounds_per_stratum=1, freeze_norm=True)"
    fed = federation(model, [data], method, rounds=5)
    rounds = fed.rounds()
    before, moved = fed.state.buffers, []
    for _ in range(5):
        next(rounds)
        moved.append([n[0] for n in ("1.running_mean", "4.running_mean") if not fed.state.buffers[n].equal(before[n])])
        before = fed.state.buffers
    assert moved == [["1", "4"], ["1"], ["4"], [], ["1", "4"]]


# The prefix, once per visit ---------------------------------------------------------------------------------


def cached_and_not(
    name: str, beside: str = "", named: tuple[str, ...] = (), **settings: Any
) -> tuple[fs.Federation, fs.Federation]:
    """One round for each of the strata, or of those that are named."""
    model, clients = zoo(name)
    chosen = named or tuple(s.name for s in strata(model, clients[0][0][:2]))
    runs = []
    for cache in (True, False):
        part = f"fedpart(full_rounds=0, rounds_per_stratum=1, strata={chosen}, freeze_norm=True, cache_prefix={cache})"
        own = {"rounds": len(chosen), "epochs": 3, **settings}
        fed = federation(model, clients, f"{beside} + {part}" if beside else part, **own)
        fed.fit()
        runs.append(fed)
    return runs[0], runs[1]


def check_close(one: fs.Federation, other: fs.Federation) -> None:
    for name, value in {**other.state.params, **other.state.buffers}.items():
        torch.testing.assert_close({**one.state.params, **one.state.buffers}[name], value, rtol=0, atol=1e-5)


SOME_OF_RESNET8 = ("layer1.0.conv2", "layer3.0.shortcut.conv", "head")
"""Inside a block, beside one, and after the last: `test_a_cached_prefix_changes_nothing_but_the_cost` has all ten."""


@pytest.mark.parametrize("name", MODELS)
def test_a_cached_prefix_changes_nothing_but_the_cost(name: str) -> None:
    """In the last round all but the head is computed once, not three times."""
    cached, plain = cached_and_not(name)
    check_close(cached, plain)
    ours, theirs = ([r.flops for r in fed.records] for fed in (cached, plain))
    assert ours[0] == theirs[0]
    assert all(a <= b for a, b in zip(ours, theirs, strict=True))
    assert ours[-1] < 0.6 * theirs[-1]


def test_what_a_cached_prefix_costs() -> None:
    """While the head trains, a visit of three epochs is one pass through all below it and three through the head."""
    cached, plain = cached_and_not("vgg9")
    model, clients = zoo("vgg9")
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        features = [model[:-1](x) for x, _ in clients]
    once = counter.get_total_flops()
    head = sum(step_flops(nn.Sequential(model.head), ("0.weight", "0.bias"), z) for z in features)
    assert cached.records[-1].flops == once + 3 * head
    assert plain.records[-1].flops == 3 * (once + head)


@pytest.mark.parametrize("beside", ["moon", "fedprox(mu=0.5)", "scaffold", "fednlr", "feddyn(alpha=0.5)", "fedspeed"])
@pytest.mark.parametrize(("name", "named"), [("mlp", ()), ("resnet8", SOME_OF_RESNET8)], ids=["mlp", "resnet8"])
def test_a_cached_prefix_under_others(name: str, named: tuple[str, ...], beside: str) -> None:
    cached, plain = cached_and_not(name, beside, named, epochs=2)
    check_close(cached, plain)
    assert sum(r.flops for r in cached.records) < sum(r.flops for r in plain.records)


@pytest.mark.slow
def test_a_cached_prefix_has_the_same_bits_on_every_engine() -> None:
    model, clients = zoo("resnet8")
    schedule = f"full_rounds=1, rounds_per_stratum=1, strata={SOME_OF_RESNET8}"
    method = f"fednlr + fedpart({schedule}, freeze_norm=True, cache_prefix=True)"
    ends = [
        federation(model, clients, method, rounds=5, epochs=2, **own)
        for own in ({}, {"engine": "wire"}, {"engine": "processes", "workers": 2})
    ]
    for fed in ends:
        fed.fit()
        assert all(torch.equal(p, fed.state.params[n]) for n, p in ends[0].state.params.items())
        assert [r.flops for r in fed.records] == [r.flops for r in ends[0].records]


class Winding(nn.Module):
    """What it does depends on its inputs' values, so that no tracing can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.two(x if x.sum() > 0 else -x)


def test_where_a_prefix_cannot_be_cached() -> None:
    """Refused before anything runs, in one sentence."""
    images, pictures = zoo("resnet8")
    with pytest.raises(fs.UsageError, match="cache_prefix needs freeze_norm=True"):
        federation(images, pictures, "fedpart(cache_prefix=True)")
    data = [(torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))]
    with pytest.raises(fs.UsageError, match="its code cannot be traced; put its parts into a plain"):
        federation(Winding(), data, "fedpart(cache_prefix=True)")
    federation(Winding(), data, "fedpart(full_rounds=0)").fit()
    pytest.importorskip("kornia")
    with pytest.raises(fs.UsageError, match="cache_prefix cannot be used with augmentation"):
        federation(images, pictures, "fedpart(cache_prefix=True, freeze_norm=True)", augment="flip")


# Other models, other company ------------------------------------------------------------------------------


def test_clients_of_different_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule is the server's; who lacks the active stratum takes no step and sends nothing."""
    deep, clients = build_model("resnet14(width=2)", (3, 8, 8), 5, seed=0), zoo("resnet8")[1]
    shallow = build_model("resnet10(width=2)", (3, 8, 8), 5, seed=0)
    parts = strata(deep, clients[0][0][:2])
    method = "fedpart(full_rounds=0, rounds_per_stratum=1)"
    settings: dict[str, Any] = {"archs": {"shallow": shallow}, "arch_of": lambda c: "shallow" if c else "", "epochs": 1}
    fed = federation(deep, clients, method, rounds=len(parts), **settings)
    messages = overheard(fed, monkeypatch)
    held = {n for n, _ in shallow.named_parameters()}
    idle = []
    for record, part in zip(fed.rounds(), parts, strict=True):
        lacks = held.isdisjoint(part.params)
        (_, one), (_, two) = messages
        assert record.active == [part.name]
        assert not record.refused
        assert set(one.delta) == set(part.params)
        assert set(two.delta) == (set() if lacks else set(part.params))
        assert set(two.buffers) == (set() if lacks else set(part.buffers))
        assert (one.steps, two.steps) == (2, 0 if lacks else 3)
        assert (two.metrics["flops"] == 0) == lacks
        idle += [part.name] * lacks
        messages.clear()
    assert idle == [f"{block}.conv{n}" for block in ("layer3.1", "layer4.1") for n in (1, 2)]


def test_a_round_in_which_nobody_holds_the_stratum() -> None:
    """Nothing moves, and the run goes on."""
    deep, clients = build_model("resnet14(width=2)", (3, 8, 8), 5, seed=0), zoo("resnet8")[1]
    shallow = build_model("resnet10(width=2)", (3, 8, 8), 5, seed=0)
    settings: dict[str, Any] = {"archs": {"shallow": shallow}, "arch_of": lambda c: "shallow"}
    fed = federation(
        deep, clients, "fedpart(full_rounds=0, rounds_per_stratum=1, order='random')", rounds=17, **settings
    )
    before, still = fed.state.params, 0
    for record in fed.rounds():
        moved = any(not torch.equal(before[n], p) for n, p in fed.state.params.items())
        assert moved == bool(record.active) == bool(record.steps)
        still += not moved
        before = fed.state.params
    assert still == 4


def test_what_the_user_froze_gets_no_rounds() -> None:
    model, clients = zoo("mlp")
    model.fc1.requires_grad_(False)
    fed = federation(model, clients, ONE_EACH, rounds=6)
    both = ["fc2.linear", "head"]
    assert [r.active for r in fed.fit().records] == [both, both[:1], both[1:], both, both[:1], both[1:]]
    assert torch.equal(fed.state.params["fc1.linear.weight"], model.fc1.linear.weight)


def test_strata_by_pattern_must_be_there() -> None:
    model, clients = zoo("mlp")
    with pytest.raises(fs.UsageError, match=r"fedpart's strata: none .*called 'fc3\*'"):
        federation(model, clients, "fedpart(strata=('fc1*', 'fc3*'))")


def test_a_pattern_may_name_what_only_some_clients_hold() -> None:
    """The server's model has it: who lacks it takes no step."""
    deep, clients = build_model("resnet14(width=2)", (3, 8, 8), 5, seed=0), zoo("resnet8")[1]
    shallow = build_model("resnet10(width=2)", (3, 8, 8), 5, seed=0)
    settings: dict[str, Any] = {"archs": {"shallow": shallow}, "arch_of": lambda c: "shallow" if c else ""}
    method = "fedpart(full_rounds=0, rounds_per_stratum=1, strata=('layer3.1*', 'head'))"
    records = federation(deep, clients, method, rounds=2, **settings).fit().records
    assert [r.active for r in records] == [["layer3.1.conv1", "layer3.1.conv2"], ["head"]]


def test_a_pattern_that_names_only_what_the_user_froze() -> None:
    """There would be no cycle: refused in one sentence, before anything runs."""
    model, clients = zoo("mlp")
    model.fc1.requires_grad_(False)
    with pytest.raises(fs.UsageError):
        federation(model, clients, "fedpart(full_rounds=0, strata=('fc1*',))").fit()


def digits() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Any]:
    data = fs.load_dataset("digits")
    order = torch.arange(240)
    x, y = data.train.batch(order)
    clients = [(x[start : start + 40], y[start : start + 40]) for start in range(0, 240, 40)]
    return fs.build_model("cnn2(width=4, hidden=16)", data.input_shape, data.classes, seed=0), clients, data.test


def test_feddyn_fednlr_and_fedpart() -> None:
    """The three together: the same bits on every engine; it learns; and each of them does something."""
    model, clients, test = digits()

    def end(method: str, **own: Any) -> fs.Federation:
        settings = {"rounds": 9, "participation": 4, "epochs": 3, "batch_size": 10, "lr": 0.1, "eval_every": 9}
        fed = fs.Federation(model, clients, test, method=method, **{"engine": "serial", **settings, **own})
        fed.fit()
        return fed

    method = "feddyn + fednlr + fedpart(full_rounds=4, rounds_per_stratum=1)"
    assert (end(method).records[-1].accuracy or 0) > 0.4
    short = method.replace("full_rounds=4", "full_rounds=1")
    engines = ({}, {"engine": "wire"}, {"engine": "processes", "workers": 2})
    runs = [end(short, rounds=4, **own) for own in engines]
    for other in runs[1:]:
        assert all(torch.equal(p, other.state.params[n]) for n, p in runs[0].state.params.items())
        assert [r.bytes_down for r in other.records] == [r.bytes_down for r in runs[0].records]
    two = end(short, rounds=2).state.params
    for part in (short.removeprefix("feddyn + "), short.replace("fednlr + ", ""), "feddyn + fednlr"):
        other = end(part, rounds=2).state.params
        assert any(not torch.equal(p, other[n]) for n, p in two.items())


def test_on_top_of_fedprox_only_what_trains_is_pulled() -> None:
    """Beside FedProx in NumPy: a step of the last layer is w ← w − η(∇ + μ(w − w₀)), and the first stays."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double()
    x, y = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).double(), torch.tensor([0, 1, 2, 0, 1])
    method = "fedprox(mu=0.7) + fedpart(full_rounds=0, rounds_per_stratum=1, strata=('1',))"
    fed = federation(model, [(x, y)], method, rounds=1, steps=3, batch_size=5, lr=0.5)
    fed.fit()
    hidden = model[0](x).detach().numpy()
    hidden = np.hstack([hidden, np.ones((5, 1))])
    start = w = np.hstack([model[1].weight.detach().numpy(), model[1].bias.detach().numpy()[:, None]])
    for _ in range(3):
        powers = np.exp(hidden @ w.T)
        error = powers / powers.sum(1, keepdims=True) - np.eye(3)[y]
        w = w - 0.5 * (error.T @ hidden / 5 + 0.7 * (w - start))
    np.testing.assert_allclose(fed.state.params["1.weight"], w[:, :4], atol=1e-9)
    np.testing.assert_allclose(fed.state.params["1.bias"], w[:, 4], atol=1e-9)
    assert torch.equal(fed.state.params["0.weight"], model[0].weight)


def states(fed: fs.Federation) -> Tensors:
    return {**fed.state.params, **fed.state.buffers}


def test_many_clients_at_once() -> None:
    """The engine `vmap` trains one stratum at a time, too."""
    model, clients = zoo("mlp", sizes=(6, 9, 4))
    serial, cohort = (federation(model, clients, ONE_EACH, engine=engine) for engine in ("serial", "vmap"))
    serial.fit(), cohort.fit()
    for name, value in states(serial).items():
        torch.testing.assert_close(states(cohort)[name], value, rtol=0, atol=1e-5)
    assert [r.flops for r in serial.records] == [r.flops for r in cohort.records]


# Harder cases -------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A network that keeps a buffer of its own, for its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("middle", torch.full((4,), 0.1, dtype=torch.float64))
        self.net, self.drop = normalised_model()[0], nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(self.drop(x - self.middle))
        return out


def test_a_buffer_of_the_whole_model_freezes_nothing_else() -> None:
    """Only norm layers stay still: the active one follows the batch, and dropout drops."""
    modes: list[bool] = []
    model, data = Scaled(), normalised_model()[1]
    model.drop.register_forward_pre_hook(lambda m, args: modes.append(m.training))  # copied with the model
    method = "fedpart(full_rounds=0, rounds_per_stratum=1, strata=('net.3',), freeze_norm=True)"
    fed = federation(model, [data], method, rounds=1, steps=2, batch_size=8)
    tracked = fed.state.buffers["net.4.num_batches_tracked"].item()
    modes.clear()
    fed.fit()
    assert fed.state.buffers["net.4.num_batches_tracked"].item() == tracked + 2
    assert modes[-2:] == [True, True]
    assert torch.equal(fed.state.buffers["middle"], model.middle)


def test_norm_layers_that_the_user_froze_stay_still_too() -> None:
    model, data = normalised_model()
    for p in (*model[0].parameters(), *model[1].parameters()):
        p.requires_grad_(False)
    method = "fedpart(full_rounds=0, rounds_per_stratum=1, freeze_norm={})"
    for freeze in (False, True):
        fed = federation(model, [data], method.format(freeze), rounds=2, steps=2, batch_size=8, buffers="local")
        fed.fit()
        assert torch.equal(fed.state.buffers["1.running_mean"], model[1].running_mean) == freeze


def test_a_client_without_statistics_of_its_own_is_sent_the_servers() -> None:
    """Under `local`, where norm layers must use some: its first visit falls into a partial round."""
    model, data = normalised_model()
    method = "fedpart(full_rounds=1, rounds_per_stratum=1, freeze_norm=True)"
    fed = federation(model, [data, data], method, participation=1, rounds=8, buffers="local", seed=1)
    met: set[int] = set()
    validate_settings = 0
    for record in fed.rounds():
        (client,) = record.clients
        if client not in met and len(record.active) == 1:
            kept = fed.memory(client)[BUFFERS]
            frozen = [n for n in ("1.running_mean", "4.running_mean") if n[0] not in record.active[0]]
            validate_settings += any(not torch.equal(kept[n], model.get_buffer(n)) for n in frozen)
        met.add(client)
    assert met == {0, 1}
    assert validate_settings == 1


def test_statistics_that_are_never_kept_are_sent_again() -> None:
    """Under `local` the epilogue sends the server's copy, whatever a client holds."""
    model, data = normalised_model()
    fed = federation(model, [data], "ccvr(samples=5, epochs=1) + fedpart(full_rounds=1)", rounds=2, buffers="local")
    fed.fit()
    (last,) = fed._server.open(fed.state, [0], fs.Work())
    assert set(last.buffers) == set(fed.state.buffers)
    assert last.to_send is None or set(last.buffers) <= set(last.to_send)
