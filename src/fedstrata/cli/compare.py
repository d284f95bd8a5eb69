"""`fedstrata compare` and `reproduce`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.options import Json, Open, Report, Sets, open_screen, parse_numbers, with_fields
from fedstrata.cli.report import open_in_browser
from fedstrata.config.toml import read_toml
from fedstrata.core.text import plural
from fedstrata.errors import FedstrataError, Stopped, UsageError

if TYPE_CHECKING:
    from fedstrata.compare import Comparison

PAPERS = ("fedpart", "fednlr", "fedimpro", "inco", "deeper")
SCALES = ("smoke", "small", "paper")
"""As in `fedstrata.reproduce`, which takes long to import, for the help."""


@with_fields
def compare(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]", show_default=False)] = None,
    methods: Annotated[
        list[str] | None, typer.Option(metavar="A; B; …", help="what to compare: 'fedavg; fedprox(mu=0.01)'")
    ] = None,
    seeds: Annotated[
        list[str] | None, typer.Option(metavar="0 1 2 …", help="run every method with each of these seeds")
    ] = None,
    vary: Annotated[
        list[str] | None, typer.Option(metavar="NAME=A; B; …", help="any other field with several values: 'lr=0.1; 1'")
    ] = None,
    out: Annotated[Path, typer.Option(help="directory for all runs; finished ones are not run again")] = Path(
        "runs/compare"
    ),
    sets: Sets = None,
    jobs: Annotated[int, typer.Option(min=1, help="how many runs at once, each in its own process")] = 1,
    table_only: Annotated[
        bool, typer.Option("--table-only", "--no-run", help="show finished runs; run nothing")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="print only the table")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print the table as Markdown")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="print the table as CSV, plain numbers")] = False,
    as_json: Json = False,
    report: Report = True,
    open_: Open = False,
    *,
    given: dict[str, Any],
) -> None:
    """Run methods × seeds (and any other field), leaving out what is finished, and print the table."""
    if as_markdown + as_csv + as_json > 1:
        raise UsageError("--markdown, --csv and --json exclude each other: give one of them")
    from fedstrata.compare import merge_options, plan, run_missing, show, tabulate

    values = {} if config is None else read_toml(config)
    grid = plan(
        merge_options(
            values, parse_numbers(given), "; ".join(methods) if methods else None, seeds or [], vary or [], sets or []
        ),
        out,
    )
    failures = {}
    if not table_only:
        plain = as_markdown or as_csv or as_json
        watcher = show.RunsWatcher(open_screen(stderr=plain, quiet=quiet), grid)
        with watcher:
            failures = run_missing(grid, jobs, watcher.hear)
    found = tabulate(grid, failures)
    wrong = [error for error in failures.values() if isinstance(error, UsageError)]
    if wrong and len(wrong) == len({run.directory for run in grid.runs}):
        raise wrong[0]  # the input fits no run, so there is nothing to show
    _show(found, as_markdown, as_csv, as_json)
    runs = sorted({result.directory for row in found.rows for result in row.results})
    if report and runs:
        from fedstrata.report import write
        from fedstrata.runs.reader import SavedRun

        page = write([SavedRun.read(Path(run)) for run in runs], out / "report.html")
        if open_:
            open_in_browser(page.resolve().as_uri())
    if failures:
        raise FedstrataError(show.failure_text(found))


def _show(found: Comparison, as_markdown: bool, as_csv: bool, as_json: bool) -> None:
    from fedstrata.compare import show

    if as_json:
        print(json.dumps(found.as_dict()))
    elif as_csv:
        print(show.csv_text(found), end="")
    elif as_markdown:
        print(show.markdown(found))
    else:
        open_screen().print(show.SideBySide(found), soft_wrap=True)


def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help=", ".join(PAPERS), show_default=False)],
    scale: Annotated[
        str, typer.Option(help=f"{', '.join(SCALES)}: seconds, half an hour on two cores, a GPU")
    ] = "smoke",
    data_dir: Annotated[
        str | None, typer.Option(help="where the dataset's files are; otherwise FEDSTRATA_DATA")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="directory for runs and report; finished runs are not repeated")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="how many runs at once, each in its own process")] = 1,
    only: Annotated[
        list[str] | None, typer.Option(metavar="PART", help="only this part of the paper; may be repeated")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print only the tables and claims")] = False,
) -> None:
    """Repeat a paper's experiments: its tables, and for each claim whether it holds."""
    from fedstrata.compare import show
    from fedstrata.reproduce import reproduce as reproduced

    screen = open_screen(quiet=quiet)
    watch = functools.partial(show.RunsWatcher, screen)
    try:
        found = reproduced(
            paper, scale, data_dir=data_dir, out=out, jobs=jobs, only=only or (), watch=watch, say=screen.print
        )
    except (KeyboardInterrupt, Stopped):
        kept = "the same command goes on" if out else "nothing is kept without --out, so the same command begins anew"
        raise Stopped(f"stopped; {kept}") from None
    open_screen().print(found, soft_wrap=True)
    if found.failures:
        raise FedstrataError(f"{plural(len(found.failures), 'run')} failed: {next(iter(found.failures.values()))}")
