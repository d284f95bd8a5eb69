"""The command `fedstrata`."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import sys
import traceback
from contextlib import suppress
from typing import Annotated

import typer
import typer.core

from fedstrata import __version__
from fedstrata.cli import compare, demo, diagnose, doctor, list_names, report, reproduce, run, tune
from fedstrata.cli.attack import app as attack_app
from fedstrata.cli.data import app as data_app
from fedstrata.cli.flower import app as flower_app
from fedstrata.cli.machine import app as machine_app
from fedstrata.cli.model import app as model_app
from fedstrata.cli.panels import BriefCommand, PanelCommand, PanelGroup
from fedstrata.config.registries import load_table
from fedstrata.core.extras import extra_of, missing
from fedstrata.errors import FedstrataError, Stopped, one_line
from fedstrata.system import signals

SEVERAL = {"--seeds": r"[\d,]+", "--probe": r"[a-z,]+"}
"""Options that take several words → what such words look like."""

OPTIONAL = {"--try": str(diagnose.TRIED)}
"""Options whose number may be left out → what it is then."""

# Where rich is installed, typer escapes brackets for it, "\\[default: 0]", also in help that rich does not print.
typer.core.HAS_RICH = False

app = typer.Typer(
    cls=PanelGroup,
    help="Federated learning, layer by layer, for PyTorch.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
TRAIN, UNDERSTAND, LOOK, SHARE = "Train", "Understand what was trained", "Look around", "Across sites"
for command in (run.run, run.resume, demo.demo):
    app.command(cls=PanelCommand, rich_help_panel=TRAIN)(command)
app.command(cls=BriefCommand, rich_help_panel=TRAIN)(compare.compare)
app.command(cls=BriefCommand, rich_help_panel=TRAIN)(tune.tune)
app.command(cls=PanelCommand, rich_help_panel=TRAIN)(reproduce.reproduce)
app.command(cls=BriefCommand, rich_help_panel=UNDERSTAND)(diagnose.diagnose)
for command in (report.report, report.watch, report.plot):
    app.command(cls=PanelCommand, rich_help_panel=UNDERSTAND)(command)
app.add_typer(attack_app, name="attack", rich_help_panel=UNDERSTAND)
app.command(name="list", rich_help_panel=LOOK)(list_names.list_)
app.add_typer(data_app, name="data", rich_help_panel=LOOK)
app.add_typer(model_app, name="model", rich_help_panel=LOOK)
app.add_typer(machine_app, name="machine", rich_help_panel=LOOK)
app.command(cls=PanelCommand, rich_help_panel=LOOK)(doctor.doctor)
app.add_typer(flower_app, name="flower", rich_help_panel=SHARE)


def _version(show: bool) -> None:
    if show:
        print(f"fedstrata {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks; may be given anywhere")] = False,
) -> None:
    """Federated learning, layer by layer, for PyTorch."""


def main() -> None:
    """Run the command; a mistake gets one sentence on standard error and exit code 2."""
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1 or bool(os.environ.get("FEDSTRATA_DEBUG"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no '–' gets a '?'
    code = _run_guarded(arguments, debug)
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or _report(error, debug)
    try:
        sys.stderr.flush()
    except OSError:  # a terminal that was closed: nobody reads it, and Python would change the exit code for it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    sys.exit(code)


def _join_values(arguments: list[str]) -> list[str]:
    """Write `--seeds 0 1 2` as `--seeds 0,1,2`, and `--probe` likewise, and `--try` as `--try 3`.

    For an option takes one word.
    """
    words: list[str] = []
    for word in arguments:
        if words and words[-1] in OPTIONAL and not word.lstrip("-").isdecimal():
            words.append(OPTIONAL[words[-1]])
        several = SEVERAL.get(words[-2] if len(words) > 1 else "")
        if several and all(re.fullmatch(several, w) and not _is_file(w) for w in (words[-1], word)):
            words[-1] += f",{word}"
        else:
            words.append(word)
    return [*words, OPTIONAL[words[-1]]] if words and words[-1] in OPTIONAL else words


def _is_file(word: str) -> bool:
    """Whether a word names a file; a probe's name is no file, even if there is one of that name."""
    return os.path.exists(word) and word not in (*load_table("probes"), "all")


def _run_guarded(arguments: list[str], debug: bool) -> int:
    """Run the command, report what goes wrong, and return the exit code."""
    with signals.handle_signals() as stop:
        try:
            code = app(_join_values(arguments), standalone_mode=False, prog_name="fedstrata") or 0
            if code == Stopped.exit_code:  # what typer makes of Ctrl-C
                raise Stopped("stopped")
            return code
        except BaseException as error:
            asked = stop.acknowledge()
            # What went wrong on the way out of an interrupt, such as printing to a closed terminal, is not the news.
            news = Stopped("stopped") if asked and not isinstance(error, FedstrataError) else error
            code = _report(news, debug)
            return stop.code if isinstance(news, Stopped) else code


def _report(error: BaseException, debug: bool) -> int:
    """Say what went wrong, and return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if debug:
        traceback.print_exception(error)
    if isinstance(error, BrokenPipeError):
        return 0
    sentence, code = _sentence_and_code(error)
    with suppress(OSError):  # of a terminal that was closed
        if sentence.startswith("Usage: "):  # a command without its subcommand: the whole help
            print(sentence, file=sys.stderr)
        elif sentence:
            print(f"fedstrata: {one_line(sentence)}", file=sys.stderr)
    return code


def _sentence_and_code(error: BaseException) -> tuple[str, int]:
    if isinstance(error, FedstrataError):
        return str(error), error.exit_code
    if hasattr(error, "format_message"):  # what typer raises for unknown options and values of a wrong type
        return error.format_message(), 2
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "stopped", Stopped.exit_code
    if isinstance(error, ModuleNotFoundError) and (told := _missing_text(error)):
        return told, 2
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 2
    if isinstance(error, MemoryError):
        return "there is not enough memory", 2
    return f"internal error: {type(error).__name__}: {error} (--debug shows where)", 1


def _missing_text(error: ModuleNotFoundError) -> str:
    """Which package is not installed; empty for a part of one that is, which is a mistake of ours."""
    name = (error.name or "fedstrata").partition(".")[0]
    if extra_of(name) is not None:
        return str(missing(name, "this needs"))
    with suppress(ImportError, ValueError):
        if name == "fedstrata" or importlib.util.find_spec(name) is not None:
            return ""
    return f"the package {name} is missing: `fedstrata doctor` says how to install it"


if __name__ == "__main__":
    main()
