"""Clients one by one in a report: outlier scores, curves, and the findings that they stand beside."""

from __future__ import annotations

import re
from itertools import pairwise, product
from typing import Any

import pytest

from fedstrata import report
from fedstrata.diagnosis.thresholds import THRESHOLDS
from fedstrata.report.diagnosis_cards import SHOWN_BY
from fedstrata.report.figures import BLUES, OUTLIERS, Figure, dark_colours
from fedstrata.report.outlier_figures import MOST_CLIENTS, clients_one_by_one
from fedstrata.report.run_groups import group_runs
from fedstrata.runs.reader import SavedRun

from .synthetic import saved, visits

STRATA = ["stem", "head"]


def seen(rounds: list[dict[int, float]], cosines: dict[int, float] | None = None, **changes: Any) -> SavedRun:
    """A run whose clients' updates were so long."""
    rows = [
        {"round": at, "clients": list(norms), "seconds": {"visits": 0.1}, "visits": visits(STRATA, norms, cosines)}
        for at, norms in enumerate(rounds, 1)
    ]
    return saved([0.1 * at for at in range(1, len(rounds) + 1)], rows, **changes)


def even(count: int, **unlike: float) -> dict[int, float]:
    """Clients with updates of norm 1, but for those named c<number>."""
    return {client: unlike.get(f"c{client}", 1.0) for client in range(count)}


def hostile_run(**changes: Any) -> SavedRun:
    """Client 5 of eight sends long updates that point the other way, most in the second of three rounds."""
    rounds = [even(8, c5=50.0), even(8, c5=500.0), even(8, c5=50.0)]
    grown = [{c: n * (1 + at / 10) for c, n in norms.items()} for at, norms in enumerate(rounds)]  # nobody is stuck
    return seen(grown, {5: -0.9}, partition="iid", **changes)


def figures_of(*runs: SavedRun) -> dict[str, Figure]:
    return {figure.name: figure for figure in clients_one_by_one(group_runs(runs))}


def test_scores_by_client_and_stratum_in_every_round() -> None:
    """All norms are 1 but one of e²: ln is 2 above the median, the spread counts as 0.25 at least: 2/0.25 = 8."""
    figure = figures_of(seen([even(5), even(5, c3=7.38905609893065)]))["outliers"]
    assert figure.by[1].values == ("1", "2")
    (first,), (last,) = figure.traces(0, 0), figure.traces(0, 1)
    assert first["z"] == [[0.0, 0.0]] * 5
    assert last["x"] == STRATA
    assert last["y"][0] == "client 3"  # the most conspicuous first
    assert last["z"] == [[8.0, 8.0]] + [[0.0, 0.0]] * 4
    assert last["zmax"] == 10
    assert "robust z-score" in figure.about


def test_those_that_the_diagnosis_names_are_marked_and_the_slider_begins_there() -> None:
    found = figures_of(hostile_run())
    heat = found["outliers"]
    assert heat.by[1].start == 1
    assert heat.traces(0, 1)[0]["y"][0] == "▶ client 5"
    assert [(shape["y0"], shape["y1"]) for shape in heat.layout["shapes"]] == [(-0.5, 0.5)]
    lines = found["client-curves"].traces(0, 0)
    assert [line["name"] for line in lines if line["showlegend"]] == ["▶ client 5"]
    assert lines[-1]["name"] == "▶ client 5"  # above the others
    assert len(lines) == 8


def test_a_client_that_sat_out_has_empty_cells() -> None:
    rounds = [even(6), dict.fromkeys(range(5), 1.0)]
    (trace,) = figures_of(seen(rounds))["outliers"].traces(0, 1)
    assert trace["z"][trace["y"].index("client 5")] == [None, None]


