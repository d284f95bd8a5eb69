"""Rounds as they pass, in a terminal: a live table with two bars, or one line per round where nothing can move."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedstrata.runs.callbacks import Callback, Followed
from fedstrata.runs.records import Record
from fedstrata.runs.round_text import COLUMNS, column_title, columns_of, refusals, round_line

SHOWN = 8
"""Rounds that the live table shows."""
SECONDS = 1.0
"""How often to look whether the terminal is still there."""
_DISPENSABLE = ("train loss", "trains", "seconds", "down", "up", "test loss")
"""What a narrow terminal goes without, first to last."""


def fitting_columns(
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


@dataclass(frozen=True)
class RoundsTable:
    """Rounds as a table, with as many columns as the terminal has room for."""

    records: Sequence[Record]

    def _table(self, names: Sequence[str]) -> Table:
        table = Table(expand=False)
        for name in names:
            table.add_column(column_title(name, self.records), justify="right", no_wrap=True)
        for record in self.records:
            table.add_row(*(COLUMNS[name](record) for name in names))
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield fitting_columns(console, options, columns_of(self.records), _DISPENSABLE, self._table)[0]


def build_progress(console: Console, transient: bool) -> Callback:
    """What shows rounds on a console; `transient` takes the live view away once all is done."""
    return LiveProgress(console, transient) if console.is_terminal else LineProgress(console)


class LineProgress(Callback):
    """One line per round."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_round(self, federation: Followed, record: Record) -> None:
        """Print the round, and what was refused."""
        for line in refusals(record):
            self._console.print(line, style="yellow", soft_wrap=True)
        trainable = sum(not stratum.idle for stratum in federation.strata)
        self._console.print(round_line(record, federation.total, trainable), soft_wrap=True)


class LiveProgress(Callback):
    """The last rounds as a table, with a bar of rounds and one of the round's clients."""

    def __init__(self, console: Console, transient: bool) -> None:
        self._console, self._transient = console, transient
        self._recent: deque[Record] = deque(maxlen=SHOWN)

    def __rich__(self) -> Group:
        room = self._console.height - 7  # without the table's frame and the two bars
        shown = list(self._recent)[-max(room, 1) :]
        return Group(*([RoundsTable(shown)] if shown else []), self._rounds, self._clients)

    def on_begin(self, federation: Followed) -> None:
        """Draw the view, with the last rounds of a run that goes on."""
        self._recent.extend(federation.records[-SHOWN:])
        bar = max(10, min(40, self._console.width - 40))
        columns = (TextColumn("[bold]{task.description}"), BarColumn(bar), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._rounds = Progress(*columns, *times, console=self._console)
        self._clients = Progress(*columns, console=self._console)
        self._round = self._rounds.add_task("rounds ", total=federation.total, completed=len(federation.records))
        self._visit = self._clients.add_task("clients", total=None)
        self._live = Live(self, console=self._console, refresh_per_second=8, transient=True)
        self._live.start()
        self._looked = monotonic()

    def _look(self) -> None:
        """Look now and then whether the terminal is still there: the view is silent about a closed one.

        Raises:
            OSError: if it was closed, as printing to it would.
        """
        if monotonic() - self._looked > SECONDS:
            self._looked = monotonic()
            if not self._console.is_terminal:
                raise OSError(errno.EIO, "the terminal was closed")

    def on_visit(self, federation: Followed, done: int, total: int) -> None:
        """Move the bar of clients."""
        self._clients.update(self._visit, completed=done, total=total)
        self._look()

    def on_round(self, federation: Followed, record: Record) -> None:
        """Move the bar of rounds, and print what was refused above the view."""
        self._recent.append(record)
        self._rounds.update(self._round, completed=record.round)
        for line in refusals(record):
            self._console.print(line, style="yellow")
        self._look()

    def on_end(self, federation: Followed, error: BaseException | None) -> None:
        """Let go of the terminal; after an error no summary follows, so the rounds stay on the screen."""
        self._live.transient = self._transient and error is None
        with suppress(OSError):  # a terminal that was closed
            self._live.stop()
