"""Probes in a run: they change nothing, say what independent loops say, and are written once for every round."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Update
from fedstrata.errors import FedstrataError, UsageError
from fedstrata.models.registry import build_model
from fedstrata.probes.registry import PROBES
from fedstrata.run import open_run, resume_run
from fedstrata.system.machine import compute_with
from fedstrata.techniques.inco import FIGURES
from tests.engines.worlds import (
    SIZES,
    Shaken,
    check_same,
    convnet,
    federation,
    flat,
    mlp,
    noisy,
    pictures,
    points,
    run,
    seeded,
    staged,
)
from tests.small_runs import config, fedstrata, metrics, one_sentence, options, same

EVERYTHING = 1000
"""More examples than any client or test set here has."""
SMALL: dict[str, Any] = {"model": "mlp(hidden=(4,))", "method": "fedavg", "workers": 1, "rounds": 3}
"""The command's small run, smaller."""
SPATIAL = frozenset({"divergence", "proxy", "weightdiv", "cosine"})
"""Probes that give a number for each stratum."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models this small are no faster with more threads; and a map of few points takes no time."""
    monkeypatch.setattr("fedstrata.probes.registry.POINTS", 24)
    with compute_with(1):
        yield


# Worlds -------------------------------------------------------------------------------------------------------


def photos(**settings: Any) -> dict[str, Any]:
    """Clients of pictures, and a convolutional net with batch norm."""
    clients = [pictures(size, seed) for seed, size in enumerate((9, 14, 3, 12, 7))]
    return {"model": convnet(), "clients": clients, "test": pictures(16, 99), "rounds": 2, **settings}


def tower(depth: int = 3) -> nn.Sequential:
    """Equal layers, of which a shallower model holds the first ones; and batch norm."""

    def build() -> nn.Module:
        layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh())]
        parts = {"stem": nn.Linear(6, 6), "norm": nn.BatchNorm1d(6), "body": nn.Sequential(*layers[: 2 * depth])}
        return nn.Sequential(OrderedDict([*parts.items(), ("head", nn.Linear(6, 4))]))

    model: nn.Sequential = seeded(build)
    return model


def depths(**settings: Any) -> dict[str, Any]:
    """Clients whose models are of three depths."""
    return {
        "model": tower(),
        "archs": {"one": tower(1), "two": tower(2)},
        "arch_of": lambda client: ("one", "two", "")[client % 3],
        "participation": 5,
        "rounds": 2,
        **settings,
    }


class Plain(nn.Module):
    """A model that is not an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.first(x)).relu())
        return logits


class Rows(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """A map-style dataset, which counts how often it is read."""

    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.x, self.y = data
        self.read = 0

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read += 1
        return self.x[index], int(self.y[index])


def tokens(clients: int = 3) -> dict[str, Any]:
    """Clients of texts, and a recurrent model for them."""
    rng = torch.Generator().manual_seed(0)
    parts = [
        (torch.randint(0, 5, (8, 6), generator=rng), torch.randint(0, 5, (8,), generator=rng)) for _ in range(clients)
    ]
    model = build_model("chargru(vocab=5, embedding=3, hidden=4, layers=1)", (6,), 5, seed=0)
    return {"model": model, "clients": parts, "test": parts[0], "participation": 1.0, "rounds": 2}


# Read-only ----------------------------------------------------------------------------------------------------

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "serial": lambda: photos(engine="serial"),
    "processes": lambda: photos(engine="processes", workers=2),
    "vmap": lambda: photos(model=convnet(lambda width: nn.GroupNorm(2, width)), engine="vmap", method="scaffold"),
    "wire": lambda: photos(engine="wire"),
    "average": lambda: photos(buffers="average", method="scaffold"),
    "local": lambda: photos(buffers="local", eval_clients=True),
    "drop": lambda: photos(buffers="drop"),
    "local, processes": lambda: photos(buffers="local", method="scaffold", engine="processes", workers=2),
    "partial updates": lambda: photos(method="fedpart(full_rounds=1, rounds_per_stratum=1)", rounds=3),
    "fedimpro": lambda: photos(method="fedimpro(split='relu')"),
    "moon": lambda: photos(method="moon"),
    "feddyn": lambda: photos(method="feddyn"),
    "depths": lambda: depths(method="heteroavg + inco"),
    "depths, processes": lambda: depths(method="heteroavg + inco", engine="processes", workers=2),
    "groups": lambda: depths(method="groupavg"),
    "groups, wire": lambda: depths(method="groupavg + scaffold", engine="wire"),
    "dropout": lambda: {"model": noisy(), "rounds": 2},
    "random transforms": lambda: {"clients": [Shaken(pair) for pair in flat()], "test": Shaken(points(16, 99))},
    "not a sequential": lambda: {"model": seeded(Plain)},
    "tokens": tokens,
    "an epilogue": lambda: photos(method="fedavg + ccvr"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_with_all_probes_has_the_bits_of_one_without(case: str) -> None:
    bare, probed = run(**CASES[case]()), federation(**CASES[case](), probe="all")
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    probed.fit()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(np.array_equal(one, other) for one, other in zip(np.random.get_state(), states[2], strict=True))
    assert probed.engine == CASES[case]().get("engine", probed.engine)
    check_same(probed, bare)
    for client in range(len(probed.clients)):
        ours, theirs = probed.memory(client), bare.memory(client)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[slot][name]) for slot in ours for name, tensor in ours[slot].items())
    assert [row["round"] for row in probed.probes] == list(range(1, probed.settings.rounds + 1))
    assert bare.probes == []
    for row in probed.probes:
        check_row(row, probed)


def check_row(row: dict[str, Any], fed: fs.Federation) -> None:
    """A line of the form that was agreed on: finite numbers, known names, seconds for all, reasons for what is not."""
    json.dumps(row, allow_nan=False)
    strata = [stratum.name for stratum in fed.strata]
    asked = set(PROBES)
    assert row["seconds"].keys() == asked
    assert all(0 <= spent < 60 for spent in row["seconds"].values())
    assert set(row) <= {"round", "clients", "seconds", "missed", *asked}
    missed = row.get("missed", {})
    assert all(isinstance(why, str) and why for why in missed.values())
    last = row["round"] == fed.settings.rounds
    due = asked if last else asked - {"embedding"}
    assert set(row) & asked == due - missed.keys()
    assert row["clients"] == sorted(set(row["clients"]))
    for name in (SPATIAL | {"scores"}) & row.keys():
        assert list(row[name]) == [s for s in strata if s in row[name]], name
        assert row[name]
        assert all(isinstance(value, float) for value in row[name].values()), name
        assert all(value == float(f"{value:.6g}") for value in row[name].values()), name
    if "cka" in row:
        count = len(row["clients"])
        means, matrices = row["cka"]["mean"], row["cka"]["matrix"]
        assert list(means) == [stage for stage in matrices if stage in means]
        for matrix in row["cka"]["matrix"].values():
            assert [len(line) for line in matrix] == [count] * count
    if "gradnorm" in row:
        lengths = {len(norms) for side in ("alone", "averaged") for norms in row["gradnorm"][side].values()}
        assert len(lengths) == 1
        assert row["gradnorm"]["alone"].keys() == row["gradnorm"]["averaged"].keys()
    if "embedding" in row:
        found = row["embedding"]
        assert len(found["points"]) == len(found["labels"]) == len(found["clients"]) > 0
        assert set(found["clients"]) <= set(row["clients"])
        assert {len(point) for point in found["points"]} == {2}


def test_what_is_missed_and_why() -> None:
    """A plain model's strata can be measured, and so can its stages, which are found."""
    row = run(**photos(method="heteroavg + inco"), probe="all").probes[-1]
    assert set(row.get("missed", {})) <= {"crossing", "scores", "aggregation"}
    row = run(**{**CASES["not a sequential"](), "rounds": 1}, probe="all").probes[0]
    missed = row["missed"]
    assert set(missed) == {"crossing", "scores", "aggregation"}
    assert "inco" in missed["crossing"]
    assert {"divergence", "proxy", "weightdiv", "cosine", "gradnorm", "calibration", "statistics"} <= row.keys()
    assert {"cka", "drift"} <= row.keys()
    row = run(mlp(), rounds=1, probe="statistics proxy").probes[0]
    assert set(row["missed"]) == {"statistics"}
    assert "running statistics" in row["missed"]["statistics"]


