"""What clients bring: examples to train on and, where there are any, test examples of their own, given or held out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.core.lazy import torch
from fedstrata.core.parts import Parts
from fedstrata.core.rng import derive
from fedstrata.core.types import Examples
from fedstrata.data.cells import Array
from fedstrata.data.examples import (
    ReadTargets,
    SelectedExamples,
    Split,
    TensorExamples,
    as_examples,
    join_examples,
    labels_at_hand,
    per_client,
    sizes,
)
from fedstrata.data.labels import read_classes
from fedstrata.data.no_data import refuse_no_clients
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class ClientData:
    """All clients' data.

    Args:
        train: one entry per client, in any form that a federation takes.
        test: the clients' own test examples, None for a client without any; None if no client has any.
    """

    train: Sequence[Any]
    test: Sequence[Any] | None = None

    def everybodys_test(self) -> Examples | None:
        """All clients' test examples together, which stand for a test set where none is given."""
        if self.test is None or isinstance(self.test, Split):
            return None if self.test is None else self.test.all()
        return join_examples([examples for examples in self.test if examples is not None])


def read_clients(clients: Sequence[Any] | ClientData, read: ReadTargets = read_classes) -> ClientData:
    """Whatever a user hands over for all clients, as Examples.

    An entry is a client's data to train on, or a tuple (train, test). The members of such a tuple are data themselves:
    a pair of tensors (inputs, targets), a Dataset, Examples, or a function that returns one of them; test may be None.
    Two tensors are inputs and targets, and two examples of a client are a list.

    Raises:
        UsageError: for an entry that could be either, or has test examples and none to train on.
    """
    if not isinstance(clients, ClientData):
        clients = _take_all_apart(clients)
    train = per_client(clients.train, read)
    if clients.test is None:
        return ClientData(train)
    if len(clients.test) != len(train):
        raise UsageError(f"there are {len(train)} clients, and test data of {len(clients.test)}")
    test: Sequence[Examples | None]
    if isinstance(clients.test, Split):
        test = per_client(clients.test, read)
    else:
        test = [
            None if data is None else as_examples(data, f"the test data of client {number}", read)
            for number, data in enumerate(clients.test)
        ]
    return _drop_empty(ClientData(train, test))


def _drop_empty(data: ClientData) -> ClientData:
    """The same without test parts that hold nothing; a client that has one must have something to train on."""
    assert data.test is not None
    size = sizes(data.train)
    there = [examples is not None and len(examples) > 0 for examples in data.test]
    for client in (number for number, has in enumerate(there) if has and not size(number)):
        raise UsageError(f"client {client} has test examples, but none to train on")
    if not any(there):
        return ClientData(data.train)
    if isinstance(data.test, Split):
        return data
    return replace(data, test=[examples if has else None for examples, has in zip(data.test, there, strict=True)])


def _take_all_apart(clients: Sequence[Any]) -> ClientData:
    """Entries that are (train, test), as two lists; most federations have none."""
    refuse_no_clients(clients)
    if isinstance(clients, Split) or not isinstance(clients, Sequence):
        return ClientData(clients)
    parts = [take_apart(entry, number) for number, entry in enumerate(clients)]
    train, test = ([part[at] for part in parts] for at in (0, 1))
    kept: Sequence[Any] = tuple(train) if isinstance(clients, tuple) else train  # a pair of tensors is refused by that
    return ClientData(kept, None if all(data is None for data in test) else test)


def take_apart(entry: Any, client: int) -> tuple[Any, Any]:
    """(what a client trains on, its own test data or None)."""
    return entry if _is_train_and_test(entry, client) else (entry, None)


def _is_train_and_test(entry: Any, client: int) -> bool:
    """True for (train, test); a refusal if that cannot be told."""
    if not isinstance(entry, tuple) or len(entry) != 2 or not _is_data(entry[0]):
        return False
    if entry[1] is None:
        return True
    if not _is_data(entry[1]):
        if _is_pair(entry[0]):  # inputs of two parts and their targets, or two examples
            return False
        raise UsageError(
            f"client {client}: the first of the two is data by itself, and the second is not: a client's entry is "
            "its data, or (train, test)"
        )
    if _is_pair(entry):
        raise UsageError(
            f"client {client}: this may be (train, test), or inputs of two parts with a list of targets: write test "
            "as a tuple, or the targets as a tensor"
        )
    if not all(_has_equal_lengths(part) for part in entry):
        raise UsageError(
            f"client {client}: two pairs of tensors are (train, test), and each must have as many targets as inputs; "
            "a client's examples one by one are a list"
        )
    return True