def test_curves_of_losses_and_norms() -> None:
    figure = figures_of(seen([even(4), even(4, c2=3.0)], facts={"client_names": ["A", "B", "C", "<D>"]}))
    curves = figure["client-curves"]
    assert curves.by[0].values == ("outlier score", "training loss", "norm of the update")
    losses, norms = ({line["name"]: line for line in curves.traces(at, 0)} for at in (1, 2))
    assert losses["C"]["y"] == [1.02, 1.02]
    assert norms["C"]["x"] == [1, 2]
    assert norms["C"]["y"] == [1.0, 3.0]
    assert "&lt;D&gt;" in norms
    assert curves.cursor is figure["outliers"].by[1]


def test_large_federations_show_the_most_conspicuous_and_say_so() -> None:
    found = figures_of(seen([even(120, c77=9.0, c3=30.0)] * 2))
    for figure in found.values():
        assert f"Of 120 clients the {MOST_CLIENTS} most conspicuous are shown." in figure.about
    (trace,) = found["outliers"].traces(0, 0)
    assert [name.removeprefix("▶ ") for name in trace["y"][:2]] == ["client 3", "client 77"]
    assert len(trace["y"]) == len(trace["z"]) == MOST_CLIENTS
    assert len(found["client-curves"].traces(0, 0)) == MOST_CLIENTS
    assert found["outliers"].layout["height"] < 900


def test_runs_that_nobody_looked_at_and_broken_rows_have_no_figure() -> None:
    assert figures_of(saved([0.1])) == {}
    broken = [{"round": 1, "clients": "x", "visits": {"norm": {"stem": 3}, "loss": "none"}}, {"round": 2, "visits": 1}]
    assert figures_of(saved([0.1, 0.2], broken)) == {}
    assert "outliers" not in figures_of(seen([even(3)]))  # of three, two that agree say nothing


def test_methods_are_chosen_where_only_one_was_scored() -> None:
    """The heat-map has one method, the curves have both: their lists of methods are not the same."""
    found = figures_of(seen([even(3)]), hostile_run(method="fedprox"))
    assert found["outliers"].by[0].values == ("fedprox",)
    assert found["client-curves"].by[1].values == ("fedavg", "fedprox")
    assert found["outliers"].by[0].name != found["client-curves"].by[1].name


def test_plotly_accepts_every_state() -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for figure in figures_of(hostile_run(), hostile_run(method="fedprox")).values():
        for at in product(*(range(len(control.values)) for control in figure.by)):
            graph_objects.Figure(data=figure.traces(*at), layout=figure.layout)


@pytest.mark.parametrize("scale", [OUTLIERS, BLUES], ids=["outliers", "counts"])
@pytest.mark.parametrize("ground", [1, 2])
def test_colours_go_away_from_the_background(ground: int, scale: Any) -> None:
    """By luminance alone, as print and every colour vision have it; on dark ground, too, nothing is the darkest."""
    codes = [stop[ground] for stop in scale]
    assert ground == 1 or all(dark_colours()[stop[1]] == stop[2] for stop in scale)
    parts = [[int(code[i : i + 2], 16) for i in (1, 3, 5)] for code in codes]
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in parts]
    assert light == sorted(light, reverse=ground == 1)
    assert min(abs(a - b) for a, b in pairwise(light)) > 12


def test_a_finding_stands_beside_the_figure_that_shows_it() -> None:
    html = report.page([hostile_run()])
    (card,) = re.findall(r'<li class="finding [^"]*shown".*?</li>(?=<li class="finding|</ol>)', html, re.S)[:1]
    assert "Hostile updates" in card
    assert 'class="beside" data-figure="client-curves"' in card
    assert '<a href="#figure-outliers">' in card
    for name in re.findall(r'href="#(figure-[^"]*)"', html):
        assert html.count(f'id="{name}"') == 1


def test_a_figure_is_beside_one_finding_and_beside_none_of_several_runs() -> None:
    beside = re.findall(r'class="beside" data-figure="([^"]*)"', report.page([hostile_run()]))
    assert len(set(beside)) == len(beside) > 0
    two = report.page([hostile_run(), hostile_run(method="fedprox")])
    assert 'class="beside"' not in two
    assert 'href="#figure-outliers"' in two


def test_findings_that_figures_show_are_findings() -> None:
    assert SHOWN_BY.keys() <= THRESHOLDS.keys()
