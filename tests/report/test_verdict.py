"""What a page opens with: who won at what cost, and the numbers of one method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fedstrata.report.figures import against_costs
from fedstrata.report.opening import setting_text, setup_html
from fedstrata.report.run_groups import group_runs, judged_alike
from fedstrata.report.sections import sections
from fedstrata.report.tables import results
from fedstrata.report.verdict import standing, tiles, verdict
from fedstrata.runs.reader import SavedRun

from .synthetic import saved

ENDED = {"rounds": 1}


def run(score: float | None, method: str = "fedavg", *, sent: int = 1500, flops: int = 10**6, **how: Any) -> SavedRun:
    """One round that ended so; `record` in synthetic.py has 1000 bytes up and 500 down."""
    found = saved([score], method=method, **{"summary": ENDED, **how})
    return replace(found, records=[replace(found.records[0], bytes_up=sent - 500, flops=flops)])


def told(runs: Sequence[SavedRun]) -> str:
    return " ".join(verdict(group_runs(runs)))


def test_the_best_is_told_with_its_lead_and_its_price() -> None:
    """60 % is the mean of 0.5 and 0.7, √0.02 ≈ 14.14 points their deviation; with seed 1 fedprox is ahead."""
    runs = [run(0.45), run(0.55, seed=1), run(0.5, "scaffold", sent=3000, flops=2 * 10**6)]
    runs += [run(0.7, "scaffold", sent=3000, flops=2 * 10**6, seed=1), run(0.3, "fedprox", sent=900)]
    runs += [run(0.8, "fedprox", sent=900, seed=1)]
    assert told(runs) == (
        "scaffold is best: 60.00 ± 14.14 % final accuracy, 5.00 points ahead of fedprox. "
        "It is ahead with 1 of 2 seeds: the order may be chance. "
        "It sends 3.0 kB, 3.33 times what fedprox does, and computes 2 MFLOP, 2 times what fedprox does."
    )


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        ([run(0.5), run(0.4, "fedprox")], "With one seed the order may be chance."),
        ([run(0.5), run(0.4, "fedprox", seed=1)], "They have no seed in common: it may be chance."),
        ([run(0.5), run(0.4, "fedprox")], "It sends 1.5 kB, as all do, and computes 1 MFLOP, as all do."),
        ([run(0.5), run(0.5, "fedprox")], "fedavg and fedprox are even: 50.00 % final accuracy."),
        ([run(0.5, "fedper"), run(0.4, "local", sent=0)], "It sends 1.5 kB, where local needs nothing"),
        ([run(0.5), run(0.4, "fedprox"), run(0.3, "b", sent=600)], "b, which sends least, is 20.00 points behind."),
        ([run(0.5), run(0.4, "fedprox"), run(0.9, "centralised")], "in one place, is 40.00 points ahead."),
        ([run(0.5), run(0.9, "centralised")], "fedavg ended with 50.00 % final accuracy."),
        ([run(0.5), run(0.4, "fedprox", summary={})], "Not all runs have ended."),
        ([run(0.5), run(None, "fedprox", summary={"diverged": 1})], "Diverged: fedprox."),
        ([run(0.5), run(0.4, "fedper")], "since the server has no whole one, and ranked apart: fedper."),
        ([saved([]), saved([], method="fedprox")], "No round has ended yet."),
    ],
)
def test_what_a_reader_must_know_is_told(runs: list[SavedRun], sentence: str) -> None:
    assert sentence in told(runs)


def test_methods_are_ranked_on_one_problem_alone() -> None:
    """Half of the digits right under strong skew is no worse than 80 % of them under none."""
    runs = [run(score + 0.1 * (method == "fedprox"), method, partition=p) for p, score in (("iid", 0.8), ("by", 0.5))
            for method in ("fedavg", "fedprox")]  # fmt: skip
    words = told(runs)
    assert words.startswith("Data or faults differ: methods are ranked in each of 2 settings.")
    assert "fedprox, partition=by is best: 60.00 % final accuracy, 10.00 points ahead of fedavg, partition=by" in words
    assert [row[2] for row in standing(group_runs(runs)).rows] == ["best", "10.00 points"] * 2


def test_no_column_holds_global_and_own_models() -> None:
    """90 % of clients' own models are no victory over a global model that is right on 50 %."""
    runs = [run(0.4, "fedper"), run(0.5), run(0.9, "fedbn"), run(0.3, "fedprox")]
    words = told(runs)
    assert words.startswith("fedavg is best: 50.00 % final accuracy, 20.00 points ahead of fedprox.")
    assert "fedbn is best: 90.00 % final accuracy, 50.00 points ahead of fedper." in words
    groups = group_runs(runs)
    table = standing(groups)
    assert table.head[:4] == ("method", "accuracy", "accuracy, own models", "behind")
    assert [row[:4] for row in table.rows] == [
        ("fedavg", "50.00 %", "–", "best"),
        ("fedprox", "30.00 %", "–", "20.00 points"),
        ("fedbn", "–", "90.00 %", "best"),
        ("fedper", "–", "40.00 %", "50.00 points"),
    ]
    found = results(groups)
    rows = [dict(zip(found.head, row, strict=True)) for row in found.rows]
    assert [row["accuracy"] for row in rows] == ["–", "50.00 %", "–", "30.00 %"]
    assert [row["best, own models"] for row in rows] == ["40.00 %", "–", "90.00 %", "–"]
    assert standing(groups[::2]).head[:3] == ("method", "accuracy", "behind")


