"""The page of a search: the best of every method and how good it is on fresh seeds, then what was tried."""

from __future__ import annotations

from pathlib import Path

from fedstrata.compare import Comparison
from fedstrata.compare.table import Stat, spread
from fedstrata.core.text import SHARES, metric_text, metric_title, plural
from fedstrata.report.formatting import NONE, escape
from fedstrata.report.page import document
from fedstrata.report.sections import Section
from fedstrata.report.tables import HtmlTable
from fedstrata.runs.files import write_atomic
from fedstrata.tuning.figures import method_figures
from fedstrata.tuning.outcome import TriedTrial, Tuned, TunedMethod

FILE = "tune.html"


def write_page(tuned: Tuned, comparison: Comparison | None, folder: Path) -> Path:
    """Write tune.html; returns its path.

    Args:
        tuned: what was found.
        comparison: the methods with the best settings on the seeds that are reported; None if they were not run.
        folder: where to.
    """
    found = [_results(tuned, comparison)]
    for at, method in enumerate(tuned.methods):
        figures = method_figures(tuned, method, at)
        found.append(
            Section(f"method-{at}", method.name, _spent(tuned, method), tuple(figures), _trials(tuned, method))
        )
    names = ", ".join(dict.fromkeys(method.label for method in tuned.methods))
    title = f"{plural(len(tuned.methods), 'search').replace('searchs', 'searches')}: {names}"
    header = (
        f'<div data-part="header"><p class="brand">fedstrata tune</p><h1>{escape(title)}</h1>'
        f'<p class="about">{escape(tuned.how[0].upper() + tuned.how[1:])}.</p></div>'
    )
    path = folder / FILE
    write_atomic(path, document(title, header, found, []))
    return path


def _results(tuned: Tuned, comparison: Comparison | None) -> Section:
    fresh = {} if comparison is None else {str(row.run.title): row.of("score") for row in comparison.rows}
    rows = tuple(_result(tuned, method, fresh.get(method.name)) for method in tuned.methods)
    name = metric_title(tuned.metric)
    head = ("method", "best values", f"validation {name}", f"test {name}, fresh seeds", "complete", "rounds trained")
    table = HtmlTable("The best of each method", head, rows, words=frozenset({0, 1}))
    about = (
        "The best on validation data was chosen among many, so its score there flatters. What counts is the column on "
        "fresh seeds: mean ± standard deviation on the test set, which no trial has seen."
    )
    return Section("results", "Results", about, body=table.html())


def _result(tuned: Tuned, method: TunedMethod, fresh: Stat | None) -> tuple[str, ...]:
    best = method.best_trial
    complete = sum(trial.state == "complete" for trial in method.trials)
    return (
        method.name,
        NONE if best is None else ", ".join(f"{name} = {value}" for name, value in best.values.items()),
        NONE if best is None else metric_text(tuned.metric, best.score),
        spread(fresh, tuned.metric) + (" %" if fresh is not None and tuned.metric in SHARES else ""),
        f"{complete} of {len(method.trials)}",
        f"{method.rounds:,}",
    )


def _spent(tuned: Tuned, method: TunedMethod) -> str:
    """What a search has come to, in a sentence."""
    states = [trial.state for trial in method.trials]
    counted = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return (
        f"{plural(len(states), 'trial')} of {tuned.budget}: {', '.join(counted)}." if states else "Nothing to search."
    )


def _trials(tuned: Tuned, method: TunedMethod) -> str:
    """All trials, the best first, behind a line that opens them."""
    if not method.trials:
        return ""
    sign = 1 if tuned.better == "lower" else -1
    order = sorted(method.trials, key=lambda trial: (trial.score is None, sign * (trial.score or 0.0), trial.number))
    names = tuple(method.spaces)
    head = ("trial", *names, f"validation {metric_title(tuned.metric)}", "rounds", "how it ended")
    rows = tuple(_trial(tuned, names, trial) for trial in order)
    words = frozenset({0, len(head) - 1})
    table = HtmlTable(f"All trials of {method.name}", head, rows, words=words).html()
    return f'<details class="more"><summary>All trials</summary>{table}</details>'


def _trial(tuned: Tuned, names: tuple[str, ...], trial: TriedTrial) -> tuple[str, ...]:
    values = [trial.values.get(name, NONE) for name in names]
    ended = trial.state if not trial.why else f"{trial.state}: {trial.why}"
    return (str(trial.number), *values, metric_text(tuned.metric, trial.score), f"{trial.rounds:,}", ended)
