"""Why a run learns little: its learning rate, outputs that are probabilities, classes or clients that are few."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean, median

from fedstrata.core.text import SHARES
from fedstrata.diagnosis import remedies as papers
from fedstrata.diagnosis.evidence import (
    WARM,
    Evidence,
    Rule,
    finite_numbers,
    percent_text,
    rank_correlation,
    score_text,
    steps_per_visit,
    times_text,
    training_records,
)
from fedstrata.diagnosis.findings import Remedy
from fedstrata.diagnosis.harm import learned_share, rated_in_training
from fedstrata.diagnosis.remedies import RemedyBuilder
from fedstrata.diagnosis.thresholds import STOPPED
from fedstrata.runs.reader import SavedRun

LEARNED = 0.8
"""A run that is so far on the way from guessing to the best there is has learnt: how, is no question then."""

LITTLE = 0.3
"""And one that is not even so far has learnt little: its losses are asked why."""

ROOM = 0.015
"""Share of the held-out loss that some learning rate must be able to take off in a few steps, to speak of progress."""

STILL = 1e-4
"""Share of the held-out loss that the run's own learning rate is taken to take off at least."""

CHANGED = 0.1
"""Share of its first value by which a training loss must have changed for its way to say something."""

BLOWN = 100.0
"""Times the loss of guessing that no training loss reaches unless steps were far too long."""

STEADY = -0.8
"""Rank correlation of rounds and losses below which a loss falls steadily."""


def has_learned(saved: SavedRun) -> bool:
    """Whether the run is so good that there is nothing to explain."""
    share = learned_share(saved)
    return share is not None and share >= LEARNED


# The learning rate --------------------------------------------------------------------------------------------


def searches(saved: SavedRun) -> list[tuple[float, dict[float, float]]]:
    """What the probe `rates` found, round by round: (held-out loss before, factor → held-out loss after)."""
    found = []
    for row in saved.series("rates").values():
        before = row.get("before")
        after = {_factor(name): loss for name, loss in row.get("after", {}).items() if _factor(name) > 0}
        if before is not None and before > 0 and 1.0 in after:
            found.append((float(before), after))
    return found


def _factor(name: str) -> float:
    try:
        return float(name)
    except ValueError:
        return 0.0


def progress_ratio(before: float, after: Mapping[float, float]) -> tuple[float, float]:
    """(how many times the progress of the run's own learning rate the best larger one makes, its factor).

    1 where no larger one takes off a little of the loss. What the run's own takes off counts as a ten-thousandth of it
    at least.
    """
    larger = {factor: loss for factor, loss in after.items() if factor > 1}
    if not larger:
        return 1.0, 1.0
    best = min(larger, key=lambda factor: larger[factor])
    gained, own = before - larger[best], before - after[1.0]
    if gained < ROOM * before:
        return 1.0, 1.0
    return gained / max(own, STILL * before), best


def rate_too_small(saved: SavedRun) -> Evidence | None:
    """How many times as fast a larger learning rate gets on; from the losses alone, where that was not searched."""
    found = [progress_ratio(*one) for one in searches(saved)]
    if has_learned(saved):
        return None
    if not found:
        return _slow_losses(saved)
    value = median(ratio for ratio, _ in found)
    factor = median(best for _, best in found)
    lr = RemedyBuilder(saved).rate(1.0)
    sentence = (
        f"The learning rate is too small: in a few steps from the global model, {factor:g} times {lr:g} lowers the "
        f"held-out loss {times_text(value)} as much."
    )
    figure = {"times": value, "factor": factor}
    return Evidence(value, sentence, figure, lambda: against_small_rate(RemedyBuilder(saved), factor))


def _losses(saved: SavedRun) -> list[float]:
    return finite_numbers(record.train_loss for record in training_records(saved))


def _slow_losses(saved: SavedRun) -> Evidence | None:
    """The training loss falls steadily, and hardly at all: the less, the more is missing."""
    losses, share = _losses(saved), learned_share(saved)
    if len(losses) < 4 or losses[0] <= 0 or share is None:
        return None
    fallen = (losses[0] - losses[-1]) / losses[0]
    steady = rank_correlation(range(len(losses)), losses) <= STEADY
    value = min(LITTLE / max(fallen, 1e-3), 100.0) if steady and fallen < LITTLE and share < LITTLE else 1.0
    sentence = (
        f"The learning rate looks too small: the training loss falls steadily, but only by {percent_text(fallen)} in "
        f"{len(losses)} rounds, from {losses[0]:.3g} to {losses[-1]:.3g}."
    )
    return Evidence(value, sentence, {"times": value, "fallen": fallen}, lambda: _ten_times(saved))


