"""Symptoms: how a federation suffers, whatever it suffers from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from fedstrata.diagnosis import remedies as papers
from fedstrata.diagnosis.evidence import (
    IDEAL,
    WARM,
    Evidence,
    Rule,
    change_text,
    classifier_name,
    finite_numbers,
    first_few,
    mean_by_name,
    percent_text,
    rank_correlation,
    recent_rounds,
    score_text,
    steps_per_visit,
    stratum_depths,
    times_text,
    training_records,
)
from fedstrata.diagnosis.findings import Remedy
from fedstrata.diagnosis.harm import guessing_score, learned_share, rated_in_training
from fedstrata.diagnosis.remedies import RemedyBuilder
from fedstrata.diagnosis.thresholds import THRESHOLDS
from fedstrata.runs.reader import SavedRun

FEWEST = 6
"""Strata that a rank correlation needs: with fewer, chance alone often puts them in order."""

EXACT = frozenset({"fedexlora", "flora", "hlora"})
"""Methods that take the mean of adapters' products, whatever that of their factors is."""

THIRDS = 1.5
"""How many times as much as the last third of the strata the first must diverge."""


def divergence_probe(saved: SavedRun) -> str:
    """The probe of exact divergence if it was used, else that of its free stand-in."""
    return "divergence" if saved.series("divergence") else "proxy"


def probe_subject(probe: str) -> str:
    """What a probe of divergence compares."""
    return "gradients" if probe == "divergence" else "updates"


# Divergence -------------------------------------------------------------------------------------------------


def diverging_strata(saved: SavedRun) -> Evidence | None:
    """The most divergent stratum against the median one."""
    probe = divergence_probe(saved)
    found = mean_by_name(recent_rounds(saved, probe))
    typical = median(list(found.values())) if len(found) >= 3 else 0.0
    if typical <= 0:
        return None
    ratios = {name: value / typical for name, value in found.items()}
    names = sorted(ratios, key=lambda name: -ratios[name])
    above = [name for name in names if ratios[name] >= THRESHOLDS["diverging-strata"].none] or names[:1]
    parts = [f"{name} ({found[name]:.2g}, {times_text(ratios[name])} the median)" for name in above[:3]]
    since = _since_text(saved, probe, above[0])
    sentence = f"Clients' {probe_subject(probe)} part most in {first_few(parts)}{since}."
    figure = {"times_median": ratios[names[0]], "median": typical, **{name: found[name] for name in above[:3]}}
    return Evidence(
        ratios[names[0]],
        sentence,
        figure,
        lambda: against_strata(RemedyBuilder(saved), names[0] == classifier_name(saved)),
    )


def _since_text(saved: SavedRun, probe: str, name: str) -> str:
    """From which probed round on a stratum has been that far above the median."""
    limit = THRESHOLDS["diverging-strata"].none
    first = None
    for number, found in saved.series(probe).items():
        values = finite_numbers(found.values())
        above = name in found and values and found[name] >= limit * median(values)
        first = (number if first is None else first) if above else None
    return "" if first is None else f", since round {first}"


def against_strata(builder: RemedyBuilder, last: bool) -> list[Remedy | None]:
    """What helps depends on where clients diverge most: in the classifier, or below it."""
    if last:
        return [
            builder.add_technique(
                "ccvr", "refits the classifier, which parts most, once after the last round", papers.LUO
            ),
            builder.add_technique("feddyn", "lines the clients' optima up with the global one", papers.ACAR),
        ]
    return [
        builder.widen_model("wider layers change less, so clients part less; the paper halves the divergence by it"),
        builder.add_fedpart(
            "trains one stratum at a time while the others stay where they are, the same for everybody"
        ),
    ]


def accumulation(saved: SavedRun) -> Evidence | None:
    """Minus the rank correlation of a stratum's depth and its divergence, in the mean over the rounds."""
    order, probe = stratum_depths(saved), divergence_probe(saved)
    rounds = [_values_in_order(found, order) for found in recent_rounds(saved, probe)]
    rounds = [values for values in rounds if len(values) >= FEWEST]
    if not rounds:
        return None
    value = -fmean(rank_correlation(range(len(values)), values) for values in rounds)
    thirds = fmean(_thirds_ratio(values) for values in rounds)
    sentence = (
        f"Divergence accumulates towards the input: the first third of the strata is {times_text(thirds)} as divergent "
        f"as the last, and the rank correlation of depth and divergence is {-value:.2f} over {len(rounds[-1])} strata."
    )
    figure = {"correlation": value, "thirds": thirds}
    return Evidence(
        value if thirds >= THIRDS else min(value, 0.0), sentence, figure, lambda: against_chain(RemedyBuilder(saved))
    )


