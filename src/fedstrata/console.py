"""What a run looks like in a terminal: a header, live progress, and a table at the end."""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fedstrata.compare.plan import Plan
from fedstrata.compare.running import News, missing
from fedstrata.compare.table import MEASURED, Comparison, Row, Stat
from fedstrata.config import FREE, RunConfig
from fedstrata.errors import one_line
from fedstrata.history import History, Record
from fedstrata.wording import bytes_text, flops_text, number, percent, plural

if TYPE_CHECKING:
    from fedstrata.federation import Federation

SHOWN = 8
"""Rounds that the live table shows."""


def header(federation: Federation, rows: Mapping[str, str]) -> Panel:
    """What runs: shown before the first round."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    parameters = sum(p.numel() for p in federation.state.params.values())
    s = federation.settings
    local = plural(s.epochs, "epoch") if s.steps is None else plural(s.steps, "step")
    shown = {
        "method": f"{federation.method}   (buffers: {federation.method.buffers})",
        **rows,
        "training": f"{plural(s.rounds, 'round')}, {local} of {s.optimizer} at lr {s.lr:g}, batch {s.batch_size}, "
        f"seed {s.seed}",
        "size": f"{parameters:,} parameters in {len(federation.strata)} strata",
        "clients": f"{federation.roster.sampled} of {len(federation.clients)} in every round",
        "engine": f"{federation.engine}, {plural(federation.workers, 'worker')}" + (", compiled" if s.compile else ""),
    }
    if federation.records:
        shown["resumed"] = f"after round {len(federation.records)}"
    for note in federation.notes:
        name, _, text = note.partition(": ")
        shown[f"note ({name})" if text else "note"] = text or note
    if federation.out is not None:
        shown["files"] = str(federation.out)
    for name, text in shown.items():
        table.add_row(name, text)
    return Panel(table, title="fedstrata", title_align="left", expand=False)


def _trained(record: Record) -> str:
    """What trained in a round: a few strata by name, many by number."""
    return ", ".join(record.active) if len(record.active) <= 2 else f"{len(record.active)} strata"


_COLUMNS: Mapping[str, Callable[[Record], str]] = {
    "round": lambda r: str(r.round),
    "trains": _trained,
    "accuracy": lambda r: percent(r.accuracy),
    "test loss": lambda r: number(r.loss),
    "train loss": lambda r: number(r.train_loss),
    "up": lambda r: bytes_text(r.bytes_up),
    "down": lambda r: bytes_text(r.bytes_down),
    "seconds": lambda r: f"{r.seconds:.2f}",
}
_DISPENSABLE = ("train loss", "trains", "seconds", "down", "up", "test loss")
"""What a narrow terminal goes without, first to last."""


@dataclass(frozen=True)
class Course:
    """Rounds as a table, with as many columns as the terminal has room for."""

    records: Sequence[Record]

    def _table(self, names: Sequence[str]) -> Table:
        table = Table(expand=False)
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for record in self.records:
            table.add_row(*(_COLUMNS[name](record) for name in names))
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        always = len({tuple(record.active) for record in self.records}) < 2  # the same trains in every round
        names = [name for name in _COLUMNS if not (always and name == "trains")]
        yield _fitting(console, options, names, _DISPENSABLE, self._table)[0]


def _fitting(
    console: Console,
    options: ConsoleOptions,
    names: Sequence[str],
    dispensable: Sequence[str],
    build: Callable[[Sequence[str]], Table],
) -> tuple[Table, list[str]]:
    """The table with as many of its columns as there is room for, and the names of those left out."""
    for count in range(len(dispensable) + 1):
        left_out = [name for name in dispensable[:count] if name in names]
        table = build([name for name in names if name not in left_out])
        if Measurement.get(console, options.update(max_width=1000), table).maximum <= options.max_width:
            break
    return table, left_out


def _milestones(records: Sequence[Record]) -> list[Record]:
    """At most ten rounds that show the whole course, the last among them."""
    if len(records) <= 10:
        return list(records)
    step = (len(records) - 1) / 9
    return [records[round(i * step)] for i in range(10)]


def summary(history: History, out: Path | None, report: bool = False) -> Group:
    """The end of a run: a table of its course, its totals, and where its files are."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    s, costs = history.summary, history.costs
    facts.add_row(
        "accuracy", f"{percent(s['accuracy'])}  (best {percent(s['best_accuracy'])}, round {s['best_round']})"
    )
    if s["target"] is not None:
        reached = s["rounds_to_target"]
        facts.add_row(
            "target", f"{percent(s['target'])} " + (f"reached in round {reached}" if reached else "not reached")
        )
    archs = next((r.arch_accuracy for r in reversed(history.records) if r.accuracy is not None), {})
    if archs:
        facts.add_row("by model", ", ".join(f"{arch} {percent(accuracy)}" for arch, accuracy in archs.items()))
    facts.add_row("method", f"{s['method']}  (buffers: {s['buffers']})")
    beside = [f"{name}'s own {100 * size / costs.bytes_up:.1f} %" for name, size in costs.slots_up.items()]
    up = bytes_text(costs.bytes_up) + " up" + (f" ({', '.join(beside)})" if beside else "")
    facts.add_row("sent", f"{up}, {bytes_text(costs.bytes_down)} down")
    facts.add_row("computed", f"{flops_text(costs.flops)} in {costs.steps:,} steps, {costs.seconds:.1f} s")
    if probed := s.get("probes"):
        facts.add_row("probes", f"{probed['seconds']:.1f} s more, in {plural(probed['rounds'], 'round')}")
    facts.add_row("memory", f"{bytes_text(costs.memory)} at most")
    if s["refused"]:
        facts.add_row("refused", f"{s['refused']} updates; see metrics.jsonl")
    for note in s["notes"]:
        facts.add_row("note", note)
    if out is not None:
        shown = ", report.html" if report else ""
        facts.add_row("files", f"{out}/ (run.toml, metrics.jsonl, model.safetensors{shown})")
    return Group(Course(_milestones(history.records)), facts)


