"""Clients whose inputs are unlike everybody else's, by the cards that the facts hold of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from fedstrata.diagnosis.evidence import absent_clients, percent_text, times_text
from fedstrata.diagnosis.input_groups import LEAST, Inputs, Judged, Part, read_part
from fedstrata.diagnosis.outliers import FEW
from fedstrata.diagnosis.thresholds import THRESHOLDS
from fedstrata.runs.reader import SavedRun

SHARES = 100.0
"""A share of inputs that are missing, or all the same, scores so much: 5 where it is a twentieth."""

FLAT = 1.1 * LEAST
"""Share of the others' deviation below which inputs are as good as constant."""

LIMIT = THRESHOLDS["broken-inputs"].none


@dataclass(frozen=True)
class OddInputs:
    """What is unlike about a client's inputs: how far out it is, in words, and what would put it right, if anything."""

    score: float
    words: str
    remedy: str = ""


def odd_inputs(saved: SavedRun) -> dict[int, OddInputs]:
    """Client → what is most unlike about its inputs; without clients that have no card, and if few have one."""
    absent = absent_clients(saved)
    cards = {c: card for c, card in enumerate(saved.facts.get("cards", ())) if card and c not in absent}
    if len(cards) < FEW:
        return {}
    inputs = _inputs(saved, cards)
    scales, shifts, shares = _by_scale(inputs), _by_shift(inputs), _by_share(cards)
    found = {}
    for client in cards:
        several = [judged[client] for judged in (scales, shifts, shares) if client in judged]
        found[client] = max(several, key=lambda odd: odd.score)
        scale = scales.get(client)
        if found[client] is shifts.get(client) and scale is not None and scale.score > LIMIT:
            found[client] = replace(scale, score=found[client].score)  # who multiplies numbers moves their mean, too
    return found


def _inputs(saved: SavedRun, cards: Mapping[int, Mapping[str, Any]]) -> Inputs:
    """What is known of everybody's inputs; of labels by the facts or, where these are no classes, by the cards."""
    whole = {client: read_part(card) for client, card in cards.items()}
    groups = {client: _read_groups(card, whole[client].width) for client, card in cards.items()}
    table = saved.facts.get("counts", [])
    if table:
        return Inputs(whole, groups, {client: table[client] for client in cards if client < len(table)})
    names = sorted({name for parts in groups.values() for name in parts})
    held = {client: [parts[name].count if name in parts else 0.0 for name in names] for client, parts in groups.items()}
    return Inputs(whole, groups, held if names else {})


def _read_groups(card: Mapping[str, Any], width: int) -> dict[str, Part]:
    """A card's groups; one that has not the card's columns was edited, and does not count."""
    parts = {name: read_part(group) for name, group in card.get("groups", {}).items()}
    return {name: part for name, part in parts.items() if part.width == width > 0}


def _corrected(score: float, columns: int) -> float:
    """A score that is the largest of so many, as one of a single column: √(z² − 2 ln n), as normal tails have it."""
    return math.sqrt(max(score * score - 2 * math.log(columns), 0.0))


def _by_scale(inputs: Inputs) -> dict[int, OddInputs]:
    """Deviations that are many times the others', or a small part of them in all columns together."""
    found: dict[int, OddInputs] = {}
    judged = [inputs.judge_deviations(at) for at in inputs.columns] if inputs.typical > 0 else []
    for client, part in inputs.whole.items():
        odd = _all_columns(client, inputs, judged)
        if odd is not None and odd.score > LIMIT:
            found[client] = odd
            continue
        for at, scores in enumerate(judged):
            if client in scores and scores[client][0] > 0:
                score, apart = _beyond_usual(scores[client], inputs, part, at)
                where = "" if len(judged) == 1 else f" in column {at}"
                score = _corrected(score, len(judged))
                _keep(found, client, _multiplied(score, math.exp(apart), where, part.std[at]))
    return found


def _beyond_usual(judged: tuple[float, float], inputs: Inputs, part: Part, at: int) -> tuple[float, float]:
    """What is left of a score and a distance where only what exceeds the usual deviation counts.

    In a column that hardly varies anywhere, such as the corner of a picture, a single number makes a hundred times of
    nothing.
    """
    score, apart = judged
    own = math.log(max((part.std[at] or 0.0) / inputs.usual(at), 1.0))
    return (score, apart) if own >= apart else (score * own / apart, own)


def _all_columns(client: int, inputs: Inputs, judged: Sequence[Judged]) -> OddInputs | None:
    """By how much the client's inputs vary more or less, in the median over the columns."""
    seen = [scores[client] for scores in judged if client in scores]
    if not seen:
        return None
    score, ratio = median(score for score, _ in seen), math.exp(median(apart for _, apart in seen))
    if len(judged) == 1:
        return _multiplied(abs(score), ratio, "", inputs.whole[client].std[0])
    return _multiplied(abs(score), ratio, " in the median column")


def _multiplied(score: float, ratio: float, where: str, deviation: float | None = None) -> OddInputs:
    """What is said of inputs that vary so many times as much as the others'."""
    known = where if deviation is None else f"{where} (deviation {deviation:.3g})"
    if ratio >= 1:
        words = f"its inputs vary {times_text(ratio)} as much as the others'{known}, as if multiplied by {ratio:.3g}"
        return OddInputs(score, words, f"divide them by {ratio:.3g}{where}")
    flat = ratio < FLAT
    words = f"its inputs vary by {percent_text(0.0 if flat else ratio)} of what the others' do{known}"
    return OddInputs(score, words, "look at how they are read" if flat else f"multiply them by {1 / ratio:.3g}")


def _by_shift(inputs: Inputs) -> dict[int, OddInputs]:
    """Means that are far from the others'."""
    found: dict[int, OddInputs] = {}
    for at in inputs.columns if inputs.typical > 0 else ():
        for client, (score, apart) in inputs.judge_means(at).items():
            where = "" if len(inputs.columns) == 1 else f" in column {at}"
            words = (
                f"its inputs' mean is {inputs.whole[client].mean[at]:.3g}{where}, {abs(apart):.1f} deviations "
                f"{'above' if apart > 0 else 'below'} the others'"
            )
            remedy = "bring them to the others' mean, or turn them round if inverted"
            _keep(found, client, OddInputs(_corrected(score, len(inputs.columns)), words, remedy))
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
            _keep(found, client, OddInputs(weight * (share - usual), f"{percent_text(share)} {words}", remedy))
    return found


def _keep(found: dict[int, OddInputs], client: int, odd: OddInputs) -> None:
    """Note what is odd about a client, unless something odder is known."""
    if client not in found or odd.score > found[client].score:
        found[client] = odd
