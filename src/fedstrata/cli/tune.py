"""`fedstrata tune`, and the search of `fedstrata compare --tune`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.compare import (
    HALVING,
    SEARCH,
    SEARCH_SEED,
    Asked,
    Halving,
    Methods,
    OnlyTable,
    SearchSeed,
    SearchTexts,
    Seeds,
    Vary,
    fail_if_any_failed,
    write_report,
)
from fedstrata.cli.options import Config, Jobs, Json, Open, Report, Sets, open_screen, with_fields
from fedstrata.cli.panels import OUTPUT
from fedstrata.cli.report import open_in_browser
from fedstrata.config.toml import read_toml
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from fedstrata.tuning import SearchPlan, TunedComparison

TRIALS, VALIDATION = 20, 0.2
"""As in `fedstrata.tuning.Budget`, which needs more imports than help may."""
Trials = Annotated[int, typer.Option(help="settings tried for every method", rich_help_panel=SEARCH)]
Out = Annotated[Path, typer.Option(help="directory for all runs; what is finished stays", rich_help_panel=OUTPUT)]


@with_fields
def tune(
    config: Config = None,
    methods: Methods = None,
    search: SearchTexts = None,
    trials: Trials = TRIALS,
    seeds: Seeds = None,
    vary: Vary = None,
    search_seed: SearchSeed = SEARCH_SEED,
    halving: Halving = HALVING,
    out: Out = Path("runs/tune"),
    sets: Sets = None,
    jobs: Jobs = 1,
    quiet: OnlyTable = False,
    as_json: Json = False,
    report: Report = True,
    open_: Open = False,
    *,
    given: dict[str, Any],
) -> None:
    """Search each method's settings on validation data, then report the best on fresh seeds."""
    from fedstrata.compare import show

    file = {} if config is None else read_toml(config)
    asked = Asked(file, given, methods, seeds or [], vary or [], sets or [], search or [], out, jobs)
    plan = search_plan(asked, (trials, search_seed, halving))
    found = run_search(plan, asked, open_screen(stderr=as_json, quiet=quiet))
    if as_json:
        print(json.dumps({"tuned": asdict(found.tuned), "comparison": found.comparison.as_dict()}))
    else:
        open_screen().print(show.SideBySide(found.comparison), soft_wrap=True)
        print(best_text(found))
    if report:
        write_reports(found, out, open_)
    fail_if_any_failed(found.comparison, found.failures)


def best_text(found: TunedComparison) -> str:
    """What was found for each method, a line each."""
    return f"best: {found.tuned}".replace("\n", "\n      ")


def search_plan(asked: Asked, budget: tuple[int, int, int]) -> SearchPlan:
    """What a file, its table [search] and the options ask for; options win. The budget is (trials, seed, halving)."""
    from fedstrata.tuning import Budget, plan_search, read_search

    merged = asked.merge()
    share = None if isinstance(merged.get("validation"), list) else merged.pop("validation", None)
    trials, seed, factor = budget
    chosen = Budget(trials, seed, VALIDATION if share is None else share, factor)
    return plan_search(merged, {**asked.table, **read_search(asked.search)}, chosen)


def run_search(plan: SearchPlan, asked: Asked, screen: Console, run: bool = True) -> TunedComparison:
    """Search, then run what was found; with `run` False show what is there."""
    from fedstrata.compare import show
    from fedstrata.tuning import FILE, Search, report_best

    if not run and not (asked.out / FILE).exists():
        raise UsageError(f"nothing was searched in {asked.out} yet: leave out --table-only")
    walk = Search(plan, asked.out)
    if not run:
        return report_best(walk, {}, run=False)
    with show.RunsWatcher(screen, walk.counts) as watcher:
        walk.tell = watcher.hear
        failures = walk.run(asked.jobs)
    with show.RunsWatcher(screen, walk.best_plan()) as watcher:
        return report_best(walk, failures, asked.jobs, watcher.hear)


def tune_and_compare(asked: Asked, budget: tuple[int, int, int], table_only: bool, screen: Console) -> TunedComparison:
    """What `compare --tune` shows: the methods with the best settings that were found for each."""
    found = run_search(search_plan(asked, budget), asked, screen, run=not table_only)
    screen.print(best_text(found), soft_wrap=True)
    return found


def write_reports(found: TunedComparison, out: Path, in_browser: bool) -> None:
    """Write report.html of the runs that are reported, and say where the search's page is."""
    from fedstrata.tuning import write_page

    write_report(found.comparison, out / "report.html", False)
    page = write_page(found.tuned, found.comparison, out)
    if in_browser:
        open_in_browser(page.resolve().as_uri())
