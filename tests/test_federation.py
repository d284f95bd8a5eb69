"""The public door: rounds, sampling, evaluation, sub-models, costs and refusals."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

import fedstrata as fs
from fedstrata import Diverged, Federation, UsageError, chain
from fedstrata.client import train as visits
from fedstrata.core.technique import ClientView, Hooks, Technique
from fedstrata.core.tensors import Tensors, clone
from fedstrata.core.types import BUFFERS, Assignment, Slots, Stratum, Update
from fedstrata.engines import grouping
from fedstrata.evaluation.evaluate import Scores
from fedstrata.evaluation.evaluate import evaluate as plain
from fedstrata.wire.messages import encode
from tests.following import OnVisit

Pair = tuple[Tensor, Tensor]

# Helpers ----------------------------------------------------------------------------------------------------


def toy(count: int, seed: int = 0, inputs: int = 4, classes: int = 3) -> Pair:
    """Points whose class is that of their largest of the first inputs: learnable."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator)
    return x, x[:, :classes].argmax(1)


def clients(*counts: int) -> list[Pair]:
    return [toy(count, seed=10 + k) for k, count in enumerate(counts)]


def seeded(build: Callable[[], nn.Module], seed: int = 1) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def mlp() -> nn.Sequential:
    model: nn.Sequential = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    return model


def normed() -> nn.Sequential:
    layers = lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))  # noqa: E731
    model: nn.Sequential = seeded(layers)
    return model


def noisy() -> nn.Sequential:
    layers = lambda: nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))  # noqa: E731
    model: nn.Sequential = seeded(layers)
    return model


def equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def weights(federation: Federation) -> Tensors:
    return clone(federation.model.state_dict())


@dataclass
class Spy:
    """Everything that went over the wire, and a chance to change it."""

    sent: list[Assignment] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    memories: list[tuple[Slots, Slots]] = field(default_factory=list)
    spoil: Callable[[Update], Update] = lambda update: update

    def of(self, round: int) -> list[Update]:
        return [u for u in self.updates if u.round == round]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    watched, train = Spy(), visits.train_client

    def train_client(context: Any, assignment: Assignment, data: Any, memory: Slots) -> tuple[Update, Slots]:
        update, kept = train(context, assignment, data, memory)
        update = watched.spoil(update)
        watched.sent.append(assignment)
        watched.updates.append(update)
        watched.memories.append((memory, kept))
        return update, kept

    monkeypatch.setattr(grouping, "train_client", train_client)
    monkeypatch.setattr("fedstrata.engines.auto.judge_ways", lambda request, table: (False, "watched"))
    return watched


@dataclass(frozen=True, kw_only=True)
class Turns(Technique):
    """Trains one stratum after the other, after a first round of all."""

    name: ClassVar[str] = "turns"

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        if assignment.round == 0:
            return assignment
        active = strata[(assignment.round - 1) % len(strata)].params
        return replace(assignment, trains=active, uploads=active)


@dataclass(frozen=True, kw_only=True)
class Counts(Technique):
    """Remembers, on each client, how often it was accepted."""

    name: ClassVar[str] = "counts"

    def local(self, view: ClientView) -> Hooks:
        visits = view.memory.get("visits", torch.zeros((), dtype=torch.int64))
        return Hooks(finish=lambda delta, tally: ({"seen": visits.float()}, {"visits": visits + 1}))


# Rounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", ["examples", "uniform"])
def test_federated_averaging_of_a_linear_model(weight: str):
    """Three rounds of one full-batch step each, against numpy float64.

    Softmax regression: ∂/∂W = (softmax(XWᵀ + b) − onehot)ᵀX/n, and for b the same without X; each client steps by
    −0.5·gradient from the global model, and the server takes the mean of the results, by (5, 2, 9) examples or evenly.
    """
    model, data = seeded(lambda: nn.Linear(4, 3)), clients(5, 2, 9)
    federation = Federation(model, data, method=f"fedavg(weight='{weight}')", rounds=3, lr=0.5, batch_size=9)
    federation.fit()

    w, b = (p.detach().double().numpy().copy() for p in model.parameters())
    counts = [5, 2, 9] if weight == "examples" else [1, 1, 1]
    for _ in range(3):
        results = []
        for x, y in ((x.double().numpy(), y.numpy()) for x, y in data):
            logits = x @ w.T + b
            p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            error = (p - np.eye(3)[y]) / len(y)
            results.append((w - 0.5 * error.T @ x, b - 0.5 * error.sum(0)))
        w, b = (np.average([r[i] for r in results], axis=0, weights=counts) for i in (0, 1))
    np.testing.assert_allclose(federation.model.weight.detach().numpy(), w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(federation.model.bias.detach().numpy(), b, rtol=1e-5, atol=1e-6)


def test_a_record_says_what_happened(spy: Spy):
    """Two rounds over 5 + 2 + 9 examples in fours: 2 + 1 + 3 steps.

    Products an example: 4·6 + 6·3 = 42 forward, 42 for the weights and 18 for the inner input; 2 FLOPs each.
    """
    history = Federation(mlp(), clients(5, 2, 9), toy(20), rounds=2, batch_size=4, lr=0.2).fit()
    assert [r.round for r in history.records] == [1, 2]
    for number, record in enumerate(history.records):
        assert record.clients == [0, 1, 2]
        assert record.active == ["0", "2"]
        assert record.refused == []
        assert (record.steps, record.examples, record.lr) == (6, 16, 0.2)
        assert record.flops == 2 * 102 * 16
        assert record.memory > 0
        assert record.seconds > 0
        assert record.client_accuracy is None
        losses = [u.metrics["train_loss"] for u in spy.of(number)]
        assert record.train_loss == pytest.approx(np.average(losses, weights=[5, 2, 9]))
    assert history.records[1].train_loss < history.records[0].train_loss


def test_the_history_adds_up():
    history = Federation(mlp(), clients(5, 6), toy(20), rounds=3).fit()
    for name in ("bytes_up", "bytes_down", "flops", "steps"):
        assert getattr(history.costs, name) == sum(getattr(r, name) for r in history.records)
    assert history.costs.seconds == pytest.approx(sum(r.seconds for r in history.records))
    assert history.accuracy == history.records[-1].accuracy
    assert history.summary["rounds"] == 3
    assert history.summary["loss"] == history.records[-1].loss
    assert history.summary["method"] == "fedavg"
    assert history.summary["buffers"] == "average"
    assert history.summary["refused"] == 0


def test_accuracy_and_loss_are_those_of_the_returned_model():
    """Recomputed by torch from the model that `fit` returns, which is in evaluation mode."""
    x, y = toy(50, seed=3)
    history = Federation(normed(), clients(8, 8), (x, y), rounds=2, lr=0.3).fit()
    assert not history.model.training
    with torch.no_grad():
        logits = history.model(x)
    assert history.accuracy == pytest.approx((logits.argmax(1) == y).double().mean().item())
    assert history.records[-1].loss == pytest.approx(nn.functional.cross_entropy(logits, y).item(), rel=1e-5)


def test_learning():
    """A learnable toy: far above the third that guessing gives."""
    history = Federation(mlp(), clients(60, 60, 60), toy(200, seed=3), rounds=10, lr=0.5, batch_size=10).fit()
    assert history.accuracy is not None
    assert history.accuracy > 0.85


def test_without_a_test_set_nothing_is_evaluated():
    history = Federation(mlp(), clients(5, 6), rounds=2).fit()
    assert [r.accuracy for r in history.records] == [None, None]
    assert history.accuracy is None
    assert history.rounds_to(0.1) is None


def test_the_same_seed_gives_the_same_bits_and_another_one_others():
    def run(seed: int) -> Tensors:
        federation = Federation(noisy(), clients(9, 8, 7, 6), rounds=3, participation=2, batch_size=4, seed=seed)
        torch.rand(3)
        federation.fit()
        return weights(federation)

    assert equal(run(0), run(0))
    assert not equal(run(0), run(1))


def test_steps_instead_of_epochs(spy: Spy):
    history = Federation(mlp(), clients(5, 2), rounds=1, steps=7, epochs=99, batch_size=4).fit()
    assert [u.steps for u in spy.updates] == [7, 7]
    assert history.records[0].steps == 14


def test_epochs_clip_and_optimizer_reach_the_client(spy: Spy):
    Federation(mlp(), clients(5), rounds=1, epochs=3, clip=0.5, optimizer="adam", batch_size=2, lr=0.01).fit()
    expected = fs.Work(epochs=3, steps=None, batch_size=2, optimizer="adam", lr=0.01, clip=0.5, precision="fp32")
    assert spy.sent[0].work == expected


def test_listeners():
    federation = Federation(mlp(), clients(5, 6, 7), rounds=2)
    visits: list[tuple[int, int]] = []
    seen: list[int] = []
    federation.fit(lambda record: seen.append(record.round), OnVisit(lambda done, total: visits.append((done, total))))
    assert seen == [1, 2]
    assert visits == [(1, 3), (2, 3), (3, 3)] * 2


def test_rounds_can_be_stopped_and_continued():
    """After two rounds, from a new iterator, and with a broken-off one between: the bits of one go."""
    arguments: dict[str, Any] = {
        "method": chain(Counts(), Turns()),
        "rounds": 5,
        "participation": 2,
        "buffers": "local",
    }
    whole = Federation(normed(), clients(8, 9, 7), toy(20), **arguments)
    whole.fit()
    parts = Federation(normed(), clients(8, 9, 7), toy(20), **arguments)
    for record in parts.rounds():
        if record.round == 2:
            break
    assert len(parts.records) == 2
    assert not parts.done
    next(parts.rounds())
    assert len(parts.records) == 3
    assert [r.round for r in parts.rounds()] == [4, 5]
    assert parts.done
    assert list(parts.rounds()) == []
    assert equal(weights(whole), weights(parts))
    timeless = [[replace(r, seconds=0.0, memory=0) for r in f.records] for f in (whole, parts)]
    assert timeless[0] == timeless[1]


class Breaks(TorchDataset[tuple[Tensor, int]]):
    """A test set whose reading is interrupted once."""

    def __init__(self, data: Pair) -> None:
        self.x, self.y = data
        self.left = 0

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.x[index], int(self.y[index])


def test_a_round_that_is_interrupted_in_its_evaluation_leaves_no_trace():
    """Ctrl-C after training, before the round is done: going on repeats the round from the memories before it."""
    arguments: dict[str, Any] = {"method": chain(Counts()), "rounds": 3, "buffers": "local"}
    whole = Federation(normed(), clients(8, 9), toy(20), **arguments)
    whole.fit()
    test = Breaks(toy(20))
    broken = Federation(normed(), clients(8, 9), test, **arguments)
    rounds = broken.rounds()
    next(rounds)
    test.left = 7
    with pytest.raises(KeyboardInterrupt):
        next(rounds)
    assert len(broken.records) == 1
    broken.fit()
    assert equal(weights(whole), weights(broken))


# Who takes part ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("participation", "count"), [(1.0, 6), (0.5, 3), (0.01, 1), (0.34, 2), (0.45, 3), (1, 1), (4, 4), (6, 6)]
)
def test_participation(participation: int | float, count: int):
    """A fraction of the six, at least one; or a number. Nobody twice, in order, and not the same ones every round."""
    history = Federation(mlp(), clients(*[3] * 6), rounds=6, participation=participation).fit()
    for record in history.records:
        assert len(record.clients) == count
        assert record.clients == sorted(set(record.clients))
    chosen = {tuple(r.clients) for r in history.records}
    assert len(chosen) == 1 if count == 6 else len(chosen) > 1


def test_everybody_has_his_turn():
    history = Federation(mlp(), clients(*[2] * 5), rounds=40, participation=1).fit()
    assert {r.clients[0] for r in history.records} == set(range(5))


def test_a_client_without_examples_is_never_asked():
    data = clients(5, 0, 6, 0)
    history = Federation(mlp(), data, rounds=5, participation=0.5).fit()
    assert {c for r in history.records for c in r.clients} <= {0, 2}
    assert all(len(r.clients) == 1 for r in history.records)


def test_more_clients_than_there_are():
    with pytest.raises(UsageError, match="participation = 3, but only 2 clients"):
        Federation(mlp(), clients(5, 0, 6), participation=3).fit()


