"""What was tried, in a report: bars with intervals from tried.json, a note for a broken file, nothing for none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedstrata import report
from fedstrata.report.plots import plot
from fedstrata.report.run_groups import group_runs
from fedstrata.report.sections import figure_sections
from fedstrata.report.tried_figures import tried, tried_tables
from fedstrata.runs.reader import SavedRun

from .synthetic import write_run

HOSTILE = "</script><img src=x onerror=alert(1)>"


def gain(gained: float | None, low: float | None = None, high: float | None = None, **more: Any) -> dict[str, Any]:
    return {"command": "fedstrata run", "scores": [0.5, 0.7], "gained": gained, "low": low, "high": high, **more}


def remedy(change: str, verdict: str, *numbers: float | None) -> dict[str, Any]:
    return gain(*numbers, finding="label-skew", change=change, verdict=verdict)


FOUND: dict[str, Any] = {
    "format": 1,
    "metric": "accuracy",
    "higher_is_better": True,
    "rounds": 6,
    "seeds": [0, 1],
    "control": {"command": "fedstrata run", "scores": [0.3, 0.5]},
    "references": [gain(0.4, 0.35, 0.45, name="centralised", cost=None)],
    "remedies": [
        remedy("--lr 0.01", "hurts", -0.1, -0.15, -0.05),
        remedy('--method "feddyn(alpha=0.1)"', "helps", 0.2, 0.1, 0.3),
        remedy("--clip 1.0", "not decided", 0.01),
        remedy(HOSTILE, "not decided", None),
    ],
}


def run_with(directory: Path, text: str | None) -> SavedRun:
    home = write_run(directory / "run", rounds=2, probes=False)
    if text is not None:
        (home / "tried.json").write_text(text)
    return SavedRun.read(home)


def test_bars_are_points_with_their_intervals_the_best_first(tmp_path: Path) -> None:
    """Of accuracy a share of 0.2 is 20 points; its interval from 0.1 to 0.3 is 10 points to both sides."""
    (figure,) = tried(group_runs([run_with(tmp_path, json.dumps(FOUND))]))
    order, *bars = figure.traces(0)
    assert order["y"] == ["feddyn(alpha=0.1)", "--clip 1.0", "--lr 0.01", "centralised"]
    found = {bar["name"]: bar for bar in bars}
    assert list(found) == ["helps", "hurts", "not decided", "for comparison"]
    assert found["helps"]["x"] == [20.0]
    assert found["hurts"]["x"] == [-10.0]
    assert (found["helps"]["error_x"]["array"], found["helps"]["error_x"]["arrayminus"]) == ([10.0], [10.0])
    assert found["not decided"]["error_x"]["array"] == [0.0]
    assert figure.layout["xaxis"]["title"]["text"] == "points gained"


def test_the_table_has_everything_that_was_tried(tmp_path: Path) -> None:
    (table,) = tried_tables(group_runs([run_with(tmp_path, json.dumps(FOUND))]))
    assert "(40.00 ± 14.14 %), each with 6 rounds and seeds 0, 1" in table.caption
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows['--method "feddyn(alpha=0.1)"'] == (
        *("label skew", "60.00 ± 14.14 %", "+20.0", "+10.0 to +30.0", "–", "helps"),
    )
    assert rows[HOSTILE][2] == "–"


def test_errors_keep_their_unit(tmp_path: Path) -> None:
    text = json.dumps(FOUND | {"metric": "rmse", "higher_is_better": False})
    (figure,) = tried(group_runs([run_with(tmp_path, text)]))
    assert figure.traces(0)[1]["x"] == [0.2]
    assert figure.layout["xaxis"]["title"]["text"] == "RMSE gained; more is better"


def test_no_file_no_section(tmp_path: Path) -> None:
    run = run_with(tmp_path, None)
    assert "tried" not in [section.name for section in figure_sections(group_runs([run]))]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 2}', json.dumps(FOUND | {"seeds": [0]})])
def test_a_broken_file_is_a_note(tmp_path: Path, text: str) -> None:
    html = report.page([run_with(tmp_path, text)])
    assert "What was tried cannot be shown: tried.json " in html
    assert "The diagnosis failed" not in html
    assert str(tmp_path) not in html
    assert 'data-figure="tried"' not in html
    assert 'class="tiles"' in html


def test_hostile_changes_stay_text(tmp_path: Path) -> None:
    html = report.page([run_with(tmp_path, json.dumps(FOUND))])
    assert "<img" not in html
    assert html.count("</script") == 3


def test_plotly_and_matplotlib_accept_it(tmp_path: Path) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    pytest.importorskip("matplotlib")
    run = run_with(tmp_path, json.dumps(FOUND))
    (figure,) = tried(group_runs([run]))
    graph_objects.Figure(data=figure.traces(0), layout=figure.layout)
    assert tmp_path / "plots" / "tried.png" in plot([run], tmp_path / "plots", "png")
