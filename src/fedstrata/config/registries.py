"""What can be named in a run: the tables, each imported when it is first looked at.

To add a technique, a model or a dataset is a line in its own table; only a new kind of thing gets a line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from fedstrata.core.spec import Registry

TABLES: Mapping[str, tuple[str, str]] = {
    "methods": ("fedstrata.techniques", "TECHNIQUES"),
    "models": ("fedstrata.models.registry", "MODELS"),
    "datasets": ("fedstrata.data.datasets", "DATASETS"),
    "partitions": ("fedstrata.data.partitions", "PARTITIONS"),
    "optimizers": ("fedstrata.core.optim", "OPTIMIZERS"),
    "schedules": ("fedstrata.core.optim", "SCHEDULES"),
    "augmentations": ("fedstrata.data.augmentation", "AUGMENTS"),
    "engines": ("fedstrata.engines.registry", "ENGINES"),
    "reducers": ("fedstrata.aggregation.rules", "REDUCERS"),
    "probes": ("fedstrata.probes.runner", "PROBES"),
}
"""What a table lists → the module that it is in, and its name there."""


def table(what: str) -> Registry:
    """The table of methods, of models, of datasets, …"""
    module, name = TABLES[what]
    found: Registry = getattr(importlib.import_module(module), name)
    return found
