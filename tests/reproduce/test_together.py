"""All five together: costs, fronts and sums against numbers worked out again, and the study at its smallest scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.compare import plan
from fedstrata.diagnosis.remedies import RemedyBuilder
from fedstrata.errors import UsageError
from fedstrata.reproduce import PAPERS, Reproduction, parts, reproduce
from fedstrata.reproduce.parts import Grid
from fedstrata.reproduce.together import _mean_number
from fedstrata.reproduce.together_costs import (
    additivity,
    at_equal_cost,
    best_within,
    equal_budgets,
    mean_trace,
    pareto_front,
)
from fedstrata.reproduce.tuning import tuning_plan
from fedstrata.reproduce.verdicts import EVIDENCE_SEEDS
from fedstrata.runs.reader import SavedRun
from fedstrata.techniques import method
from fedstrata.techniques.quotes import quote_gains
from tests.small_runs import fedstrata, one_sentence
from tests.test_benchmarks import load

# --- the arithmetic --------------------------------------------------------------------------------------------------


def test_accuracy_at_equal_cost_by_hand() -> None:
    """A spends 10 per evaluation and B 4: within 12, the whole of B's run, A has its first evaluation alone.

    In seed 2 B is missing, so that A's own run is the budget; in seed 3 A's first evaluation costs more than there is.
    """
    runs = {
        "A": {1: [(10.0, 0.5), (20.0, 0.9)], 2: [(10.0, 0.4), (20.0, 0.6)], 3: [(10.0, 0.7)]},
        "B": {1: [(4.0, 0.2), (8.0, 0.3), (12.0, 0.35)], 3: [(4.0, 0.1)]},
    }
    assert equal_budgets(runs) == {1: 12.0, 2: 20.0, 3: 4.0}
    assert at_equal_cost(runs) == {"A": {1: 0.5, 2: 0.6}, "B": {1: 0.35, 3: 0.1}}
    assert best_within(runs["A"][1], 9.0) is None
    assert mean_trace([runs["A"][1], runs["A"][2]]) == [(10.0, pytest.approx(0.45)), (20.0, pytest.approx(0.75))]


def test_the_front_is_what_nothing_dominates() -> None:
    """Against NumPy on all pairs: a point is on it if none costs at most as much and is at least as good."""
    rng = np.random.default_rng(4)
    curves = {
        name: list(zip(np.cumsum(rng.random(8)).tolist(), np.sort(rng.random(8)).tolist(), strict=True))
        for name in "abc"
    }
    points = np.array([(cost, value) for curve in curves.values() for cost, value in curve])
    costs, values = points.T
    beaten = [((costs <= c) & (values >= v)).sum() > 1 for c, v in points]
    expected = sorted(map(tuple, points[~np.array(beaten)].tolist()))
    found = pareto_front(curves)
    assert [(p.cost, p.accuracy) for p in found] == expected
    assert all((p.cost, p.accuracy) in curves[p.label] for p in found)
    assert 3 <= len(found) < len(points)


def test_gains_add_up_by_hand() -> None:
    """Base 0.5; A gains 0.1 and B 0.2 in every seed. Together 0.3 more is their sum, 0.32 is more, 0.25 is less."""
    figures = {
        "base": {s: 0.5 + s / 100 for s in (1, 2, 3)},
        "A": {s: 0.6 + s / 100 for s in (1, 2, 3)},
        "B": {s: 0.7 + s / 100 for s in (1, 2)},
    }
    for gain, reading in ((0.3, "not told apart from"), (0.32, "more than"), (0.25, "less than")):
        figures["A + B"] = {s: 0.5 + s / 100 + gain + e for s, e in ((1, 0.001), (2, -0.001), (3, 0.2))}
        found = additivity(figures, "base", "A + B", ["A", "B"])
        assert found.gain == pytest.approx({1: gain + 0.001, 2: gain - 0.001})  # not seed 3, which B lacks
        assert found.parts == pytest.approx({1: 0.3, 2: 0.3})
        assert found.surplus == pytest.approx({1: gain - 0.299, 2: gain - 0.301})
        assert found.reading == f"{reading} the sum"


def test_strata_that_stand_still_are_left_out() -> None:
    assert _mean_number({"a": 0.2, "b": 0.0, "c": None, "d": float("nan"), "e": -0.4}) == pytest.approx(-0.1)
    assert _mean_number({"a": 0.0, "b": None}) is None


# --- the study -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reproduction, Path]:
    """The scale smoke, made once."""
    out = tmp_path_factory.mktemp("together")
    return reproduce("together", "smoke", out=out), out


def test_smoke(made: tuple[Reproduction, Path]) -> None:
    found, out = made
    assert not found.failures
    assert [section.part.name for section in found.sections] == ["table", "depths", "networks"]
    names = {check.name for check in found.checks}
    assert {
        "FedDyn + FedNLR + FedImpro + FedPart gains more than its parts together at equal bytes on digits, "
        "Dirichlet(0.1)",
        "InCo + FedPart beats each of its parts at equal FLOPs on digits, Dirichlet(0.1), depths",
        "a combination is the best of all at equal rounds on digits, Dirichlet(0.1)",
        "FedPart beats FedAvg at equal bytes, shallow, guidelines off",
    } <= names
    assert len(names) == len(found.checks)
    pictures = [name for section in found.sections for name in section.findings.pictures]
    assert pictures == ["table.png", "depths.png"]
    assert all((out / name).stat().st_size > 5000 for name in pictures)
    table = found.sections[0].findings.tables[0]
    shares = {row[0]: row[-2:] for row in table.rows}
    assert shares["FedAvg"] == ("100 %", "100 %")
    assert int(shares["FedPart"][0].removesuffix(" %")) < 100 < int(shares["SCAFFOLD"][0].removesuffix(" %"))


def test_accuracy_at_equal_bytes_is_what_the_runs_wrote(made: tuple[Reproduction, Path]) -> None:
    """Counted again from metrics.jsonl: the budget is the least that any method's run has sent, up and down."""
    found, out = made
    (part,) = parts("together", "smoke", ["table"])
    assert isinstance(part, Grid)
    runs = {}
    for run in plan(part.values, out / "runs").runs:
        lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
        sent = np.cumsum([line["bytes_up"] + line["bytes_down"] for line in lines])
        runs[run.label] = sent, np.maximum.accumulate([line["accuracy"] for line in lines])
    budget = min(sent[-1] for sent, _ in runs.values())
    expected = {label: f"{100 * best[sent <= budget][-1]:.2f}" for label, (sent, best) in runs.items()}
    table = found.sections[0].findings.tables[0]
    assert {row[0]: row[2] for row in table.rows} == expected


