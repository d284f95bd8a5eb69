"""FedImpro, Tang et al. 2024.

With `std_cap=0` a sampled feature is its class's mean, so that whole rounds can be worked out: statistics in NumPy, the
loss in a few lines of torch. Batches hold six rows and there are one, two or three known classes, so that balanced
labels are equally many of each. The order of a visit's batches is the assignment's own.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Update
from fedstrata.data.batching import batches
from fedstrata.models.registry import build_model
from fedstrata.system.machine import compute_with
from fedstrata.techniques.fedimpro import FedImpro
from fedstrata.techniques.fedlc import FedLC
from fedstrata.techniques.fedpart import FedPart
from fedstrata.techniques.fedrs import FedRS
from tests.techniques.worlds import (
    CLASSES,
    HIDDEN,
    INPUTS,
    ClientData,
    Vector,
    federation,
    flat,
    linear,
    party,
    tensors,
)

both_forms = pytest.mark.parametrize("form", ["paper", "released"])
Stats = dict[int, tuple[Vector, Vector]]
"""Class → mean and variance of its features."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with compute_with(1):
        yield


# The reference --------------------------------------------------------------------------------------------


def collect_statistics(stats: Stats, h: Vector, y: Vector, t: FedImpro) -> Stats:
    """Eq. 6 for one batch: μ ← β_m μ + (1 − β_m) mean(h), σ ← β_m σ + (1 − β_m) variance(h), class by class.

    A class that is new starts with its batch's. As released, the average is that of √σ, and where a batch has a single
    row of a class it moves the mean only.
    """
    after, beta = dict(stats), t.beta_client
    for c in np.unique(y).tolist():
        rows = h[y == c]
        axes = (0, *range(2, h.ndim)) if t.per == "channel" and h.ndim == 4 else (0,)
        mean, variance = rows.mean(axes), rows.var(axes)
        single = t.form == "released" and math.prod(rows.shape[a] for a in axes) == 1
        if c not in stats:
            after[c] = mean, variance * (not single)
            continue
        old, spread = stats[c]
        if t.form == "paper":
            spread = beta * spread + (1 - beta) * variance
        elif not single:
            spread = (beta * np.sqrt(spread.clip(0)) + (1 - beta) * np.sqrt(variance)) ** 2
        after[c] = beta * old + (1 - beta) * mean, spread
    return after


def merge_statistics(known: Stats, sent: Sequence[Stats], sizes: Sequence[Vector], t: FedImpro) -> Stats:
    """Eq. 7: μ_g ← β_g μ_g + (1 − β_g)·average over those that hold the class, and the same for σ_g.

    Pooled, the variance of the clients' means is added to the average of their variances.
    """
    after = dict(known)
    for c in {c for stats in sent for c in stats}:
        weights = [n[c] if t.counts else 1.0 for s, n in zip(sent, sizes, strict=True) if c in s]
        new = [np.average([s[c][i] for s in sent if c in s], axis=0, weights=weights) for i in (0, 1)]
        if t.variance == "pooled":
            away = [(s[c][0] - new[0]) ** 2 for s in sent if c in s]
            new[1] = new[1] + np.average(away, axis=0, weights=weights)
        old, beta = known.get(c, new), t.beta_server if c in known else 0.0
        after[c] = beta * old[0] + (1 - beta) * new[0], beta * old[1] + (1 - beta) * new[1]
    return after


Output = Callable[[Tensor, Tensor], Tensor]
"""(logits of real rows, the client's examples of each class) → logits for the loss."""


@dataclass
class Reference:
    """A federation worked out again: the model is cut before its child number `cut`."""

    t: FedImpro
    model: nn.Sequential
    cut: int
    clients: Sequence[ClientData]
    output: Output = lambda logits, counts: logits

    def __post_init__(self) -> None:
        self.model, self.known = copy.deepcopy(self.model).train(), {}

    def follow(self, asked: Sequence[Assignment]) -> list[Stats]:
        """One round; what its clients send. The new model is Σ n_k w_k / Σ n_k."""
        start, ends, sent = copy.deepcopy(self.model.state_dict()), [], []
        for a in asked:
            self.model.load_state_dict(start)
            sent.append(self.visit(a))
            ends.append(copy.deepcopy(self.model.state_dict()))
        sizes = [np.bincount(self.clients[a.client][1], minlength=CLASSES) for a in asked]
        total = sum(n.sum() for n in sizes)
        shares = [float(n.sum() / total) for n in sizes]
        self.model.load_state_dict({k: sum(p * e[k] for p, e in zip(shares, ends, strict=True)) for k in start})
        self.known = merge_statistics(self.known, sent, sizes, self.t)
        return sent

    def visit(self, a: Assignment) -> Stats:
        t, (inputs, labels) = self.t, tensors(self.clients[a.client])
        top = {"ramp": 1.0, "ramp-to-2": 2.0}
        weight = min(top[t.weight], 2 * a.round / a.rounds) if isinstance(t.weight, str) else t.weight
        counts = torch.bincount(labels, minlength=CLASSES)
        leaves = {n: p for n, p in self.model.named_parameters() if n in a.trains}
        samples = self.known and any(int(n.partition(".")[0]) >= self.cut for n in leaves)
        own: Stats = dict(self.known) if t.form == "released" else {}
        for index in batches(len(labels), a.work, generator(a.seed, "order"), False):
            x, y = inputs[index], labels[index]
            h = self.model[: self.cut](x)
            source = own if t.form == "released" else self.known
            loss = self.loss(h, y, source if samples else {}, weight, counts)
            grads = torch.autograd.grad(loss, list(leaves.values()))
            for p, g in zip(leaves.values(), grads, strict=True):
                p.data -= a.work.lr * g
            own = collect_statistics(own, h.detach().numpy(), y.numpy(), t)
        return {c: own[c] for c in own if counts[c]}

    def loss(self, h: Tensor, y: Tensor, source: Stats, weight: float, counts: Tensor) -> Tensor:
        """CE(high(h), y) + λ·CE(high(ĥ), ŷ), or the mean of both, where ĥ = μ_ŷ.

        ŷ is round(share·n) rows, equally many of each class, or the known ones of the batch's labels over and over.
        """
        high, count = self.model[self.cut :], round(self.t.sampled * len(y))
        labels = [c for c in np.resize(y.numpy(), count).tolist() if c in source]
        if self.t.labels == "balanced" and source:
            repeat, rest = divmod(count, len(source))
            assert rest == 0
            labels = list(source) * repeat
        if not labels:
            return F.cross_entropy(self.output(high(h), counts), y)
        fake = torch.from_numpy(np.stack([source[c][0] for c in labels]))
        fake = fake.reshape(*fake.shape, *[1] * (h.dim() - fake.dim())).expand(-1, *h.shape[1:])
        if self.t.form == "released":
            real, drawn = high(torch.cat([h, fake])).split([len(h), len(fake)])
        else:
            real, still = high(h), {n: b.clone() for n, b in high.named_buffers()}
            drawn = functional_call(high, still, (fake,))
        ours = F.cross_entropy(self.output(real, counts), y, reduction="sum")
        theirs = weight * F.cross_entropy(drawn, torch.tensor(labels), reduction="sum")
        if self.t.loss == "mean":
            return (ours + theirs) / (len(y) + weight * len(labels))
        return ours / len(y) + theirs / len(labels)