def test_more_clients_than_there_are_is_noticed_at_once():
    with pytest.raises(UsageError, match="participation"):
        Federation(mlp(), clients(5, 6), participation=3)


def test_clients_do_not_depend_on_each_other(spy: Spy):
    """Client 2's update of the first round is the same, bit for bit, alone and among others (dropout included)."""
    data = clients(9, 8, 7)
    Federation(noisy(), data, rounds=1, batch_size=4).fit()
    among = spy.updates[-1]
    Federation(noisy(), [(x[:0], y[:0]) for x, y in data[:2]] + data[2:], rounds=1, batch_size=4).fit()
    alone = spy.updates[-1]
    assert (among.client, alone.client) == (2, 2)
    assert equal(among.delta, alone.delta)


# Evaluation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "evaluated"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_eval_every_and_always_at_the_end(every: int, evaluated: list[int]):
    history = Federation(mlp(), clients(4), toy(9), rounds=5, eval_every=every).fit()
    assert [r.round for r in history.records if r.accuracy is not None] == evaluated
    assert [r.round for r in history.records if r.loss is not None] == evaluated


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations that answer 0.2, 0.6, 0.5, 0.9, 0.9, …"""
    answers = iter([0.2, 0.6, 0.5, 0.9] + [0.9] * 9)
    monkeypatch.setattr("fedstrata.engines.serial.evaluate", lambda *args: Scores(1.0, {"accuracy": next(answers)}))


@pytest.mark.usefixtures("scripted")
def test_rounds_to_a_target():
    history = Federation(mlp(), clients(4), toy(9), rounds=5, target=0.6).fit()
    assert len(history.records) == 5
    assert [history.rounds_to(t) for t in (0.1, 0.2, 0.3, 0.6, 0.7, 0.9, 0.95)] == [1, 1, 2, 2, 4, 4, None]
    assert history.summary["target"] == 0.6
    assert history.summary["rounds_to_target"] == 2
    assert history.summary["best_accuracy"] == 0.9
    assert history.summary["best_round"] == 4


@pytest.mark.usefixtures("scripted")
def test_stopping_at_the_target():
    federation = Federation(mlp(), clients(4), toy(9), rounds=9, target=0.55, stop_at_target=True)
    history = federation.fit()
    assert len(history.records) == 2
    assert federation.done
    assert history.summary["rounds_to_target"] == 2
    assert list(federation.rounds()) == []


@pytest.mark.usefixtures("scripted")
def test_a_target_that_is_not_reached():
    history = Federation(mlp(), clients(4), toy(9), rounds=3, target=0.95, stop_at_target=True).fit()
    assert len(history.records) == 3
    assert history.summary["rounds_to_target"] is None


def test_eval_clients():
    """The global model's accuracy on each client's own data, recomputed from the returned model."""
    data = clients(30, 20)
    history = Federation(mlp(), data, toy(9), rounds=2, eval_clients=True).fit()
    with torch.no_grad():
        expected = [(history.model(x).argmax(1) == y).double().mean().item() for x, y in data]
    assert history.records[-1].client_accuracy == pytest.approx(expected)
    assert history.records[0].client_accuracy is not None


def test_eval_clients_uses_their_own_statistics_under_local():
    """Recomputed with the global parameters and the statistics that each client remembers."""
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(5))
    data = [(x[:20] * 5 + 3, x[:20, :3].argmax(1)), (x[20:] - 4, x[20:, :3].argmax(1))]
    federation = Federation(normed(), data, toy(9), rounds=3, eval_clients=True, buffers="local", batch_size=5, lr=0.3)
    history = federation.fit()
    expected = []
    for client, (inputs, labels) in enumerate(data):
        model = history.model
        own = federation._recorder.recall(federation.state, [client])[0][BUFFERS]
        model.load_state_dict({**model.state_dict(), **own})
        with torch.no_grad():
            expected.append((model(inputs).argmax(1) == labels).double().mean().item())
    assert history.records[-1].client_accuracy == pytest.approx(expected)


def test_client_accuracy_has_an_entry_for_every_client():
    """So that entry k is client k's."""
    history = Federation(mlp(), clients(30, 0, 20), toy(9), rounds=1, eval_clients=True).fit()
    found = history.records[0].client_accuracy
    assert found is not None
    assert len(found) == 3
    assert found[1] is None


def test_evaluation_does_not_change_training():
    """With and without a test set: the same weights, even if the user left one of the model's layers in eval mode."""
    results = []
    for test in (None, toy(9)):
        model = normed()
        model[1].eval()
        federation = Federation(model, clients(8, 9), test, rounds=3, batch_size=4)
        federation.fit()
        results.append(weights(federation))
    assert equal(*results)


def test_the_schedule_sets_the_learning_rate(spy: Spy):
    """0.8 · (1, ½, ¼): in the records, and in what the clients are told."""
    history = Federation(mlp(), clients(4), rounds=3, lr=0.8, schedule="exponential(factor=0.5)").fit()
    assert [r.lr for r in history.records] == pytest.approx([0.8, 0.4, 0.2])
    assert [a.work.lr for a in spy.sent] == [r.lr for r in history.records]


# Data -------------------------------------------------------------------------------------------------------


def test_map_style_datasets_give_the_same_bits():
    data, test = clients(9, 7), toy(20)
    plain = Federation(noisy(), data, test, rounds=3, batch_size=4)
    mapped = Federation(noisy(), [TensorDataset(*pair) for pair in data], TensorDataset(*test), rounds=3, batch_size=4)
    first, second = plain.fit(), mapped.fit()
    assert equal(weights(plain), weights(mapped))
    assert [r.accuracy for r in first.records] == [r.accuracy for r in second.records]
    assert [r.bytes_up for r in first.records] == [r.bytes_up for r in second.records]


def test_labels_out_of_range():
    x, y = toy(6)
    for bad, says in ((y + 1, r"label 3 \(.*\), but the model has 3 outputs"), (y - 1, r"labels are .* not -1 \(")):
        with pytest.raises(UsageError, match=says):
            Federation(mlp(), [toy(5), (x, bad)])
        with pytest.raises(UsageError, match=says):
            Federation(mlp(), [toy(5)], (x, bad))


