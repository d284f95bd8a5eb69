"""How much is missing: how far a run is on the way from guessing to the best there is, and what that allows to say."""

from __future__ import annotations

from fedstrata.diagnosis.evidence import IDEAL, finite_numbers, training_records
from fedstrata.diagnosis.thresholds import NEVER_SERIOUS, SLIGHT
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.records import Record

NEAR = 0.1
"""Share of the way from guessing to the best there is: a run that misses no more of it suffers from nothing serious."""

FAR = 0.3
"""And one that misses so much may suffer from anything."""

NOISY = frozenset({"rmse", "mae", "r2", "perplexity"})
"""Metrics whose best is not to be reached: nobody knows how much of the targets is noise."""

LEARNT = 0.15
"""By one of them, a run that has come so far from guessing has learnt, as by the rule `no-learning`."""


def rated_records(saved: SavedRun) -> list[Record]:
    """The rounds that were evaluated, also those after the last one."""
    return [record for record in saved.records if finite_numbers([record.score])]


def rated_in_training(saved: SavedRun) -> list[Record]:
    """The rounds that were evaluated, but those after the last one."""
    return [record for record in training_records(saved) if finite_numbers([record.score])]


def guessing_score(saved: SavedRun, metric: str) -> float | None:
    """What guessing scores on the test set; in older runs, how frequent the clients' most frequent class is."""
    if "guess" in saved.facts:
        return float(saved.facts["guess"])
    classes = saved.facts.get("classes")
    if metric != "accuracy" or not classes:
        return None
    totals = [sum(column) for column in zip(*saved.facts.get("counts", []), strict=True)]
    return max(totals) / sum(totals) if sum(totals) else 1 / float(classes)


def learned_share(saved: SavedRun, upto: int | None = None) -> float | None:
    """How far the last third of the rounds has got at its best, from guessing (0) to the best there is (1).

    None where it is not known what guessing gives, or how good the metric can be.

    Args:
        saved: the run.
        upto: the last round that counts; None for all.
    """
    rated = [record for record in rated_records(saved) if upto is None or record.round <= upto]
    if not rated:
        return None
    metric, chance = rated[-1].primary, guessing_score(saved, rated[-1].primary)
    if chance is None or metric not in IDEAL or chance == IDEAL[metric]:
        return None
    recent = [record.score or 0.0 for record in rated[-max(len(rated) // 3, 1) :]]
    best = min(recent, key=lambda score: abs(IDEAL[metric] - score))
    return (best - chance) / (IDEAL[metric] - chance)


def largest_severity(saved: SavedRun, name: str) -> float:
    """What a finding can weigh at most: less than serious in a run that is near the best there is.

    But for a run that diverged: how good it was before does not count. By an error, which nobody knows how small it
    could be, any run that has learnt is good enough; `--try` measures what is missing.
    """
    if name in NEVER_SERIOUS:
        return SLIGHT
    share = None if name == "diverged" else learned_share(saved)
    if share is None:
        return 1.0
    if rated_records(saved)[-1].primary in NOISY and share >= LEARNT:
        return SLIGHT
    missing = min(max((1 - share - NEAR) / (FAR - NEAR), 0.0), 1.0)
    return SLIGHT + (1 - SLIGHT) * missing
