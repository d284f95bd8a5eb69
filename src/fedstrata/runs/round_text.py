"""A round as people read it, column by column: in a terminal, in a notebook, in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fedstrata.core.text import bytes_text, metric_text, metric_title, number
from fedstrata.runs.records import Record


def trained_text(record: Record) -> str:
    """What trained in a round: a few strata by name, many by number."""
    return ", ".join(record.active) if len(record.active) <= 2 else f"{len(record.active)} strata"


COLUMNS: Mapping[str, Callable[[Record], str]] = {
    "round": lambda r: str(r.round),
    "trains": trained_text,
    "score": lambda r: metric_text(r.primary, r.score),
    "test loss": lambda r: number(r.loss),
    "train loss": lambda r: number(r.train_loss),
    "up": lambda r: bytes_text(r.bytes_up),
    "down": lambda r: bytes_text(r.bytes_down),
    "seconds": lambda r: f"{r.seconds:.2f}",
}
"""Title → the text of a round; `score` stands for the primary metric's name."""


def columns_of(records: Iterable[Record]) -> list[str]:
    """The columns that say something of these rounds: what trains is none where that is always the same."""
    always = len({tuple(record.active) for record in records}) < 2
    return [name for name in COLUMNS if not (always and name == "trains")]


def column_title(name: str, records: Sequence[Record]) -> str:
    """A column's title: the score is called by its metric's name."""
    return metric_title(records[-1].primary) if name == "score" and records else name


def milestones(records: Sequence[Record]) -> list[Record]:
    """At most ten rounds that show the whole course, the last among them."""
    if len(records) <= 10:
        return list(records)
    step = (len(records) - 1) / 9
    return [records[round(i * step)] for i in range(10)]


def refusals(record: Record) -> list[str]:
    """One line for every refused update."""
    return [f"round {record.round}: refused client {r['client']}: {r['why']}" for r in record.refused]


def round_line(record: Record, total: int, strata: int) -> str:
    """A round in one line; `strata` is how many the model has that can train."""
    score = f"{metric_title(record.primary)} {metric_text(record.primary, record.score)}"
    part = "" if len(record.active) == strata or not record.active else f"  trained {trained_text(record)}"
    return (
        f"round {record.round}/{total}  {score}  loss {number(record.loss)}"
        f"  up {bytes_text(record.bytes_up)}  down {bytes_text(record.bytes_down)}  {record.seconds:.2f} s{part}"
    )
