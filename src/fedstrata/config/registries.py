"""What can be named in a run: the tables, each imported when it is first looked at.

A new technique, model or engine is a row in its own table; only a new kind of thing gets a row here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

TABLES: Mapping[str, tuple[str, str]] = {
    "methods": ("fedstrata.techniques", "TECHNIQUES"),
    "tasks": ("fedstrata.tasks.registry", "TASKS"),
    "models": ("fedstrata.models.registry", "MODELS"),
    "adapters": ("fedstrata.models.adapters", "ADAPTERS"),
    "datasets": ("fedstrata.data.datasets", "DATASETS"),
    "partitions": ("fedstrata.data.partitions", "PARTITIONS"),
    "optimizers": ("fedstrata.core.optim", "OPTIMIZERS"),
    "schedules": ("fedstrata.core.optim", "SCHEDULES"),
    "augmentations": ("fedstrata.data.augmentation", "AUGMENTS"),
    "engines": ("fedstrata.engines.registry", "ENGINES"),
    "faults": ("fedstrata.faults", "FAULTS"),
    "reducers": ("fedstrata.aggregation.rules", "REDUCERS"),
    "probes": ("fedstrata.probes.registry", "PROBES"),
}
"""What a table lists → the module that it is in, and its name there."""


def load_table(what: str) -> Mapping[str, Any]:
    """The table of methods, of models, of datasets, …: name → a callable, or for engines an `EngineSpec`."""
    module, name = TABLES[what]
    table: Mapping[str, Any] = getattr(importlib.import_module(module), name)
    return table