def _ten_times(saved: SavedRun) -> list[Remedy | None]:
    return against_small_rate(RemedyBuilder(saved), 10.0)


def against_small_rate(builder: RemedyBuilder, factor: float) -> list[Remedy | None]:
    """A larger one, or more of the same."""
    rounds = int(builder.config.get("rounds", 10))
    return [
        builder.change_settings("a larger learning rate", papers.MCMAHAN, lr=builder.rate(factor)),
        builder.change_settings("more rounds at this rate", papers.MCMAHAN, rounds=int(rounds * min(factor, 10))),
    ]


def rise(before: float, after: Mapping[float, float]) -> float:
    """By what share of the loss before a tenth of the learning rate ends below it, if the run's own does not help."""
    smaller = [loss for factor, loss in after.items() if factor < 1]
    if not smaller or min(smaller) >= before or after[1.0] < (1 - CHANGED / 10) * before:
        return 0.0
    return min((after[1.0] - min(smaller)) / before, 10.0)


def rate_too_large(saved: SavedRun) -> Evidence | None:
    """By how much a tenth of the learning rate ends lower, where the run's own raises the loss; or losses that leap."""
    if has_learned(saved):
        return None
    lr, losses = RemedyBuilder(saved).rate(1.0), _losses(saved)
    judged = {
        f"the training loss was {max(losses, default=0.0):.3g}, where guessing costs far less": _blown_losses(saved),
        f"a tenth of {lr:g} leaves the held-out loss lower than {lr:g} itself, which raises it": max(
            (rise(*one) for one in searches(saved)), default=None
        ),
        f"the training loss leaps up and down between {min(losses, default=0.0):.3g} and "
        f"{max(losses, default=0.0):.3g} and does not fall": _leaping_losses(saved),
    }
    known = {told: value for told, value in judged.items() if value is not None}
    if not known:
        return None
    told = max(known, key=lambda words: known[words])
    value = known[told]
    sentence = f"The learning rate is too large: {told}."
    return Evidence(value, sentence, {"rise": value}, lambda: against_large_rate(RemedyBuilder(saved)))


def cost_of_guessing(saved: SavedRun) -> float | None:
    """What guessing costs, as far as it is known without looking at anybody's loss."""
    classes, guess = saved.facts.get("classes"), saved.facts.get("guess")
    if classes is not None and classes > 1:
        return math.log(classes)
    if guess is None or not saved.records or saved.records[-1].primary != "rmse":
        return None
    return float(guess) ** 2


def has_blown_up(saved: SavedRun) -> bool:
    """Whether the training loss was beyond everything once: all numbers of such a run may be."""
    guess, losses = cost_of_guessing(saved), _losses(saved)
    return guess is not None and bool(losses) and max(losses) > BLOWN * guess


def _blown_losses(saved: SavedRun) -> float | None:
    return 1.0 if has_blown_up(saved) else None


def _leaping_losses(saved: SavedRun) -> float | None:
    """The share of its way that the training loss goes upwards, if it has not fallen by a tenth; None if unknown."""
    losses, share = _losses(saved), learned_share(saved)
    if len(losses) < 4 or share is None:
        return None
    steps = [b - a for a, b in pairwise(losses)]
    way = sum(map(abs, steps))
    large = way > CHANGED * max(losses[0], 1e-9)
    if share >= LITTLE or losses[-1] < (1 - CHANGED) * losses[0] or not large:
        return 0.0
    return sum(step for step in steps if step > 0) / way


def against_large_rate(builder: RemedyBuilder) -> list[Remedy | None]:
    """Shorter steps."""
    return [
        builder.change_settings("a smaller learning rate", papers.MCMAHAN, lr=builder.rate(0.1)),
        builder.change_settings("bounds the norm of every local gradient", papers.MCMAHAN, clip=1.0),
    ]