@pytest.mark.parametrize("where", ["client", "test"])
def test_labels_out_of_range_in_a_map_style_dataset(where: str):
    x, y = toy(6)
    bad = TensorDataset(x, y + 1)
    with pytest.raises(UsageError, match="label 3"):
        Federation(mlp(), [bad] if where == "client" else [toy(5)], bad if where == "test" else None, rounds=1).fit()


def test_inputs_of_a_wrong_shape():
    with pytest.raises(UsageError, match=r"inputs of shape \[5\]"):
        Federation(mlp(), [toy(5, inputs=5)])
    with pytest.raises(UsageError, match=r"inputs of shape \[4\]"):
        Federation(nn.Conv2d(1, 3, 3), [toy(5)])


@pytest.mark.parametrize("where", ["client", "test"])
def test_inputs_of_a_wrong_shape_elsewhere(where: str):
    bad = toy(6, inputs=5)
    with pytest.raises(UsageError, match="shape"):
        Federation(
            mlp(), [toy(5), bad if where == "client" else toy(5)], bad if where == "test" else None, rounds=1
        ).fit()


def test_an_empty_test_set():
    with pytest.raises(UsageError, match="test"):
        Federation(mlp(), clients(5), toy(0), rounds=1).fit()


def test_inputs_of_a_wrong_type():
    x, y = toy(5)
    with pytest.raises(UsageError, match="does not take inputs"):
        Federation(mlp(), [(x.double(), y)])
    with pytest.raises(UsageError, match="6 examples but 5 labels"):
        Federation(mlp(), [(torch.zeros(6, 4), y)])
    with pytest.raises(UsageError, match="map-style"):
        Federation(mlp(), [3])


@pytest.mark.parametrize("data", [[], [(torch.zeros(0, 4), torch.zeros(0))]])
def test_nobody_with_examples(data: list[Any]):
    with pytest.raises(UsageError, match="no client with any examples"):
        Federation(mlp(), data)


class Unnamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"answer": self.linear(x)}


def test_models_that_do_not_fit():
    with pytest.raises(UsageError, match=r"must be a torch\.nn\.Module, not dict"):
        Federation({}, clients(5))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="one tensor of logits"):
        Federation(Unnamed(), clients(5))
    with pytest.raises(UsageError, match="one tensor of logits"):
        Federation(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), clients(5))
    with pytest.raises(UsageError, match="no parameter that may train"):
        Federation(nn.ReLU(), clients(5))


class Odd(nn.Module):
    """A linear layer beside a buffer of a type that the wire does not know."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("odd", torch.zeros(1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_models_whose_tensors_cannot_travel(dtype: torch.dtype):
    with pytest.raises(UsageError, match="odd"):
        Federation(Odd(dtype), clients(5), rounds=1).fit()


def test_a_learning_rate_beyond_single_precision():
    with pytest.raises((UsageError, Diverged)):
        Federation(mlp(), clients(5), rounds=1, lr=1e39).fit()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rounds": 0}, "rounds = 0"),
        ({"rounds": 2.5}, "rounds"),
        ({"participation": 0}, "participation"),
        ({"participation": 1.5}, "participation"),
        ({"participation": -0.1}, "participation"),
        ({"participation": True}, "participation"),
        ({"epochs": 0}, "epochs"),
        ({"steps": 0}, "steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"lr": 0.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"lr": math.inf}, "lr"),
        ({"clip": 0.0}, "clip"),
        ({"optimizer": "sdg"}, "did you mean 'sgd'"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"method": "fedagv"}, "did you mean 'fedavg'"),
        ({"buffers": "avrage"}, "buffers"),
        ({"seed": -1}, "seed"),
        ({"engine": "seriall"}, "did you mean 'serial'"),
        ({"workers": 0}, "workers"),
        ({"threads": 0}, "threads"),
        ({"device": "gpu"}, "device 'gpu'"),
        ({"eval_every": 0}, "eval_every"),
        ({"target": 1.5}, "target"),
        ({"stop_at_target": True}, "stop_at_target needs a target"),
        ({"resume": True}, "resume=True needs out="),
    ],
)
def test_settings_that_do_not_fit(wrong: dict[str, Any], says: str):
    with pytest.raises(UsageError) as error:
        Federation(mlp(), clients(5), **wrong)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


# What belongs to the user -----------------------------------------------------------------------------------


def test_the_users_model_is_untouched():
    model = normed().eval()
    model[0].weight.grad = torch.ones(5, 4)
    before, identity = clone(model.state_dict()), [id(p) for p in model.parameters()]
    federation = Federation(model, clients(8, 8), toy(9), rounds=2, lr=0.5)
    federation.fit()
    assert equal(clone(model.state_dict()), before)
    assert [id(p) for p in model.parameters()] == identity
    assert not any(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(model[0].weight.grad, torch.ones(5, 4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not equal(weights(federation), before)


def test_changing_the_users_model_later_changes_nothing():
    model = mlp()
    federation = Federation(model, clients(8), rounds=2)
    with torch.no_grad():
        model[0].weight.zero_()
    model.add_module("more", nn.Tanh())
    federation.fit()
    undisturbed = Federation(mlp(), clients(8), rounds=2)
    undisturbed.fit()
    assert equal(weights(federation), weights(undisturbed))


def test_the_model_is_a_copy_every_time():
    federation = Federation(mlp(), clients(8), rounds=1)
    federation.fit()
    before = weights(federation)
    with torch.no_grad():
        federation.model[0].weight.zero_()
    assert equal(weights(federation), before)


def test_the_users_random_numbers_are_untouched():
    """torch's, numpy's and Python's global streams are as if there had been no federation."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    federation = Federation(noisy(), clients(8, 7, 6), toy(9), rounds=2, participation=2, batch_size=4)
    for _ in federation.rounds():
        assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


class Shaken(TorchDataset[tuple[Tensor, int]]):
    """A dataset with a random transform, as many are."""

    def __init__(self, data: Pair) -> None:
        self.x, self.y = data

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index] + 0.1 * torch.randn(4), int(self.y[index])


