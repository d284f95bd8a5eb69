"""`fedstrata compare`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.completion import complete_setting, complete_table
from fedstrata.cli.options import Config, Jobs, Json, Open, Report, Sets, open_screen, parse_numbers, with_fields
from fedstrata.cli.panels import OUTPUT
from fedstrata.cli.report import open_in_browser
from fedstrata.config.toml import read_toml
from fedstrata.core.text import plural
from fedstrata.errors import FedstrataError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from fedstrata.compare import Comparison
    from fedstrata.tuning import TunedComparison

WHAT, SEARCH = "What to compare", "What to search"
Methods = Annotated[
    list[str] | None,
    typer.Option(
        metavar="A; B; …",
        help="what to compare: 'fedavg; fedprox(mu=0.01)'",
        rich_help_panel=WHAT,
        autocompletion=complete_table("methods"),
    ),
]
Seeds = Annotated[
    list[str] | None,
    typer.Option(metavar="0 1 2 …", help="run every method with each of these seeds", rich_help_panel=WHAT),
]
Vary = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=A; B; …",
        help="any other field with several values: 'lr=0.1; 1'",
        rich_help_panel=WHAT,
        autocompletion=complete_setting,
    ),
]
Out = Annotated[
    Path, typer.Option(help="directory for all runs; finished ones are not run again", rich_help_panel=OUTPUT)
]
TableOnly = Annotated[bool, typer.Option("--table-only", "--no-run", help="show finished runs; run nothing")]
OnlyTable = Annotated[bool, typer.Option("--quiet", help="print only the table", rich_help_panel=OUTPUT)]
Markdown = Annotated[bool, typer.Option("--markdown", help="print the table as Markdown", rich_help_panel=OUTPUT)]
Csv = Annotated[bool, typer.Option("--csv", help="print the table as CSV, plain numbers", rich_help_panel=OUTPUT)]
Latex = Annotated[
    bool,
    typer.Option("--latex", help="print the table for LaTeX: booktabs, bold best, tested", rich_help_panel=OUTPUT),
]
Cite = Annotated[
    bool, typer.Option("--cite", help="print BibTeX of the methods' papers; run nothing", rich_help_panel=OUTPUT)
]

TuneOption = Annotated[
    int | None,
    typer.Option("--tune", metavar="N", help="first search each method's settings in N trials", rich_help_panel=SEARCH),
]
SEARCH_SEED, HALVING = 1000, 3
"""As in `fedstrata.tuning.Budget`, which needs more imports than help may."""
SearchTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--search",
        metavar="NAME=SPACE; …",
        help="what to try: 'lr=log(1e-3, 1); fedprox.mu=log(1e-4, 1)' [default: lr=log(0.001, 1)]",
        rich_help_panel=SEARCH,
    ),
]
SearchSeed = Annotated[
    int, typer.Option(help="seed of the search and its trials; none of those reported", rich_help_panel=SEARCH)
]
Halving = Annotated[
    int,
    typer.Option(help="at each rung one of so many trials goes on; 0 runs all to their ends", rich_help_panel=SEARCH),
]


@dataclass(frozen=True)
class Asked:
    """What a file and the options ask to compare.

    Args:
        file: what the configuration holds.
        given: options that are a run's fields.
        methods, seeds, vary, sets, search: options of these names, as they were written.
        out: the directory of all runs.
        jobs: how many at the same time.
    """

    file: Mapping[str, Any]
    given: Mapping[str, Any]
    methods: Sequence[str] | None
    seeds: Sequence[str]
    vary: Sequence[str]
    sets: Sequence[str]
    search: Sequence[str]
    out: Path
    jobs: int

    @property
    def table(self) -> dict[str, Any]:
        """The file's table [search]."""
        found = self.file.get("search", {})
        if not isinstance(found, Mapping):
            raise UsageError(f'[search] is a table, such as lr = "log(1e-3, 1)", not {found!r}')
        return dict(found)

    def merge(self) -> dict[str, Any]:
        """The fields of all runs, some with several values."""
        from fedstrata.compare import merge_options

        file = {name: value for name, value in self.file.items() if name != "search"}
        methods = "; ".join(self.methods) if self.methods else None
        return merge_options(file, parse_numbers(self.given), methods, self.seeds, self.vary, self.sets)


