"""Runs that end early because others were better by then: successive halving, as scores to have by a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedstrata.runs.reader import read_records
from fedstrata.runs.records import Record

Cuts = Mapping[int, float]
"""Round → the score that a run must have after it; one that is worse ends there."""


class FellShort(Exception):
    """A run has met one of its cuts; what it has come to is kept."""


def falls_short(record: Record, cuts: Cuts) -> bool:
    """Whether a run ends with this round."""
    needed = cuts.get(record.round)
    if needed is None or record.score is None:
        return False
    return record.score > needed if record.better == "lower" else record.score < needed


def find_cut(directory: Path, cuts: Cuts) -> int | None:
    """The round with which a run has ended early; None if it has not, and has to go on."""
    path = directory / "metrics.jsonl"
    if not cuts or not path.exists():
        return None
    return next((record.round for record in read_records(path) if falls_short(record, cuts)), None)


def rungs(rounds: int, every: int, factor: int) -> list[int]:
    """The rounds after which runs may end early: R/η² and R/η, rounded up to rounds that are evaluated.

    None is before the second evaluation: the first one says more of the data than of the settings.

    Args:
        rounds: R, of a whole run.
        every: rounds between evaluations.
        factor: η; about one of η runs goes on.
    """
    found = {-(-rounds // (factor**power * every)) * every for power in (1, 2)}
    return sorted(at for at in found if 2 * every <= at < rounds)


def least_score(others: Sequence[float], factor: int, lower: bool = False) -> float | None:
    """What a run must reach at a rung to be among the best ⌊n/η⌋ of n runs, itself among them, but at least one.

    That is the ⌊n/η⌋-th best of the others' scores: with an equal one it goes on.

    Returns:
        None if it goes on whatever it has, since too few others are known.
    """
    places = max((len(others) + 1) // factor, 1)
    return sorted(others, reverse=not lower)[places - 1] if len(others) >= places else None
