"""Many clients trained at once equal one after the other, up to rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.client import vectorised
from fedstrata.client.dense import POINTWISE
from fedstrata.core.rng import derive, generator
from fedstrata.core.technique import Batch, ClientView, Hooks, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.tasks.classification import Classification
from fedstrata.techniques.fedavgm import FedAvgM
from fedstrata.techniques.feddyn import FedDyn
from fedstrata.techniques.fedimpro import FedImpro
from fedstrata.techniques.fedlc import FedLC
from fedstrata.techniques.fednlr import FedNLR
from fedstrata.techniques.fednova import FedNova
from fedstrata.techniques.fedprox import FedProx
from fedstrata.techniques.fedrs import FedRS
from fedstrata.techniques.fedspeed import FedSpeed
from fedstrata.techniques.moon import Moon
from fedstrata.techniques.perturb import Perturb
from fedstrata.techniques.scaffold import Scaffold
from tests.contract.standins import Limit, Pace, Pull, Turn
from tests.engines.worlds import (
    SIZES,
    Shaken,
    check_close,
    check_same,
    convnet,
    federation,
    flat,
    mlp,
    pictures,
    points,
    records,
    run,
    seeded,
)

# The equation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", ["examples", "uniform"])
def test_one_step_of_two_unequal_clients_by_hand(weight: Any) -> None:
    """Softmax regression, one step over all of a client's examples, in NumPy float64.

    With p = softmax(XWᵀ + b) and Y one-hot, ∂L/∂W = (p − Y)ᵀX/n and ∂L/∂b = Σ(p − Y)/n; each client moves by −lr times
    its own gradient, n being its own number of examples (7 and 3) although their batches are padded to the longer one.
    The server adds Σ n_k Δ_k / Σ n_k, or the plain mean.
    """
    model = seeded(lambda: nn.Linear(6, 4))
    data = flat(7, 3)
    fed = run(
        model, data, (), engine="vmap", rounds=1, participation=1.0, batch_size=10, lr=0.7, method=f"fedavg({weight=})"
    )
    w, b = model.weight.detach().double().numpy(), model.bias.detach().double().numpy()
    moves = []
    for x, y in data:
        inputs = x.double().numpy()
        z = inputs @ w.T + b
        p = np.exp(z - z.max(1, keepdims=True))
        error = p / p.sum(1, keepdims=True) - np.eye(4)[y.numpy()]
        moves.append((-0.7 * error.T @ inputs / len(y), -0.7 * error.sum(0) / len(y)))
    shares = np.array([0.7, 0.3]) if weight == "examples" else np.array([0.5, 0.5])
    for name, start, changes in (("weight", w, [m[0] for m in moves]), ("bias", b, [m[1] for m in moves])):
        expected = start + sum(share * change for share, change in zip(shares, changes, strict=True))
        np.testing.assert_allclose(fed.state.params[name].numpy(), expected, rtol=0, atol=1e-6)
        assert np.abs(expected - start).max() > 0.01


def test_unequal_numbers_of_steps_by_hand() -> None:
    """One client takes three steps of one example, the other one step: the second stands still while the first goes on.

    A model of one weight per class and no input but 1: logits are w, so a step with label y is w ← w − lr·(softmax(w) −
    e_y), the same in any order for the first client, whose labels are all 0.
    """

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([0.3, -0.2]))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w

    data = [(torch.ones(3, 1), torch.tensor([0, 0, 0])), (torch.ones(1, 1), torch.tensor([1]))]
    fed = run(Weights(), data, (), engine="vmap", rounds=1, participation=1.0, batch_size=1, lr=0.5)
    ends = []
    for labels in ([0, 0, 0], [1]):
        w = np.array([0.3, -0.2])
        for label in labels:
            p = np.exp(w) / np.exp(w).sum()
            w = w - 0.5 * (p - np.eye(2)[label])
        ends.append(w)
    np.testing.assert_allclose(fed.state.params["w"].numpy(), 0.75 * ends[0] + 0.25 * ends[1], rtol=0, atol=1e-6)
    assert fed.records[0].steps == 4


# Against one after the other -----------------------------------------------------------------------------------------


def grouped() -> nn.Module:
    return convnet(lambda channels: nn.GroupNorm(2, channels))


def layered() -> nn.Sequential:
    layers = lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))  # noqa: E731
    model: nn.Sequential = seeded(layers)
    return model


def images(made: Any = pictures) -> dict[str, Any]:
    return {"clients": [made(size, seed) for seed, size in enumerate(SIZES)], "test": pictures(40, 99)}


def floats(size: int, seed: int) -> tuple[Tensor, Tensor]:
    x, y = pictures(size, seed)
    return x.float() / 255, y


def pooled() -> list[fs.TensorExamples]:
    """Clients whose examples are rows of one tensor, as those of a named dataset are."""
    x, y = points(89, 3)
    whole = fs.TensorExamples(x, y)
    parts = torch.split(torch.randperm(89, generator=torch.Generator().manual_seed(1)), list(SIZES))
    return [whole.select(part) for part in parts]


class Tied(nn.Module):
    """A model of its own code, in which a layer is used twice and another not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.idle = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        logits: Tensor = self.head(torch.tanh(self.twice(torch.tanh(self.twice(x)))))
        return logits


def frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    return model


def dropping() -> nn.Sequential:
    """Two layers that drop, one of them before a stage of several."""
    inner = lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5))  # noqa: E731
    layers = lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 8), inner(), nn.Linear(8, 4))  # noqa: E731
    model: nn.Sequential = seeded(layers)
    return model


def repeating() -> nn.Sequential:
    """The same activation, and the same dropout, after two layers."""

    def layers() -> nn.Module:
        act, drop = nn.Tanh(), nn.Dropout(0.3)
        return nn.Sequential(nn.Linear(6, 8), act, drop, nn.Linear(8, 8), act, drop, nn.Linear(8, 4))

    model: nn.Sequential = seeded(layers)
    return model


CASES: dict[str, Any] = {
    "plain": dict,
    "everybody, epochs": lambda: {"participation": 1.0, "epochs": 3},
    "steps": lambda: {"steps": 4, "participation": 1.0},
    "equal clients": lambda: {"clients": flat(10, 10, 10, 10), "participation": 1.0},
    "one client": lambda: {"participation": 1},
    "batches larger than clients": lambda: {"batch_size": 100, "participation": 1.0},
    "batches of one": lambda: {"batch_size": 1},
    "momentum": lambda: {"optimizer": "momentum"},
    "nesterov, weight decay": lambda: {"optimizer": "sgd(momentum=0.9, nesterov=True, weight_decay=0.01)"},
    "adam": lambda: {"optimizer": "adam(eps=0.001)", "lr": 0.01},
    "adam, weight decay": lambda: {"optimizer": "adam(eps=0.001, weight_decay=0.1)", "lr": 0.01, "steps": 3},
    "adamw": lambda: {"optimizer": "adamw(eps=0.001, weight_decay=0.1)", "lr": 0.01},
    "clip": lambda: {"clip": 0.3, "lr": 0.2},
    "schedule": lambda: {"schedule": "cosine", "rounds": 4},
    "layer norm": lambda: {"model": layered()},
    "group norm, bytes": lambda: {"model": grouped(), **images()},
    "group norm, floats": lambda: {"model": grouped(), **images(floats)},
    "own code, idle layer": lambda: {"model": seeded(Tied), "optimizer": "sgd(momentum=0.5, weight_decay=0.1)"},
    "frozen": lambda: {"model": frozen(), "optimizer": "sgd(weight_decay=0.1)"},
    "random transforms": lambda: {"clients": [Shaken(pair) for pair in flat()], "participation": 1.0},
    "some Datasets, some tensors": lambda: {"clients": [*flat()[:3], *map(Shaken, flat()[3:])], "participation": 1.0},
    "one tensor for all": lambda: {"clients": pooled(), "participation": 1.0},
    "server": lambda: {"method": "fedavg(weight='uniform', server_lr=0.5)"},
    "dropout": lambda: {"model": dropping(), "participation": 1.0, "epochs": 2},
    "dropout, one tensor for all": lambda: {"model": dropping(), "clients": pooled(), "participation": 1.0},
    "dropout, random transforms": lambda: {"model": dropping(), "clients": [Shaken(p) for p in flat()]},
    "layers that repeat": lambda: {"model": repeating(), "steps": 3},
    "more clients than a cohort": lambda: {"clients": flat(*range(2, 42)), "participation": 1.0},
}


