"""Clients' inputs against the others', class by class: who holds other classes has other inputs, and is not broken.

Means are told in usual deviations, deviations by their logarithm against the usual one. A client is compared with the
others' examples of its own classes (or fifths of the targets), and it is out only if no mixture of classes would bring
it there: wrong labels are no wrong inputs. Where nobody holds its classes, it is out if it is far from all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median, pstdev
from typing import Any

from fedstrata.diagnosis.outliers import FEW, NORMAL

SKEWED = 0.3
"""Share of its examples by which a client's mixture of labels may differ from everybody's, before its inputs are
compared class by class alone."""

LEAST = 1e-3
"""Smallest share of the usual deviation that is told from none."""

LOOKED = 64
"""Inputs that a card without a count is of."""

CLEAR = 2.0
"""A score that confirms another: of how far a client is beyond every mixture of classes, in floors, or within them."""


@dataclass(frozen=True)
class Measure:
    """Something that is compared.

    Args:
        spread: what counts at least as the spread over clients, if they have many examples.
        error: and with n examples, this over √n, where that is more.
        alone: what counts as the spread over classes, where few are known: for clients whose classes nobody else holds.
    """

    spread: float
    error: float
    alone: float

    def floor(self, count: float) -> float:
        """The spread that counts at least for a client of so many examples."""
        return max(self.spread, self.error / math.sqrt(max(count, 1.0)))


SHIFT = Measure(0.15, 1.2, 1.0)
"""Of means, in deviations: that of 64 numbers is known to an eighth."""

SCALE = Measure(0.3, 1.4, 0.6)
"""Of the logarithm of deviations: of 64 examples it is known to a tenth, and of a table's rare values to a third."""


@dataclass(frozen=True)
class Part:
    """Some of a client's inputs: those of one class, of one fifth of the targets, or all."""

    count: float
    mean: Sequence[float | None]
    std: Sequence[float | None]

    @property
    def width(self) -> int:
        """How many columns there are."""
        return min(len(self.mean), len(self.std))


Value = Callable[[Part], float | None]
"""What is compared of a part."""

Known = Callable[[Part], float]
"""Of how many examples it is known."""

Reach = Callable[[Sequence[Part]], tuple[float, float] | None]
"""What is the least and the most that a mixture of such parts may have."""

Judged = dict[int, tuple[float, float]]
"""Client → (its robust score, how far it is from the others)."""


def read_part(card: Mapping[str, Any]) -> Part:
    """What a card, or a group in it, says; of older cards, that it is of 64 inputs."""
    return Part(float(card.get("count") or LOOKED), card.get("mean") or [], card.get("std") or [])


