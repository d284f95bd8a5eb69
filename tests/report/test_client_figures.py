"""Clients that are judged for themselves, in a report's figures and tables: against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest

from fedstrata.evaluation.fairness import fairness_of
from fedstrata.report import client_figures, figures, tables
from fedstrata.report.client_table import client_table
from fedstrata.report.run_groups import group_runs
from fedstrata.report.sections import figure_sections
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.records import Record

from .synthetic import config, record, saved

NAMES = ["Basel", "Bern", "Chur"]


def judged(
    rounds: list[list[float | None]], own: list[float | None] | None = None, names: Any = NAMES, **changes: Any
) -> SavedRun:
    """A run whose clients had these accuracies, and at its end models of their own with others."""
    rows = []
    for at, values in enumerate(rounds, 1):
        last = own if own is not None and at == len(rounds) else None
        found = fairness_of(last or values)
        entries = [None if value is None else {"accuracy": value, "loss": 1.0} for value in values]
        more = None if last is None else [{"accuracy": value} for value in last]
        told = {"client_metrics": entries, "own_metrics": more, "fairness": None if found is None else asdict(found)}
        rows.append(Record.read(record(at, accuracy=0.5, loss=1.0, **told)))
    return SavedRun("run", config(**changes), rows, (), {"client_names": names} if names else {}, {})


def test_a_dot_per_client_the_worst_first() -> None:
    """Means over both methods: Basel (0.9 + 0.7)/2, Bern 0.2, Chur (0.5 + 0.6)/2; Bern has no score in the second."""
    runs = [judged([[0.1, 0.1, 0.1], [0.9, 0.2, 0.5]]), judged([[0.7, None, 0.6]], method="fedprox")]
    (figure,) = client_figures.clients(group_runs(runs))
    assert [trace["x"] for trace in figure.data] == [["Bern", "Chur", "Basel"], ["Chur", "Basel"]]
    assert [trace["y"] for trace in figure.data] == [[0.2, 0.5, 0.9], [0.6, 0.7]]
    assert figure.layout["xaxis"]["categoryarray"] == ["Bern", "Chur", "Basel"]
    assert "alone" not in figure.about


def test_own_models_are_shown_where_there_are_any() -> None:
    (figure,) = client_figures.clients(group_runs([judged([[0.9, 0.2, 0.5]], own=[0.4, 0.3, 0.6], names=None)]))
    assert figure.data[0]["x"] == ["1", "0", "2"]
    assert figure.data[0]["y"] == [0.3, 0.4, 0.6]


def test_newcomers_are_not_shown_among_those_whose_model_it_is() -> None:
    run = judged([[0.9, 0.2, 0.5]], names=None)
    (figure,) = client_figures.clients(group_runs([replace(run, facts={**run.facts, "newcomers": [1]})]))
    assert figure.data[0]["x"] == ["2", "0"]


def test_several_seeds_show_the_clients_of_one() -> None:
    runs = [judged([[0.9, 0.2, 0.5]]), judged([[0.1, 0.1, 0.1]], seed=1)]
    (figure,) = client_figures.clients(group_runs(runs))
    assert figure.data[0]["y"] == [0.2, 0.5, 0.9]
    assert figure.about.endswith("Of seed 0 alone.")


def test_the_distribution_over_rounds() -> None:
    """Of 0.2, 0.4, 0.6: worst 0.2, mean 0.4, std √(0.08/3), Jain 1.44/(3·0.56)."""
    (figure,) = client_figures.over_rounds(group_runs([judged([[0.1, 0.1, 0.1], [0.2, 0.4, 0.6]])]))
    assert figure.by[0].values == ("worst client", "worst tenth", "mean", "standard deviation", "Jain's index")
    last = [figure.traces(at)[-1]["y"][-1] for at in range(5)]
    assert last == pytest.approx([0.2, 0.2, 0.4, (0.08 / 3) ** 0.5, 1.44 / 1.68], rel=1e-5)
    assert figure.traces(4)[-1]["y"][0] == pytest.approx(1.0)


def test_the_section_and_the_table() -> None:
    groups = group_runs([judged([[0.2, 0.4, 0.6]])])
    assert "clients" in [section.name for section in figure_sections(groups)]
    table = tables.over_clients(groups)
    assert table is not None
    assert table.rows[0][table.head.index("global model, worst client")] == "20.00 %"
    assert table.rows[0][table.head.index("global model, spread over clients")] == "16.33 %"
    plain = group_runs([saved([0.1])])
    assert "clients" not in [section.name for section in figure_sections(plain)]
    assert tables.over_clients(plain) is None


def test_curves_over_clients_tell_the_global_model_from_clients_own() -> None:
    """Ditto's clients have 0.5 at worst and the global model 0.2; fedper's have 0.3, and there is no global one."""
    both = judged([[0.2, 0.4, 0.6]], own=[0.5, 0.6, 0.7], method="ditto")
    whole = fairness_of([0.2, 0.4, 0.6])
    both = replace(both, records=[replace(both.records[0], global_fairness=whole)])
    own = judged([[0.3, 0.4, 0.6]], method="fedper")
    (figure,) = client_figures.over_rounds(group_runs([judged([[0.1, 0.4, 0.6]]), own, both]))
    assert figure.by[0].values[:2] == ("worst client, global model", "worst client, own models")
    worst = [{trace["name"]: trace["y"] for trace in figure.traces(at)} for at in (0, 1)]
    assert worst == [{"fedavg": [0.1], "ditto": [0.2]}, {"fedper": [0.3], "ditto": [0.5]}]
    assert "of the global model and of clients' own models" in figure.about
    (dots,) = client_figures.clients(group_runs([judged([[0.1, 0.4, 0.6]]), both]))
    assert "of the global model, or of clients' own models (ditto), on each client's own" in dots.about


def test_a_row_per_client_the_named_and_the_worst_served_first() -> None:
    """Basel has fewest right, and two of three classes, 9 of its 12 examples of one of them; Bern's was refused."""
    facts = {"examples": [12, 40, 7], "counts": [[3, 9, 0], [0, 40, 0], [1, 2, 4]], "class_names": ["a", "b", "c"]}
    run = judged([[0.1, 0.4, None], [0.2, 0.9, 0.6]])
    refused = [{"client": 1, "why": "not finite"}]
    records = [replace(run.records[0], clients=[0, 1], refused=refused), replace(run.records[1], clients=[0])]
    run = replace(run, records=records, facts={**run.facts, **facts, "newcomers": [2]})
    table = client_table(group_runs([run]))
    assert table is not None
    assert table.head[:5] == ("client", "examples", "classes", "newcomer", "rounds")
    assert table.head[5:] == ("refused", "global model", "named by the diagnosis")
    assert table.rows == (
        ("Bern", "40", "1 of 3, most b (100 %)", "–", "1", "1", "90.00 %", "refused updates"),
        ("Basel", "12", "2 of 3, most b (75 %)", "–", "2", "–", "20.00 %", "–"),
        ("Chur", "7", "3 of 3, most c (57 %)", "yes", "–", "–", "–", "–"),  # a newcomer is judged apart
    )
    pair = client_table(group_runs([run, judged([[0.5, 0.1, 0.1]], method="fedprox")]))
    assert pair is not None
    assert [row[0] for row in pair.rows] == ["Bern", "Chur", "Basel"]
    assert pair.head[-3:-1] == ("global model, fedavg", "global model, fedprox")
    assert "examples" not in pair.head  # one of the runs does not know its data


