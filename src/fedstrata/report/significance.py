"""Is a difference more than chance? Paired tests over the seeds, Holm's correction, and ranks over all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.05
"""Differences with a smaller p are called significant."""
ROUNDING = 1e-12
"""What rounding may add to a difference, as a share of the scores."""


def paired_p(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """The two-sided p of a paired t-test over the seeds that both have.

    t = mean(d)·√n / std(d) with n − 1 degrees of freedom, d the differences. None for fewer than two seeds, and for
    differences that are all the same and not 0: these tell no spread. What rounding makes of equal differences
    (0.81 − 0.8 is not quite 0.82 − 0.81) is none, or nothing would be more significant.
    """
    pairs = [(one[seed], other[seed]) for seed in one if seed in other]
    differences = [own - its for own, its in pairs]
    if len(differences) < 2:
        return None
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    noise = ROUNDING * max(abs(score) for pair in pairs for score in pair)
    if deviation <= noise:
        return 1.0 if abs(mean) <= noise else None
    from scipy.special import stdtr  # only where a test is made

    return float(2 * stdtr(len(differences) - 1, -abs(mean) * math.sqrt(len(differences)) / deviation))


def holm(found: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values of m tests: with p_1 ≤ p_2 ≤ … it is max_{j ≤ i} min(1, (m − j + 1)·p_j)."""
    adjusted, largest = {}, 0.0
    for place, name in enumerate(sorted(found, key=lambda name: found[name])):
        largest = max(largest, min(1.0, (len(found) - place) * found[name]))
        adjusted[name] = largest
    return adjusted


@dataclass(frozen=True)
class Ranking:
    """How methods rank over several blocks, such as seeds.

    Args:
        ranks: method → its mean rank; 1 is the best.
        blocks: how many there are.
        p: of Friedman's test, that all rank alike.
        critical: mean ranks that are further apart differ significantly, by Nemenyi's test.
    """

    ranks: Mapping[str, float]
    blocks: int
    p: float
    critical: float

    @property
    def cliques(self) -> list[tuple[str, ...]]:
        """The largest groups of neighbours whose ends do not differ significantly, the best first."""
        order = sorted(self.ranks, key=lambda name: self.ranks[name])
        found: list[tuple[str, ...]] = []
        for start, first in enumerate(order):
            group = tuple(n for n in order[start:] if self.ranks[n] - self.ranks[first] <= self.critical)
            if len(group) > 1 and not any(set(group) <= set(other) for other in found):
                found.append(group)
        return found


def rank_methods(scores: Mapping[str, Sequence[float]], lower: bool = False, level: float = LEVEL) -> Ranking | None:
    """Friedman's and Nemenyi's tests (Demšar, JMLR 2006).

    χ² = 12N/(k(k+1))·(ΣR_j² − k(k+1)²/4), divided by 1 − Σ(t³ − t)/(N(k³ − k)) for ties of t, on k − 1 degrees of
    freedom; the critical difference is q_α·√(k(k+1)/(6N)), q_α the studentised range over √2.

    Args:
        scores: method → its score in each block.
        lower: True if less is better.
        level: of Nemenyi's test.

    Returns:
        None for fewer than three methods or two blocks.
    """
    table = np.array(list(scores.values()), dtype=float).T
    if table.ndim != 2 or table.shape[0] < 2 or table.shape[1] < 3:
        return None
    count, k = table.shape
    ranks = np.array([_ranks(row if lower else -row) for row in table])
    means = ranks.mean(0)
    ties = sum(
        (np.unique(row, return_counts=True)[1] ** 3 - np.unique(row, return_counts=True)[1]).sum() for row in ranks
    )
    left = 1 - ties / (count * (k**3 - k))
    statistic = 12 * count / (k * (k + 1)) * ((means**2).sum() - k * (k + 1) ** 2 / 4)
    from scipy.special import gammaincc

    p = 1.0 if left == 0 else float(gammaincc((k - 1) / 2, max(statistic / left, 0.0) / 2))
    critical = studentised_range(k, level) / math.sqrt(2) * math.sqrt(k * (k + 1) / (6 * count))
    return Ranking(dict(zip(scores, map(float, means), strict=True)), count, p, critical)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, the least first; equal values share their mean rank."""
    below = (values[:, None] > values[None, :]).sum(1)
    same = (values[:, None] == values[None, :]).sum(1)
    found: np.ndarray = below + (same + 1) / 2
    return found


def studentised_range(k: int, level: float) -> float:
    """The q with P(Q > q) = level for the range of k standard normal numbers.

    P(Q ≤ q) = k·∫φ(z)·(Φ(z) − Φ(z − q))^(k−1) dz, by the trapezoidal rule, which is as good as exact here.
    """
    from scipy.special import ndtr

    z = np.linspace(-9.0, 9.0, 1801)
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    low, high = 0.0, 20.0
    while high - low > 1e-10:
        q = (low + high) / 2
        inside = k * float((density * (ndtr(z) - ndtr(z - q)) ** (k - 1)).sum())
        low, high = (q, high) if inside < 1 - level else (low, q)
    return high
