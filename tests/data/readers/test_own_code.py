"""Data that a function of the user's own makes: clients with test data of their own, words, and what is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.data.client_data import ClientData
from fedstrata.data.datasets import load_dataset
from fedstrata.data.examples import Dataset
from fedstrata.errors import UsageError
from fedstrata.run import deal, divide, open_run

CODE = """
import numpy as np
import torch

def pair(start, rows, words=None):
    x = np.arange(start, start + rows)[:, None] + np.zeros((1, 2))
    y = np.arange(rows) % 2
    return x, (y if words is None else np.array(words)[y])

class Rows(torch.utils.data.Dataset):
    def __init__(self, pair):
        self.pair = pair
    def __len__(self):
        return len(self.pair[0])
    def __getitem__(self, row):
        return self.pair[0][row], str(self.pair[1][row])

def load(kind):
    north, south = (pair(0, 6), pair(100, 3)), (pair(10, 4), pair(200, 2))
    words = [pair(0, 6, ["yes", "no"]), pair(10, 4, ["perhaps", "no"])]
    huge = (pair(0, 4)[0] * 1e300, pair(0, 4)[1])
    far = (pair(0, 6)[0], [1e9 + n / 7 for n in range(6)])
    masks = (np.zeros((4, 1, 8, 8)), np.zeros((4, 7, 7), dtype=int))
    return {
        "own": ({"north": north, "south": south}, None),
        "list": ([north, south], None),
        "both": ([north, south], pair(300, 5)),
        "some": ([north, (south[0], None), (south[1], pair(0, 0))], None),
        "plain": ([north[0], south[0]], None),
        "words": ({"a": words[0], "b": words[1]}, words[1]),
        "lists": ([(x, y.tolist()) for x, y in words], words[1]),
        "objects": ([(x, y.astype(object)) for x, y in words], words[1]),
        "rows": ([Rows(one) for one in words], words[1]),
        "mixed": ([words[0], pair(0, 4)], words[1]),
        "same": ([tuple((x, y * 0) for x, y in north)], None),
        "huge": ([pair(0, 4), huge], pair(0, 4)),
        "far": ([far], far),
        "masks": ([masks], masks),
        "unclear": ([(pair(0, 4), [np.zeros(2), np.zeros(2)])], pair(0, 4)),
    }[kind]
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_sites.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_sites", None)


def load(kind: str, task: str = "") -> Dataset:
    return load_dataset(f"python('own_sites:load', kind='{kind}')", None, task)


def dealt(kind: str) -> ClientData:
    """What a run gives to its natural clients."""
    text = f"python('own_sites:load', kind='{kind}')"
    config = validate_settings(RunConfig, {"dataset": text, "partition": "natural", "clients": 0})
    return divide(config, *deal(config))[0]


@pytest.mark.parametrize("kind", ["own", "list", "both"])
def test_clients_with_test_data_of_their_own(kind: str) -> None:
    data = load(kind)
    assert (data.task, len(data.train), data.input_shape) == ("binary", 10, (2,))
    assert data.group_names == (("north", "south") if kind == "own" else ("client 0", "client 1"))
    assert data.test.x[:, 0].tolist() == ([300, 301, 302, 303, 304] if kind == "both" else [100, 101, 102, 200, 201])
    clients = dealt(kind)
    assert clients.test is not None
    assert [part.batch(torch.arange(len(part)))[0][:, 0].tolist() for part in clients.test] == [
        [100, 101, 102],
        [200, 201],
    ]
    assert [part.labels().tolist() for part in clients.test] == [[0, 1, 0], [0, 1]]
    assert [len(part) for part in clients.train] == [6, 4]


def test_clients_without_any_are_not_judged() -> None:
    assert [group.tolist() for group in load("some").test_groups] == [[0, 1, 2], [], []]


@pytest.mark.parametrize("kind", ["own", "both"])
def test_a_run_judges_every_client(kind: str) -> None:
    values = {
        "dataset": f"python('own_sites:load', kind='{kind}')",
        "partition": "natural",
        "clients": 0,
        "model": "logreg",
        "rounds": 1,
        "workers": 1,
        "engine": "serial",
    }
    federation = open_run(validate_settings(RunConfig, values), None)
    found = federation.fit().client_metrics
    federation.close()
    assert found is not None
    assert len(found) == 2
    assert None not in found


@pytest.mark.parametrize("kind", ["words", "lists", "objects", "rows"])
def test_words_are_classes_by_name(kind: str) -> None:
    data = load(kind)
    assert (data.task, data.classes, data.class_names) == ("classification", 3, ("no", "perhaps", "yes"))
    assert data.train.y.tolist() == [2, 0, 2, 0, 2, 0, 1, 0, 1, 0]
    assert data.test.y.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("kind", "task", "why"),
    [
        ("plain", "", r"returns no test data: return \(clients, test\), or \(train, test\) for every client"),
        ("mixed", "", "some targets are words, and some are numbers"),
        ("words", "regression", "targets are words, which the task 'regression' has no use for"),
        ("same", "", "the target is '0' in every example"),
        ("huge", "", r"client 1: the input of example 1 is 1e\+300, which is beyond what float32 holds"),
        ("far", "regression", "hardly told apart in float32"),
        ("masks", "", "targets of 7×7 do not fit inputs of 1×8×8"),
        ("unclear", "", r"own_sites:load: client 0: this may be \(train, test\)"),
    ],
)
def test_one_sentence_for_each_thing_wrong(kind: str, task: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        load(kind, task)
