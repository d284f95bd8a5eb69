"""`fedstrata machine`."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.options import Json, open_screen
from fedstrata.core.text import bytes_text, flops_text
from fedstrata.runs.files import disk_errors, write_atomic

if TYPE_CHECKING:
    from fedstrata.engines.speed_table import SpeedTable

app = typer.Typer(help="Look at this machine and measure it.", no_args_is_help=True)


@app.command()
def show(as_json: Json = False) -> None:
    """Print what this machine is, and what the engine auto chooses by."""
    from fedstrata.engines.known_speeds import load_table, table_path

    table, note = load_table()
    about = _describe()
    if as_json:
        where = {"table": str(table_path()) if table.measured else None, "measured": table.measured or None}
        print(json.dumps({**about, **where, "note": note or None, "cells": [asdict(cell) for cell in table.cells]}))
        return
    screen = open_screen()
    about["memory"] = bytes_text(about["memory"])
    about["table"] = f"{table_path()}, measured on {table.measured}" if table.measured else "the built-in one"
    for name, value in about.items():
        screen.print(f"{name:10}{value}", soft_wrap=True)
    if note:
        screen.print(f"note: {note}", soft_wrap=True)
    _print_cells(table)


@app.command()
def tune(
    seconds: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="how long, about; in a short time large models are left out")
    ] = 60,
    force: Annotated[bool, typer.Option("--force", help="also if it was measured before")] = False,
    as_json: Json = False,
) -> None:
    """Measure which clients are trained faster at once than one by one, for the engine auto to choose by."""
    from fedstrata.engines.known_speeds import load_table, table_path

    path, (table, _) = table_path(), load_table()
    known = table.measured and not force
    if not known:
        with disk_errors(path):  # before a minute is spent
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.parent).close()
        table = _measure(seconds)
        write_atomic(path, table.to_json())
        table, _ = load_table()
    if as_json:
        cells = [asdict(cell) for cell in table.cells]
        print(json.dumps({"table": str(path), "measured": table.measured, "cells": cells}))
        return
    _print_cells(table)
    told = f"measured on {table.measured} already; --force measures again" if known else "written"
    open_screen().print(f"{path}: {told}", soft_wrap=True)


def _describe() -> dict[str, Any]:
    """What this machine is."""
    import torch

    from fedstrata.system.machine import cores, installed_memory, kernel_limits, processor_name

    return {
        "processor": processor_name(),
        "kernels": ", ".join([torch.backends.cpu.get_cpu_capability(), *kernel_limits()]),
        "cores": cores(),
        "memory": installed_memory(),
        "torch": torch.__version__,
    }


def _measure(seconds: float) -> SpeedTable:
    """The table of this machine, with a bar in a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from fedstrata.engines.tuning import tune

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=open_screen(stderr=True), disable=not sys.stderr.isatty()) as bars:
        bar = bars.add_task("measuring", total=None)
        return tune(seconds, lambda done, total: bars.update(bar, completed=done, total=total))


def _print_cells(table: SpeedTable) -> None:
    """A table's cells, and what they mean."""
    from rich.table import Table

    from fedstrata.engines.auto import FASTER

    shown = Table(expand=False)
    shown.add_column("model", no_wrap=True)
    for title in ("FLOPs", "batch", "steps", "group", "alone", "at once", "share"):
        shown.add_column(title, justify="right", no_wrap=True)
    for cell in sorted(table.cells, key=lambda cell: cell.place):
        sizes = flops_text(cell.flops).removesuffix("FLOP").strip(), *map(str, cell.place[1][1:])
        times = f"{cell.one_by_one:.0f}", f"{cell.at_once:.0f}", f"{cell.share:.0%}{'*' * cell.built_in}"
        shown.add_row(cell.family, *sizes, *times)
    screen = open_screen()
    screen.print(shown)
    screen.print(
        "FLOPs: forward, one example; alone, at once: µs of processor time per step and client", soft_wrap=True
    )
    screen.print(f"auto trains a group at once where that takes at most {FASTER:.0%} of the time", soft_wrap=True)
    if any(cell.built_in for cell in table.cells):
        screen.print("*: not measured on this machine, but built in", soft_wrap=True)
