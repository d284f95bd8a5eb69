"""What is easily handed over in the place of data, refused with what to give instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedstrata.errors import UsageError

LIST = "clients is a list with one entry per client"


def refuse_no_clients(clients: Any) -> None:
    """Raise a UsageError for what is not one entry per client."""
    if isinstance(clients, Mapping):
        raise UsageError(
            f"{LIST}, and this is a dict: give list(sites.values()), and the names as client_names=list(sites)"
        )
    if isinstance(clients, str | bytes | Path):
        raise UsageError(f"{LIST}, not a path: to read a table, fedstrata.load_dataset(\"csv(path='…', target='…')\")")
    if not isinstance(clients, Iterable) and not hasattr(clients, "__getitem__"):  # by number is enough
        raise UsageError(f"{LIST}, not {type(clients).__name__}")


def refuse_no_data(data: Any, whose: str) -> None:
    """Raise a UsageError for a path and for a table of pandas or polars, which are no rows of inputs and labels."""
    for part in data if isinstance(data, tuple) else (data,):
        kind = type(part)
        if isinstance(part, str | bytes | Path):
            raise UsageError(f"{whose or 'a client'} is a path or text, not data: read the file first")
        if kind.__module__.partition(".")[0] in ("pandas", "polars"):
            raise UsageError(
                f"{whose or 'a client'} is given as {kind.__name__}: give a pair of arrays, inputs and labels, such as "
                "(table[columns].to_numpy(), table['label'].to_numpy())"
            )
