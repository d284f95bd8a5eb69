"""The file: whole, small, closed to the network and to hostile names; and the tables in it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import fedstrata as fs
from fedstrata import report
from fedstrata.errors import UsageError
from fedstrata.report import run_groups, tables
from fedstrata.report.page import embed_json, news, packed_plotly
from fedstrata.report.run_groups import group_runs
from fedstrata.runs.reader import SavedRun

from .synthetic import saved, write_comparison, write_run

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\"'&amp;$%{x}"


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found
    return json.loads(found[1])


def test_a_run_without_rounds_has_a_page(tmp_path: Path) -> None:
    html = report.page([SavedRun.read(write_run(tmp_path / "r", rounds=0, probes=False, ended=False))])
    assert "none yet" in html
    assert "Not begun." in html


def test_no_runs_make_no_page() -> None:
    with pytest.raises(UsageError, match="at least one run"):
        report.page([])


def test_scripts_are_the_two_that_the_policy_names(tmp_path: Path) -> None:
    html = report.page([saved([0.1, 0.2])])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', html)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]
    own = re.findall(r"<script>(.*?)</script>", html, re.S)
    (packed,) = re.findall(r'<script type="text/plain" id="plotly">(.*?)</script>', html, re.S)
    sources = [own[0].encode(), gzip.decompress(base64.b64decode(packed))]
    assert len(own) == 1
    for source in sources:
        assert base64.b64encode(hashlib.sha256(source).digest()).decode() in policy[1]
    assert "connect-src 'self'" in report.page([saved([0.1])], live=True)


def test_nothing_is_named_that_a_browser_would_load() -> None:
    html = report.page([saved([0.1, 0.2])])
    assert not re.findall(r'(?:src|href)="(?!#|data:,")[^"]*"', html)
    assert "@import" not in html


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "r", rounds=3, method=HOSTILE, class_names=[HOSTILE] * 10, notes=[HOSTILE], dataset=HOSTILE
    )
    html = report.page([SavedRun.read(run), saved([0.1], method=HOSTILE + "2")], title=HOSTILE)
    assert html.count("<script") == 3
    assert html.count("</script") == 3
    assert "<img" not in html
    assert "<!--" not in html
    lines = data_of(html)["lines"]
    assert [line["name"] for line in lines] == [HOSTILE, HOSTILE + "2"]
    assert "<img" not in json.dumps(data_of(html)["figures"])  # Plotly reads tags


def test_embedded_json_cannot_end_its_element() -> None:
    text = embed_json({"a": HOSTILE})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": HOSTILE}


def test_numbers_that_are_none_do_not_break_the_page() -> None:
    probes = [{"round": 1, "divergence": {"a": float("nan")}, "cosine": {"a": float("inf"), "b": 0.5}}]
    html = report.page([saved([float("nan"), 0.5], probes)])
    assert "NaN" not in json.dumps(data_of(html))


@pytest.mark.slow
def test_three_methods_of_a_hundred_rounds_are_small(tmp_path: Path) -> None:
    """3 methods × 100 rounds × 21 strata with all probes in at most 8 MB."""
    write_comparison(tmp_path / "runs", rounds=100, strata=21, seeds=1, sampled=20)
    runs = [SavedRun.read(path) for path in sorted((tmp_path / "runs").iterdir())]
    path = report.write(runs, tmp_path / "report.html")
    assert path.stat().st_size <= 8e6


def test_the_packed_script_is_whole() -> None:
    packed, _ = packed_plotly()
    assert b"plotly.js v" in gzip.decompress(base64.b64decode(packed))[:200]


def test_news_hold_what_the_page_holds() -> None:
    run = saved([0.1, 0.2])
    fresh = json.loads(news([run]))
    assert fresh["figures"] == data_of(report.page([run]))["figures"]
    names = [section["name"] for section in fresh["sections"] if section["name"] != "diagnosis"]
    assert names == ["results", "clients", "curves", "setup"]


def test_results_leave_out_what_diverged() -> None:
    """Mean of 0.5 and 0.7 is 60 %, their standard deviation √0.02 ≈ 14.14 points; the third seed diverged."""
    runs = [saved([0.5], seed=0), saved([0.7], seed=1), saved([0.1], seed=2, summary={"diverged": 1})]
    table = tables.results(group_runs(runs))
    row = dict(zip(table.head, table.rows[0], strict=True))
    assert row["accuracy"] == "60.00 ± 14.14 %, 2 of 3 seeds"
    assert "diverged after round 1" in row["state"]


def test_a_page_tells_no_path_of_the_machine() -> None:
    html = report.page([saved([0.1], data_dir="/home/somebody/data"), saved([0.1], method="fedprox")])
    assert "somebody" not in html
    assert "data_dir" not in html
    own = {"dataset": "csv(path='/home/somebody/x.csv', target='y')", "model": "python(source='/home/somebody/m:Net')"}
    html = report.page([saved([0.1], **own), saved([0.1], method="fedprox", **own)])
    assert "somebody" not in html
    assert "x.csv" in html
    assert "m:Net" in html


def test_settings_that_are_none_are_absent() -> None:
    nothing = dict.fromkeys(["dataset", "model", "partition", "steps", "archs", "participation", "target"])
    html = report.page([saved([0.1], **nothing), saved([0.2], lr=0.5, **nothing)])
    assert "None" not in re.sub(r"<script.*?</script>", "", html, flags=re.S)
    assert "1 local epoch of sgd" in html
    assert len(group_runs([saved([0.1]), saved([0.1], seed=1, steps=None)])) == 1


def test_a_run_without_a_recipe_has_clients_and_a_model() -> None:
    facts = {"clients": 7, "model": {"parameters": 1234, "strata": [{"name": "head", "stage": "head"}]}}
    html = report.page([saved([0.1], clients=None, model=None, facts=facts)])
    assert "<dt>clients</dt><dd>7, participation 0.5</dd>" in html
    assert "<dt>model</dt><dd>1,234 parameters in 1 stratum</dd>" in html


@pytest.mark.parametrize("methods", [["fedavg"], ["fedavg", "fedprox"]])
def test_a_diagnosis_that_fails_does_not_end_the_report(monkeypatch: pytest.MonkeyPatch, methods: list[str]) -> None:
    def failing(run: SavedRun) -> None:
        raise ZeroDivisionError("<by zero>")

    monkeypatch.setattr(run_groups, "diagnose", failing)
    html = report.page([saved([0.1], method=method) for method in methods])
    assert html.count("The diagnosis failed: ZeroDivisionError: &lt;by zero&gt;") == len(methods)
    assert "<caption>Final scores" in html or 'class="tiles"' in html


def test_costs_are_totals_of_a_run() -> None:
    table = tables.costs(group_runs([saved([0.1, 0.2, None])]))
    row = dict(zip(table.head, table.rows[0], strict=True))
    assert (row["up"], row["down"], row["computed"], row["steps"], row["time"]) == (
        "3.0 kB",
        "1.5 kB",
        "3 MFLOP",
        "30",
        "1.5 s",
    )
    assert "probes" not in row


def test_tables_have_captions_and_scopes() -> None:
    html = tables.results(group_runs([saved([0.1])])).html()
    assert "<caption>" in html
    assert html.count('scope="row"') == 1


def test_a_real_run_has_a_report(tmp_path: Path) -> None:
    data = fs.load_dataset("digits")
    parts = fs.partition(data.train.labels(), "iid", clients=4, seed=0)
    model = fs.build_model("cnn2(width=4)", data.input_shape, data.classes, seed=0)
    clients = [data.train.select(part) for part in parts]
    fs.Federation(model, clients, data.test, rounds=2, steps=2, out=tmp_path / "run").fit()
    html = report.write([SavedRun.read(tmp_path / "run")], tmp_path / "run" / "report.html").read_text()
    (curve,) = data_of(html)["figures"]["accuracy"]["data"]
    assert curve["x"] == [1, 2]
    assert "Finished." in html
