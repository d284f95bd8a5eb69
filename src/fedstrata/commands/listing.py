"""`fedstrata list`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.table import Table as RichTable

from fedstrata.commands.options import Json, open_screen
from fedstrata.data.augment import AUGMENTS
from fedstrata.data.datasets import DATASETS
from fedstrata.data.partition import PARTITIONS
from fedstrata.engines import ENGINES
from fedstrata.errors import UsageError, did_you_mean
from fedstrata.models import MODELS
from fedstrata.optim import OPTIMIZERS, SCHEDULES
from fedstrata.probing import PROBES
from fedstrata.reducers import REDUCERS
from fedstrata.spec import Table, signature, summary
from fedstrata.techniques import TECHNIQUES

LISTS: Mapping[str, Table] = {
    "methods": TECHNIQUES,
    "models": MODELS,
    "datasets": DATASETS,
    "partitions": PARTITIONS,
    "optimizers": OPTIMIZERS,
    "schedules": SCHEDULES,
    "augmentations": AUGMENTS,
    "engines": ENGINES,
    "reducers": REDUCERS,
    "probes": PROBES,
}


def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help=", ".join(LISTS), show_default=False)],
    as_json: Json = False,
) -> None:
    """List what can be named in a run, with arguments and one line of help: methods, models, datasets, …"""
    if what not in LISTS:
        raise UsageError(f"there is no list of '{what}'{did_you_mean(what, LISTS)}")
    rows = [{"name": n, "arguments": signature(f), "help": summary(f)} for n, f in LISTS[what].items()]
    if as_json:
        print(json.dumps(rows))
        return
    table = RichTable(show_lines=False, expand=False)
    table.add_column(what, style="bold", no_wrap=True)
    table.add_column("arguments", overflow="fold")
    table.add_column("help")
    for row in rows:
        table.add_row(row["name"], row["arguments"], row["help"])
    open_screen().print(table)
