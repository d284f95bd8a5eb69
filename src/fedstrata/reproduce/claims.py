"""A paper's claims as named checks: what holds at this scale, and by which figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedstrata.compare.table import Stat, spread, stat

Seeds = Mapping[int, float]
"""Seed → a figure of that seed's run."""


@dataclass(frozen=True)
class Check:
    """A claim, and what was measured of it.

    Args:
        name: what is claimed.
        holds: None if there are no figures to decide by.
        figures: what was measured, in words.
        paper: what the paper measured.
        values: every seed's figures, in full precision.
    """

    name: str
    holds: bool | None
    figures: str
    paper: str = ""
    values: Mapping[str, Seeds] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Whether the claim holds, in two words or three."""
        return {True: "holds", False: "does not hold", None: "cannot be told"}[self.holds]

    def __str__(self) -> str:
        return f"{self.verdict}: {self.name}: {self.figures}" + (f" (paper: {self.paper})" if self.paper else "")


@dataclass(frozen=True)
class Unit:
    """How figures are written: mean ± standard deviation, and a difference of two."""

    spread: Callable[[Stat | None], str]
    difference: Callable[[Stat], str]

    def cell(self, seeds: Seeds) -> str:
        """A cell of a table: mean ± standard deviation over the seeds."""
        return self.spread(stat(seeds.values()))


def plain_unit(digits: int, factor: int = 1, suffix: str = "") -> Unit:
    """A unit of plain numbers: so many times the figure, with so many digits after the point."""

    def text(value: Stat | None) -> str:
        if value is None:
            return "–"
        deviation = "" if value.std is None else f" ± {factor * value.std:.{digits}f}"
        return f"{factor * value.mean:.{digits}f}{deviation}{suffix}"

    return Unit(text, lambda gain: ("+" if gain.mean >= 0 else "") + text(gain))


def _points(gain: Stat) -> str:
    return f"{100 * gain.mean:+.2f}" + ("" if gain.std is None else f" ± {100 * gain.std:.2f}") + " points"


POINTS = Unit(lambda value: f"{spread(value)} %", _points)
GAINS = Unit(lambda value: f"{spread(value)} points", _points)
"""Of figures that are themselves differences of accuracies."""


PLAIN = plain_unit(4)


def cell(seeds: Seeds) -> str:
    """A cell of a table of accuracies: mean ± standard deviation over the seeds, in percent."""
    return spread(stat(seeds.values()))


def differences(one: Seeds, other: Seeds) -> dict[int, float]:
    """Seed → one − other, for the seeds that both have."""
    return {seed: one[seed] - other[seed] for seed in one if seed in other}


def above(
    name: str,
    one: Seeds,
    other: Seeds,
    *,
    paper: str = "",
    unit: Unit = POINTS,
    ties: bool = False,
    margin: float = 0.0,
) -> Check:
    """The claim that one figure is above another: in the mean over the seeds that both have.

    The difference is given with its standard deviation over the seeds, so that a reader sees what is noise.

    Args:
        name: the claim.
        one: what should be above.
        other: what should be below.
        paper: what the paper measured.
        unit: how to write them.
        ties: True if equal is enough.
        margin: how far below it may be.
    """
    both = [seed for seed in one if seed in other]
    if not both:
        return Check(name, None, "no seed has both figures", paper)
    gains = [one[seed] - other[seed] for seed in both]
    gain = stat(gains)
    assert gain is not None
    count = sum(_is_above(each + margin, ties) for each in gains)
    least = f" {unit.difference(Stat(-margin, None, 1))}" if margin else ""
    pair = (stat(figures[seed] for seed in both) for figures in (one, other))
    figures = (
        f"{' against '.join(unit.spread(value) for value in pair)}, {unit.difference(gain)}, "
        f"{'not below' if ties else 'above'}{least} in {_of_seeds(count, len(both))}"
    )
    return Check(name, _is_above(gain.mean + margin, ties), figures, paper, {"one": dict(one), "other": dict(other)})


def beyond(name: str, found: Seeds, limit: float, *, below: bool = False, unit: Unit = PLAIN) -> Check:
    """The claim that a figure is above a limit, or below it, in the mean over the seeds."""
    values = stat(found.values())
    if values is None:
        return Check(name, None, "no seed has the figure")
    side = -1 if below else 1
    count = sum(side * (value - limit) > 0 for value in found.values())
    figures = f"{unit.spread(values)}, {'below' if below else 'above'} {limit:g} in {_of_seeds(count, values.count)}"
    return Check(name, side * (values.mean - limit) > 0, figures, values={"figure": dict(found)})


def _of_seeds(count: int, total: int) -> str:
    return f"{count} of {total} seed{'s' * (total != 1)}"


def _is_above(gain: float, ties: bool) -> bool:
    return gain >= 0 if ties else gain > 0


def always_above(name: str, pairs: Mapping[str, tuple[Seeds, Seeds]], *, paper: str = "") -> Check:
    """The claim that one accuracy is above another under every one of some settings."""
    checks = {setting: above(name, *pair) for setting, pair in pairs.items()}
    verdicts = [check.holds for check in checks.values()]
    holds = None if None in verdicts else all(verdicts)
    values = {f"{side}, {s}": v for s, check in checks.items() for side, v in check.values.items()}
    return Check(name, holds, "; ".join(f"{s}: {c.figures}" for s, c in checks.items()), paper, values)


def best(name: str, ours: Iterable[str], figures: Mapping[str, Seeds], *, paper: str = "") -> Check:
    """The claim that one of ours has the highest mean of all, over the seeds that all have."""
    found = {label: seeds for label, seeds in figures.items() if seeds}
    shared = set.intersection(*map(set, found.values())) if found else set()
    means = {label: statistics.fmean(seeds[s] for s in shared) for label, seeds in found.items()} if shared else {}
    ours, others = [[n for n in means if (n in set(ours)) is mine] for mine in (True, False)]
    if not ours or not others:
        return Check(name, None, "there is nothing to compare", paper)
    first, second = (max(labels, key=lambda label: means[label]) for labels in (ours, others))
    pair = ({seed: figures[label][seed] for seed in sorted(shared)} for label in (first, second))
    check = above(name, *pair, paper=paper)
    return Check(name, check.holds, f"{first} against {second}: {check.figures}", paper, check.values)


def fewest(name: str, ours: str, rounds: Mapping[str, Mapping[int, int | None]], *, paper: str = "") -> Check:
    """The claim that ours needs no more rounds than any other, in the median over the seeds that all have.

    None is a run that never reached the target: it counts as longer than any that did.
    """
    found = {label: seeds for label, seeds in rounds.items() if seeds}
    shared = sorted(set.intersection(*map(set, found.values()))) if found else []
    others = [label for label in found if label != ours]
    if ours not in found or not others or not shared:
        return Check(name, None, "there is nothing to compare", paper)
    needed = {label: {s: math.inf if (n := found[label][s]) is None else float(n) for s in shared} for label in found}
    medians = {label: statistics.median(seeds.values()) for label, seeds in needed.items()}
    first = min(others, key=lambda label: medians[label])
    holds = math.isfinite(medians[ours]) and medians[ours] <= medians[first]
    count = sum(
        math.isfinite(needed[ours][s]) and needed[ours][s] <= min(needed[label][s] for label in others) for s in shared
    )
    figures = (
        f"{ours} against {first}: {rounds_text(found[ours].values())} against {rounds_text(found[first].values())}, "
        f"no more than any other in {_of_seeds(count, len(shared))}"
    )
    reached = {
        label: {s: number for s, number in seeds.items() if math.isfinite(number)} for label, seeds in needed.items()
    }
    return Check(name, holds, figures, paper, reached)


def rounds_text(found: Iterable[int | None]) -> str:
    """Rounds to a target, seed by seed; – for a run that did not reach it."""
    return ", ".join("–" if number is None else str(number) for number in found)


def within(name: str, shares: Sequence[float], lowest: float, highest: float, *, paper: str = "") -> Check:
    """The claim that a share of a cost lies in a range."""
    if not shares:
        return Check(name, None, "no run has the figure", paper)
    mean = statistics.fmean(shares)
    return Check(name, lowest <= mean <= highest, f"{100 * mean:.1f} %", paper, {"share": dict(enumerate(shares))})
