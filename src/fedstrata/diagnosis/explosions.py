"""Explosions: a run whose numbers are no longer finite, or soon will not be. All other symptoms follow from that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedstrata.diagnosis import remedies as papers
from fedstrata.diagnosis.evidence import LARGEST, Evidence, Rule, finite_number, times_text, training_records
from fedstrata.diagnosis.findings import Remedy
from fedstrata.diagnosis.remedies import RemedyBuilder
from fedstrata.diagnosis.thresholds import STANDING, THRESHOLDS
from fedstrata.runs.reader import SavedRun

USUAL_RATE = 0.1
"""A tenth of a learning rate that is far too large may still be too large; nothing above the default is advised."""

GUESSES = 10
"""The first round's loss counts up to so many times the loss of guessing: it may have exploded already."""


def non_finite_training(saved: SavedRun) -> Evidence | None:
    """Whether training ended because a number was no longer finite."""
    why = str(saved.summary.get("diverged") or "").rstrip(".")
    if not why:
        return None
    return Evidence(
        1.0, f"{why[:1].upper()}{why[1:]}.", {"diverged": 1.0}, lambda: against_explosion(RemedyBuilder(saved))
    )


def exploded_loss(saved: SavedRun) -> Evidence | None:
    """The last loss against the first one, or against that of guessing where that is larger and known.

    Of test and training loss the one that has grown less: running statistics that do not fit, or overconfidence on
    classes that a client lacks, spoil the test loss alone.
    """
    classes = saved.facts.get("classes")
    guess = math.log(classes) if classes is not None and classes > 1 else None
    losses = {
        "test": _numbers_in([record.loss for record in saved.records]),
        "training": _numbers_in([record.train_loss for record in training_records(saved)]),
    }
    grown = {kind: _growth(found, guess) for kind, found in losses.items() if found}
    known = {kind: value for kind, value in grown.items() if value is not None}
    if not known:
        return None
    kind = min(known, key=known.__getitem__)
    first, last = finite_number(losses[kind][0]), finite_number(losses[kind][-1])
    now = "is no longer finite" if last is None else f"is {last:.3g}"
    than = "" if last is None or guess is None else f", {times_text(last / guess)} that of guessing"
    began = "" if first is None else f"; at first it was {first:.3g}"
    figure = {"times": known[kind], **({} if last is None else {"loss": last})}
    sentence = f"The loss has exploded: the {kind} loss {now}{than}{began}."
    return Evidence(known[kind], sentence, figure, lambda: against_explosion(RemedyBuilder(saved)))


def _numbers_in(losses: Sequence[Any]) -> list[float]:
    return [loss for loss in losses if isinstance(loss, int | float)]


def _growth(losses: Sequence[float], guess: float | None) -> float | None:
    """How many times the loss of guessing, or of the first round if that was larger, the last one is."""
    first, last = finite_number(losses[0]), finite_number(losses[-1])
    if last is None:
        return LARGEST
    if guess is None:  # what guessing costs is known of classes alone
        return last / first if first is not None and first > 0 else None
    return last / max(guess, min(GUESSES * guess, LARGEST if first is None else first))


def against_explosion(builder: RemedyBuilder) -> list[Remedy | None]:
    """What makes steps shorter."""
    clip = finite_number(builder.config.get("clip"))
    return [
        builder.change_settings("a smaller learning rate", papers.MCMAHAN, lr=min(builder.rate(0.1), USUAL_RATE)),
        builder.change_settings(
            "bounds the norm of every local gradient, so that no step can be that long",
            papers.MCMAHAN,
            clip=1.0 if clip is None or clip > 1 else float(f"{clip / 10:.2g}"),
        ),
    ]


ALL = THRESHOLDS.keys() - {"diverged", "exploded-loss", *STANDING}

EXPLOSIONS = (
    Rule("diverged", non_finite_training, explains=frozenset(ALL)),
    Rule("exploded-loss", exploded_loss, explains=frozenset(ALL)),
)
"""They explain all that is measured; what stands in the facts, and what single clients do, does not depend on them."""
