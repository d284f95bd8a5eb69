"""What a run looks like in a terminal: a header, live progress, and a table at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedstrata.federation import Federation, History, Record

SHOWN = 8
"""Rounds that the live table shows."""


def bytes_text(count: float) -> str:
    """1234567 → '1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def flops_text(count: float) -> str:
    """Floating-point operations with a unit."""
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.3g} {unit}FLOP"
        count /= 1000
    return f"{count:.3g} PFLOP"


def percent(value: float | None) -> str:
    """0.9137 → '91.37 %', and a dash for None."""
    return "–" if value is None else f"{100 * value:.2f} %"


def number(value: float | None) -> str:
    """Three digits after the point, and a dash for None."""
    return "–" if value is None else f"{value:.3f}"


def header(federation: Federation, rows: Mapping[str, str]) -> Panel:
    """What runs: shown before the first round."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    parameters = sum(p.numel() for p in federation.state.params.values())
    s = federation.settings
    local = f"{s.epochs} epoch{'s' * (s.epochs != 1)}" if s.steps is None else f"{s.steps} steps"
    shown = {
        "method": f"{federation.method}   (buffers: {federation.method.buffers})",
        **rows,
        "training": f"{s.rounds} rounds, {local} of {s.optimizer} at lr {s.lr:g}, batch {s.batch_size}, seed {s.seed}",
        "size": f"{parameters:,} parameters in {len(federation.strata)} strata, {len(federation.clients)} clients",
    }
    for note in federation.notes:
        name, _, text = note.partition(": ")
        shown[f"note ({name})" if text else "note"] = text or note
    if federation.out is not None:
        shown["files"] = str(federation.out)
    for name, text in shown.items():
        table.add_row(name, text)
    return Panel(table, title="fedstrata", title_align="left", expand=False)


def _table(records: Iterable[Record], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", expand=False)
    for name in ("round", "accuracy", "test loss", "train loss", "up", "down", "seconds"):
        table.add_column(name, justify="right")
    for r in records:
        table.add_row(
            str(r.round),
            percent(r.accuracy),
            number(r.loss),
            number(r.train_loss),
            bytes_text(r.bytes_up),
            bytes_text(r.bytes_down),
            f"{r.seconds:.2f}",
        )
    return table


def _milestones(records: Sequence[Record]) -> list[Record]:
    """At most ten rounds that show the whole course, the last among them."""
    if len(records) <= 10:
        return list(records)
    step = (len(records) - 1) / 9
    return [records[round(i * step)] for i in range(10)]


def summary(history: History, out: Path | None) -> Group:
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
    facts.add_row("method", f"{s['method']}  (buffers: {s['buffers']})")
    facts.add_row("sent", f"{bytes_text(costs.bytes_up)} up, {bytes_text(costs.bytes_down)} down")
    facts.add_row("computed", f"{flops_text(costs.flops)} in {costs.steps:,} steps, {costs.seconds:.1f} s")
    facts.add_row("memory", f"{bytes_text(costs.memory)} at most")
    if s["refused"]:
        facts.add_row("refused", f"{s['refused']} updates; see metrics.jsonl")
    for note in s["notes"]:
        facts.add_row("note", note)
    if out is not None:
        facts.add_row("files", f"{out}/ (run.toml, metrics.jsonl, model.safetensors)")
    return Group(_table(_milestones(history.records)), facts)


def refusals(record: Record) -> list[str]:
    """One line for every refused update."""
    return [f"round {record.round}: refused client {r['client']}: {r['why']}" for r in record.refused]


class Watcher:
    """Follows a federation: a live view in a terminal, a line a round elsewhere."""

    def __init__(self, console: Console, federation: Federation) -> None:
        self._console, self._federation = console, federation
        self._recent: deque[Record] = deque(federation.records[-SHOWN:], maxlen=SHOWN)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._rounds = self._progress.add_task(
            "rounds ", total=federation.settings.rounds, completed=len(federation.records)
        )
        self._visits = self._progress.add_task("clients", total=None)
        self._live = Live(self, console=console, refresh_per_second=8, transient=True)

    def __rich__(self) -> Group:
        parts: list[Any] = [_table(self._recent)] if self._recent else []
        return Group(*parts, self._progress)

    def __enter__(self) -> Watcher:
        if self._console.is_terminal:
            self._federation.on_visit = self._visited
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._federation.on_visit = None
        if self._console.is_terminal:
            self._live.stop()

    def _visited(self, done: int, total: int) -> None:
        self._progress.update(self._visits, completed=done, total=total)

    def record(self, record: Record) -> None:
        """Show a finished round."""
        self._recent.append(record)
        self._progress.update(self._rounds, completed=record.round)
        for line in refusals(record):
            self._console.print(line, style="yellow", highlight=False)
        if not self._console.is_terminal:
            self._console.print(
                f"round {record.round}/{self._federation.settings.rounds}"
                f"  accuracy {percent(record.accuracy)}  loss {number(record.loss)}"
                f"  up {bytes_text(record.bytes_up)}  down {bytes_text(record.bytes_down)}"
                f"  {record.seconds:.2f} s",
                highlight=False,
            )