def test_random_transforms_are_reproducible():
    results = []
    for disturbance in (1, 2):
        torch.manual_seed(disturbance)
        federation = Federation(mlp(), [Shaken(toy(8)), Shaken(toy(7, 1))], rounds=2, batch_size=4)
        federation.fit()
        results.append(weights(federation))
    assert equal(*results)
    plain = Federation(mlp(), [toy(8), toy(7, 1)], rounds=2, batch_size=4)
    plain.fit()
    assert not equal(results[0], weights(plain))


def test_random_transforms_do_not_reach_the_users_random_numbers():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    Federation(mlp(), [Shaken(toy(8))], rounds=1).fit()
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_are_given_back():
    before = torch.get_num_threads()
    seen: list[int] = []
    other = 2 if before == 1 else 1
    federation = Federation(mlp(), clients(5), rounds=1, threads=other)
    federation.fit(OnVisit(lambda done, total: seen.append(torch.get_num_threads())))
    assert seen == [other]
    assert torch.get_num_threads() == before


def test_what_the_user_froze_stays_frozen():
    model = mlp()
    model[0].requires_grad_(False)
    before = clone(model.state_dict())
    federation = Federation(model, clients(8), rounds=1)
    federation.fit()
    after = weights(federation)
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["2.weight"], before["2.weight"])


# Costs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["average", "local", "drop"])
def test_bytes_are_the_lengths_of_the_encoded_messages(spy: Spy, policy: str):
    """Every round's sums, of partial rounds with slots and memories too."""
    history = Federation(
        normed(), clients(8, 9, 7), rounds=5, participation=2, method=chain(Turns(), Counts()), buffers=policy
    ).fit()
    for number, record in enumerate(history.records):
        assert record.bytes_up == sum(len(encode(u)) for u in spy.of(number))
        assert record.bytes_down == sum(len(encode(a)) for a in spy.sent if a.round == number)
    assert any(a.to_send is not None for a in spy.sent)


def test_partial_rounds_cost_less():
    """Round 2 trains the first of two strata, round 3 the second; each is cheaper than round 1.

    FLOPs per example: all 2·(42 + 42 + 18); the first alone 2·(42 + 24 + 18); the second alone 2·(42 + 18).
    Down, round 3 sends what round 2 changed: the first stratum, 4·6 + 6 = 30 float32, not the second, 6·3 + 3 = 21.
    """
    history = Federation(mlp(), clients(8, 9), rounds=3, method=chain(Turns())).fit()
    first, second, third = history.records
    assert [r.active for r in history.records] == [["0", "2"], ["0"], ["2"]]
    assert [r.flops for r in history.records] == [2 * f * 17 for f in (102, 84, 60)]
    assert first.bytes_up - second.bytes_up > 2 * 4 * 21
    assert first.bytes_up - third.bytes_up > 2 * 4 * 30
    assert second.bytes_down - third.bytes_down > 2 * 4 * 21 - 2 * 100
    assert third.bytes_down < first.bytes_down - 2 * 4 * 21


def test_the_wire_engine_gives_the_same_bits_and_the_same_bytes():
    """Every message through its bytes, clients holding what they were sent: nothing that matters is lost."""
    runs = []
    for engine in ("serial", "wire"):
        federation = Federation(
            normed(),
            clients(8, 9, 7),
            toy(20),
            rounds=6,
            participation=2,
            method=chain(Turns(), Counts()),
            buffers="local",
            engine=engine,
            batch_size=4,
        )
        history = federation.fit()
        runs.append((weights(federation), [replace(r, seconds=0.0, memory=0) for r in history.records]))
    assert equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


# Running statistics -----------------------------------------------------------------------------------------


def test_average_is_the_mean_of_the_clients_statistics(spy: Spy):
    """Weighed by 8 and 12 examples, by hand from what the clients sent; sent down again in the next round."""
    federation = Federation(normed(), clients(8, 12), toy(9), rounds=2, batch_size=4)
    rounds = federation.rounds()
    next(rounds)
    for name in ("1.running_mean", "1.running_var"):
        sent = [u.buffers[name].double().numpy() for u in spy.of(0)]
        assert not np.allclose(*sent)
        np.testing.assert_allclose(federation.state.buffers[name], np.average(sent, axis=0, weights=[8, 12]), rtol=1e-6)
    # 2 and 3 steps: (8·2 + 12·3)/20 = 2.6
    assert federation.state.buffers["1.num_batches_tracked"].item() == 3
    next(rounds)
    after_first = [a for a in spy.sent if a.round == 1]
    for assignment in after_first:
        assert assignment.buffers["1.num_batches_tracked"].item() == 3
    assert all(kept == {} for _, kept in spy.memories)