def test_tokens_are_measured() -> None:
    row = run(**tokens(), probe="all").probes[-1]
    assert {"divergence", "proxy", "weightdiv", "cosine", "gradnorm", "calibration", "cka"} <= row.keys()


# Values -------------------------------------------------------------------------------------------------------

Messages = list[tuple[Assignment, Update]]


def overheard(fed: fs.Federation, monkeypatch: pytest.MonkeyPatch) -> Messages:
    """Copies of all messages, as they come."""
    messages: Messages = []
    original = fed._engine.run

    def listen(assignments: Any, recall: Any) -> Iterator[Any]:
        for assignment, (update, memory) in zip(assignments, original(assignments, recall), strict=True):
            messages.append((copy.deepcopy(assignment), copy.deepcopy(update)))
            yield update, memory

    monkeypatch.setattr(fed._engine, "run", listen)
    return messages


class Heard:
    """A federation that has run, with the states between its rounds and what clients sent in each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        settings = {"rounds": 2, "engine": "serial", "probe": "all", "probe_examples": EVERYTHING, **settings}
        self.fed = federation(**settings)
        messages = overheard(self.fed, monkeypatch)
        self.states = [self.fed.state, *(self.fed.state for _ in self.fed.rounds())]
        self.updates: list[dict[int, Update]] = [{} for _ in self.fed.records]
        for asked, update in messages:
            self.updates[asked.round][asked.client] = update

    def sent(self, number: int) -> dict[int, Tensors]:
        """Client → the change that it sent, of the clients that were measured."""
        return {client: self.updates[number][client].delta for client in self.fed.probes[number]["clients"]}

    def model(self, build: Callable[[], nn.Module], params: Tensors, buffers: Tensors) -> nn.Module:
        model = build()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_({**params, **buffers}.get(name, tensor))
        return model.eval()

    def at(self, build: Callable[[], nn.Module], number: int) -> nn.Module:
        """The global model before round `number`."""
        return self.model(build, self.states[number].params, self.states[number].buffers)

    def local(self, build: Callable[[], nn.Module], number: int) -> list[nn.Module]:
        """The measured clients' models after their training."""
        state = self.states[number]
        return [
            self.model(
                build,
                {n: p + delta.get(n, torch.zeros_like(p)) for n, p in state.params.items()},
                {**state.buffers, **self.updates[number][client].buffers},
            )
            for client, delta in self.sent(number).items()
        ]

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        examples = self.fed.clients[client]
        return examples.batch(torch.arange(len(examples)))


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, np.ndarray[Any, Any]]:
    """Of the mean loss over all rows."""
    loss = F.cross_entropy(model(x), y)
    names = [name for name, _ in model.named_parameters()]
    return {n: g.numpy() for n, g in zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True)}


def rows_of(vectors: Sequence[Any], names: Sequence[str]) -> np.ndarray[Any, Any]:
    """One row per client: its tensors of these names, one after the other."""
    return np.stack([np.concatenate([np.asarray(mine[n]).ravel() for n in names]) for mine in vectors]).astype(float)


