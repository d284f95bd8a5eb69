"""What came of trials: gains over the control, seed by seed, their intervals, and what these decide."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedstrata.core.text import SHARES
from fedstrata.reproduce.verdicts import t_interval
from fedstrata.runs.tried import (
    HELPS,
    HURTS,
    NO_GAIN,
    UNDECIDED,
    Control,
    Outcome,
    Reference,
    Tried,
    TriedRemedy,
)
from fedstrata.trials.choice import Trial

NARROW = 0.01
"""An interval within it, around 0, says that there is no gain: a point, or a hundredth of the control's score."""


@dataclass(frozen=True)
class TrialScore:
    """What one run of a trial has brought: its final primary metric, and the bytes that it sent; 0 if it diverged."""

    score: float | None
    bytes_sent: int = 0


@dataclass(frozen=True)
class Guessing:
    """What a run counts for that is worse than guessing, or that diverged.

    Errors have no end: one seed that is a million times worse than guessing would hide what all others say.

    Args:
        score: what guessing scores; None where that is not known.
        higher_is_better: False for errors.
    """

    score: float | None
    higher_is_better: bool

    def judge(self, score: float | None, bytes_sent: int, diverged: bool) -> TrialScore:
        """What a run counts for."""
        if diverged:
            return TrialScore(self.score)
        if score is None or self.score is None:
            return TrialScore(score, bytes_sent)
        return TrialScore(max(score, self.score) if self.higher_is_better else min(score, self.score), bytes_sent)


Scores = Mapping[int, TrialScore]
"""Seed → what its run has brought."""


def summarise_trials(
    trials: Sequence[Trial],
    found: Sequence[Scores],
    commands: Sequence[str],
    metric: str,
    higher_is_better: bool,
    rounds: int,
    seeds: Sequence[int],
    notes: Sequence[str] = (),
) -> Tried:
    """What tried.json says.

    Args:
        trials: the control first.
        found: what came of each.
        commands: what runs each.
        metric: that runs are judged by.
        higher_is_better: False for errors.
        rounds: of each run.
        seeds: of each trial.
        notes: what could not be run, or is not tried.
    """
    control, references, remedies = found[0], [], []
    sign = 1 if higher_is_better else -1
    for trial, scores, command in zip(trials, found, commands, strict=True):
        gain = _gain(control, scores, seeds, sign) | {"command": command, "scores": _in_order(scores, seeds)}
        gain["leaves_out"] = trial.leaves_out
        if trial.kind == "reference":
            references.append(Reference.model_validate({**gain, "name": trial.name}))
        elif trial.kind == "remedy":
            verdict = judge_gain(gain["low"], gain["high"], _narrow(metric, control))
            about = {"finding": trial.finding, "change": trial.name, "verdict": verdict}
            remedies.append(TriedRemedy.model_validate(gain | about))
    return Tried(
        metric=metric,
        higher_is_better=higher_is_better,
        rounds=rounds,
        seeds=tuple(seeds),
        control=Control(command=commands[0], scores=_in_order(control, seeds)),
        references=tuple(references),
        remedies=tuple(remedies),
        notes=tuple(notes),
    )


def judge_gain(low: object, high: object, narrow: float) -> Outcome:
    """What an interval of gains says; without one nothing is decided."""
    if not isinstance(low, float) or not isinstance(high, float):
        return UNDECIDED
    if low > 0:
        return HELPS
    if high < 0:
        return HURTS
    return NO_GAIN if -narrow <= low and high <= narrow else UNDECIDED


def _in_order(scores: Scores, seeds: Sequence[int]) -> tuple[float | None, ...]:
    return tuple(scores[seed].score if seed in scores else None for seed in seeds)


def _narrow(metric: str, control: Scores) -> float:
    known = [abs(one.score) for one in control.values() if one.score is not None]
    return NARROW if metric in SHARES or not known else NARROW * statistics.fmean(known)


def _gain(control: Scores, other: Scores, seeds: Sequence[int], sign: int) -> dict[str, object]:
    """Mean gain and its interval, over the seeds that both have; bytes as a multiple of the control's."""
    gains = []
    for before, after in zip(_in_order(control, seeds), _in_order(other, seeds), strict=True):
        if before is not None and after is not None:
            gains.append(sign * (after - before))
    low, high = t_interval(gains) or (None, None)
    both = [seed for seed in seeds if all(seed in held and held[seed].bytes_sent for held in (control, other))]
    sent, usual = (sum(scores[seed].bytes_sent for seed in both) for scores in (other, control))
    cost = round(sent / usual, 4) if both else None
    return {"gained": statistics.fmean(gains) if gains else None, "low": low, "high": high, "cost": cost}


def trial_notes(failed: Mapping[str, str], left_out: Sequence[str]) -> list[str]:
    """What could not be run, by name, with the reason, and what is not tried."""
    notes = [f"could not be run: {name}: {why}" for name, why in failed.items()]
    return notes + ([f"not tried: {'; '.join(left_out)}"] if left_out else [])
