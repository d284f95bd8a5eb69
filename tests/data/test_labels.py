"""Labels: whole numbers from 0 on, below the model's outputs, in whatever they come; nothing is cut or guessed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Subset, TensorDataset

import fedstrata as fs
from fedstrata.data.examples import as_examples, as_unlabelled
from fedstrata.data.labels import class_numbers, class_of, read_classes
from fedstrata.errors import UsageError
from fedstrata.flower.client import Site

ROWS, INPUTS, CLASSES = 12, 4, 3


class Rows(TorchDataset[tuple[Tensor, Any]]):
    """A map-style dataset that has to be read to be known."""

    def __init__(self, labels: Any) -> None:
        self.x = torch.randn(len(labels), INPUTS, generator=torch.Generator().manual_seed(0))
        self.y = labels

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[Tensor, Any]:
        return self.x[row], self.y[row]


class Own:
    """A user's own Examples."""

    def __init__(self, labels: Tensor) -> None:
        self.x, self.y = torch.randn(len(labels), INPUTS), labels

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: Tensor, augment: Any = None) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def labels(self) -> Tensor:
        return self.y


def good() -> list[int]:
    return [row % CLASSES for row in range(ROWS)]


def spoilt(label: Any, at: int) -> list[Any]:
    """Good labels but for one."""
    return [label if row == at else one for row, one in enumerate(good())]


def federation(*clients: Any, test: Any = None, **settings: Any) -> fs.Federation:
    settings = {"rounds": 2, "batch_size": 4, "engine": "serial", **settings}
    return fs.Federation(nn.Linear(INPUTS, CLASSES), clients, test, **settings)


# One label --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "whole"),
    [
        *((kind(2), 2) for kind in (int, float, np.int64, np.uint8, np.float32, np.float64)),
        *((torch.tensor(2, dtype=kind), 2) for kind in (torch.int64, torch.uint8, torch.float32, torch.bfloat16)),
        (torch.tensor([2]), 2),
        (np.array(2), 2),
        (np.array([2]), 2),
        (True, 1),
        (np.bool_(False), 0),
        (torch.tensor(True), 1),
    ],
)
def test_a_whole_number_in_any_form(label: Any, whole: int) -> None:
    assert class_of(label) == whole
    assert type(class_of(label)) is int


WRONG: list[Any] = [
    9.68,
    -100,
    -1.0,
    float("nan"),
    float("inf"),
    1 + 0j,
    None,
    "3",
    "cat",
    np.float32(0.5),
    np.str_("1"),
    torch.tensor(-100),
    torch.tensor(1.5),
    torch.tensor([0.0, 1.0, 0.0]),
    np.array([1, 0]),
    [1],
    {},
]


@pytest.mark.parametrize("label", WRONG, ids=repr)
def test_what_is_no_label(label: Any) -> None:
    with pytest.raises(UsageError, match=r"labels are whole numbers from 0 on, .*\(client 3, example 7\)"):
        class_of(label, "client 3", 7)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.uint16, torch.uint64, torch.float16, torch.float64])
def test_many_whole_numbers(kind: torch.dtype) -> None:
    found = class_numbers(torch.tensor([2, 0, 1]).to(kind))
    assert found.dtype == torch.int64
    assert found.tolist() == [2, 0, 1]
    assert class_numbers(torch.tensor([True, False])).tolist() == [1, 0]
    assert class_numbers([]).tolist() == []


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (torch.tensor([0.0, 9.68]), r"not 9.68.* \(client 3, example 1\)"),
        (np.array([0.0, np.nan]), r"not nan \(client 3, example 1\)"),
        (torch.tensor([0.0, 1e30]), r"not 1.0000.*e\+30 \(client 3, example 1\)"),
        (torch.tensor([1, -100]), r"not -100 \(client 3, example 1\)"),
        (np.array([2**63 + 1], dtype=np.uint64), r"\(client 3, example 0\)"),
        (torch.eye(3), r"not an array of shape \[3, 3\]"),
        (torch.tensor([1j]), "not an array"),
        (np.array(["a", "b"]), r"not .*'a'.* \(client 3\)"),
        (["a", "b"], r"not 'a' \(client 3\)"),
        ([None, 1], r"not None \(client 3\)"),
    ],
)
def test_many_that_are_none(labels: Any, told: str) -> None:
    with pytest.raises(UsageError, match=f"labels are whole numbers.*{told}"):
        as_examples((torch.zeros(len(labels), 1), labels), "client 3")


