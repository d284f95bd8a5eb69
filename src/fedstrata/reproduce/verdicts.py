"""The verdict on a claim, by an interval over the seeds: it holds, it does not hold, or it is not decided.

All rules work on nothing but each seed's figures, so that anybody can recount a report: `judge(rule, values)`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Seeds = Mapping[int, float]
"""Seed → a figure of that seed's run."""
Values = Mapping[str, Mapping[int, Any]]
"""Name of a series → seed → its figure; None where a run never reached what is counted."""

CONFIDENCE = 0.9
"""Of the two-sided interval; a claim that holds has its whole interval on one side, so it errs once in twenty times."""
EVIDENCE_SEEDS = 5
"""The least number of seeds at the scale `evidence`."""
EQUAL_SEEDS = 5
"""How many equal seeds decide: by chance all five are on one side once in 32 times."""
MOST = 1000
"""How many seeds are thought of: beyond them nobody would decide the claim in this way."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim.

    Args:
        holds: None if it is not decided.
        interval: of the figure that is judged, if it is one and there are two seeds.
        seeds: how many would decide it at this spread; None if it is decided, or if more than `MOST` would be needed.
        reason: why it is not decided.
    """

    holds: bool | None
    interval: tuple[float, float] | None = None
    seeds: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        return {True: "holds", False: "does not hold", None: "not decided"}[self.holds]


@dataclass(frozen=True)
class Rule:
    """How a claim is judged by its values.

    Args:
        kind: difference (one − other, paired by seed), figure (one figure per seed), count (exact, without chance),
            everywhere (a difference under each of several settings), best (one of ours against every other) or rounds
            (the fewest of all, by signs).
        low: what the figure must be above; None for no limit.
        high: what it must be below; None for no limit.
        ours: of the kinds best and rounds: the names of the series that should be ahead.
    """

    kind: str
    low: float | None = 0.0
    high: float | None = None
    ours: tuple[str, ...] = ()


def judge(rule: Rule, values: Values) -> Verdict:
    """The verdict on a claim, from its values alone."""
    return _JUDGES[rule.kind](rule, values)


# --- intervals -------------------------------------------------------------------------------------------------------


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| ≤ t) = confidence for Student's distribution with so many degrees of freedom."""
    from scipy.special import stdtrit  # only where a report is made

    return float(stdtrit(degrees, (1 + confidence) / 2))


