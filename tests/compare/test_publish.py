"""What a paper needs of a comparison: tests of differences, the table in LaTeX, and what to cite."""

from __future__ import annotations

import inspect
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedstrata._version import __version__
from fedstrata.compare import Comparison, plan
from fedstrata.compare.cite import AUTHORS, TITLE, bibtex
from fedstrata.compare.latex import MARK, latex
from fedstrata.compare.table import rows
from fedstrata.config.registries import load_table
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.core.citation import Paper, escape_latex
from fedstrata.report.significance import holm, paired_p, rank_methods, studentised_range
from tests.compare.test_compare import SMALL, UNIFORM, result
from tests.small_runs import fedstrata, one_sentence

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]


# --- tests of differences --------------------------------------------------------------------------------------------


def test_a_paired_t_test_is_scipys() -> None:
    one, other = [0.81, 0.79, 0.9, 0.85, 0.7], [0.8, 0.75, 0.88, 0.86, 0.66]
    found = paired_p(dict(enumerate(one)), {**dict(enumerate(other)), 9: 0.1})
    assert found == pytest.approx(stats.ttest_rel(one, other).pvalue, rel=1e-10)
    assert paired_p({0: 0.5}, {0: 0.4}) is None
    assert paired_p({0: 0.5, 1: 0.75}, {0: 0.25, 1: 0.5}) is None  # 0.25 twice: no spread to judge it by
    assert paired_p({0: 0.5, 1: 0.6}, {0: 0.5, 1: 0.6}) == 1.0
    assert paired_p({0: 0.81, 1: 0.82}, {0: 0.8, 1: 0.81}) is None  # 0.01 twice, but for rounding: t would be 1e14
    assert paired_p({0: 0.1 + 0.2, 1: 0.6}, {0: 0.3, 1: 0.6}) == 1.0


def test_holms_correction_by_hand() -> None:
    """0.01·4, 0.02·3 = 0.06, 0.03·2 = 0.06, 0.5·1; no more than 1, and no less than what came before."""
    assert holm({"a": 0.02, "b": 0.01, "c": 0.5, "d": 0.03}) == pytest.approx(
        {"b": 0.04, "a": 0.06, "d": 0.06, "c": 0.5}
    )
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_friedman_and_nemenyi_are_scipys() -> None:
    table = np.round(np.random.default_rng(0).random((4, 7)) + np.array([[0.0], [0.2], [0.4], [0.5]]), 1)  # with ties
    names = ["a", "b", "c", "d"]
    found = rank_methods(dict(zip(names, table.tolist(), strict=True)))
    assert found is not None
    assert found.p == pytest.approx(stats.friedmanchisquare(*table).pvalue, rel=1e-9)
    assert found.ranks == pytest.approx(dict(zip(names, stats.rankdata(-table, axis=0).mean(1), strict=True)))
    q = stats.studentized_range.ppf(0.95, 4, np.inf)
    assert found.critical == pytest.approx(q / math.sqrt(2) * math.sqrt(4 * 5 / (6 * 7)), rel=1e-6)
    assert studentised_range(2, 0.05) == pytest.approx(math.sqrt(2) * stats.norm.ppf(0.975), rel=1e-8)
    other = rank_methods(dict(zip(names, (-table).tolist(), strict=True)), lower=True)
    assert other == found
    assert rank_methods({"a": [1.0, 2.0], "b": [2.0, 1.0]}) is None
    assert rank_methods({"a": [1.0], "b": [2.0], "c": [3.0]}) is None


def test_who_does_not_differ() -> None:
    """Ten blocks of mean ranks 1, 2, 3, 4: with q = 3.633 the critical difference is 2.569·√(20/60) = 1.483."""
    found = rank_methods({name: [place] * 10 for name, place in zip("abcd", (4.0, 3.0, 2.0, 1.0), strict=True)})
    assert found is not None
    assert found.critical == pytest.approx(1.483, abs=1e-3)
    assert found.cliques == [("a", "b"), ("b", "c"), ("c", "d")]


# --- LaTeX -----------------------------------------------------------------------------------------------------------


