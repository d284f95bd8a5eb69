"""Causes: label skew, running statistics that do not fit, and a network too deep for its input."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from fedstrata.core.text import SHARES
from fedstrata.diagnosis import remedies as papers
from fedstrata.diagnosis.clients import CLIENT_RULES
from fedstrata.diagnosis.coverage import COVERAGE_RULES
from fedstrata.diagnosis.evidence import (
    IDEAL,
    WARM,
    Evidence,
    Rule,
    finite_numbers,
    mean_by_name,
    percent_text,
    recent_rounds,
    score_text,
    steps_per_visit,
    times_text,
)
from fedstrata.diagnosis.explosions import EXPLOSIONS
from fedstrata.diagnosis.findings import Remedy
from fedstrata.diagnosis.gradients import DEAD_RULE, DEPTH_RULES
from fedstrata.diagnosis.learning import FEW_RULES, LEARNING_RULES, SLOW_RULE
from fedstrata.diagnosis.remedies import RemedyBuilder, relative_reach
from fedstrata.diagnosis.thresholds import DRIFT, THRESHOLDS
from fedstrata.runs.reader import SavedRun


def chance_skew(counts: Sequence[Sequence[int]]) -> float:
    """The skew to expect if everybody's examples were dealt out at random: clients with few of them differ anyway.

    The total-variation distance of a sample of n from p is ½ Σ_c |p̂_c − p_c|, and p̂_c is nearly normal with variance
    p_c(1 − p_c)/n: the expectation is ½ Σ_c √(2p_c(1 − p_c)/(πn)), in the mean over the clients.
    """
    held = [sum(row) for row in counts if sum(row)]
    totals = [sum(column) for column in zip(*counts, strict=True)]
    shares = [total / sum(held) for total in totals] if held else []
    spread = sum(math.sqrt(2 * p * (1 - p) / math.pi) for p in shares) / 2
    return min(fmean(spread / math.sqrt(n) for n in held), 0.9) if held else 0.0


def label_skew(saved: SavedRun) -> Evidence | None:
    """Beyond chance: (skew − chance)/(1 − chance)."""
    facts = saved.facts
    skew, counts = facts.get("skew"), facts.get("counts", [])
    own = RemedyBuilder(saved).own
    if skew is None or not counts or (own is not None and own.centralised):
        return None
    chance = chance_skew(counts)
    beyond = max((float(skew) - chance) / (1 - chance), 0.0)
    lacking = fmean(sum(n == 0 for n in row) for row in counts if sum(row))
    lost = finite_numbers(found.get("forgetting") for found in recent_rounds(saved, "calibration"))
    figure = {"beyond_chance": beyond, "skew": float(skew), "by_chance": chance, "classes_lacking": lacking}
    if lost:
        figure["forgetting"] = fmean(lost)
    sentence = (
        f"Clients hold different labels: {percent_text(float(skew))} of a client's examples would have to change their "
        f"class to match everybody's ({percent_text(chance)} by chance at these sizes)"
        f"{_lacking_text(lacking, len(counts[0]))}{_forgetting_text(lost)}."
    )
    return Evidence(beyond, sentence, figure, lambda: against_skew(RemedyBuilder(saved)))


def _lacking_text(lacking: float, classes: int) -> str:
    return f", and a client lacks {lacking:.1f} of {classes} classes" if lacking else ""


def _forgetting_text(lost: Sequence[float]) -> str:
    if not lost or fmean(lost) <= 0:
        return ""
    return f", on which local training costs {100 * fmean(lost):.1f} points of accuracy"


def against_skew(builder: RemedyBuilder) -> list[Remedy | None]:
    """Ranked by what we measured ourselves: docs/results/."""
    return [*_gains_under_skew(builder), *_no_gains_under_skew(builder)]


def _gains_under_skew(builder: RemedyBuilder) -> list[Remedy | None]:
    return [
        builder.add_technique(
            "feddyn",
            "lines the clients' optima up with the global one; in our runs +3.5 and +5.7 points on Fashion-MNIST, +10 "
            "on CIFAR-10",
            papers.ACAR,
        ),
        builder.add_fedimpro(
            "the upper layers train on everybody's features; +5 to 6 points on Fashion-MNIST, nothing certain on "
            "CIFAR-10"
        ),
        builder.add_technique(
            "ccvr",
            "refits the classifier once, after the last round: +3.6 and +8.5 points on Fashion-MNIST",
            papers.LUO,
        ),
    ]


def _no_gains_under_skew(builder: RemedyBuilder) -> list[Remedy | None]:
    return [
        builder.add_technique(
            "fednlr",
            "neurons that are bound to other clients' classes learn slowly; its gain did not show in our runs, -0.8 to "
            "+0.3 points at the end of training",
            papers.WANG_NLR,
        ),
        builder.add_technique(
            "fedlc",
            "margins for rare classes; its gain did not show in our runs, and with two classes per client it lost 4 "
            "points",
            papers.ZHANG,
        ),
        builder.add_technique(
            "fedrs",
            "holds back the logits of classes that a client lacks; its gain did not show in our runs",
            papers.LI_RS,
        ),
        builder.add_technique(
            "moon",
            "keeps features near the global model's; its gain did not show in our runs, at 1.65 times the FLOPs",
            papers.LI_MOON,
        ),
    ]


def running_statistics(saved: SavedRun) -> Evidence | None:
    """How much better the averaged model is by normalising with each batch instead.

    In the last rounds together or in the very last, whichever is less: it must not have passed already. Rounds before
    the statistics can have forgotten their initial values do not count.
    """
    metric = saved.records[-1].primary if saved.records else "accuracy"
    warm = replace(saved, probes=[row for row in saved.probes if row["round"] * steps_per_visit(saved) >= WARM])
    rounds = [found for found in recent_rounds(warm, "statistics") if {"running", "batch"} <= found.keys()]
    if not rounds or metric not in IDEAL:
        return None
    rounds = rounds if _lost(metric, rounds) < _lost(metric, rounds[-1:]) else rounds[-1:]
    running, batch = _mean_scores(rounds)
    spread = mean_by_name([found.get("spread", {}) for found in rounds])
    figure = {"lost": _lost(metric, rounds), "running": running, "batch": batch}
    apart = ""
    if spread:
        worst = max(spread, key=spread.__getitem__)
        figure["spread"] = spread[worst]
        apart = (
            f"; clients' running means are up to {spread[worst]:.2f} standard deviations from their average ({worst})"
        )
    sentence = (
        f"The averaged running statistics do not fit the averaged model: it reaches {score_text(metric, running)} with "
        f"them and {score_text(metric, batch)} with each batch's own{apart}."
    )
    gain = f"{100 * (batch - running):.1f} points more" if metric in SHARES else score_text(metric, batch)
    return Evidence(figure["lost"], sentence, figure, lambda: against_statistics(RemedyBuilder(saved), gain))


def _mean_scores(rounds: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """(with running statistics, with each batch's own)."""
    running, batch = (fmean(found[name] for found in rounds) for name in ("running", "batch"))
    return running, batch


def _lost(metric: str, rounds: Sequence[Mapping[str, Any]]) -> float:
    """What running statistics cost: of a share, the difference; else the part of the way to the best there is."""
    running, batch = _mean_scores(rounds)
    if metric in SHARES:
        return batch - running
    far, near = (abs(IDEAL[metric] - score) for score in (running, batch))
    return (far - near) / max(far, near, 1e-9)


def against_statistics(builder: RemedyBuilder, gain: str) -> list[Remedy | None]:
    """What helps with running statistics; the first is what the probe has measured."""
    return [
        builder.change_buffers(
            "drop",
            f"norm layers use the batch at hand, in evaluation too: {gain} by this very probe; needs batches in "
            "deployment",
        ),
        builder.change_model(
            "group normalisation has no running statistics; not measured by us",
            papers.HSIEH,
            norm="group",
        ),
        builder.change_buffers(
            "local",
            "each client keeps its own for its own data; the global model is still judged with their mean, so its "
            "figure stays",
        ),
    ]


def receptive_field(saved: SavedRun) -> Evidence | None:
    """How many times the image's side the largest receptive field is."""
    fields = saved.facts.get("model", {}).get("fields", [])
    if not fields:
        return None
    value = relative_reach(fields)
    beyond = [place for place, f in enumerate(fields) if _exceeds(f)]
    last = max(fields, key=lambda f: max(f["field"]))
    figure = {"times": value, "convolutions": float(len(fields)), "beyond": float(len(beyond))}
    if not beyond:
        return Evidence(value, "", figure)
    first = fields[beyond[0]]
    sentence = (
        f"The network is too deep for its input{_width_text(saved)}: from convolution {beyond[0] + 1} of {len(fields)} "
        f"on ({first['layer']}, {_size_text(first['field'])}) receptive fields exceed the "
        f"{_size_text(first['input'])} image, and {last['layer']} sees {_size_text(last['field'])}, "
        f"{times_text(value)} its side."
    )
    return Evidence(value, sentence, figure, lambda: against_depth(RemedyBuilder(saved)))


def _exceeds(field: dict[str, Any]) -> bool:
    return any(seen > side for seen, side in zip(field["field"], field["input"], strict=True))


def _size_text(sides: Sequence[int]) -> str:
    return "×".join(map(str, sides))


def _width_text(saved: SavedRun) -> str:
    width = RemedyBuilder(saved).width
    return "" if width is None else f", at width {width}"


def against_depth(builder: RemedyBuilder) -> list[Remedy | None]:
    """The guidelines of the deeper-models paper; those that shrink the field most come first."""
    return [
        builder.change_model(
            "a 3×3 stem without max-pool makes all fields about four times smaller; the paper gains 8 to 22 points by "
            "the stem",
            papers.DEEPER,
            stem="3x3",
            maxpool=False,
        ),
        builder.use_shallower_model(
            THRESHOLDS["receptive-field"].none,
            "fewer layers: a shorter chain for divergence to accumulate over, and fields that fit the image",
        ),
        builder.enlarge_images(
            "the same field covers less of a larger image; the paper gains 8 to 22 points from 64 to 128 pixels"
        ),
        builder.widen_model(
            "wider layers change less, so clients part less; the paper halves the divergence and gains 3 to 7 points"
        ),
    ]


CAUSES = (
    *CLIENT_RULES,
    *EXPLOSIONS,
    *LEARNING_RULES,
    *DEPTH_RULES,
    SLOW_RULE,
    DEAD_RULE,
    Rule(
        "receptive-field",
        receptive_field,
        explains=DRIFT | {"accumulation"},
        backed_by=frozenset({"opposed-updates", "unlike-features", "accumulation", "layer-mismatch"}),
    ),
    Rule("running-statistics", running_statistics, probes=("statistics",), explains=DRIFT | {"accumulation"}),
    Rule(
        "label-skew",
        label_skew,
        explains=DRIFT | {"forgetting", "neuron-drift"},
        backed_by=frozenset({"opposed-updates", "layer-mismatch", "unlike-features", "forgetting", "neuron-drift"}),
    ),
    *COVERAGE_RULES,
    *FEW_RULES,
)
"""A cause may explain others that come after it. Of two that are equally severe, the first comes first: broken clients
are certain, a network's shape is, a loss of accuracy was measured, and skew may or may not do the harm that it
can."""