def t_interval(values: Iterable[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """mean ± t·s/√n with n − 1 degrees of freedom; None for fewer than two values."""
    found = list(values)
    if len(found) < 2:
        return None
    half = t_quantile(len(found) - 1, confidence) * statistics.stdev(found) / math.sqrt(len(found))
    return statistics.fmean(found) - half, statistics.fmean(found) + half


def seeds_to_decide(distance: float, deviation: float, confidence: float = CONFIDENCE) -> int | None:
    """The least n for which t·s/√n is below a mean's distance from the threshold; None if more than `MOST`."""
    for count in range(2, MOST + 1):
        if t_quantile(count - 1, confidence) * deviation / math.sqrt(count) < abs(distance):
            return count
    return None


def judge_figure(found: Sequence[float], low: float | None, high: float | None) -> Verdict:
    """Holds if the interval is between the limits, does not hold if it is beyond one of them.

    Seeds that are all equal tell no spread: they are judged as in the sign test, for which five are enough.
    """
    interval = t_interval(found)
    if interval is None:
        return Verdict(None, reason="one seed gives no interval" if found else "no seed has the figures")
    if is_constant(found) and len(found) < EQUAL_SEEDS:
        return Verdict(None, interval, EQUAL_SEEDS, f"all seeds are equal: {EQUAL_SEEDS} of them would decide it")
    inside = (low is None or interval[0] > low) and (high is None or interval[1] < high)
    outside = (low is not None and interval[1] < low) or (high is not None and interval[0] > high)
    if inside or outside:
        return Verdict(inside, interval)
    mean = statistics.fmean(found)
    distance = min(abs(mean - limit) for limit in (low, high) if limit is not None)
    needed = seeds_to_decide(distance, statistics.stdev(found))
    return Verdict(None, interval, needed, needed_text(needed))


def is_constant(found: Sequence[float]) -> bool:
    """True if they differ by rounding alone."""
    return statistics.stdev(found) <= 1e-9 * max(map(abs, found))


def needed_text(seeds: int | None) -> str:
    """How many seeds would decide a claim."""
    if seeds is None:
        return f"more than {MOST:,} seeds would be needed to decide it at this spread"
    return f"{seeds:,} seeds would decide it at this spread"


def shared_seeds(*several: Mapping[int, Any]) -> list[int]:
    """The seeds that all of them have, in the order of the first."""
    first, *others = several
    return [seed for seed in first if all(seed in other for other in others)]


def differences(one: Seeds, other: Seeds) -> dict[int, float]:
    """Seed → one − other, for the seeds that both have."""
    return {seed: one[seed] - other[seed] for seed in shared_seeds(one, other)}


# --- rules -----------------------------------------------------------------------------------------------------------


def _judge_difference(rule: Rule, values: Values) -> Verdict:
    found = list(differences(values["one"], values["other"]).values()) if values else []
    return judge_figure(found, rule.low, rule.high)


def _judge_figure(rule: Rule, values: Values) -> Verdict:
    return judge_figure(list(values["figure"].values()) if values else [], rule.low, rule.high)


def _judge_count(rule: Rule, values: Values) -> Verdict:
    """What is counted is the same whatever the seed, so one is enough, and all must agree."""
    found = values["figure"].values() if values else ()
    fits = {(rule.low is None or v >= rule.low) and (rule.high is None or v <= rule.high) for v in found}
    if len(fits) == 1:
        return Verdict(fits.pop())
    return Verdict(None, reason="the seeds differ" if fits else "no run has the figure")


def _judge_everywhere(rule: Rule, values: Values) -> Verdict:
    """Holds if it does under every setting; does not hold if it does not under one of them."""
    settings = list(dict.fromkeys(key.partition(", ")[2] for key in values))
    pairs = [{side: values[f"{side}, {setting}"] for side in ("one", "other")} for setting in settings]
    return _join_all([_judge_difference(rule, pair) for pair in pairs])


def _join_all(verdicts: Sequence[Verdict]) -> Verdict:
    """All must hold, and one that does not is enough."""
    held = [verdict.holds for verdict in verdicts]
    if not held:
        return Verdict(None, reason="there is nothing to compare")
    if False in held or None not in held:
        return Verdict(False not in held)
    undecided = [verdict for verdict in verdicts if verdict.holds is None]
    last = max(undecided, key=lambda verdict: verdict.seeds or MOST + 1)
    return Verdict(None, None, last.seeds, last.reason)


def rivals(rule: Rule, values: Values) -> dict[str, dict[str, Verdict]]:
    """Ours → every other → the verdict on ours being above, for those that have two seeds in common."""
    found: dict[str, dict[str, Verdict]] = {}
    for mine in (label for label in rule.ours if values.get(label)):
        others = [label for label in values if label not in rule.ours]
        gains = {other: list(differences(values[mine], values[other]).values()) for other in others}
        found[mine] = {other: judge_figure(gain, 0.0, None) for other, gain in gains.items() if len(gain) > 1}
    return found


def _judge_best(rule: Rule, values: Values) -> Verdict:
    """Holds if one of ours is above every other; does not hold if each of ours is below some other."""
    whole = [_join_all(list(against.values())) for against in rivals(rule, values).values()]
    held = [verdict.holds for verdict in whole]
    if not held or not any(rivals(rule, values).values()):
        return Verdict(None, reason="no two methods have two seeds in common")
    if True in held or None not in held:
        return Verdict(True in held)
    nearest = min((v for v in whole if v.holds is None), key=lambda verdict: verdict.seeds or MOST + 1)
    return Verdict(None, None, nearest.seeds, nearest.reason)


def chance(wins: int, losses: int) -> float:
    """P(at least so many wins) if a win and a loss are as likely as each other."""
    total = wins + losses
    return float(sum(math.comb(total, k) for k in range(wins, total + 1)) / 2**total)


def judge_signs(wins: int, losses: int, ties: int) -> Verdict:
    """The sign test, without ties: holds if so many wins would come by chance once in twenty times or less."""
    allowed = (1 - CONFIDENCE) / 2 + 1e-12
    for side, (mine, theirs) in {True: (wins, losses), False: (losses, wins)}.items():
        if mine > theirs and chance(mine, theirs) <= allowed:
            return Verdict(side)
    total = wins + losses + ties
    if not wins + losses:
        return Verdict(None, reason="all seeds are equal" if total else "no seed has the figures")
    for count in range(total + 1, MOST + 1):
        more, less = (round(count * part / total) for part in (max(wins, losses), min(wins, losses)))
        if more > less and chance(more, less) <= allowed:
            return Verdict(None, None, count, needed_text(count))
    return Verdict(None, reason=needed_text(None))


def _judge_rounds(rule: Rule, values: Values) -> Verdict:
    """Ours against each of the others by signs: rounds are whole numbers, and some runs never get there."""
    (mine,) = rule.ours
    others = [label for label in values if label != mine and values[label]]
    if not values.get(mine) or not others:
        return Verdict(None, reason="there is nothing to compare")
    return _join_all([judge_signs(*count_signs(values[mine], values[other])) for other in others])


def count_signs(mine: Mapping[int, Any], other: Mapping[int, Any]) -> tuple[int, int, int]:
    """In how many seeds mine needs fewer, more, and as many; None is more than any number, and nothing beside None."""
    signs = []
    for seed in shared_seeds(mine, other):
        a, b = (math.inf if value is None else value for value in (mine[seed], other[seed]))
        signs.append((a > b) - (a < b))
    return signs.count(-1), signs.count(1), signs.count(0)


_JUDGES: Mapping[str, Callable[[Rule, Values], Verdict]] = {
    "difference": _judge_difference,
    "figure": _judge_figure,
    "count": _judge_count,
    "everywhere": _judge_everywhere,
    "best": _judge_best,
    "rounds": _judge_rounds,
}
