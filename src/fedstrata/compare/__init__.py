"""Methods side by side: a grid of runs, what is missing of it run, and the table that papers print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.compare.plan import Plan, Run, overlaid, plan
from fedstrata.compare.runner import Listener, News, Result, missing, run_missing
from fedstrata.compare.table import Comparison, ComparisonRow, Stat, tabulate

__all__ = [
    "Comparison",
    "ComparisonRow",
    "Listener",
    "News",
    "Plan",
    "Result",
    "Run",
    "Stat",
    "compare",
    "missing",
    "overlaid",
    "plan",
    "run_missing",
    "tabulate",
]


def compare(
    values: Mapping[str, Any],
    out: str | Path = "runs/compare",
    *,
    jobs: int = 1,
    run: bool = True,
    on_news: Listener | None = None,
) -> Comparison:
    """Compare methods, over seeds and whatever else is varied.

    Args:
        values: a run's fields, as in its TOML file; any may hold a list. An entry of `method` may be a mapping with
            the fields that differ for it, and a `label`.
        out: the directory of all runs. What is finished there is not run again; what was interrupted goes on.
        jobs: how many runs at the same time, each in a process of its own.
        run: False only looks at what is there.
        on_news: is told of every round and of every run's end.

    Raises:
        UsageError: if any of the runs cannot be described, before anything is written.
        Stopped: after Ctrl-C; the same call goes on.
    """
    made = plan(values, out)
    return tabulate(made, run_missing(made, jobs, on_news) if run else None)
