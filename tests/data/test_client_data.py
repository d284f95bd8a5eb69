"""What clients bring: (train, test) told from inputs and targets, and examples held out by seed and class."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fedstrata.core.parts import Parts
from fedstrata.data.client_data import ClientData, draw_held_out, hold_out_examples, read_clients
from fedstrata.data.examples import SelectedExamples, Split, TensorExamples
from fedstrata.errors import UsageError


def data(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs that tell where they come from, and labels of three classes."""
    return torch.arange(count, dtype=torch.float32)[:, None] + 100 * seed, torch.arange(count) % 3


PAIR = data(6), data(4, 1)
ENTRIES: dict[str, Any] = {
    "pairs of tensors": PAIR,
    "arrays": tuple((x.numpy(), y.numpy()) for x, y in PAIR),
    "targets in lists": tuple((x, y.tolist()) for x, y in PAIR),
    "datasets": tuple(TensorDataset(*part) for part in PAIR),
    "examples": tuple(TensorExamples(*part) for part in PAIR),
    "functions": (lambda: data(6), lambda: data(4, 1)),
    "of two kinds": (PAIR[0], TensorDataset(*PAIR[1])),
    "inputs of two parts": tuple(((x, x), y) for x, y in PAIR),
    "inputs by name": tuple(({"a": x}, y) for x, y in PAIR),
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_two_that_are_data_themselves_are_train_and_test(kind: str):
    found = read_clients([ENTRIES[kind], data(3)])
    assert [len(examples) for examples in found.train] == [6, 3]
    assert found.test is not None
    assert found.test[1] is None
    assert len(found.test[0]) == 4
    x, y = found.test[0].batch(torch.arange(4))
    inputs = next(iter(x.tensors.values())) if isinstance(x, Parts) else x
    assert inputs.flatten().tolist() == [100, 101, 102, 103]
    assert y.tolist() == [0, 1, 2, 0]


NOT_PAIRS: dict[str, tuple[Any, int]] = {
    "inputs and targets": (data(6), 6),
    "inputs of two parts and targets": (((data(6)[0], data(6)[0]), data(6)[1]), 6),
    "inputs of two parts and a list of targets": (((data(6)[0], data(6)[0]), data(6)[1].tolist()), 6),
    "two examples in a list": ([(torch.zeros(4), 1), (torch.ones(4), 0)], 2),
    "two examples in a tuple": (((torch.zeros(4), 1), (torch.ones(4), 0)), 2),
    "two examples with labels in tensors": (((torch.zeros(4), torch.tensor(1)), (torch.ones(4), torch.tensor(0))), 2),
}


@pytest.mark.parametrize("kind", NOT_PAIRS)
def test_what_was_a_clients_data_still_is(kind: str):
    entry, count = NOT_PAIRS[kind]
    found = read_clients([entry])
    assert found.test is None
    assert len(found.train[0]) == count


def test_one_pair_of_tensors_is_no_list_of_clients():
    with pytest.raises(UsageError, match=r"write \[\(x, y\)\] for a single client"):
        read_clients(data(6))
    found = read_clients((data(6), data(4)))
    assert (found.test, [len(examples) for examples in found.train]) == (None, [6, 4])


def test_a_client_may_bring_none():
    assert read_clients([(data(6), None)]).test is None
    assert read_clients([(data(6), data(0))]).test is None


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ((data(6), list(data(4))), "client 1: this may be (train, test), or inputs of two parts with a list of"),
        ((data(6), (torch.zeros(3, 1), torch.zeros(2))), "client 1: two pairs of tensors are (train, test), and each"),
        ((TensorExamples(*data(6)), torch.zeros(6)), "client 1: the first of the two is data by itself, and the"),
        ((data(0), data(4)), "client 1 has test examples, but none to train on"),
        ((data(3), (torch.zeros(2, 1), torch.tensor([0.5, 1.0]))), "the test data of client 1"),
    ],
)
def test_what_is_refused(entry: Any, why: str):
    with pytest.raises(UsageError) as told:
        read_clients([data(3), entry])
    assert why in str(told.value)
    assert str(told.value).count("\n") == 0


def test_test_data_of_other_clients_is_refused():
    with pytest.raises(UsageError, match="there are 2 clients, and test data of 1"):
        read_clients(ClientData([data(3), data(3)], [data(2)]))


