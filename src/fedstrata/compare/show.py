"""What a comparison looks like in a terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fedstrata.compare.plan import Plan
from fedstrata.compare.runner import News, missing
from fedstrata.compare.table import Comparison, ComparisonRow, spread
from fedstrata.config.identity import EXECUTION_FIELDS
from fedstrata.config.schema import RunConfig
from fedstrata.core.text import SHARES, bytes_text, flops_text, metric_text, metric_title, plural, simulated_text
from fedstrata.errors import one_line
from fedstrata.progress.terminal import fitting_columns


def _final_text(row: ComparisonRow) -> str:
    """The final primary metric, and how many seeds are not in it because they diverged."""
    if row.diverged_seeds and not row.sound_results:
        return "diverged"
    part = f" ({len(row.diverged_seeds)}/{len(row.results)} diverged)" if row.diverged_seeds else ""
    return spread(row.of("score"), row.metric) + part


def _to_target_text(row: ComparisonRow) -> str:
    """Rounds to the target, and how many seeds reached it, if not all did."""
    found = row.of("rounds_to_target")
    reached = 0 if found is None else found.count
    return ("–" if found is None else f"{found.mean:.1f}") + _reached_text(row, reached)


def _simulated_to_target_text(row: ComparisonRow) -> str:
    """Simulated time to the target, in the same way."""
    found = row.of("simulated_seconds_to_target")
    return "–" if found is None else simulated_text(found.mean) + _reached_text(row, found.count)


def _reached_text(row: ComparisonRow, reached: int) -> str:
    return f" ({reached}/{len(row.results)})" if reached < len(row.results) else ""


def _mean_text(name: str, text: Callable[[float], str]) -> Callable[[ComparisonRow], str]:
    return lambda row: "–" if (found := row.of(name)) is None else text(found.mean)


OWN_MODELS = "own models"
"""The column for methods that leave the server without a whole model, where others have one."""
_MEASURES: Mapping[str, Callable[[ComparisonRow], str]] = {
    "seeds": lambda r: f"{len(r.results)}/{len(r.seeds)}" if r.missing_seeds else str(len(r.seeds)),
    "final": _final_text,
    "best": lambda r: spread(r.of("best_score"), r.metric),
    OWN_MODELS: _final_text,
    "global, by client": lambda r: spread(r.of("global_mean"), r.metric),
    "worst": lambda r: spread(r.of("worst"), r.metric),
    "spread": lambda r: spread(r.of("spread"), r.metric),
    "own, by client": lambda r: spread(r.of("own_mean"), r.metric),
    "own, worst": lambda r: spread(r.of("own_worst"), r.metric),
    "own, spread": lambda r: spread(r.of("own_spread"), r.metric),
    "gap": lambda r: spread(r.gap, r.metric),
    "to target": _to_target_text,
    "simulated to target": _simulated_to_target_text,
    "simulated": _mean_text("simulated_seconds", simulated_text),
    "up": _mean_text("bytes_up", bytes_text),
    "down": _mean_text("bytes_down", bytes_text),
    "FLOPs": _mean_text("flops", lambda count: flops_text(count).removesuffix("FLOP")),
    "seconds": _mean_text("seconds", lambda count: f"{count:.1f}"),
}


def columns_of(comparison: Comparison) -> dict[str, Callable[[ComparisonRow], str]]:
    """What the table of a comparison shows: a column's name → a row's text."""
    columns: dict[str, Callable[[ComparisonRow], str]] = {"method": lambda r: r.method}
    for axis in comparison.plan.axes:
        columns[axis] = lambda r, axis=axis: str(r.run.varied[axis])  # type: ignore[misc]
    if len({row.run.buffers for row in comparison.rows}) > 1:
        columns["buffers"] = lambda r: r.run.buffers
    unasked = {"gap"} if not comparison.has_gap else set()
    unasked |= {"to target", "simulated to target"} if not comparison.has_target else set()
    unasked |= {"simulated", "simulated to target"} if not comparison.has_fleet else set()
    unasked |= {"global, by client", "worst", "spread"} if not comparison.has_fairness else set()
    unasked |= {"own, by client", "own, worst", "own, spread"} if not comparison.has_own_models else set()
    apart = _are_apart(comparison)
    unasked |= {OWN_MODELS} if not apart else set()
    for name, text in _MEASURES.items():
        if name not in unasked:
            own = name == OWN_MODELS if apart and name in _OF_ONE_KIND else None
            columns[primary_title(comparison) if name == "final" else name] = partial(_text_apart, text, own)
        if name == "best":
            others = _other_metrics(comparison)
            columns |= {title: partial(_text_apart, text, False if apart else None) for title, text in others.items()}
    return columns


_OF_ONE_KIND = ("final", "best", OWN_MODELS, "global, by client")
"""Columns of the global model, or of the clients' own, and never of both."""


def _are_apart(comparison: Comparison) -> bool:
    """True if some rows are of the global model and others of the clients' own: no column holds both."""
    return len({row.is_own for row in comparison.rows}) > 1


