"""A run as a notebook shows it: `_repr_html_` of a Federation and of a History."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedstrata.core.markup import curve, details, fact_table, heading, page_part, paragraph, table
from fedstrata.core.text import bytes_text, flops_text, metric_text, metric_title, plural
from fedstrata.data.examples import sizes
from fedstrata.models.strata import strata_table
from fedstrata.runs.callbacks import Followed
from fedstrata.runs.records import History, Record
from fedstrata.runs.round_text import COLUMNS, column_title, columns_of, milestones

COUNTED = 200
"""Clients whose examples are counted: as many as facts.json tells of."""


def federation_html(federation: Followed) -> str:
    """What trains, with whom, and how far it is."""
    s = federation.settings
    steps = plural(s.epochs, "epoch") if s.steps is None else plural(s.steps, "step")
    facts = {
        "method": f"{federation.method} (buffers: {federation.method.buffers})",
        "clients": _clients_text(federation),
        "training": f"{plural(s.rounds, 'round')}, {steps} of {s.optimizer} at lr {s.lr:g}, batch {s.batch_size}",
        "seed": s.seed,
        "engine": federation.engine,
        "files": federation.out or "",
    }
    notes = "".join(paragraph(note) for note in federation.notes)
    return page_part(
        heading("Federation", f"{len(federation.records)} of {plural(federation.total, 'round')} done"),
        fact_table(facts),
        details(plural(len(federation.notes), "note"), notes) if notes else "",
        details(f"{len(federation.strata)} strata", strata_table(federation.strata)),
        course_html(federation.records),
    )


def _clients_text(federation: Followed) -> str:
    """How many there are, and how many examples they have."""
    size = sizes(federation.clients)
    counts = [size(client) for client in range(min(len(federation.clients), COUNTED))]
    if not counts:
        return "0"
    of_whom = "" if len(counts) == len(federation.clients) else f"of the first {COUNTED} "
    spread = f"{min(counts):,} to {max(counts):,} examples, median {statistics.median(counts):,.0f}"
    return f"{len(federation.clients):,} ({of_whom}{spread})"


def history_html(history: History) -> str:
    """What came of a run: its last score, its curve, what it cost."""
    summary, costs = history.summary, history.costs
    return page_part(
        heading("History", f"of {summary['method']}"),
        fact_table(
            {
                **_scores(summary),
                "rounds": len(history.records),
                "sent": f"{bytes_text(costs.bytes_up)} up, {bytes_text(costs.bytes_down)} down",
                "computed": f"{flops_text(costs.flops)} in {costs.steps:,} steps, {costs.seconds:.1f} s",
                "memory": f"{bytes_text(costs.memory)} at most",
            }
        ),
        course_html(history.records),
    )


def _scores(summary: Mapping[str, Any]) -> dict[str, str]:
    """The primary metric, now and at its best, then the others."""
    metric = summary["metric"]
    others = {metric_title(n): metric_text(n, v) for n, v in summary["metrics"].items() if n != metric}
    if summary["score"] is None:
        return {metric_title(metric): "not evaluated"}
    best = f" (best {metric_text(metric, summary['best_score'])}, round {summary['best_round']})"
    return {metric_title(metric): metric_text(metric, summary["score"]) + best, **others}


def course_html(records: Sequence[Record]) -> str:
    """The score by round as a line, and some rounds as a table."""
    if not records:
        return ""
    scores = [(r.round, r.score) for r in records if r.score is not None]
    shown = milestones(records)
    names = columns_of(shown)
    rows = ([COLUMNS[name](record) for name in names] for record in shown)
    metric = records[-1].primary
    label = f"{metric_title(metric)} by round, the last {metric_text(metric, scores[-1][1])}" if scores else ""
    line = curve([score for _, score in scores], label)
    return line + details("Rounds", table([column_title(name, shown) for name in names], rows, words=0))