# Outputs ------------------------------------------------------------------------------------------------------


def probabilities(saved: SavedRun) -> Evidence | None:
    """1 if the model gives probabilities where the loss takes logits."""
    if "probabilities" not in saved.facts:
        return None
    value = float(saved.facts["probabilities"])
    sentence = (
        "The model puts out probabilities already, between 0 and 1, but the loss takes logits: it applies a softmax or "
        "sigmoid of its own, and of two in a row little gradient is left."
    )
    return Evidence(value, sentence, {"probabilities": value}, lambda: against_probabilities(RemedyBuilder(saved)))


def against_probabilities(builder: RemedyBuilder) -> list[Remedy | None]:
    """Leave it out."""
    return [
        builder.advise("take the last softmax or sigmoid out of the model's forward pass: only predictions need it"),
        builder.change_settings("if the model must stay, larger steps", papers.MCMAHAN, lr=builder.rate(10.0)),
    ]


# Classes ------------------------------------------------------------------------------------------------------


def class_imbalance(saved: SavedRun) -> Evidence | None:
    """The share of everybody's training examples that would have to change class to match the test set's mixture."""
    counts, tested = saved.facts.get("counts", []), saved.facts.get("test_counts", [])
    if not counts or has_learned(saved) or not saved.facts.get("has_classes", True):
        return None
    totals = [sum(each) for each in zip(*counts, strict=True)]
    if len(tested) != len(totals) or not sum(tested):
        tested = [1] * len(totals)
    pairs = zip(totals, tested, strict=True)
    value = sum(abs(n / sum(totals) - m / sum(tested)) for n, m in pairs) / 2
    most = max(range(len(totals)), key=lambda label: totals[label])
    names = saved.facts.get("class_names", [])
    label = names[most] if most < len(names) else str(most)
    sentence = (
        f"Classes are out of balance in training: {percent_text(totals[most] / sum(totals))} of all examples are of "
        f"class {label}, which has {percent_text(tested[most] / sum(tested))} of the test examples."
    )
    return Evidence(value, sentence, {"apart": value}, lambda: against_imbalance(saved))


def against_imbalance(saved: SavedRun) -> list[Remedy | None]:
    """Weights, or margins, for rare classes."""
    builder = RemedyBuilder(saved)
    return [
        builder.balance_classes("every class weighs the same in the loss, however many examples it has"),
        builder.add_technique(
            "fedlc", "margins for rare classes, an adjustment of the logits by each client's counts", papers.ZHANG
        ),
    ]


# Too few ------------------------------------------------------------------------------------------------------


def few_examples(saved: SavedRun) -> Evidence | None:
    """How many examples the median client has."""
    held = [n for n in saved.facts.get("examples", []) if n]
    if not held or has_learned(saved) or learned_share(saved) is None:
        return None
    value = float(median(held))
    sentence = f"Clients have few examples: {value:g} in the median, from {min(held)} to {max(held)}."
    return Evidence(value, sentence, {"examples": value}, lambda: against_few_examples(RemedyBuilder(saved)))


def against_few_examples(builder: RemedyBuilder) -> list[Remedy | None]:
    """Less local work on so little, and more clients at once."""
    return [
        builder.change_settings("one pass: more fit a handful of examples too closely", papers.MCMAHAN, epochs=1),
        builder.change_settings("everybody in every round: more examples", papers.MCMAHAN, participation=1.0),
        builder.augment("crops make more of each image"),
        builder.add_technique("fedprox(mu=0.1)", "a pull towards the global model", papers.LI_PROX),
    ]


