"""Arrays of the user's own: what is learnt from them, whose they are, and one sentence for each thing wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.data.arrays import read_targets
from fedstrata.data.datasets import load_dataset
from fedstrata.errors import UsageError

RNG = np.random.default_rng(0)


def saved(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "a.npz", **arrays)
    return f"path='{folder / 'a.npz'}'"


def test_clients_and_a_share_held_out(tmp_path: Path) -> None:
    """Every row is there once, with its own target, in the group of its client."""
    x = np.arange(60.0).reshape(30, 2)
    client = np.array(["b", "a", "c"] * 10)
    data = load_dataset(f"npz({saved(tmp_path, x=x, y=np.arange(30) % 5, client=client)}, test=0.4)")
    assert (data.task, data.classes, data.group_names) == ("classification", 5, ("a", "b", "c"))
    rows = torch.cat([data.train.x, data.test.x])[:, 0].long() // 2
    assert sorted(rows.tolist()) == list(range(30))
    assert torch.equal(rows % 5, torch.cat([data.train.y, data.test.y]))
    for name, group in zip(data.group_names, data.groups, strict=True):
        assert set(client[(data.train.x[group, 0].long() // 2).numpy()]) == {name}
    assert data.train.x.dtype == torch.float32
    assert "3 clients; 30 examples, 0.4 held out for testing; for classification" in data.note


def test_whose_the_test_examples_are(tmp_path: Path) -> None:
    """Each client's own, where they were held out or the file says it; a client that never trains is none."""
    x, client = np.arange(60.0).reshape(30, 2), np.array([5, 3, 9] * 10)
    data = load_dataset(f"npz({saved(tmp_path, x=x, y=np.arange(30) % 5, client=client)}, test=0.4)")
    assert sorted(torch.cat(data.test_groups).tolist()) == list(range(len(data.test)))
    for name, group in zip(data.group_names, data.test_groups, strict=True):
        assert set(client[(data.test.x[group, 0].long() // 2).numpy()].astype(str)) == {name}
    parts = {"x_train": x[:6], "y_train": Y[:6], "client_train": client[:6], "x_test": x[6:12], "y_test": Y[6:]}
    assert load_dataset(f"npz({saved(tmp_path, **parts)})").test_groups == ()
    data = load_dataset(f"npz({saved(tmp_path, **parts, client_test=[3, 4, 3, 9, 4, 3])})")
    assert data.group_names == ("3", "5", "9")
    assert [group.tolist() for group in data.test_groups] == [[0, 2, 5], [], [3]]
    assert data.test.y.tolist() == Y[6:].tolist()


def test_one_client_by_name(tmp_path: Path) -> None:
    data = load_dataset(f"npz({saved(tmp_path, x=X, y=Y, client=['a'] * 12)})")
    assert (data.group_names, len(data.groups[0])) == (("a",), len(data.train))
    assert data.note.startswith("one client only; ")


def test_both_parts_given(tmp_path: Path) -> None:
    """Images of bytes, their channels last; the test part is the file's."""
    images = RNG.integers(0, 256, (7, 4, 5, 3), dtype=np.uint8)
    given = saved(tmp_path, a_train=images[:5], b_train=[0, 1, 2, 0, 3], a_test=images[5:], b_test=[1, 2])
    data = load_dataset(f"npz({given}, x='a', y='b')")
    assert data.input_shape == (3, 4, 5)
    assert (len(data.train), data.test.y.tolist(), data.classes) == (5, [1, 2], 4)
    assert np.array_equal(data.test.x.numpy(), images[5:].transpose(0, 3, 1, 2))
    assert data.train.mean == pytest.approx(images[:5].mean((0, 1, 2)) / 255)
    assert "channels, which are last, put first" in data.note


@pytest.mark.parametrize(
    ("y", "tokens", "task", "outputs"),
    [
        (np.array([0, 1, 1]), None, "binary", 1),
        (np.array([-1, 1, 1]), None, "binary", 1),
        (np.array([True, False, True]), None, "binary", 1),
        (np.array(["no", "yes", "perhaps"]), None, "classification", 3),
        (np.array([0, 7, 3]), None, "classification", 8),
        (np.array([0.0, 1.0, 2.0]), None, "classification", 3),
        (np.arange(100) % 50, None, "classification", 50),
        (np.arange(100), None, "regression", 1),
        (np.array([0, 5_000_000, 300]), None, "classification", 3),
        (np.array([2**63 + 5, 2**63 + 5, 0, 7], dtype=np.uint64), None, "classification", 3),
        (np.array([0.5, 1.0, 2.0]), None, "regression", 1),
        (np.arange(30.0), None, "regression", 1),
        (np.arange(-20, 20), None, "regression", 1),
        (np.array([[0.5, 1.0], [2.0, 0.1]]), None, "regression", 2),
        (np.array([[0, 1, 1], [1, 0, 0]]), None, "multilabel", 3),
        (np.array([[0, 1, 1], [1, 0, 0]]), (2, 3), "next_token", 2),
        (np.array([[0, 4, -100], [1, 0, 0]]), (2, 3), "next_token", 5),
        (np.array([[[0, 2], [1, 255]]]), None, "segmentation", 3),
    ],
    ids=str,
)
def test_what_is_learnt(y: Any, tokens: tuple[int, ...] | None, task: str, outputs: int) -> None:
    found = read_targets("it", y, "", tokens)
    assert (found.task, found.outputs) == (task, outputs)
    assert len(found.classes()) == len(y)
    assert found.classes().min() >= 0


def test_two_values_become_yes_and_no_and_words_their_place() -> None:
    found = read_targets("it", np.array([1, -1, 1]), "")
    assert (found.values.tolist(), found.class_names) == ([1, 0, 1], ("-1", "1"))
    found = read_targets("it", np.array(["c", "a", "b", "a"]), "")
    assert (found.values.tolist(), found.class_names) == ([2, 0, 1, 0], ("a", "b", "c"))
    found = read_targets("it", np.array([0.0, 5e6, 300.0, 5e6]), "")
    assert (found.values.tolist(), found.class_names) == ([0, 2, 1, 2], ("0", "300", "5000000"))
    found = read_targets("it", np.array([7, 2**64 - 1, 7, 9], dtype=np.uint64), "")
    assert (found.values.tolist(), found.class_names) == ([0, 2, 0, 1], ("7", "9", "18446744073709551615"))
    found = read_targets("it", np.array([True, False]), "")
    assert (found.values.tolist(), found.class_names) == ([1, 0], ("0", "1"))


def test_classes_to_deal_by() -> None:
    """By hand: the first label, or one more; the last token; the class of most pixels beside 0 and 255."""
    assert read_targets("it", np.array([[0, 1, 1], [0, 0, 0]]), "").classes().tolist() == [1, 3]
    assert read_targets("it", np.array([[4, 2], [3, -100]]), "next_token").classes().tolist() == [2, 3]
    masks = np.array([[[0, 2], [2, 1]], [[255, 255], [0, 0]]])
    assert read_targets("it", masks, "").classes().tolist() == [2, 0]
    assert read_targets("it", np.arange(20)[::-1] / 2, "").classes().tolist() == [n // 2 for n in range(20)][::-1]


X, Y = np.zeros((12, 2)), np.arange(12) % 3


@pytest.mark.parametrize(
    ("arrays", "arguments", "message"),
    [
        ({"x": X}, "", "npz has no array 'y'"),
        ({"x": X, "y": Y[:5]}, "", "'x' has 12 rows, and 'y' has 5"),
        ({"x": X[:0], "y": Y[:0]}, "", "the array 'x' has no rows"),
        ({"x": X, "y": Y, "client": X}, "", "'client' is one whole number or word per example"),
        ({"x": X, "y": Y}, ", test=0.0", "the share of test examples is above 0 and below 1, not 0.0"),
        ({"x": X, "y": np.zeros((12, 2, 2, 2))}, "", r"what is learnt from targets of shape \[12, 2, 2, 2\]"),
        ({"x": X, "y": Y / 7}, ", task='classification'", "targets are whole numbers here, and one is 0.14"),
        ({"x": X, "y": Y}, ", task='binary'", "the targets have 3 different values, and binary needs 2"),
        ({"x": X, "y": np.array(list("abc" * 4))}, ", task='regression'", "targets are words"),
        ({"x": np.full((12, 2), np.nan), "y": Y}, "", "the input of example 0 is not finite"),
        ({"x": X, "y": np.full(12, np.inf)}, "", "the target of example 0 is no number"),
        ({"x": X.astype(str), "y": Y}, "", "inputs are numbers, not of the type"),
        ({"x": X[:2], "y": Y[:2]}, ", test=0.001", "too few to hold out"),
        ({"x": X, "y": Y * 0 + 4}, "", "the target is '4' in every example: there is nothing to tell apart"),
        ({"x": X, "y": Y % 2}, ", task='multilabel'", r"has a row of 0 and 1 per example, not targets of shape \[12\]"),
        ({"x": X, "y": X + 2}, ", task='multilabel'", "labels are 0 or 1, and one of example 0 is 2"),
        ({"x": X, "y": X}, ", task='segmentation'", r"has a class for every pixel per example, not .* \[12, 2\]"),
        ({"x": X, "y": X[:, :0]}, "", r"targets are numbers or words, not \[12, 0\]"),
        ({"x": X, "y": Y}, ", task='regresion'", "npz: there is no task 'regresion'"),
        (
            {"x": np.zeros((12, 8, 8), np.uint8), "y": np.ones((12, 7, 7), int)},
            "",
            "the task 'segmentation' has a class for every pixel, and targets of 7×7 do not fit inputs of 1×8×8",
        ),
        (
            {"x": np.ones((12, 5), int), "y": np.ones((12, 4), int)},
            ", task='next_token'",
            "the task 'next_token' has a token for every position, and targets of 4 do not fit inputs of 5",
        ),
        ({"x": X, "y": np.full((12, 2, 2), 2**63, np.uint64)}, "", r"a target is 9\.22337e\+18, which is too large"),
        ({"x": np.full((12, 2), 2**63, np.uint64), "y": Y}, "", "a token is 9223372036854775808, which is too large"),
        (
            {"x_train": X, "y_train": Y, "client_train": Y, "x_test": X, "y_test": Y, "client_test": Y.astype(str)},
            "",
            "'client_train' and 'client_test' are of different type",
        ),
        ({"x_train": X, "y_train": Y}, "", "npz has no array 'x_test'"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :1], "y_test": Y}, "", "are of different shape or type"),
    ],
)
def test_one_sentence_for_each_thing_wrong(tmp_path: Path, arrays: Any, arguments: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_dataset(f"npz({saved(tmp_path, **arrays)}{arguments})")


def test_bad_files(tmp_path: Path) -> None:
    """Pickles are refused, unread."""
    path = tmp_path / "a.npz"
    with pytest.raises(UsageError, match=r"cannot read .*a\.npz: no such file"):
        load_dataset(f"npz('{path}')")
    for content in (b"", b"nonsense", b"a,b\n1,2\n", b"PK\x03\x04broken"):
        path.write_bytes(content)
        with pytest.raises(
            UsageError, match=r"a\.npz holds no arrays of numbers by name: write them with numpy\.savez$"
        ):
            load_dataset(f"npz('{path}')")
    np.savez(path, x=np.array([{}, {}]), y=np.array([1, 2]))
    with pytest.raises(UsageError, match=r"holds no arrays of numbers by name: one is a pickle, which is never read$"):
        load_dataset(f"npz('{path}')")
    with path.open("wb") as file:
        np.save(file, X)
    with pytest.raises(
        UsageError, match=r"^[^ ]*a\.npz holds one array, and not several by name: write it with [^ ]*$"
    ):
        load_dataset(f"npz('{path}')")