def test_tensors_given_as_examples_are_whole_too() -> None:
    with pytest.raises(UsageError, match=r"not 0\.5"):
        as_examples(fs.TensorExamples(torch.zeros(2, 1), torch.tensor([1.0, 0.5])))
    assert as_examples(fs.TensorExamples(torch.zeros(2, 1), torch.tensor([1.0, 0.0]))).labels().dtype == torch.int64


# Federations ------------------------------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "a dataset": Rows,
    "a list of rows": lambda labels: list(Rows(labels)),
    "a function": lambda labels: lambda: Rows(labels),
    "a function of rows": lambda labels: lambda: list(Rows(labels)),
    "map examples": lambda labels: fs.MapExamples(Rows(labels)),
}


def test_a_pair_in_the_place_of_a_list_of_clients_is_told_so() -> None:
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    with pytest.raises(UsageError, match=r"clients is a list with one entry per client.*\[\(x, y\)\]"):
        fs.Federation(torch.nn.Linear(2, 2), (x, y))
    for pairs in (((x, y), (x, y)), [(x, y)], [(x, y), (x, y)]):
        assert len(fs.Federation(torch.nn.Linear(2, 2), pairs).clients) == len(pairs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("label", [9.68, -100, -1, "2", None, torch.tensor(0.5)], ids=repr)
def test_the_first_label_is_looked_at_before_anything_is_trained(form: str, label: Any) -> None:
    with pytest.raises(UsageError, match=r"labels are whole numbers from 0 on.*\(client 1, example 0\)"):
        federation(Rows(good()), FORMS[form](spoilt(label, 0)))
    with pytest.raises(UsageError, match=r"labels are whole numbers from 0 on.*\(the test set, example 0\)"):
        federation(Rows(good()), test=FORMS[form](spoilt(label, 0)))


@pytest.mark.parametrize(
    "form", ["a list of rows", "a function of rows", "pair", "function", "TensorDataset", "Subset"]
)
@pytest.mark.parametrize("label", [-100, CLASSES, 7])
def test_all_labels_that_are_at_hand_are_looked_at_before_anything_is_trained(form: str, label: int) -> None:
    labels = spoilt(label, 5)
    rows, y = Rows(labels), torch.tensor(labels)
    data: dict[str, Any] = {
        "a list of rows": list(rows),
        "a function of rows": lambda: list(rows),
        "pair": (rows.x, y),
        "function": lambda: (rows.x, y),
        "TensorDataset": TensorDataset(rows.x, y),
        "Subset": Subset(TensorDataset(rows.x, y), list(range(ROWS))),
    }
    told = r"\(client 1, example 5\)" if label < 0 else rf"there is a label {label} \(client 1, example 5\), but"
    with pytest.raises(UsageError, match=told):
        federation(Rows(good()), data[form])
    with pytest.raises(UsageError, match=told.replace("client 1", "the test set")):
        federation(Rows(good()), test=data[form])


@pytest.mark.parametrize("engine", ["serial", "vmap", "wire", "processes"])
@pytest.mark.parametrize("label", [9.68, -100, CLASSES, "2"], ids=repr)
def test_others_are_looked_at_in_their_batch(label: Any, engine: str) -> None:
    """And the sentence says where it is, from wherever the client is trained."""
    fed = federation(
        Rows(good()), Rows(spoilt(label, 5)), engine=engine, **({"workers": 2} if engine == "processes" else {})
    )
    with pytest.raises(UsageError, match=r"label.*\(client 1, example 5\)"):
        fed.fit()
    assert not fed.records


@pytest.mark.parametrize("label", [9.68, -100, CLASSES])
def test_a_test_set_is_looked_at_in_its_batch(label: Any) -> None:
    with pytest.raises(UsageError, match=r"label.*\(the test set, example 5\)"):
        federation(Rows(good()), test=Rows(spoilt(label, 5))).fit()


@pytest.mark.parametrize("method", ["fedlc", "fedrs", "ccvr(samples=2)", "centralised"])
@pytest.mark.parametrize("label", [9.68, -100, CLASSES])
def test_techniques_that_count_classes(method: str, label: Any) -> None:
    with pytest.raises(UsageError, match=r"label.*example (5|17)\)"):
        federation(Rows(good()), Rows(spoilt(label, 5)), method=method, participation=1.0).fit()


@pytest.mark.parametrize("label", [0.5, -100.0, float(CLASSES)])
def test_a_users_own_examples(label: float) -> None:
    with pytest.raises(UsageError, match=r"label.*\(client 1, example 0\)"):
        federation(Rows(good()), Own(torch.tensor(spoilt(label, 0))))
    with pytest.raises(UsageError, match=r"label.*\(client 1, example 5\)"):
        federation(Rows(good()), Own(torch.tensor(spoilt(label, 5)))).fit()
    federation(Own(torch.tensor(good(), dtype=torch.float32)), Own(torch.tensor(good()))).fit()


def test_two_clients_with_the_same_inputs_and_other_labels() -> None:
    x = torch.randn(ROWS, INPUTS)
    with pytest.raises(UsageError, match=r"there is a label 8 \(client 1, example 5\)"):
        federation((x, good()), (x, spoilt(8, 5)))


def test_a_part_of_a_dataset_is_told_from_the_rest() -> None:
    whole = fs.TensorExamples(torch.randn(ROWS, INPUTS), torch.tensor(spoilt(8, 5)))
    with pytest.raises(UsageError, match=r"there is a label 8 \(client 0, example 1\), but the model has 3 outputs"):
        federation(whole.select(torch.tensor([4, 5])))
    with pytest.raises(UsageError, match=r"there is a label 8 \(all data, example 5\), but the model has 3 outputs"):
        federation(whole.select(torch.tensor([0, 1])))


def test_public_data_has_no_labels() -> None:
    """Whatever is in their place: it is not looked at."""
    rows = Rows([-1, None, "x", 0.5])
    for given in (rows, fs.MapExamples(rows), fs.TensorExamples(rows.x, torch.full((4,), -1)), list(rows)):
        assert torch.equal(as_unlabelled(given).batch(torch.arange(4))[0], rows.x)
        federation(Rows(good()), method="feddf(steps=1)", public=given, rounds=1).fit()


def test_good_labels_of_any_form_train_alike() -> None:
    """The same bits, whatever form they come in."""
    ends = []
    for kind in (int, float, np.int64, np.float32, torch.tensor, lambda y: torch.tensor([float(y)])):
        torch.manual_seed(3)
        fed = federation(Rows([kind(y) for y in good()]), test=Rows([kind(y) for y in good()]))
        fed.fit()
        ends.append((fed.state.params["weight"], fed.records[-1].accuracy))
    assert all(torch.equal(weight, ends[0][0]) and accuracy == ends[0][1] for weight, accuracy in ends)


def test_a_flower_client_names_itself() -> None:
    site = Site(model=lambda: nn.Linear(INPUTS, CLASSES), data=lambda client: Rows(spoilt(0.5, 0)))
    config: dict[str, Any] = {"partition-id": 4, "num-partitions": 5}
    assert site.greeting(config).refusal == ""  # what a label may be is for the server to say
    with pytest.raises(UsageError, match=r"not 0\.5 \(client 4, example 0\)"):
        site.examples(4, config, read_classes).batch(torch.arange(2))
