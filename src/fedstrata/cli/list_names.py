"""`fedstrata list`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from fedstrata.cli.completion import complete_list
from fedstrata.cli.options import Json, open_screen
from fedstrata.config.registries import TABLES, load_table
from fedstrata.core.spec import signature, summary
from fedstrata.errors import UsageError, did_you_mean


def list_(
    what: Annotated[
        str,
        typer.Argument(metavar="WHAT", help=", ".join(TABLES), show_default=False, autocompletion=complete_list),
    ],
    as_json: Json = False,
) -> None:
    """List what a run can name, with arguments and one line of help: methods, models, datasets, …"""
    if what not in TABLES:
        raise UsageError(f"there is no list of '{what}'{did_you_mean(what, TABLES)}")
    rows = [describe_entry(name, entry) for name, entry in load_table(what).items()]
    if what == "methods":
        rows = [_add_quote(row) for row in rows]
    if as_json:
        print(json.dumps(rows))
        return
    from rich.table import Table

    shown = Table(show_lines=False, expand=False)
    shown.add_column(what, style="bold", no_wrap=True)
    shown.add_column("arguments", overflow="fold")
    shown.add_column("help")
    for row in rows:
        shown.add_row(row["name"], row["arguments"], row["help"])
    open_screen().print(shown)


def _add_quote(row: dict[str, str]) -> dict[str, str]:
    """A method's row with what was measured of it, if anything was."""
    from fedstrata.techniques.quotes import quote_gains  # its folder takes long to import for other lists

    gains = quote_gains([row["name"]])
    return {**row, "help": f"{row['help']} Measured: {gains}."} if gains else row


def describe_entry(name: str, entry: Any) -> dict[str, str]:
    """A row of the list: a callable says its arguments and its help itself, an engine's row has a help only."""
    if callable(entry):
        return {"name": name, "arguments": signature(entry), "help": summary(entry)}
    return {"name": name, "arguments": "", "help": entry.help}