# The library ----------------------------------------------------------------------------------------------


@dataclass
class Heard:
    """A federation with what went to and fro, round by round."""

    fed: Any
    asked: list[list[Assignment]]
    slots: list[dict[int, Tensors]]

    @property
    def state(self) -> Tensors:
        state: Tensors = self.fed.state.techniques["fedimpro"]
        return state

    @property
    def model(self) -> Vector:
        return flat(self.fed)


def listening(fed: Any, alter: Callable[[Update], Update] = lambda update: update) -> Heard:
    """Hear what travels, and alter what arrives."""
    heard, original = Heard(fed, [], []), fed._engine.run

    def overheard(assignments: Any, *rest: Any) -> Iterator[Any]:
        heard.asked.append(list(assignments))
        heard.slots.append({})
        for update, memory in original(assignments, *rest):
            if "fedimpro" in update.slots:
                heard.slots[-1][update.client] = copy.deepcopy(update.slots["fedimpro"])
            yield alter(update), memory

    fed._engine.run = overheard
    return heard


def play(
    method: str | FedImpro, clients: Sequence[ClientData], model: nn.Module, *others: fs.Technique, **settings: Any
) -> Heard:
    """All rounds, by default of one pass in batches of six."""
    settings = {"epochs": 1, "batch_size": 6, **settings}
    chosen = method if isinstance(method, str) else fs.chain(method, *others)
    heard = listening(federation(chosen, clients, model, **settings))
    heard.fed.fit()
    return heard


def net(*above: nn.Module) -> nn.Sequential:
    """Features are what child 1 puts out: four numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), *above, nn.Linear(HIDDEN, CLASSES)).double()


def deep(*inside: nn.Module) -> nn.Sequential:
    """Two layers above the split."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return net(*inside, nn.Linear(HIDDEN, HIDDEN), nn.Tanh())


def conv(*above: nn.Module) -> nn.Sequential:
    """Features are what child 1 puts out: two channels of 3×3 places."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), *above, nn.Flatten(), nn.Linear(18, CLASSES)).double()


def people() -> list[ClientData]:
    """Three clients; class 0 is unknown to the last, class 2 to the others."""
    labels = ([0] * 7 + [1] * 11, [0] * 8 + [1] * 4, [1] * 3 + [2] * 9)
    return [party(some, seed) for seed, some in enumerate(labels)]


def images() -> list[ClientData]:
    """The same labels."""
    rng = np.random.default_rng(2)
    return [(rng.normal(size=(len(y), 1, 4, 4)), y) for _, y in people()]


def same_stats(slot: Tensors, stats: Stats) -> None:
    """What travelled or is kept: a mask over all classes, and one row for each that is in it, in class order."""
    assert slot["known"].dtype == torch.uint8
    assert slot["known"].tolist() == [int(c in stats) for c in range(CLASSES)]
    for i, name in enumerate(("mean", "variance")):
        expected = [stats[c][i] for c in sorted(stats)]
        assert len(slot[name]) == len(expected)
        np.testing.assert_allclose(slot[name], np.reshape(expected, slot[name].shape), rtol=0, atol=1e-9)


def agrees(heard: Heard, reference: Reference) -> None:
    """Every slot down and up in every round, and after all of them the server's state and the model."""
    for asked, slots in zip(heard.asked, heard.slots, strict=True):
        same_stats(asked[0].slots["fedimpro"], reference.known)
        for a, stats in zip(asked, reference.follow(asked), strict=True):
            same_stats(slots[a.client], stats)
            assert ("count" in slots[a.client]) == reference.t.counts
            if reference.t.counts:
                assert slots[a.client]["count"].dtype == torch.int64
                own = reference.clients[a.client][1]
                assert slots[a.client]["count"].tolist() == [(own == c).sum() for c in sorted(stats)]
    known = heard.state["known"].bool()
    kept = {n: v[known] for n, v in heard.state.items() if n != "known"}
    same_stats({"known": heard.state["known"], **kept}, reference.known)
    assert not any(v[~known].any() for v in heard.state.values())
    ours = {**heard.fed.state.params, **heard.fed.state.buffers}
    for name, value in reference.model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-9)


# Rounds worked out ----------------------------------------------------------------------------------------

