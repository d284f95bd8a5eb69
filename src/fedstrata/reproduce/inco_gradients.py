"""InCo's third observation: gradients of shallow layers are smoother, and more alike between environments (§2.2).

The paper shows pictures (Figs. 2 and 3) and does not say how they were made. Here a layer's gradient is the server's
mean change in a round; layers are compared that have one shape and lie in one stage, from the first of them, which the
authors' code crosses with (`conv0`), to the deepest; and all environments begin with the same weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedstrata.core.tensors import Tensors
from fedstrata.federation import Federation
from fedstrata.models.stages import stage_of
from fedstrata.probes.measures import cka
from fedstrata.reproduce.claims import PLAIN, Check, above
from fedstrata.reproduce.part_runs import build_config
from fedstrata.reproduce.parts import Findings, FindingsTable, PartResources, SeedFigures
from fedstrata.reproduce.plots import plot_environments
from fedstrata.reproduce.verdicts import Seeds
from fedstrata.run import open_run
from fedstrata.system.machine import compute_with
from fedstrata.techniques.inco import references

IID, GROUP, HETERO = (
    "IID, equal models",
    "non-IID, different models (GroupAvg)",
    "non-IID, different models (HeteroAvg)",
)
HARD = (GROUP, HETERO)

BINS, REACH = 60, 3.0
"""Of the histograms: so many bins within so many standard deviations of 0."""


# --- measures --------------------------------------------------------------------------------------------------------


def histogram(values: Tensor) -> Tensor:
    """The shares of a tensor's numbers in `BINS` equal bins between ±`REACH` standard deviations of it; none beyond."""
    flat = values.flatten().double()
    deviation = flat.square().mean().sqrt()
    scaled = flat / deviation if deviation > 0 else flat
    return torch.histc(scaled, BINS, -REACH, REACH) / len(flat)


def roughness(values: Tensor) -> float:
    """Σ_i |p_{i+1} − 2p_i + p_{i−1}| over the bins of the histogram: the less, the smoother the distribution."""
    return float(histogram(values).diff(n=2).abs().sum())


def distance(one: Tensor, other: Tensor) -> float:
    """Wasserstein's first distance of two gradients' numbers, in their standard deviations: mean |x_(i) − y_(i)|."""
    scaled = []
    for values in (one, other):
        flat = values.flatten().double()
        deviation = flat.square().mean().sqrt()
        scaled.append((flat / deviation if deviation > 0 else flat).sort().values)
    return float((scaled[0] - scaled[1]).abs().mean())


def likeness(one: Tensor, other: Tensor) -> float:
    """Linear CKA, unbiased, of two gradients of a layer: a row for each output channel."""
    return cka(one.flatten(1), other.flatten(1))


# --- a seed's work ---------------------------------------------------------------------------------------------------


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """Environment → layer → figure → its values in the rounds of the window, and the histograms' mean over them."""
    changes: dict[str, list[Tensors]] = {}
    layers: dict[str, str] = {}
    for label, fields in {IID: settings["cases"][IID], **settings["cases"]}.items():
        config = build_config(settings, seed, resources, **fields)
        federation = open_run(config.model_copy(update={"eval_every": config.rounds}), None)
        try:
            layers = layers or name_layers(federation, settings["stages"])
            watched = watch_changes(federation, list(layers))
            kept = [change for number, change in watched if settings["first"] <= number <= settings["last"]]
        finally:
            federation.close()
        changes[label] = [{layers[name]: tensor for name, tensor in change.items()} for change in kept]
    with compute_with(1):
        return {label: _figures(label, changes) for label in changes}


def name_layers(federation: Federation, stages: Sequence[str]) -> dict[str, str]:
    """Parameter → `layer2.conv0`, `layer2.conv1` …: a stage's layers of one shape, from the one that they follow."""
    found = references(federation.state.params, federation.strata, "conv2", "released")
    named: dict[str, str] = {}
    for stage in stages:
        several = [name for name, first in found.items() if stage_of(first) == stage and name != first]
        firsts = {found[name] for name in several}
        named |= {name: f"{stage}.conv{at}" for at, name in enumerate([*firsts, *several])}
    return named