def compared(scores: dict[str, list[float | None]], **more: Any) -> Comparison:
    """A table of made-up results: method → its score under each seed."""
    count = len(next(iter(scores.values())))
    made = plan({**SMALL, "method": [*scores], "seed": [*range(count)], **more}, "out")
    values = [score for one in scores.values() for score in one]
    results = dict(result(made, place, score) for place, score in enumerate(values) if score is not None)
    return Comparison(made, rows(made, results), {})


def table_lines(text: str) -> list[str]:
    body = text.partition(r"\toprule")[2].partition(r"\bottomrule")[0]
    return [line.strip() for line in body.strip().splitlines()]


def test_a_latex_table() -> None:
    """The best in bold; FedProx is beaten in every seed by about the same, Uniform by chance; a reference is apart."""
    text = latex(
        compared(
            {
                "centralised": [0.99, 0.98, 0.97],
                "fedavg": [0.9, 0.8, 0.7],
                "fedprox(mu=0.01)": [0.81, 0.7, 0.6],
                UNIFORM: [0.7, 0.9, 0.6],
            },
            target=0.5,
        )
    )
    head, rule, reference, best, beaten, other = table_lines(text)
    assert head == r"method & accuracy & gap & to target & up & down & FLOPs \\"
    assert rule == r"\midrule"
    assert reference.startswith(r"centralised & 98.00 $\pm$ 1.00 & -- &")
    assert best.startswith(r"fedavg & \textbf{80.00 $\pm$ 10.00} & 18.00 $\pm$ 9.00 &")
    assert f" {MARK}".strip() in beaten
    assert beaten.startswith(r"fedprox(mu=0.01) & 70.33")
    assert MARK not in other + reference + best
    assert r"\begin{tabular}{lrrrrrr}" in text
    assert "seeds 0, 1, 2" in text
    assert "Holm" in text
    for opened in re.findall(r"\\begin\{(\w+)\}", text):
        assert text.count(rf"\begin{{{opened}}}") == text.count(rf"\end{{{opened}}}") == 1
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")


def test_settings_are_parts_of_a_latex_table_and_the_least_is_the_best_of_an_error() -> None:
    """What is not in the text as it stands in LaTeX would be an error there, or a comment."""
    comparison = compared({"fedavg": [0.5] * 2, UNIFORM: [0.4] * 2}, lr=[0.1, 0.2], target=None)
    lower = []
    for row in comparison.rows:
        changed = [replace(found, better="lower", metric="rmse") for found in row.results]
        lower.append(replace(row, results=tuple(changed)))
    lines = table_lines(latex(Comparison(comparison.plan, tuple(lower), {})))
    assert [line for line in lines if line == r"\midrule"] == [r"\midrule"] * 2
    assert [line.split(" & ")[0] for line in lines if r"\textbf" in line] == [UNIFORM]
    assert lines[0].startswith("method & lr & seeds & RMSE")  # half of the runs are missing


def test_who_lost_seeds_is_not_the_best_of_all() -> None:
    """Both seeds of Uniform's are above FedAvg's 80 %, and it lacks the one with which all others are worst."""
    scores = {"fedavg": [0.9, 0.9, 0.6], "fedlc": [0.7, 0.69, 0.41], UNIFORM: [0.92, 0.9201, None]}
    text = latex(compared(scores))
    lines = {line.split(" & ")[0]: line for line in table_lines(text)[2:]}
    assert table_lines(text)[0].startswith("method & seeds & accuracy")
    assert lines["fedavg"].startswith(r"fedavg & 3 & \textbf{80.00")
    assert lines[UNIFORM].startswith(f"{UNIFORM} & 2/3 & 92.0")
    assert MARK in lines["fedlc"]
    assert MARK not in lines[UNIFORM]  # it differs by more than chance, in its favour
    assert "Bold: the best mean, of those with the most seeds" in text
    assert "most seeds" not in latex(compared({"fedavg": [0.9, 0.8], "fedlc": [0.7, 0.7]}))