def profile(main: Mapping[str, float], workers: Mapping[str, float], rounds: int) -> Table:
    """Where the time of a round went, by phase: in the main process, and in all workers together."""
    table = Table(title="milliseconds per round", title_justify="left", title_style="bold")
    table.add_column("phase")
    columns = {name: seconds for name, seconds in (("main process", main), ("workers", workers)) if seconds}
    for name in columns:
        table.add_column(name, justify="right")
        table.add_column("share", justify="right")
    order = sorted({*main, *workers}, key=lambda phase: -(workers.get(phase, 0.0) + main.get(phase, 0.0)))
    for phase in [*order, None]:
        cells = []
        for seconds in columns.values():
            total = sum(seconds.values())
            spent = total if phase is None else seconds.get(phase)
            each = 1000 / max(rounds, 1)
            cells += ["", ""] if spent is None else [f"{spent * each:.2f}", f"{spent / (total or 1):.0%}"]
        table.add_row(phase or "all", *cells, style=None if phase else "bold")
    return table


def refusals(record: Record) -> list[str]:
    """One line for every refused update."""
    return [f"round {record.round}: refused client {r['client']}: {r['why']}" for r in record.refused]


class Watcher:
    """Follows a federation: a live view in a terminal, one line per round elsewhere."""

    def __init__(self, console: Console, federation: Federation) -> None:
        self._console, self._federation = console, federation
        self._recent: deque[Record] = deque(federation.records[-SHOWN:], maxlen=SHOWN)
        bar = max(10, min(40, console.width - 40))
        columns = (TextColumn("[bold]{task.description}"), BarColumn(bar), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._rounds, self._clients = Progress(*columns, *times, console=console), Progress(*columns, console=console)
        self._round = self._rounds.add_task("rounds ", total=federation.total, completed=len(federation.records))
        self._visit = self._clients.add_task("clients", total=None)
        self._live = Live(self, console=console, refresh_per_second=8, transient=True)

    def __rich__(self) -> Group:
        room = self._console.height - 7  # without the table's frame and the two bars
        shown = list(self._recent)[-max(room, 1) :]
        return Group(*([Course(shown)] if shown else []), self._rounds, self._clients)

    def __enter__(self) -> Watcher:
        if self._console.is_terminal:
            self._federation.on_visit = self._visited
            self._live.start()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._federation.on_visit = None
        if self._console.is_terminal:
            self._live.transient = kind is None  # no summary follows an error: the rounds stay on the screen
            with suppress(OSError):  # a terminal that was closed
                self._live.stop()

    def _visited(self, done: int, total: int) -> None:
        self._clients.update(self._visit, completed=done, total=total)

    def _part(self, record: Record) -> str:
        """What trained, where that is not the whole model."""
        whole = len(record.active) == sum(not s.idle for s in self._federation.strata)
        return "" if whole or not record.active else f"  trained {_trained(record)}"

    def record(self, record: Record) -> None:
        """Show a finished round."""
        self._recent.append(record)
        self._rounds.update(self._round, completed=record.round)
        for line in refusals(record):
            self._console.print(line, style="yellow")
        if not self._console.is_terminal:
            self._console.print(
                f"round {record.round}/{self._federation.total}"
                f"  accuracy {percent(record.accuracy)}  loss {number(record.loss)}"
                f"  up {bytes_text(record.bytes_up)}  down {bytes_text(record.bytes_down)}"
                f"  {record.seconds:.2f} s{self._part(record)}",
                soft_wrap=True,
            )


# --- a comparison ----------------------------------------------------------------------------------------------------


def spread(value: Stat | None) -> str:
    """Mean ± standard deviation, of fractions, in percent."""
    if value is None:
        return "–"
    return f"{100 * value.mean:.2f}" + ("" if value.std is None else f" ± {100 * value.std:.2f}")


def _final(row: Row) -> str:
    """The final accuracy, and how many seeds are not in it because they diverged."""
    if row.diverged and not row.sound:
        return "diverged"
    part = f" ({len(row.diverged)}/{len(row.results)} diverged)" if row.diverged else ""
    return spread(row.of("accuracy")) + part


def _to_target(row: Row) -> str:
    """Rounds to the target, and how many seeds reached it, if not all did."""
    found = row.of("rounds_to_target")
    reached = 0 if found is None else found.count
    part = f" ({reached}/{len(row.results)})" if reached < len(row.results) else ""
    return ("–" if found is None else f"{found.mean:.1f}") + part


def _mean(name: str, text: Callable[[float], str]) -> Callable[[Row], str]:
    return lambda row: "–" if (found := row.of(name)) is None else text(found.mean)


_MEASURES: Mapping[str, Callable[[Row], str]] = {
    "seeds": lambda r: f"{len(r.results)}/{len(r.seeds)}" if r.missing else str(len(r.seeds)),
    "accuracy": _final,
    "best": lambda r: spread(r.of("best_accuracy")),
    "gap": lambda r: spread(r.gap),
    "to target": _to_target,
    "up": _mean("bytes_up", bytes_text),
    "down": _mean("bytes_down", bytes_text),
    "FLOPs": _mean("flops", lambda count: flops_text(count).removesuffix("FLOP")),
    "seconds": _mean("seconds", lambda count: f"{count:.1f}"),
}


def _columns(comparison: Comparison) -> dict[str, Callable[[Row], str]]:
    """What the table of a comparison shows: a column's name → a row's text."""
    columns: dict[str, Callable[[Row], str]] = {"method": lambda r: r.method}
    for axis in comparison.plan.axes:
        columns[axis] = lambda r, axis=axis: str(r.run.varied[axis])  # type: ignore[misc]
    if len({row.run.buffers for row in comparison.rows}) > 1:
        columns["buffers"] = lambda r: r.run.buffers
    unasked = {"gap"} if not comparison.has_gap else set()
    unasked |= {"to target"} if not comparison.has_target else set()
    return columns | {name: text for name, text in _MEASURES.items() if name not in unasked}


_ALWAYS = ("dataset", "model", "partition", "clients", "participation", "rounds", "epochs", "steps", "batch_size", "lr")
"""Settings that a table is never without; others are told if they are not the default."""


def settings(comparison: Comparison) -> str:
    """One line with what all runs have in common and a reader must know."""
    fixed = {n: v for n, v in comparison.plan.fixed.items() if n not in FREE | {"buffers"} and v is not None}
    if "steps" in fixed:
        fixed.pop("epochs", None)
    others = [n for n, v in fixed.items() if n not in _ALWAYS and repr(v) != repr(RunConfig.model_fields[n].default)]
    told = [f"{name} {fixed[name]}" for name in (*_ALWAYS, *others) if name in fixed]
    told += _exceptions(comparison)
    told.append(f"seed{'s' * (len(comparison.plan.seeds) > 1)} {', '.join(map(str, comparison.plan.seeds))}")
    policies = {row.run.buffers for row in comparison.rows}
    return "; ".join(told + ([f"buffers {policies.pop()}"] if len(policies) == 1 else []))


def _exceptions(comparison: Comparison) -> list[str]:
    """Settings that only some methods set: what the others have, and theirs."""
    configs = {row.method: (row.run.config, row.run.own) for row in comparison.rows}
    names = dict.fromkeys(n for _, own in configs.values() for n in own if n not in comparison.plan.fixed)
    told = []
    for name in names:
        common = [str(getattr(config, name)) for config, own in configs.values() if name not in own][:1]
        own_ones = [f"{getattr(config, name)} for {label}" for label, (config, own) in configs.items() if name in own]
        told.append(f"{name} {', '.join(common + own_ones)}")
    return told


def remarks(comparison: Comparison) -> list[str]:
    """How to read the table, and what a reader of it must know."""
    how = ["accuracy and best in percent, mean ± sample standard deviation over the seeds; costs are means"]
    if comparison.has_gap:
        how.append("gap: centralised − method in percentage points, seed by seed")
    targets = [f"{100 * t:g} %" for t in dict.fromkeys(row.run.config.target for row in comparison.rows) if t]
    if targets:
        how.append(f"to target: rounds to {' or '.join(targets)}, of the seeds that reached it")
    return ["; ".join(how), *(f"note: {note}" for note in comparison.notes)]


@dataclass(frozen=True)
class SideBySide:
    """A comparison as a table: in a terminal with as many columns as it has room for, elsewhere with all."""

    comparison: Comparison

    def _table(self, names: Sequence[str]) -> Table:
        columns, rows = _columns(self.comparison), self.comparison.rows
        table = Table(expand=False)
        for name in names:
            table.add_column(name, justify="right" if name in _MEASURES else "left", no_wrap=name in _MEASURES)
        for row, following in zip(rows, [*rows[1:], None], strict=True):
            last = following is not None and following.run.setting != row.run.setting
            table.add_row(*(columns[name](row) for name in names), end_section=last)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal:
            options = options.update(max_width=1000)
        names = list(_columns(self.comparison))
        table, left_out = _fitting(console, options, names, ("FLOPs", "down", "up", "seconds", "best"), self._table)
        yield from console.render(table, options)
        for line in (settings(self.comparison), *remarks(self.comparison)):
            yield Text(line)
        if left_out:
            yield Text(f"no room for: {', '.join(left_out)}; --markdown shows all")


def markdown(comparison: Comparison) -> str:
    """A comparison as a Markdown table, its columns aligned, with the settings below."""
    columns = _columns(comparison)
    cells = [list(columns), *([text(row) for text in columns.values()] for row in comparison.rows)]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in cells]
    widths = [max(3, *(len(line[place]) for line in cells)) for place in range(len(columns))]
    rights = [name in _MEASURES for name in columns]
    lines = [[_padded(c, w, r) for c, w, r in zip(line, widths, rights, strict=True)] for line in cells]
    lines.insert(1, [f"{'-' * (w - 1)}:" if r else "-" * w for w, r in zip(widths, rights, strict=True)])
    below = [settings(comparison), *remarks(comparison)]
    return "\n".join(
        [*(f"| {' | '.join(line)} |" for line in lines), "", *(f"{line}  " for line in below[:-1]), below[-1]]
    )