def divergences(vectors: Sequence[Any], names: Sequence[str]) -> float:
    """Eq. 1."""
    rows = rows_of(vectors, names)
    return float(np.mean([np.sqrt(((row - rows.mean(0)) ** 2).sum() / rows.shape[1]) for row in rows]))


def close(found: Any, expected: Any) -> None:
    """The same up to the digits that are written."""
    np.testing.assert_allclose(np.array(found, float), np.array(expected, float), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_divergence_is_that_of_gradients_at_the_model_before_the_round(
    buffers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard(monkeypatch, **photos(buffers=buffers, probe="divergence"))
    for number, row in enumerate(heard.fed.probes):
        assert row["clients"] == sorted(heard.updates[number])
        model = heard.at(convnet, number)
        found = [gradients(model, *heard.data(client)) for client in row["clients"]]
        expected = {stratum.name: divergences(found, stratum.params) for stratum in heard.fed.strata}
        assert row["divergence"].keys() == expected.keys()
        close(list(row["divergence"].values()), list(expected.values()))
        assert min(expected.values()) > 1e-3


def test_divergence_of_identical_clients_is_zero() -> None:
    row = run(clients=[points(12, 3)] * 4, batch_size=12, probe="divergence proxy weightdiv cosine").probes[0]
    assert set(row["divergence"].values()) == {0.0}
    for probe in ("proxy", "weightdiv"):  # of a whole batch, but in any order: up to rounding
        assert max(row[probe].values()) < 1e-6
    close(list(row["cosine"].values()), [1.0, 1.0])


def test_measures_of_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(monkeypatch, **photos(probe="proxy weightdiv cosine"))
    for number, row in enumerate(heard.fed.probes):
        sent = list(heard.sent(number).values())
        for stratum in heard.fed.strata:
            rows = rows_of(sent, stratum.params)
            close(row["proxy"][stratum.name], divergences(sent, stratum.params))
            close(row["weightdiv"][stratum.name], np.linalg.norm(rows - rows.mean(0), axis=1).mean())
            cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in combinations(rows, 2)]
            close(row["cosine"][stratum.name], np.mean(cosines))


def test_updates_of_three_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stratum is compared among those that hold it; the deepest layer may have but one holder, or none."""
    heard = Heard(monkeypatch, **depths(method="heteroavg", probe="proxy weightdiv cosine", participation=1.0))
    for number, row in enumerate(heard.fed.probes):
        for stratum in heard.fed.strata:
            holders = [mine for mine in heard.sent(number).values() if set(stratum.params) <= mine.keys()]
            assert len(holders) > 1
            rows = rows_of(holders, stratum.params)
            close(row["proxy"][stratum.name], divergences(holders, stratum.params))
            close(row["weightdiv"][stratum.name], np.linalg.norm(rows - rows.mean(0), axis=1).mean())
        assert len([mine for mine in heard.sent(number).values() if "body.4.weight" in mine]) == 2


def test_divergence_of_three_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client's gradient is taken at its own part of the model."""
    heard = Heard(monkeypatch, **depths(method="heteroavg", probe="divergence", participation=1.0))
    builds = [lambda: tower(1), lambda: tower(2), tower]
    for number, row in enumerate(heard.fed.probes):
        found = [gradients(heard.at(builds[c % 3], number), *heard.data(c)) for c in row["clients"]]
        for stratum in heard.fed.strata:
            holders = [mine for mine in found if set(stratum.params) <= mine.keys()]
            close(row["divergence"][stratum.name], divergences(holders, stratum.params))


def test_groups_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups share nothing: the strata of each are compared among its own clients."""
    heard = Heard(monkeypatch, **depths(method="groupavg", probe="divergence proxy", participation=1.0))
    row, sent = heard.fed.probes[0], heard.sent(0)
    assert len(row["divergence"]) == len(row["proxy"]) == len(heard.fed.strata) == 3 + 4 + 5
    for stratum in heard.fed.strata:
        holders = [mine for mine in sent.values() if set(stratum.params) <= mine.keys()]
        assert len(holders) == 2
        close(row["proxy"][stratum.name], divergences(holders, stratum.params))


def test_strata_that_did_not_travel_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    method = "fedpart(full_rounds=1, rounds_per_stratum=1)"
    heard = Heard(monkeypatch, **photos(method=method, rounds=4, probe="divergence proxy weightdiv"))
    partial = 0
    for number, row in enumerate(heard.fed.probes):
        moved = {n for mine in heard.sent(number).values() for n in mine}
        travelled = [stratum.name for stratum in heard.fed.strata if moved & set(stratum.params)]
        assert list(row["proxy"]) == list(row["weightdiv"]) == travelled
        assert len(row["divergence"]) == len(heard.fed.strata)
        partial += len(travelled) < len(heard.fed.strata)
    assert partial >= 2


def accuracies(model: nn.Module, x: Tensor, y: Tensor, classes: int = 4) -> np.ndarray[Any, Any]:
    """Of each class; NaN where there are no examples."""
    with torch.no_grad():
        right = (model(x).argmax(1) == y).numpy().astype(float)
    return np.array([right[y.numpy() == c].mean() if (y == c).any() else np.nan for c in range(classes)])


def skewed_clients() -> list[tuple[Tensor, Tensor]]:
    """Clients of pictures with two of four classes each, or one."""
    made = []
    for client, kept in enumerate([(0, 1), (1, 2), (2, 3), (3,)]):
        x, y = pictures(60, client)
        chosen = torch.isin(y, torch.tensor(kept))
        made.append((x[chosen], y[chosen]))
    return made


def test_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = pictures(40, 99)
    test = (x[y != 2], y[y != 2])  # nobody is asked about class 2
    settings = photos(clients=skewed_clients(), test=test, participation=1.0, epochs=4, lr=0.2)
    heard = Heard(monkeypatch, **settings, probe="calibration")
    inputs, labels = test[0].float() / 255, test[1]
    told = False
    for number, row in enumerate(heard.fed.probes):
        found = row["calibration"]
        before = accuracies(heard.at(convnet, number), inputs, labels)
        after = np.stack([accuracies(model, inputs, labels) for model in heard.local(convnet, number)])
        assert found["before"][2] is found["after"][2] is None
        rest = [0, 1, 3]
        close([found["before"][c] for c in rest], before[rest])
        close([found["after"][c] for c in rest], after.mean(0)[rest])
        held = [sorted({*heard.data(c)[1].tolist()} - {2}) for c in row["clients"]]
        lacks = [[c for c in rest if c not in mine] for mine in held]
        close(found["held"], np.mean([a[mine].mean() for a, mine in zip(after, held, strict=True)]))
        close(found["missing"], np.mean([a[mine].mean() for a, mine in zip(after, lacks, strict=True)]))
        falls = [(before - a)[mine].mean() for a, mine in zip(after, lacks, strict=True)]
        close(found["forgetting"], np.mean(falls))
        told = told or len({round(fall, 3) for fall in falls}) > 1
    assert told


def test_a_client_holds_the_classes_of_all_its_examples() -> None:
    """However few of them are measured: a client with two examples of class 3 among sixty still holds it."""
    x, y = pictures(60, 5)
    y = torch.where(torch.arange(60) < 58, y % 2, torch.tensor(3))
    clients = [(x, y), (x.flip(0), (y + 1) % 4)]
    few, whole = (
        run(**photos(clients=clients, participation=1.0, rounds=1), probe="calibration", probe_examples=n).probes[0]
        for n in (16, EVERYTHING)
    )  # the test set has 16 examples: both judge by all of it
    assert few["calibration"] == whole["calibration"]


def test_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The averaged model in evaluation mode, and with the statistics of the one batch that all test examples are."""
    test = pictures(40, 99)[0] // 3, pictures(40, 99)[1]
    heard = Heard(
        monkeypatch, **photos(clients=skewed_clients(), test=test, participation=1.0, epochs=3), probe="statistics"
    )
    inputs, labels = test[0].float() / 255, test[1]
    differs = False
    for number, row in enumerate(heard.fed.probes):
        found, model = row["statistics"], heard.at(convnet, number + 1)
        with torch.no_grad():
            running = float((model(inputs).argmax(1) == labels).double().mean())
            batch = float((model.train()(inputs).argmax(1) == labels).double().mean())
        close([found["running"], found["batch"]], [running, batch])
        differs = differs or running != batch
        told = [heard.updates[number][client].buffers for client in row["clients"]]
        means = np.stack([mine["norm.running_mean"].double().numpy() for mine in told])
        deviation = np.sqrt(np.stack([mine["norm.running_var"].double().numpy() for mine in told]).mean(0) + 1e-5)
        spread = np.mean([np.sqrt((((mine - means.mean(0)) / deviation) ** 2).mean()) for mine in means])
        assert found["spread"].keys() == {"first"}
        close(found["spread"]["first"], spread)
    assert differs


def test_scores_are_what_select_publishes() -> None:
    """After the round, by stratum; a method that has none says so."""
    fed = run(**photos(method="select(score='change', full_rounds=1)"), probe="scores")
    published = fed.method.publish(fed.state.techniques)["score"]
    assert fed.probes[-1]["scores"] == {
        s.name: pytest.approx(published[s.params[0]], rel=1e-5) for s in fed.strata if not s.idle
    }
    missed = run(**photos(method="select(score='cyclic')", rounds=1), probe="scores").probes[-1]["missed"]
    assert "no scores to choose strata by" in missed["scores"]


def test_crossing_is_what_inco_publishes() -> None:
    fed = run(**depths(method="heteroavg + inco"), probe="crossing")
    state, found = fed.state.techniques["inco"], fed.probes[-1]["crossing"]
    assert tuple(found) == FIGURES
    for kind in FIGURES:
        expected = {n.removeprefix(f"{kind}/"): float(v) for n, v in state.items() if n.startswith(f"{kind}/")}
        assert found[kind].keys() == expected.keys()
        assert expected
        close(list(found[kind].values()), [expected[n] for n in found[kind]])


def descent(model: nn.Module, x: Tensor, y: Tensor, strata: Any, lr: float, steps: int) -> dict[str, list[float]]:
    """Norms of the gradients of each stratum, step by step of gradient descent on all rows."""
    found: dict[str, list[float]] = {stratum.name: [] for stratum in strata}
    for _ in range(steps):
        grads = gradients(model, x, y)
        for stratum in strata:
            found[stratum.name].append(float(np.sqrt(sum((grads[n] ** 2).sum() for n in stratum.params))))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= lr * torch.from_numpy(grads[name])
    return found


def test_gradient_norms_around_the_averaging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is the whole client, so that it does not matter how batches are drawn."""
    heard = Heard(monkeypatch, probe="gradnorm", batch_size=50, epochs=5, lr=0.3, schedule="cosine")
    for number, row in enumerate(heard.fed.probes):
        found = row["gradnorm"]
        place = row["clients"].index(found["client"])
        rows = heard.data(found["client"])
        lr = heard.fed.records[number].lr
        steps = len(found["alone"]["0"])
        assert steps > 2
        sides = {"alone": heard.local(mlp, number)[place], "averaged": heard.at(mlp, number + 1)}
        for side, model in sides.items():
            for name, norms in descent(model, *rows, heard.fed.strata, lr, steps).items():
                close(found[side][name], norms)


def hsic(k: np.ndarray[Any, Any], m: np.ndarray[Any, Any]) -> float:
    """The unbiased HSIC of two Gram matrices (Song et al., 2012)."""
    n = len(k)
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    total = np.trace(k @ m) + k.sum() * m.sum() / (n - 1) / (n - 2) - 2 * (k @ m).sum() / (n - 2)
    return float(total / n / (n - 3))


def test_similarity_of_local_models(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = points(40, 98)
    heard = Heard(monkeypatch, test=(x, y), probe="cka", lr=0.3, epochs=4)
    for number, row in enumerate(heard.fed.probes):
        locals_ = heard.local(mlp, number)
        for place, stage in enumerate(("0", "1", "2")):
            with torch.no_grad():
                features = [model[: place + 1](x).double().numpy() for model in locals_]  # type: ignore[index]
            grams = [f @ f.T for f in features]
            expected = [[hsic(a, b) / np.sqrt(hsic(a, a) * hsic(b, b)) for b in grams] for a in grams]
            np.testing.assert_allclose(row["cka"]["matrix"][stage], expected, rtol=1e-4, atol=1e-5)
            pairs = [expected[i][j] for i, j in combinations(range(len(grams)), 2)]
            np.testing.assert_allclose(row["cka"]["mean"][stage], np.mean(pairs), rtol=1e-4)


def test_drift_of_bound_neurons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neuron is bound to a class that the client lacks if it is more active on it than on all that the client holds,
    and the other way round."""
    x = torch.cat([points(20, seed)[0] for seed in (0, 1, 2)])
    y = torch.cat([points(20, seed)[1] for seed in (0, 1, 2)])
    heard = Heard(monkeypatch, test=(x, y), probe="drift", lr=0.3, epochs=4)
    row, before = heard.fed.probes[0], heard.at(mlp, 0)
    held = [set(heard.data(client)[1].tolist()) for client in row["clients"]]
    for place, stage in enumerate(("0", "1")):
        changes: dict[str, list[float]] = {"held": [], "missing": []}
        for model, mine in zip(heard.local(mlp, 0), held, strict=True):
            with torch.no_grad():
                was, now = (m[: place + 1](x).double() for m in (before, model))  # type: ignore[index]
            sums = {"held": [0.0, 0.0], "missing": [0.0, 0.0]}
            for neuron in range(8):
                means = {c: float(was[y == c, neuron].mean()) for c in range(4)}
                for c, value in means.items():
                    if value > max(0, *(v for d, v in means.items() if (d in mine) is not (c in mine))):
                        kind = sums["held" if c in mine else "missing"]
                        kind[0] += float(now[y == c, neuron].mean()) - value
                        kind[1] += value
            for kind_, (change, size) in sums.items():
                if size:
                    changes[kind_].append(change / size)
        for kind_, values in changes.items():
            assert values
            close(row["drift"][kind_][stage], np.mean(values))


# Lines --------------------------------------------------------------------------------------------------------


def lines(out: Path) -> list[dict[str, Any]]:
    """What probes.jsonl says, but for the seconds; every line is strict JSON."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    text = (out / "probes.jsonl").read_text()
    assert text.endswith("\n")
    rows = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def without_seconds(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.parametrize(
    ("rounds", "every", "measured"), [(5, 1, [1, 2, 3, 4, 5]), (5, 2, [2, 4, 5]), (4, 2, [2, 4]), (2, 9, [2])]
)
def test_one_line_for_every_probed_round(tmp_path: Path, rounds: int, every: int, measured: list[int]) -> None:
    fed = run(rounds=rounds, probe="proxy", probe_every=every, out=tmp_path / "run")
    assert [row["round"] for row in lines(tmp_path / "run")] == measured
    assert without_seconds(fed.probes) == lines(tmp_path / "run")
    assert len(metrics(tmp_path / "run")) == rounds


def test_only_what_was_asked_for(tmp_path: Path) -> None:
    fed = run(probe="cosine, divergence", out=tmp_path / "run")
    for row in fed.probes:
        assert set(row) == {"round", "clients", "seconds", "divergence", "cosine"}
        assert row["seconds"].keys() == {"divergence", "cosine"}
    assert [record.clients for record in fed.records] == [row["clients"] for row in fed.probes]


def test_no_probes_no_file(tmp_path: Path) -> None:
    for probe in (None, "", "  "):
        fed = run(probe=probe, out=tmp_path / f"run{probe}")
        assert not (tmp_path / f"run{probe}" / "probes.jsonl").exists()
        assert fed.probes == []


def test_the_map_is_made_in_the_last_round_only() -> None:
    rows = run(**photos(rounds=3), probe="embedding", probe_every=1).probes
    assert ["embedding" in row for row in rows] == [False, False, True]
    assert all(set(row["seconds"]) == {"embedding"} for row in rows)
    labels = set(pictures(16, 99)[1].tolist())
    found = rows[-1]["embedding"]
    each = len(found["labels"]) // len(set(found["clients"]))
    for client in set(found["clients"]):
        mine = [label for label, c in zip(found["labels"], found["clients"], strict=True) if c == client]
        assert len(mine) == each
        assert set(mine) <= labels


def test_probe_clients_limits_who_is_measured() -> None:
    for limit in (2, 3):
        fed = run(participation=1.0, probe="proxy cka", probe_clients=limit)
        for row in fed.probes:
            assert len(row["clients"]) == limit
            assert all(len(matrix) == limit for matrix in row["cka"]["matrix"].values())


def test_probe_examples_limits_what_is_read() -> None:
    """A few rows per client, whatever it holds, and the same ones every round."""
    clients = [Rows(points(60, seed)) for seed in range(3)]
    settings: dict[str, Any] = {"participation": 1.0, "steps": 1, "test": (), "engine": "serial", "rounds": 2}
    fed = federation(clients=clients, **settings)
    fed.fit()
    bare = [data.read for data in clients]
    counted = [Rows(points(60, seed)) for seed in range(3)]
    probed = federation(clients=counted, **settings, probe="divergence", probe_examples=4)
    probed.fit()
    assert [data.read - before for data, before in zip(counted, bare, strict=True)] == [2 * 4] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "workers"), [(0.0, 1), (1e6, 2), (0.0, 2)])
def test_a_run_that_is_killed_between_rounds_and_resumed(tmp_path: Path, seconds: float, workers: int) -> None:
    model = {} if workers == 1 else {"model": "mlp(hidden=(4,))"}
    changes = {"probe": "all", "checkpoint_seconds": seconds, "workers": workers, "rounds": 3, "method": "scaffold"}
    settings = config(**changes, **model)
    open_run(settings, tmp_path / "whole").fit()
    rounds = (fed := open_run(settings, tmp_path / "run")).rounds()
    next(rounds), next(rounds)
    assert [row["round"] for row in lines(tmp_path / "run")] == [1, 2]
    shutil.copytree(tmp_path / "run", tmp_path / "killed", ignore=shutil.ignore_patterns(".lock"))
    rounds.close()
    fed.close()
    resumed = resume_run(tmp_path / "killed")
    assert len(resumed.probes) == resumed.state.round == (2 if seconds == 0 else 0)
    resumed.fit()
    assert same(tmp_path / "killed", tmp_path / "whole")
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole") == without_seconds(resumed.probes)
    assert [row["round"] for row in lines(tmp_path / "whole")] == [1, 2, 3]


def test_killed_after_the_probes_and_before_the_record(tmp_path: Path) -> None:
    """And in the middle of a line: the round is done again, and stands there once."""
    settings = config(**SMALL, probe="proxy cosine")
    open_run(settings, tmp_path / "whole").fit()
    expected = lines(tmp_path / "whole")
    text = (tmp_path / "whole" / "probes.jsonl").read_text().splitlines()
    for place, more in enumerate([text[1], text[1][:40], f"{text[1]}\n{text[2][:9]}", "{}", "null\n"]):
        out = tmp_path / str(place)
        rounds = (fed := open_run(settings, out)).rounds()
        next(rounds)
        rounds.close()
        fed._recorder._directory = None  # this process is no more
        with (out / "probes.jsonl").open("a") as file:
            file.write(more)
        resumed = resume_run(out)
        resumed.fit()
        assert lines(out) == expected == without_seconds(resumed.probes)
        assert same(out, tmp_path / "whole")


def test_an_interrupt_while_probing_leaves_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_run(config(**SMALL, probe="all"), tmp_path / "whole").fit()
    calls = 0
    inside = PROBES["cosine"]

    def interrupted(sight: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return inside(sight)

    with monkeypatch.context() as patch:
        patch.setattr("fedstrata.probes.runner.PROBES", {**PROBES, "cosine": interrupted})
        words = ("run", "--out", tmp_path / "run", *options(**SMALL, probe="all"), "--quiet")
        assert fedstrata(*words) == 130
    assert len(metrics(tmp_path / "run")) == 1
    assert fedstrata("resume", tmp_path / "run", "--quiet") == 0
    assert same(tmp_path / "run", tmp_path / "whole")
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def test_a_federation_without_a_directory_goes_on_after_a_stop() -> None:
    whole = run(probe="proxy", rounds=4)
    fed = federation(probe="proxy", rounds=4)
    for done in range(1, 4):
        rounds = fed.rounds()
        next(rounds)
        rounds.close()
        assert [row["round"] for row in fed.probes] == list(range(1, done + 1))
    fed.fit()
    assert without_seconds(fed.probes) == without_seconds(whole.probes)


@pytest.mark.slow
def test_what_is_measured_does_not_depend_on_the_engine() -> None:
    found = [
        without_seconds(run(**photos(engine=e, workers=w), probe="all").probes)
        for e, w in (("serial", 1), ("processes", 2))
    ]
    assert found[0] == found[1]


# Odd federations ----------------------------------------------------------------------------------------------


def without_test(**settings: Any) -> dict[str, Any]:
    return {**photos(**settings), "test": ()}


def test_without_a_test_set_models_are_shown_clients_examples() -> None:
    fed = run(**without_test(), probe="all")
    for row in fed.probes:
        assert set(row.get("missed", {})) == {"crossing", "scores", "aggregation"}
        assert {"cka", "drift", "calibration", "statistics"} <= row.keys()
    assert fed.records[-1].accuracy is None


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("build", [convnet, staged, mlp])
def test_a_tiny_test_set(build: Callable[[], nn.Module], size: int) -> None:
    """What needs more examples is missed, with a reason; the run goes on."""
    world = photos() if build is convnet else {"test": points(40, 99)}
    x, y = world.pop("test")
    fed = run(**{**world, "model": build(), "test": (x[:size], y[:size]), "rounds": 2}, probe="all")
    assert [row["round"] for row in fed.probes] == [1, 2]
    for row in fed.probes:
        assert row.keys() >= SPATIAL
        check_row(row, fed)


@pytest.mark.parametrize("buffers", ["average", "local", "drop"])
def test_clients_with_one_example_or_none(buffers: Any) -> None:
    sizes = (9, 1, 14, 0, 2, 1)
    clients = [pictures(size, seed) for seed, size in enumerate(sizes)]
    settings = photos(clients=clients, participation=1.0, buffers=buffers)
    fed = run(**settings, probe="all")
    check_same(fed, run(**settings))
    for row in fed.probes:
        assert {0, 2, 4} <= set(row["clients"]) <= {0, 1, 2, 4, 5}
        assert {"divergence", "gradnorm", "calibration"} <= row.keys()
        check_row(row, fed)


def test_clients_that_keep_what_they_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """No parameter travels: local models are measured as they are, or not at all, but not as if nothing had trained."""
    heard = Heard(monkeypatch, method="local", lr=0.3, epochs=4)
    row = heard.fed.probes[-1]
    assert {"proxy", "weightdiv", "cosine"} <= row["missed"].keys()
    assert "cka" in row["missed"] or min(row["cka"]["mean"].values()) < 0.9999
    assert "drift" in row["missed"] or any(row["drift"]["held"].values())
    assert "calibration" in row["missed"] or row["calibration"]["before"] != row["calibration"]["after"]
    if "gradnorm" not in row["missed"]:
        assert row["gradnorm"]["alone"] != row["gradnorm"]["averaged"]


def test_a_client_alone() -> None:
    """What compares clients is missed; what looks at one is not."""
    fed = run(**photos(participation=1), probe="all")
    for row in fed.probes:
        assert len(row["clients"]) == 1
        assert {"gradnorm", "drift", "calibration"} <= row.keys()
        assert "cka" in row["missed"]
        assert all(row.get(probe) != {} for probe in PROBES)
        json.dumps(row, allow_nan=False)


def test_everybody_has_one_example() -> None:
    fed = run(clients=[points(1, seed) for seed in range(5)], probe="all")
    assert [row["round"] for row in fed.probes] == [1, 2, 3]
    for row in fed.probes:
        json.dumps(row, allow_nan=False)
        assert set(row) & set(PROBES) or row["missed"]


def test_updates_that_are_refused_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one client, and then of all: a round without updates has a line, and says why there is nothing in it."""
    fed = federation(participation=1.0, probe="all", engine="serial")
    inside = fed._engine.run
    spoil: list[set[int]] = [set(), {1, 2}, set(range(6))]

    def damaged(assignments: Sequence[Assignment], recall: Any) -> Iterator[Any]:
        for update, memory in inside(assignments, recall):
            if update.client in spoil[update.round]:
                update.delta["0.bias"] = update.delta["0.bias"] * torch.nan
            yield update, memory

    monkeypatch.setattr(fed._engine, "run", damaged)
    rounds = fed.rounds()
    next(rounds), next(rounds)
    assert [row["clients"] for row in fed.probes] == [[0, 1, 2, 3, 4, 5], [0, 3, 4, 5]]
    try:
        next(rounds)
    except FedstrataError:
        assert len(fed.probes) == 2  # the round is not there, nor its line
    else:
        row = fed.probes[2]
        assert row["clients"] == []
        assert row["missed"].keys() == set(PROBES)


def test_map_style_datasets() -> None:
    made = [Rows(points(size, seed)) for seed, size in enumerate(SIZES)]
    fed = run(clients=made, test=Rows(points(16, 99)), probe="all", engine="serial")
    plain = run(test=points(16, 99), probe="all", engine="serial")
    assert without_seconds(fed.probes) == without_seconds(plain.probes)


class Pair(nn.Module):
    """A stage that gives more than one tensor, and one that takes it up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(x), self.value(x)


class Gated(nn.Module):
    """Takes a pair."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0].sigmoid() * pair[1]


class Flaky(nn.Module):
    """Takes batches as large as the run's, and no larger."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 16:
            raise RuntimeError("this batch is too large for me")
        logits: Tensor = self.layer(x)
        return logits


class Turned(nn.Module):
    """Puts the batch second, as recurrent layers do."""

    def forward(self, x: Tensor) -> Tensor:
        return x.T


class Counting(nn.Module):
    """Has a buffer that is no running statistic, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(6, 4), nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        logits: Tensor = self.layer(x)
        return logits


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


ODD: dict[str, Callable[[], nn.Module]] = {
    "a stage of several tensors": lambda: nn.Sequential(nn.Linear(6, 8), Pair(), Gated(), nn.Linear(8, 4)),
    "a batch that lies second": lambda: nn.Sequential(nn.Linear(6, 8), Turned(), Turned(), nn.Linear(8, 4)),
    "odd buffers": Counting,
    "one layer": lambda: nn.Linear(6, 4),
    "one stage": lambda: nn.Sequential(nn.Linear(6, 4)),
    "frozen layers": frozen,
    "only norm layers before the head": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4)),
    "statistics that do not average": lambda: nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 4)),
    "a dead layer": lambda: nn.Sequential(nn.Linear(6, 8), nn.Threshold(1e6, 0.0), nn.Linear(8, 4)),
    "the same layer twice": lambda: (lambda layer: nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 4)))(
        nn.Linear(6, 6)
    ),
    "works in place": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_models(odd: str) -> None:
    """No model keeps a run from going on: what cannot be measured is missed, with a reason."""
    settings: dict[str, Any] = {"model": seeded(ODD[odd]), "test": points(16, 99), "rounds": 2, "engine": "serial"}
    fed = run(**settings, probe="all")
    check_same(fed, run(**settings))
    for row in fed.probes:
        check_row(row, fed)
        assert row.keys() >= SPATIAL


