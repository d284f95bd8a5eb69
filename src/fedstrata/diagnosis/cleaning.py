"""A run's probes and facts as the rules expect them: values of another kind are left out.

Files may have been edited, or be of another version. A rule whose values are missing finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fedstrata.diagnosis.evidence import finite_number
from fedstrata.runs.reader import SavedRun

Kind = Callable[[Any], Any]
"""Reads a value; None if it is not of the kind."""


def drop_malformed(saved: SavedRun) -> SavedRun:
    """The run without values that the rules cannot read."""
    rows = [_read_fields(row, ROW) for row in saved.probes if isinstance(row, Mapping)]
    return replace(saved, probes=[row for row in rows if "round" in row], facts=_read_fields(saved.facts, FACTS))


def _read_fields(found: Mapping[str, Any], kinds: Mapping[str, Kind]) -> dict[str, Any]:
    read = {name: kind(found[name]) for name, kind in kinds.items() if name in found}
    return {name: value for name, value in read.items() if value is not None}


def _mapping_with(**kinds: Kind) -> Kind:
    """The kind of a mapping of which these keys are read."""
    return lambda value: _read_fields(value, kinds) if isinstance(value, Mapping) else None


def _mapping_of(kind: Kind) -> Kind:
    """The kind of a mapping from any names to values of one kind."""

    def read(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, Mapping):
            return None
        held = {str(name): kind(one) for name, one in value.items()}
        return {name: one for name, one in held.items() if one is not None}

    return read


def _list_of(kind: Kind) -> Kind:
    """The kind of a list whose values are all of one kind."""

    def read(value: Any) -> list[Any] | None:
        held = [kind(one) for one in value] if isinstance(value, list | tuple) else [None]
        return None if any(one is None for one in held) else held

    return read


def _complete_mapping(**kinds: Kind) -> Kind:
    """The kind of a mapping that has all of these keys."""
    read = _mapping_with(**kinds)

    def complete(value: Any) -> Any:
        found = read(value)
        return found if found is not None and found.keys() == kinds.keys() else None

    return complete


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _positive(value: Any) -> int | float | None:
    return value if (finite_number(value) or 0.0) > 0 else None


def _count(value: Any) -> int | float | None:
    found = finite_number(value)
    return value if found is not None and found >= 0 else None


def _table(value: Any) -> list[list[int]] | None:
    """Counts of examples, one row per client: rows of equal length, and not all counts zero."""
    rows: list[list[int]] | None = _list_of(_list_of(_count))(value)
    return rows if rows and len(set(map(len, rows))) == 1 and any(map(sum, rows)) else None


def _field(value: Any) -> dict[str, Any] | None:
    """A convolution's receptive field and its input, with as many sides."""
    found: dict[str, Any] | None = _complete_mapping(layer=_text, field=_list_of(_positive), input=_list_of(_positive))(
        value
    )
    return found if found is not None and 0 < len(found["field"]) == len(found["input"]) else None


def _stratum(value: Any) -> dict[str, Any] | None:
    """A stratum, and whether it is idle or the classifier, which older runs do not say."""
    found: dict[str, Any] | None = _complete_mapping(name=_text, stage=_text)(value)
    if found is None:
        return None
    return found | {mark: value[mark] for mark in ("idle", "classifies") if isinstance(value.get(mark), bool)}


def _steps(value: Any) -> list[float | None] | None:
    """Norms, step by step."""
    return [finite_number(one) for one in value] if isinstance(value, list | tuple) else None


def _clients(value: Any) -> list[int] | None:
    """Numbers of clients, each once."""
    found = value if isinstance(value, list | tuple) and all(type(one) is int for one in value) else None
    return None if found is None or len(set(found)) < len(found) else list(found)


def _cards(value: Any) -> list[dict[str, Any] | None] | None:
    """What clients' inputs look like, a card for each; None for a client without one."""
    shares = dict.fromkeys(("missing", "constant", "duplicates"), _count)
    groups = _mapping_of(_complete_mapping(count=_positive, mean=_steps, std=_steps))
    more: dict[str, Kind] = {"count": _positive, "groups": groups, "min": finite_number, "max": finite_number}
    read = _mapping_with(mean=_steps, std=_steps, **more, **shares)
    return [read(one) for one in value] if isinstance(value, list | tuple) else None


_numbers = _mapping_of(finite_number)
_columns = _mapping_of(_steps)

ROW: dict[str, Kind] = {
    "round": lambda value: value if isinstance(value, int) and _positive(value) else None,
    "clients": _clients,
    "seconds": _numbers,
    "missed": _mapping_of(_text),
    "divergence": _numbers,
    "proxy": _numbers,
    "aggregation": _numbers,
    "cosine": _numbers,
    "cka": _mapping_with(mean=_numbers),
    "gradnorm": _mapping_with(alone=_mapping_of(_steps), averaged=_mapping_of(_steps)),
    "drift": _mapping_with(held=_numbers, missing=_numbers),
    "calibration": _mapping_with(held=finite_number, missing=finite_number, forgetting=finite_number),
    "statistics": _mapping_with(running=finite_number, batch=finite_number, spread=_numbers),
    "visits": _mapping_with(
        norm=_columns, cosine=_columns, whole=_columns, loss=_steps, examples=_steps, steps=_steps, statistics=_steps
    ),
    "exchange": _columns,
    "depth": _mapping_with(gradient=_numbers, dead=_numbers),
    "rates": _mapping_with(lr=_positive, before=finite_number, after=_numbers),
}

FACTS: dict[str, Kind] = {
    "input_shape": _list_of(_positive),
    "classes": _positive,
    "has_classes": lambda value: value if isinstance(value, bool) else None,
    "guess": finite_number,
    "examples": _list_of(_count),
    "counts": _table,
    "skew": finite_number,
    "class_names": _list_of(_text),
    "client_names": _list_of(_text),
    "clients": _positive,
    "test_counts": _list_of(_count),
    "unaffordable": _list_of(_text),
    "probabilities": lambda value: value if isinstance(value, bool) else None,
    "cards": _cards,
    "buffers": lambda value: value,
    "adapters": lambda value: value,
    "model": _mapping_with(strata=_list_of(_stratum), fields=_list_of(_field)),
}
