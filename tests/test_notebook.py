"""What notebooks and prompts show: progress, `_repr_html_`, frames and plots."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import fedstrata as fs
from fedstrata.core.markup import curve, table
from fedstrata.core.text import bytes_text
from fedstrata.diagnosis import Diagnosis, Finding, Remedy
from fedstrata.progress import progress_callbacks
from fedstrata.progress.notebook import NotebookProgress
from fedstrata.progress.terminal import LineProgress, LiveProgress, build_progress
from fedstrata.system import prompt

BAD = "<script>alert('1')</script>&\"<img src=x onerror=alert(2)>"
"""What somebody may call a client, a class or a run."""


def federation(out: Path | None = None, **settings: Any) -> fs.Federation:
    """Three clients with test examples of their own."""
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(6, 4, generator=generator), torch.tensor([0, 1] * 3)) for _ in range(3)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
    beside = {"client_names": [BAD, "b", "c"], "class_names": [BAD, "no"], "notes": [f"a note: {BAD}"]}
    return fs.Federation(model, [(p, p) for p in pairs], pairs[0], **{"rounds": 3, **beside, **settings}, out=out)


TAGS = {"div", "strong", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "ul", "li", "code"}
TAGS |= {"svg", "polyline", "progress"}


class Checker(HTMLParser):
    """Refuses scripts, handlers, addresses and tags that are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        for name, value in attrs:
            assert not name.startswith("on"), name
            assert name not in ("src", "href", "id"), name
            assert "url(" not in (value or "")
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def text_of(markup: str) -> str:
    """The text of HTML that holds no script, and no colour but the page's own and grey."""
    checker = Checker()
    checker.feed(markup)
    checker.close()
    assert checker.open == []
    assert "background" not in markup
    assert set(re.findall(r"(?<!-)color:([^;\"]+)", markup)) <= {"inherit"}
    assert not re.search(r"#[0-9a-f]{3,8}\b", markup)
    return " ".join(" ".join(checker.text).split())


@pytest.fixture(scope="module")
def history() -> fs.History:
    return federation().fit(progress=False)


def test_a_federation_before_and_after_its_rounds(history: fs.History) -> None:
    fed = federation(method="fedprox(mu=0.1)")
    text = text_of(fed._repr_html_())
    assert text.startswith("Federation 0 of 3 rounds done method fedprox(mu=0.1) (buffers: average)")
    assert "3 (6 to 6 examples, median 6)" in text
    assert "2 strata" in text
    assert BAD in text  # as text, within a note
    assert "<svg" not in fed._repr_html_()
    fed.fit(progress=False)
    assert "3 of 3 rounds done" in text_of(fed._repr_html_())
    assert fed._repr_html_().count("<svg") == 1


def test_a_history(history: fs.History) -> None:
    text = text_of(history._repr_html_())
    assert history.accuracy is not None
    assert text.startswith(f"History of fedavg accuracy {100 * history.accuracy:.2f} % (best ")
    assert f"in {history.costs.steps} steps" in text


def test_a_history_in_a_line(history: fs.History) -> None:
    up, down = bytes_text(history.costs.bytes_up), bytes_text(history.costs.bytes_down)
    assert repr(history) == f"<History of fedavg: 3 rounds, accuracy {history.accuracy:.4f}, {up} up, {down} down>"
    assert "kB" in up


def test_a_history_of_no_rounds_and_one_without_a_test() -> None:
    fed = fs.Federation(nn.Linear(4, 2), [(torch.randn(4, 4), torch.tensor([0, 1] * 2))], rounds=2)
    assert "rounds 0" in text_of(fed.history()._repr_html_())
    assert "accuracy not evaluated rounds 2" in text_of(fed.fit(progress=False)._repr_html_())


def test_strata_are_a_tuple_and_a_table() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    found = fs.strata(model, torch.randn(5, 4))
    assert isinstance(found, tuple)
    assert found == tuple(found)
    assert [s.name for s in found] == ["0", "2"]
    assert "0 0 0 4 3 5 1 2 2 classifier 2 0 0" in text_of(found._repr_html_())
    assert "></th>" not in found._repr_html_(), "a screen reader reads every column's name"
    fed = federation()
    assert text_of(fed.strata._repr_html_()).startswith("Strata 2, in the order of execution")


