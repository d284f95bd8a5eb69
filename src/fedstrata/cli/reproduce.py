"""`fedstrata reproduce`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstrata.cli.completion import complete_from
from fedstrata.cli.options import DataDir, Jobs, Sets, open_screen
from fedstrata.core.text import plural
from fedstrata.errors import FedstrataError, Stopped, UsageError

PAPERS = ("fedpart", "fednlr", "fedimpro", "inco", "deeper", "together")
SCALES = ("smoke", "small", "evidence", "paper")
"""As in `fedstrata.reproduce`, which takes long to import, for the help."""

Paper = Annotated[
    str,
    typer.Argument(
        metavar="PAPER",
        help=", ".join(PAPERS),
        show_default=False,
        autocompletion=complete_from(lambda: PAPERS),
    ),
]
Scale = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(SCALES)}: seconds, half an hour or three hours on two cores, a GPU",
        autocompletion=complete_from(lambda: SCALES),
    ),
]
Out = Annotated[Path | None, typer.Option(help="directory for runs and report; finished runs are not repeated")]
Parts = Annotated[
    list[str] | None,
    typer.Option("--parts", "--only", metavar="A,B,…", help="only these parts of the paper"),
]
Seeds = Annotated[
    list[str] | None, typer.Option(metavar="N | 1,2,…", help="how many seeds, or which, instead of the scale's")
]
PlanOnly = Annotated[bool, typer.Option("--plan", help="print runs and estimated minutes; make nothing")]
NoRun = Annotated[bool, typer.Option("--no-run", help="report on what is finished; make nothing")]
OnlyFindings = Annotated[bool, typer.Option("--quiet", help="print only the tables and claims")]


def reproduce(
    paper: Paper,
    scale: Scale = "smoke",
    data_dir: DataDir = None,
    out: Out = None,
    jobs: Jobs = 1,
    only: Parts = None,
    seeds: Seeds = None,
    sets: Sets = None,
    plan: PlanOnly = False,
    no_run: NoRun = False,
    quiet: OnlyFindings = False,
) -> None:
    """Repeat a paper's experiments: its tables, and for each claim whether it holds."""
    if plan and no_run:
        raise UsageError("--plan and --no-run exclude each other: give one of them")
    from fedstrata import reproduce as reproductions
    from fedstrata.compare import show

    screen = open_screen(quiet=quiet)
    request: dict[str, Any] = {
        "data_dir": data_dir,
        "out": out,
        "jobs": jobs,
        "only": [name.strip() for text in only or () for name in text.split(",") if name.strip()],
        "seeds": None if not seeds else reproductions.parse_seeds(seeds),
        "sets": sets or (),
        "say": screen.print,
    }
    if plan:
        open_screen().print(reproductions.outlook(paper, scale, **request))
        return
    watch = partial(show.RunsWatcher, screen)
    try:
        found = reproductions.reproduce(paper, scale, **request, run=not no_run, watch=watch, on_plan=screen.print)
    except (KeyboardInterrupt, Stopped):
        kept = "the same command goes on" if out else "nothing is kept without --out, so the same command begins anew"
        raise Stopped(f"stopped; {kept}") from None
    open_screen().print(found, soft_wrap=True)
    if found.failures:
        raise FedstrataError(f"{plural(len(found.failures), 'run')} failed: {next(iter(found.failures.values()))}")
