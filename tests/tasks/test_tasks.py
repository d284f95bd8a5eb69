"""Tasks: each one's loss and metrics against NumPy and scikit-learn, in batches and on every engine; refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.core.task import Task
from fedstrata.evaluation.evaluate import BatchScore, combine_scores, metrics_of
from fedstrata.report.plots import plot
from fedstrata.runs.reader import SavedRun
from fedstrata.tasks.registry import TASKS, build_task
from tests.small_runs import fedstrata, one_sentence

Array = np.ndarray[Any, Any]
Case = tuple[str, Tensor, Tensor, float, dict[str, float]]
"""(task, outputs, targets, the mean loss, the metrics)."""


@cache
def sk() -> Any:
    """scikit-learn's metrics, imported by whoever runs these tests, and not by all who collect them."""
    from sklearn import metrics

    return metrics


def softmax(z: Array, axis: int) -> Array:
    e = np.exp(z - z.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def cross_entropies(z: Array, y: Array, smoothing: float = 0.0) -> Array:
    """Of rows of logits, with label smoothing as in Szegedy et al.: (1 − ε)·(−log p_y) + ε·mean_c(−log p_c)."""
    log = np.log(softmax(z, 1))
    return (1 - smoothing) * -log[np.arange(len(y)), y] + smoothing * -log.mean(1)


def logistic(z: Array, y: Array, weight: float = 1.0) -> Array:
    p = 1 / (1 + np.exp(-z))
    return -(weight * y * np.log(p) + (1 - y) * np.log(1 - p))


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ROWS = 37
LABELS = torch.randint(5, (ROWS,), generator=torch.Generator().manual_seed(1))
FLAGS = torch.randint(2, (ROWS,), generator=torch.Generator().manual_seed(2))
MANY = torch.randint(2, (ROWS, 4), generator=torch.Generator().manual_seed(3))
PIXELS = torch.randint(3, (ROWS, 4, 5), generator=torch.Generator().manual_seed(4))
PIXELS[0, :2] = 255
TOKENS = torch.randint(6, (ROWS, 7), generator=torch.Generator().manual_seed(5))
TOKENS[3, 4:] = -100
TOKENS[9] = -100


def of_classes(text: str, weights: Array | None, smoothing: float) -> Case:
    z, y = numbers(ROWS, 5, seed=0), LABELS
    each = cross_entropies(z.numpy(), y.numpy(), 0.0)
    w = np.ones(5) if weights is None else weights
    log = -np.log(softmax(z.numpy(), 1))
    # torch weighs the smoothed part by every class's own weight
    each = (1 - smoothing) * w[y.numpy()] * each + smoothing / 5 * (log * w).sum(1)
    guess, p = z.argmax(1).numpy(), softmax(z.numpy(), 1)
    found = {
        "accuracy": sk().accuracy_score(y, guess),
        "balanced_accuracy": sk().balanced_accuracy_score(y, guess),
        "f1": sk().f1_score(y, guess, average="macro"),
        "auroc": sk().roc_auc_score(y, p, multi_class="ovr"),
        "average_precision": sk().average_precision_score(np.eye(5)[y.numpy()], p),
    }
    return text, z, y, each.sum() / w[y.numpy()].sum(), found


def binary() -> Case:
    z, y = numbers(ROWS, 1, seed=6), FLAGS
    p, answer = 1 / (1 + np.exp(-z.numpy()[:, 0])), z.numpy()[:, 0] >= 0
    found = {
        "auroc": sk().roc_auc_score(y, p),
        "accuracy": sk().accuracy_score(y, answer),
        "balanced_accuracy": sk().balanced_accuracy_score(y, answer),
        "f1": sk().f1_score(y, answer),
        "average_precision": sk().average_precision_score(y, p),
    }
    return "binary(positive_weight=2.5)", z, y, logistic(z.numpy()[:, 0], y.numpy(), 2.5).mean(), found


def multilabel() -> Case:
    z, y = numbers(ROWS, 4, seed=7), MANY
    p, answer = 1 / (1 + np.exp(-z.numpy())), z.numpy() >= 0
    found = {
        "average_precision": sk().average_precision_score(y, p, average="macro"),
        "auroc": sk().roc_auc_score(y, p, average="macro"),
        "f1": sk().f1_score(y, answer, average="macro"),
        "accuracy": float(np.mean([sk().accuracy_score(y[:, c], answer[:, c]) for c in range(4)])),
    }
    return "multilabel", z, y, logistic(z.numpy(), y.numpy()).mean(), found


def regression(loss: str, columns: int) -> Case:
    shape = (ROWS,) if columns == 1 else (ROWS, columns)
    z, y = numbers(ROWS, columns, seed=8), 1000 + numbers(*shape, seed=9)
    z = z + 1000
    e = (z.reshape(shape) - y).numpy()
    delta = 0.7
    huber = np.where(np.abs(e) <= delta, e**2 / 2, delta * (np.abs(e) - delta / 2))
    made, true = z.numpy().reshape(ROWS, -1), y.numpy().reshape(ROWS, -1)
    found = {
        "rmse": float(np.mean(np.sqrt(sk().mean_squared_error(true, made, multioutput="raw_values")))),
        "mae": sk().mean_absolute_error(true, made),
        "r2": sk().r2_score(true, made),
    }
    each = {"mse": e**2, "l1": np.abs(e), "huber": huber}[loss]
    return f"regression(loss='{loss}', delta={delta})", z, y, each.mean(), found


def segmentation() -> Case:
    z, y = numbers(ROWS, 3, 4, 5, seed=10), PIXELS
    counts = (y != 255).numpy()
    flat, true = z.permute(0, 2, 3, 1).numpy()[counts], y.numpy()[counts]
    guess = flat.argmax(1)
    found = {
        "miou": sk().jaccard_score(true, guess, average="macro"),
        "dice": sk().f1_score(true, guess, average="macro"),
        "accuracy": sk().accuracy_score(true, guess),
    }
    return "segmentation", z, y, cross_entropies(flat, true).mean(), found


def next_token() -> Case:
    z, y = numbers(ROWS, 7, 6, seed=11), TOKENS
    counts = (y != -100).numpy()
    flat, true = z.numpy()[counts], y.numpy()[counts]
    loss = cross_entropies(flat, true).mean()
    return "next_token", z, y, loss, {"perplexity": np.exp(loss), "accuracy": float((flat.argmax(1) == true).mean())}


EVERY = "metrics=('accuracy', 'balanced_accuracy', 'f1', 'auroc', 'average_precision')"
WEIGHTS = (1.0, 0.5, 2.0, 0.0, 3.0)
CASES: Mapping[str, Callable[[], Case]] = {
    "classification": lambda: of_classes(f"classification({EVERY})", None, 0.0),
    "weighted": lambda: of_classes(f"classification(weights={WEIGHTS}, {EVERY})", np.array(WEIGHTS), 0.0),
    "smoothed": lambda: of_classes(f"classification(label_smoothing=0.1, {EVERY})", None, 0.1),
    "weighted and smoothed": lambda: of_classes(
        f"classification(weights={WEIGHTS}, label_smoothing=0.3, {EVERY})", np.array(WEIGHTS), 0.3
    ),
    "binary": binary,
    "multilabel": multilabel,
    "mse": lambda: regression("mse", 1),
    "l1 of several": lambda: regression("l1", 3),
    "huber": lambda: regression("huber", 1),
    "segmentation": segmentation,
    "next token": next_token,
}


@pytest.mark.parametrize("batch_size", [ROWS, 10, 1])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_metrics_against_numpy_and_scikit_learn(case: str, batch_size: int) -> None:
    """Put together from batches of any size, to 1e-6 and mostly to the last digits of float64."""
    text, outputs, targets, loss, expected = CASES[case]()
    task = build_task(text)
    width = task.width(outputs)
    scores = []
    for z, y in zip(outputs.split(batch_size), targets.split(batch_size), strict=True):
        total, weight = task.sums(z, y)
        scores.append(BatchScore(width, total.item(), weight, tuple(m.observe(z, y) for m in metrics_of(task, width))))
    found = combine_scores(task, scores)
    assert found.loss == pytest.approx(loss, rel=1e-9)
    assert found.metrics == pytest.approx(expected, abs=1e-6)
    assert task.primary in found.metrics


@pytest.mark.parametrize("case", CASES)
def test_the_mean_loss_is_what_is_trained_on(case: str) -> None:
    """The mean loss, the one put together of examples, and that of a batch in which half of the rows are padding."""
    text, outputs, targets, loss, _ = CASES[case]()
    task = build_task(text)
    assert task.mean_loss(outputs, targets).item() == pytest.approx(loss, rel=1e-9)
    losses, weights = task.terms(outputs, targets)
    assert losses.shape == weights.shape == (ROWS,)
    assert (losses.sum() / weights.sum()).item() == pytest.approx(loss, rel=1e-9)
    twice, rows = torch.cat([outputs, outputs + 1]), torch.cat([torch.ones(ROWS), torch.zeros(ROWS)])
    padded = task.padded_loss(rows, twice, torch.cat([targets, targets]))
    assert padded.item() == pytest.approx(loss, rel=1e-6)
    assert task.padded_loss(torch.zeros(ROWS), outputs, targets).item() == 0


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_for_many_clients(case: str) -> None:
    """Of one client whose rows are all real, one with padding that is no number, and one without real rows.

    Against differences of the mean loss, (L(z + h) − L(z − h)) / 2h, at some of the outputs.
    """
    text, outputs, targets, loss, _ = CASES[case]()
    task = build_task(text)
    padding = torch.full_like(outputs, float("nan"))
    z = torch.stack([torch.cat([outputs, outputs]), torch.cat([outputs, padding]), torch.cat([padding, padding])])
    real = torch.tensor([[1, 1], [1, 0], [0, 0]]).bool().repeat_interleave(ROWS, 1)
    losses, gradient = task.differentiate(z, torch.stack([torch.cat([targets, targets])] * 3), real)
    assert losses.tolist() == pytest.approx([loss, loss, 0.0], rel=1e-6)
    assert gradient.shape == z.shape
    assert not gradient[1, ROWS:].any()
    assert not gradient[2].any()
    whole = task.differentiate(z[:1], torch.cat([targets, targets])[None], None)
    torch.testing.assert_close(whole, (losses[:1], gradient[:1]))
    flat, step, compared = outputs.flatten(), 1e-5, 0
    for place in range(0, len(flat), max(len(flat) // 20, 1)):
        there = torch.zeros_like(flat)
        there[place] = step
        up, down = (task.mean_loss((flat + h).view_as(outputs), targets) for h in (there, -there))
        expected = (up - down).item() / (2 * step)
        assert gradient[1].flatten()[place].item() == pytest.approx(expected, rel=1e-4, abs=1e-8)
        assert gradient[0].flatten()[place].item() == pytest.approx(expected / 2, rel=1e-4, abs=1e-8)
        compared += abs(expected) > 1e-4
    assert compared


GUESSES: dict[str, tuple[str, Tensor, float]] = {
    "accuracy": ("classification", torch.tensor([0, 1, 1, 2]), 0.5),
    "auroc": ("binary", torch.tensor([0, 1, 1, 1]), 0.5),
    "binary accuracy": ("binary(primary='accuracy')", torch.tensor([0, 1, 1, 1]), 0.75),
    "average precision": ("multilabel", torch.tensor([[0, 1], [0, 1], [1, 1], [1, 0]]), (0.5 + 0.75) / 2),
    "rmse": ("regression", torch.tensor([1.0, 3.0]), 1.0),
    "mae": ("regression(primary='mae')", torch.tensor([0.0, 0.0, 9.0]), 3.0),
    "r2": ("regression(primary='r2')", torch.tensor([1.0, 3.0]), 0.0),
    "pixels": ("segmentation(primary='accuracy')", torch.tensor([[[0, 0], [1, 255]]]), 2 / 3),
    "miou": ("segmentation", torch.tensor([[[0, 0], [1, 255]]]), 1 / 3),
    "perplexity": ("next_token", torch.tensor([[0, 1], [2, 3]]), 4.0),
}


@pytest.mark.parametrize("case", GUESSES)
def test_what_guessing_scores(case: str) -> None:
    text, targets, expected = GUESSES[case]
    assert build_task(text).guess(targets, 3) == pytest.approx(expected)


def test_what_is_not_defined_is_no_number() -> None:
    """The area under a curve where there is no yes, or no no."""
    task = build_task("binary")
    z, y = torch.randn(4, 1), torch.ones(4, dtype=torch.int64)
    observed = tuple(m.observe(z, y) for m in metrics_of(task, 1))
    total, weight = task.sums(z, y)
    found = combine_scores(task, [BatchScore(1, total.item(), weight, observed)])
    assert found.metrics["auroc"] is None
    assert found.metrics["average_precision"] is None
    assert found.metrics["accuracy"] is not None


# --- federations -----------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).tanh())


def world(task: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """A model, three clients and a test set for a task."""
    torch.manual_seed(0)
    kind = task.partition("(")[0]

    def body(out: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, out))

    make: dict[str, Callable[[], nn.Module]] = {
        "classification": lambda: body(4),
        "binary": lambda: body(1),
        "multilabel": lambda: body(3),
        "regression": lambda: body(1),
        "segmentation": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)),
        "next_token": Tokens,
    }

    def rows(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 6)
        return {
            "classification": lambda: (x, x[:, :4].argmax(1)),
            "binary": lambda: (x, (x.sum(1) > 0).long()),
            "multilabel": lambda: (x, (x[:, :3] > 0).long()),
            "regression": lambda: (x, x.sum(1) + 0.1 * torch.randn(count)),
            "segmentation": lambda: ((p := torch.randn(count, 2, 6, 6)), (p[:, 0] > 0).long() + (p[:, 1] > 1).long()),
            "next_token": lambda: ((t := torch.randint(6, (count, 5))), (t + 1) % 6),
        }[kind]()

    return make[kind](), [rows(17), rows(24), rows(9)], rows(40)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_learns_and_has_the_same_bits_on_every_engine(task: str) -> None:
    """In this process, through messages, in worker processes; many at once within tolerance."""
    model, clients, test = world(task)
    found = {}
    for engine in ("serial", "wire", "processes", "vmap"):
        workers = {"workers": 2} if engine == "processes" else {}
        run = fs.Federation(model, clients, test, task=task, rounds=6, lr=0.3, batch_size=8, engine=engine, **workers)
        found[engine] = run.fit()
    serial = found["serial"]
    for engine in ("wire", "processes"):
        assert [r.metrics for r in found[engine].records] == [r.metrics for r in serial.records]
        assert [r.loss for r in found[engine].records] == [r.loss for r in serial.records]
    close = [r.loss for r in serial.records]
    assert [r.loss for r in found["vmap"].records] == pytest.approx(close, rel=1e-3)
    guess = build_task(task).guess(test[1], 4)
    assert guess is not None
    assert serial.score is not None
    assert build_task(task).is_better(serial.score, guess)


@pytest.mark.parametrize("method", ["fedlc", "fedrs", "ccvr", "fedimpro(split='0')", "feddf"])
@pytest.mark.parametrize("task", ["regression", "binary"])
def test_what_needs_classes_is_refused_by_name(method: str, task: str) -> None:
    model, clients, test = world(task)
    name = method.partition("(")[0]
    with pytest.raises(fs.UsageError, match=f"'{name}' needs classes, and the task '{task}' has none"):
        fs.Federation(model, clients, test, task=task, method=method)


@pytest.mark.parametrize("task", ["regression", "multilabel", "segmentation", "next_token"])
@pytest.mark.parametrize(
    "method", ["fednlr", "scaffold", "feddyn + fedprox", "moon", "fedadam", "fedavg(reduce='median')", "fedpart"]
)
def test_all_others_run_on_every_task(method: str, task: str) -> None:
    model, clients, test = world(task)
    history = fs.Federation(model, clients, test, task=task, method=method, rounds=3, lr=0.05, batch_size=8).fit()
    assert history.score is not None


def test_balanced_weights_are_those_of_the_whole_federation() -> None:
    """n / (C · n_c), which a federation with these numbers gives bit for bit."""
    model, clients, test = world("classification")
    counts = torch.bincount(torch.cat([y for _, y in clients]), minlength=4)
    weights = tuple(float(counts.sum()) / (4 * float(n)) for n in counts)
    balanced = fs.Federation(model, clients, test, task="classification(weights='balanced')", rounds=2)
    by_hand = fs.Federation(model, clients, test, task=f"classification(weights={weights})", rounds=2)
    assert balanced.fit().records[-1].loss == by_hand.fit().records[-1].loss


def test_a_target_is_reached_from_above_where_less_is_better() -> None:
    model, clients, test = world("regression")
    start = fs.Federation(model, clients, test, task="regression", rounds=8, lr=0.1).fit()
    scores = [r.score for r in start.records if r.score is not None]
    target = (scores[0] + min(scores)) / 2
    first = next(number for number, score in enumerate(scores, 1) if score <= target)
    assert 1 < first < 8
    assert start.rounds_to(target) == first
    assert start.summary["best_score"] == min(scores)
    given = {"rounds": 8, "lr": 0.1, "target": target, "stop_at_target": True}
    assert len(fs.Federation(model, clients, test, task="regression", **given).fit().records) == first


class TwoInputs(nn.Module):
    """Takes two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, points: Tensor, sites: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.body(points + sites).relu())}


def test_probes_on_inputs_of_several_parts() -> None:
    """All that need neither classes nor running statistics nor InCo."""

    def data(seed: int) -> Any:
        x = numbers(24, 4, seed=seed).float()
        return {"points": x, "sites": x.square()}, x.sum(1)

    clients = [data(seed) for seed in range(3)]
    run = fs.Federation(TwoInputs(), clients, data(9), task="regression", rounds=1, lr=0.05, probe="all")
    run.fit()
    assert {"divergence", "proxy", "weightdiv", "cosine", "cka", "gradnorm"} <= run.probes[-1].keys()
    missed = {"drift", "calibration", "margin", "embedding", "statistics", "crossing", "scores", "aggregation"}
    assert run.probes[-1]["missed"].keys() == missed


def test_probes_on_a_task_without_classes() -> None:
    model, clients, test = world("regression")
    run = fs.Federation(model, clients, test, task="regression", rounds=2, lr=0.05, probe="all")
    run.fit()
    row = run.probes[-1]
    assert {"divergence", "proxy", "cosine", "cka", "gradnorm"} <= row.keys()
    assert row["missed"]["drift"] == "it needs classes, and the task 'regression' has none"
    assert run.diagnose() is not None


def test_a_run_is_resumed_with_its_task(tmp_path: Any) -> None:
    model, clients, test = world("regression")
    how: dict[str, Any] = {"task": "regression(loss='huber')", "rounds": 4, "lr": 0.05, "checkpoint_seconds": 0.0}
    whole = fs.Federation(model, clients, test, **how).fit()
    first = fs.Federation(model, clients, test, out=tmp_path / "run", **how)
    next(rounds := first.rounds())
    rounds.close()
    second = fs.Federation(model, clients, test, out=tmp_path / "run", resume=True, **how).fit()
    assert [r.loss for r in second.records] == [r.loss for r in whole.records]
    with pytest.raises(fs.UsageError, match="was run with task"):
        fs.Federation(model, clients, test, out=tmp_path / "run", resume=True, **{**how, "task": "regression"})


# --- a task of one's own ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Quantile(Task):
    """The level-quantile of a number, by the pinball loss, judged by how often the number is below it."""

    name: ClassVar[str] = "quantile"
    level: float = 0.9
    primary: str = "coverage"

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        error = targets - outputs[:, 0]
        return torch.maximum(self.level * error, (self.level - 1) * error).mean()

    def build_metrics(self, width: int) -> dict[str, Any]:
        return {"coverage": lambda outputs, targets: (targets <= outputs[:, 0]).double().mean()}


def test_a_task_of_ones_own() -> None:
    model, clients, test = world("regression")
    found = [
        fs.Federation(model, clients, test, task=Quantile(level=level), rounds=60, lr=0.2, engine=engine, **more).fit()
        for level, engine, more in ((0.9, "serial", {}), (0.9, "processes", {"workers": 2}), (0.1, "serial", {}))
    ]
    assert found[0].score == found[1].score
    high, low = found[0].score, found[2].score
    assert high is not None
    assert low is not None
    assert high > 0.75
    assert low < 0.25
    assert found[0].summary["metric"] == "coverage"
    with pytest.raises(fs.UsageError, match="cannot train the task 'quantile': batches are padded"):
        fs.Federation(model, clients, test, task=Quantile(), engine="vmap")


# --- refusals --------------------------------------------------------------------------------------------------------


def pair(x: Tensor, y: Any) -> Callable[[str], None]:
    return lambda task: fs.Federation(nn.Linear(2, 1), [(x, y)], task=task).fit()  # type: ignore[arg-type, return-value]


X = torch.zeros(3, 2)
REFUSALS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "unknown": ("regresion", pair(X, X), r"there is no task 'regresion' \(did you mean 'regression'\?\)"),
    "loss": ("regression(loss='log')", pair(X, X), "does not fit"),
    "smoothing": ("classification(label_smoothing=1.0)", pair(X, X), "label_smoothing is from 0 up to less than 1"),
    "metric": ("binary(metrics=('acuracy',))", pair(X, X), r"has no metric 'acuracy' \(did you mean 'accuracy'\?\)"),
    "primary": ("binary(primary='rmse')", pair(X, X), "has no metric 'rmse' among"),
    "flags": ("binary", pair(X, torch.tensor([0, 1, 2])), r"targets are 0 or 1, not 2 \(client 0, example 2\)"),
    "nan": (
        "regression",
        pair(X, torch.tensor([0.0, torch.nan, 1.0])),
        r"finite numbers, not nan \(client 0, example 1\)",
    ),
    "words": ("regression", pair(X, ["a", "b", "c"]), "targets are numbers"),
    "columns": ("regression", pair(X, torch.zeros(3, 2)), "2 targets per example, but the model has 1 outputs"),
    "outputs": ("segmentation", pair(X, torch.zeros(3, 2, 2).long()), r"\[rows, classes, height, width\]"),
    "weights": ("classification(weights=(1.0, 2.0))", pair(X, torch.zeros(3).long()), "2 weights, but the model has 1"),
    "another kind": (3, pair(X, X), "a task is a text or a fedstrata.Task, not int"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    task, run, why = REFUSALS[case]
    with pytest.raises(fs.UsageError, match=why) as refused:
        run(task)
    assert "\n" not in str(refused.value)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert fedstrata("run", "--task", "regression(loss='log')") == 2
    assert "task 'regression', argument 'loss'" in one_sentence(capsys)
    assert fedstrata("run", "--task", "multilabel", "--rounds", 1) == 2
    assert "targets are 0 or 1, with 2 axes" in one_sentence(capsys)
    assert fedstrata("run", "--task", "classification(label_smoothing=0.1)", "--rounds", 1, "--quiet") == 0
    assert capsys.readouterr().out.startswith("accuracy ")


# --- what the final model says ---------------------------------------------------------------------------------------


def details(text: str, outputs: Tensor, targets: Tensor, batch_size: int) -> dict[str, Any]:
    """Put together from batches."""
    task = build_task(text)
    found: dict[str, Any] = {}
    for detail in task.build_details(task.width(outputs)):
        pairs = zip(outputs.split(batch_size), targets.split(batch_size), strict=True)
        found |= detail.compute([detail.observe(z, y) for z, y in pairs])
    return found


def expected_calibration_error(confidence: Array, right: Array) -> float:
    """Over ten bins, example by example."""
    total = 0.0
    for low in range(10):
        mine = (confidence >= low / 10) & ((confidence < (low + 1) / 10) | (low == 9))
        if mine.any():
            total += mine.mean() * abs(right[mine].mean() - confidence[mine].mean())
    return total


@pytest.mark.parametrize("batch_size", [ROWS, 8])
def test_confusion_and_calibration(batch_size: int) -> None:
    z, y = numbers(ROWS, 5, seed=0), LABELS
    found = details("classification", z, y, batch_size)
    assert found["confusion"] == sk().confusion_matrix(y, z.argmax(1), labels=range(5)).tolist()
    p = softmax(z.numpy(), 1)
    error = expected_calibration_error(p.max(1), p.argmax(1) == y.numpy())
    assert found["calibration"]["ece"] == pytest.approx(error, abs=1e-6)
    assert sum(found["calibration"]["count"]) == ROWS
    z, y = numbers(ROWS, 1, seed=6), FLAGS
    found = details("binary", z, y, batch_size)
    p = 1 / (1 + np.exp(-z.numpy()[:, 0]))
    assert found["confusion"] == sk().confusion_matrix(y, p >= 0.5, labels=[0, 1]).tolist()
    error = expected_calibration_error(np.maximum(p, 1 - p), (p >= 0.5) == y.numpy().astype(bool))
    assert found["calibration"]["ece"] == pytest.approx(error, abs=1e-6)


def test_predictions_and_masks() -> None:
    z, y = numbers(ROWS, 1, seed=8), numbers(ROWS, seed=9)
    found = details("regression", z, y, 10)["predictions"]
    assert found["true"] == pytest.approx(y.tolist(), rel=1e-5)
    assert found["made"] == pytest.approx(z[:, 0].tolist(), rel=1e-5)
    z = numbers(ROWS, 3, 4, 5, seed=10)
    found = details("segmentation", z, PIXELS, 10)
    shown = [[[None if n == 255 else n for n in row] for row in mask] for mask in PIXELS[:4].tolist()]
    assert found["masks"] == {"true": shown, "made": z[:4].argmax(1).tolist()}
    counts = PIXELS != 255
    assert found["confusion"] == sk().confusion_matrix(PIXELS[counts], z.argmax(1)[counts]).tolist()


def test_a_report_of_every_task(tmp_path: Any) -> None:
    """Its figures are there, and survive an evaluation.json that was edited."""
    wanted = {"classification": "confusion", "binary": "reliability", "regression": "predictions"}
    for task, figure in {**wanted, "segmentation": "masks"}.items():
        model, clients, test = world(task)
        out = tmp_path / task
        run = fs.Federation(model, clients, test, task=task, rounds=2, lr=0.05, out=out)
        run.fit()
        assert f'"{figure}"' in run.report().read_text()
        if task in ("classification", "segmentation"):  # bars and masks are drawn for them alone
            drawn = {path.stem for path in plot([SavedRun.read(out)], tmp_path / f"{task}-plots")}
            assert {figure, "class-scores"} <= drawn
        (out / "evaluation.json").write_text(json.dumps({figure: [["x"]]}))
        assert fedstrata("report", out) == 0
