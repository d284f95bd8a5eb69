"""The types that the parts of a run's probes, facts and summary must have; a part of another type counts as missing.

The files may have been edited, or written by another version. These checks cover how lists and tables are nested, and
the values that are used in calculations right away; the code that shows a single figure checks it itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

Table = dict[str, Any]
Rows = list[list[Any]]
Real = Annotated[float, Field(strict=True, ge=-1e30, le=1e30)]
Number = Annotated[float, Field(strict=True, ge=0, le=1e30)]


class _Part(BaseModel):
    """A table whose listed keys must have these types; it may have others."""


class _Similarity(_Part):
    mean: Table = {}
    matrix: dict[str, Rows] = {}


class _Norms(_Part):
    alone: dict[str, list[Any]] = {}
    averaged: dict[str, list[Any]] = {}


class _Drift(_Part):
    held: Table = {}
    missing: Table = {}


class _Calibration(_Part):
    before: list[Any] = []
    after: list[Any] = []


class _Statistics(_Part):
    spread: Table = {}


class _Embedding(_Part):
    points: list[Annotated[list[Any], Field(min_length=2)]]
    labels: list[int | str] | None = None
    clients: list[int | str] | None = None


class _Crossing(_Part):
    theta: Table = {}
    beta: Table = {}
    cosine: Table = {}
    length: Table = {}
    kept: Table = {}


class _Visits(_Part):
    norm: dict[str, list[Any]] = {}
    cosine: dict[str, list[Any]] = {}
    whole: dict[str, list[Any]] = {}


class _Depth(_Part):
    gradient: Table = {}
    dead: Table = {}


class _Rates(_Part):
    after: Table = {}


class _Stratum(_Part):
    name: str = ""
    stage: str = ""


class _Model(_Part):
    parameters: Annotated[int, Field(ge=0, le=10**30)] = 0
    strata: list[_Stratum] = []
    fields: list[Table] = []


ROW: dict[str, Any] = {
    "clients": list[int | str],
    "seconds": dict[str, Number],
    "missed": dict[str, str],
    "divergence": Table,
    "proxy": Table,
    "weightdiv": Table,
    "cosine": Table,
    "cka": _Similarity,
    "gradnorm": _Norms,
    "drift": _Drift,
    "calibration": _Calibration,
    "statistics": _Statistics,
    "embedding": _Embedding,
    "crossing": _Crossing,
    "scores": Table,
    "aggregation": Table,
    "visits": _Visits,
    "exchange": dict[str, list[Any]],
    "depth": _Depth,
    "rates": _Rates,
}
"""Types in a line of probes.jsonl."""

FACTS: dict[str, Any] = {
    "input_shape": list[int] | dict[str, list[int]],
    "class_names": list[str],
    "clients": int,
    "client_names": list[str],
    "examples": list[Any],
    "test_counts": list[Any],
    "unaffordable": list[str],
    "cards": list[Table | None],
    "counts": Annotated[list[Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)],
    "model": _Model,
}
"""Types in facts.json."""


class _Reliability(_Part):
    count: list[Annotated[int, Field(ge=0)]]
    confidence: list[Number | None]
    right: list[Number | None]
    ece: Number


class _Predictions(_Part):
    true: list[Real]
    made: list[Real]


class _Masks(_Part):
    true: list[Rows]
    made: list[Rows]


EVALUATION: dict[str, Any] = {
    "confusion": list[list[Annotated[int, Field(ge=0, le=10**30)]]],
    "calibration": _Reliability,
    "predictions": _Predictions,
    "masks": _Masks,
}
"""Types in evaluation.json."""


SUMMARY: dict[str, Any] = {"notes": list[str]}
"""Types in summary.json."""


def row_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """A line of probes.jsonl without the parts of a wrong type; `seconds` is always there."""
    return {"seconds": {}, **_keep_valid(found, _checks(tuple(ROW.items())))}


def facts_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a run without the parts of a wrong type."""
    return _keep_valid(found, _checks(tuple(FACTS.items())))


def evaluation_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a final model does, without the parts of a wrong type."""
    return _keep_valid(found, _checks(tuple(EVALUATION.items())))


def summary_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run without the parts of a wrong type."""
    return _keep_valid(found, _checks(tuple(SUMMARY.items())))


def _keep_valid(found: Mapping[str, Any], checks: Mapping[str, TypeAdapter[Any]]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in checks or _fits(checks[name], value)}


def _fits(check: TypeAdapter[Any], value: Any) -> bool:
    try:
        check.validate_python(value)
    except ValidationError:
        return False
    return True


@cache
def _checks(kinds: tuple[tuple[str, Any], ...]) -> dict[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(kind) for name, kind in kinds}
