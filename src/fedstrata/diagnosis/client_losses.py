"""What clients' examples cost, in losses of guessing: against everybody's of the same kind, and before a collapse."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from fedstrata.diagnosis.learning import cost_of_guessing, has_learned
from fedstrata.diagnosis.outliers import FEW, column, length_scores, over_rounds, recent_rows, scores_over_rounds
from fedstrata.runs.reader import SavedRun

LOSS_FLOOR = 0.05
"""Spread over clients of losses, in losses of guessing, that counts at least."""

FAR = 5.0
"""A robust score from which on a client is far out: one in a million, if the others were normal."""

WILD = 10.0
"""Losses of guessing that a client reports which wrecks the model."""

SANE = 1.2
"""Losses of guessing that an honest client reports at most, as long as the model has not collapsed."""

LEVEL = 1.05
"""And that the median client does: at a learning rate that is too large it reports more."""

DEAD = 3.0
"""Losses of guessing from which on the median client's says that the model is dead for everybody."""


def guessing_loss(saved: SavedRun, losses: Mapping[int, float]) -> float:
    """What losses are measured in: that of guessing among so many classes; without classes, clients' median loss.

    Of answers, yes or no, it is the median, too, but a quarter of guessing at least: good answers cost little.
    """
    classes = saved.facts.get("classes")
    guess = math.log(classes) if classes is not None and classes > 1 else 0.0
    if guess and saved.facts.get("has_classes", True):
        return guess
    return max(median(losses.values()), guess / 4, 1e-9) if losses else 1.0


def is_like_for_like(saved: SavedRun) -> bool:
    """Whether losses were compared with those of the same classes, or of targets in the same range.

    Older runs did so with classes alone, and did not tell how certain they were.
    """
    rows = recent_rows(saved, "exchange")
    told = any(column(row, row["exchange"].get("doubt")) for row in rows)
    return told or bool(saved.facts.get("has_classes", True))


def excess_losses(saved: SavedRun, row: Mapping[str, Any]) -> dict[int, float]:
    """Client → by how much its own examples and everybody's disagree, in losses of guessing: of two figures the larger.

    What its examples cost the global model beyond what their classes, or targets in the same range, cost elsewhere; and
    what its own model, after its training, costs elsewhere in the same mixture beyond what it costs on its own
    examples. Where neither classes nor ranges were told apart both must be large, so that it is the smaller one.
    """
    exchange = row.get("exchange", {})
    own, expected, after, there = (
        column(row, exchange.get(name)) for name in ("own", "expected", "own_after", "shared_after")
    )
    scale = guessing_loss(saved, own)
    found = {client: (own[client] - expected[client]) / scale for client in own.keys() & expected.keys()}
    choose = max if is_like_for_like(saved) else min
    for client in found.keys() & after.keys() & there.keys():
        found[client] = choose(found[client], (there[client] - after[client]) / scale)
    return found


def loss_doubts(saved: SavedRun) -> dict[int, float]:
    """Client → the standard error of what its examples cost beyond others', in losses of guessing, where it is told."""
    doubts = []
    for row in recent_rows(saved, "exchange"):
        scale = guessing_loss(saved, column(row, row["exchange"].get("own")))
        doubts.append({c: value / scale for c, value in column(row, row["exchange"].get("doubt")).items()})
    return over_rounds(doubts)


def odd_losses(
    saved: SavedRun, probe: str, read: Callable[[Mapping[str, Any]], Mapping[int, float]]
) -> dict[int, float]:
    """Client → by how much its loss exceeds the median client's, in losses of guessing; 0 if it is no outlier."""
    rows = recent_rows(saved, probe)
    beyond = []
    for row in rows:
        values = read(row)
        middle = median(values.values()) if values else 0.0
        if len(values) >= FEW:
            beyond.append({client: value - middle for client, value in values.items()})
    scores = scores_over_rounds(rows, read, LOSS_FLOOR)
    return {client: value if scores[client] > FAR else 0.0 for client, value in over_rounds(beyond).items()}


def reported_losses(saved: SavedRun, row: Mapping[str, Any]) -> dict[int, float]:
    """Client → the training loss that it reports, in losses of guessing."""
    losses = column(row, row.get("visits", {}).get("loss"))
    return {client: loss / guessing_loss(saved, losses) for client, loss in losses.items()}


@dataclass(frozen=True)
class Collapse:
    """How a client wrecked the model.

    Args:
        round: in which it did.
        loss: that it reported.
        usual: what the median client reported.
        ratio: how many times as long as the median client's its update was.
    """

    round: int
    loss: float
    usual: float
    ratio: float


def is_dead(saved: SavedRun) -> bool:
    """Whether, in the last rounds, even the median client's loss is far beyond guessing: whose is largest is chance."""
    guess = cost_of_guessing(saved)
    losses = (column(row, row["visits"].get("loss")) for row in recent_rows(saved, "visits"))
    usual = [median(found.values()) for found in losses if found]
    return guess is not None and bool(usual) and median(usual) > DEAD * guess


def wrecking_clients(saved: SavedRun) -> dict[int, Collapse]:
    """Client → how it wrecked the model, in the first round in which anybody's loss was beyond everything.

    From then on the model may be dead for everybody, and later rounds say nothing of single clients. Whoever reports
    ten losses of guessing and sends an update that is far too long is named if all others were still sane: where the
    learning rate is at fault, they are not. Nobody is in a run that has learnt.
    """
    guess = cost_of_guessing(saved)
    if guess is None or has_learned(saved):
        return {}
    for row in saved.probes:
        losses = column(row, row.get("visits", {}).get("loss"))
        wild = {client for client, loss in losses.items() if loss > WILD * guess}
        if len(losses) >= FEW and wild:
            rest = [loss for client, loss in losses.items() if client not in wild]
            sane = len(wild) < len(rest) and max(rest) <= SANE * guess and median(rest) <= LEVEL * guess
            return _collapses(row, losses, wild) if sane else {}
    return {}


def _collapses(row: Mapping[str, Any], losses: Mapping[int, float], wild: set[int]) -> dict[int, Collapse]:
    """What clients with a wild loss did in a round, of those whose updates were far too long as well."""
    norms = row["visits"].get("whole", {}).get("norm")
    scores, lengths = length_scores(row, norms), column(row, norms)
    usual, long = median(losses.values()), median(lengths.values()) if lengths else 0.0
    return {
        client: Collapse(int(row["round"]), losses[client], usual, lengths[client] / max(long, 1e-30))
        for client in sorted(wild)
        if scores.get(client, 0.0) > FAR
    }
