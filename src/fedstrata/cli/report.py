"""`fedstrata report`, `fedstrata plot` and `fedstrata watch`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedstrata.errors import UsageError, one_of

Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN…", help="runs' directories, or a directory of several runs", show_default=False),
]


def report(
    runs: Runs,
    out: Annotated[
        Path | None, typer.Option(help="the file [default: RUN/report.html, or report.html beside several runs]")
    ] = None,
    title: Annotated[str | None, typer.Option(help="of the page [default: what was run on which data]")] = None,
    open_: Annotated[bool, typer.Option("--open", help="show it in the browser")] = False,
) -> None:
    """Write one HTML file with everything about a run, or about several side by side."""
    from fedstrata.report import write
    from fedstrata.runs.reader import SavedRun

    directories = run_directories(runs)
    path = out or _default_directory(runs, directories) / "report.html"
    _check_file(path)
    write([SavedRun.read(directory) for directory in directories], path, title)
    print(path)
    if open_:
        open_in_browser(path.resolve().as_uri())


def plot(
    runs: Runs,
    out: Annotated[
        Path | None, typer.Option(help="directory for the files [default: RUN/plots, or plots beside several runs]")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="pdf, png or svg")] = "pdf",
) -> None:
    """Write a report's figures as files for papers."""
    from fedstrata.report.plots import FORMATS, check_plots
    from fedstrata.report.plots import plot as write_plots
    from fedstrata.runs.reader import SavedRun

    one_of("plot", FORMATS, format=format_)
    check_plots()
    directories = run_directories(runs)
    out = out or _default_directory(runs, directories) / "plots"
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} already exists and is not a directory")
    for path in write_plots([SavedRun.read(directory) for directory in directories], out, format_):
        print(path)


def watch(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="a run's directory, or a directory of several runs", show_default=False),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to serve on; 0 for any free one")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="show it in the browser")] = False,
) -> None:
    """Serve a run's report while it is running, to this machine only; Ctrl-C ends it."""
    from fedstrata.report.watch import serve

    def tell(address: str) -> None:
        print(f"{address} shows {run}; Ctrl-C ends it", flush=True)
        if open_:
            open_in_browser(address)

    serve(run, port, [tell])


def run_directories(paths: Sequence[Path]) -> list[Path]:
    """The directories of the runs that paths name, each once."""
    from fedstrata.report.watch import runs_in

    if not paths:
        raise UsageError("say which run: its directory, or a directory of several runs")
    found = {path.resolve(): path for given in paths for path in runs_in(given)}
    return list(found.values())


def _default_directory(given: Sequence[Path], runs: Sequence[Path]) -> Path:
    """Where files about these runs go by default."""
    if len(given) == 1:
        return given[0]
    if len(runs) == 1:
        return runs[0]
    parents = {run.resolve().parent for run in runs}
    return Path(os.path.relpath(parents.pop())) if len(parents) == 1 else Path()


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a directory: give the name of a file, as in --out {path / 'report.html'}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no directory {path.parent} for {path.name}")


def open_in_browser(address: str) -> None:
    """Show an address in the user's browser.

    Raises:
        UsageError: if there is no browser.
    """
    import webbrowser

    if not webbrowser.open(address):
        raise UsageError(f"no browser was found; open {address} yourself")