def _text_apart(text: Callable[[ComparisonRow], str], own: bool | None, row: ComparisonRow) -> str:
    """A row's text in a column for rows of one kind, or of both."""
    return text(row) if own is None or row.is_own is own else "–"


def primary_title(comparison: Comparison) -> str:
    """The name of the metric that all runs are judged by."""
    found = {row.metric for row in comparison.rows if row.results}
    return metric_title(found.pop()) if len(found) == 1 else "score" if found else "accuracy"


def _other_metrics(comparison: Comparison) -> dict[str, Callable[[ComparisonRow], str]]:
    """A column for every metric that the runs are not judged by."""
    others = [name for name in comparison.metrics if any(row.metric != name for row in comparison.rows)]
    return {metric_title(name): partial(_metric_text, name) for name in others}


def _metric_text(name: str, row: ComparisonRow) -> str:
    return spread(row.of_metric(name), name)


def measured_columns(comparison: Comparison) -> set[str]:
    """The names of the columns with numbers."""
    return {*_MEASURES, primary_title(comparison), *_other_metrics(comparison)}


_DISPENSABLE = ("FLOPs", "down", "up", "seconds", "best", "own, spread", "spread")
_ALWAYS = ("dataset", "model", "partition", "clients", "participation", "rounds", "epochs", "steps", "batch_size", "lr")
"""Settings that are always shown; others are if they are not the default."""


def settings_text(comparison: Comparison) -> str:
    """One line with what all runs have in common and a reader must know."""
    fixed = {
        n: v for n, v in comparison.plan.common.items() if n not in EXECUTION_FIELDS | {"buffers"} and v is not None
    }
    if "steps" in fixed:
        fixed.pop("epochs", None)
    others = [n for n, v in fixed.items() if n not in _ALWAYS and repr(v) != repr(RunConfig.model_fields[n].default)]
    texts = [f"{name} {fixed[name]}" for name in (*_ALWAYS, *others) if name in fixed]
    texts += _exception_texts(comparison)
    texts.append(f"seed{'s' * (len(comparison.plan.seeds) > 1)} {', '.join(map(str, comparison.plan.seeds))}")
    policies = {row.run.buffers for row in comparison.rows}
    return "; ".join(texts + ([f"buffers {policies.pop()}"] if len(policies) == 1 else []))


def _exception_texts(comparison: Comparison) -> list[str]:
    """Settings that only some methods set: the others' value, and theirs."""
    names = dict.fromkeys(n for row in comparison.rows for n in row.run.own if n not in comparison.plan.common)
    texts = []
    for name in names:
        common = [str(getattr(row.run.config, name)) for row in comparison.rows if name not in row.run.own][:1]
        by_method: dict[str, dict[str, None]] = {}  # under other settings a method may have been tuned otherwise
        for row in comparison.rows:
            if name in row.run.own:
                by_method.setdefault(row.method, {})[str(getattr(row.run.config, name))] = None
        own_ones = [f"{' or '.join(values)} for {label}" for label, values in by_method.items()]
        texts.append(f"{name} {', '.join(common + own_ones)}")
    return texts


def remarks(comparison: Comparison) -> list[str]:
    """How to read the table, and what its readers must know."""
    primary = {row.metric for row in comparison.rows}
    kind = " in percent" if primary <= SHARES else ""
    title = primary_title(comparison)
    how = [f"{title} and best{kind}, mean ± sample standard deviation over the seeds; costs are means"]
    if comparison.has_gap:
        how.append(f"gap: centralised − method{' in percentage points' if kind else ''}, seed by seed")
    if comparison.has_fairness:
        how.append(
            "by client: the mean over clients, each on its own test examples; worst and spread: of the worst client, "
            "and the standard deviation over clients, of the global model"
            + (", and under own of their own models" if comparison.has_own_models else "")
        )
    if _are_apart(comparison):
        how.append("own models: the mean of the clients' own on the whole test set, where the server has no whole one")
    wanted = dict.fromkeys(row.run.config.target for row in comparison.rows)
    targets = [f"{100 * t:g} %" if kind else f"{t:g}" for t in wanted if t is not None]
    if targets:
        how.append(f"to target: rounds to {' or '.join(targets)}, of the seeds that reached it")
    tuning = [comparison.tuning] if comparison.tuning else []
    return ["; ".join(how), *tuning, *(f"note: {note}" for note in comparison.notes)]


@dataclass(frozen=True)
class SideBySide:
    """A comparison as a table: in a terminal with as many columns as it has room for, elsewhere with all."""

    comparison: Comparison

    def _table(self, names: Sequence[str]) -> Table:
        columns, rows = columns_of(self.comparison), self.comparison.rows
        measured = measured_columns(self.comparison)
        table = Table(expand=False)
        for name in names:
            table.add_column(name, justify="right" if name in measured else "left", no_wrap=name in measured)
        for row, following in zip(rows, [*rows[1:], None], strict=True):
            last = following is not None and following.run.setting != row.run.setting
            table.add_row(*(columns[name](row) for name in names), end_section=last)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal:
            options = options.update(max_width=1000)
        names = list(columns_of(self.comparison))
        table, left_out = fitting_columns(
            console, options, names, (*_other_metrics(self.comparison), *_DISPENSABLE), self._table
        )
        yield from console.render(table, options)
        for line in (settings_text(self.comparison), *remarks(self.comparison)):
            yield Text(line)
        if left_out:
            yield Text(f"no room for: {', '.join(left_out)}; --markdown shows all")


