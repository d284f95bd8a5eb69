"""`fedstrata flower`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstrata.cli.completion import complete_table
from fedstrata.errors import UsageError

app = typer.Typer(help="Federations across sites, with Flower.", no_args_is_help=True)


@app.callback()
def _flower() -> None:
    """Federations across sites, with Flower."""


@app.command()
def new(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="where to write it", show_default=False)],
    method: Annotated[
        str, typer.Option(help="what it runs by default", autocompletion=complete_table("methods"))
    ] = "feddyn(alpha=0.1) + fednlr",
    clients: Annotated[int, typer.Option(min=1, help="number of clients")] = 3,
) -> None:
    """Write a Flower app, with a model and data to replace, ready for `flwr run`."""
    from fedstrata.flower.template import write_app
    from fedstrata.techniques import method as parse

    write_app(directory, str(parse(method)), clients)
    print(f"{directory}: your model and data go into task.py; README.md says how to run it")


@app.command()
def certs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="where to write them", show_default=False)],
    host: Annotated[
        list[str] | None,
        typer.Option(help="a name or address of the server besides loopback; may be repeated", show_default=False),
    ] = None,
    nodes: Annotated[int, typer.Option(help="how many SuperNodes get a key pair")] = 3,
    days: Annotated[int, typer.Option(help="how many days the certificates are valid")] = 365,
) -> None:
    """Make a certificate authority, the server's certificate, and a key pair for every SuperNode."""
    from fedstrata.flower.certs import write_certs

    if not 0 <= nodes <= 100_000 or not 1 <= days <= 36_500:
        raise UsageError("nodes are 0 to 100,000 and days 1 to 36,500")
    files = write_certs(directory, host or [], nodes, days)
    print(f"{directory}: {len(files)} files; keep *.key secret; each node-N.key goes to its site together with ca.crt")