def test_who_is_even_is_bold_too() -> None:
    """0.1 + 0.2 is 0.3 here, as it is in print."""
    lines = table_lines(latex(compared({"fedavg": [0.1 + 0.2, 0.5], "fedlc": [0.3, 0.5], UNIFORM: [0.3, 0.4]})))
    assert [line.split(" & ")[0] for line in lines if r"\textbf" in line] == ["fedavg", "fedlc"]


def test_signs_of_latex() -> None:
    assert escape_latex(r"a_b & 5 % \x {}") == r"a\_b \& 5 \% \textbackslash{}x \{\}"
    assert escape_latex("Müller, Konečný, Agüera ± 3") == r"M{\"u}ller, Kone{\v c}n{\'y}, Ag{\"u}era $\pm$ 3"
    assert escape_latex("日") == "?"


@pytest.mark.slow
def test_the_command_prints_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(word) for n, v in SMALL.items() for word in (f"--{n.replace('_', '-')}", v)]
    assert fedstrata("compare", *words, "--methods", "fedavg; fedlc", "--seeds", "0", "--latex", "--no-report") == 0
    out, error = capsys.readouterr()
    assert out.startswith("% \\usepackage{booktabs}\n\\begin{table}")
    assert out.endswith("\\end{table}\n")
    assert "[2/2]" in error


# --- what to cite ----------------------------------------------------------------------------------------------------


def test_a_bibliography() -> None:
    methods = ["fedavg", "feddyn + fedprox", "fedprox(mu=0.5)", "fedavg(reduce='krum(share=0.2)')", "local"]
    made = plan({**SMALL, "method": methods, "faults": "gaussian(share=0.3)"}, "out")
    text = bibtex([run.config for run in made.runs])
    keys = re.findall(r"^@\w+\{(.+),$", text, re.M)
    assert keys == [
        "mcmahan2017communication",
        "acar2021federated",
        "li2020federated",
        "blanchard2017machine",
        "fedstrata",
    ]
    assert 'Blaise {Ag{\\"u}era y Arcas}' in text
    assert "Ramon {Matas Navarro}" in text
    assert __version__ in text
    assert bibtex([validate_settings(RunConfig, {**SMALL, "method": "centralised"})]).count("@") == 1


def test_our_own_entry_is_that_of_the_citation_file() -> None:
    own = (ROOT / "CITATION.cff").read_text()
    assert f'title: "{TITLE}"' in own
    assert f"name: {AUTHORS}" in own
    assert f"version: {__version__}" in own


def test_cite_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    assert fedstrata("compare", "--methods", "moon; fedavg", "--cite") == 0
    assert "li2021model" in capsys.readouterr().out
    assert fedstrata("compare", "--methods", "mon; fedavg", "--cite") == 2
    assert "did you mean 'moon'" in one_sentence(capsys)
    assert list(tmp_path.iterdir()) == []


WITHOUT_PAPER = {
    *("select", "keep", "finetune", "centralised", "local"),  # ours, or plain baselines
    *("mean", "drop", "inputs", "late", "missing", "nan", "scale", "stuck"),
}


@pytest.mark.parametrize("table", ["methods", "reducers", "faults"])
def test_papers_are_those_of_the_docstrings(table: str) -> None:
    """Names, title and year as the file says them, and no two papers under one key."""
    for name, kind in load_table(table).items():
        papers: tuple[Paper, ...] = getattr(kind, "papers", ())
        assert bool(papers) != (name in WITHOUT_PAPER), name
        told = " ".join(f"{sys.modules[kind.__module__].__doc__} {inspect.getdoc(kind)}".split())
        for paper in papers:
            assert paper.title in told, name
            assert str(paper.year) in told, name
            missing = [surname for surname in paper.surnames if surname not in told]
            assert not missing or "et al." in told, (name, missing)


def test_keys_are_unique() -> None:
    tables = [load_table(table).values() for table in ("methods", "reducers", "faults")]
    papers = {paper for kinds in tables for kind in kinds for paper in getattr(kind, "papers", ())}
    assert len(papers) > 35
    assert len({paper.key for paper in papers}) == len(papers)
    assert all(paper.key.isascii() for paper in papers)
