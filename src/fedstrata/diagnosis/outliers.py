"""How unlike the others each client is: robust scores, round by round and stratum by stratum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from fedstrata.diagnosis.evidence import RECENT, finite_number
from fedstrata.runs.reader import SavedRun

NORMAL = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""

FEW = 4
"""Clients that a round must show: of three, two that agree say nothing about the third."""

LENGTH_FLOOR = 0.25
"""Spread of the logarithm of update norms that counts at least: honest clients' norms differ by a quarter anyway."""

COSINE_FLOOR = 0.1
"""Spread of cosines that counts at least."""

Columns = Mapping[str, Any]
"""What a probe found of a round: names → columns with a number for each client, in the order of the row's clients."""


def robust_scores(values: Mapping[int, float], floor: float) -> dict[int, float]:
    """Client → (value − median)/max(1.4826·MAD, floor), where MAD is the median distance from the median."""
    if not values:
        return {}
    middle = median(values.values())
    spread = NORMAL * median(abs(value - middle) for value in values.values())
    return {client: (value - middle) / max(spread, floor) for client, value in values.items()}


def column(row: Mapping[str, Any], values: Any) -> dict[int, float]:
    """Client → its number in a column of a row; without those that have none."""
    if not isinstance(values, list | tuple):
        return {}
    pairs = zip(row.get("clients", ()), values, strict=False)
    return {
        client: float(number)
        for client, value in pairs
        if isinstance(client, int) and (number := finite_number(value)) is not None
    }


def recent_rows(saved: SavedRun, probe: str) -> list[Mapping[str, Any]]:
    """The rows of the last half of the rounds that a probe measured, of three at least: everybody should be in one."""
    rows = [row for row in saved.probes if probe in row]
    return rows[-max(RECENT, math.ceil(len(rows) / 2)) :]


def over_rounds(rounds: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Client → the median of its numbers over the rounds that show it."""
    seen: dict[int, list[float]] = {}
    for found in rounds:
        for client, value in found.items():
            seen.setdefault(client, []).append(value)
    return {client: median(values) for client, values in sorted(seen.items())}


def scores_over_rounds(
    rows: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Mapping[int, float]], floor: float
) -> dict[int, float]:
    """Client → the median over rounds of its robust score within the round; rounds that show few clients do not count.

    Args:
        rows: lines of probes.jsonl.
        read: a row → client → a number.
        floor: the spread over clients that counts at least.
    """
    found = [read(row) for row in rows]
    return over_rounds(robust_scores(values, floor) for values in found if len(values) >= FEW)


def log_norms(row: Mapping[str, Any], norms: Any) -> dict[int, float]:
    """Client → the logarithm of a norm; an update of zero counts as a millionth of the median one."""
    found = column(row, norms)
    typical = median(found.values()) if found else 0.0
    return {client: math.log(max(norm, 1e-6 * typical)) for client, norm in found.items() if typical > 0}


def length_scores(row: Mapping[str, Any], norms: Any) -> dict[int, float]:
    """Client → how unlike the others' its update's norm is, as far as the number of its steps does not explain it.

    Of two scores, of the norm and of the norm per step, the one that is nearer to zero; 0 if they are on two sides.
    """
    plain = log_norms(row, norms)
    steps = column(row, row.get("visits", {}).get("steps"))
    per_step = {client: value - math.log(max(steps.get(client, 1.0), 1.0)) for client, value in plain.items()}
    one, other = robust_scores(plain, LENGTH_FLOOR), robust_scores(per_step, LENGTH_FLOOR)
    return {client: _nearer_zero(one[client], other[client]) for client in one}


def _nearer_zero(one: float, other: float) -> float:
    return 0.0 if one * other <= 0 else min(one, other, key=abs)


def direction_scores(row: Mapping[str, Any], cosines: Any) -> dict[int, float]:
    """Client → by how much its cosine to the others' centre is below the others'; negative where it is above."""
    return {client: -score for client, score in robust_scores(column(row, cosines), COSINE_FLOOR).items()}


def outlier_scores(saved: SavedRun) -> dict[int, dict[int, dict[str, float]]]:
    """Round → client → stratum → its outlier score: that of the norm or of the direction, whichever is larger.

    Up to 3 is ordinary, from 5 on it is far out. Of rounds that the probe `visits` measured on four clients at least.
    """
    found: dict[int, dict[int, dict[str, float]]] = {}
    for row in saved.probes:
        visits = row.get("visits", {})
        for stratum, norms in visits.get("norm", {}).items():
            lengths = length_scores(row, norms)
            ways = direction_scores(row, visits.get("cosine", {}).get(stratum))
            for client in lengths if len(lengths) >= FEW else ():
                score = max(abs(lengths[client]), ways.get(client, 0.0))
                found.setdefault(row["round"], {}).setdefault(client, {})[stratum] = round(score, 3)
    return found


def worst_strata(saved: SavedRun, client: int, most: int = 3) -> list[str]:
    """The strata in which a client is furthest out, with their scores in the median over the rounds, largest first."""
    rounds = [clients[client] for clients in outlier_scores(saved).values() if client in clients]
    strata = dict.fromkeys(name for found in rounds for name in found)
    scores = {name: median(found[name] for found in rounds if name in found) for name in strata}
    names = sorted(scores, key=lambda name: -scores[name])[:most]
    return [f"{name} ({scores[name]:.1f})" for name in names if scores[name] >= 3]