def participation_noise(saved: SavedRun) -> Evidence | None:
    """How much the metric changes from round to round, up and down, where few clients take part."""
    rated = rated_in_training(saved)
    everybody = saved.facts.get("clients")
    if len(rated) < 6 or everybody is None or rated[-1].primary not in SHARES or has_learned(saved):
        return None
    share = fmean(len(record.clients) for record in rated) / everybody
    last = [record.score or 0.0 for record in rated[len(rated) // 2 :]]
    steps = [b - a for a, b in pairwise(last)]
    value = min(fmean(max(step, 0.0) for step in steps), fmean(max(-step, 0.0) for step in steps)) * 2
    value = value if share <= 0.5 else 0.0
    sentence = (
        f"Few clients speak for all: with {percent_text(share)} of them in a round, the result swings by "
        f"{100 * value:.1f} points from round to round."
    )
    figure = {"swing": value, "participation": share}
    return Evidence(value, sentence, figure, lambda: against_noise(RemedyBuilder(saved), share))


def against_noise(builder: RemedyBuilder, share: float) -> list[Remedy | None]:
    """More clients in a round, or a memory of those of before."""
    return [
        builder.change_settings("more clients in a round", papers.MCMAHAN, participation=min(1.0, round(3 * share, 2))),
        builder.add_technique("fedavgm", "the server's momentum averages over rounds", papers.HSU),
        builder.add_technique("feddyn", "remembers what absent clients want", papers.ACAR),
    ]


# Too early ----------------------------------------------------------------------------------------------------


def too_early(saved: SavedRun) -> Evidence | None:
    """The local steps that a client has taken, against those before which nothing can be said."""
    rated = rated_in_training(saved)
    per_visit = steps_per_visit(saved)
    if not rated or has_learned(saved) or math.isinf(per_visit) or per_visit <= 0:
        return None
    value = rated[-1].round * per_visit / WARM
    needed = math.ceil(WARM / per_visit)
    metric, score = rated[-1].primary, rated[-1].score or 0.0
    sentence = (
        f"It is too early to judge this run: {score_text(metric, score)} after {rated[-1].round} rounds of "
        f"{per_visit:.0f} steps per client; it needs {needed} rounds, {WARM} steps, before anything can be said."
    )
    figure = {"done": value, "rounds_needed": float(needed)}
    return Evidence(value, sentence, figure, lambda: _more_rounds(saved, needed))


def unfinished(saved: SavedRun) -> Evidence | None:
    """The share of what is missing that the last third of the rounds has gained."""
    rated = rated_in_training(saved)
    share = learned_share(saved)
    if len(rated) < 4 or share is None or has_learned(saved):
        return None
    third = max(len(rated) // 3, 1)
    then, now = (learned_share(saved, upto) for upto in (rated[-third - 1].round, rated[-1].round))
    if then is None or now is None:
        return None
    value = min(max((now - then) / max(1 - then, 1e-9), 0.0), 1.0)
    rounds = rated[-1].round
    per_round = value / max(rounds - rated[-third - 1].round, 1)
    needed = min(rounds + math.ceil(math.log(5) / max(per_round, 1e-3)), 20 * rounds)
    metric, score = rated[-1].primary, rated[-1].score or 0.0
    sentence = (
        f"The run has not come to its end: {score_text(metric, score)} after {rounds} rounds, and the last {third} "
        f"gained {percent_text(value)} of what was missing; at this pace it needs about {needed} rounds."
    )
    figure = {"gained": value, "rounds_needed": float(needed)}
    return Evidence(value, sentence, figure, lambda: _more_rounds(saved, needed))


def _more_rounds(saved: SavedRun, rounds: int) -> list[Remedy | None]:
    planned = int(saved.config.get("rounds", 10))
    why = "more rounds"
    return [RemedyBuilder(saved).change_settings(why, papers.MCMAHAN, rounds=max(rounds, planned + 1))]


LEARNING_RULES = (
    Rule("probabilities", probabilities, explains=STOPPED | {"rate-too-small", "dead-units", "vanishing-gradients"}),
    Rule("class-imbalance", class_imbalance, explains=STOPPED | {"rate-too-small", "rate-too-large", "forgetting"}),
    Rule(
        "rate-too-large",
        rate_too_large,
        probes=("rates",),
        explains=STOPPED
        | {"vanishing-gradients", "exploding-gradients", "dead-units", "participation-noise", "accumulation"},
    ),
)

SLOW_RULE = Rule("rate-too-small", rate_too_small, probes=("rates",), explains=STOPPED)

FEW_RULES = (
    Rule("few-examples", few_examples, explains=frozenset({"no-learning", "unlike-features", "opposed-updates"})),
    Rule("participation-noise", participation_noise, explains=frozenset({"no-learning"})),
    Rule("unfinished", unfinished, explains=frozenset({"no-learning"})),
    Rule("too-early", too_early, explains=frozenset({"no-learning"})),
)
