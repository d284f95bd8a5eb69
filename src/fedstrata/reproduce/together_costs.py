"""Accuracy at equal cost, the best at every cost, and whether gains add up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedstrata.reproduce.verdicts import Seeds, Verdict, differences, judge_figure, shared_seeds
from fedstrata.runs.records import Record

COSTS: Mapping[str, Callable[[Record], int]] = {
    "bytes": lambda record: record.bytes_up + record.bytes_down,
    "FLOPs": lambda record: record.flops,
}
"""What a round costs: bytes both ways, and the clients' FLOPs, as they were counted."""
Accuracy = Callable[[Record], float | None]
Trace = Sequence[tuple[float, float]]
"""(cost so far, best accuracy so far) of a run, evaluation after evaluation."""


def trace(rounds: Sequence[Record], cost: Callable[[Record], int], accuracy: Accuracy) -> list[tuple[float, float]]:
    """A run's accuracy against what it has cost."""
    spent, best, found = 0, 0.0, list[tuple[float, float]]()
    for record in rounds:
        spent += cost(record)
        value = accuracy(record)
        if value is not None:
            best = max(best, value)
            found.append((float(spent), best))
    return found


def best_within(points: Trace, budget: float) -> float | None:
    """The best accuracy that a run has had for so much; None if its first evaluation costs more."""
    return max((value for cost, value in points if cost <= budget), default=None)


def equal_budgets(runs: Mapping[str, Mapping[int, Trace]]) -> dict[int, float]:
    """Seed → what the cheapest method's whole run costs: all methods have spent as much at some time.

    A method whose run of a seed diverged, or is still to be made, has no say in it.
    """
    seeds = dict.fromkeys(seed for of in runs.values() for seed in of)
    return {seed: min(of[seed][-1][0] for of in runs.values() if seed in of) for seed in seeds}


def at_equal_cost(runs: Mapping[str, Mapping[int, Trace]]) -> dict[str, Seeds]:
    """Method → seed → the best accuracy within the budget of that seed."""
    budgets = equal_budgets(runs)
    found = {label: {s: best_within(points, budgets[s]) for s, points in of.items()} for label, of in runs.items()}
    return {label: {s: v for s, v in of.items() if v is not None} for label, of in found.items()}


def mean_trace(several: Sequence[Trace]) -> list[tuple[float, float]]:
    """The mean over seeds, evaluation by evaluation."""
    return [
        (statistics.fmean(cost for cost, _ in points), statistics.fmean(value for _, value in points))
        for points in zip(*several, strict=False)
    ]


@dataclass(frozen=True)
class FrontPoint:
    """A method at a cost at which no other is as good for as little."""

    label: str
    cost: float
    accuracy: float


def pareto_front(curves: Mapping[str, Trace]) -> list[FrontPoint]:
    """The points that no other has at least the accuracy of for at most the cost, from the cheapest on."""
    points = [FrontPoint(label, cost, value) for label, curve in curves.items() for cost, value in curve]
    front: list[FrontPoint] = []
    for point in sorted(points, key=lambda p: (p.cost, -p.accuracy)):
        if not front or point.accuracy > front[-1].accuracy:
            front.append(point)
    return front


# --- do gains add up? ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Additivity:
    """What a combination gains over the base, beside what its parts gain alone.

    Args:
        gain: seed → the combination's.
        parts: seed → the sum of its parts' gains.
    """

    gain: Seeds
    parts: Seeds

    @property
    def surplus(self) -> dict[int, float]:
        """Seed → what is more than the sum."""
        return differences(self.gain, self.parts)

    @property
    def verdict(self) -> Verdict:
        """Whether the combination gains more than the sum."""
        return judge_figure(list(self.surplus.values()), 0.0, None)

    @property
    def reading(self) -> str:
        """The verdict in words."""
        told = {True: "more than the sum", False: "less than the sum", None: "not told apart from the sum"}
        return told[self.verdict.holds]


def additivity(figures: Mapping[str, Seeds], base: str, whole: str, parts: Sequence[str]) -> Additivity:
    """A combination against the sum of its parts, in the seeds that all of them have."""
    seeds = shared_seeds(*(figures[label] for label in (base, whole, *parts)))
    gains = {label: {s: figures[label][s] - figures[base][s] for s in seeds} for label in (whole, *parts)}
    return Additivity(gains[whole], {s: sum(gains[label][s] for label in parts) for s in seeds})