def test_a_diagnosis() -> None:
    remedy = Remedy("feddyn", {}, f"because {BAD}", f"Paper {BAD}")
    findings = (
        Finding("label-skew", 0.6, f"skewed {BAD}", {"skew": 0.6}, (remedy,)),
        Finding("forgetting", 0.9, "forgets", {"x": 1.0}, (), ("label-skew",)),
    )
    shown = Diagnosis(BAD, "fedavg", findings, {"label-skew": 0.6}, (f"note {BAD}",))
    text = text_of(shown._repr_html_())
    assert text.count(BAD) == 5  # the run, the sentence, the reason, the paper, the note
    assert shown.verdict in text
    assert "2. Forgetting, severity 0.90, explained by label skew" in text
    assert text_of(federation().diagnose()._repr_html_())


def test_pieces_of_markup() -> None:
    assert BAD in text_of(table([BAD, "n"], [[BAD, 1]]))
    assert "<script" not in table([BAD, "n"], [[BAD, 1]])
    assert curve([1.0], "one point is no line") == ""
    assert text_of(curve([2.0, 2.0], BAD)) == ""
    assert 'points="2.0,46.0 238.0,2.0"' in curve([0.0, 1.0], "up")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["python", "trackers"])
def test_what_the_documentation_shows(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its snippets, one after the other."""
    for package in ("matplotlib", "tensorboard"):
        pytest.importorskip(package, reason=f"{package} is not installed: the extras [notebook] and [tensorboard]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    text = (Path(__file__).parents[1] / "docs" / f"{page}.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert snippets
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), names)
    assert [path.name for path in tmp_path.iterdir()] == [{"python": "curves.png", "trackers": "events"}[page]]


# Frames and plots ----------------------------------------------------------------------------------------------------


def test_a_frame_has_one_row_per_round(history: fs.History) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed: the extra [notebook]")
    frame = history.frame()
    assert list(frame["round"]) == [1, 2, 3]
    assert list(frame["accuracy"]) == [record.accuracy for record in history.records]
    assert list(frame["fairness_worst"]) == [record.fairness.worst for record in history.records]
    assert frame["bytes_up"].sum() == history.costs.bytes_up
    assert (frame["clients"] == 3).all()
    assert (frame["refused"] == 0).all()


def test_a_frame_of_clients_has_one_row_per_round_and_client(history: fs.History) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed: the extra [notebook]")
    frame = history.frame("client")
    assert [tuple(row) for row in frame[["round", "client"]].to_numpy()] == [
        (r, c) for r in (1, 2, 3) for c in range(3)
    ]
    last = history.client_metrics
    assert list(frame[frame["round"] == 3]["accuracy"]) == [metrics["accuracy"] for metrics in last]
    assert frame["took_part"].all()
    picked = federation(participation=1, rounds=2).fit(progress=False)
    frame = picked.frame("client")
    assert frame["took_part"].sum() == 2
    assert set(frame[frame["took_part"]]["client"]) == {c for r in picked.records for c in r.clients}
    empty = fs.Federation(nn.Linear(4, 2), [(torch.randn(4, 4), torch.tensor([0, 1] * 2))], rounds=2).history()
    assert list(empty.frame("client").columns) == ["round", "client", "took_part", "refused"]
    with pytest.raises(fs.UsageError, match="frame's per must be one of round, client, not 'layer'"):
        history.frame("layer")


def test_a_plot_shows_the_score(history: fs.History) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed: the extra [notebook]")
    axes = history.plot()
    (line,) = axes.lines
    assert list(line.get_xdata()) == [1, 2, 3]
    assert list(line.get_ydata()) == [record.score for record in history.records]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "accuracy")
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert history.plot("bytes", axes=axes) is axes
    assert axes.lines[1].get_xdata()[-1] == pytest.approx((history.costs.bytes_up + history.costs.bytes_down) / 1e6)
    with pytest.raises(fs.UsageError, match="no simulated time without a fleet"):
        history.plot("simulated")
    with pytest.raises(fs.UsageError, match="plot's against must be one of round, bytes"):
        history.plot("wishes")
    nothing = fs.Federation(nn.Linear(4, 2), [(torch.randn(4, 4), torch.tensor([0, 1] * 2))], rounds=1)
    with pytest.raises(fs.UsageError, match="nothing to draw"):
        nothing.fit(progress=False).plot()
    fleet = federation(fleet="phone*3").fit(progress=False)
    assert fleet.plot("simulated").get_xlabel() == "simulated hours"
    pyplot.close("all")


def test_without_the_extra_one_sentence(history: fs.History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(fs.UsageError, match=r"a frame needs the package pandas: pip install 'fedstrata\[notebook\]'"):
        history.frame()
    with pytest.raises(fs.UsageError, match=r"a plot needs the package matplotlib: pip install 'fedstrata\[report\]'"):
        history.plot()


# Progress ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """IPython's own shell in this process, as a kernel has one; what it displays is caught."""
    pytest.importorskip("IPython", reason="IPython is not installed: the extra [notebook]")
    from IPython.core.interactiveshell import InteractiveShell

    made: Any = InteractiveShell.instance()
    made.kernel = SimpleNamespace()
    yield made
    monkeypatch.undo()
    del made.kernel
    InteractiveShell.clear_instance()
    del sys.ps1  # which IPython's shell has set


def test_a_notebook_shows_progress_in_one_output_that_is_redrawn(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from IPython.utils.capture import RichOutput, capture_output

    assert prompt.in_notebook()
    assert not prompt.at_prompt()
    with capture_output() as shown:
        federation(rounds=4).fit()
    assert shown.stdout == shown.stderr == ""
    outputs: list[RichOutput] = shown.outputs
    assert len({json.dumps(output.transient) for output in outputs}) == 1, "one output, by its display id"
    assert [output.update for output in outputs] == [False, *[True] * (len(outputs) - 1)]
    texts = [text_of(output.data["text/html"]) for output in outputs[1:]]
    assert texts[0].startswith("rounds 0/4")
    assert re.match(r"rounds 4/4, \d+ s, done round accuracy", texts[-1])
    assert len([word for word in texts[-1].split() if word == "%"]) == 4  # a row per round


def test_a_notebook_shows_what_ended_a_run_early(shell: Any) -> None:
    from IPython.utils.capture import capture_output

    def stop(record: fs.Record) -> None:
        raise KeyboardInterrupt

    with capture_output() as shown, pytest.raises(KeyboardInterrupt):
        federation().fit(stop)
    assert "rounds 1/3" in (last := text_of(shown.outputs[-1].data["text/html"]))
    assert "ended early: KeyboardInterrupt" in last


def test_who_is_shown_progress(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook and a prompt by themselves, programs only if they ask, nobody who does not want it."""
    assert [type(c) for c in progress_callbacks(None)] == [NotebookProgress]
    assert progress_callbacks(False) == []
    with pytest.raises(fs.UsageError, match=r"^progress is True, False or None, not .yes.$"):
        federation().fit(progress="yes")  # type: ignore[arg-type]
    monkeypatch.delattr(shell, "kernel")  # IPython in a terminal
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    assert prompt.at_prompt()
    monkeypatch.setattr(prompt, "ipython_shell", lambda: None)
    monkeypatch.delattr(sys, "ps1")  # a program
    assert not prompt.at_prompt()
    assert progress_callbacks(None) == []
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # Python's own prompt
    assert prompt.at_prompt()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: False))
    assert not prompt.at_prompt(), "nobody watches a file"


def test_a_program_that_asks_gets_lines_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    federation().fit(progress=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.split("  ")[0] for line in printed.err.splitlines()] == ["round 1/3", "round 2/3", "round 3/3"]
    federation().fit()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("transient", [True, False])
def test_a_terminal_shows_a_live_view(transient: bool) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, height=30, color_system=None, markup=False)
    progress = build_progress(console, transient)
    assert isinstance(progress, LiveProgress)
    federation().fit(progress, progress=False)
    shown = written.getvalue()
    assert "\x1b[?25h" in shown, "the cursor is shown again"
    ends = shown.rpartition("\x1b[?25h")[2]
    assert ("\x1b[2K" in ends) == transient, "the view is taken away where a summary follows"
    assert "rounds" in shown
    assert "clients" in shown
    assert isinstance(build_progress(Console(file=io.StringIO()), True), LineProgress)
