"""Parts of a model by name: patterns of strata, its classifier, its norm layers."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from fedstrata.core.low_rank import Factor, factor_names
from fedstrata.core.types import Stratum
from fedstrata.errors import UsageError
from fedstrata.models.strata import check_patterns

T = TypeVar("T")
HEAD, NORM = "head", "norm"
"""What stands for the classifier, whatever it is called, and for all norm layers."""
FACTORS: dict[str, Factor] = {"lora_A": "A", "lora_B": "B"}
"""What stands for one of the factors of all low-rank adapters."""
Patterns = str | tuple[str, ...]
"""One pattern, or several."""


def list_patterns(patterns: Patterns) -> tuple[str, ...]:
    """As a tuple, also where one is given by itself."""
    return (patterns,) if isinstance(patterns, str) else patterns


def names_of_parts(patterns: Patterns, strata: Sequence[Stratum]) -> frozenset[str]:
    """The names of the parameters and buffers of the parts that patterns name."""
    found: set[str] = set()
    for pattern in list_patterns(patterns):
        if pattern == NORM:
            found.update(n for s in strata for n in s.norms)
        elif pattern in FACTORS:
            found.update(factor_names(strata, FACTORS[pattern]))
        else:
            found.update(n for s in _find_strata(pattern, strata) for n in (*s.params, *s.buffers))
    return frozenset(found)


def _find_strata(pattern: str, strata: Sequence[Stratum]) -> list[Stratum]:
    if pattern == HEAD:
        return [s for s in strata if s.classifies] or [s for s in strata if s.name == HEAD]
    return [s for s in strata if fnmatchcase(s.name, pattern)]


def check_parts(what: str, patterns: Patterns, strata: Sequence[Stratum]) -> None:
    """Refuse patterns of which one names nothing; `what` are they: whose."""
    for pattern in list_patterns(patterns):
        if names_of_parts(pattern, strata):
            continue
        if pattern == NORM:
            raise UsageError(f"{what}: the model has no norm layer")
        if pattern in FACTORS:
            raise UsageError(f"{what}: the model has no low-rank adapter")
        if pattern == HEAD:
            raise UsageError(f"{what}: no classifier was found in the model; name its strata")
        check_patterns(f"{what}: no stratum is called", [pattern], [s.name for s in strata])


def rate_of(stratum: Stratum, rates: Sequence[tuple[str, T]], otherwise: T) -> T:
    """What the first pattern that names a stratum says of it; `head` is the classifier, whatever it is called."""
    return next((rate for pattern, rate in rates if _is_named(stratum, pattern)), otherwise)


def check_pairs(what: str, rates: Sequence[Any], example: float) -> None:
    """Refuse what is not made of pairs of a name pattern and a number; `what` are they: whose."""
    for pair in rates:
        if not (isinstance(pair, tuple) and [*map(type, pair)] in ([str, int], [str, float])):
            form = f"(('head', {example!r}),)"
            raise UsageError(f"{what} are pairs of a name pattern and a number, such as {form}, not {rates!r}")


def check_rates(what: str, rates: Sequence[tuple[str, T]], strata: Sequence[Stratum]) -> None:
    """Refuse patterns of which one names no stratum; `what` are they: whose."""
    for pattern, _ in rates:
        if any(_is_named(stratum, pattern) for stratum in strata):
            continue
        if pattern == HEAD:
            raise UsageError(f"{what}: no classifier was found in the model; name its strata")
        check_patterns(f"{what}: no stratum is called", [pattern], [s.name for s in strata])


def _is_named(stratum: Stratum, pattern: str) -> bool:
    return (pattern == HEAD and stratum.classifies) or fnmatchcase(stratum.name, pattern)
