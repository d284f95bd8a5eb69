"""The server's unlabelled data: whatever form it is given in, from Python and from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.data.examples import as_unlabelled
from fedstrata.run import _public, open_run
from tests.small_runs import fedstrata, one_sentence

X = torch.arange(24.0).view(6, 4) / 24


class Inputs(torch.utils.data.Dataset[Tensor]):
    """Rows that are inputs and nothing else."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, row: int) -> Tensor:
        return X[row]


class Pairs(Inputs):
    def __getitem__(self, row: int) -> Any:
        return X[row], "a cat"


@pytest.mark.parametrize(
    "given",
    [
        X,
        X.numpy(),
        X.clone().requires_grad_(),
        (X, torch.zeros(6, dtype=torch.long)),
        (X, None),
        Inputs(),
        Pairs(),
        torch.utils.data.TensorDataset(X),
        list(X),
        fs.TensorExamples(X, torch.zeros(6)),
    ],
    ids=["tensor", "array", "leaf", "pair", "no labels", "inputs", "pairs", "TensorDataset", "list", "examples"],
)
def test_every_form_of_inputs(given: Any) -> None:
    read = as_unlabelled(given)
    assert len(read) == 6
    assert torch.equal(read.batch(torch.tensor([4, 1]))[0], X[[4, 1]])


def federation(public: Any, **settings: Any) -> fs.Federation:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        clients = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(3)]
        net = nn.Sequential(nn.Linear(4, 3))
    return fs.Federation(net, clients, None, method="feddf(steps=3)", rounds=2, public=public, **settings)


def test_labels_are_never_looked_at() -> None:
    ends = []
    for public in (X, (X, torch.full((6,), 2)), Inputs()):
        fed = federation(public)
        fed.fit()
        ends.append(fed.state.params["0.weight"])
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize(
    ("public", "why"),
    [
        (None, "feddf distils on unlabelled inputs"),
        (torch.zeros(0, 4), "public data is empty"),
        (torch.zeros(5, 7), r"its inputs are \[7\] and not \[4\]"),
        (3, "public data is an array of inputs or a map-style Dataset, not int"),
        ({"x": X}, "not dict"),
        (np.array(["a"] * 4), "not ndarray"),
        (torch.tensor(1.0), "not Tensor"),
        (torch.full((5, 4), torch.nan), "NaN"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(public: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(fs.UsageError, match=why):
        federation(public, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Shaken(Inputs):
    """Rows with transforms that draw random numbers."""

    def __getitem__(self, row: int) -> Tensor:
        return X[row] + torch.randn(4) + float(np.random.rand())


def test_random_transforms_give_the_same_bits_in_workers() -> None:
    ends = []
    for engine in ("serial", "processes"):
        torch.manual_seed(len(ends))
        np.random.seed(len(ends))
        fed = federation(Shaken(), engine=engine, workers=1 if engine == "serial" else 2)
        fed.fit()
        ends.append(fed.state.params["0.weight"])
    assert torch.equal(ends[0], ends[1])


def test_a_resumed_run_needs_the_same_inputs(tmp_path: Path) -> None:
    federation(X, out=tmp_path / "run").fit()
    with pytest.raises(fs.UsageError, match="was run with other data"):
        federation(X + 1, out=tmp_path / "run", resume=True)


SMALL = ["--rounds", "1", "--steps", "1", "--clients", "3", "--model", "logreg", "--method", "feddf(steps=2)", "--json"]


@pytest.mark.parametrize("kind", [np.uint8, np.float64])
def test_a_file_of_inputs(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "inputs.npy", np.ones((20, 1, 8, 8), kind))
    assert fedstrata("run", *SMALL, "--public", "inputs.npy", "--out", "run") == 0
    monkeypatch.chdir(tmp_path.parent)
    assert fedstrata("resume", tmp_path / "run", "--json") == 0


@pytest.mark.parametrize(
    ("public", "why"),
    [
        ("nowhere.npy", "nowhere.npy: no such file"),
        ("text.npy", "text.npy holds no array of numbers"),
        ("words.npy", "words.npy holds no array of numbers"),
        ("digitz", "there is no dataset 'digitz'"),
        ("synthetic(shape=(3,))", "public data does not look like the clients'"),
    ],
)
def test_a_wrong_file_or_name_gets_one_sentence(
    public: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npy").write_text("no array")
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    assert fedstrata("run", *SMALL, "--public", public, "--out", "run") == 2
    assert why in one_sentence(capsys)
    assert not (tmp_path / "run").exists()


def test_another_dataset() -> None:
    config = {"method": "feddf(steps=2)", "public": "digits", "rounds": 1, "steps": 1, "clients": 3, "model": "logreg"}
    assert open_run(validate_settings(RunConfig, config), None).fit().accuracy is not None


def test_a_dataset_whose_targets_are_all_the_same(tmp_path: Path) -> None:
    """As data without labels is often written: nobody looks at them."""
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(30, 4)), y=np.zeros(30, np.int64))
    assert len(_public(f"npz(path='{tmp_path}/x.npz')", RunConfig.model_validate({}))) > 0
    with pytest.raises(fs.UsageError, match="npz"):
        _public(f"npz(path='{tmp_path}/none.npz')", RunConfig.model_validate({}))