def test_a_model_that_fails_on_what_a_probe_shows_it() -> None:
    """Probes look on: an error of the user's own code inside of one does not end the run."""
    settings: dict[str, Any] = {"model": seeded(Flaky), "test": points(16, 99), "rounds": 2, "engine": "serial"}
    reference = run(**settings)
    fed = run(**settings, probe="all")
    check_same(fed, reference)
    assert any("too large" in row["missed"]["divergence"] for row in fed.probes if 3 in row["clients"])


def test_features_that_do_not_vary_have_no_similarity() -> None:
    """What cannot be measured is left out of the means, and None in the matrix."""
    row = run(seeded(ODD["a dead layer"]), rounds=1, probe="cka").probes[0]
    assert "1" not in row["cka"]["mean"]
    assert all(value is None for line in row["cka"]["matrix"].get("1", []) for value in line)
    assert all(isinstance(value, float) for value in row["cka"]["mean"].values())


def test_frozen_layers_do_not_travel() -> None:
    row = run(frozen(), probe="all").probes[0]
    assert "0" not in row["proxy"] or row["proxy"]["0"] == 0.0
    assert "2" in row["divergence"]


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UsageError, match=r"divergnce.*divergence"):
        federation(probe="divergnce")
    with pytest.raises(UsageError, match="cak"):
        federation(probe="divergence cak")
    for wrong in ({"probe_every": 0}, {"probe_clients": 1}, {"probe_examples": 0}, {"probe": 3}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            federation(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_misspelt_probe_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--probe", "divergnce"], ["--probe", "divergnce,cka"], ["--set", "probe=divergnce"]):
        assert fedstrata("run", "--out", tmp_path / "run", *options(), *words) == 2
        said = one_sentence(capsys)
        assert "divergnce" in said
        assert "divergence" in said
        assert not (tmp_path / "run").exists()


def probes_in(out: Path) -> set[str]:
    """The probes that a run has measured, or tried to."""
    rows = [json.loads(line) for line in (out / "probes.jsonl").read_text().splitlines()]
    return {name for row in rows for name in row["seconds"]}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (["--probe", "proxy", "cosine"], [], {"proxy", "cosine"}),
        ([], ["--probe", "proxy", "cosine"], {"proxy", "cosine"}),
        (["--probe", "proxy,cosine"], [], {"proxy", "cosine"}),
        ([], ["--probe", "proxy,cosine", "weightdiv"], {"proxy", "cosine", "weightdiv"}),
        ([], ["--probe", "proxy cosine"], {"proxy", "cosine"}),
        (["--probe=proxy,cosine"], [], {"proxy", "cosine"}),
        (["--probe", "all"], [], set(PROBES)),
        ([], ["--probe", "proxy", "cosine", "--probe-every", "2"], {"proxy", "cosine"}),
    ],
)
def test_probes_beside_a_configuration(
    tmp_path: Path, before: list[str], after: list[str], expected: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "CONFIG.toml"
    file.write_text("rounds = 1\n")
    small = options(**SMALL)
    words = [word for pair in zip(small[::2], small[1::2], strict=True) if pair[0] != "--rounds" for word in pair]
    out = tmp_path / "run"
    assert fedstrata("run", *before, file, *after, "--out", out, *words, "--quiet") == 0
    assert probes_in(out) == expected
    assert len(metrics(out)) == 1
    assert "accuracy" in capsys.readouterr().out


def test_probes_from_a_file_and_options_that_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "CONFIG.toml"
    file.write_text('probe = "proxy weightdiv"\nprobe_every = 2\nprobe_clients = 2\n')
    small = options(**SMALL, participation=1.0)
    assert fedstrata("run", file, "--out", tmp_path / "a", *small, "--quiet") == 0
    assert [row["round"] for row in lines(tmp_path / "a")] == [2, 3]
    assert [len(row["clients"]) for row in lines(tmp_path / "a")] == [2, 2]
    assert probes_in(tmp_path / "a") == {"proxy", "weightdiv"}
    words = ("--probe", "cosine", "--probe-every", 3)
    assert fedstrata("run", file, *words, "--out", tmp_path / "b", *small, "--quiet") == 0
    assert probes_in(tmp_path / "b") == {"cosine"}
    assert len(lines(tmp_path / "b")) == 1
    assert capsys.readouterr().err == ""


def test_a_misspelt_word_among_several_probes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence that names it, though it may be told as a file that there is not."""
    assert fedstrata("run", "--out", tmp_path / "run", *options(), "--probe", "divergence", "cka", "gradnrom") == 2
    assert "gradnrom" in one_sentence(capsys)
    assert not (tmp_path / "run").exists()


def test_the_list_of_probes(capsys: pytest.CaptureFixture[str]) -> None:
    assert fedstrata("list", "probes", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(PROBES)
    named = {"divergence", "proxy", "weightdiv", "cosine", "cka", "gradnorm", "drift", "calibration"}
    assert named | {"statistics", "crossing", "embedding"} <= {row["name"] for row in rows}
    assert all(len(row["help"]) > 20 for row in rows)
    assert all(row["arguments"] == "" for row in rows)  # they are named without any
    assert fedstrata("list", "probes") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in PROBES)


def test_all_architectures_are_looked_at() -> None:
    """Groups of clients follow each other; a few of each are measured, not the first ones."""
    model = build_model("mlp(hidden=(4, 4, 4))", (3, 6, 6), 4, seed=0)
    archs = {name: build_model(name, (3, 6, 6), 4, seed=0) for name in ("mlp(hidden=(4, 4))", "mlp(hidden=(4, 4, 4))")}
    groups = list(archs)
    parties = [pictures(8, seed) for seed in range(12)]
    settings: dict[str, Any] = {"rounds": 4, "steps": 1, "probe": "proxy", "probe_clients": 4, "engine": "serial"}
    fed = fs.Federation(model, parties, archs=archs, arch_of=lambda client: groups[client // 6], **settings)
    fed.fit()
    for row in fed.probes:
        assert len(row["clients"]) == 4
        assert sum(client < 6 for client in row["clients"]) == 2
        assert "fc3.linear" in row["proxy"]
    assert len({tuple(row["clients"]) for row in fed.probes}) > 1
