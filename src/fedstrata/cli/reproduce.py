"""`fedstrata reproduce`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedstrata.cli.options import DataDir, Jobs, open_screen
from fedstrata.core.text import plural
from fedstrata.errors import FedstrataError, Stopped

PAPERS = ("fedpart", "fednlr", "fedimpro", "inco", "deeper")
SCALES = ("smoke", "small", "paper")
"""As in `fedstrata.reproduce`, which takes long to import, for the help."""


def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help=", ".join(PAPERS), show_default=False)],
    scale: Annotated[
        str, typer.Option(help=f"{', '.join(SCALES)}: seconds, half an hour on two cores, a GPU")
    ] = "smoke",
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="directory for runs and report; finished runs are not repeated")
    ] = None,
    jobs: Jobs = 1,
    only: Annotated[
        list[str] | None, typer.Option(metavar="PART", help="only this part of the paper; may be repeated")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print only the tables and claims")] = False,
) -> None:
    """Repeat a paper's experiments: its tables, and for each claim whether it holds."""
    from fedstrata.compare import show
    from fedstrata.reproduce import reproduce as reproduce_paper

    screen = open_screen(quiet=quiet)
    watch = partial(show.RunsWatcher, screen)
    try:
        found = reproduce_paper(
            paper, scale, data_dir=data_dir, out=out, jobs=jobs, only=only or (), watch=watch, say=screen.print
        )
    except (KeyboardInterrupt, Stopped):
        kept = "the same command goes on" if out else "nothing is kept without --out, so the same command begins anew"
        raise Stopped(f"stopped; {kept}") from None
    open_screen().print(found, soft_wrap=True)
    if found.failures:
        raise FedstrataError(f"{plural(len(found.failures), 'run')} failed: {next(iter(found.failures.values()))}")