def test_the_statistics_of_one_batch_by_hand(spy: Spy):
    """One client, one batch of all: mean ← 0.9·0 + 0.1·batch mean, var ← 0.9·1 + 0.1·(unbiased batch variance)."""
    x, y = toy(8)
    model = normed()
    federation = Federation(model, [(x, y)], rounds=1, batch_size=8)
    federation.fit()
    h = x.double().numpy() @ model[0].weight.detach().double().numpy().T + model[0].bias.detach().double().numpy()
    buffers = federation.state.buffers
    np.testing.assert_allclose(buffers["1.running_mean"], 0.1 * h.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(buffers["1.running_var"], 0.9 + 0.1 * h.var(0, ddof=1), rtol=1e-5)


def test_local_statistics_stay_with_their_client(spy: Spy):
    """Each client begins with what it had at its last visit; the server's copy is the mean, for evaluation only."""
    federation = Federation(normed(), clients(8, 12), toy(9), rounds=2, batch_size=4, buffers="local")
    federation.fit()
    assert all(a.buffers == {} for a in spy.sent)
    for client in (0, 1):
        (before, first), (again, second) = spy.memories[client], spy.memories[client + 2]
        assert before == {}
        assert equal(again[BUFFERS], first[BUFFERS])
        steps = [2, 3][client]
        assert first[BUFFERS]["1.num_batches_tracked"].item() == steps
        assert second[BUFFERS]["1.num_batches_tracked"].item() == 2 * steps
    means = [u.buffers["1.running_mean"].double().numpy() for u in spy.of(1)]
    expected = np.average(means, axis=0, weights=[8, 12])
    np.testing.assert_allclose(federation.state.buffers["1.running_mean"], expected, rtol=1e-6)
    np.testing.assert_allclose(federation.model[1].running_mean, expected, rtol=1e-6)


def test_local_sends_no_statistics_down_and_drop_none_up():
    """Running mean and variance of 5 units and a counter: 2·5·4 + 8 = 48 bytes per client and direction, and names."""
    runs = {
        p: Federation(normed(), clients(8, 9), rounds=1, buffers=p).fit().records[0]
        for p in ("average", "local", "drop")
    }
    assert runs["average"].bytes_down - runs["local"].bytes_down > 2 * 48
    assert abs(runs["local"].bytes_down - runs["drop"].bytes_down) < 2 * 48
    assert runs["average"].bytes_up - runs["drop"].bytes_up > 2 * 48
    assert runs["average"].bytes_up == runs["local"].bytes_up


def test_drop_keeps_no_statistics(spy: Spy):
    """Nothing is sent or remembered; evaluation normalises by the batch at hand and leaves the initial ones."""
    x, y = toy(40, seed=4)
    federation = Federation(normed(), clients(8, 12), (x * 3 + 1, y), rounds=2, batch_size=4, buffers="drop")
    history = federation.fit()
    assert all(u.buffers == {} for u in spy.updates)
    assert all(a.buffers == {} for a in spy.sent)
    assert all(kept == {} for _, kept in spy.memories)
    assert not federation.state.buffers["1.running_mean"].any()
    assert federation.state.buffers["1.running_var"].eq(1).all()
    assert federation.state.buffers["1.num_batches_tracked"].item() == 0
    model = copy.deepcopy(history.model).train()
    with torch.no_grad():
        logits = model(x * 3 + 1)
    assert history.records[-1].loss == pytest.approx(nn.functional.cross_entropy(logits, y).item(), rel=1e-5)
    assert history.accuracy == pytest.approx((logits.argmax(1) == y).double().mean().item())


def test_a_client_of_one_example_under_batch_norm_is_passed_over():
    """It cannot be normalised alone: its empty visit is refused, with a reason, and the others go on."""
    history = Federation(normed(), clients(8, 1, 9), rounds=2).fit()
    for record in history.records:
        assert [r["client"] for r in record.refused] == [1]
        assert "0 steps" in record.refused[0]["why"]
        assert record.examples == 17


def test_batches_of_one_under_batch_norm_are_refused():
    with pytest.raises(UsageError, match="batch"):
        Federation(normed(), clients(8, 9), rounds=2, batch_size=1).fit()


# Refusals and divergence ------------------------------------------------------------------------------------


def test_a_refused_update_is_reported_and_its_client_remembers_nothing_of_it(spy: Spy):
    """Client 1's second update is broken: in its third visit it remembers one accepted visit, not two."""

    def spoil(update: Update) -> Update:
        if (update.client, update.round) != (1, 1):
            return update
        return replace(update, delta={n: d * math.nan for n, d in update.delta.items()})

    spy.spoil = spoil
    history = Federation(mlp(), clients(5, 6), rounds=3, method=chain(Counts())).fit()
    assert [r.refused for r in history.records] == [[], [{"client": 1, "why": "it holds NaN or infinite numbers"}], []]
    assert history.records[1].clients == [0, 1]
    assert history.records[1].examples == 5
    assert history.summary["refused"] == 1
    seen = {(u.client, u.round): u.slots["counts"]["seen"].item() for u in spy.updates}
    assert [seen[0, r] for r in range(3)] == [0, 1, 2]
    assert [seen[1, r] for r in range(3)] == [0, 1, 1]


def test_an_unsampled_clients_memory_is_untouched(spy: Spy):
    history = Federation(mlp(), clients(5, 6, 7), rounds=8, participation=1, method=chain(Counts())).fit()
    visits = dict.fromkeys(range(3), 0)
    for record, update in zip(history.records, spy.updates, strict=True):
        (client,) = record.clients
        assert update.slots["counts"]["seen"].item() == visits[client]
        visits[client] += 1


def test_divergence():
    """A learning rate beyond all reason: the run stops, says where, and keeps the last good state."""
    x, y = toy(8)
    federation = Federation(mlp(), [(x * 1e15, y)], rounds=5, lr=1e20, epochs=3)
    with pytest.raises(Diverged, match=r"round 1.*smaller lr"):
        federation.fit()
    assert federation.state.round == 0
    assert federation.records == []
    assert all(p.isfinite().all() for p in federation.model.parameters())
    assert not isinstance(Diverged("x"), UsageError)


def test_divergence_of_the_test_loss(monkeypatch: pytest.MonkeyPatch):
    losses: list[float] = [1.0, math.nan]
    monkeypatch.setattr("fedstrata.engines.serial.evaluate", lambda *args: Scores(losses.pop(0), {"accuracy": 0.5}))
    federation = Federation(mlp(), clients(5), toy(9), rounds=5)
    with pytest.raises(Diverged, match=r"round 2.*test loss is nan"):
        federation.fit()
    assert len(federation.records) == 1
    assert federation.state.round == 1


def test_one_diverged_client_does_not_stop_the_others():
    x, y = toy(8)
    history = Federation(mlp(), [(x * math.nan, y), toy(6, 2)], rounds=2).fit()
    assert [[r["client"] for r in record.refused] for record in history.records] == [[0], [0]]
    assert all(p.isfinite().all() for p in history.model.parameters())


def test_a_round_without_updates_has_no_training_loss(spy: Spy):
    spy.spoil = lambda update: replace(update, method="another")
    record = next(Federation(mlp(), clients(5), rounds=1).rounds())
    assert len(record.refused) == 1
    assert record.train_loss is None or math.isnan(record.train_loss)


# Sub-models -------------------------------------------------------------------------------------------------


def deep() -> nn.Sequential:
    """Stages a, b and head; `shallow` lacks b, and its names nest."""
    model = nn.Sequential()
    for name, (inputs, outputs) in {"a": (4, 5), "b": (5, 5), "head": (5, 3)}.items():
        model.add_module(name, seeded(lambda i=inputs, o=outputs: nn.Linear(i, o), seed=len(name)))
    return model


def shallow() -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("a", nn.Linear(4, 5))
    model.add_module("head", nn.Linear(5, 3))
    return model


def depth_of(client: int) -> str:
    return "shallow" if client in (0, 2) else ""


def test_sub_models_are_averaged_over_their_owners(spy: Spy):
    """Clients 0 and 2 hold a and head, 1 and 3 also b. By name: Σ n_k Δ_k / Σ n_k over those who hold it."""
    counts = [5, 6, 7, 8]
    federation = Federation(
        deep(), clients(*counts), toy(9), rounds=2, archs={"shallow": shallow()}, arch_of=depth_of, lr=0.3
    )
    before = clone(federation.state.params)
    rounds = federation.rounds()
    next(rounds)
    assert [sorted(u.delta) == sorted(before) for u in spy.updates] == [False, True, False, True]
    assert sorted(spy.updates[0].delta) == ["a.bias", "a.weight", "head.bias", "head.weight"]
    for name, value in before.items():
        holders = [1, 3] if name.startswith("b.") else [0, 1, 2, 3]
        deltas = [spy.updates[k].delta[name].double().numpy() for k in holders]
        mean = np.average(deltas, axis=0, weights=[counts[k] for k in holders])
        np.testing.assert_allclose(federation.state.params[name], value.double().numpy() + mean, rtol=1e-5, atol=1e-7)
    sent = [a for a in spy.sent if a.client == 0]
    assert all(torch.equal(sent[0].params[n], before[n]) for n in sent[0].params)
    next(rounds)
    sent = [a for a in spy.sent if a.client == 0]
    assert all(torch.equal(sent[1].params[n], spy.sent[5].params[n]) for n in sent[1].params)


def test_a_shallow_client_trains_its_own_model(spy: Spy):
    """One full-batch step of client 0 on head∘a, against torch."""
    (x, y), model = toy(5, seed=10), deep()
    Federation(model, [(x, y)], rounds=1, archs={"shallow": shallow()}, arch_of=lambda c: "shallow", lr=0.3).fit()
    mine = shallow()
    mine.load_state_dict({n: t for n, t in model.state_dict().items() if not n.startswith("b.")})
    before = clone(dict(mine.named_parameters()))
    loss = nn.functional.cross_entropy(mine(x), y)
    grads = torch.autograd.grad(loss, list(mine.parameters()))
    for (name, _), grad in zip(before.items(), grads, strict=True):
        torch.testing.assert_close(spy.updates[0].delta[name], -0.3 * grad, rtol=1e-4, atol=1e-6)


def test_a_name_that_nobody_holds_in_a_round_stays():
    federation = Federation(deep(), clients(5, 6), rounds=3, archs={"shallow": shallow()}, arch_of=lambda c: "shallow")
    before = clone(federation.state.params)
    federation.fit()
    after = federation.state.params
    assert {n for n in after if torch.equal(after[n], before[n])} == {"b.weight", "b.bias"}


def test_owners_reach_the_techniques():
    seen: list[dict[str, int]] = []

    @dataclass(frozen=True, kw_only=True)
    class Looks(Technique):
        name: ClassVar[str] = "looks"

        def apply(self, state: Tensors, delta: Tensors, round: Any) -> tuple[Tensors, Tensors]:
            seen.append({n: round.owners(n) for n in round.params})
            return delta, state

    Federation(
        deep(),
        clients(5, 6, 7, 8),
        rounds=1,
        participation=1,
        method=chain(Looks()),
        archs={"shallow": shallow()},
        arch_of=depth_of,
    ).fit()
    assert seen == [{"a.weight": 4, "a.bias": 4, "b.weight": 2, "b.bias": 2, "head.weight": 4, "head.bias": 4}]


def test_a_sub_model_with_names_of_its_own():
    with pytest.raises(UsageError, match=r"'other' has '0\.weight'"):
        Federation(deep(), clients(5), archs={"other": mlp()})


def test_a_sub_model_must_fit_the_data():
    """The same names and shapes, but a layer in the wrong place."""
    turned = nn.Sequential()
    turned.add_module("b", deep().b)
    turned.add_module("a", deep().a)
    with pytest.raises(UsageError, match="does not take inputs"):
        Federation(deep(), clients(5), archs={"turned": turned})


def narrow() -> nn.Sequential:
    """The names of the model, but other shapes."""
    model = nn.Sequential()
    model.add_module("a", nn.Linear(4, 2))
    model.add_module("head", nn.Linear(2, 3))
    return model


@pytest.mark.parametrize(
    ("archs", "arch_of", "says"),
    [
        ({"narrow": narrow}, lambda c: "narrow", "head.weight|a.weight|a.bias"),
        ({"shallow": shallow}, lambda c: "shalow", "shalow"),
    ],
)
def test_sub_models_are_checked_before_the_first_round(
    archs: dict[str, Callable[[], nn.Module]], arch_of: Callable[[int], str], says: str
):
    with pytest.raises(UsageError, match=says):
        Federation(deep(), clients(5), archs={n: build() for n, build in archs.items()}, arch_of=arch_of)


def test_changing_a_sub_model_later_changes_nothing():
    """As for the model itself; here a layer is taken away behind the federation's back."""
    results = []
    for change in (False, True):
        small = shallow()
        federation = Federation(deep(), clients(5), rounds=1, archs={"shallow": small}, arch_of=lambda c: "shallow")
        if change:
            small.add_module("more", nn.Tanh())
        federation.fit()
        results.append(weights(federation))
    assert equal(*results)


def stacked(*names: str) -> nn.Sequential:
    """Linear layers of these names, each with its norm, and a head."""
    model = nn.Sequential()
    for name in names:
        model.add_module(name, seeded(lambda: nn.Linear(4, 4)))
        model.add_module(f"{name}_norm", nn.BatchNorm1d(4))
    model.add_module("head", seeded(lambda: nn.Linear(4, 3)))
    return model


def test_sub_models_with_running_statistics(spy: Spy):
    """Statistics of a layer that only some hold are averaged over those, and each gets its own names back."""

    federation = Federation(
        stacked("a", "b"),
        clients(8, 8, 8),
        toy(9),
        rounds=2,
        archs={"s": stacked("a")},
        arch_of=lambda c: "s" if c else "",
    )
    federation.fit()
    assert [r["why"] for record in federation.records for r in record.refused] == []
    last = spy.of(1)
    for name, holders in (("a_norm.running_mean", last), ("b_norm.running_mean", last[:1])):
        expected = np.mean([u.buffers[name].double().numpy() for u in holders], axis=0)
        np.testing.assert_allclose(federation.state.buffers[name], expected, rtol=1e-5, atol=1e-7)
    assert sorted(spy.sent[-1].buffers) == [
        "a_norm.num_batches_tracked",
        "a_norm.running_mean",
        "a_norm.running_var",
    ]


def test_eval_clients_of_sub_models_does_not_depend_on_their_order(monkeypatch: pytest.MonkeyPatch):
    """Clients 0 and 1 hold the whole model, client 2 a part: each is judged by what it holds, with its statistics."""
    federation = Federation(
        stacked("a", "b"),
        clients(8, 8, 8),
        toy(9),
        rounds=1,
        archs={"s": stacked("a")},
        arch_of=lambda c: "" if c < 2 else "s",
        eval_clients=True,
        buffers="local",
        batch_size=4,
    )
    used: list[Tensors] = []

    def evaluate(replica: Any, *args: Any) -> Scores:
        answer = plain(replica, *args)
        used.append({n: b.clone() for n, b in replica.buffers.items() if n.endswith("mean")})
        return answer

    monkeypatch.setattr("fedstrata.evaluation.evaluator.evaluate", evaluate)
    monkeypatch.setattr("fedstrata.engines.serial.evaluate", evaluate)
    federation.fit()
    everywhere, _, _, one, two = used  # the whole model, the part, then each client's
    own = federation._recorder.recall(federation.state, [2])[0][BUFFERS]
    assert torch.equal(
        one["b_norm.running_mean"],
        federation._recorder.recall(federation.state, [1])[0][BUFFERS]["b_norm.running_mean"],
    )
    assert torch.equal(two["a_norm.running_mean"], own["a_norm.running_mean"])
    assert not torch.equal(one["b_norm.running_mean"], everywhere["b_norm.running_mean"])
    assert "b_norm.running_mean" not in two


class Moody:
    """A dataset whose rows come with noise from Python's and NumPy's own generators."""

    def __init__(self, size: int) -> None:
        self.x, self.y = toy(size)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i] + random.random() + np.random.rand(), int(self.y[i])