SEED = 5
"""The last client, and with it class 2, takes part in the second round, and not in the first and third."""
SETTINGS: list[dict[str, Any]] = [
    {},
    {"beta_client": 0.35, "beta_server": 0.8, "weight": 0.4, "counts": True},
    {"beta_client": 0.0, "beta_server": 0.0, "sampled": 2.0, "weight": "ramp"},
    {"sampled": 0.5},
    {"loss": "mean", "weight": "ramp-to-2", "variance": "pooled", "counts": True},
    {"loss": "mean", "labels": "batch", "weight": 0.7, "variance": "pooled", "beta_server": 0.3},
    {"labels": "batch", "sampled": 2.0},
]


@both_forms
@pytest.mark.parametrize("settings", SETTINGS)
def test_statistics_and_training(form: Any, settings: dict[str, Any]) -> None:
    """Two of three clients per round, five rounds, several batches per visit: Eq. 5, 6 and 7 in full.

    Class 2 is nobody's at first, arrives with the last client as it is, and stays where only the others take part.
    Some batches have a single row of a class, where the two forms differ. "ramp" is λ = 0, 0.4, 0.8, 1, 1, and
    "ramp-to-2" goes on. With the batch's labels, class 2 is drawn only once it is known.
    """
    clients = people()
    if settings.get("sampled") == 0.5:  # three rows of one class, or of three
        clients = [party([1] * 12, 0), party([1] * 12, 1), party([0, 2] * 6, 2)]
    t = FedImpro(split="1", std_cap=0.0, form=form, **settings)
    heard = play(t, clients, net(), participation=2, rounds=5, epochs=2, seed=SEED)
    assert [2 in r.clients for r in heard.fed.records[:3]] == [False, True, False]
    agrees(heard, Reference(t, net(), 2, clients))


def test_the_settings_make_a_difference() -> None:
    """Or else the test above could not tell them apart."""
    changes: list[dict[str, Any]] = [{}, {"weight": 0.3}, {"beta_server": 0.3}, {"beta_client": 0.3}, {"counts": True}]
    changes += [{"loss": "mean"}, {"labels": "batch"}, {"weight": "ramp"}, {"weight": "ramp-to-2"}]
    methods = [FedImpro(split="1", std_cap=0.0, form=form, **c) for form in ("paper", "released") for c in changes]  # type: ignore[arg-type]
    ends = [play(t, people(), net(), rounds=4).model for t in methods]
    assert all(np.abs(a - b).max() > 1e-6 for i, a in enumerate(ends) for b in ends[:i])


def test_the_mean_over_all_rows_by_hand() -> None:
    """Appendix C.3 in NumPy, one step of a linear high part: ∇W = (Σ e_i h_iᵀ + λ·Σ ê_j ĥ_jᵀ)/(n + λ·n̂), e = p − 1_y.

    Class 0 of the batch's three is known, and its two rows' ĥ are the mean: n = 6, n̂ = 2, λ = 0.5. The bias below gets
    Σ (Wᵀe_i)·(1 − h_i²)/(n + λ·n̂) of the real rows alone.
    """
    (x, y), lam, lr = party([0, 0, 1, 1, 2, 2], 3), 0.5, 0.1
    t = FedImpro(split="1", std_cap=0.0, loss="mean", labels="batch", weight=lam)
    fed = federation(fs.chain(t), [(x, y)], net(), steps=1, batch_size=6, rounds=1, lr=lr)
    mean, original = np.array([0.3, -0.2, 0.5, 0.1]), fed._engine.run
    slot = {"known": torch.tensor([1, 0, 0], dtype=torch.uint8), "mean": torch.from_numpy(mean)[None]}
    slot["variance"] = torch.zeros(1, HIDDEN, dtype=torch.float64)
    fed._engine.run = lambda asked, *rest: original([replace(a, slots={"fedimpro": slot}) for a in asked], *rest)
    before = {n: p.clone() for n, p in fed.state.params.items()}
    fed.fit()
    low, high = ({n: p.detach().numpy() for n, p in net()[i].named_parameters()} for i in (0, 2))
    h = np.tanh(x @ low["weight"].T + low["bias"])

    def errors(features: Vector, labels: Vector) -> Vector:
        z = np.exp(features @ high["weight"].T + high["bias"])
        return z / z.sum(1, keepdims=True) - np.eye(CLASSES)[labels]

    own, fake = errors(h, y), errors(np.stack([mean, mean]), np.array([0, 0]))
    rows = 6 + lam * 2
    weight = (own.T @ h + lam * fake.T @ np.stack([mean, mean])) / rows
    below = ((own @ high["weight"]) * (1 - h**2)).sum(0) / rows
    for name, gradient in (("2.weight", weight), ("0.bias", below)):
        np.testing.assert_allclose(fed.state.params[name] - before[name], -lr * gradient, rtol=0, atol=1e-12)


def test_pooled_variance_is_that_of_all_rows() -> None:
    """Two clients, a class each of whose rows stands in both as often: NumPy's variance of all their features at once.

    From the slots of one full batch each, as counts weigh them; Eq. 7's is that less the variance of the two means.
    """
    clients = [party([0] * 4 + [1] * 8, 1), party([0] * 6 + [1] * 2, 2)]
    fields: dict[str, Any] = {"split": "1", "counts": True}
    pooled, plain = (
        play(FedImpro(variance=v, **fields), clients, net(), steps=1, batch_size=100, rounds=1)  # type: ignore[arg-type]
        for v in ("pooled", "mean")
    )
    low = net()[0]
    h = [np.tanh(x @ low.weight.detach().numpy().T + low.bias.detach().numpy()) for x, _ in clients]
    for c in (0, 1):
        mine = [f[y == c] for f, (_, y) in zip(h, clients, strict=True)]
        whole = np.concatenate(mine)
        np.testing.assert_allclose(pooled.state["mean"][c], whole.mean(0), rtol=0, atol=1e-12)
        np.testing.assert_allclose(pooled.state["variance"][c], whole.var(0), rtol=0, atol=1e-12)
        within = sum(len(f) * f.var(0) for f in mine) / len(whole)
        np.testing.assert_allclose(plain.state["variance"][c], within, rtol=0, atol=1e-12)


