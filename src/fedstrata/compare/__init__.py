"""Which method is better? A grid of runs, the missing ones run, and the table that papers print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.compare.plan import Plan, Run, merge_options, plan
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
    "merge_options",
    "missing",
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
        run: False to run nothing and only show what is finished.
        on_news: called after every round and at every run's end.

    Raises:
        UsageError: if any of the runs cannot be described, before anything is written.
        Stopped: after Ctrl-C; the same call goes on.
    """
    grid = plan(values, out)
    return tabulate(grid, run_missing(grid, jobs, on_news) if run else None)
