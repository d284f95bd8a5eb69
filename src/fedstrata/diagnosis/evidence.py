"""Rules, the evidence that they return, and what they read in a run: its last probed rounds, strata and numbers."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fedstrata.core.text import SHARES, metric_title
from fedstrata.diagnosis.findings import Remedy
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.records import Record

RECENT = 3
"""Figures are of the last third of the probed rounds, and of this many at least."""


WARM = 30
"""Local steps before which neither accuracy nor running statistics say much: at the usual momentum of 0.1 these still
hold 0.9³⁰ = 4 % of their initial values then."""


IDEAL = {**dict.fromkeys((*SHARES, "r2", "perplexity"), 1.0), "rmse": 0.0, "mae": 0.0}
"""Metric → the best that it can be."""


LARGEST = 1e100
"""A number beyond it counts as not finite: squares and sums of it would not be."""

MOST = 1000
"""Shares and ratios beyond it are not printed: the digits of something that has exploded say nothing."""


@dataclass(frozen=True)
class Evidence:
    """What a rule has read: the figure that is compared with its threshold, and how to put it into words.

    Args:
        value: the figure.
        sentence: what was found, with all figures.
        figure: name → number, the value first.
        remedies: what to try; called only if the finding is reported.
        clients: whom it is about, where it is about single clients.
    """

    value: float
    sentence: str
    figure: Mapping[str, float]
    remedies: Callable[[], Sequence[Remedy | None]] = field(default=tuple)
    clients: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rule:
    """One thing to look for.

    Args:
        name: as in `thresholds.THRESHOLDS`.
        read: reads the evidence from a run; None if the run does not show it.
        probes: the probes that would show it; any one of them is enough.
        explains: what it causes: symptoms, and causes that come after it; only causes have any.
        backed_by: symptoms of which at least one must be present, if any of them was looked for: what is found in
            facts alone need not do harm.
    """

    name: str
    read: Callable[[SavedRun], Evidence | None]
    probes: tuple[str, ...] = ()
    explains: frozenset[str] = frozenset()
    backed_by: frozenset[str] = frozenset()


def is_remote(saved: SavedRun) -> bool:
    """Whether the clients' data was elsewhere, so that the server could measure nothing but updates."""
    return saved.config.get("engine") == "flower"


def absent_clients(saved: SavedRun) -> set[int]:
    """Whom the run does without; run.toml may have been edited."""
    return {int(c) for c in str(saved.config.get("without") or "").split(",") if c.strip().isdecimal()}


def recent_rounds(saved: SavedRun, probe: str) -> list[Any]:
    """What a probe found in the last third of its rounds, and in the last three at least."""
    found = list(saved.series(probe).values())
    return found[-max(RECENT, math.ceil(len(found) / 3)) :]


def training_records(saved: SavedRun) -> list[Record]:
    """The rounds but those after the last one, in which clients may tune models of their own."""
    planned = saved.config.get("rounds", math.inf)
    return [record for record in saved.records if record.round <= planned]


def steps_per_visit(saved: SavedRun) -> float:
    """Mean number of local steps per client and round, as planned; infinite if it is not known."""
    config, facts = saved.config, saved.facts
    examples = [n for n in facts.get("examples") or map(sum, facts.get("counts", [])) if n]
    own = saved.epochs_per_visit
    if own is None and config.get("steps") is not None:
        return float(config["steps"])
    if not examples:
        return math.inf
    return float(own or config.get("epochs", 1)) * fmean(math.ceil(n / config.get("batch_size", 32)) for n in examples)


def stratum_depths(saved: SavedRun) -> dict[str, int]:
    """Stratum → its place, counted from the input, without idle ones; empty for runs without facts."""
    return {stratum["name"]: place for place, stratum in enumerate(trained_strata(saved.facts))}


def trained_strata(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What the facts say of each stratum, in order, without idle ones."""
    return [stratum for stratum in facts.get("model", {}).get("strata", []) if not stratum.get("idle")]


def classifier_name(saved: SavedRun) -> str | None:
    """The name of the stratum that is the classifier; the last one in older runs, whose facts do not say."""
    strata = trained_strata(saved.facts)
    if any("classifies" in stratum for stratum in strata):
        return next((stratum["name"] for stratum in strata if stratum.get("classifies")), None)
    return strata[-1]["name"] if strata else None


def mean_by_name(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Name → the mean of its finite numbers over the rounds, in the order of the rows."""
    names = merge_names(rounds)
    held = {name: finite_numbers(found.get(name) for found in rounds) for name in names}
    return {name: fmean(values) for name, values in held.items() if values}


def merge_names(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """All names, each after those that precede it in a row: a row may lack some."""
    names: list[str] = []
    for found in rounds:
        place = 0
        for name in found:
            if name not in names:
                names.insert(place, name)
            place = names.index(name) + 1
    return names


def finite_number(value: Any) -> float | None:
    """The value if it is a finite number, and not too large to be squared: a file may have been edited."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return value if real and abs(value) <= LARGEST else None


def finite_numbers(values: Iterable[Any]) -> list[float]:
    """Those of the values that are finite numbers."""
    return [found for found in map(finite_number, values) if found is not None]


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's correlation of ranks, where equal values share their mean rank; 0 if either side does not vary."""
    one, other = _ranks(left), _ranks(right)
    middle = (len(one) - 1) / 2
    products = sum((a - middle) * (b - middle) for a, b in zip(one, other, strict=True))
    scale = math.sqrt(sum((a - middle) ** 2 for a in one) * sum((b - middle) ** 2 for b in other))
    return products / scale if scale else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [(bisect_left(order, v) + bisect_right(order, v) - 1) / 2 for v in values]


def client_text(saved: SavedRun, clients: Sequence[int]) -> str:
    """client 3 (Cleveland); clients 1, 4 and 2 more."""
    names = saved.facts.get("client_names", [])
    told = [f"{c} ({names[c]})" if 0 <= c < len(names) and names[c] != str(c) else str(c) for c in clients]
    return f"client{'s' if len(told) > 1 else ''} {first_few(told, 8)}"


def score_text(metric: str, score: float) -> str:
    """61.4 %, mIoU 12.0 %, RMSE 71.2."""
    said = percent_text(score) if metric in SHARES else f"{score:.3g}"
    return said if metric == "accuracy" else f"{metric_title(metric)} {said}"


def percent_text(share: float) -> str:
    """0.614 → 61.4 %."""
    return _beyond_text(100 * share, "%") or f"{100 * share:.1f} %"


def change_text(share: float) -> str:
    """-0.41 → -41 %."""
    return _beyond_text(100 * share, "%") or f"{100 * share:+.0f} %"


def times_text(ratio: float) -> str:
    """4.23 → 4.2 times, 42.3 → 42 times."""
    return _beyond_text(ratio, "times") or (f"{ratio:.1f} times" if ratio < 10 else f"{ratio:.0f} times")


def _beyond_text(value: float, unit: str) -> str:
    """What is printed instead of meaningless digits; empty for an ordinary value."""
    if abs(value) <= MOST:
        return ""
    return f"more than {MOST} {unit}" if value > 0 else f"less than -{MOST} {unit}"


def first_few(names: Sequence[str], most: int = 3) -> str:
    """a, b, c and 4 more."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
