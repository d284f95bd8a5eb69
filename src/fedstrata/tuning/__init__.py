"""Which settings suit a method? A search on validation data, with the same budget for every method, by Optuna."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedstrata.compare import Comparison, Listener, run_missing, tabulate
from fedstrata.compare.runner import check_jobs
from fedstrata.errors import FedstrataError
from fedstrata.tuning.outcome import FILE, Tuned, TunedMethod, read_tuned
from fedstrata.tuning.page import write_page
from fedstrata.tuning.plan import Budget, SearchPlan, plan_search, read_search
from fedstrata.tuning.search import Search

__all__ = [
    "FILE",
    "Budget",
    "Search",
    "SearchPlan",
    "Tuned",
    "TunedComparison",
    "TunedMethod",
    "plan_search",
    "read_search",
    "read_tuned",
    "report_best",
    "tune",
    "write_page",
]


@dataclass(frozen=True)
class TunedComparison:
    """What a search has found, and how good that is on seeds that it has not seen.

    Args:
        tuned: the trials, and the best of every method.
        comparison: the methods with the best settings, on the test set.
        failures: trials that went wrong, by directory.
    """

    tuned: Tuned
    comparison: Comparison
    failures: Mapping[Path, FedstrataError]

    def __str__(self) -> str:
        return f"{self.tuned}\n{self.comparison}"


def tune(
    values: Mapping[str, Any],
    search: Mapping[str, Any] | str | None = None,
    out: str | Path = "runs/tune",
    *,
    budget: Budget | None = None,
    jobs: int = 1,
    on_news: Listener | None = None,
) -> TunedComparison:
    """Search the best settings of every method on validation data, and report them on seeds that no trial had.

    Args:
        values: as for `compare`: a run's fields, any of which may hold a list; methods may hold spaces, such as
            `"fedprox(mu=log(1e-4, 1))"`. The seeds are those that are reported.
        search: more spaces, by field or argument: `{"lr": "log(1e-3, 1)", "fedprox.mu": "log(1e-4, 1)"}`, or as the
            command takes them, `"lr=log(1e-3, 1); fedprox.mu=log(1e-4, 1)"`; where nothing is searched at all, the
            learning rate from 0.001 to 1.
        out: the directory. What is finished there is not run again; what was interrupted goes on.
        budget: of every method.
        jobs: how many runs at the same time; what is tried does not depend on it.
        on_news: called after every round and at every run's end.

    Raises:
        UsageError: if anything cannot be searched or described, before anything is written.
        Stopped: after Ctrl-C; the same call goes on.
    """
    check_jobs(jobs)
    walk = Search(plan_search(values, search, budget or Budget()), Path(out), on_news)
    failures = walk.run(jobs)
    return report_best(walk, failures, jobs, on_news)


def report_best(
    walk: Search,
    failures: Mapping[Path, FedstrataError],
    jobs: int = 1,
    on_news: Listener | None = None,
    run: bool = True,
) -> TunedComparison:
    """Run every method with the best that was found for it, on the seeds that are reported, and write the page.

    Args:
        walk: the search.
        failures: of its trials.
        jobs: how many runs at the same time.
        on_news: called after every round and at every run's end.
        run: False to run nothing and only show what is finished.
    """
    plan, tuned = walk.best_plan(), walk.tuned
    found = tabulate(plan, run_missing(plan, jobs, on_news) if run else None)
    result = TunedComparison(tuned, replace(found, tuning=f"{tuned.how}; chosen: {tuned.choices}"), failures)
    write_page(tuned, result.comparison, walk.out)
    return result