def markdown(comparison: Comparison) -> str:
    """A comparison as a Markdown table, its columns aligned, with the settings below."""
    columns = columns_of(comparison)
    cells = [list(columns), *([text(row) for text in columns.values()] for row in comparison.rows)]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in cells]
    widths = [max(3, *(len(line[place]) for line in cells)) for place in range(len(columns))]
    rights = [name in measured_columns(comparison) for name in columns]
    lines = [[_pad(c, w, r) for c, w, r in zip(line, widths, rights, strict=True)] for line in cells]
    lines.insert(1, [f"{'-' * (w - 1)}:" if r else "-" * w for w, r in zip(widths, rights, strict=True)])
    below = [settings_text(comparison), *remarks(comparison)]
    return "\n".join(
        [*(f"| {' | '.join(line)} |" for line in lines), "", *(f"{line}  " for line in below[:-1]), below[-1]]
    )


def _pad(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)


def csv_text(comparison: Comparison) -> str:
    """A comparison as CSV: one line per row, plain numbers, accuracies and gaps as fractions."""
    lines = []
    for row in comparison.rows:
        line: dict[str, object] = {"method": row.method, **row.run.varied, "buffers": row.run.buffers}
        line |= {"seeds": len(row.results), "missing": len(row.missing_seeds), "diverged": len(row.diverged_seeds)}
        for name in (*comparison.measured, "gap"):
            found = row.gap if name == "gap" else row.of(name)
            line |= {name: found and found.mean, f"{name}_std": found and found.std}
            if name == "rounds_to_target":
                line["reached"] = found.count if found else 0
        lines.append(line)
    file = io.StringIO()
    writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def failure_text(comparison: Comparison) -> str:
    """One sentence on the runs that failed, each reason once."""
    whys: dict[str, list[str]] = {}
    for run in comparison.plan.runs:
        if run.directory in comparison.failures:
            whys.setdefault(str(comparison.failures[run.directory]), []).append(str(run))
    reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in whys.items())
    return f"{plural(len(comparison.failures), 'run')} failed: {reasons}"


def _counts(plan: Plan) -> tuple[int, int]:
    """(how many runs there are, how many are finished)."""
    total = len({run.directory for run in plan.runs})
    return total, total - len(missing(plan))


class RunsWatcher:
    """Follows the runs of a comparison: bars in a terminal, one line per finished run elsewhere.

    Args:
        console: where to show it.
        plan: the runs; for a search, whose runs nobody knows before, how many there are and how many are done.
        clock: news → what to say of the time that all runs take; "" for nothing.
    """

    def __init__(
        self, console: Console, plan: Plan | tuple[int, int], clock: Callable[[News], str] = lambda news: ""
    ) -> None:
        self._console, self._clock = console, clock
        self._total, self._done = _counts(plan) if isinstance(plan, Plan) else plan
        bar = max(10, min(40, console.width - 50))
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar), MofNCompleteColumn())
        self._bars = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._all = self._bars.add_task("runs", total=self._total, completed=self._done)
        self._tasks: dict[Path, TaskID] = {}

    def __enter__(self) -> RunsWatcher:
        if self._done:
            self._console.print(f"{self._done} of {plural(self._total, 'run')} already finished")
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if self._console.is_terminal:
            self._bars.live.transient = kind is None  # how far the runs were stays on the screen
            with suppress(OSError):  # a terminal that was closed
                self._bars.stop()

    def hear(self, news: News) -> None:
        """Show how far a run is."""
        directory = news.run.directory
        if directory not in self._tasks:
            name = one_line(str(news.run), max(20, self._console.width - 45))
            self._tasks[directory] = self._bars.add_task(name, total=news.run.rounds)
        time = self._clock(news)
        self._bars.update(self._all, description=f"runs, {time}" if time else "runs")
        if not news.is_last:
            self._bars.update(self._tasks[directory], completed=news.rounds)
            return
        self._done += 1
        self._bars.remove_task(self._tasks[directory])
        self._bars.update(self._all, completed=self._done)
        told = "; ".join(filter(None, (_end_text(news), time)))
        self._console.print(f"[{self._done}/{self._total}] {news.run}: {told}", soft_wrap=True)


def _end_text(news: News) -> str:
    """How a run ended."""
    if news.is_cut:
        return f"ended early, after {plural(news.rounds, 'round')}"
    if news.result is None:
        return f"failed: {one_line(str(news.failure))}"
    if news.result.diverged is not None:
        return f"diverged after {plural(news.result.rounds, 'round')}"
    rounds = plural(news.result.rounds, "round")
    found = metric_text(news.result.metric, news.result.score)
    return f"{found} after {rounds}, {news.result.seconds:.1f} s"