@both_forms
@pytest.mark.parametrize("per", ["element", "channel"])
def test_features_with_channels(form: Any, per: Any) -> None:
    """A channel's mean and variance are over rows and places, and its sampled features are alike in all places."""
    t = FedImpro(split="1", std_cap=0.0, per=per, form=form, beta_client=0.6)
    heard = play(t, images(), conv(), participation=2, seed=SEED)
    assert heard.state["mean"].shape == ((CLASSES, 2) if per == "channel" else (CLASSES, 2, 3, 3))
    agrees(heard, Reference(t, conv(), 2, images()))


NORMS: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "batch": lambda: [nn.BatchNorm2d(2)],
    "instance": lambda: [nn.InstanceNorm2d(2, affine=True, track_running_stats=True)],
    "folded": lambda: [nn.Flatten(2), nn.Flatten(0, 1), nn.BatchNorm1d(9), nn.Unflatten(0, (-1, 2))],
}
"""Norm layers on two channels of 3×3 places; the last one's rows are channels."""


@both_forms
@pytest.mark.parametrize("norm", NORMS)
def test_norm_layers_above_the_split(form: Any, norm: str) -> None:
    """As in the paper, real and sampled rows are normalised apart, and running statistics are those of real rows.

    As released, both go through together. The reference's sampled pass moves copies of them, or rows are joined.
    """
    model = conv(*NORMS[norm]())
    t, other = (FedImpro(split="1", std_cap=0.0, form=f) for f in (form, "paper" if form == "released" else "released"))
    heard, reference, wrong = play(t, images(), model), *(Reference(u, model, 2, images()) for u in (t, other))
    agrees(heard, reference)
    for asked in heard.asked:
        wrong.follow(asked)
    apart = [
        (v - wrong.model.state_dict()[n]).abs().max() for n, v in reference.model.state_dict().items() if "_mean" in n
    ]
    assert max(apart) > 1e-4
    if norm != "instance":  # torch does not count for these
        counted = play(t, images()[:1], model).fed.state.buffers
        assert [int(v) for n, v in counted.items() if "num_batches" in n] == [3 * 3]


@pytest.mark.parametrize("split", ["1", 1])
def test_a_module_that_stands_in_two_places(split: str | int) -> None:
    """An activation that the model uses again further up is no place to look at: refused."""
    model = deep()
    model[3] = model[1]
    with pytest.raises(fs.UsageError, match=r"fedimpro's split: '1' runs 2 times in a pass"):
        play(FedImpro(split=split), people(), model)


@both_forms
def test_below_the_split_nothing_comes_from_sampled_features(form: str) -> None:
    """One step a round. The first round is FedAvg's, for nothing is known yet. In the second, from the same model, the
    change below the split is FedAvg's up to rounding, and to the last bit the same however much sampled features weigh.
    """
    low = HIDDEN * (INPUTS + 1)
    methods = ["fedavg", *(f"fedimpro(split='1', form='{form}', weight={w})" for w in (1.0, 1e6))]
    plain, ours, more = (play(m, people(), net(), steps=1, batch_size=100, rounds=2).model for m in methods)
    np.testing.assert_allclose(ours[:low], plain[:low], rtol=0, atol=1e-14)
    np.testing.assert_array_equal(more[:low], ours[:low])
    assert np.abs(ours[low:] - plain[low:]).max() > 1e-3


def test_without_a_weight_it_is_fedavg() -> None:
    """To the last bit, and to the last byte."""
    methods = "fedimpro(split='1', weight=0.0)", "fedavg"
    ours, plain = (play(m, people(), net(nn.BatchNorm1d(HIDDEN)), epochs=2, batch_size=5).fed for m in methods)
    for name, value in {**plain.state.params, **plain.state.buffers}.items():
        assert torch.equal({**ours.state.params, **ours.state.buffers}[name], value)
    for a, b in zip(ours.records, plain.records, strict=True):
        assert (a.bytes_up, a.bytes_down, a.flops, a.slots_up) == (b.bytes_up, b.bytes_down, b.flops, {})


# Sampling and noise ---------------------------------------------------------------------------------------


class Spy(nn.Module):
    """Keeps what comes by in training."""

    seen: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            Spy.seen.append(x.detach().clone())
        return x


def rows_of_spy(fed: Any) -> Iterator[Tensor]:
    """All rows that the spy sees, round by round."""
    rounds = fed.rounds()
    Spy.seen.clear()
    while next(rounds, None) is not None:
        yield torch.cat(Spy.seen)
        Spy.seen.clear()


def clouds(rows: int, spread: float = 1.0) -> ClientData:
    """Classes 0 and 2, far apart; with a split after a child that changes nothing these are the features."""
    y = np.arange(rows) % 2 * 2
    x = np.random.default_rng(8).normal(size=(rows, 5)) * spread * np.arange(1, 6) + 1000.0 * y[:, None]
    return x, y


def bare(width: int = 5) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        head = nn.Linear(width, CLASSES)
    return nn.Sequential(OrderedDict(inputs=nn.Identity(), spy=Spy(), flat=nn.Flatten(), head=head)).double()


def spy_on(clients: Sequence[ClientData], model: nn.Module | None = None, steps: int = 1, **fields: Any) -> Any:
    """(what the spy sees in the first round, and in the second, what travels)."""
    method = fs.chain(FedImpro(split="inputs", **fields))
    fed = federation(method, clients, model or bare(), steps=steps, batch_size=1000, rounds=2, lr=1e-9)
    heard = listening(fed)
    return *rows_of_spy(fed), heard


