"""Clients whose inputs are unlike everybody else's, by the cards that the facts hold of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fedstrata.diagnosis.evidence import percent_text, times_text
from fedstrata.diagnosis.outliers import FEW, robust_scores
from fedstrata.runs.reader import SavedRun

SCALE_FLOOR = 0.3
"""Spread of the logarithm of clients' deviations that counts at least: of 64 examples it is known to a tenth, and of a
table's rare values to a third."""

SHIFT_FLOOR = 0.15
"""Spread of clients' means that counts at least, in deviations: the mean of 64 numbers is known to an eighth."""

LEAST = 1e-3
"""Smallest share of the usual deviation that is told from none."""

SHARES = 100.0
"""A share of inputs that are missing, or all the same, scores so much: 5 where it is a twentieth."""


@dataclass(frozen=True)
class OddInputs:
    """What is unlike about a client's inputs: how far out it is, in words, and what would put it right, if anything."""

    score: float
    words: str
    remedy: str = ""


def odd_inputs(saved: SavedRun) -> dict[int, OddInputs]:
    """Client → what is most unlike about its inputs; without clients that have no card, and if few have one."""
    absent = str(saved.config.get("without") or "").split(",")
    cards = {c: card for c, card in enumerate(saved.facts.get("cards", ())) if card and str(c) not in absent}
    if len(cards) < FEW:
        return {}
    found: dict[int, list[OddInputs]] = {client: [] for client in cards}
    for judged in (_by_scale(cards), _by_shift(cards), _by_share(cards)):
        for client, odd in judged.items():
            found[client].append(odd)
    return {client: max(several, key=lambda odd: odd.score) for client, several in found.items() if several}


def _columns(cards: Mapping[int, Mapping[str, Any]], name: str) -> list[dict[int, float]]:
    """For each column of the inputs, client → its number; where clients have different numbers of them, none."""
    rows = {client: card.get(name) or [] for client, card in cards.items()}
    width = min(map(len, rows.values()))
    return [
        {client: row[at] for client, row in rows.items() if row[at] is not None}
        for at in range(width if len({*map(len, rows.values())}) == 1 else 0)
    ]


def _typical_deviation(cards: Mapping[int, Mapping[str, Any]]) -> float:
    """The median over clients and columns."""
    known = [value for column in _columns(cards, "std") for value in column.values()]
    return median(known) if known else 0.0


def _by_scale(cards: Mapping[int, Mapping[str, Any]]) -> dict[int, OddInputs]:
    """Deviations that are many times the others', or a small part of them in all columns together."""
    found: dict[int, OddInputs] = {}
    typical = _typical_deviation(cards)
    if typical <= 0:
        return found
    for at, stds in enumerate(columns := _columns(cards, "std")):
        if len(stds) < FEW:
            continue
        usual = max(median(stds.values()), typical / 2)
        scores = robust_scores({c: math.log(max(std / usual, LEAST)) for c, std in stds.items()}, SCALE_FLOOR)
        for client, score in scores.items():
            ratio = stds[client] / usual
            where = "" if len(columns) == 1 else f" in column {at}"
            words = f"its inputs vary {times_text(ratio)} as much as the others'{where} (deviation {stds[client]:.3g})"
            _keep(found, client, score, words, f"divide them by {ratio:.3g}{where}")
    whole = {c: _mean_square([column.get(c) for column in columns]) for c in cards}
    usual = max(median(whole.values()), 1e-12)
    flat = robust_scores({c: math.log(max(std / usual, LEAST)) for c, std in whole.items()}, SCALE_FLOOR)
    for client, score in flat.items():
        share = whole[client] / usual
        words = f"its inputs vary by {percent_text(share)} of what the others' do (deviation {whole[client]:.3g})"
        remedy = "look at how they are read" if share < 0.01 else f"divide them by {share:.2g}"
        _keep(found, client, -score, words, remedy)
    return found


def _mean_square(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return math.sqrt(sum(value * value for value in known) / len(known)) if known else 0.0


def _by_shift(cards: Mapping[int, Mapping[str, Any]]) -> dict[int, OddInputs]:
    """Means that are far from the others'."""
    found: dict[int, OddInputs] = {}
    typical = _typical_deviation(cards)
    deviations = _columns(cards, "std")
    for at, means in enumerate(_columns(cards, "mean")):
        if len(means) < FEW or typical <= 0:
            continue
        usual = max(median(deviations[at].values()), typical / 2)
        for client, score in robust_scores(means, SHIFT_FLOOR * usual).items():
            apart = (means[client] - median(means.values())) / usual
            where = "" if len(deviations) == 1 else f" in column {at}"
            words = (
                f"its inputs' mean is {means[client]:.3g}{where}, {abs(apart):.1f} deviations "
                f"{'above' if apart > 0 else 'below'} the others'"
            )
            _keep(found, client, abs(score), words, "bring them to the others' mean, or turn them round if inverted")
    return found


def _by_share(cards: Mapping[int, Mapping[str, Any]]) -> dict[int, OddInputs]:
    """Inputs that are missing, that are one number throughout, or that are there more than once."""
    found: dict[int, OddInputs] = {}
    told = {
        "missing": ("of its inputs' numbers are missing or not finite", "fill them in, or leave these examples out"),
        "constant": ("of its inputs are one number throughout", "look at how they are read"),
        "duplicates": ("of its inputs are there more than once", "leave the copies out"),
    }
    for name, (words, remedy) in told.items():
        shares = {client: float(card.get(name) or 0.0) for client, card in cards.items()}
        usual = median(shares.values())
        for client, share in shares.items():
            weight = SHARES if name == "missing" else SHARES / 4
            _keep(found, client, weight * (share - usual), f"{percent_text(share)} {words}", remedy)
    return found


def _keep(found: dict[int, OddInputs], client: int, score: float, words: str, remedy: str) -> None:
    """Note what is odd about a client, unless something odder is known."""
    if client not in found or score > found[client].score:
        found[client] = OddInputs(score, words, remedy)
