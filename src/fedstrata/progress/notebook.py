"""Rounds as they pass, in a notebook: one output that is redrawn, with a bar and the last rounds."""

from __future__ import annotations

import time
from collections import deque
from importlib import import_module
from typing import Any

from fedstrata.core.markup import bar, escape, page_part, paragraph, table
from fedstrata.runs.callbacks import Callback, Followed
from fedstrata.runs.records import Record
from fedstrata.runs.round_text import COLUMNS, column_title, columns_of, refusals

SHOWN = 8
"""Rounds that the table shows."""
PAUSE = 0.25
"""Seconds between two drawings: whoever looks sees no more, and a notebook's file keeps them out."""


class NotebookProgress(Callback):
    """A bar of rounds, one of the round's clients, and the last rounds; needs no widgets, and stays in the notebook."""

    def __init__(self) -> None:
        self._recent: deque[Record] = deque(maxlen=SHOWN)
        self._refused: deque[str] = deque(maxlen=SHOWN)
        self._visits = (0, 0)

    def on_begin(self, federation: Followed) -> None:
        """Open the output, with the last rounds of a run that goes on."""
        self._recent.extend(federation.records[-SHOWN:])
        self._done, self._since, self._drawn = len(federation.records), time.monotonic(), 0.0
        display: Any = import_module("IPython.display")
        self._html, self._handle = display.HTML, display.display(display.HTML(""), display_id=True)
        self._draw(federation, "")

    def on_visit(self, federation: Followed, done: int, total: int) -> None:
        """Move the bar of clients, now and then."""
        self._visits = done, total
        if time.monotonic() - self._drawn >= PAUSE:
            self._draw(federation, "")

    def on_round(self, federation: Followed, record: Record) -> None:
        """Add a round, and draw it unless rounds pass too quickly."""
        self._recent.append(record)
        self._refused.extend(refusals(record))
        self._done = record.round
        if time.monotonic() - self._drawn >= PAUSE:
            self._draw(federation, "")

    def on_end(self, federation: Followed, error: BaseException | None) -> None:
        """Draw the last rounds, and what ended them."""
        self._draw(federation, "done" if error is None else f"ended early: {type(error).__name__}")

    def _draw(self, federation: Followed, ended: str) -> None:
        """Draw anew what the output shows."""
        took = f"{time.monotonic() - self._since:.0f} s"
        parts = [f"<div>{bar(self._done, federation.total)} rounds {self._done}/{federation.total}, {took}"]
        done, total = self._visits
        if ended:
            parts.append(f", {escape(ended)}</div>")
        else:
            parts.append(f"</div><div>{bar(done, total)} clients {done}/{total}</div>" if total else "</div>")
        if self._recent:
            names, shown = columns_of(self._recent), list(self._recent)
            rows = ([COLUMNS[name](record) for name in names] for record in shown)
            parts.append(table([column_title(name, shown) for name in names], rows, words=0))
        parts += [paragraph(line) for line in self._refused]
        self._handle.update(self._html(page_part(*parts)))
        self._drawn = time.monotonic()
