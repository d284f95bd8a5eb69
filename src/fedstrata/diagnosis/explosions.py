"""Explosions: a run that left the finite numbers, or is about to. Whatever else it shows follows from that."""

from __future__ import annotations

from fedstrata.diagnosis.reading import Evidence, number
from fedstrata.diagnosis.remedies import Bench
from fedstrata.saved import Saved

GUESSES = 10
"""How many times the loss of guessing the first round's loss may count: it may have exploded already."""


def diverged(saved: Saved) -> Evidence | None:
    """Whether training left the finite numbers."""
    why = str(saved.summary.get("diverged") or "").rstrip(".")
    if not why:
        return None
    return Evidence(1.0, f"{why[:1].upper()}{why[1:]}.", {"diverged": 1.0}, lambda: against_explosion(Bench(saved)))


def exploded_loss(saved: Saved) -> Evidence | None:
    """The last loss against the first one, or against that of guessing where that is larger.

    Of test and training loss the one that has grown less: running statistics that do not fit, or overconfidence on
    classes that a client lacks, spoil the test loss alone.
    """
    losses = {
        "test": [record.loss for record in saved.records if record.loss is not None],
        "training": [record.train_loss for record in saved.records if record.train_loss is not None],
    }
    grown = {kind: _growth(found, saved.facts.get("classes")) for kind, found in losses.items() if found}
    known = {kind: value for kind, value in grown.items() if value is not None}
    if not known:
        return None
    kind = min(known, key=known.__getitem__)
    first, last = number(losses[kind][0]), number(losses[kind][-1])
    guess = _guess(saved.facts.get("classes"))
    began = "" if first is None else f"; it was {first:.3g} in the first round that was evaluated"
    told = "is no longer finite" if last is None else f"is {last:.3g}"
    than = "" if guess is None else f", where guessing gives {guess:.3g}"
    sentence = f"The loss has exploded: the {kind} loss {told}{than}{began}."
    figure = {"times": known[kind], **({} if last is None else {"loss": last})}
    return Evidence(known[kind], sentence, figure, lambda: against_explosion(Bench(saved)))
