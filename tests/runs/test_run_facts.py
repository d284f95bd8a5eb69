"""What a run says of its model and its data: facts.json, against counts and distances made by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.data.examples import Split, TensorExamples
from fedstrata.models.registry import build_model
from fedstrata.models.strata import strata
from fedstrata.run import open_run
from fedstrata.runs.run_facts import run_facts, skew
from fedstrata.system.machine import compute_with
from fedstrata.tasks.classification import CLASSIFICATION
from tests.engines.worlds import convnet, federation, flat, mlp, pictures, points, seeded
from tests.small_runs import config


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are no faster with more threads."""
    with compute_with(1):
        yield


def told(out: Path, model: nn.Module, clients: Any, **settings: Any) -> dict[str, Any]:
    """facts.json of a federation, which is there before the first round."""
    fed = fs.Federation(model, clients, out=out, rounds=1, batch_size=4, engine="serial", **settings)
    read: dict[str, Any] = json.loads((out / "facts.json").read_text())
    assert read == json.loads(json.dumps(fed.saved_run().facts))
    return read


def dealt(*labels: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Clients of these labels."""
    return [(torch.randn(len(some), 6), torch.tensor(some, dtype=torch.int64)) for some in labels]


# Data ---------------------------------------------------------------------------------------------------------


def test_counts_by_hand(tmp_path: Path) -> None:
    found = told(tmp_path / "run", mlp(), dealt([0, 0, 1], [3], [2, 2, 2, 2, 1]))
    assert found["input_shape"] == [6]
    assert found["classes"] == 4
    assert found["class_names"] == ["0", "1", "2", "3"]
    assert found["clients"] == 3
    assert found["examples"] == [3, 1, 5]
    assert found["counts"] == [[2, 1, 0, 0], [0, 0, 0, 1], [0, 1, 4, 0]]
    assert found["buffers"] is False


def test_the_skew_by_hand(tmp_path: Path) -> None:
    """Two clients of one class each, of the same size: everybody's is (½, ½), and both are ½ away. And 0 if alike."""
    assert told(tmp_path / "a", mlp(), dealt([0, 0], [1, 1]))["skew"] == 0.5
    assert told(tmp_path / "b", mlp(), dealt([0, 1, 2], [2, 1, 0, 0, 1, 2]))["skew"] == 0
    labels = [[0, 0], [0, 1, 2], [1]]
    p = np.array([3, 2, 1]) / 6
    mine = np.array([[1, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1, 0]])
    expected = np.mean([np.abs(row - p).sum() / 2 for row in mine])
    assert told(tmp_path / "c", mlp(), dealt(*labels))["skew"] == pytest.approx(expected, abs=1e-6)


def test_the_skew_of_counts() -> None:
    assert skew(torch.tensor([[5, 5], [1, 1]])) == 0
    assert skew(torch.tensor([[4, 0], [0, 0], [0, 4]])) == 0.5  # a client without examples has no mixture
    assert skew(torch.zeros(3, 2, dtype=torch.int64)) == 0
    assert skew(torch.eye(50, dtype=torch.int64)) == pytest.approx(1 - 1 / 50)


def test_a_client_without_examples(tmp_path: Path) -> None:
    found = told(tmp_path / "run", mlp(), dealt([0, 0], [], [1, 1]))
    assert found["examples"] == [2, 0, 2]
    assert found["counts"] == [[2, 0, 0, 0], [0, 0, 0, 0], [0, 2, 0, 0]]
    assert found["skew"] == 0.5


def test_class_names(tmp_path: Path) -> None:
    found = told(tmp_path / "run", mlp(), dealt([0, 1]), class_names=["plane", "car", "bird", "cat"])
    assert found["class_names"] == ["plane", "car", "bird", "cat"]
    open_run(config(dataset="digits", model="cnn2(width=2)", partition="iid"), tmp_path / "digits")
    read = json.loads((tmp_path / "digits" / "facts.json").read_text())
    assert read["class_names"] == [str(digit) for digit in range(10)]
    assert read["input_shape"] == [1, 8, 8]
    assert sum(read["examples"]) == sum(map(sum, read["counts"])) > 1000


def test_a_split_dataset_is_counted_as_its_parts_are(tmp_path: Path) -> None:
    data = fs.load_dataset("digits")
    parts = fs.partition(data.train.labels(), "dirichlet(alpha=0.3)", clients=7, seed=1)
    model = build_model("cnn2(width=2)", data.input_shape, data.classes, seed=0)
    found = told(tmp_path / "a", model, data.train.split(parts))
    rows = [np.bincount(data.train.labels()[part].numpy(), minlength=10) for part in parts]
    assert found["counts"] == [row.tolist() for row in rows]
    everybody = sum(rows) / sum(map(sum, rows))
    expected = np.mean([np.abs(row / row.sum() - everybody).sum() / 2 for row in rows])
    assert found["skew"] == pytest.approx(expected, abs=1e-6)
    assert found["skew"] > 0.2
    pairs = [data.train.select(part) for part in parts]
    assert told(tmp_path / "b", model, pairs) == found


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


def test_datasets_that_would_have_to_be_read_are_not(tmp_path: Path) -> None:
    """Nobody waits for labels that are not at hand: what is not known is left out."""
    clients = [Rows(points(50, seed)) for seed in range(3)]
    found = told(tmp_path / "run", mlp(), clients)
    assert max(data.read for data in clients) < 10
    assert found["clients"] == 3
    assert found["classes"] == 4
    assert "skew" not in found
    assert found.get("counts", []) == []


def many(count: int) -> Split:
    """Clients of two examples each, of one of four classes in turn."""
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(2 * count) // 2 % 4
    whole = TensorExamples(torch.randn(2 * count, 6, generator=rng), y)
    return whole.split(list(torch.arange(2 * count).split(2)))


def test_thousands_of_clients_stay_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones are written; for the skew no more than a bounded number is looked at one by one."""
    calls = 0
    inside = Split.__getitem__

    def counted(split: Split, client: Any) -> Any:
        nonlocal calls
        calls += 1
        return inside(split, client)

    monkeypatch.setattr(Split, "__getitem__", counted)
    model = mlp()
    found = run_facts(model, strata(model), many(20_003), torch.randn(2, 6), CLASSIFICATION)
    assert calls <= 1500
    assert found["clients"] == 20_003
    assert len(found["counts"]) == len(found["examples"]) == 200
    assert found["counts"][:2] == [[2, 0, 0, 0], [0, 2, 0, 0]]
    assert found["skew"] == pytest.approx(0.75, abs=0.01)


def test_the_skew_is_of_all_clients() -> None:
    """Not of every second one, which here all hold the same: everybody's mixture is half and half."""
    y = (torch.arange(4000) // 2) % 2
    whole = TensorExamples(torch.randn(4000, 6), y)
    model = mlp()
    parts = whole.split(list(torch.arange(4000).split(2)))
    found = run_facts(model, strata(model), parts, torch.randn(2, 6), CLASSIFICATION)
    assert found["skew"] == pytest.approx(0.5, abs=1e-6)


# Model --------------------------------------------------------------------------------------------------------


def test_strata_and_fields(tmp_path: Path) -> None:
    """3×3 with padding sees 3 pixels; the next 3×3 sees 5."""
    model = convnet()
    found = told(tmp_path / "run", model, [pictures(8, 0), pictures(8, 1)])
    sizes = {
        "first": sum(p.numel() for m in (model.first, model.norm) for p in m.parameters()),
        "second": sum(p.numel() for p in model.second.parameters()),
        "head": sum(p.numel() for p in model.head.parameters()),
    }
    told_strata = found["model"]["strata"]
    assert {s["name"]: s["parameters"] for s in told_strata} == sizes
    assert [s["name"] for s in told_strata] == ["first", "second", "head"]
    assert [s["stage"] for s in told_strata] == ["first", "second", "head"]
    assert [s["normalised"] for s in told_strata] == [True, False, False]
    assert found["model"]["parameters"] == sum(sizes.values())
    assert found["model"]["fields"] == [
        {"layer": "first", "field": [3, 3], "input": [6, 6]},
        {"layer": "second", "field": [5, 5], "input": [6, 6]},
    ]
    assert found["buffers"] is True
    assert found["input_shape"] == [3, 6, 6]


def test_dense_models_have_no_fields(tmp_path: Path) -> None:
    found = told(tmp_path / "run", mlp(), flat())
    assert found["model"]["fields"] == []
    assert [s["normalised"] for s in found["model"]["strata"]] == [False, False]


def test_a_token_model(tmp_path: Path) -> None:
    model = build_model("chargru(vocab=5, embedding=3, hidden=4, layers=1)", (6,), 5, seed=0)
    x, y = torch.randint(0, 5, (8, 6)), torch.randint(0, 5, (8,))
    found = told(tmp_path / "run", model, [(x, y), (x, y)])
    assert found["input_shape"] == [6]
    assert found["classes"] == 5
    assert found["model"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["skew"] == 0


class Noisy(nn.Module):
    """Draws random numbers, from every generator there is, also when it is not training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        shift = random.random() + float(np.random.rand())
        logits: Tensor = self.layer(x + torch.randn_like(x) + shift)
        return logits


class Remembers(nn.Module):
    """Changes a buffer of its own whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.layer(x)
        return logits


class Pairs(nn.Module):
    """Cannot run on a single example, nor on zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not x.any():
            raise RuntimeError("there is nothing to see")
        logits: Tensor = self.layer(x)
        return logits


class Branching(nn.Module):
    """Chooses its layers by what it sees, and never uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.unused = nn.Linear(6, 4), nn.Linear(6, 4), nn.Conv2d(1, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.left(x) if float(x.sum()) > 0 else self.right(x)
        return logits


@pytest.mark.parametrize("build", [Noisy, Remembers, Pairs, Branching, lambda: nn.Linear(6, 4)])
def test_odd_models(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    """Whatever a model does, its parameters are counted, it stays as it was, and so do all random numbers."""
    model = seeded(build)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    groups = federation(model).strata
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    found = run_facts(model, groups, [TensorExamples(*pair) for pair in flat()], points(2, 0)[0], CLASSIFICATION)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(np.array_equal(one, other) for one, other in zip(np.random.get_state(), states[2], strict=True))
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert found == told(tmp_path / "run", model, flat())
    counted = sum(p.numel() for p in model.parameters())
    assert found["model"]["parameters"] == sum(s["parameters"] for s in found["model"]["strata"]) == counted
    assert found["classes"] == 4
    assert found["buffers"] is bool(before.keys() - dict(model.named_parameters()).keys())


def test_groups_of_architectures(tmp_path: Path) -> None:
    """IsolatedArchitectures side by side: all of them count, and the model answers with one."""
    settings = {"archs": {"small": nn.Linear(6, 4)}, "arch_of": lambda client: "small" if client % 2 else ""}

    class Whole(nn.Linear):
        pass

    fed = federation(Whole(6, 4), method="groupavg", out=tmp_path / "run", **settings)
    read = json.loads((tmp_path / "run" / "facts.json").read_text())
    assert read["model"]["parameters"] == sum(p.numel() for p in fed.state.params.values()) == 2 * 28
    assert read["classes"] == 4


def test_it_is_written_once_and_stays(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings: dict[str, Any] = {"out": out, "rounds": 2, "checkpoint_seconds": 0}
    first = federation(**settings)
    before = (out / "facts.json").read_bytes()
    rounds = first.rounds()
    next(rounds)
    rounds.close()
    assert (out / "facts.json").read_bytes() == before
    del first, rounds
    federation(**settings, resume=True).fit()
    assert (out / "facts.json").read_bytes() == before
    json.loads(before, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def test_a_run_begun_without_facts_goes_on(tmp_path: Path) -> None:
    """A kill between run.toml and facts.json, or a run of an older version."""
    out = tmp_path / "run"
    settings: dict[str, Any] = {"out": out, "rounds": 2, "checkpoint_seconds": 0}
    fed = federation(**settings)
    whole = (out / "facts.json").read_text()
    del fed
    (out / "facts.json").unlink()
    federation(**settings, resume=True).fit()
    assert not (out / "facts.json").exists() or (out / "facts.json").read_text() == whole
