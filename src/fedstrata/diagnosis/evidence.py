"""How rules read a run: its last probed rounds, strata in order, and figures that a few odd rounds cannot move much."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from fedstrata.diagnosis.findings import Remedy
from fedstrata.runs.reader import SavedRun

RECENT = 3
"""Figures are of the last third of the probed rounds, and of this many at least."""


WARM = 30
"""Local steps before which neither accuracy nor running statistics say much: at the usual momentum of 0.1 these still
hold 0.9³⁰ = 4 % of their initial values then."""


LARGEST = 1e100
"""A figure beyond it is taken for one that is not finite: it could not be squared or summed."""

MOST = 1000
"""Shares and ratios are not told beyond it: of what has exploded, the digits say nothing."""


@dataclass(frozen=True)
class Evidence:
    """What a rule has read: the figure that is held against its threshold, and how to put it into words.

    Args:
        value: the figure.
        sentence: with all figures.
        figure: name → number, the value first.
        remedies: asked for only if the finding is reported.
    """

    value: float
    sentence: str
    figure: Mapping[str, float]
    remedies: Callable[[], Sequence[Remedy | None]] = field(default=tuple)


@dataclass(frozen=True)
class Rule:
    """One thing to look for.

    Args:
        name: as in `thresholds.THRESHOLDS`.
        read: the evidence, or None where the run does not tell.
        probes: those that would tell; any of them is enough.
        explains: symptoms that it brings about; only causes have any.
        backed_by: symptoms of which at least one must be there, if any of them was looked for: what is found in facts
            alone need not do harm.
    """

    name: str
    read: Callable[[SavedRun], Evidence | None]
    probes: tuple[str, ...] = ()
    explains: frozenset[str] = frozenset()
    backed_by: frozenset[str] = frozenset()


def recent(saved: SavedRun, probe: str) -> list[Any]:
    """What a probe found in the last third of its rounds, in three of them at least."""
    found = list(saved.series(probe).values())
    return found[-max(RECENT, math.ceil(len(found) / 3)) :]


def steps_of(saved: SavedRun) -> float:
    """Local steps of a client in a round, in the mean; infinite where they are not known."""
    config, examples = saved.config, [sum(row) for row in saved.facts.get("counts", []) if sum(row)]
    if config.get("steps") is not None:
        return float(config["steps"])
    if not examples:
        return math.inf
    return float(config.get("epochs", 1)) * fmean(math.ceil(n / config.get("batch_size", 32)) for n in examples)


def depths(saved: SavedRun) -> dict[str, int]:
    """Stratum → its place from the input on, but for idle ones; empty for runs without facts."""
    return {stratum["name"]: place for place, stratum in enumerate(trained_strata(saved.facts))}


def trained_strata(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What facts tell of the strata, in order, without idle ones."""
    return [stratum for stratum in facts.get("model", {}).get("strata", []) if not stratum.get("idle")]


def classifier(saved: SavedRun) -> str | None:
    """The stratum that is the classifier; in a run from before that was told, the last one."""
    strata = trained_strata(saved.facts)
    if any("classifies" in stratum for stratum in strata):
        return next((stratum["name"] for stratum in strata if stratum.get("classifies")), None)
    return strata[-1]["name"] if strata else None


def by_name(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Name → the mean of its finite numbers over rounds, in the order of the rows."""
    names = merged(rounds)
    held = {name: numbers(found.get(name) for found in rounds) for name in names}
    return {name: fmean(values) for name, values in held.items() if values}


def merged(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """All names, each behind those that it follows in a row: a row may lack some."""
    names: list[str] = []
    for found in rounds:
        place = 0
        for name in found:
            if name not in names:
                names.insert(place, name)
            place = names.index(name) + 1
    return names


def number(value: Any) -> float | None:
    """What is a finite number, and not too large to be reckoned with."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if real and abs(value) <= LARGEST else None


def numbers(values: Any) -> list[float]:
    """Those that are finite numbers."""
    return [v for v in map(number, values) if v is not None]


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks, where equal values share the mean of theirs; 0 where one does not vary."""
    one, other = _ranks(left), _ranks(right)
    middle = (len(one) - 1) / 2
    products = sum((a - middle) * (b - middle) for a, b in zip(one, other, strict=True))
    scale = math.sqrt(sum((a - middle) ** 2 for a in one) * sum((b - middle) ** 2 for b in other))
    return products / scale if scale else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


def middle(values: Sequence[float]) -> float:
    """The median."""
    return float(median(values))


def percent(share: float) -> str:
    """0.614 → 61.4 %."""
    return _beyond(100 * share, "%") or f"{100 * share:.1f} %"


def change(share: float) -> str:
    """-0.41 → -41 %."""
    return _beyond(100 * share, "%") or f"{100 * share:+.0f} %"


def times(ratio: float) -> str:
    """4.23 → 4.2 times, 42.3 → 42 times."""
    return _beyond(ratio, "times") or (f"{ratio:.1f} times" if ratio < 10 else f"{ratio:.0f} times")


def _beyond(value: float, unit: str) -> str:
    """What is told instead of digits that say nothing; empty for an ordinary value."""
    if abs(value) <= MOST:
        return ""
    return f"more than {MOST} {unit}" if value > 0 else f"less than -{MOST} {unit}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """a, b, c and 4 more."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