def _values_in_order(found: Mapping[str, Any], order: Mapping[str, int]) -> list[float]:
    return finite_numbers(found[name] for name in sorted(found.keys() & order.keys(), key=order.__getitem__))


def _thirds_ratio(values: Sequence[float]) -> float:
    """The mean of the first third against that of the last."""
    some = max(len(values) // 3, 1)
    return fmean(values[:some]) / max(fmean(values[-some:]), 1e-12)


def against_chain(builder: RemedyBuilder) -> list[Remedy | None]:
    """What shortens the chain of layers, or reduces what accumulates along it."""
    return [
        builder.restore_model(
            "the link lets gradients pass layers by; the paper saves a tenth of the rounds",
            papers.DEEPER,
            residual=True,
        ),
        builder.restore_model(
            "the usual plan, channels growing with depth, did best in the paper", papers.DEEPER, plan="normal"
        ),
        builder.widen_model(
            "wider layers change less, so clients part less; the paper gains 3 to 7 points by twice the width"
        ),
        builder.augment("crops make clients' data more alike; the paper's default"),
    ]


# Averaging --------------------------------------------------------------------------------------------------


def layer_mismatch(saved: SavedRun) -> Evidence | None:
    """The gradient's norm at the averaged model against that of going on alone.

    Against the larger one of two: going on alone now, and in the first probed round. Once everything is learned both
    are small, and their ratio says nothing.
    """
    rounds = [found for found in recent_rounds(saved, "gradnorm") if found.get("alone") and found.get("averaged")]
    if not rounds:
        return None
    first = next(found for found in saved.series("gradnorm").values() if found.get("alone"))
    value = median([_jump(found, first, None) for found in rounds])
    strata = [name for name in rounds[-1]["averaged"] if all(name in found["alone"] for found in (*rounds, first))]
    jumps = {name: median([_jump(found, first, name) for found in rounds]) for name in strata}
    worst = max(jumps, key=jumps.__getitem__, default="")
    figure = {"spike": value, **({worst: jumps[worst]} if worst else {})}
    most = f", most in {worst} ({times_text(jumps[worst])})" if worst else ""
    sentence = (
        f"Layers do not match after averaging: the gradient's norm is {times_text(value)} what it is, or was in the "
        f"first measured round, for a client that goes on alone{most}."
    )
    return Evidence(value, sentence, figure, lambda: against_mismatch(RemedyBuilder(saved)))


def _jump(found: Mapping[str, Any], first: Mapping[str, Any], name: str | None) -> float:
    alone = max(_norm(found["alone"], name), _norm(first["alone"], name))
    return _norm(found["averaged"], name) / max(alone, 1e-9)


def _norm(norms: Mapping[str, Sequence[float]], name: str | None) -> float:
    """At the first step, of one stratum or of all together."""
    steps = [norms[name]] if name is not None and name in norms else norms.values() if name is None else []
    return math.hypot(*(norm for step in steps for norm in finite_numbers(step[:1])))


def against_mismatch(builder: RemedyBuilder) -> list[Remedy | None]:
    """FedPart, which was made for it, and less local work."""
    return [
        builder.add_fedpart(
            "trains one stratum at a time on frozen anchors: +1.0 to 1.8 points on CIFAR-10 in our runs, for 28 % of "
            "the uplink"
        ),
        _fewer_epochs(builder),
    ]


def _fewer_epochs(builder: RemedyBuilder) -> Remedy | None:
    epochs = int(builder.config.get("epochs", 1))
    if epochs < 2 or builder.config.get("steps") is not None:
        return None
    why = "less local work between two averages, so clients part less; more rounds for the same work"
    return builder.change_settings(why, papers.MCMAHAN, epochs=epochs // 2)


def opposed_updates(saved: SavedRun) -> Evidence | None:
    """The median over the strata of the mean cosine between two clients' updates."""
    found = mean_by_name(recent_rounds(saved, "cosine"))
    if not found:
        return None
    value = median(list(found.values()))
    against = sorted((name for name in found if found[name] < 0), key=found.__getitem__)
    parts = [f"{name} ({found[name]:.2f})" for name in against]
    where = f": in {len(against)} of {len(found)} strata they go against each other, most in {first_few(parts)}"
    sentence = (
        f"Clients' updates have little in common: the cosine between two of them is {value:.2f} in the median over "
        f"the strata{where if against else ''}."
    )
    figure = {"cosine": value, "strata_against": float(len(against)), "strata": float(len(found))}
    return Evidence(value, sentence, figure, lambda: against_opposition(RemedyBuilder(saved)))


def against_opposition(builder: RemedyBuilder) -> list[Remedy | None]:
    """Methods that correct the drift of clients."""
    return [
        builder.add_technique(
            "feddyn",
            "lines the clients' optima up with the global one; in our runs +3.5 and +5.7 points on Fashion-MNIST",
            papers.ACAR,
        ),
        builder.add_technique(
            "scaffold",
            "control variates take the drift out of every step: +4.2 points with two classes per client, -2.7 under "
            "Dirichlet(0.1); it wants a smaller learning rate",
            papers.KARIMIREDDY,
            lr=builder.rate(0.3),
        ),
        _fewer_epochs(builder),
        builder.add_technique(
            "fedprox(mu=0.1)", "a pull towards the global model; no difference in our runs", papers.LI_PROX
        ),
    ]


def unlike_features(saved: SavedRun) -> Evidence | None:
    """1 − CKA of clients' models at the stage where they are least alike."""
    means = mean_by_name([found.get("mean", {}) for found in recent_rounds(saved, "cka")])
    if not means:
        return None
    least = min(means, key=means.__getitem__)
    first = next(iter(means))
    value = 1 - means[least]
    begun = "" if first == least else f", and {_stage_output(first)} one of {means[first]:.2f}"
    sentence = (
        f"Clients' models see different things: on the same examples {_stage_output(least)} have a CKA of "
        f"{means[least]:.2f}{begun}."
    )
    return Evidence(value, sentence, {"unlike": value, **means}, lambda: against_unlikeness(RemedyBuilder(saved)))


def _stage_output(stage: str) -> str:
    """What a stage's outputs are called: those of the head are the model's own."""
    return "their outputs" if stage == "head" else f"their features after {stage}"


def against_unlikeness(builder: RemedyBuilder) -> list[Remedy | None]:
    """What shares features between clients, or keeps them near each other."""
    depth = builder.add_technique(
        "inco",
        "mixes deep layers' changes with shallow ones'; in our runs averaging across depths helped, the mixing did "
        "not show",
        papers.CHAN,
    )
    return [
        depth if builder.config.get("archs") else None,
        builder.add_fedimpro(
            "the upper layers train on everybody's features; +5 to 6 points on Fashion-MNIST, nothing certain on "
            "CIFAR-10"
        ),
        builder.add_technique(
            "moon", "keeps features near the global model's; its gain did not show in our runs", papers.LI_MOON
        ),
    ]


# Forgetting -------------------------------------------------------------------------------------------------


def forgetting(saved: SavedRun) -> Evidence | None:
    """Accuracy that local training takes from the classes that a client lacks."""
    rounds = recent_rounds(saved, "calibration")
    lost = finite_numbers(found.get("forgetting") for found in rounds)
    if not lost:
        return None
    value = fmean(lost)
    missing, held = (
        fmean(finite_numbers(found.get(name) for found in rounds) or [0.0]) for name in ("missing", "held")
    )
    sentence = (
        f"Local training forgets: it costs {100 * value:.1f} points of accuracy on the classes that a client lacks, "
        f"where local models are left at {percent_text(missing)}, against {percent_text(held)} on its own."
    )
    figure = {"forgetting": value, "missing": missing, "held": held}
    return Evidence(value, sentence, figure, lambda: against_forgetting(RemedyBuilder(saved)))


def against_forgetting(builder: RemedyBuilder) -> list[Remedy | None]:
    """What protects the classes that a client lacks."""
    return [
        builder.add_technique("ccvr", "refits the classifier for all classes, once after the last round", papers.LUO),
        builder.add_technique(
            "fednlr",
            "neurons that are bound to other clients' classes learn slowly; they drift by a third less in our runs, "
            "without a gain in accuracy",
            papers.WANG_NLR,
        ),
        builder.add_technique(
            "fedrs",
            "holds back the logits of classes that a client lacks; its gain did not show in our runs",
            papers.LI_RS,
        ),
        builder.add_technique(
            "fedlc",
            "leaves classes that a client lacks out of the softmax; its gain did not show in our runs",
            papers.ZHANG,
        ),
    ]


def neuron_drift(saved: SavedRun) -> Evidence | None:
    """The share of their activation that neurons lose which are bound to classes that a client lacks."""
    rounds = recent_rounds(saved, "drift")
    missing, held = (mean_by_name([found.get(name, {}) for found in rounds]) for name in ("missing", "held"))
    if not missing:
        return None
    worst = min(missing, key=missing.__getitem__)
    value = -missing[worst]
    own = f", those of its own classes change by {change_text(held[worst])}" if worst in held else ""
    sentence = (
        f"Neurons drift: in {worst}, those bound to classes that a client lacks lose {percent_text(value)} of their "
        f"activation in local training{own}."
    )
    figure = {"drift": value, **({"held": held[worst]} if worst in held else {})}
    return Evidence(value, sentence, figure, lambda: against_drift(RemedyBuilder(saved)))


def against_drift(builder: RemedyBuilder) -> list[Remedy | None]:
    """FedNLR, which was made for it."""
    return [
        builder.add_technique(
            "fednlr",
            "neurons that are bound to other clients' classes learn slowly: a visit took 8.6 instead of 12.3 % of "
            "their activation in our runs",
            papers.WANG_NLR,
        )
    ]


# Learning ---------------------------------------------------------------------------------------------------


def no_learning(saved: SavedRun) -> Evidence | None:
    """How far the metric that the run is judged by is from guessing, as a share of the way to the best there is."""
    rated, value = rated_in_training(saved), learned_share(saved)
    if value is None or not rated or rated[-1].round * steps_per_visit(saved) < WARM:
        return None
    metric = rated[-1].primary
    chance = guessing_score(saved, metric) or 0.0
    best = chance + value * (IDEAL[metric] - chance)
    sentence = (
        f"The global model has hardly learned: {score_text(metric, best)} after {rated[-1].round} rounds, where "
        f"guessing gives {score_text(metric, chance)}."
    )
    figure = {"above_guessing": value, metric: best, "guessing": chance}
    return Evidence(value, sentence, figure, lambda: against_standstill(saved))


def against_standstill(saved: SavedRun) -> list[Remedy | None]:
    """Another learning rate: a larger one first if the training loss falls from round to round, else a smaller one."""
    losses = finite_numbers(record.train_loss for record in training_records(saved))
    falls = len(losses) > 2 and rank_correlation(range(len(losses)), losses) < -0.8
    builder = RemedyBuilder(saved)
    why = "a larger learning rate: the loss falls, but slowly" if falls else "a larger learning rate"
    larger = builder.change_settings(why, papers.MCMAHAN, lr=builder.rate(10))
    smaller = builder.lower_rate(0.3, "a smaller learning rate")
    return [larger, smaller] if falls else [smaller, larger]


# Adapters ---------------------------------------------------------------------------------------------------


def inexact_adapters(saved: SavedRun) -> Evidence | None:
    """What the means of adapters' factors miss of the mean of their products, in the mean over the strata.

    None under methods that do not go by the means of the factors.
    """
    found = mean_by_name(recent_rounds(saved, "aggregation"))
    own = RemedyBuilder(saved).own
    if not found or own is None or any(technique.name in EXACT for technique in own.techniques):
        return None
    value, worst = fmean(found.values()), max(found, key=lambda name: found[name])
    sentence = (
        f"Averaged adapters are not what clients have learnt: the product of the mean factors misses "
        f"{percent_text(value)} of the mean of the products, most in {worst} ({percent_text(found[worst])})."
    )
    return Evidence(value, sentence, {"error": value, "worst": found[worst]}, lambda: _for_exact_means(saved))


def _for_exact_means(saved: SavedRun) -> list[Remedy | None]:
    """Methods whose mean is exact."""
    builder = RemedyBuilder(saved)
    return [
        builder.add_technique("fedexlora", "adds what the mean of the factors misses to the base", papers.SINGHAL),
        builder.add_technique("rolora", "one factor trains in a round, which makes its mean exact", papers.CHEN_ROLORA),
        builder.add_technique("ffalora", "A stays as it is, which makes the mean exact", papers.SUN_FFA),
    ]


SYMPTOMS = (
    Rule("no-learning", no_learning),
    Rule("layer-mismatch", layer_mismatch, probes=("gradnorm",)),
    Rule("opposed-updates", opposed_updates, probes=("cosine",)),
    Rule("unlike-features", unlike_features, probes=("cka",)),
    Rule("forgetting", forgetting, probes=("calibration",)),
    Rule("neuron-drift", neuron_drift, probes=("drift",)),
    Rule("inexact-adapters", inexact_adapters, probes=("aggregation",)),
    Rule("accumulation", accumulation, probes=("divergence", "proxy")),
    Rule("diverging-strata", diverging_strata, probes=("divergence", "proxy")),
)
