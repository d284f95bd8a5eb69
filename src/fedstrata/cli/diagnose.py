"""`fedstrata diagnose`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.options import Json, Sets, open_screen, read_config, with_fields
from fedstrata.cli.panels import OUTPUT
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from fedstrata.diagnosis import Diagnosis
    from fedstrata.runs.reader import SavedRun
    from fedstrata.runs.tried import Tried
    from fedstrata.trials.choice import Budget

TRIED = 3
"""How many remedies `--try` tries, unless it is told."""
SEEDS = 3
REPORT = "report.html"
TRIALS = "Trying the remedies"
Try = Annotated[
    int | None,
    typer.Option(
        "--try",
        metavar="[N]",
        min=1,
        help="run the N best remedies (3) and references, and tell what they bring",
        rich_help_panel=TRIALS,
    ),
]
TryRounds = Annotated[
    int | None,
    typer.Option(min=1, help="rounds of each trial [default: the run's, at most 10]", rich_help_panel=TRIALS),
]
TrySeeds = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"seeds of each trial: the run's own and those that follow it [default: {SEEDS}]",
        rich_help_panel=TRIALS,
    ),
]
TryJobs = Annotated[
    int, typer.Option(min=1, help="how many runs at once, each in its own process", rich_help_panel=TRIALS)
]
Markdown = Annotated[bool, typer.Option("--markdown", help="print Markdown, with all remedies", rich_help_panel=OUTPUT)]


@with_fields
def diagnose(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN|CONFIG.toml]", help="a run's directory, or a configuration", show_default=False),
    ] = None,
    probing_rounds: Annotated[int, typer.Option(min=1, help="rounds to train and measure if nothing was measured")] = 3,
    try_: Try = None,
    try_rounds: TryRounds = None,
    try_seeds: TrySeeds = None,
    jobs: TryJobs = 1,
    sets: Sets = None,
    as_markdown: Markdown = False,
    as_json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Say what is wrong with a run, or with what a configuration would run, layer by layer, and what to try."""
    if as_markdown and as_json:
        raise UsageError("--markdown and --json exclude each other: give one of them")
    alone = {"--try-rounds": try_rounds, "--try-seeds": try_seeds, "--jobs": None if jobs == 1 else jobs}
    if try_ is None and (given_alone := [name for name, value in alone.items() if value is not None]):
        raise UsageError(f"{given_alone[0]} is for what --try runs: give --try, too")
    if run is not None and run.is_dir():
        saved = _measured_run(run, given, sets, probing_rounds)
        if try_ is not None:
            from fedstrata.trials.choice import Budget

            _try_remedies(run, saved, Budget(try_, try_rounds, try_seeds or SEEDS), jobs, given.get("data_dir"))
        _print(_diagnose(saved), as_markdown, as_json, run if try_ is not None else None)
        return
    if try_ is not None:
        raise UsageError("--try needs the directory of a run: run the configuration first")
    from fedstrata.run import open_run

    _print(open_run(read_config(run, given, sets), None).diagnose(probing_rounds), as_markdown, as_json)


def _diagnose(saved: SavedRun) -> Diagnosis:
    from fedstrata.diagnosis import diagnose as diagnose_saved

    return diagnose_saved(saved)


def _print(found: Diagnosis, as_markdown: bool, as_json: bool, tried_in: Path | None = None) -> None:
    """Show a diagnosis, and below it what was tried."""
    from fedstrata.runs.tried import read_tried

    tried = read_tried(tried_in)
    if as_json:
        print(json.dumps(found.as_dict() | ({} if tried is None else {"tried": tried.model_dump(mode="json")})))
    elif as_markdown:
        print(found.markdown() + _tried_text(tried, "\n```text\n", "\n```\n"), end="")
    else:
        open_screen().print(str(found) + _tried_text(tried, "\n\n"), soft_wrap=True)


def _tried_text(tried: Tried | None, before: str, after: str = "") -> str:
    if tried is None:
        return ""
    from fedstrata.trials.show import tried_text

    return f"{before}{tried_text(tried)}{after}"


def _try_remedies(run: Path, saved: SavedRun, budget: Budget, jobs: int, data_dir: str | None) -> None:
    """Run what the diagnosis advises, and write tried.json; what could not be run is told."""
    from fedstrata.compare.show import RunsWatcher
    from fedstrata.trials.choice import NothingToTry
    from fedstrata.trials.runs import plan_trials, run_trials

    screen = open_screen(stderr=True)
    try:
        plan = plan_trials(run, _diagnose(saved), saved, budget, data_dir)
    except NothingToTry as nothing:
        screen.print(f"fedstrata: {nothing}", soft_wrap=True)
        return
    screen.print(f"Trying {plan}", soft_wrap=True)
    with RunsWatcher(screen, plan.runs) as watcher:
        run_trials(run, plan, saved, jobs, watcher.hear)
    _renew_report(run)


def _renew_report(run: Path) -> None:
    """A page that is there shows what was tried, too."""
    from fedstrata.report import write
    from fedstrata.runs.reader import SavedRun

    if (run / REPORT).exists():
        write([SavedRun.read(run)], run / REPORT)


def _measured_run(run: Path, given: dict[str, Any], sets: list[str] | None, rounds: int) -> SavedRun:
    """A run with its own probes or, if it has none, with those of a few more rounds with its final model."""
    from fedstrata.runs.reader import SavedRun

    saved = SavedRun.read(run)
    others = [name.replace("_", "-") for name in given if name != "data_dir"]
    if others or sets:
        raise UsageError(f"{run} is a run, whose settings are its own: leave --{(others or ['set'])[0]} out")
    if not saved.probes and "dataset" not in saved.config:
        about = "fedstrata: the model and data of this run are not here: what probes would measure is missing"
        print(about, file=sys.stderr)
    elif not saved.probes:
        print(f"fedstrata: {run} has no probes: {rounds} more rounds are trained and measured", file=sys.stderr)
        from fedstrata.run import dry_run_of

        saved = dry_run_of(run, rounds, given.get("data_dir")).put_into(saved)
    return saved
