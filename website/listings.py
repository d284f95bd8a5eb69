"""Pages that are made of the package: its command's help, what a run can name, and its techniques."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator

import click
import typer.main

from fedstrata.cli.list_names import describe_entry
from fedstrata.cli.main import app
from fedstrata.config.registries import TABLES, load_table
from fedstrata.config.schema import RunConfig, Settings

PAPER = re.compile(r"\b(19|20)\d\d\b")
"""A paragraph with a year in it cites a paper."""


def commands() -> Iterator[tuple[click.Context, click.Command]]:
    """The command and all below it, in the order of its help."""
    top = typer.main.get_command(app)
    waiting = [click.Context(top, info_name="fedstrata")]
    while waiting:
        context = waiting.pop(0)
        yield context, context.command
        below = getattr(context.command, "commands", {})
        waiting[:0] = [click.Context(command, context, info_name=name) for name, command in below.items()]


def command_line() -> str:
    """Every command with its arguments and options, from their help."""
    lines = [
        "# Command line",
        "",
        "What `fedstrata COMMAND --help` says, on one page. `--debug`, anywhere in a line, shows a traceback instead "
        "of one sentence. [A tour](../tour.md) shows commands at work; [Settings](settings.md) lists what "
        "can be set, and [Runs](../runs.md) explains it.",
        "",
    ]
    runs: dict[tuple[str, ...], str] = {}
    for context, command in commands():
        if context.parent is None:
            continue
        options = {tuple(p.opts): _record(p, context) for p in command.params if not isinstance(p, click.Argument)}
        lines += [f"## {context.command_path}", "", _text(command.help), ""]
        if getattr(command, "commands", None):
            continue
        if context.info_name == "run":
            runs = {opts: row for opts, (_, row) in options.items()}
        lines += ["```text", " ".join([context.command_path, *command.collect_usage_pieces(context)]), "```", ""]
        shared = [opts for opts, (_, row) in options.items() if runs.get(opts) == row and context.info_name != "run"]
        if len(shared) < 10:
            shared = []
        lines += _arguments(command, context)
        lines += _panels({opts: row for opts, row in options.items() if opts not in shared})
        if shared:
            names = ", ".join(f"`{opts[0]}`" for opts in shared)
            lines += [f"And, as for [`fedstrata run`](#fedstrata-run): {names}.", ""]
    return "\n".join(lines)


def _record(option: click.Parameter, context: click.Context) -> tuple[str, str]:
    """(panel, row of a table)."""
    flags, told = option.get_help_record(context) or (", ".join(option.opts), "")
    return getattr(option, "rich_help_panel", None) or "Options", f"| `{_cell(flags)}` | {_plain(told)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _plain(text: str) -> str:
    """A cell in which nothing is taken for Markdown."""
    return re.sub(r"([*_\[\]<>])", r"\\\1", _cell(text))


def _text(told: str | None) -> str:
    return inspect.cleandoc(told or "").replace("\f", "")


def _arguments(command: click.Command, context: click.Context) -> list[str]:
    rows = []
    for argument in command.params:
        name, told = (isinstance(argument, click.Argument) and argument.get_help_record(context)) or ("", "")
        if told:
            rows.append(f"| `{_cell(name)}` | {_plain(told)} |")
    return ["| argument | |", "|---|---|", *rows, ""] if rows else []


def _panels(options: dict[tuple[str, ...], tuple[str, str]]) -> list[str]:
    """A table for each panel of the help, in the order in which panels come up."""
    panels: dict[str, list[str]] = {}
    for panel, row in options.values():
        panels.setdefault(panel, []).append(row)
    lines = []
    for panel, rows in panels.items():
        lines += [f"| {panel.lower()} | |", "|---|---|", *rows, ""]
    return lines


def names() -> str:
    """What a run can name: every table with arguments and help."""
    lines = [
        "# What a run can name",
        "",
        "What `fedstrata list WHAT` prints, on one page: every name, its arguments with their defaults, and one line "
        'of help. Arguments are written as in Python: `--model "resnet8(width=16)"`.',
        "",
    ]
    for what in TABLES:
        lines += [f"## {what}", "", "| name | arguments | |", "|---|---|---|"]
        for name, entry in load_table(what).items():
            row = describe_entry(name, entry)
            arguments = f"`{_cell(row['arguments'])}`" if row["arguments"] else ""
            lines.append(f"| `{name}` | {arguments} | {_plain(row['help'])} |")
        lines.append("")
    return "\n".join(lines)


def settings() -> str:
    """Every setting of a run, from the schema."""
    lines = [
        "# Settings",
        "",
        "Every setting has the same name in a TOML file and in Python (`batch_size`), and as an option "
        "(`--batch-size`). [Runs](../runs.md) says more about some of them. "
        "A Federation in Python has the settings of the first table; "
        "its model and data are objects.",
        "",
    ]
    run = {name: field for name, field in RunConfig.model_fields.items() if name not in Settings.model_fields}
    for title, fields in (("How a federation trains", Settings.model_fields), ("What it trains on", run)):
        lines += [f"## {title}", "", "| setting | type | default | |", "|---|---|---|---|"]
        for name, field in fields.items():
            kind = re.sub(
                r"<class '([\w.]+)'>|typing\.", lambda m: (m[1] or "").rpartition(".")[2], str(field.annotation)
            )
            default = "" if field.default is None else f"`{_cell(repr(field.default))}`"
            lines.append(f"| `{name}` | `{_cell(kind)}` | {default} | {_plain(field.description or '')} |")
        lines.append("")
    return "\n".join(lines)


def techniques() -> str:
    """Every technique: its paper, its equation and its arguments, from its docstrings."""
    lines = [
        "# Techniques",
        "",
        "Every technique with its paper, its equation and its arguments, from its docstring. "
        "[Methods](../../methods.md) compares them in one table, says which combine, "
        "and where fedstrata departs from a paper.",
        "",
    ]
    for name, entry in load_table("methods").items():
        home = entry.__module__
        paragraphs = inspect.cleandoc(importlib.import_module(home).__doc__ or "").split("\n\n")
        papers = [" ".join(p.split()) for p in paragraphs[1:] if PAPER.search(p)]
        arguments = describe_entry(name, entry)["arguments"]
        lines += [f"## {name}", "", f"`{name}({arguments})`" if arguments else f"`{name}`", ""]
        lines += [line for paper in papers for line in (*textwrap.wrap(paper, 110), "")]
        lines += [f"::: {home}.{entry.__name__}", *_OPTIONS, ""]
    return "\n".join(lines)


_OPTIONS = textwrap.indent(
    "options:\n  members: false\n  show_root_heading: false\n  show_root_toc_entry: false\n  show_bases: false", "    "
).splitlines()
