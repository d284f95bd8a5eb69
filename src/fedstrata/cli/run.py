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
    Json,
    Open,
    Out,
    Profile,
    Quiet,
    Report,
    Sets,
    TensorBoard,
    config_of,
    numbers,
    open_screen,
    with_fields,
)
from fedstrata.cli.report import browse
from fedstrata.config.identity import FREE, LOOKING
from fedstrata.config.schema import RunConfig, checked
from fedstrata.config.toml import read_toml
from fedstrata.core.text import percent, plural
from fedstrata.errors import Diverged, Stopped, one_line
from fedstrata.system.signals import begin_work

if TYPE_CHECKING:
    from fedstrata.federation import Federation
    from fedstrata.runs.records import Record

DEMO = {
    "dataset": "digits",
    "model": "cnn2(width=16)",
    "partition": "dirichlet(alpha=0.1)",
    "clients": 10,
    "rounds": 30,
    "epochs": 5,
    "lr": 0.1,
}


def _default_out(config: RunConfig) -> Path:
    from fedstrata.runs.directory import fresh_directory

    slug = re.sub(r"[^a-z0-9.]+", "-", f"{config.dataset}-{config.method}".lower()).strip("-")
    return fresh_directory(Path("runs"), f"{slug[:60]}-seed{config.seed}")


@with_fields
def run(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]", show_default=False)] = None,
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

    settings = config_of(config, given, sets)
    if tensorboard:
        _events_writer(None)
    opened = partial(open_run, settings, out or _default_out(settings), profile=profile)
    _follow(opened, lambda: settings, _Wish(quiet, as_json, tensorboard, report, open_))


@partial(with_fields, of=FREE | LOOKING)
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
    """Continue a run that was stopped or killed; the result is the same, bit for bit."""
    from fedstrata.run import resume_run

    opened = partial(resume_run, directory, profile, **numbers(given))
    _follow(
        opened,
        lambda: checked(RunConfig, read_toml(directory / "run.toml")),
        _Wish(quiet, as_json, tensorboard, report, open_),
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

    config = checked(RunConfig, DEMO)
    opened = partial(open_run, config, out or fresh_directory(Path("runs"), "demo"))
    _follow(opened, lambda: config, _Wish(quiet, as_json, False, report, open_))


@dataclass(frozen=True)
class _Wish:
    """What a user wants to see of a run."""

    quiet: bool
    as_json: bool
    tensorboard: bool
    report: bool
    open: bool


def _follow(opened: Callable[[], Federation], config: Callable[[], RunConfig], wish: _Wish) -> None:
    """Open a run, and show it to its end; nothing is imported once its directory is there."""
    from fedstrata.cli import console
    from fedstrata.runs.directory import RunDirectory

    federation = opened()
    screen = open_screen()
    listeners: list[Callable[[Record], None]] = []
    silent = wish.quiet or wish.as_json

    def hear(record: Record) -> None:
        for listener in listeners:
            listener(record)

    begin_work()
    try:
        writer = _events_writer(federation) if wish.tensorboard else None
        listeners += [] if writer is None else [writer]
        if silent:
            for note in federation.notes:
                print(f"fedstrata: note: {one_line(note)}", file=sys.stderr)
            history = federation.fit(hear)
        else:
            said = config()
            rows = {"data": f"{said.dataset}, {said.partition}", "model": said.archs or said.model}
            screen.print(console.header(federation, rows))
            with console.Watcher(screen, federation) as watcher:
                listeners.append(watcher.record)
                history = federation.fit(hear)
    except KeyboardInterrupt:
        again = f"; go on with: {RunDirectory(federation.out).resume_command}" if federation.out else ""
        raise Stopped(f"stopped after round {federation.state.round}{again}") from None
    except Diverged:
        _report(federation, wish)
        raise
    if wish.as_json:
        spent = dict(zip(("main", "workers"), federation.spent, strict=True))
        print(
            json.dumps({**history.summary, "out": str(federation.out)} | ({"profile": spent} if spent["main"] else {}))
        )
    elif wish.quiet:
        accuracy = percent(history.accuracy)
        rounds = plural(len(history.records), "round")
        print(f"accuracy {accuracy} after {rounds}; files in {federation.out}")
    else:
        screen.print(console.summary(history, federation.out, wish.report))
    if federation.clock is not None and not wish.as_json:
        screen.print(console.profile(*federation.spent, len(history.records)))
    _report(federation, wish)


def _report(federation: Federation, wish: _Wish) -> None:
    """Write the report of a run that has ended, and show it; the run is good even if that fails."""
    if not wish.report or federation.out is None:
        return
    from fedstrata.report import write
    from fedstrata.runs.reader import SavedRun

    try:
        page = write([SavedRun.read(federation.out)], federation.out / "report.html")
        if wish.open:
            browse(page.resolve().as_uri())
    except Exception as error:
        print(f"fedstrata: note: the report failed: {one_line(str(error) or repr(error), 300)}", file=sys.stderr)


def _events_writer(federation: Federation | None) -> Callable[[Record], None] | None:
    from fedstrata.runs.tensorboard import event_writer

    return event_writer(None, 0) if federation is None else event_writer(federation.out, len(federation.records))