def test_every_generator_that_a_dataset_may_use_is_seeded_and_given_back():
    results = []
    for mood in (1, 2):
        random.seed(mood)
        np.random.seed(mood)
        before = random.getstate(), np.random.get_state()[1].copy()
        federation = Federation(mlp(), [Moody(6), Moody(9)], Moody(5), rounds=2)
        history = federation.fit()
        assert random.getstate() == before[0]
        assert (np.random.get_state()[1] == before[1]).all()
        results.append((federation.state.params, history.summary["loss"]))
    assert all(torch.equal(p, results[1][0][n]) for n, p in results[0][0].items())
    assert results[0][1] == results[1][1]


def test_under_drop_the_model_that_is_delivered_is_the_one_that_was_evaluated():
    x, y = toy(200)
    history = Federation(normed_mlp(), [(x, y)], (x, y), rounds=3, lr=0.3, buffers="drop").fit()
    with torch.no_grad():
        found = (history.model(x).argmax(1) == y).double().mean().item()
    assert found == pytest.approx(history.accuracy, abs=1e-9)


def normed_mlp() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))


def test_a_resume_with_another_model_or_other_data_is_refused(tmp_path: Path):
    settings = {"rounds": 3, "out": tmp_path / "run", "checkpoint_seconds": 0}
    rounds = Federation(mlp(), clients(5, 6), **settings).rounds()
    next(rounds)
    rounds.close()
    for model, data, says in (
        (normed_mlp(), clients(5, 6), "another model"),
        (mlp(), clients(5, 7), "other data"),
        (mlp(), clients(5, 6, 7), "another number of clients: 2 instead of 3"),
    ):
        with pytest.raises(UsageError, match=says):
            Federation(model, data, **settings, resume=True)
    assert len(Federation(mlp(), clients(5, 6), **settings, resume=True).fit().records) == 3


