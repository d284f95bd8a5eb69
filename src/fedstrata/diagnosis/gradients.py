"""Whether gradients reach all of a network: they may vanish or explode on their way, or find units that are dead."""

from __future__ import annotations

from statistics import fmean, median

from fedstrata.diagnosis import remedies as papers
from fedstrata.diagnosis.evidence import Evidence, Rule, first_few, mean_by_name, percent_text, stratum_depths
from fedstrata.diagnosis.findings import Remedy
from fedstrata.diagnosis.learning import has_learned
from fedstrata.diagnosis.remedies import RemedyBuilder
from fedstrata.diagnosis.thresholds import STOPPED, THRESHOLDS
from fedstrata.runs.reader import SavedRun

FEWEST = 4
"""Strata that a network must have for depth to matter."""

SMALLEST = 1e-30
"""A gradient that counts as zero."""


def gradients_by_depth(saved: SavedRun) -> dict[str, float]:
    """Stratum → the gradient's norm against the weights', from the input on, in the first round that was measured.

    A network that is too deep never gets going; later on, gradients may vanish because everything is learnt.
    """
    order = stratum_depths(saved)
    rounds = [row.get("gradient", {}) for row in saved.series("depth").values()]
    first: dict[str, float] = next((row for row in rounds if row), {})
    names = [name for name in first if name in order] if order else list(first)
    return {name: max(first[name], 0.0) for name in sorted(names, key=lambda name: order.get(name, 0))}


def _thirds(found: dict[str, float]) -> tuple[float, float]:
    """(the median gradient of the first third of the strata, that of the last)."""
    values = list(found.values())
    some = max(len(values) // 3, 1)
    return max(median(values[:some]), SMALLEST), max(median(values[-some:]), SMALLEST)


def vanishing_gradients(saved: SavedRun) -> Evidence | None:
    """How many times the first strata's gradient that of the last is."""
    found = gradients_by_depth(saved)
    if len(found) < FEWEST or has_learned(saved):
        return None
    first, last = _thirds(found)
    value = min(last / first, 1e12) if last > SMALLEST else 1.0
    small = [name for name in found if found[name] * THRESHOLDS["vanishing-gradients"].none < last]
    sentence = (
        f"Gradients vanish on their way to the input: against the weights they are {value:.2g} times as large in the "
        f"last third of the {len(found)} strata as in the first; too small to learn in "
        f"{first_few(small or list(found))}."
    )
    return Evidence(value, sentence, {"times": value, "strata": float(len(found))}, lambda: against_vanishing(saved))


def exploding_gradients(saved: SavedRun) -> Evidence | None:
    """How many times the last strata's gradient that of the first is."""
    found = gradients_by_depth(saved)
    if len(found) < FEWEST or has_learned(saved):
        return None
    first, last = _thirds(found)
    value = min(first / last, 1e12) if first > SMALLEST else 1.0
    large = sorted(found, key=lambda name: -found[name])
    sentence = (
        f"Gradients explode on their way to the input: against the weights they are {value:.2g} times as large in the "
        f"first third of the {len(found)} strata as in the last, most in {first_few(large)}."
    )
    return Evidence(value, sentence, {"times": value, "strata": float(len(found))}, lambda: against_exploding(saved))


def against_vanishing(saved: SavedRun) -> list[Remedy | None]:
    """A way round the layers, or fewer of them."""
    builder = RemedyBuilder(saved)
    strata = max(len(gradients_by_depth(saved)) // 2, 2)
    return [
        builder.restore_model("residual links let gradients pass layers by", papers.HE, residual=True),
        builder.advise_model("add residual links around every two layers, or a norm layer after each", papers.HE),
        builder.use_shallower_model(4.0, f"fewer layers, {strata} instead of {2 * strata}: gradients get through"),
        builder.widen_model("wider layers keep more of a gradient"),
    ]


def against_exploding(saved: SavedRun) -> list[Remedy | None]:
    """Bounded steps, or normalised layers."""
    builder = RemedyBuilder(saved)
    return [
        builder.change_settings("bounds the norm of every local gradient", papers.MCMAHAN, clip=1.0),
        builder.advise_model("add a norm layer after every weight layer, or begin with smaller weights", papers.HE),
        builder.lower_rate(0.1, "a smaller learning rate"),
    ]


def dead_units(saved: SavedRun) -> Evidence | None:
    """The share of units that are never active, of the stratum that has lost most, in the last rounds measured."""
    rounds = [row.get("dead", {}) for row in saved.series("depth").values()]
    shares = mean_by_name([row for row in rounds if row][-3:])
    if not shares or has_learned(saved):
        return None
    worst = max(shares, key=lambda name: shares[name])
    value = shares[worst]
    bad = sorted((name for name in shares if shares[name] > 0.5), key=lambda name: -shares[name])
    parts = [f"{name} ({percent_text(shares[name])})" for name in bad or [worst]]
    sentence = (
        f"Units are dead: never active on any example, and out of reach of every gradient, in {first_few(parts)}; "
        f"{percent_text(fmean(shares.values()))} in the mean over the strata."
    )
    return Evidence(value, sentence, {"dead": value}, lambda: against_dead_units(RemedyBuilder(saved)))


def against_dead_units(builder: RemedyBuilder) -> list[Remedy | None]:
    """What killed them are steps that were too long, or inputs that were too large; a norm layer revives them."""
    return [
        builder.lower_rate(0.1, "a smaller learning rate, from the start: dead units do not come back"),
        builder.change_settings("bounds the norm of every local gradient", papers.MCMAHAN, clip=1.0),
        builder.advise_model("normalise inputs, add norm layers, or use a rectifier that leaks", papers.HE),
    ]


DEPTH_RULES = (
    Rule(
        "vanishing-gradients",
        vanishing_gradients,
        probes=("depth",),
        explains=STOPPED | {"rate-too-small", "dead-units", "accumulation"},
    ),
    Rule(
        "exploding-gradients",
        exploding_gradients,
        probes=("depth",),
        explains=STOPPED | {"dead-units", "accumulation"},
    ),
)

DEAD_RULE = Rule("dead-units", dead_units, probes=("depth",), explains=STOPPED | {"accumulation"})
