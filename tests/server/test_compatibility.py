"""Do outputs, targets and metrics fit together? Asked before the first round, and before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.core.parts import Parts

IMAGES = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
MASKS = (IMAGES[:, 0] > 0).long()
TOKENS = torch.arange(30).view(6, 5) % 4


def unet() -> nn.Module:
    return fs.build_model("unet(width=4, depth=1)", (1, 8, 8), 2, seed=0)


def gru() -> nn.Module:
    return fs.build_model("tokengru(hidden=4)", (5,), 4, seed=0)


@pytest.mark.parametrize(
    ("task", "model", "train", "test", "message"),
    [
        (
            "segmentation",
            unet,
            (IMAGES, MASKS[:, 1:, 1:]),
            None,
            r"outputs of shape \[6, 2, 8, 8\] with targets of shape \[6, 7, 7\] \(client 0\): RuntimeError: ",
        ),
        (
            "segmentation",
            unet,
            (IMAGES, MASKS),
            (IMAGES, MASKS[:, 1:, 1:]),
            r"outputs of shape \[6, 2, 8, 8\] with targets of shape \[6, 7, 7\] \(the test set\): ",
        ),
        (
            "next_token",
            gru,
            (TOKENS, TOKENS[:, :4]),
            None,
            r"outputs of shape \[6, 5, 4\] with targets of shape \[6, 4\] \(client 0\): ValueError: ",
        ),
        (
            "next_token",
            gru,
            [(row, row[:4]) for row in TOKENS],  # one by one
            None,
            r"outputs of shape \[6, 5, 4\] with targets of shape \[6, 4\] \(client 0\): ",
        ),
    ],
    ids=["masks", "masks of the test set", "tokens", "tokens of a dataset"],
)
def test_targets_of_another_shape(task: str, model: Any, train: Any, test: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(fs.UsageError, match=f"the task '{task}' cannot compare {message}") as refused:
        fs.Federation(model(), [train], test, task=task, rounds=1, batch_size=8, out=tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True, kw_only=True)
class Own(fs.Task):
    """A number, and a loss that wants several rows."""

    name: ClassVar[str] = "own"
    rows: int = 1
    form: str = "mapping"

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if len(outputs) < self.rows:
            raise RuntimeError(f"there are {len(outputs)} rows")
        return (outputs[:, 0] - targets).square().mean()

    def build_metrics(self, width: int) -> Any:
        if self.form == "mapping":
            return {"error": lambda outputs, targets: (outputs[:, 0] - targets).abs().mean()}
        return [Error(2 if self.form == "many" else 1)]


@dataclass(frozen=True)
class Error:
    """A metric whose name is known once it is computed, which takes some rows."""

    rows: int

    def observe(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        assert len(outputs) >= self.rows
        return {"error": (outputs[:, 0] - targets).abs()}

    def compute(self, observed: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"error": float(torch.cat([part["error"] for part in observed]).mean())}


X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


def own_run(task: fs.Task, **more: Any) -> fs.Federation:
    return fs.Federation(nn.Linear(3, 1), [(X, X.sum(1))] * 2, (X, X.sum(1)), task=task, rounds=1, **more)


def test_a_loss_may_want_as_many_rows_as_a_batch_has(tmp_path: Path) -> None:
    assert own_run(Own(rows=4), batch_size=4).fit().records
    with pytest.raises(
        fs.UsageError, match=r"with targets of shape \[4\] \(client 0\): RuntimeError: there are 4 rows"
    ):
        own_run(Own(rows=5), batch_size=4, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("form", ["mapping", "metric"])
def test_a_primary_metric_that_is_none(form: str, tmp_path: Path) -> None:
    for primary in ("error", "loss"):
        assert own_run(Own(form=form, primary=primary)).fit().score is not None
    told = r"the task 'own' has no metric 'eror' to be judged by \(did you mean 'error'\?\)"
    with pytest.raises(fs.UsageError, match=told):
        own_run(Own(form=form, primary="eror"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_primary_metric_that_only_an_evaluation_can_tell() -> None:
    """Where a metric cannot be computed of one example."""
    assert own_run(Own(form="many", primary="error")).fit().score is not None
    with pytest.raises(fs.UsageError, match="the task 'own' has no metric 'eror' to be judged by"):
        own_run(Own(form="many", primary="eror")).fit()


def test_public_inputs_of_several_parts() -> None:
    """They count among what a run is resumed with."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.head(a * b)
            return out

    data = ({"a": X, "b": X}, torch.arange(8) % 2)
    public = fs.TensorExamples(Parts.of(data[0]), data[1])
    assert fs.Federation(Two(), [data] * 2, public=public, rounds=1, method="feddf").fit().records