def test_evidence(tmp_path: Any) -> None:
    """As many trials for every method, five seeds, and ideas alone that are the combinations' parts to the letter."""
    found = {part.name: part for part in parts("together", "evidence")}
    assert list(found) == ["table", "table-cifar-10", "depths"]
    every = {part.name: part for part in PAPERS["together"]("evidence")}
    assert every.keys() - found.keys() == {"depths-cifar-10", "networks", "networks-cifar-10"}
    for part in every.values():
        assert isinstance(part, Grid)
        runs, trials = plan(part.values, tmp_path).runs, tuning_plan(part, {}, tmp_path).runs
        labels = {run.label for run in runs}
        assert {label: sum(run.label == label for run in trials) for label in labels} == dict.fromkeys(labels, 3)
        assert len({run.config.seed for run in runs}) >= EVIDENCE_SEEDS
        assert {run.config.partition for run in runs} == {"dirichlet(alpha=0.1)"}
        methods = {run.label or "": set(map(str, method(run.config.method).techniques)) for run in runs}
        for label, techniques in methods.items():
            names, net = label.partition(",")[0].split(" + "), "".join(label.partition(",")[1:])
            if len(names) > 1:
                assert techniques == set().union(*(methods[name + net] for name in names)) - {"fedavg"}
    networks = every["networks"]
    assert isinstance(networks, Grid)
    assert len({run.config.model for run in plan(networks.values, tmp_path).runs}) == 4


def test_gains_are_quoted_where_methods_are_recommended(
    made: tuple[Reproduction, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From report.json by way of one file: gains in three seeds of +1, +2 and +3 points, t = 2.920 for two degrees."""
    _, out = made
    quote = load("quote_results.py").quote
    report = json.loads((out / "report.json").read_text())
    part = report["parts"][0]
    assert part["data"]["methods"]["FedDyn"] == "feddyn(alpha=0.1)"
    assert set(part["data"]["gains"]["FedDyn"]) == {"0"}
    assert list(quote(report, "page")) == []  # one seed has no interval
    part["data"]["gains"] = {"FedDyn": {"1": 0.01, "2": 0.02, "3": 0.03}, "FedDyn + FedPart": {"1": 0.1, "2": 0.1}}
    entries = list(quote(report, "docs/results/together.md"))
    half = 2.9200 * 0.01 / 3**0.5
    assert entries[0]["interval"] == pytest.approx([0.02 - half, 0.02 + half], abs=1e-4)
    file = tmp_path / "quotes.json"
    file.write_text(json.dumps(entries))
    text = "+2.0 points over FedAvg, 90 % interval +0.3 to +3.7, on digits, Dirichlet(0.1) (3 seeds, docs/results/"
    assert quote_gains(["feddyn"], file).startswith(text)
    assert quote_gains(["fedpart", "feddyn"], file).startswith("+10.0 points over FedAvg")
    assert quote_gains(["fedpart"], file) == quote_gains([], file) == quote_gains(["feddyn"], tmp_path / "none") == ""
    monkeypatch.setattr("fedstrata.techniques.quotes.FILE", file)
    assert fedstrata("list", "methods", "--json") == 0
    helps = {row["name"]: row["help"] for row in json.loads(capsys.readouterr().out)}
    assert text in helps["feddyn"]
    assert "Measured" not in helps["fedpart"]
    saved = SavedRun("run", {"method": "fedavg", "rounds": 30}, [], facts={"has_classes": True})
    remedy = RemedyBuilder(saved).add_technique("feddyn", "it pulls", "paper")
    assert remedy is not None
    assert remedy.why.startswith(f"it pulls; measured: {text}")


def test_there_is_no_paper_to_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    assert fedstrata("reproduce", "together", "--scale", "paper", "--data-dir", "x") == 2
    assert "together has no scale 'paper'" in one_sentence(capsys)
    with pytest.raises(UsageError, match="together has no part 'tabel'"):
        reproduce("together", only=["tabel"])