def by_class(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The two clouds' rows."""
    return rows[rows[:, 0] < 1000], rows[rows[:, 0] > 1000]


@both_forms
@pytest.mark.parametrize(
    ("share", "rows", "each"), [(1.0, 10, [5, 5]), (1.0, 7, [3, 4]), (0.5, 10, [2, 3]), (2.0, 9, [9, 9])]
)
def test_how_many_are_sampled(form: Any, share: float, rows: int, each: list[int]) -> None:
    """n̂ = round(share·n) rows of the two known classes, as many of each up to one row; class 1 is unknown.

    With a cap of 0 a row is its class's mean, which tells the class.
    """
    first, second, heard = spy_on([clouds(rows)], sampled=share, std_cap=0.0, form=form)
    received = heard.asked[1][0].slots["fedimpro"]
    assert received["known"].tolist() == [1, 0, 1]
    assert len(second) - len(first) == round(share * rows)
    found = [sum(torch.equal(row, mean) for row in second[rows:]) for mean in received["mean"]]
    assert sorted(found) == each


@both_forms
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_a_share_of_hardly_a_row(form: Any, share: float) -> None:
    """Nothing is divided by nothing, and a norm layer has rows enough."""
    for model in (net(), net(nn.BatchNorm1d(HIDDEN))):
        assert np.isfinite(play(FedImpro(split="1", sampled=share, form=form), people(), model).model).all()


@pytest.mark.parametrize(("cap", "form"), [(None, "paper"), (None, "released"), (1.5, "paper"), (1.5, "released")])
def test_sampled_features_have_the_statistics(cap: float | None, form: Any) -> None:
    """n = 10,000 rows per class: means within 5σ/√n of μ, standard deviations within 5σ/√(2n) of σ (or of the cap).

    Elements are independent: correlations within 5/√n of 0.
    """
    *_, rows, heard = spy_on([clouds(200)], sampled=100.0, std_cap=cap, form=form)
    received, rows = heard.asked[1][0].slots["fedimpro"], rows[200:]
    for mean, variance, mine in zip(received["mean"], received["variance"], by_class(rows), strict=True):
        assert mine.shape == (10_000, 5)
        std = variance.sqrt().clamp(max=cap or np.inf)
        assert ((mine.mean(0) - mean).abs() < 5 * std / 100).all()
        assert ((mine.std(0) - std).abs() < 5 * std / 100 / 2**0.5).all()
        assert (torch.corrcoef(mine.T) - torch.eye(5)).abs().max() < 5 / 100


def test_steps_clients_and_places_draw_for_themselves() -> None:
    """Two clients with the same eight images, two steps: 32 sampled ones, with a number of its own in every place."""
    client = np.random.default_rng(1).normal(size=(8, 2, 3, 3)), np.arange(8) % 2
    *_, rows, _ = spy_on([client, client], bare(18), steps=2, per="channel")
    assert len(rows) == 64
    assert len(rows.unique()) == (8 + 32) * 18


@both_forms
def test_a_variance_below_zero_counts_as_zero(form: Any) -> None:
    """Noise far larger than the variances takes half of them below 0: no refusal, and those features do not vary."""
    *_, rows, heard = spy_on([clouds(40, spread=0.01)], noise=5.0, form=form)
    received, rows = heard.asked[1][0].slots["fedimpro"], rows[40:]
    below = received["variance"] < 0
    assert below.any()
    for mean, fixed, mine in zip(received["mean"], below, by_class(rows), strict=True):
        assert torch.equal(mine[:, fixed], mean[fixed].expand(20, -1))
        assert (mine[:, ~fixed].std(0) > 0.1).all()
    assert not any(r.refused for r in heard.fed.records)


def test_noise_on_statistics_and_on_nothing_else() -> None:
    """One round: what is sent with noise σ, less what is sent without, is N(0, σ²), drawn for each number.

    N numbers: their mean is within 4σ/√N of 0, their standard deviation within 4σ/√(2N) of σ, and correlations between
    draws (mean and variance, class and class, client and client) within 4/√N of 0. The two clients are alike.
    """
    width, sigma, one = 4000, 0.3, people()[0]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, CLASSES)).double()
    methods = [FedImpro(split="1", noise=s, counts=True) for s in (0.0, sigma)]
    quiet, loud = (play(t, [one, one], model, rounds=1, lr=0.01) for t in methods)
    np.testing.assert_array_equal(quiet.model, loud.model)
    added = []
    for before, after in zip(quiet.slots[0].values(), loud.slots[0].values(), strict=True):
        assert all(torch.equal(before[n], after[n]) for n in ("known", "count"))
        added += [row.numpy() for n in ("mean", "variance") for row in after[n] - before[n]]
    for row in added:
        assert abs(row.mean()) < 4 * sigma / width**0.5
        assert abs(row.std() - sigma) < 4 * sigma / (2 * width) ** 0.5
    assert np.abs(np.corrcoef(added) - np.eye(8)).max() < 4 / width**0.5
    for name in ("mean", "variance"):
        average = (loud.slots[0][0][name] + loud.slots[0][1][name]) / 2
        torch.testing.assert_close(loud.state[name][:2], average, rtol=0, atol=1e-12)


# Where the model is cut -----------------------------------------------------------------------------------

