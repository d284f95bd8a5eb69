"""What a shell completes: names from the tables that a run can name, none of which needs torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin

from fedstrata.config.registries import TABLES, load_table
from fedstrata.config.schema import RunConfig

TABLE_OF = {
    "method": "methods",
    "task": "tasks",
    "model": "models",
    "archs": "models",
    "dataset": "datasets",
    "public": "datasets",
    "trusted": "datasets",
    "partition": "partitions",
    "optimizer": "optimizers",
    "schedule": "schedules",
    "augment": "augmentations",
    "engine": "engines",
    "faults": "faults",
    "probe": "probes",
}
"""Field → the table of what it can name."""
BETWEEN = re.compile(r".*[+;,\s]\s*")
"""What stands before the last of several names: 'fedprox + ', 'divergence,'."""

Complete = Callable[[str], list[str]]
"""What was typed so far → what it may become."""


def complete_from(names: Callable[[], Sequence[str]]) -> Complete:
    """What completes the last of several names."""

    def complete(incomplete: str) -> list[str]:
        begun = BETWEEN.match(incomplete)
        before = begun.group() if begun else ""
        return [before + name for name in names() if name.startswith(incomplete[len(before) :])]

    return complete


def complete_table(what: str) -> Complete:
    """What completes names of a table, which is imported when it is asked."""
    return complete_from(lambda: list(load_table(what)))


def complete_field(name: str) -> Complete | None:
    """What completes a field of the schema; None where nothing is known of it."""
    if name in TABLE_OF:
        return complete_table(TABLE_OF[name])
    words = _choices(RunConfig.model_fields[name].annotation)
    return complete_from(lambda: words) if words else None


def _choices(annotation: Any) -> list[str]:
    """The words that a field's type allows."""
    kinds = annotation, *get_args(annotation)
    return [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def complete_setting(incomplete: str) -> list[str]:
    """Fields for `--set`, each with the sign that follows it."""
    return [f"{name}=" for name in RunConfig.model_fields if name.startswith(incomplete)]


def complete_list(incomplete: str) -> list[str]:
    """What `fedstrata list` can list."""
    return [what for what in TABLES if what.startswith(incomplete)]
