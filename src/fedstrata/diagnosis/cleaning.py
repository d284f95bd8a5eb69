"""A run's lines and facts as the rules expect them: whatever is of another kind is left out.

Files may have been edited, or be of another version. What a rule then finds missing it does not judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fedstrata.diagnosis.evidence import number
from fedstrata.runs.reader import SavedRun

Kind = Callable[[Any], Any]
"""Reads a value; None where it is not of the kind."""


def readable(saved: SavedRun) -> SavedRun:
    """The run without what cannot be read."""
    rows = [_kept(row, ROW) for row in saved.probes if isinstance(row, Mapping)]
    return replace(saved, probes=[row for row in rows if "round" in row], facts=_kept(saved.facts, FACTS))


def _kept(found: Mapping[str, Any], kinds: Mapping[str, Kind]) -> dict[str, Any]:
    read = {name: kind(found[name]) for name, kind in kinds.items() if name in found}
    return {name: value for name, value in read.items() if value is not None}


def _keyed(**kinds: Kind) -> Kind:
    """A mapping of which these keys are read."""
    return lambda value: _kept(value, kinds) if isinstance(value, Mapping) else None


def _named(kind: Kind) -> Kind:
    """A mapping of any names."""

    def read(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, Mapping):
            return None
        held = {str(name): kind(one) for name, one in value.items()}
        return {name: one for name, one in held.items() if one is not None}

    return read


def _listed(kind: Kind) -> Kind:
    """A list that is wholly of a kind."""

    def read(value: Any) -> list[Any] | None:
        held = [kind(one) for one in value] if isinstance(value, list | tuple) else [None]
        return None if any(one is None for one in held) else held

    return read


def _whole(**kinds: Kind) -> Kind:
    """A mapping that has all of these keys."""
    read = _keyed(**kinds)

    def complete(value: Any) -> Any:
        found = read(value)
        return found if found is not None and found.keys() == kinds.keys() else None

    return complete


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _positive(value: Any) -> int | float | None:
    return value if (number(value) or 0.0) > 0 else None


def _count(value: Any) -> int | float | None:
    found = number(value)
    return value if found is not None and found >= 0 else None


def _table(value: Any) -> list[list[int]] | None:
    """Counts, a client a row: of the same classes, and of some example."""
    rows: list[list[int]] | None = _listed(_listed(_count))(value)
    return rows if rows and len(set(map(len, rows))) == 1 and any(map(sum, rows)) else None


def _field(value: Any) -> dict[str, Any] | None:
    """A convolution's receptive field and its input, with as many sides."""
    found: dict[str, Any] | None = _whole(layer=_text, field=_listed(_positive), input=_listed(_positive))(value)
    return found if found is not None and 0 < len(found["field"]) == len(found["input"]) else None


def _stratum(value: Any) -> dict[str, Any] | None:
    """A stratum, and whether it is idle or the classifier, which older runs do not tell."""
    found: dict[str, Any] | None = _whole(name=_text, stage=_text)(value)
    if found is None:
        return None
    return found | {mark: value[mark] for mark in ("idle", "classifies") if isinstance(value.get(mark), bool)}


def _steps(value: Any) -> list[float | None] | None:
    """Norms, step by step."""
    return [number(one) for one in value] if isinstance(value, list | tuple) else None


_numbers = _named(number)

ROW: dict[str, Kind] = {
    "round": lambda value: value if isinstance(value, int) and _positive(value) else None,
    "clients": lambda value: list(value) if isinstance(value, list | tuple) else None,
    "seconds": _numbers,
    "missed": _named(_text),
    "divergence": _numbers,
    "proxy": _numbers,
    "cosine": _numbers,
    "cka": _keyed(mean=_numbers),
    "gradnorm": _keyed(alone=_named(_steps), averaged=_named(_steps)),
    "drift": _keyed(held=_numbers, missing=_numbers),
    "calibration": _keyed(held=number, missing=number, forgetting=number),
    "statistics": _keyed(running=number, batch=number, spread=_numbers),
}

FACTS: dict[str, Kind] = {
    "input_shape": _listed(_positive),
    "classes": _positive,
    "counts": _table,
    "skew": number,
    "buffers": lambda value: value,
    "model": _keyed(strata=_listed(_stratum), fields=_listed(_field)),
}
