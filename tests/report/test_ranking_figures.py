"""Who is better than whom, and at what cost: ranks and frontiers, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedstrata.report.figures import Figure
from fedstrata.report.plots import plot
from fedstrata.report.ranking_figures import frontier, pareto, ranks
from fedstrata.report.run_groups import group_runs
from fedstrata.runs.reader import SavedRun

from .synthetic import saved

METHODS = ("fedavg", "fedprox", "moon", "scaffold")


def runs(scores: dict[str, list[float]], **changes: Any) -> list[SavedRun]:
    """Method → its final score under each seed."""
    every = [(method, seed, score) for method, own in scores.items() for seed, score in enumerate(own)]
    return [saved([0.1, score], method=method, seed=seed, **changes) for method, seed, score in every]


def traces(figure: Figure) -> dict[str, tuple[list[Any], list[Any]]]:
    return {trace["name"]: (trace["x"], trace["y"]) for trace in figure.data}


def test_ranks_with_the_critical_difference() -> None:
    """Ranks 1, 2, 3 twice and 2, 1, 3: means 4/3, 5/3, 3. N = k = 3: 2.343·√(12/18) = 1.913, so all are alike."""
    held = runs({"fedavg": [0.9, 0.9, 0.8], "fedprox": [0.8, 0.8, 0.9], "moon": [0.1, 0.2, 0.3]})
    reference = runs({"centralised": [0.99, 0.99, 0.99]})
    (figure,) = ranks(group_runs([*held, *reference]))
    found = traces(figure)
    assert found["fedavg"][0] == [pytest.approx(4 / 3, abs=1e-4)]
    assert found["moon"] == ([3.0], ["moon"])
    assert found["critical difference"][0] == [1, pytest.approx(2.913, abs=1e-3)]
    assert found["no difference"][0] == [pytest.approx(4 / 3, abs=1e-4), 3.0]
    assert "centralised" not in found
    assert "Mean ranks over 3 blocks" in figure.about


def test_a_setting_makes_blocks_of_its_own() -> None:
    """The same methods with other data: twice as many blocks, and a point per method still."""
    scores = {"fedavg": [0.9, 0.9], "fedprox": [0.8, 0.8], "moon": [0.1, 0.2]}
    held = [*runs(scores, partition="iid"), *runs(scores, partition="shards(classes=2)")]
    (figure,) = ranks(group_runs(held))
    assert "over 4 blocks" in figure.about
    assert [trace["name"] for trace in figure.data[:4]] == ["critical difference", "fedavg", "fedprox", "moon"]
    (by_bytes, *_) = pareto(group_runs(held))
    assert by_bytes.by[0].values == ("partition iid", "partition shards(classes=2)")


@pytest.mark.parametrize(
    "scores",
    [
        {"fedavg": [0.9, 0.8], "fedprox": [0.8, 0.7]},
        {"fedavg": [0.9], "fedprox": [0.8], "moon": [0.7]},
    ],
    ids=["two methods", "one seed"],
)
def test_too_few_to_rank(scores: dict[str, list[float]]) -> None:
    assert ranks(group_runs(runs(scores))) == []


def test_who_is_beaten_by_nobody() -> None:
    points = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.8), (2.0, 0.7), (0.5, 0.5)]
    assert frontier(points) == [4, 1]
    assert frontier(points, lower=True) == [4]
    assert frontier([]) == []


def test_score_for_cost(tmp_path: Path) -> None:
    """Bytes of a run are those of all its rounds; where all cost the same, only the best is beaten by nobody."""
    held = runs({method: [0.5 + 0.1 * at] for at, method in enumerate(METHODS)})
    found = {figure.name: figure for figure in pareto(group_runs(held))}
    assert {*found} == {"pareto-bytes", "pareto-flops"}
    spent = sum(record.bytes_up + record.bytes_down for record in held[0].records)
    assert traces(found["pareto-bytes"])["fedavg"] == ([spent], [0.5])
    assert "none is better and cheaper" not in traces(found["pareto-bytes"])
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for figure in (*found.values(), *ranks(group_runs(runs({method: [0.5, 0.6, 0.7] for method in METHODS})))):
        graph_objects.Figure(data=[{**trace, "meta": None} for trace in figure.data], layout=figure.layout)


@pytest.mark.slow
def test_papers_get_them_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    held = runs({"fedavg": [0.9, 0.9], "fedprox": [0.8, 0.8], "moon": [0.1, 0.2]})
    names = {path.name for path in plot(held, tmp_path, "svg")}
    assert {"ranks.svg", "pareto-bytes.svg", "pareto-flops.svg"} <= names
    assert (tmp_path / "ranks.svg").read_text().count("<!-- critical difference -->") == 1  # its row names it
    assert (tmp_path / "pareto-bytes.svg").read_text().count("<!-- moon -->") == 1  # and here a legend does