def _padded(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)


def csv_text(comparison: Comparison) -> str:
    """A comparison as CSV: one line per row, plain numbers, accuracies and gaps as fractions."""
    lines = []
    for row in comparison.rows:
        line: dict[str, object] = {"method": row.method, **row.run.varied, "buffers": row.run.buffers}
        line |= {"seeds": len(row.results), "missing": len(row.missing), "diverged": len(row.diverged)}
        for name in (*MEASURED, "gap"):
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


def failed(comparison: Comparison) -> str:
    """One sentence on the runs that failed, each reason once."""
    whys: dict[str, list[str]] = {}
    for run in comparison.plan.runs:
        if run.directory in comparison.failures:
            whys.setdefault(str(comparison.failures[run.directory]), []).append(str(run))
    told = "; ".join(f"{', '.join(names)}: {why}" for why, names in whys.items())
    return f"{plural(len(comparison.failures), 'run')} failed: {told}"


class RunsWatcher:
    """Follows the runs of a comparison: bars in a terminal, one line per finished run elsewhere."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._console = console
        self._total = len({run.directory for run in plan.runs})
        self._done = self._total - len(missing(plan))
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
        if not news.ended:
            self._bars.update(self._tasks[directory], completed=news.rounds)
            return
        self._done += 1
        self._bars.remove_task(self._tasks[directory])
        self._bars.update(self._all, completed=self._done)
        self._console.print(f"[{self._done}/{self._total}] {news.run}: {_end(news)}", soft_wrap=True)


def _end(news: News) -> str:
    """How a run ended."""
    if news.result is None:
        return f"failed: {one_line(str(news.failure))}"
    if news.result.diverged is not None:
        return f"diverged after {plural(news.result.rounds, 'round')}"
    rounds = plural(news.result.rounds, "round")
    return f"{percent(news.result.accuracy)} after {rounds}, {news.result.seconds:.1f} s"