def test_plotly_accepts_every_figure() -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    groups = group_runs([judged([[0.2, 0.4, 0.6], [0.3, None, 0.1]])])
    for figure in (*client_figures.clients(groups), *client_figures.over_rounds(groups)):
        for at in product(*(range(len(control.values)) for control in figure.by)):
            graph_objects.Figure(data=figure.traces(*at), layout=figure.layout)


def test_means_over_clients_tell_whose_models_are_judged() -> None:
    """Of 0.2, 0.4, 0.6 the mean is 0.4; `fedper` leaves the server without a whole model, so it is the clients' own.

    Where there are both, worst and spread are told of either: 0.2 of the global model, 0.5 and √(0.02/3) of their own.
    Newcomers stand by themselves.
    """
    both = judged([[0.2, 0.4, 0.6]], own=[0.5, 0.6, 0.6 + 0.1], method="ditto")
    whole = fairness_of([0.2, 0.4, 0.6])
    assert whole is not None
    late = {"global": 0.3, "own": 0.8}
    both = replace(both, records=[replace(both.records[0], global_fairness=whole, newcomers=late)])
    table = tables.results(group_runs([judged([[0.2, 0.4, 0.6]]), judged([[0.2, 0.4, 0.6]], method="fedper"), both]))
    columns = {name: [row[table.head.index(name)] for row in table.rows] for name in tables.OVER_CLIENTS}
    assert columns["global model, by client"] == ["40.00 %", "–", "40.00 %"]
    assert columns["own models, by client"] == ["–", "40.00 %", "60.00 %"]
    assert columns["global model, worst client"] == ["20.00 %", "–", "20.00 %"]
    assert columns["own models, worst client"] == ["–", "20.00 %", "50.00 %"]
    assert columns["global model, spread over clients"] == ["16.33 %", "–", "16.33 %"]
    assert columns["own models, spread over clients"][2] == f"{100 * (0.02 / 3) ** 0.5:.2f} %"
    assert columns["newcomers: global model"] == ["–", "–", "30.00 %"]
    assert columns["newcomers: own models"] == ["–", "–", "80.00 %"]


def test_a_curve_says_whose_model_it_is_of() -> None:
    plain, own = judged([[0.5]], names=None), judged([[0.5]], names=None, method="fedper")
    strange = judged([[0.5]], names=None, method="of_another_version")
    found = [figures.metrics(group_runs(runs))[0].about for runs in ([plain, strange], [own], [plain, own])]
    assert "of the global model on the test set" in found[0]
    assert "of the clients' own models, in the mean over the clients, on the test set" in found[1]
    assert "of the global model, or of the clients' own models" in found[2]
    assert "of the global model, or of the clients' own" in figures.against_costs(group_runs([plain, own]))[0].about