@dataclass(frozen=True)
class Inputs:
    """Everybody's inputs, as cards tell them.

    Args:
        whole: client → all of its inputs.
        groups: client → class → its inputs of that class, where the card tells them.
        counts: client → how many examples of each class it has, where that is known.
    """

    whole: Mapping[int, Part]
    groups: Mapping[int, Mapping[str, Part]]
    counts: Mapping[int, Sequence[float]]

    @cached_property
    def columns(self) -> range:
        """Numbers of the columns; none where clients have different numbers of them."""
        widths = {part.width for part in self.whole.values()}
        return range(min(widths) if len(widths) == 1 else 0)

    @cached_property
    def even(self) -> frozenset[int]:
        """Clients that are known to hold much the same classes as everybody."""
        shares = {client: [n / sum(row) for n in row] for client, row in self.counts.items() if sum(row)}
        everybody = [fmean(column) for column in zip(*shares.values(), strict=True)]
        apart = {c: sum(abs(p - q) for p, q in zip(row, everybody, strict=True)) / 2 for c, row in shares.items()}
        return frozenset(client for client, share in apart.items() if share < SKEWED)

    @cached_property
    def typical(self) -> float:
        """The median deviation over clients and columns."""
        known = [std for part in self.whole.values() for at in self.columns if (std := part.std[at]) is not None]
        return median(known) if known else 0.0

    def usual(self, at: int) -> float:
        """The deviation that a column's numbers are told in: the median client's, and half the typical one at least."""
        known = [std for part in self.whole.values() if (std := part.std[at]) is not None]
        return max(median(known) if known else 0.0, self.typical / 2)

    def judge_means(self, at: int) -> Judged:
        """Client → how far its mean of a column is from the others', in deviations."""
        usual = self.usual(at)

        def value(part: Part) -> float | None:
            mean = part.mean[at]
            return None if mean is None else mean / usual

        def known(part: Part) -> float:
            """The mean of what varies twice as much as usual is as certain as that of a quarter as many examples."""
            return part.count / max(1.0, (part.std[at] or 0.0) / usual) ** 2

        return self._judge(SHIFT, value, known, lambda others: _range_of(map(value, others)))

    def judge_deviations(self, at: int) -> Judged:
        """Client → how far the logarithm of its deviation of a column is from the others'."""
        usual = self.usual(at)

        def value(part: Part) -> float | None:
            std = part.std[at]
            return None if std is None else math.log(max(std / usual, LEAST))

        def reach(others: Sequence[Part]) -> tuple[float, float] | None:
            """A mixture varies at least as the narrowest class, and at most as the widest and the way between means."""
            known, means = _range_of(map(value, others)), _range_of(part.mean[at] for part in others)
            if known is None or means is None:
                return None
            wide = math.hypot(usual * math.exp(known[1]), (means[1] - means[0]) / 2)
            return known[0], math.log(max(wide / usual, LEAST))

        return self._judge(SCALE, value, lambda part: part.count, reach)

    def _judge(self, measure: Measure, value: Value, known: Known, reach: Reach) -> Judged:
        """As a whole, if its classes are everybody's; else within its classes or, if that is more, beyond all."""
        plain = _scores(_from_median({c: (value(p), known(p)) for c, p in self.whole.items()}), measure)
        within = _scores(self._within_classes(value, known), measure)
        found: Judged = {}
        for client, part in self.whole.items():
            others = self._others(client)
            own, limits = value(part), reach(others)
            if own is None or limits is None:
                continue
            floor = measure.floor(known(part))
            beyond = max(own - limits[1], 0.0) + min(own - limits[0], 0.0)
            alone = _spread(map(value, others), measure.alone) * math.sqrt(part.count / known(part))
            found[client] = beyond / max(floor, alone), beyond
            if client in self.even and client in plain:
                found[client] = _agreed(plain[client], within[client][0] if client in within else None)
            elif client in within:
                told = _agreed(within[client], beyond / floor)
                found[client] = max(told, found[client], key=lambda one: abs(one[0]))
        return found

    def _within_classes(self, value: Value, known: Known) -> dict[int, tuple[float, float]]:
        """Client → (how far its inputs are from those of the same classes elsewhere, in the mean; of how many)."""
        classes = {name for parts in self.groups.values() for name in parts}
        sums: dict[int, list[tuple[float, float]]] = {}
        for name in classes:
            held = {c: (value(parts[name]), known(parts[name])) for c, parts in self.groups.items() if name in parts}
            for client, (apart, count) in _from_median(held).items():
                sums.setdefault(client, []).append((apart, count))
        return {
            client: (sum(apart * n for apart, n in several) / sum(n for _, n in several), sum(n for _, n in several))
            for client, several in sums.items()
        }

    def _others(self, client: int) -> list[Part]:
        """The others' classes, each one's median over them; where no card tells classes, every other client."""
        rest = [parts for other, parts in self.groups.items() if other != client]
        names = {name for parts in rest for name in parts}
        if not names:
            return [part for other, part in self.whole.items() if other != client]
        return [_median_part([parts[name] for parts in rest if name in parts], self.columns) for name in names]


def _range_of(values: Iterable[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None


def _agreed(judged: tuple[float, float], other: float | None) -> tuple[float, float]:
    """A score that another one confirms, or else the smaller of them; as it is where there is no other."""
    score, apart = judged
    if other is None or other * math.copysign(1, score) > CLEAR:
        return judged
    return min(score, other, key=abs), apart


def _spread(values: Iterable[float | None], most: float) -> float:
    """The standard deviation of a few classes' values, and no more than what counts where they are too few."""
    known = [value for value in values if value is not None]
    return min(pstdev(known), most) if len(known) >= FEW else most


def _median_part(parts: Sequence[Part], columns: range) -> Part:
    def middle(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
        known = [[row[at] for row in rows if row[at] is not None] for at in columns]
        return [median(numbers) if numbers else None for numbers in known]  # type: ignore[type-var]

    return Part(sum(p.count for p in parts), middle([p.mean for p in parts]), middle([p.std for p in parts]))


def _from_median(values: Mapping[int, tuple[float | None, float]]) -> dict[int, tuple[float, float]]:
    """Client → (value − the clients' median, count); empty if few have a value."""
    known = {client: (value, count) for client, (value, count) in values.items() if value is not None}
    if len(known) < FEW:
        return {}
    middle = median(value for value, _ in known.values())
    return {client: (value - middle, count) for client, (value, count) in known.items()}


def _scores(apart: Mapping[int, tuple[float, float]], measure: Measure) -> Judged:
    """Client → (distance/max(1.4826·MAD, its floor), distance), where the MAD is that of the distances."""
    if len(apart) < FEW:
        return {}
    middle = median(value for value, _ in apart.values())
    spread = NORMAL * median(abs(value - middle) for value, _ in apart.values())
    return {
        client: ((value - middle) / max(spread, measure.floor(count)), value - middle)
        for client, (value, count) in apart.items()
    }
