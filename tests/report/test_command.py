"""`report`, `plot` and `watch` as commands: where files go, and what is refused."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fedstrata.cli import report
from fedstrata.errors import UsageError
from fedstrata.report.plots import plot
from fedstrata.runs.reader import SavedRun

from .synthetic import saved, write_comparison, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", rounds=2, strata=4)


def test_one_run_gets_its_report_inside(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.report([run])
    assert (run / "report.html").is_file()
    assert capsys.readouterr().out.strip() == str(run / "report.html")


def test_a_directory_of_runs_stands_for_all_of_them(tmp_path: Path) -> None:
    home = write_comparison(tmp_path / "runs", rounds=2, strata=4, probes=False)
    assert len(report.run_directories([home])) == 6
    assert len(report.run_directories([home, next(home.iterdir())])) == 6
    report.report([home], title="side by side")
    assert "<title>side by side</title>" in (home / "report.html").read_text()


def test_several_runs_get_it_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = write_comparison(tmp_path / "runs", rounds=2, strata=4, probes=False, seeds=1)
    elsewhere = write_run(tmp_path / "other" / "run", rounds=2, strata=4, probes=False)
    one, two, _ = sorted(home.iterdir())
    report.report([one, two])
    assert (home / "report.html").is_file()
    monkeypatch.chdir(tmp_path)
    report.report([one, elsewhere])
    assert (tmp_path / "report.html").is_file()


def test_it_is_opened_where_asked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    report.report([run], open_=True)
    assert opened == [(run / "report.html").resolve().as_uri()]


def test_mistakes_are_told_in_a_sentence(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is neither a run nor a directory of runs"):
        report.report([tmp_path / "nothing"])
    with pytest.raises(UsageError, match="is a directory"):
        report.report([run], out=tmp_path)
    with pytest.raises(UsageError, match="there is no directory"):
        report.report([run], out=tmp_path / "no" / "report.html")
    with pytest.raises(UsageError, match="format must be one of pdf, png, svg"):
        report.plot([run], format_="bmp")
    with pytest.raises(UsageError, match="not a directory"):
        report.plot([run], out=run / "run.toml")


def test_typer_takes_them(run: Path) -> None:
    app = typer.Typer()
    for act in (report.report, report.plot, report.watch):
        app.command()(act)
    done = CliRunner().invoke(app, ["report", str(run), "--out", str(run / "r.html")])
    assert done.exit_code == 0, done.output
    assert (run / "r.html").is_file()


@pytest.mark.parametrize("form", ["pdf", "png", "svg"])
def test_figures_for_papers(tmp_path: Path, form: str) -> None:
    pytest.importorskip("matplotlib")
    paths = plot([saved([0.1, 0.5], method="a$b<c>"), saved([0.2, 0.4], seed=1)], tmp_path / "plots", form)
    assert [path.name for path in paths] == [
        f"{name}.{form}"
        for name in ("accuracy", "accuracy-bytes", "loss-test-loss", "loss-training-loss", "accuracy-flops")
    ]
    assert all(path.stat().st_size > 1000 for path in paths)


@pytest.mark.slow
def test_every_figure_of_a_probed_run_is_drawn(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = plot([SavedRun.read(run)], tmp_path / "plots", "png")
    names = {path.stem for path in found}
    assert {"accuracy", "divergence-gradient-divergence", "gradnorm", "cka", "embedding-by-class", "partition"} <= names


def test_plots_need_matplotlib(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'fedstrata\[report\]'"):
        report.plot([run])


def test_there_must_be_something_to_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="nothing to draw"):
        plot([saved([])], tmp_path)