STACKED = [
    *("plain", "everybody, epochs", "equal clients", "adam, weight decay", "clip", "layer norm", "frozen", "steps"),
    *("dropout", "dropout, one tensor for all", "dropout, random transforms", "layers that repeat"),
]
"""Cases of dense models, which are trained by products of stacks; they must go through `torch.func` as well."""


@pytest.fixture
def only_func(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is trained through `torch.func`, also what need not be."""
    monkeypatch.setattr(vectorised, "chain_of", lambda group: None)


@pytest.mark.parametrize("case", STACKED)
@pytest.mark.usefixtures("only_func")
def test_dense_models_through_torch_func(case: str) -> None:
    check_close(run(**CASES[case](), engine="vmap"), run(**CASES[case](), engine="serial"))


@pytest.mark.usefixtures("only_func")
def test_techniques_through_torch_func() -> None:
    settings: dict[str, Any] = {"method": fs.chain(Scaffold(), FedDyn(), FedProx(mu=0.3)), "rounds": 4, "steps": 3}
    check_close(run(**settings, engine="vmap"), run(**settings, engine="serial"))


@pytest.mark.parametrize("case", CASES)
def test_equals_one_after_the_other(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and losses within 1e-5; FLOPs, steps, examples and bytes the same."""
    if case in STACKED:
        monkeypatch.setattr(vectorised, "vmap", None)  # what is stacked needs none
    found, reference = run(**CASES[case](), engine="vmap"), run(**CASES[case](), engine="serial")
    assert found.engine == "vmap"
    check_close(found, reference)
    start = federation(**CASES[case](), engine="serial").state.params
    moved = max((reference.state.params[n] - p).abs().max().item() for n, p in start.items())
    assert moved > 1e-3  # so that standing still would be seen


@pytest.mark.parametrize("layer", POINTWISE)
def test_every_layer_of_a_chain(layer: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of unequal numbers of steps, with a state of the optimiser that goes on, and padded rows."""
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 8, bias=False), layer(), nn.Linear(8, 4)))
    monkeypatch.setattr(vectorised, "vmap", None)
    settings: dict[str, Any] = {"optimizer": "sgd(momentum=0.9, weight_decay=0.01)", "epochs": 2, "batch_size": 4}
    check_close(run(model, **settings, engine="vmap"), run(model, **settings, engine="serial"))


@pytest.mark.parametrize(
    "method",
    [
        *("fedprox(mu=0.5)", "scaffold", "feddyn", "scaffold + feddyn + fedprox(mu=0.2)"),
        *("fednlr", "fednlr(shuffle=True)", "perturb(noise=0.5)", "fednlr + perturb + scaffold"),
    ],
)
@pytest.mark.parametrize("how", [{}, {"optimizer": "momentum", "clip": 0.5}], ids=["sgd", "momentum"])
def test_techniques_that_stack(method: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of a group remember something and others nothing yet; memories and control variates come out the same."""
    monkeypatch.setattr(vectorised, "vmap", None)
    settings = {"method": method, "rounds": 5, "participation": 3, "steps": 3, **how}
    found, reference = run(**settings, engine="vmap"), run(**settings, engine="serial")
    check_close(found, reference)
    for client in range(len(SIZES)):
        ours, theirs = found.memory(client), reference.memory(client)
        assert ours.keys() == theirs.keys()
        for name, slot in theirs.items():
            for n, value in slot.items():
                torch.testing.assert_close(ours[name][n], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("fedpart", {"epochs": 3}),
        ("fedpart", {"steps": 20, "clients": pooled()}),
        ("scaffold + fedpart", {"steps": 20}),
    ],
)
def test_what_lies_below_is_computed_once_per_visit(
    method: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the FLOPs of one after the other, which are fewer than without `cache_prefix`."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    plans = [f"{method}(full_rounds=1, rounds_per_stratum=1, cache_prefix={cached})" for cached in (True, False)]
    monkeypatch.setattr(vectorised, "vmap", None)
    settings: dict[str, Any] = {"rounds": 4, "participation": 1.0, **how}
    cached, other = (run(model, method=plan, **settings, engine="vmap") for plan in plans)
    check_close(cached, run(model, method=plans[0], **settings, engine="serial"), memory=0.5)  # as if none were cached
    fewer = [a.flops < b.flops for a, b in zip(cached.records, other.records, strict=True)]
    assert fewer == [False, False, True, True]


def test_a_technique_that_stacks_has_no_other_hooks() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Technique):
        name: ClassVar[str] = "wrong"
        vectorises: ClassVar[bool] = True
        stacks: ClassVar[bool] = True

        def local(self, view: ClientView) -> Hooks:
            return Hooks(output=lambda batch: batch.logits * 2)

    with pytest.raises(fs.UsageError, match="a technique that stacks has no output hook"):
        run(method=fs.chain(Wrong()), engine="vmap", steps=2)


@dataclass(frozen=True, kw_only=True)
class OwnBody(Technique):
    """Only the head travels: a client keeps the rest of its model."""

    name: ClassVar[str] = "own_body"

    def plan(self, assignment: fs.Assignment, strata: tuple[fs.Stratum, ...], state: Tensors) -> fs.Assignment:
        return replace(assignment, uploads=strata[-1].params)


METHODS: dict[str, tuple[Technique, ...]] = {
    "loss": (Pull(mu=0.5),),
    "control variates": (Scaffold(),),
    "output": (FedRS(),),
    "scale": (Pace(),),
    "gradient elsewhere": (FedSpeed(),),
    "memory": (Limit(limit=0.05),),
    "one layer at a time": (Turn(), Pull(mu=0.5)),
    "mean over rows": (Moon(),),
    "mean over rows, a layer's output": (Moon(stage="0"), Scaffold()),
    "mean over rows, class counts": (FedLC(denominator="others"),),
    "draws in every step": (FedImpro(split="1"),),
    "draws, fewer than rows, and what is packed": (
        FedImpro(split=1, sampled=0.4, noise=0.01, counts=True, std_cap=0.5, loss="mean", variance="pooled"),
        Scaffold(),
    ),
    "noise on what is sent": (Perturb(noise=0.5), Pull(mu=0.5)),
    "a pass over all examples": (FedNLR(),),
    "a pass with a model of one's own": (FedNLR(), OwnBody()),
    "server": (FedNova(), FedAvgM()),
    "many": (Pull(mu=0.5), Scaffold(), FedRS(), Pace(), FedDyn(), Limit(limit=0.05), FedNova(), Turn()),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "how", [{"epochs": 2}, {"steps": 3, "optimizer": "momentum", "clip": 0.5}], ids=["epochs", "steps"]
)
def test_techniques_equal_one_after_the_other(name: str, how: dict[str, Any]) -> None:
    """Clients come and go, so that some of a cohort remember something and others nothing yet."""
    settings = {"method": fs.chain(*METHODS[name], weight="examples"), "rounds": 5, "participation": 3, **how}
    check_close(run(**settings, engine="vmap"), run(**settings, engine="serial"))


@pytest.mark.parametrize("method", ["moon(stage='second') + fednlr", "fednlr + scaffold"])
def test_techniques_on_convolutions(method: str) -> None:
    settings = {"model": grouped(), **images(floats), "method": method, "rounds": 4, "participation": 3}
    check_close(run(**settings, engine="vmap"), run(**settings, engine="serial"))


@pytest.mark.parametrize("method", ["fedspeed", "moon", "scaffold + fednlr + perturb", "fedlc(denominator='others')"])
@pytest.mark.parametrize("how", [{"epochs": 2}, {"steps": 3}], ids=["epochs", "steps"])
def test_techniques_beside_dropout(method: str, how: dict[str, Any]) -> None:
    """One asks for a second gradient, for which dropout draws again; one for passes in which nothing is dropped."""
    settings = {"model": dropping(), "method": method, "rounds": 4, "participation": 3, **how}
    check_close(run(**settings, engine="vmap"), run(**settings, engine="serial"))


def test_what_clients_remember_equals() -> None:
    settings: dict[str, Any] = {"method": fs.chain(Scaffold(), Limit()), "rounds": 4}
    found, reference = run(**settings, engine="vmap"), run(**settings, engine="serial")
    compared = 0
    for client in range(len(SIZES)):
        ours, theirs = (f.memory(client) for f in (found, reference))
        assert ours.keys() == theirs.keys()
        for technique, slot in theirs.items():
            assert ours[technique].keys() == slot.keys()
            for n, value in slot.items():
                torch.testing.assert_close(ours[technique][n], value, rtol=0, atol=1e-5)
                compared += 1
    assert compared > 20


def test_sub_models() -> None:
    def stages(*names: str) -> nn.Sequential:
        made = {"first": nn.Linear(6, 8), "relu": nn.ReLU(), "second": nn.Linear(8, 8), "head": nn.Linear(8, 4)}
        net = nn.Sequential()
        for name in names:
            net.add_module(name, made[name])
        return net

    whole = seeded(lambda: stages("first", "relu", "second", "head"))
    settings: dict[str, Any] = {
        "archs": {"shallow": stages("first", "relu", "head")},
        "arch_of": lambda client: "shallow" if client in (1, 3) else "",
        "participation": 1.0,
    }
    check_close(run(whole, **settings, engine="vmap"), run(whole, **settings, engine="serial"))


@dataclass(frozen=True, kw_only=True)
class Balance(Technique):
    """Takes class counts on the client: logits shifted by the logarithm of each class's share (as FedLC)."""

    name: ClassVar[str] = "balance"
    vectorises: ClassVar[bool] = True

    def local(self, view: ClientView) -> Hooks:
        counts = view.counts()
        shift = torch.log((counts + 1) / (counts.sum() + len(counts)))
        return Hooks(output=lambda batch: batch.logits + shift, finish=lambda delta, tally: ({"counts": counts}, None))

    def apply(self, state: Tensors, delta: Tensors, round: Any) -> tuple[Tensors, Tensors]:
        return delta, {"counts": torch.stack([u.slots["balance"]["counts"] for u in round.updates])}


def test_class_counts() -> None:
    """Each client's own, as many as the model has outputs, although nobody has examples of all classes."""
    data = flat()
    settings: dict[str, Any] = {"method": fs.chain(Balance()), "participation": 1.0, "clients": data}
    found = run(**settings, engine="vmap")
    check_close(found, run(**settings, engine="serial"))
    expected = torch.stack([torch.bincount(y, minlength=4).float() for _, y in data])
    assert torch.equal(found.state.techniques["balance"]["counts"], expected)


@dataclass(frozen=True, kw_only=True)
class Look(Technique):
    """Door `prepare`: the mean of what goes into a module, over a client's examples and its positions, is sent."""

    name: ClassVar[str] = "look"
    vectorises: ClassVar[bool] = True
    place: str = "0"

    def prepare(self, view: ClientView) -> Tensors:
        total: list[Any] = [0.0, 0]

        def see(there: Tensor) -> None:
            sums, count = view.sum_rows(there.movedim(1, -1).flatten(0, -2))
            total[:] = [total[0] + sums, total[1] + count]

        view.observe({fs.Into(self.place): see})
        return {"mean": total[0] / total[1]}

    def local(self, view: ClientView) -> Hooks:
        mean = view.prepared["mean"]
        return Hooks(finish=lambda delta, tally: ({"mean": mean}, None))

    def apply(self, state: Tensors, delta: Tensors, round: Any) -> tuple[Tensors, Tensors]:
        return delta, {"means": torch.stack([u.slots["look"]["mean"] for u in round.updates])}


LOOKS: dict[str, Any] = {
    "unequal clients": dict,
    "equal clients": lambda: {"clients": flat(8, 8, 8)},
    "one tensor for all": lambda: {"clients": pooled()},
    "client by client": lambda: {"clients": [flat(3, 5)[0], (torch.randn(5000, 6), torch.zeros(5000, dtype=int))]},
    "random transforms": lambda: {"clients": [Shaken(pair) for pair in flat()]},
    "pictures": lambda: {"model": grouped(), **images(floats)},
}


@pytest.mark.parametrize("case", LOOKS)
def test_what_is_prepared_is_each_clients_own(case: str) -> None:
    """Where the examples are tensors of numbers, also against a mean by hand."""
    place = "first" if case == "pictures" else "0"
    settings: dict[str, Any] = {"participation": 1.0, "rounds": 1, "steps": 2, "method": fs.chain(Look(place=place))}
    settings |= LOOKS[case]()
    found, reference = run(**settings, engine="vmap"), run(**settings, engine="serial")
    check_close(found, reference)
    means = found.state.techniques["look"]["means"]
    torch.testing.assert_close(means, reference.state.techniques["look"]["means"])
    if case in ("unequal clients", "pictures"):
        clients = settings.get("clients", flat())
        by_hand = torch.stack([x.movedim(1, -1).flatten(0, -2).mean(0) for x, _ in clients])
        torch.testing.assert_close(means, by_hand)


@dataclass(frozen=True, kw_only=True)
class Dice(Technique):
    """Doors `draws` and `pack`: what is drawn is summed up, and as many numbers travel as there were steps."""

    name: ClassVar[str] = "dice"
    vectorises: ClassVar[bool] = True

    def draws(self, view: ClientView) -> Any:
        return lambda rows: {"dice": torch.randint(1, 7, (rows,), generator=view.rng)}

    def local(self, view: ClientView) -> Hooks:
        def tally(total: Tensors, grads: Tensors, batch: Batch) -> Tensors:
            thrown = view.draw(batch)["dice"].sum()
            return {"sum": total.get("sum", 0) + thrown, "steps": total.get("steps", torch.zeros(())) + 1}

        return Hooks(tally=tally, finish=lambda delta, tally: (dict(tally), None))

    def pack(self, slot: Tensors, view: ClientView) -> Tensors:
        last = torch.randint(1, 7, (int(slot["steps"]),), generator=view.rng)
        return {"all": torch.cat([slot["sum"][None], last])}

    def apply(self, state: Tensors, delta: Tensors, round: Any) -> tuple[Tensors, Tensors]:
        return delta, {str(u.client): u.slots["dice"]["all"] for u in round.updates}


@pytest.mark.parametrize("workers", [1, 2])
def test_random_numbers_are_those_of_one_client_alone(workers: int) -> None:
    """By hand: each client throws for its own rows, step by step, and goes on in the same stream when it packs."""
    settings: dict[str, Any] = {"method": fs.chain(Dice()), "participation": 1.0, "rounds": 1}
    found = run(**settings, engine="vmap", workers=workers).state.techniques["dice"]
    assert found.keys() == {str(client) for client in range(len(SIZES))}
    for client, size in enumerate(SIZES):
        rng = generator(derive(0, "visit", 0, client), "dice")
        steps = [min(5, size - begin) for begin in range(0, size, 5)]
        thrown = sum(int(torch.randint(1, 7, (rows,), generator=rng).sum()) for rows in steps)
        assert found[str(client)].tolist() == [thrown, *torch.randint(1, 7, (len(steps),), generator=rng).tolist()]


@dataclass(frozen=True, kw_only=True)
class Nosy(Technique):
    """Promises to vectorise, and reads examples nevertheless."""

    name: ClassVar[str] = "nosy"
    vectorises: ClassVar[bool] = True
    what: str = "labels"

    def local(self, view: ClientView) -> Hooks:
        if self.what == "labels":
            view.data.labels()
        elif self.what == "batch":
            view.data.batch(torch.arange(2))
        else:
            len(view.data)
        return Hooks()


@pytest.mark.parametrize("what", ["labels", "batch", "len"])
def test_a_technique_that_breaks_its_promise(what: str) -> None:
    with pytest.raises(fs.UsageError, match=r"takes class counts from view.counts\(\), and reads no examples"):
        run(method=fs.chain(Nosy(what=what)), engine="vmap")


@dataclass(frozen=True, kw_only=True)
class Personal(Technique):
    """Does something else for every client, or in every round: one visit of many cannot serve them all."""

    name: ClassVar[str] = "personal"
    vectorises: ClassVar[bool] = True
    what: str = "client"

    def local(self, view: ClientView) -> Hooks:
        factor = 1.0 + getattr(view.assignment, self.what)
        return Hooks(output=lambda batch: batch.logits / factor)


@pytest.mark.parametrize("what", ["client", "round", "seed"])
def test_a_technique_that_knows_whose_visit_it_is(what: str) -> None:
    with pytest.raises(fs.UsageError, match=f"cannot read its assignment's {what}: many clients share it"):
        run(method=fs.chain(Personal(what=what)), engine="vmap")


@dataclass(frozen=True, kw_only=True)
class Tallies(Technique):
    """Counts steps and rows, which padding must not change."""

    name: ClassVar[str] = "tallies"
    vectorises: ClassVar[bool] = True

    def local(self, view: ClientView) -> Hooks:
        def tally(total: Tensors, grads: Tensors, batch: Batch) -> Tensors:
            return {"steps": total.get("steps", torch.zeros(())) + 1}

        return Hooks(tally=tally, finish=lambda delta, tally: (dict(tally), None))

    def accumulate(self, total: Tensors, slot: Tensors, delta: Tensors, weight: float) -> Tensors:
        return {"steps": torch.cat([total.get("steps", torch.zeros(0)), slot["steps"][None]])}

    def apply(self, state: Tensors, delta: Tensors, round: Any) -> tuple[Tensors, Tensors]:
        return delta, dict(round.totals["tallies"])


def test_a_tally_ends_with_the_clients_own_last_step() -> None:
    settings: dict[str, Any] = {"method": fs.chain(Tallies()), "participation": 1.0, "rounds": 1}
    for engine in ("vmap", "serial"):
        steps = run(**settings, engine=engine).state.techniques["tallies"]["steps"]
        assert steps.tolist() == [-(-size // 5) for size in SIZES]


@dataclass(frozen=True, kw_only=True)
class Rest(fs.Technique):
    """Nobody trains in the first round."""

    name: ClassVar[str] = "rest"

    def plan(self, assignment: fs.Assignment, strata: tuple[fs.Stratum, ...], state: Tensors) -> fs.Assignment:
        return assignment if assignment.round else replace(assignment, trains=(), uploads=())


def test_a_round_in_which_nothing_trains() -> None:
    """There is nothing to do: no steps, and nothing moves."""
    settings: dict[str, Any] = {"method": fs.chain(Rest()), "rounds": 2}
    found, reference = run(frozen(), **settings, engine="vmap"), run(frozen(), **settings, engine="serial")
    check_close(found, reference)
    assert [r.steps > 0 for r in found.records] == [False, True]


def test_a_technique_that_only_works_on_the_server_needs_no_promise() -> None:
    assert not FedAvgM.vectorises
    assert not FedNova.vectorises
    assert federation(method=fs.chain(FedAvgM(), FedNova()), engine="vmap").engine == "vmap"
    with pytest.raises(fs.UsageError, match="'fedimpro'"):
        federation(method=fs.chain(FedImpro(split="1", form="released")), engine="vmap")


def test_the_same_seed_gives_the_same_bits() -> None:
    check_same(run(engine="vmap"), run(engine="vmap"))
    other = run(engine="vmap", seed=1)
    assert records(other) != records(run(engine="vmap"))


@pytest.mark.parametrize("method", ["fedavg", "fednlr"])
def test_a_client_does_not_feel_who_is_beside_it(method: str) -> None:
    """One client's NaN stays its own: it is refused, and the others' updates are what they were without it."""
    clients = flat()
    x, y = clients[2]
    clients[2] = (torch.full_like(x, 3e38), y)
    settings: dict[str, Any] = {"clients": clients, "participation": 1.0, "rounds": 1, "method": method}
    found, reference = run(**settings, engine="vmap"), run(**settings, engine="serial")
    assert [r["client"] for r in found.records[0].refused] == [2]
    assert [r["client"] for r in reference.records[0].refused] == [2]
    for name, value in reference.state.params.items():
        torch.testing.assert_close(found.state.params[name], value, rtol=0, atol=1e-5)


def test_stopped_and_resumed(tmp_path: Any) -> None:
    settings: dict[str, Any] = {"engine": "vmap", "method": fs.chain(Scaffold(), Limit()), "rounds": 4}
    whole = run(**settings)
    stopped = federation(**settings, out=tmp_path / "run", checkpoint_seconds=0)
    rounds = stopped.rounds()
    next(rounds), next(rounds)
    rounds.close()
    check_same(run(**settings, out=tmp_path / "run", checkpoint_seconds=0, resume=True, workers=2), whole)


@dataclass(frozen=True, kw_only=True)
class _Focal(Classification):
    """A loss of a user's own, on top of cross-entropy."""

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses, weights = self.terms(outputs, targets)
        return losses.sum() / weights.sum()

    def terms(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses, weights = super().terms(outputs, targets)
        return losses * (1 - torch.exp(-losses)) ** 2, weights


def test_a_loss_that_is_derived_from_cross_entropy() -> None:
    check_close(run(task=_Focal(), engine="vmap"), run(task=_Focal(), engine="serial"))
