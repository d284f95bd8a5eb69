"""Parts of a model by name: patterns of strata, its classifier, its norm layers."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from fedstrata.core.types import Stratum
from fedstrata.errors import UsageError
from fedstrata.models.strata import check_patterns

HEAD, NORM = "head", "norm"
"""What stands for the classifier, whatever it is called, and for all norm layers."""
Patterns = str | tuple[str, ...]
"""One pattern, or several."""


def list_patterns(patterns: Patterns) -> tuple[str, ...]:
    """As a tuple, also where one is given by itself."""
    return (patterns,) if isinstance(patterns, str) else patterns


def names_of_parts(patterns: Sequence[str], strata: Sequence[Stratum]) -> frozenset[str]:
    """The names of the parameters and buffers of the parts that patterns name."""
    found: set[str] = set()
    for pattern in patterns:
        if pattern == NORM:
            found.update(n for s in strata for n in s.norms)
        else:
            found.update(n for s in _find_strata(pattern, strata) for n in (*s.params, *s.buffers))
    return frozenset(found)


def _find_strata(pattern: str, strata: Sequence[Stratum]) -> list[Stratum]:
    if pattern == HEAD:
        return [s for s in strata if s.classifies] or [s for s in strata if s.name == HEAD]
    return [s for s in strata if fnmatchcase(s.name, pattern)]


def check_parts(what: str, patterns: Sequence[str], strata: Sequence[Stratum]) -> None:
    """Refuse patterns of which one names nothing; `what` are they: whose."""
    for pattern in patterns:
        if names_of_parts([pattern], strata):
            continue
        if pattern == NORM:
            raise UsageError(f"{what}: the model has no norm layer")
        if pattern == HEAD:
            raise UsageError(f"{what}: no classifier was found in the model; name its strata")
        check_patterns(f"{what}: no stratum is called", [pattern], [s.name for s in strata])
