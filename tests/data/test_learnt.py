"""What is learnt from targets: one rule for tables, arrays and functions, and the task that a run asks for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.data.arrays import read_targets
from fedstrata.data.datasets import load_dataset
from fedstrata.data.learnt import IGNORED, NEEDS, guess_task, ignored_by, kind_of
from fedstrata.data.tables import read_target
from fedstrata.errors import UsageError
from fedstrata.run import deal, open_run, outputs_of
from fedstrata.tasks.registry import TASKS, build_task

SCORES = [10, 20, 50, 100]


@pytest.mark.parametrize(
    ("targets", "task"),
    [
        (["a", "b", "c"], "classification"),
        (["a", "b"], "binary"),
        ([str(n) + "x" for n in range(500)], "classification"),
        ([3.0, 7.0, 3.0], "binary"),
        (list(range(20)), "classification"),
        (list(range(21)), "regression"),
        (list(range(100)) * 2, "classification"),
        (list(range(100)) + list(range(99)), "regression"),
        (list(range(1000)) * 2, "classification"),
        (list(range(1001)) * 2, "regression"),
        (list(range(1, 101)) * 2, "classification"),
        ([n for n in range(100) if n != 7] * 3, "classification"),
        (list(range(20, 91)) * 5, "regression"),
        ([n for n in range(100) if n % 7] * 3, "regression"),
        ([float(n) for n in range(100)] * 2, "regression"),
        ([100 * n for n in range(50)], "regression"),
        ([0.5, 1.0], "regression"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]} … {value[-1]}, {len(value)}",
)
def test_the_rule(targets: list[Any], task: str) -> None:
    assert guess_task(np.array(targets)) == task
    assert read_targets("it", np.array(targets), "").task == task


@pytest.mark.parametrize("targets", [["b", "a", "c"], [1, 2, 1], SCORES, [0.5, 1.5], [7.0 * n for n in range(30)]])
def test_the_rule_is_that_of_tables_too(targets: list[Any]) -> None:
    assert read_target("it", "y", [str(one) for one in targets], "")[0] == guess_task(np.array(targets))


def test_tasks_are_known_by_the_names_and_defaults_that_they_have() -> None:
    assert set(NEEDS) == set(TASKS)
    for name, ignored in IGNORED.items():
        assert build_task(name).ignore == ignored  # type: ignore[attr-defined]
    assert {name for name in TASKS if hasattr(build_task(name), "ignore")} == set(IGNORED)
    with pytest.raises(UsageError, match=r"it: there is no task 'regresion' \(did you mean 'regression'\?\)"):
        kind_of("it", "regresion")


def test_what_a_task_passes_over_follows_its_text() -> None:
    """By hand: 9 is no class of the masks where it is ignored, nor the likeliest one; nor is it the last token."""
    assert (ignored_by("segmentation"), ignored_by("segmentation(ignore=9)"), ignored_by("binary")) == (255, 9, None)
    masks = np.array([[[9, 9], [9, 2]], [[1, 0], [9, 9]]])
    found = read_targets("it", masks, "segmentation(ignore=9)")
    assert (found.outputs, found.classes().tolist()) == (3, [2, 1])
    assert read_targets("it", masks, "segmentation").outputs == 10
    found = read_targets("it", np.array([[4, 9], [3, 2]]), "next_token(ignore=9)")
    assert (found.outputs, found.classes().tolist()) == (5, [4, 2])


def own_data(folder: Path, kind: str) -> str:
    """Four scores, in a form of one's own."""
    x, y = np.random.default_rng(0).normal(size=(40, 2)), np.array(SCORES * 10)
    if kind == "csv":
        (folder / "s.csv").write_text("a,b,y\n" + "".join(f"{a},{b},{c}\n" for (a, b), c in zip(x, y, strict=True)))
        return f"csv(path='{folder}/s.csv', target='y')"
    if kind == "npz":
        np.savez(folder / "s.npz", x=x, y=y)
        return f"npz(path='{folder}/s.npz')"
    (folder / "own_scores.py").write_text(
        f"import numpy as np\nx, y = np.ones((40, 2)), np.array({y.tolist()})\ndef load(): return [(x, y)], (x, y)\n"
    )
    return f"python('{folder}/own_scores:load')"


@pytest.mark.parametrize("kind", ["csv", "npz", "python"])
def test_the_task_that_a_run_asks_for_reads_the_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = own_data(tmp_path, kind)
    config = validate_settings(
        RunConfig, {"dataset": text, "task": "regression(loss='l1')", "model": "logreg", "clients": 2, "rounds": 1}
    )
    dataset, _ = deal(config)
    assert (dataset.task, outputs_of(config, dataset)) == ("regression(loss='l1')", 1)
    assert set(dataset.train.y.tolist()) == set(SCORES)
    assert load_dataset(text).task == "classification"
    federation = open_run(config.model_copy(update={"partition": "iid"}), None)
    assert "rmse" in (federation.fit().metrics or {})
    federation.close()
    sys.modules.pop("own_scores", None)


def test_the_runs_task_wins_and_words_are_no_numbers(tmp_path: Path) -> None:
    text = own_data(tmp_path, "csv")
    assert load_dataset(text[:-1] + ", task='classification')", None, "regression").task == "regression"
    (tmp_path / "w.csv").write_text("a,y\n" + "1,good\n2,bad\n" * 20)
    with pytest.raises(UsageError, match="csv: the target 'y' is 'good' in row 1, and regression needs a number"):
        load_dataset(f"csv(path='{tmp_path}/w.csv', target='y')", None, "regression")
    np.savez(tmp_path / "w.npz", x=np.ones((4, 2)), y=np.array(["good", "bad"] * 2))
    with pytest.raises(UsageError, match="npz: targets are words, which the task 'regression' has no use for"):
        load_dataset(f"npz('{tmp_path}/w.npz')", None, "regression")


def test_a_dataset_that_is_what_it_is_takes_no_task() -> None:
    assert load_dataset("digits", None, "regression").task == "classification"
