"""`fedstrata run`, `resume` and `demo`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.options import (
    Config,
    Json,
    Open,
    Out,
    Profile,
    Quiet,
    Report,
    Sets,
    TensorBoard,
    open_screen,
    parse_numbers,
    read_config,
    with_fields,
)
from fedstrata.cli.report import open_in_browser
from fedstrata.config.identity import EXECUTION_FIELDS, PROBE_FIELDS
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.config.toml import read_toml
from fedstrata.core.text import metric_text, metric_title, plural
from fedstrata.errors import Diverged, Stopped, one_line
from fedstrata.system.signals import begin_work

if TYPE_CHECKING:
    from rich.console import Console

    from fedstrata.federation import Federation
    from fedstrata.runs.records import History, Record

DEMO = {
    "dataset": "digits",
    "model": "cnn2(width=16)",
    "partition": "dirichlet(alpha=0.1)",
    "clients": 10,
    "rounds": 30,
    "epochs": 5,
    "lr": 0.1,
}
MORE_ROUNDS = "rounds in all, if there are to be more than the run was to have so far"


@with_fields
def run(
    config: Config = None,
    out: Out = None,
    sets: Sets = None,
    quiet: Quiet = False,
    as_json: Json = False,
    tensorboard: TensorBoard = False,
    profile: Profile = False,
    report: Report = True,
    open_: Open = False,
    *,
    given: dict[str, Any],
) -> None:
    """Train a federation, from a TOML file, from options, or both (options win)."""
    from fedstrata.run import open_run

    settings = read_config(config, given, sets)
    if tensorboard:
        _events_writer(None)
    open_federation = partial(open_run, settings, out or _default_out(settings), profile=profile)
    _follow(open_federation, lambda: settings, _OutputOptions(quiet, as_json, tensorboard, report, open_))


@partial(with_fields, of=EXECUTION_FIELDS | PROBE_FIELDS | {"rounds"}, about={"rounds": MORE_ROUNDS})
def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a run's directory", show_default=False)],
    quiet: Quiet = False,
    as_json: Json = False,
    tensorboard: TensorBoard = False,
    profile: Profile = False,
    report: Report = True,
    open_: Open = False,
    *,
    given: dict[str, Any],
) -> None:
    """Continue a run that was stopped or killed, with the same bits; or let one go on beyond its end."""
    from fedstrata.run import resume_run

    open_federation = partial(resume_run, directory, profile, **parse_numbers(given))
    _follow(
        open_federation,
        lambda: validate_settings(RunConfig, read_toml(directory / "run.toml")),
        _OutputOptions(quiet, as_json, tensorboard, report, open_),
    )


def demo(
    out: Out = None,
    quiet: Quiet = False,
    as_json: Json = False,
    report: Report = True,
    open_: Open = False,
) -> None:
    """Train ten clients on real digits that come with the package, in under a minute."""
    from fedstrata.run import open_run
    from fedstrata.runs.directory import fresh_directory

    config = validate_settings(RunConfig, DEMO)
    open_federation = partial(open_run, config, out or fresh_directory(Path("runs"), "demo"))
    _follow(open_federation, lambda: config, _OutputOptions(quiet, as_json, False, report, open_))


def _default_out(config: RunConfig) -> Path:
    from fedstrata.runs.directory import fresh_directory

    slug = re.sub(r"[^a-z0-9.]+", "-", f"{config.dataset}-{config.method}".lower()).strip("-")
    return fresh_directory(Path("runs"), f"{slug[:60]}-seed{config.seed}")


@dataclass(frozen=True)
class _OutputOptions:
    """What the user wants to see of a run."""

    quiet: bool
    as_json: bool
    tensorboard: bool
    report: bool
    open: bool


def _follow(open_federation: Callable[[], Federation], config: Callable[[], RunConfig], wanted: _OutputOptions) -> None:
    """Open a run, and show it to its end; nothing is imported once its directory is there."""
    from fedstrata.cli import console  # noqa: F401 – imported here, before the directory is there
    from fedstrata.runs.directory import RunDirectory

    federation = open_federation()
    screen, rounds = open_screen(), federation.settings.rounds
    begin_work()
    try:
        history = _fit(federation, config, screen, wanted)
    except KeyboardInterrupt:
        again = f"; go on with: {RunDirectory(federation.out).resume_command(rounds)}" if federation.out else ""
        raise Stopped(f"stopped after round {federation.state.round}{again}") from None
    except Diverged:
        _report(federation, wanted)
        raise
    _print_result(federation, history, screen, wanted)
    _report(federation, wanted)


def _fit(federation: Federation, config: Callable[[], RunConfig], screen: Console, wanted: _OutputOptions) -> History:
    """Train to the end; show the rounds as far as the user wants to see them."""
    from fedstrata.cli import console

    listeners: list[Callable[[Record], None]] = []

    def hear(record: Record) -> None:
        for listener in listeners:
            listener(record)

    writer = _events_writer(federation) if wanted.tensorboard else None
    listeners += [] if writer is None else [writer]
    if wanted.quiet or wanted.as_json:
        for note in federation.notes:
            print(f"fedstrata: note: {one_line(note)}", file=sys.stderr)
        return federation.fit(hear)
    settings = config()
    rows = {"data": f"{settings.dataset}, {settings.partition}", "model": settings.archs or settings.model}
    screen.print(console.header(federation, rows))
    with console.RoundsWatcher(screen, federation) as watcher:
        listeners.append(watcher.record)
        return federation.fit(hear)


def _print_result(federation: Federation, history: History, screen: Console, wanted: _OutputOptions) -> None:
    from fedstrata.cli import console

    if wanted.as_json:
        spent = dict(zip(("main", "workers"), federation.spent, strict=True))
        profile = {"profile": spent} if spent["main"] else {}
        print(json.dumps({**history.summary, "out": str(federation.out), **profile}))
        return
    if wanted.quiet:
        rounds = plural(len(history.records), "round")
        metric = history.summary["metric"]
        score = f"{metric_title(metric)} {metric_text(metric, history.score)}"
        print(f"{score} after {rounds}; files in {federation.out}")
    else:
        screen.print(console.summary(history, federation.out, wanted.report, federation.client_names))
    if federation.clock is not None:
        screen.print(console.profile(*federation.spent, len(history.records)))


def _report(federation: Federation, wanted: _OutputOptions) -> None:
    """Write the report of a run that has ended, and show it; the run is good even if that fails."""
    if not wanted.report or federation.out is None:
        return
    from fedstrata.report import write
    from fedstrata.runs.reader import SavedRun

    try:
        page = write([SavedRun.read(federation.out)], federation.out / "report.html")
        if wanted.open:
            open_in_browser(page.resolve().as_uri())
    except Exception as error:
        print(f"fedstrata: note: the report failed: {one_line(str(error) or repr(error), 300)}", file=sys.stderr)


def _events_writer(federation: Federation | None) -> Callable[[Record], None] | None:
    from fedstrata.runs.tensorboard import event_writer

    return event_writer(None, 0) if federation is None else event_writer(federation.out, len(federation.records))
