"""A user's choices for a reproduction: which parts, which seeds, and settings instead of the scale's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedstrata.config.overrides import assign
from fedstrata.config.schema import RunConfig
from fedstrata.errors import UsageError, did_you_mean
from fedstrata.reproduce.parts import Grid, OwnWork, Part, Tuning


def parse_seeds(texts: Sequence[str]) -> int | list[int]:
    """How many seeds, or which: `5` is a number of them, `1,2,3` a list, as is `7,`.

    Raises:
        UsageError: for anything else.
    """
    text = ",".join(texts)
    try:
        found = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise UsageError(f"--seeds {text}: give a number of seeds, such as 5, or a list of them, such as 1,2,3")
    if "," in text:
        if len(set(found)) < len(found):
            raise UsageError(f"--seeds {text}: a seed is given twice")
        return found
    if found[0] < 1:
        raise UsageError("--seeds 0: there must be 1 or more")
    return found[0]


def choose_seeds(own: Sequence[int], wanted: int | Sequence[int]) -> list[int]:
    """The seeds of a part: those given, or so many of its own, going on after its last one."""
    if not isinstance(wanted, int):
        return list(wanted)
    more = range(max(own) + 1, max(own) + 1 + wanted)
    return [*own, *more][:wanted]


def set_fields(part: Part, sets: Sequence[str]) -> Part:
    """The part with settings of all of its runs changed.

    Raises:
        UsageError: for a field that there is not, or that the part itself varies.
    """
    for text in sets:
        field = text.partition("=")[0].strip().partition(".")[0]
        if field not in RunConfig.model_fields:
            raise UsageError(f"--set {text}: there is no field '{field}'{did_you_mean(field, RunConfig.model_fields)}")
        if field in ("seed", "method", "data_dir"):
            other = {"seed": "--seeds", "data_dir": "--data-dir"}.get(field)
            raise UsageError(f"--set {text}: {f'use {other}' if other else 'the methods are what is compared'}")
        if isinstance(part, OwnWork):
            part = replace(part, settings={**part.settings, "run": assign(dict(part.settings["run"]), [text])})
        else:
            _check_single(part, field, text)
            part = replace(part, values=assign(dict(part.values), [text]), tuning=_leave_to_user(part.tuning, field))
    return part


def _check_single(part: Grid, field: str, text: str) -> None:
    """Refuse what would be set for some of the part's runs only, or would undo what the part compares."""
    own = [entry for entry in part.values["method"] if isinstance(entry, Mapping) and field in entry]
    if isinstance(part.values.get(field), list) or own or (part.tuning is not None and field == "lr"):
        raise UsageError(
            f"--set {text}: the part '{part.name}' gives its runs several values of {field}: name others with --parts"
        )


def _leave_to_user(tuning: Tuning | None, field: str) -> Tuning | None:
    """The trials, too, have what the user says."""
    if tuning is None:
        return None
    return replace(tuning, fields={name: value for name, value in tuning.fields.items() if name != field})


def record_sets(sets: Sequence[str]) -> dict[str, Any]:
    """The settings that were changed, for the report."""
    return {text.partition("=")[0].strip(): text.partition("=")[2].strip() for text in sets}