IMAGE = (1, 8, 8)
RESNET, VIT = "resnet8(width=4)", "vit(dim=16, depth=2, heads=2)"
PLACES: dict[str, dict[str | int, str]] = {
    "mlp(hidden=(8, 6))": {"fc1": "fc1", "fc1.linear": "fc1.linear", 1: "fc1", 2: "fc2"},
    "cnn4(width=4)": {"layer2": "layer2", 1: "layer1", 3: "flatten"},
    "vgg9(width=4, hidden=8)": {"layer3.conv1": "layer3.conv1", 1: "layer1.relu1", 2: "layer1", 6: "flatten", 8: "fc2"},
    RESNET: {"layer2": "layer2", "layer1.0": "layer1.0", "stem.norm": "stem.norm", 1: "stem", 3: "layer1", 9: "pool"},
    VIT: {"block1": "block1", 1: "patch", 7: "block1", 13: "pool"},
}


@pytest.mark.parametrize("model", PLACES)
def test_where_the_features_are_taken(model: str) -> None:
    """One full batch: the statistics are those of what the module puts out in training.

    A number's place is the last one below the next weight layer: behind activations, pooling and flattening.
    """
    if model == VIT:
        pytest.importorskip("transformers")
    module = build_model(model, IMAGE, CLASSES, seed=3).double()
    x, y = torch.randn(9, *IMAGE, generator=torch.Generator().manual_seed(4)).double(), torch.arange(9) % CLASSES
    kept: dict[str, Tensor] = {}
    twin = copy.deepcopy(module).train()
    for place in PLACES[model].values():
        twin.get_submodule(place).register_forward_hook(lambda m, args, out, at=place: kept.update({at: out}))
    twin(x)
    for split, place in PLACES[model].items():
        heard = play(FedImpro(split=split), [(x.numpy(), y.numpy())], module, rounds=2, steps=1, batch_size=9, lr=0.01)
        for c in range(CLASSES):
            sent, rows = heard.slots[0][0], kept[place][y == c].detach()
            torch.testing.assert_close(sent["mean"][c], rows.mean(0), rtol=0, atol=1e-10)
            torch.testing.assert_close(sent["variance"][c], rows.var(0, correction=0), rtol=0, atol=1e-10)
        assert not any(r.refused for r in heard.fed.records)
    if model == VIT:  # the last axis of a sequence is its channels
        heard = play(FedImpro(split="block1", per="channel"), [(x.numpy(), y.numpy())], module, rounds=2, steps=1)
        assert heard.state["mean"].shape == (CLASSES, 16)


@pytest.mark.parametrize(
    ("model", "split", "why"),
    [
        (RESNET, "layer22", r"did you mean 'layer2'"),
        (RESNET, "layer2.0.conv1", r"did you mean 'layer2\.0'"),
        *((RESNET, number, r"1\D+3\D+6\D+9(?!\d)") for number in (0, -1, 2, 5, 10, 11)),
        (RESNET, "", "stage"),
        (RESNET, "head", "above"),
        ("frozen", "fc1", "above"),
        ("frozen", 1, "above"),
        ("linear", "0", "Sequential"),
        ("linear", 1, "Sequential"),
    ],
)
def test_splits_that_are_refused(model: str, split: str | int, why: str) -> None:
    module = linear() if model == "linear" else build_model("mlp" if model == "frozen" else model, IMAGE, CLASSES)
    if model == "frozen":
        module.get_submodule("head").requires_grad_(False)
    data = torch.zeros(6, INPUTS).double() if model == "linear" else torch.zeros(6, *IMAGE), torch.arange(6) % 3
    with pytest.raises(fs.UsageError, match=why) as refusal:
        fs.Federation(module, [data], method=fs.chain(FedImpro(split=split)), rounds=1)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        *(f"{beta}={value}" for beta in ("beta_client", "beta_server") for value in (-0.1, 1.0, 1.5)),
        *(f"{name}={value}" for name in ("noise", "weight", "sampled") for value in (-0.1, "1e999", "'up'")),
        *("std_cap=-0.1", "form='own'", "per='pixel'", "split=1.5", "split=True", "counts=2"),
        *("loss='product'", "labels='own'", "variance='both'"),
    ],
)
def test_arguments_that_are_refused(text: str) -> None:
    with pytest.raises(fs.UsageError) as refusal:
        fs.method(f"fedimpro({text})")
    assert text.partition("=")[0] in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("field", [{"form": "own"}, {"per": "pixel"}, {"weight": "up"}, {"beta_client": 1.0}])
def test_mistakes_in_python(field: dict[str, Any]) -> None:
    with pytest.raises(fs.UsageError, match=next(iter(field))):
        FedImpro(**field)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"split": 3, "weight": "ramp"},
        {"split": "layer1.0", "beta_client": 0.5, "beta_server": 0.25, "noise": 0.1, "weight": 0.5},
        {"sampled": 2.0, "std_cap": 0.1, "form": "released", "per": "channel", "counts": True},
        {"weight": 0, "std_cap": 0},
        {"weight": "ramp-to-2", "loss": "mean", "labels": "batch", "variance": "pooled"},
    ],
)
def test_what_is_written_is_read_again(settings: dict[str, Any]) -> None:
    method = fs.chain(FedImpro(**settings))
    assert fs.method(str(method)) == method


def test_defaults() -> None:
    first = "fedimpro(split='layer2', beta_client=0.9, beta_server=0.5, noise=0.0, weight=1.0, sampled=1.0, "
    assert fs.method("fedimpro") == fs.method(f"{first}std_cap=None, form='paper', per='element', counts=False)")


@pytest.mark.parametrize("settings", ["form='released'", "weight='ramp'", "per='channel'", "labels='batch'"])
def test_what_many_clients_at_once_are_refused(settings: str) -> None:
    with pytest.raises(fs.UsageError, match="the engine 'vmap' cannot run 'fedimpro'"):
        federation(f"fedimpro(split='1', {settings})", people(), net(), engine="vmap")


# Beside others --------------------------------------------------------------------------------------------