def _figures(label: str, changes: Mapping[str, list[Tensors]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layer in changes[label][0]:
        mine, easy = ([change[layer] for change in changes[name]] for name in (label, IID))
        pairs = list(zip(mine, easy, strict=True))
        found[layer] = {
            "roughness": [roughness(change) for change in mine],
            "distance": [distance(*pair) for pair in pairs],
            "likeness": [likeness(*pair) for pair in pairs],
            "histogram": torch.stack([histogram(change) for change in mine]).mean(0).tolist(),
        }
    return found


def watch_changes(federation: Federation, layers: list[str]) -> Iterator[tuple[int, Tensors]]:
    """(round, the change of each layer of the deepest model), round by round."""
    before = federation.state.params
    places = {layer: _place(before, layer) for layer in layers}
    for record in federation.rounds():
        after = federation.state.params
        yield record.round, {layer: after[name] - before[name] for layer, name in places.items()}
        before = after


def _place(params: Tensors, layer: str) -> str:
    """Where the server keeps a layer; with groups apart, the last of them has the deepest model."""
    return layer if layer in params else [name for name in params if name.partition(".")[2] == layer][-1]


# --- what is found ---------------------------------------------------------------------------------------------------

FIGURES = {"likeness": "CKA with IID", "distance": "distance from IID", "roughness": "roughness"}


def assess(found: SeedFigures) -> Findings:
    """Whether a stage's first layer is smoother, and more like itself in the easy environment, than its later ones."""
    means = {
        label: {
            layer: {part: {s: statistics.fmean(found[s][label][layer][part]) for s in found} for part in FIGURES}
            for layer in layers
        }
        for label, layers in next(iter(found.values())).items()
    }
    columns = ("environment", "layer", *FIGURES.values())
    rows = tuple(
        (label, layer, *(PLAIN.cell(parts[part]) for part in FIGURES))
        for label, layers in means.items()
        for layer, parts in layers.items()
    )
    notes = (
        "a gradient is the server's mean change in a round, with groups apart that of the group of the deepest "
        "model; layers are those of one shape in a stage, conv0 the one that the authors cross with; all begin with "
        "the same weights; in the mean over the window's rounds",
        "CKA is linear and unbiased, between a layer's gradients in the same round of both environments, a row for "
        "each output channel; distance: Wasserstein's, of their numbers in standard deviations; roughness: the sum of "
        f"the absolute second differences of a histogram of {BINS} bins within {REACH:g} standard deviations",
        "the paper shows pictures of gradients in the rounds 40 to 50, and no numbers",
    )
    table = FindingsTable("Gradients of a stage's layers, from the first to the deepest", columns, rows, left=2)
    return Findings((table,), tuple(_checks(means)), notes, _pictures(found), {str(s): v for s, v in found.items()})


LayerMeans = Mapping[str, Mapping[str, Mapping[str, Seeds]]]
"""Environment → layer → figure → seed → its mean over the window."""


def _checks(means: LayerMeans) -> Iterator[Check]:
    for label in HARD:
        for stage in dict.fromkeys(map(stage_of, means[label])):
            first, later = _first_and_later(means[label], stage)
            easy, where = _first_and_later(means[IID], stage)[1], f"{stage}, {label}"
            for part, name, smaller in (
                ("likeness", "the first layer's gradients are more like those with IID than later layers' are", False),
                ("distance", "the first layer's numbers are spread more as with IID than later layers' are", True),
                ("roughness", "the first layer's gradients are smoother than later layers' are", True),
            ):
                pair = (later[part], first[part]) if smaller else (first[part], later[part])
                yield above(f"{name}: {where}", *pair, unit=PLAIN)
            name = "later layers' gradients are smoother with IID"
            yield above(f"{name}: {where}", later["roughness"], easy["roughness"], unit=PLAIN)


def _first_and_later(
    layers: Mapping[str, Mapping[str, Seeds]], stage: str
) -> tuple[Mapping[str, Seeds], Mapping[str, Seeds]]:
    """Figure → seeds, of a stage's first layer, and in the mean over its later ones."""
    first, *later = (parts for layer, parts in layers.items() if stage_of(layer) == stage)
    mean = {part: {s: statistics.fmean(parts[part][s] for parts in later) for s in first[part]} for part in FIGURES}
    return first, mean


def _pictures(found: SeedFigures) -> dict[str, Any]:
    """Figs. 2c, 2d and 3 as `distributions.png`, Figs. 2a and 2b as `environments.png`."""
    first = found[min(found)]
    places = [REACH * (2 * at + 1 - BINS) / BINS for at in range(BINS)]
    shapes: dict[str, dict[str, dict[float, float]]] = {}
    lines: dict[str, dict[str, dict[int, float]]] = {}
    for label, layers in first.items():
        for layer in layers:
            title = f"{stage_of(layer)}, {label}"
            shares = [statistics.fmean(found[s][label][layer]["histogram"][at] for s in found) for at in range(BINS)]
            shapes.setdefault(title, {})[layer] = dict(zip(places, shares, strict=True))
            if label in HARD:
                several = zip(*(found[s][label][layer]["likeness"] for s in found), strict=True)
                lines.setdefault(title, {})[layer] = {at: statistics.fmean(v) for at, v in enumerate(several)}
    return {
        "environments.png": partial(plot_environments, lines, ("rounds after the window's first", f"CKA with {IID}")),
        "distributions.png": partial(plot_environments, shapes, ("gradient, standard deviations", "share")),
    }
