"""`fedstrata run` and `resume`."""

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
    Track,
    open_screen,
    parse_numbers,
    read_config,
    with_fields,
)
from fedstrata.cli.report import open_in_browser
from fedstrata.config.identity import EXECUTION_FIELDS, PROBE_FIELDS
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.config.toml import read_toml
from fedstrata.core.spec import parse_call
from fedstrata.core.text import metric_text, metric_title, plural
from fedstrata.errors import Diverged, Stopped, one_line
from fedstrata.system.signals import begin_work

if TYPE_CHECKING:
    from rich.console import Console

    from fedstrata.federation import Federation
    from fedstrata.runs.callbacks import Callback, RecordListener
    from fedstrata.runs.records import History
    from fedstrata.tracking.kinds import TrackerKind
    from fedstrata.tracking.tracker import Tracker

NO_TRACKER = "none"
"""What `resume --track` takes for: not even with those that the run was logged with."""
MORE_ROUNDS = "rounds in all, if there are to be more than the run was to have so far"


@with_fields
def run(
    config: Config = None,
    out: Out = None,
    sets: Sets = None,
    quiet: Quiet = False,
    as_json: Json = False,
    track: Track = None,
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
    trackers = _build_trackers(_read_trackers(track, tensorboard), report)
    open_federation = partial(open_run, settings, out or _default_out(settings), profile=profile)
    _follow(open_federation, lambda: settings, _OutputOptions(quiet, as_json, trackers, report, open_))


@partial(with_fields, of=EXECUTION_FIELDS | PROBE_FIELDS | {"rounds"}, about={"rounds": MORE_ROUNDS})
def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a run's directory", show_default=False)],
    quiet: Quiet = False,
    as_json: Json = False,
    track: Track = None,
    tensorboard: TensorBoard = False,
    profile: Profile = False,
    report: Report = True,
    open_: Open = False,
    *,
    given: dict[str, Any],
) -> None:
    """Continue a run that was stopped or killed, with the same bits; or let one go on beyond its end."""
    from fedstrata.run import resume_run

    trackers = _trackers_to_go_on_with(directory, track, tensorboard, report)
    open_federation = partial(resume_run, directory, profile, **parse_numbers(given))
    _follow(
        open_federation,
        lambda: validate_settings(RunConfig, read_toml(directory / "run.toml")),
        _OutputOptions(quiet, as_json, trackers, report, open_),
    )


def _default_out(config: RunConfig) -> Path:
    from fedstrata.runs.directory import fresh_directory

    path = dict(parse_call(config.dataset).kwargs).get("path")  # a whole one is no name
    data = Path(path).stem if isinstance(path, str) else config.dataset
    slug = re.sub(r"[^a-z0-9.]+", "-", f"{data}-{config.method}".lower()).strip("-")
    return fresh_directory(Path("runs"), f"{slug[:60]}-seed{config.seed}")


@dataclass(frozen=True)
class _OutputOptions:
    """What the user wants to see of a run."""

    quiet: bool
    as_json: bool
    trackers: list[Tracker]
    report: bool
    open: bool


def _follow(open_federation: Callable[[], Federation], config: Callable[[], RunConfig], wanted: _OutputOptions) -> None:
    """Open a run, and show it to its end; nothing is imported once its directory is there."""
    from fedstrata.cli import console  # noqa: F401 – imported here, before the directory is there
    from fedstrata.progress import terminal  # noqa: F401
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
        _show_report(federation, wanted)
        raise
    _print_result(federation, history, screen, wanted)
    _show_report(federation, wanted)


def _fit(federation: Federation, config: Callable[[], RunConfig], screen: Console, wanted: _OutputOptions) -> History:
    """Train to the end; show the rounds as far as the user wants to see them."""
    from fedstrata.cli import console
    from fedstrata.progress.terminal import build_progress
    from fedstrata.report.writer import ReportWriter

    callbacks: list[Callback | RecordListener] = [ReportWriter(_note)] if wanted.report else []
    callbacks += wanted.trackers
    if wanted.quiet or wanted.as_json:
        told = federation.notes
        for note in told:
            _note(note)
        history = federation.fit(*callbacks, progress=False)
        for note in federation.notes[len(told) :]:
            _note(note)
        return history
    settings = config()
    rows = {"data": f"{settings.dataset}, {settings.partition}", "model": settings.archs or settings.model}
    screen.print(console.header(federation, rows))
    return federation.fit(build_progress(screen, transient=True), *callbacks, progress=False)


def _note(text: str) -> None:
    """Tell of something that does not stop the run."""
    print(f"fedstrata: note: {one_line(text)}", file=sys.stderr)


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


def _show_report(federation: Federation, wanted: _OutputOptions) -> None:
    """Open the report of a run that has ended, if the user wants to see it and it could be written."""
    page = None if federation.out is None else federation.out / "report.html"
    if wanted.open and wanted.report and page is not None and page.exists():
        try:
            open_in_browser(page.resolve().as_uri())
        except Exception as error:
            _note(f"the report failed: {str(error) or repr(error)}")


def _read_trackers(track: list[str] | None, tensorboard: bool) -> list[TrackerKind]:
    """The trackers that the options name."""
    from fedstrata.tracking.kinds import read_trackers

    return read_trackers([*(track or []), *(["tensorboard"] if tensorboard else [])])


def _build_trackers(kinds: list[TrackerKind], report: bool) -> list[Tracker]:
    """What logs with them; refused before anything is made if a library is missing."""
    from fedstrata.tracking.tracker import Tracker

    return [Tracker(kind, tell=_note, report=report) for kind in kinds]


def _trackers_to_go_on_with(directory: Path, track: list[str] | None, tensorboard: bool, report: bool) -> list[Tracker]:
    """What logs a run that goes on: the trackers that are named, or else those that it was logged with before."""
    from fedstrata.tracking.tracker import trackers_of

    if track == [NO_TRACKER]:
        return []
    named = _read_trackers(track, tensorboard)
    if named:
        return _build_trackers(named, report)
    before = trackers_of(directory)
    for kind in before:
        if not kind.is_installed:
            _note(f"{kind.missing}; the run goes on without it")
    return _build_trackers([kind for kind in before if kind.is_installed], report)
