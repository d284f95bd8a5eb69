"""A paper's claims as named checks: what holds at this scale, and by which figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fedstrata.compare.table import Stat, spread, stat
from fedstrata.reproduce.verdicts import (
    CONFIDENCE,
    Rule,
    Seeds,
    Values,
    Verdict,
    count_signs,
    differences,
    judge,
    rivals,
    shared_seeds,
)


@dataclass(frozen=True)
class Check:
    """A claim, and what was measured of it.

    Args:
        name: what is claimed.
        rule: how it is judged.
        figures: what was measured, in words.
        paper: what the paper measured.
        values: every seed's figures, in full precision: all that the rule looks at.
        missing: seeds whose runs are still to be made, for which the claim is not judged.
    """

    name: str
    rule: Rule
    figures: str
    paper: str = ""
    values: Values = field(default_factory=dict)
    missing: tuple[int, ...] = ()

    @cached_property
    def verdict(self) -> Verdict:
        """Whether the claim holds; not before all of its runs are there, or one would stop where it looks best."""
        if self.missing:
            return Verdict(None, reason=f"runs missing, seed{'s' * (len(self.missing) > 1)} {_list(self.missing)}")
        return judge(self.rule, self.values)

    @property
    def holds(self) -> bool | None:
        """None if it is not decided."""
        return self.verdict.holds

    @property
    def told(self) -> str:
        """The figures, and why they do not decide."""
        return "; ".join(filter(None, (self.figures, self.verdict.reason)))

    def __str__(self) -> str:
        return f"{self.verdict}: {self.name}: {self.told}" + (f" (paper: {self.paper})" if self.paper else "")

    def lacks(self, seeds: Iterable[int]) -> tuple[int, ...]:
        """Those of the seeds that some series of the claim has no figure for."""
        return tuple(s for s in seeds if not self.values or any(s not in found for found in self.values.values()))


def _list(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, seeds))


# --- how figures are written -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """How figures are written: mean ± standard deviation, a difference of two, and a plain number."""

    spread: Callable[[Stat | None], str]
    difference: Callable[[Stat], str]
    number: Callable[[float], str]

    def cell(self, seeds: Seeds) -> str:
        """A cell of a table: mean ± standard deviation over the seeds."""
        return self.spread(stat(seeds.values())) if seeds else spread(None)

    def interval(self, verdict: Verdict, *, signed: bool = True) -> str:
        """The interval that a verdict is based on; nothing if there is none."""
        if verdict.interval is None:
            return ""
        ends = [("+" if signed and end >= 0 else "") + self.number(end) for end in verdict.interval]
        return f"{100 * CONFIDENCE:g} % interval {' to '.join(ends)}"


def plain_unit(digits: int, factor: int = 1, suffix: str = "") -> Unit:
    """A unit of plain numbers: so many times the figure, with so many digits after the point."""

    def text(value: Stat | None) -> str:
        if value is None:
            return "–"
        deviation = "" if value.std is None else f" ± {factor * value.std:.{digits}f}"
        return f"{factor * value.mean:.{digits}f}{deviation}{suffix}"

    return Unit(
        text,
        lambda gain: ("+" if gain.mean >= 0 else "") + text(gain),
        lambda value: f"{factor * value:.{digits}f}",
    )


def _points(gain: Stat) -> str:
    return f"{100 * gain.mean:+.2f}" + ("" if gain.std is None else f" ± {100 * gain.std:.2f}") + " points"


def _hundredths(value: float) -> str:
    return f"{100 * value:.2f}"


POINTS = Unit(lambda value: f"{spread(value)} %", _points, _hundredths)
GAINS = Unit(lambda value: f"{spread(value)} points", _points, _hundredths)
"""Of figures that are themselves differences of accuracies."""


PLAIN = plain_unit(4)


def cell(seeds: Seeds) -> str:
    """A cell of a table of accuracies: mean ± standard deviation over the seeds, in percent."""
    return spread(stat(seeds.values()))


# --- claims ----------------------------------------------------------------------------------------------------------


def above(name: str, one: Seeds, other: Seeds, *, paper: str = "", unit: Unit = POINTS, margin: float = 0.0) -> Check:
    """The claim that one figure is above another, by the interval of their difference over the seeds that both have.

    Args:
        name: the claim.
        one: what should be above.
        other: what should be below.
        paper: what the paper measured.
        unit: how to write them.
        margin: how far below it may be.
    """
    rule = Rule("difference", low=-margin or 0.0)
    check = Check(name, rule, "", paper, {"one": dict(one), "other": dict(other)})
    return Check(name, rule, _pair_text(check, unit, margin), paper, check.values)


def _pair_text(check: Check, unit: Unit, margin: float) -> str:
    one, other = check.values["one"], check.values["other"]
    both, gains = shared_seeds(one, other), list(differences(one, other).values())
    gain = stat(gains)
    if gain is None:
        return ""
    count = sum(each + margin > 0 for each in gains)
    least = f" {unit.difference(Stat(-margin, None, 1))}" if margin else ""
    pair = (stat(figures[seed] for seed in both) for figures in (one, other))
    texts = [
        " against ".join(unit.spread(value) for value in pair),
        unit.difference(gain),
        unit.interval(check.verdict),
        f"above{least} in {_of_seeds(count, len(both))}",
    ]
    return ", ".join(filter(None, texts))


def beyond(name: str, found: Seeds, limit: float, *, below: bool = False, unit: Unit = PLAIN, paper: str = "") -> Check:
    """The claim that a figure is above a limit, or below it, by its interval over the seeds."""
    rule = Rule("figure", low=None, high=limit) if below else Rule("figure", low=limit)
    side = -1 if below else 1
    count = sum(side * (value - limit) > 0 for value in found.values())
    return _figure_check(name, rule, found, f"{'below' if below else 'above'} {limit:g}", count, unit, paper)


def within(name: str, found: Seeds, lowest: float, highest: float, *, unit: Unit = PLAIN, paper: str = "") -> Check:
    """The claim that a figure lies in a range, by its interval over the seeds."""
    rule = Rule("figure", low=lowest, high=highest)
    count = sum(lowest < value < highest for value in found.values())
    return _figure_check(name, rule, found, f"between {lowest:g} and {highest:g}", count, unit, paper)


def _figure_check(name: str, rule: Rule, found: Seeds, where: str, count: int, unit: Unit, paper: str) -> Check:
    values = {"figure": dict(found)}
    texts = [
        unit.spread(stat(found.values())),
        unit.interval(judge(rule, values), signed=False),
        f"{where} in {_of_seeds(count, len(found))}",
    ]
    return Check(name, rule, ", ".join(filter(None, texts)) if found else "", paper, values)


def counted(name: str, shares: Seeds, lowest: float, highest: float, *, paper: str = "") -> Check:
    """The claim that a share of a cost, which is counted and not left to chance, lies in a range."""
    mean = stat(shares.values())
    figures = "" if mean is None else f"{100 * mean.mean:.1f} %, counted, {_of_seeds(mean.count, mean.count)}"
    return Check(name, Rule("count", low=lowest, high=highest), figures, paper, {"figure": dict(shares)})


def _of_seeds(count: int, total: int) -> str:
    return f"{count} of {total} seed{'s' * (total != 1)}"


def always_above(name: str, pairs: Mapping[str, tuple[Seeds, Seeds]], *, paper: str = "") -> Check:
    """The claim that one accuracy is above another under every one of some settings."""
    checks = {setting: above(name, *pair) for setting, pair in pairs.items()}
    values = {f"{side}, {s}": v for s, check in checks.items() for side, v in check.values.items()}
    figures = "; ".join(f"{s}: {c.verdict}, {c.figures}" for s, c in checks.items() if c.figures)
    return Check(name, Rule("everywhere"), figures, paper, values)


def best(name: str, ours: Iterable[str], figures: Mapping[str, Seeds], *, paper: str = "") -> Check:
    """The claim that one of ours is above all others, each by the interval of its difference.

    A method with fewer than two seeds in common with ours, because the others diverged, is left out.
    """
    rule = Rule("best", ours=tuple(ours))
    found = {label: dict(seeds) for label, seeds in figures.items()}
    return Check(name, rule, _best_text(rule, found), paper, found)


def _best_text(rule: Rule, found: Values) -> str:
    """The best of ours against the best other, and how it stands against all."""
    means = {label: statistics.fmean(seeds.values()) for label, seeds in found.items() if seeds}
    mine, others = [[n for n in means if (n in rule.ours) is side] for side in (True, False)]
    if not mine or not others:
        return ""
    against = rivals(rule, found)
    first = max(mine, key=lambda label: means[label])
    gains = {label: stat(differences(found[first], found[label]).values()) for label in others}
    known = {label: gain.mean for label, gain in gains.items() if gain is not None and label in against[first]}
    second = min(known or means.keys() - set(mine), key=lambda label: known.get(label, -means[label]))
    held = [verdict.holds for verdict in against[first].values()]
    tally = f"of {len(held)} others above {held.count(True)}, below {held.count(False)}"
    left = [label for label in others if label not in against[first]]
    return "; ".join(
        filter(
            None,
            (
                f"{first} against {second}: {above('', found[first], found[second]).figures}",
                tally if held else "",
                f"left out, with fewer than two seeds: {', '.join(left)}" if left and held else "",
            ),
        )
    )


def fewest(name: str, ours: str, rounds: Mapping[str, Mapping[int, int | None]], *, paper: str = "") -> Check:
    """The claim that ours needs fewer rounds than every other, each by the signs of the seeds' differences.

    None is a run that never reached the target: it counts as longer than any that did.
    """
    rule = Rule("rounds", ours=(ours,))
    found = {label: dict(seeds) for label, seeds in rounds.items()}
    others = [label for label, seeds in found.items() if label != ours and seeds]
    if not found.get(ours) or not others:
        return Check(name, rule, "", paper, found)
    needed = {label: [math.inf if n is None else n for n in found[label].values()] for label in others}
    first = min(others, key=lambda label: statistics.median(needed[label]))
    fewer, more, equal = count_signs(found[ours], found[first])
    figures = (
        f"{ours} against {first}: {rounds_text(found[ours].values())} against {rounds_text(found[first].values())}, "
        f"fewer in {fewer}, more in {more} and as many in {equal} of {fewer + more + equal} seeds"
    )
    return Check(name, rule, figures, paper, found)


def rounds_text(found: Iterable[int | None]) -> str:
    """Rounds to a target, seed by seed; – for a run that did not reach it."""
    return ", ".join("–" if number is None else str(number) for number in found)
