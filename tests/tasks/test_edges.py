"""Tasks at the edges: sure models, classes that nobody has, and examples of which none counts."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.core.task import Task
from fedstrata.errors import UsageError
from fedstrata.evaluation.evaluate import BatchScore, NothingCounts, combine_scores, metrics_of
from fedstrata.tasks.classification import Classification
from fedstrata.tasks.details import MOST_CLASSES, Confusion
from fedstrata.tasks.registry import build_task


@cache
def sk() -> Any:
    """scikit-learn's metrics, imported by whoever runs these tests, and not by all who collect them."""
    from sklearn import metrics

    return metrics


def scores(text: str, outputs: Tensor, targets: Tensor) -> dict[str, float | None]:
    """A task's metrics, judged in two batches."""
    task = build_task(text)
    width = task.width(outputs)
    parts = []
    for rows in torch.arange(len(targets)).tensor_split(2):
        loss, weight = task.sums(outputs[rows], targets[rows])
        observed = tuple(metric.observe(outputs[rows], targets[rows]) for metric in metrics_of(task, width))
        parts.append(BatchScore(width, loss.item(), weight, observed))
    return combine_scores(task, parts).metrics


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [38.0, 500.0, -500.0])
def test_curves_of_sure_models(shift: float, dtype: torch.dtype) -> None:
    """Probabilities of logits beyond 37 are all 1: scikit-learn is given the logits themselves."""
    rng = torch.Generator().manual_seed(0)
    z = (shift + 20 * torch.rand(60, 3, generator=rng)).to(dtype)
    y = (torch.rand(60, 3, generator=rng) < 0.3 + 0.4 * (z > shift + 10)).long()
    found = scores("multilabel", z, y)
    assert found["auroc"] == pytest.approx(sk().roc_auc_score(y, z), abs=1e-6)
    assert found["average_precision"] == pytest.approx(sk().average_precision_score(y, z), abs=1e-6)
    one = scores("binary", z[:, :1], y[:, 0])
    assert one["auroc"] == pytest.approx(sk().roc_auc_score(y[:, 0], z[:, 0]), abs=1e-6)