@with_fields
def compare(
    config: Config = None,
    methods: Methods = None,
    seeds: Seeds = None,
    vary: Vary = None,
    tune: TuneOption = None,
    search: SearchTexts = None,
    search_seed: SearchSeed = SEARCH_SEED,
    halving: Halving = HALVING,
    out: Out = Path("runs/compare"),
    sets: Sets = None,
    jobs: Jobs = 1,
    table_only: TableOnly = False,
    quiet: OnlyTable = False,
    as_markdown: Markdown = False,
    as_csv: Csv = False,
    as_latex: Latex = False,
    as_json: Json = False,
    cite: Cite = False,
    report: Report = True,
    open_: Open = False,
    *,
    given: dict[str, Any],
) -> None:
    """Run methods × seeds (and any other field), leaving out what is finished, and print the table."""
    form = _chosen_form(markdown=as_markdown, csv=as_csv, latex=as_latex, json=as_json, cite=cite)
    file = {} if config is None else read_toml(config)
    asked = Asked(file, given, methods, seeds or [], vary or [], sets or [], search or [], out, jobs)
    if cite:
        print(_bibtex(asked, tune))
        return
    screen = open_screen(stderr=bool(form), quiet=quiet)
    tuned = None if tune is None else _search(asked, (tune, search_seed, halving), table_only, screen)
    found = _compare(asked, table_only, screen) if tuned is None else tuned.comparison
    _show(found, form)
    if report:
        write_report(found, out / "report.html", open_)
    fail_if_any_failed(found, {} if tuned is None else tuned.failures)


def fail_if_any_failed(found: Comparison, trials: Mapping[Path, FedstrataError]) -> None:
    """End with what went wrong, if anything did.

    Args:
        found: the runs that are shown.
        trials: what went wrong in the search before them, by directory.

    Raises:
        FedstrataError: if a run has failed.
    """
    from fedstrata.compare import show

    if trials:
        why = next(iter(trials.values()))
        raise FedstrataError(f"{plural(len(trials), 'trial')} failed: {why}; the same command tries again")
    if found.failures:
        raise FedstrataError(show.failure_text(found))


def _chosen_form(**asked: bool) -> str:
    """What is printed; empty for the table as people read it."""
    chosen = [name for name, wanted in asked.items() if wanted]
    if len(chosen) > 1:
        raise UsageError("--markdown, --csv, --latex, --json and --cite exclude each other: give one of them")
    return "".join(chosen)


def _bibtex(asked: Asked, tune: int | None) -> str:
    """A bibliography of the methods; what is searched in them does not matter for it."""
    from fedstrata.compare import plan
    from fedstrata.compare.cite import bibtex
    from fedstrata.tuning import Budget, plan_search, read_search

    if tune is None:
        return bibtex([run.config for run in plan(asked.merge(), asked.out).runs])
    found = plan_search(asked.merge(), {**asked.table, **read_search(asked.search)}, Budget(tune))
    return bibtex([candidate.trial(candidate.initial, found.budget) for candidate in found.candidates])


def _search(asked: Asked, budget: tuple[int, int, int], table_only: bool, screen: Console) -> TunedComparison:
    """Search each method's settings, then run what is missing of the comparison of the best ones."""
    from fedstrata.cli.tune import tune_and_compare

    return tune_and_compare(asked, budget, table_only, screen)


def _compare(asked: Asked, table_only: bool, screen: Console) -> Comparison:
    """Run what is missing of a comparison."""
    from fedstrata.compare import plan, run_missing, show, tabulate

    if asked.table or asked.search:
        raise UsageError("there is something to search: say how often, with --tune N, or use 'fedstrata tune'")
    grid = plan(asked.merge(), asked.out)
    failures: dict[Path, FedstrataError] = {}
    if not table_only:
        with show.RunsWatcher(screen, grid) as watcher:
            failures = run_missing(grid, asked.jobs, watcher.hear)
    wrong = [error for error in failures.values() if isinstance(error, UsageError)]
    if wrong and len(wrong) == len({run.directory for run in grid.runs}):
        raise wrong[0]  # the input fits no run, so there is nothing to show
    return tabulate(grid, failures)


def _show(found: Comparison, form: str) -> None:
    """Print the table in one of its forms; as people read it where none is named."""
    from fedstrata.compare import show
    from fedstrata.compare.latex import latex

    texts: dict[str, Callable[[Comparison], str]] = {
        "markdown": show.markdown,
        "csv": lambda table: show.csv_text(table).removesuffix("\n"),
        "latex": latex,
        "json": lambda table: json.dumps(table.as_dict()),
    }
    if form:
        print(texts[form](found))
    else:
        open_screen().print(show.SideBySide(found), soft_wrap=True)


def write_report(found: Comparison, path: Path, in_browser: bool) -> None:
    """Write the report of all finished runs, if there are any."""
    runs = sorted({result.directory for row in found.rows for result in row.results})
    if not runs:
        return
    from fedstrata.report import write
    from fedstrata.runs.reader import SavedRun

    page = write([SavedRun.read(Path(run)) for run in runs], path)
    if in_browser:
        open_in_browser(page.resolve().as_uri())