@both_forms
def test_one_stratum_at_a_time(form: Any) -> None:
    """Rounds: all, the stratum below the split, the two above, all. Statistics are collected in each.

    Nothing is sampled in the first (nothing is known) nor in the second (nothing above trains): it costs what FedPart
    costs, apart from what statistics cost in the first as well, and ends in the same model.
    """
    part, t = FedPart(full_rounds=1, rounds_per_stratum=1), FedImpro(split="1", std_cap=0.0, form=form)
    agrees(play(t, people(), deep(), part, rounds=5), Reference(t, deep(), 2, people()))
    methods = fs.chain(FedImpro(split="1", form=form), part), fs.chain(part)
    ours, plain = (federation(m, people(), deep(Spy()), rounds=4) for m in methods)
    rows, same, alone = [], [], plain.rounds()
    for sight in rows_of_spy(ours):
        rows.append(len(sight))
        next(alone)
        same.append(np.array_equal(flat(ours), flat(plain)))
    extra = [a.flops - b.flops for a, b in zip(ours.records, plain.records, strict=True)]
    assert same == [True, True, False, False]
    assert extra[0] == extra[1] < extra[2]
    assert rows[0] == rows[1] == rows[2] / 2 == rows[3] / 2


def close(one: Heard, other: Heard, within: float) -> None:
    np.testing.assert_allclose(one.model, other.model, rtol=0, atol=within)
    for name, value in other.state.items():
        torch.testing.assert_close(one.state[name], value, rtol=0, atol=within)


@both_forms
@pytest.mark.parametrize("split", [1, 2])
def test_beside_a_prefix_that_is_computed_once(form: Any, split: int) -> None:
    parts = [FedPart(full_rounds=1, rounds_per_stratum=1, cache_prefix=cached) for cached in (False, True)]
    plain, cached = (play(FedImpro(split=split, form=form), people(), deep(), part, rounds=5) for part in parts)
    close(cached, plain, within=1e-9)


@both_forms
def test_a_second_look_sees_the_same(form: str) -> None:
    """FedSpeed looks at every batch again at a point that is ρ away; ρ = 1e-9 is then the same as no second look.

    Other sampled features, or statistics moved twice, would be far away.
    """
    methods = [f"fedimpro(split='1', form='{form}') + fedspeed(rho={rho}, alpha=1.0)" for rho in (0.0, 1e-9)]
    once, twice = (play(m, people(), net(nn.BatchNorm1d(HIDDEN))) for m in methods)
    close(twice, once, within=1e-7)


@both_forms
@pytest.mark.parametrize("moon", ["moon(mu=2.0)", "moon(mu=2.0, stage='1')", "moon(mu=2.0, stage='3')"])
def test_the_features_of_moon_are_real(form: str, moon: str) -> None:
    """With a weight of all but nothing it is MOON alone, on either side of it."""
    ours = f"fedimpro(split='1', weight=1e-12, form='{form}')"
    alone, *beside = (play(m, people(), deep()).model for m in (moon, f"{moon} + {ours}", f"{ours} + {moon}"))
    np.testing.assert_allclose(beside, [alone] * 2, rtol=0, atol=1e-9)


@both_forms
@pytest.mark.parametrize(
    ("other", "output"),
    [
        (FedLC(tau=0.5), lambda z, n: z - torch.where(n > 0, 0.5 * n.double() ** -0.25, 1e4)),
        (FedRS(alpha=0.3), lambda z, n: z * torch.where(n > 0, 1.0, 0.3)),
    ],
    ids=["fedlc", "fedrs"],
)
def test_logits_of_sampled_rows_are_not_changed(form: Any, other: fs.Technique, output: Output) -> None:
    """Clients lack classes that are sampled for them; FedLC leaves them out of a real row's softmax.

    The reference changes real rows' logits only. The order of the two techniques does not matter.
    """
    t = FedImpro(split="1", std_cap=0.0, form=form)
    heard = play(t, people(), net(), other)
    turned = federation(fs.chain(other, t), people(), net(), epochs=1, batch_size=6)
    turned.fit()
    np.testing.assert_array_equal(flat(turned), heard.model)
    assert all(r.train_loss is not None and r.train_loss < 10 for r in turned.records)
    agrees(heard, Reference(t, net(), 2, people(), output))


def test_a_round_in_which_nobody_trains() -> None:
    """CCVR's last round: no statistics travel, and those of the server stay."""
    heard = listening(federation("fedimpro(split='1') + ccvr(samples=5)", people(), net(), rounds=2))
    states = [copy.deepcopy(heard.state) for _ in heard.fed.rounds()]
    assert [len(slots) for slots in heard.slots] == [3, 3, 0]
    assert all(torch.equal(states[2][n], states[1][n]) for n in states[1])
    assert not any(r.refused for r in heard.fed.records)
    assert "fedimpro" not in heard.fed.records[2].slots_up


# What travels ---------------------------------------------------------------------------------------------


def test_bytes_of_slots() -> None:
    """known: a byte per class; mean and variance: 8 bytes per element; count: 8 bytes per class."""
    clients, statistics = people()[:2], CLASSES + 2 * 2 * HIDDEN * 8
    for record in play(FedImpro(split="1", counts=True), clients, net(), rounds=2).fed.records:
        assert record.slots_up == {"fedimpro": 2 * (statistics + 2 * 8)}
        assert record.slots_up["fedimpro"] < record.bytes_up
    several = play("scaffold + fedprox + fedimpro(split='1')", clients, net(), rounds=1).fed.records[0]
    assert several.slots_up == {"scaffold": 2 * 8 * len(flat(net())), "fedimpro": 2 * statistics}
    assert play("fedavg", clients, net(), rounds=1).fed.records[0].slots_up == {}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda slot: {n: v for n, v in slot.items() if n != name}