def test_a_share_of_every_class_is_held_out():
    """Of 40, 10 and 3 rows a quarter is 10, 2.5 and 0.75: rounded up or down, and to these in the mean."""
    classes = np.repeat([0, 1, 2], [40, 10, 3])
    counts = []
    for seed in range(400):
        held_out = draw_held_out(np.random.default_rng(seed), classes, 0.25)
        counts.append(np.bincount(classes[held_out], minlength=3))
    found = np.array(counts)
    assert set(found[:, 0]) == {10}
    assert set(found[:, 1]) == {2, 3}
    assert set(found[:, 2]) == {0, 1}
    assert found.mean(0) == pytest.approx([10, 2.5, 0.75], abs=0.1)


def test_a_row_is_left_to_train_on():
    assert not draw_held_out(np.random.default_rng(0), np.array([0]), 0.99).any()
    assert draw_held_out(np.random.default_rng(0), np.arange(50), 0.99).sum() <= 49


def check_two_parts(whole: Any, found: ClientData) -> None:
    """Every example is in one of the two parts, and both share its tensors."""
    assert found.test is not None
    for examples, train, test in zip(whole, found.train, found.test, strict=True):
        parts = [part.batch(torch.arange(len(part)))[0].flatten().tolist() for part in (train, test)]
        assert sorted(parts[0] + parts[1]) == sorted(examples.batch(torch.arange(len(examples)))[0].flatten().tolist())
        assert train.x.data_ptr() == test.x.data_ptr() == examples.x.data_ptr()


def test_a_split_is_split_without_copying():
    split = TensorExamples(*data(90)).split([torch.arange(60), torch.arange(60, 90).flip(0)])
    found = hold_out_examples(ClientData(split), 0.2, 7, by_class=True)
    assert isinstance(found.train, Split)
    assert isinstance(found.test, Split)
    assert [(len(a), len(b)) for a, b in zip(found.train, found.test, strict=True)] == [(48, 12), (24, 6)]
    assert [part.labels().bincount().tolist() for part in found.test] == [[4, 4, 4], [2, 2, 2]]
    check_two_parts(split, found)


def test_a_clients_part_depends_on_nobody_else():
    """The same clients as a split, one by one, beside others: the same examples."""
    clients = [TensorExamples(*data(30, seed)) for seed in range(3)]
    whole = TensorExamples(torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients]))
    split = whole.split([torch.arange(30 * at, 30 * at + 30) for at in range(3)])
    apart = hold_out_examples(ClientData(clients), 0.3, 5, by_class=True)
    check_two_parts(clients, apart)
    together = hold_out_examples(ClientData(split), 0.3, 5, by_class=True)
    other_seed = hold_out_examples(ClientData(clients), 0.3, 6, by_class=True)
    rows = [
        [part.batch(torch.arange(len(part)))[0].flatten().tolist() for part in found.test or ()]
        for found in (apart, together, hold_out_examples(ClientData(clients[:2]), 0.3, 5, by_class=True), other_seed)
    ]
    assert rows[0] == rows[1]
    assert rows[0][:2] == rows[2]
    assert rows[0] != rows[3]


def test_a_dataset_that_is_read_row_by_row():
    found = hold_out_examples(read_clients([TensorDataset(*data(30)), lambda: data(9)]), 0.3, 0, by_class=True)
    assert found.test is not None
    for train, test, count in zip(found.train, found.test, (9, 3), strict=True):
        assert isinstance(test, SelectedExamples)
        assert test.labels().bincount().tolist() == [count // 3] * 3 or count == 3
        x, y = test.batch(torch.arange(len(test)))
        assert torch.equal(x.flatten().long() % 3, y)
        seen = train.batch(torch.arange(len(train)))[0]
        assert not set(seen.flatten().tolist()) & set(x.flatten().tolist())


@pytest.mark.parametrize(
    ("clients", "share", "why"),
    [
        ([PAIR], 0.2, "client 0 brings test data of its own: leave it out, or holdout = 0.2"),
        ([data(1), data(1)], 0.5, "holdout = 0.5 leaves no client an example to be judged by"),
    ],
)
def test_what_cannot_be_held_out(clients: Any, share: float, why: str):
    with pytest.raises(UsageError, match=why):
        hold_out_examples(read_clients(clients), share, 0, by_class=True)
