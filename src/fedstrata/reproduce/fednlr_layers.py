"""FedNLR's Fig. 4: one layer at a time with learning rates of its own, and its own ratio μ."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from fedstrata.compare import Comparison
from fedstrata.reproduce.claims import PLAIN, POINTS, Check, above, beyond
from fedstrata.reproduce.fednlr_settings import LAYERS, FedNLRScale, skew_name
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    Grid,
    accuracy_at_end,
    figures_by_label,
    gain_rows,
    label_methods,
    unfinished_note,
)
from fedstrata.reproduce.verdicts import Seeds, differences, shared_seeds

BASE = "FedAvg"
HIDDEN = LAYERS[2:-1]
"""What the paper calls hidden layers, against the shallow ones and the classifier; where they begin is our choice."""
USUAL = (1.75, 2.0)
"""The ratios that "in most situations" improve on FedAvg."""


def layers(scale: FedNLRScale) -> Grid:
    """FedAvg with one layer's neurons at learning rates of their own."""
    points = {
        point_name(layer, mu): f"fednlr(mu={mu}, layers=({layer!r},))" for layer in LAYERS for mu in scale.layer_mus
    }
    return Grid(
        "layers",
        "Fig. 4: one layer at a time with learning rates of its own",
        scale.values(method=label_methods({BASE: "fedavg", **points})),
        lambda comparison: _assess(scale, comparison),
    )


def point_name(layer: str, mu: float) -> str:
    """A point of the figure."""
    return f"{layer}, μ = {mu:g}"


def _assess(scale: FedNLRScale, comparison: Comparison) -> Findings:
    found = figures_by_label(comparison, accuracy_at_end(scale.last))
    gains = {label: differences(seeds, found[BASE]) for label, seeds in found.items() if label != BASE}
    title = f"Accuracy on {skew_name(scale.partitions[0])} with one layer's neurons at rates of their own, %"
    table = FindingsTable(title, ("layer", "accuracy", "gain over FedAvg, points"), gain_rows(found, BASE))
    over = "the last evaluation" if scale.last == 1 else f"the last {scale.last} evaluations"
    notes = (
        f"an accuracy is the mean of {over}; a point is a layer with a ratio μ, and of each seed the share of points "
        "is judged that are above FedAvg's accuracy with the same seed",
    )
    return Findings((table,), tuple(_claims(scale, gains)), (*notes, *unfinished_note(comparison)))


def _claims(scale: FedNLRScale, gains: Mapping[str, Seeds]) -> Iterator[Check]:
    paper = "most of 27 points, CIFAR-100 with Dirichlet(0.05)"
    yield beyond("most points are above FedAvg", share_above(gains), 0.5, unit=POINTS, paper=paper)
    usual = {point_name(layer, mu) for layer in LAYERS for mu in USUAL}
    if len(scale.layer_mus) > 1:
        own = {label: seeds for label, seeds in gains.items() if label in usual}
        yield beyond("most points with μ = 1.75 or 2 are above FedAvg", share_above(own), 0.5, unit=POINTS)
        name = "hidden layers' accuracy varies more with μ than that of shallow layers and of the classifier"
        others = tuple(layer for layer in LAYERS if layer not in HIDDEN)
        spreads = [mean_spread(gains, names, scale.layer_mus) for names in (HIDDEN, others)]
        yield above(name, spreads[0], spreads[1], unit=PLAIN)


def share_above(gains: Mapping[str, Seeds]) -> dict[int, float]:
    """Seed → the share of points with a gain above 0, of the seeds that all points have."""
    seeds = shared_seeds(*gains.values()) if gains else []
    return {seed: statistics.fmean(found[seed] > 0 for found in gains.values()) for seed in seeds}


def mean_spread(gains: Mapping[str, Seeds], names: tuple[str, ...], mus: tuple[float, ...]) -> dict[int, float]:
    """Seed → the standard deviation over the ratios of a layer's gain, in the mean over some layers."""
    seeds = shared_seeds(*(gains[point_name(layer, mu)] for layer in names for mu in mus))
    return {
        seed: statistics.fmean(statistics.stdev(gains[point_name(layer, mu)][seed] for mu in mus) for layer in names)
        for seed in seeds
    }
