"""Which settings decide about a result: whether two configurations are of the same run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.config.schema import ADDED_LATER, Settings
from fedstrata.config.toml import read_toml
from fedstrata.errors import UsageError, one_line

ENGINE_FIELDS = frozenset({"engine", "workers", "ray_address", "ray_cpus", "ray_gpus"})
"""Fields that say which engine trains the clients, and those that single engines read."""
AT_SITES = ENGINE_FIELDS.union(
    (
        "deadline",
        "eval_clients",
        "faults",
        "fleet",
        "holdout",
        "newcomers",
        "probe_examples",
        "standardise",
        "stragglers",
        "without",
    )
)
"""Fields that a Flower server refuses: they need the clients' data, or say how to train them on the server."""
EXECUTION_FIELDS = ENGINE_FIELDS | {"checkpoint_seconds", "data_dir"}
"""Fields that say how and where a run is executed: runs that differ in nothing else have the same result."""
PROBE_FIELDS = frozenset({"probe", "probe_every", "probe_clients", "probe_examples"})
"""Fields that say what is measured: they change no result either, but what is known of it."""


MODELS_VERSION = "2"
"""Counts the changes of what models' names mean; a new run's versions.json has it under `models`."""
CHANGED_MODELS = {"resnet14": "1, 2, 2, 1", "resnet22": "2, 3, 3, 2"}
"""Models of other blocks in runs from before version 2."""


def select_deciding(config: Mapping[str, Any]) -> dict[str, str]:
    """What decides about a run's result, of its configuration, as text: one client, 1, is not all of them, 1.0."""
    others = EXECUTION_FIELDS | PROBE_FIELDS
    return {name: repr(value) for name, value in config.items() if name not in others and value is not None}


def check_same_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse to resume a run under other settings than its run.toml's: the result would be of neither."""
    if not path.exists():
        raise UsageError(f"{path.parent} has no run.toml: there is no run to resume")
    for name, (before, now) in _differences(select_deciding(read_toml(path)), select_deciding(config)).items():
        fewer = ": rounds can be added, and none taken away" if name == "rounds" else ""
        raise UsageError(f"{path.parent} was run with {name} = {before}, not {now}{fewer}")


def check_unedited(path: Path, begun: Mapping[str, str]) -> None:
    """Refuse a run.toml that says other than what the run began with: the result would be of neither."""
    changes = _differences(begun, select_deciding(read_toml(path)))
    if changes:
        listed = ", ".join(f"{name} was {a or 'not set'}, is {b or 'not set'}" for name, (a, b) in changes.items())
        raise UsageError(
            f"{path} was edited after the run began: {one_line(listed, 300)}; put it back, or start a new run"
        )


def check_models(directory: Path, config: Mapping[str, Any], versions: Mapping[str, str]) -> None:
    """Refuse a run from before its models' names got another meaning: what goes on would be another run."""
    if versions.get("models") == MODELS_VERSION:
        return
    named = " ".join(str(config.get(field) or "") for field in ("model", "archs"))
    for name, blocks in CHANGED_MODELS.items():
        if re.search(rf"\b{name}\b", named):
            raise UsageError(
                f"{directory} is of a version in which {name} had blocks [{blocks}], which it no longer has: it can be "
                "read, but neither go on nor count as a run of this version; start a new one elsewhere"
            )


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """What differs: name → (before, now), None for what is not set.

    Fields that were added later count as their defaults in runs that do not have them.
    """
    names = [*before, *(name for name in now if name not in before)]
    pairs = {name: (before.get(name), now.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and set(pair) != {None, _default(name)}}


def _default(name: str) -> str | None:
    """What runs did before a field was added, as text; None for fields that were always there."""
    return repr(Settings.model_fields[name].default) if name in ADDED_LATER else None