def test_curves_of_classes_one_of_which_is_sure() -> None:
    """Of class c against the rest, by log p/(1 − p), which NumPy computes from the other classes' logits."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 80)
    z = rng.normal(0, 30, (80, 4))
    z[np.arange(80), y] += 60
    rest = np.stack([np.logaddexp.reduce(np.delete(z, c, 1), axis=1) for c in range(4)], 1)
    expected = np.mean([sk().roc_auc_score(y == c, (z - rest)[:, c]) for c in range(4)])
    precise = np.mean([sk().average_precision_score(y == c, (z - rest)[:, c]) for c in range(4)])
    text = "classification(metrics=('accuracy', 'auroc', 'average_precision'))"
    found = scores(text, torch.from_numpy(z), torch.from_numpy(y))
    assert found["auroc"] == pytest.approx(expected, abs=1e-6)
    assert found["average_precision"] == pytest.approx(precise, abs=1e-6)


def test_outputs_that_are_no_numbers_have_no_curve() -> None:
    assert scores("binary", torch.tensor([[0.1], [float("nan")], [0.3]]), torch.tensor([0, 1, 1]))["auroc"] is None


def test_f1_of_labels_that_nobody_has_and_nobody_predicts() -> None:
    """The mean is over the other labels, as that of the areas is."""
    z = torch.tensor([[1.0, -1.0, -1.0], [1.0, 1.0, -1.0], [-1.0, 1.0, -1.0]])
    y = torch.tensor([[1, 0, 0], [1, 0, 0], [1, 1, 0]])
    wanted = np.mean([sk().f1_score(y[:, c], z[:, c] > 0) for c in (0, 1)])
    assert scores("multilabel", z, y)["f1"] == pytest.approx(wanted)


@pytest.mark.parametrize("absent", [1, 3])
def test_balanced_weights_of_a_class_that_nobody_has(absent: int) -> None:
    """n / (C · n_c) with the C classes that somebody has, and 1 for the others: inner ones and last ones."""
    held = [c for c in range(4) if c != absent]
    y = torch.tensor([held[i] for i in (0, 0, 0, 0, 1, 1, 1, 2)])
    x = torch.randn(8, 3)
    federation = fs.Federation(
        nn.Linear(3, 4), [(x[:4], y[:4]), (x[4:], y[4:])], (x, y), task="classification(weights='balanced')", rounds=1
    )
    counts = {held[0]: 4, held[1]: 3, held[2]: 1, absent: None}
    expected = tuple(1.0 if n is None else 8 / (3 * n) for n in (counts[c] for c in range(4)))
    (note,) = (note for note in federation.notes if note.startswith("task: "))
    assert note == f"task: {Classification(weights=expected)}"
    assert federation.fit().score is not None


def test_targets_keep_their_digits_beside_outputs_in_half_precision() -> None:
    """1003.5 is 1004 in bfloat16: the error of an output of 1000 is 3.5, not 4."""
    made, true = torch.tensor([[1000.0]], dtype=torch.bfloat16), torch.tensor([1003.5])
    for kind, expected in {"mse": 12.25, "l1": 3.5, "huber": 3.0}.items():
        task = build_task(f"regression(loss='{kind}')")
        assert task.mean_loss(made, true).item() == pytest.approx(expected)
        assert task.terms(made, true)[0].item() == pytest.approx(expected)


def test_weights_in_half_precision_are_summed_up_in_single() -> None:
    """One client after the other and many at once, as under autocast."""
    task = build_task("classification(weights=(0.3, 1.7, 0.9))")
    rng = torch.Generator().manual_seed(0)
    z, y = torch.randn(300, 3, generator=rng).bfloat16(), torch.randint(3, (300,), generator=rng)
    with torch.autocast("cpu", torch.bfloat16):
        one, many = task.mean_loss(z, y), task.padded_loss(torch.ones(300), z, y)
    assert one.item() == pytest.approx(many.item(), rel=1e-5)


def test_a_batch_without_any_weight() -> None:
    """One client after the other and many at once agree that it costs nothing, and moves nothing."""
    task = build_task("classification(weights=(0.0, 1.0))")
    z = torch.randn(3, 2, requires_grad=True)
    y = torch.zeros(3, dtype=torch.int64)
    loss = task.mean_loss(z, y)
    assert loss.item() == task.padded_loss(torch.ones(3), z, y).item() == 0.0
    assert not torch.autograd.grad(loss, z)[0].any()


NOTHING: dict[str, tuple[Any, Any, nn.Module]] = {
    "segmentation": (torch.randn(4, 1, 5, 5), torch.full((4, 5, 5), 255), nn.Conv2d(1, 3, 1)),
    "classification(weights=(0.0, 1.0))": (torch.randn(4, 6), torch.zeros(4, dtype=torch.int64), nn.Linear(6, 2)),
}


@pytest.mark.parametrize("text", NOTHING)
def test_a_test_set_of_which_nothing_counts(text: str) -> None:
    """It is no divergence, and of a client's own test set it is no score."""
    x, y, model = NOTHING[text]
    sound = torch.ones_like(y)
    with pytest.raises(UsageError, match="cannot be evaluated: no example counts in the loss of the task"):
        fs.Federation(model, [(x, sound)], (x, y), task=text, rounds=1).fit()
    clients = [((x, sound), (x, y)), ((x, sound), (x, sound))]
    last = fs.Federation(model, clients, (x, sound), task=text, rounds=1).fit().records[-1]
    assert last.client_metrics is not None
    assert [found is None for found in last.client_metrics] == [True, False]


def test_nothing_can_be_guessed_of_tokens_that_do_not_count() -> None:
    assert build_task("next_token").guess(torch.full((2, 3), -100), 5) is None


def test_no_matrix_of_many_classes_is_made() -> None:
    many = Confusion(MOST_CLASSES + 1, lambda outputs, targets: (targets, targets))
    assert many.observe(torch.empty(0), torch.arange(3)) == {}
    assert many.compute([{}]) == {}


def test_what_is_raised_is_a_usage_error() -> None:
    with pytest.raises(NothingCounts, match="the task 'segmentation'"):
        combine_scores(build_task("segmentation"), [BatchScore(2, 0.0, 0.0, ())])
    assert issubclass(NothingCounts, UsageError)
    assert isinstance(build_task("segmentation"), Task)