def test_less_is_better_where_the_metric_says_so() -> None:
    pair = [run(None), run(None, "fedprox")]
    judged = [replace(r.records[0], primary="rmse", better="lower", metrics={"rmse": e})
              for r, e in zip(pair, (0.5, 0.75), strict=True)]  # fmt: skip
    runs = [replace(one, records=[record]) for one, record in zip(pair, judged, strict=True)]
    assert told(runs).startswith("fedavg is best: 0.5 final RMSE, 0.25 ahead of fedprox.")


def test_a_table_has_the_best_first() -> None:
    runs = [run(0.4), run(0.9, "centralised"), run(0.6, "fedprox", sent=3000)]
    table = standing(group_runs(runs))
    assert table.head == ("method", "accuracy", "behind", "sent", "computed", "time")
    assert [row[:4] for row in table.rows] == [
        ("centralised", "90.00 %", "reference", "1.5 kB"),
        ("fedprox", "60.00 %", "best", "3.0 kB"),
        ("fedavg", "40.00 %", "20.00 points", "1.5 kB"),
    ]
    assert table.groups == (1, 2, 0)  # colours stay with the methods


def test_no_run_that_diverged_is_the_best() -> None:
    """fedprox's 90 % is of a run that diverged: what is left of it, 30 %, is less than fedavg's 50 %."""
    fallen = {"diverged": 1}
    runs = [saved([0.5]), saved([0.3], method="fedprox"), saved([0.9], method="fedprox", seed=1, summary=fallen)]
    assert told(runs).startswith("fedavg is best: 50.00 %")
    assert "Diverged with some seeds, which its mean leaves out: fedprox (1 of 2 seeds left)." in told(runs)
    (accuracy, rounds, *_) = tiles(group_runs(runs[1:])[0])
    assert accuracy == ("accuracy", "30.00 %", "at best 30.00 % in round 1")
    assert rounds[2] == "1 of 2 seeds (0, 1)"
    assert tiles(group_runs(runs[2:])[0])[0] == ("accuracy", "–", "")


def test_one_method_is_told_in_tiles_and_nothing_twice() -> None:
    group = group_runs([saved([0.5, 0.4])])
    assert tiles(group[0]) == [
        ("accuracy", "40.00 %", "at best 50.00 % in round 1"),
        ("rounds", "2", "1 seed (seed 0)"),
        ("sent", "3.0 kB", "2.0 kB up, 1.0 kB down"),
        ("computed", "2 MFLOP", "in 20 local steps"),
        ("time", "1.0 s", "500.0 MB of memory"),
    ]
    assert "numbers" not in [section.name for section in sections(group)]
    assert setting_text(group) == "resnet18 · dirichlet(alpha=0.1) · 20 clients, participation 0.5 · 2 rounds · " \
        "1 seed (seed 0)"  # fmt: skip


def test_how_it_was_run_names_the_versions_that_matter_and_a_table_has_the_others() -> None:
    """Why an engine was chosen is a sentence of its own, and no version."""
    found = replace(saved([0.5]), versions={"torch": "2.13.0", "machine": "Linux", "engine": "processes: too short"})
    facts, _, more = setup_html(group_runs([found])).partition("<details")
    assert "torch 2.13.0" in facts
    assert "too short" not in facts
    assert "processes: too short" in more


def test_runs_that_are_judged_by_different_metrics_are_not_compared() -> None:
    """An RMSE of 0.55 is no AUROC of 55 %."""
    one = saved([0.5])
    other = saved([None], method="fedprox")
    judged = replace(other.records[0], primary="rmse", better="lower", metrics={"rmse": 0.55})
    groups = group_runs([one, replace(other, records=[judged])])
    assert verdict(groups) == ["These runs are judged by different metrics: there is no best one."]
    assert standing(groups).head[:4] == ("method", "accuracy", "RMSE", "sent")
    assert [group.name for group in judged_alike(groups)] == ["fedavg"]
    assert all(len(figure.traces()) == 1 for figure in against_costs(groups))
    row = dict(zip(results(groups).head, results(groups).rows[1], strict=True))
    assert (row["accuracy"], row["RMSE"]) == ("–", "0.55")
