"""Which table `auto` chooses by: the one of this kind of machine, or what comes with the package.

`fedstrata machine tune` measures a machine (`engines/tuning.py`) and leaves a file in the user's cache. Nothing is
measured when a run starts.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import torch

from fedstrata.engines.built_in_speeds import BUILT_IN
from fedstrata.engines.speed_table import FORMAT, DamagedTable, SpeedTable, parse_table
from fedstrata.errors import UsageError
from fedstrata.system.machine import cache_directory, processor


def table_path() -> Path:
    """Where the table of this kind of machine is, if there is one: kinds do not know of each other.

    A kind is a processor with the kernels that torch chooses on it, and torch's version.
    """
    kind = f"{FORMAT}\n{processor()}\n{torch.__version__}"
    return cache_directory() / f"speed-{hashlib.sha256(kind.encode()).hexdigest()[:16]}.json"


def load_table() -> tuple[SpeedTable, str]:
    """(the table to choose by, what a reader must know of it; empty where there is nothing to know).

    What was not measured here, because there was no time or nobody asked for it, is taken from the built-in table.
    """
    found, note = _read_measured()
    if found is None:
        return SpeedTable(BUILT_IN, processor(), str(torch.__version__)), note
    known = {cell.place for cell in found.cells}
    others = (cell for cell in BUILT_IN if cell.place not in known)
    return replace(found, cells=(*found.cells, *others)), note


def _read_measured() -> tuple[SpeedTable | None, str]:
    """(what was measured on this kind of machine, if it ever was and can be read; what a reader must know of it)."""
    try:
        path = table_path()
        table = parse_table(path.read_bytes())
    except (FileNotFoundError, UsageError):
        return None, ""
    except OSError as error:
        return None, _note(path, f"cannot be read ({(error.strerror or str(error)).lower()})")
    except DamagedTable as error:
        return None, _note(path, f"is damaged ({error})")
    if (table.processor, table.torch) != (processor(), str(torch.__version__)):
        return None, _note(path, "is of another kind of machine")
    return table, ""


def _note(path: Path, why: str) -> str:
    return f"{path} {why}: the built-in table is used; 'fedstrata machine tune' measures anew"