WRONG: dict[str, Callable[[Tensors], Tensors]] = {
    "no slot": lambda s: {},
    **{f"no {name}": without(name) for name in ("known", "mean", "variance", "count")},
    "more": lambda s: {**s, "more": torch.zeros(1)},
    "wide mean": lambda s: {**s, "mean": torch.zeros(2, 5).double()},
    "wide both": lambda s: {**s, "mean": torch.zeros(2, 5).double(), "variance": torch.zeros(2, 5).double()},
    "one number": lambda s: {**s, "mean": torch.tensor(1.0).double()},
    "short variance": lambda s: {**s, "variance": s["variance"][:1]},
    "more rows": lambda s: {**s, **{n: s[n].repeat(2, 1) for n in ("mean", "variance")}},
    "whole numbers": lambda s: {**s, "mean": s["mean"].long()},
    "long mask": lambda s: {**s, "known": torch.cat([s["known"], s["known"]])},
    "square mask": lambda s: {**s, "known": s["known"].expand(CLASSES, CLASSES)},
    "two for two": lambda s: {**s, "known": torch.tensor([2, 0, 0], dtype=torch.uint8)},
    "full mask": lambda s: {**s, "known": torch.ones(CLASSES, dtype=torch.uint8)},
    "signed mask": lambda s: {**s, "known": torch.tensor([1, 2, -1])},
    "not a number": lambda s: {**s, "mean": s["mean"] * torch.nan},
    "infinite": lambda s: {**s, "variance": s["variance"] + torch.inf},
    "count of none": lambda s: {**s, "count": torch.zeros_like(s["count"])},
    "count below 0": lambda s: {**s, "count": -s["count"]},
    "short count": lambda s: {**s, "count": s["count"][:1]},
    "count of halves": lambda s: {**s, "count": s["count"] * 0.5},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_client_may_not_send(wrong: str) -> None:
    """Its update is refused in one sentence, the round goes on, and the statistics are those of the others alone."""

    def lie(update: Update) -> Update:
        slot = WRONG[wrong](update.slots["fedimpro"])
        return replace(update, slots={"fedimpro": slot} if slot else {}) if update.client == 0 else update

    t = FedImpro(split="1", counts=True, beta_server=0.0)
    heard = listening(federation(fs.chain(t), people(), net(), epochs=1, batch_size=6, rounds=2), lie)
    heard.fed.fit()
    for record in heard.fed.records:
        assert [(r["client"], len(r["why"]) > 10) for r in record.refused] == [(0, True)]
    torch.testing.assert_close(heard.state["mean"][0], heard.slots[1][1]["mean"][0], rtol=0, atol=1e-12)
    assert heard.state["known"].tolist() == [1, 1, 1]


def test_what_nobody_asked_for() -> None:
    """Counts without `counts`, statistics of a visit without training or of a method that does without them."""
    t = FedImpro(split="1")
    heard = play(t, people(), net(), rounds=1)
    slot, asked = heard.slots[0][0], heard.asked[0][0]
    still = replace(asked, trains=(), uploads=(), slots={})
    assert t.validate(slot, asked) is None
    assert t.validate({**slot, "variance": -slot["variance"]}, asked) is None
    assert t.validate({}, still) is None
    assert t.validate({**slot, "count": torch.tensor([7, 11])}, asked)
    assert t.validate(slot, still)
    assert FedImpro(split="1", weight=0.0).validate(slot, replace(asked, slots={}))


# What is above the split ------------------------------------------------------------------------------------


class Shifted(nn.BatchNorm1d):
    """A norm layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * super().forward(input) + 7.0


def test_a_layer_that_changes_features_in_place_changes_no_statistics() -> None:
    """The split is before a ReLU: statistics are of what goes into it, whether or not it overwrites that."""
    models = [net() for _ in range(2)]
    for model, inplace in zip(models, (False, True), strict=True):
        model[1] = nn.ReLU(inplace=inplace)
    states = [play("fedimpro(split='0')", people(), m, rounds=1).fed.state.techniques["fedimpro"] for m in models]
    assert float(states[0]["mean"].min()) < 0
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_a_norm_layer_with_a_forward_of_its_own_is_asked_itself() -> None:
    """Rows that leave it have a mean of 7, sampled ones too."""
    norm = Shifted(HIDDEN, affine=False)
    seen: list[Tensor] = []
    model = net(norm)
    at = next(name for name, module in model.named_modules() if module is norm)
    fed = federation("fedimpro(split='0')", people(), model, rounds=2, steps=1)
    replica = fed._context.replica("")
    following = replica.model[list(replica.model._modules).index(at) + 1]
    following.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    fed.fit()
    both = [rows for rows in seen if len(rows) % 2 == 0][-1]
    real, sampled = both.chunk(2)
    torch.testing.assert_close(real.mean(0), torch.full_like(real[0], 7.0))
    torch.testing.assert_close(sampled.mean(0), torch.full_like(real[0], 7.0))


class Pair(nn.Module):
    """Puts out two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Left(nn.Module):
    """Takes the first of two."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


def test_what_cannot_be_cut_is_refused() -> None:
    norm = nn.BatchNorm1d(INPUTS).double()
    pairs = nn.Sequential(Pair(), Left(), nn.Linear(INPUTS, CLASSES)).double()
    twice = nn.Sequential(norm, nn.Tanh(), norm, nn.Linear(INPUTS, CLASSES)).double()
    with pytest.raises(fs.UsageError, match=r"fedimpro's split: '0' does not put out a row of real numbers"):
        play("fedimpro(split='0')", people(), pairs)
    with pytest.raises(fs.UsageError, match=r"the norm layer '0' is used on both sides of '1'"):
        play("fedimpro(split='1')", people(), twice)
    with pytest.raises(fs.UsageError, match=r"'rampp' does not fit \(input should be .* or 'ramp' or 'ramp-to-2'\)"):
        fs.method("fedimpro(weight='rampp')")
