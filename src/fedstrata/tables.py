"""What can be named in a run: the tables, each imported when it is first looked at.

To add a technique, a model or a dataset is a line in its own table; only a new kind of thing gets a line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from fedstrata.spec import Table

TABLES: Mapping[str, tuple[str, str]] = {
    "methods": ("fedstrata.techniques", "TECHNIQUES"),
    "models": ("fedstrata.models", "MODELS"),
    "datasets": ("fedstrata.data.datasets", "DATASETS"),
    "partitions": ("fedstrata.data.partition", "PARTITIONS"),
    "optimizers": ("fedstrata.optim", "OPTIMIZERS"),
    "schedules": ("fedstrata.optim", "SCHEDULES"),
    "augmentations": ("fedstrata.data.augment", "AUGMENTS"),
    "engines": ("fedstrata.engines", "ENGINES"),
    "reducers": ("fedstrata.reducers", "REDUCERS"),
    "probes": ("fedstrata.probing", "PROBES"),
}
"""What a table lists → the module that it is in, and its name there."""


def table(what: str) -> Table:
    """The table of methods, of models, of datasets, …"""
    module, name = TABLES[what]
    found: Table = getattr(importlib.import_module(module), name)
    return found