def _is_pair(data: Any) -> bool:
    """True for inputs and targets of several examples."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    inputs, targets = data
    several = isinstance(targets, list) or (isinstance(targets, torch.Tensor | np.ndarray) and targets.ndim > 0)
    return several and isinstance(inputs, torch.Tensor | np.ndarray | Mapping | tuple | Parts)


def _is_data(member: Any) -> bool:
    """True for what is a client's data by itself."""
    if isinstance(member, tuple | list):
        return _is_pair(member)
    if isinstance(member, torch.Tensor | np.ndarray | Mapping | str | bytes | Parts | type):
        return False
    readable = hasattr(member, "__len__") and hasattr(member, "__getitem__")
    return readable or isinstance(member, Examples) or callable(member)


def _has_equal_lengths(part: Any) -> bool:
    """False for a pair of tensors of different length."""
    if not isinstance(part, tuple | list) or not isinstance(part[0], torch.Tensor | np.ndarray):
        return True
    return part[0].ndim > 0 and len(part[0]) == len(part[1])


def draw_held_out(rng: np.random.Generator, classes: Array, share: float) -> Array:
    """Which of a client's rows are for testing: of each class the share of them, rounded up or down by lot.

    One row is left to train on.
    """
    held_out = np.zeros(len(classes), dtype=bool)
    for label in np.unique(classes):
        rows = np.flatnonzero(classes == label)
        count = math.floor(share * len(rows) + rng.random())
        held_out[rng.permutation(rows)[:count]] = True
    if len(classes) and held_out.all():
        held_out[0] = False
    return held_out


def hold_out_examples(data: ClientData, share: float, seed: int, by_class: bool) -> ClientData:
    """Every client's examples in two parts: to train on, and the share of them that is held out to judge it by.

    The choice of a client depends on the seed, its number and its labels alone. Nothing is copied.

    Args:
        data: what clients bring.
        share: above 0 and below 1.
        seed: of the run.
        by_class: hold out the same share of each class, where labels are at hand without reading the inputs.

    Raises:
        UsageError: if a client has test examples already, or nobody has enough examples.
    """
    if data.test is not None:
        client = next(number for number, examples in enumerate(data.test) if examples is not None)
        raise UsageError(f"client {client} brings test data of its own: leave it out, or holdout = {share:g}")

    def draw(client: int, classes: Array) -> Array:
        return draw_held_out(np.random.default_rng(derive(seed, "holdout", client)), classes, share)

    if isinstance(data.train, Split):
        found = _split_in_two(data.train, draw, by_class)
    else:
        found = _select_in_two(data.train, draw, by_class)
    assert found.test is not None
    if not any(examples is not None and len(examples) for examples in found.test):
        raise UsageError(f"holdout = {share:g} leaves no client an example to be judged by: there are too few")
    return found


Draw = Callable[[int, Array], Array]


def _split_in_two(split: Split, draw: Draw, by_class: bool) -> ClientData:
    """A dataset's parts, as two indices into the same tensors."""
    labels = split.all().labels().numpy() if by_class else np.zeros(len(split.order), dtype=np.int64)
    held_out = np.zeros(len(labels), dtype=bool)
    for client in range(len(split)):
        own = slice(int(split.ends[client]), int(split.ends[client + 1]))
        held_out[own] = draw(client, labels[own])
    parts = []
    for chosen in (~held_out, held_out):
        ends = np.concatenate([[0], np.cumsum(chosen)])[split.ends]
        parts.append(replace(split, order=split.order[torch.from_numpy(chosen)], ends=ends))
    return ClientData(*parts)


def _select_in_two(clients: Sequence[Examples], draw: Draw, by_class: bool) -> ClientData:
    train: list[Examples] = []
    test: list[Examples | None] = []
    for client, examples in enumerate(clients):
        known = labels_at_hand(examples) if by_class and len(examples) else None
        classes = np.zeros(len(examples), dtype=np.int64) if known is None else known.numpy()
        held_out = draw(client, classes)
        train.append(_select(examples, ~held_out) if held_out.any() else examples)
        test.append(_select(examples, held_out) if held_out.any() else None)
    return ClientData(train, test)


def _select(examples: Examples, chosen: Array) -> Examples:
    index: Tensor = torch.from_numpy(np.flatnonzero(chosen))
    return examples.select(index) if isinstance(examples, TensorExamples) else SelectedExamples(examples, index)
