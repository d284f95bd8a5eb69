"""Inputs of several parts: one thing on its way, arguments for the model; outputs in whatever they come in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

import fedstrata as fs
from fedstrata.core.parts import Parts, stack_inputs
from fedstrata.models.inputs import outputs_of
from tests.engines.worlds import check_same


def parts(rows: int = 3) -> Parts:
    return Parts.of({"tokens": torch.arange(rows * 2).view(rows, 2), "mask": torch.ones(rows, 2)})


def test_it_behaves_like_a_batch() -> None:
    x = parts()
    assert len(x) == 3
    assert x[:2].shape == (("tokens", (2, 2)), ("mask", (2, 2)))
    assert x.shape[1:] == (("tokens", (2,)), ("mask", (2,)))
    assert str(x.shape[1:]) == "tokens [2], mask [2]"
    assert {x.shape: 1}[parts().shape] == 1
    joined: Any = torch.cat([x, x[1:]])  # type: ignore[list-item]
    assert joined.tensors["tokens"].tolist() == [[0, 1], [2, 3], [4, 5], [2, 3], [4, 5]]
    stacked: Any = torch.stack([x, x])  # type: ignore[list-item]
    assert stacked.shape == (("tokens", (2, 3, 2)), ("mask", (2, 3, 2)))
    pieces: Any = torch.split(x, 2)  # type: ignore[no-untyped-call]
    assert [len(piece) for piece in pieces] == [2, 1]
    assert pieces[1].tensors["tokens"].tolist() == [[4, 5]]
    leaves, spec = pytree.tree_flatten(x)
    assert len(leaves) == 2
    assert pytree.tree_unflatten(leaves, spec).tensors.keys() == x.tensors.keys()
    copy = x.clone()
    copy[0] = x[2]
    assert copy.tensors["tokens"][0].tolist() == [4, 5]
    assert x.tensors["tokens"][0].tolist() == [0, 1]


def test_rows_of_a_dataset_become_a_batch() -> None:
    by_name = stack_inputs([{"a": 1.0, "b": torch.zeros(2)}, {"a": 2.0, "b": torch.ones(2)}])
    assert by_name.named
    assert by_name.tensors["a"].tolist() == [1.0, 2.0]
    by_position = stack_inputs([(torch.zeros(2), 3), (torch.ones(2), 4)])
    assert not by_position.named
    assert by_position.tensors["1"].tolist() == [3, 4]


@dataclass
class Answer:
    logits: Tensor
    hidden: int = 0


@pytest.mark.parametrize(
    "wrap",
    [lambda z: z, lambda z: {"logits": z, "loss": 1}, Answer, lambda z: (z, "more"), lambda z: [z]],
    ids=["tensor", "dict", "object", "tuple", "list"],
)
def test_what_is_taken_out_of_outputs(wrap: Any) -> None:
    z = torch.zeros(2)
    assert outputs_of(wrap(z)) is z


class Reader(nn.Module):
    """Mean of the embeddings that count, and a table's row beside it."""

    def __init__(self, wrap: str = "tensor") -> None:
        super().__init__()
        self.embed, self.head, self.wrap = nn.Embedding(7, 5), nn.Linear(5 + 3, 4), wrap

    def forward(self, tokens: Tensor, mask: Tensor, row: Tensor) -> Any:
        weights = mask.unsqueeze(-1)
        mean = (self.embed(tokens) * weights).sum(1) / weights.sum(1).clamp(min=1)
        logits = self.head(torch.cat([mean, row], 1))
        return {"tensor": logits, "dict": {"logits": logits, "more": mean}, "tuple": (logits, mean)}[self.wrap]


def rows(count: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(7, (count, 6), generator=rng)
    mask = (torch.rand(count, 6, generator=rng) > 0.3).float()
    row = torch.randn(count, 3, generator=rng)
    return {"tokens": tokens, "mask": mask, "row": row}, (tokens[:, 0] + (row[:, 0] > 0)) % 4


class Listed(Dataset[Any]):
    """The same rows, read one by one."""

    def __init__(self, data: tuple[dict[str, Tensor], Tensor], named: bool) -> None:
        self.x, self.y, self.named = *data, named

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, at: int) -> Any:
        parts = {name: part[at] for name, part in self.x.items()}
        return (parts if self.named else tuple(parts.values())), int(self.y[at])


def federation(wrap: str = "tensor", form: str = "dict", **settings: Any) -> fs.Federation:
    torch.manual_seed(0)
    made = [rows(11, 1), rows(14, 2), rows(7, 3)]
    forms: dict[str, Any] = {
        "dict": lambda data: data,
        "tuple": lambda data: (tuple(data[0].values()), data[1]),
        "rows": lambda data: Listed(data, True),
        "rows by position": lambda data: Listed(data, False),
    }
    how = {"rounds": 3, "lr": 0.5, "batch_size": 4, "engine": "serial"} | settings
    return fs.Federation(Reader(wrap), [forms[form](data) for data in made], forms[form](rows(30, 4)), **how)


@pytest.mark.parametrize("form", ["tuple", "rows", "rows by position"])
def test_the_same_bits_in_every_form(form: str) -> None:
    one, other = federation(), federation(form=form)
    one.fit()
    other.fit()
    check_same(one, other)


@pytest.mark.parametrize("wrap", ["dict", "tuple"])
def test_the_same_bits_whatever_comes_out(wrap: str) -> None:
    one, other = federation(), federation(wrap)
    one.fit()
    history = other.fit()
    check_same(one, other)
    assert not history.model._forward_hooks
    assert not history.model._forward_pre_hooks
    x, _ = rows(2, 9)
    assert isinstance(history.model(**x), dict if wrap == "dict" else tuple)


@pytest.mark.parametrize("settings", [{"engine": "wire"}, {"engine": "processes", "workers": 2}])
def test_the_same_bits_on_every_engine(settings: dict[str, Any]) -> None:
    one, other = federation(), federation(**settings)
    one.fit()
    other.fit()
    check_same(one, other)


def test_many_at_once() -> None:
    one, other = federation(), federation(engine="vmap")
    found = [[r.loss for r in run.fit().records] for run in (one, other)]
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("method", ["fednlr", "moon", "scaffold + fedprox", "fedpart", "feddyn", "fedlc", "ccvr"])
def test_techniques(method: str) -> None:
    assert federation(method=method, lr=0.1).fit().accuracy is not None


def test_probes_a_dry_run_and_a_resumed_run(tmp_path: Any) -> None:
    whole = federation(probe="all")
    whole.fit()
    assert {"divergence", "cosine", "gradnorm", "calibration"} <= whole.probes[-1].keys()
    assert whole.diagnose() is not None
    run = federation(out=tmp_path / "run", checkpoint_seconds=0.0)
    next(rounds := run.rounds())
    rounds.close()
    resumed = federation(out=tmp_path / "run", checkpoint_seconds=0.0, resume=True)
    resumed.fit()
    check_same(resumed, whole)


def test_refusals() -> None:
    x, y = rows(4, 0)
    with pytest.raises(fs.UsageError, match="one row per example each, not tokens 4, mask 3"):
        fs.Federation(Reader(), [({"tokens": x["tokens"], "mask": x["mask"][:3]}, y)])
    with pytest.raises(fs.UsageError, match=r"the model does not take inputs of shape tokens \[6\]: .*missing 2"):
        fs.Federation(Reader(), [({"tokens": x["tokens"]}, y)])
    with pytest.raises(fs.UsageError, match="needs images"):
        federation(augment="flip")
