"""`fedstrata compare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.completion import complete_setting, complete_table
from fedstrata.cli.options import Config, Jobs, Json, Open, Report, Sets, open_screen, parse_numbers, with_fields
from fedstrata.cli.panels import OUTPUT
from fedstrata.cli.report import open_in_browser
from fedstrata.config.toml import read_toml
from fedstrata.errors import FedstrataError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from fedstrata.compare import Comparison, Plan

WHAT = "What to compare"
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


@with_fields
def compare(
    config: Config = None,
    methods: Methods = None,
    seeds: Seeds = None,
    vary: Vary = None,
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
    from fedstrata.compare import merge_options, plan, show, tabulate

    values = {} if config is None else read_toml(config)
    joined = "; ".join(methods) if methods else None
    grid = plan(merge_options(values, parse_numbers(given), joined, seeds or [], vary or [], sets or []), out)
    if cite:
        _print_bibtex(grid)
        return
    failures = {} if table_only else _run_missing(grid, jobs, open_screen(stderr=bool(form), quiet=quiet))
    found = tabulate(grid, failures)
    wrong = [error for error in failures.values() if isinstance(error, UsageError)]
    if wrong and len(wrong) == len({run.directory for run in grid.runs}):
        raise wrong[0]  # the input fits no run, so there is nothing to show
    _show(found, form)
    if report:
        _write_report(found, out / "report.html", open_)
    if failures:
        raise FedstrataError(show.failure_text(found))


def _chosen_form(**asked: bool) -> str:
    """What is printed; empty for the table as people read it."""
    chosen = [name for name, wanted in asked.items() if wanted]
    if len(chosen) > 1:
        raise UsageError("--markdown, --csv, --latex, --json and --cite exclude each other: give one of them")
    return "".join(chosen)


def _print_bibtex(grid: Plan) -> None:
    from fedstrata.compare.cite import bibtex

    print(bibtex(grid))


def _run_missing(grid: Plan, jobs: int, screen: Console) -> dict[Path, FedstrataError]:
    from fedstrata.compare import run_missing, show

    with show.RunsWatcher(screen, grid) as watcher:
        return run_missing(grid, jobs, watcher.hear)


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


def _write_report(found: Comparison, path: Path, in_browser: bool) -> None:
    """Write the report of all finished runs, if there are any."""
    runs = sorted({result.directory for row in found.rows for result in row.results})
    if not runs:
        return
    from fedstrata.report import write
    from fedstrata.runs.reader import SavedRun

    page = write([SavedRun.read(Path(run)) for run in runs], path)
    if in_browser:
        open_in_browser(page.resolve().as_uri())