def test_another_version_of_torch_is_noted(tmp_path: Path):
    settings = {"rounds": 2, "out": tmp_path / "run", "checkpoint_seconds": 0}
    rounds = Federation(mlp(), clients(5, 6), **settings).rounds()
    next(rounds)
    rounds.close()
    about = tmp_path / "run" / "versions.json"
    about.write_text(about.read_text().replace(torch.__version__, "1.0"))
    (note,) = Federation(mlp(), clients(5, 6), **settings, resume=True).notes
    assert "torch 1.0" in note


def test_a_buffer_policy_that_the_method_contradicts():
    with pytest.raises(UsageError, match="leave one out"):
        Federation(mlp(), clients(5), method="fedavg(buffers='local')", buffers="drop")


@pytest.mark.parametrize(
    "data",
    [
        [{"x": 1, "y": 2}],
        [(torch.zeros(4), 0), (torch.zeros(5), 1)],
    ],
    ids=["dicts", "ragged"],
)
def test_rows_that_cannot_be_read(data: list[Any]):
    with pytest.raises(UsageError, match="cannot be read as"):
        Federation(mlp(), [data])


class Careless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layr(x)


def test_a_mistake_in_the_users_own_model():
    with pytest.raises(UsageError, match="layr"):
        Federation(Careless(), clients(5))


def test_a_slot_of_a_type_that_messages_do_not_carry(spy: Spy):
    spy.spoil = lambda update: replace(update, slots={"x": {"a": torch.zeros(1, dtype=torch.complex64)}})
    record = next(Federation(mlp(), clients(5), rounds=1).rounds())
    assert "do not carry" in record.refused[0]["why"]


def test_numbers_of_numpy_are_numbers():
    settings = {"rounds": np.int64(2), "lr": np.float64(0.5), "participation": np.int64(1), "seed": np.int32(3)}
    assert len(Federation(mlp(), clients(5, 6), **settings).fit().records) == 2


def test_a_sub_models_buffers_must_be_the_models_too():
    counting = deep()
    counting.a.register_buffer("seen", torch.zeros(1))
    with pytest.raises(UsageError, match=r"'other' has 'a\.seen'"):
        Federation(deep(), clients(5), archs={"other": counting})
