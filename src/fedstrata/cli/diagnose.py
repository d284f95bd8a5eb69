"""`fedstrata diagnose`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.options import Json, Sets, open_screen, read_config, with_fields
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from fedstrata.diagnosis import Diagnosis


@with_fields
def diagnose(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN|CONFIG.toml]", help="a run's directory, or a configuration", show_default=False),
    ] = None,
    probing_rounds: Annotated[int, typer.Option(min=1, help="rounds to train and measure if nothing was measured")] = 3,
    sets: Sets = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print Markdown, with all remedies")] = False,
    as_json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Say what is wrong with a run, or with what a configuration would run, layer by layer, and what to try."""
    if as_markdown and as_json:
        raise UsageError("--markdown and --json exclude each other: give one of them")
    found = _diagnose_run(run, given, sets, probing_rounds) if run is not None and run.is_dir() else None
    if found is None:
        from fedstrata.run import open_run

        config = read_config(run, given, sets)
        found = open_run(config, None).diagnose(probing_rounds)
    if as_json:
        print(json.dumps(found.as_dict()))
    elif as_markdown:
        print(found.markdown(), end="")
    else:
        open_screen().print(str(found), soft_wrap=True)


def _diagnose_run(run: Path, given: dict[str, Any], sets: list[str] | None, rounds: int) -> Diagnosis:
    """Diagnose a run by its own probes or, if it has none, by a few more rounds with its final model."""
    from fedstrata.diagnosis import diagnose as diagnose_saved
    from fedstrata.runs.reader import SavedRun

    saved = SavedRun.read(run)
    others = [name.replace("_", "-") for name in given if name != "data_dir"]
    if others or sets:
        raise UsageError(f"{run} is a run, whose settings are its own: leave --{(others or ['set'])[0]} out")
    if not saved.probes:
        print(f"fedstrata: {run} has no probes: {rounds} more rounds are trained and measured", file=sys.stderr)
        from fedstrata.run import dry_run_of

        saved = dry_run_of(run, rounds, given.get("data_dir")).put_into(saved)
    return diagnose_saved(saved)
