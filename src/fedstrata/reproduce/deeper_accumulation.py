"""Fig. 3: how far apart gradients are within one network, layer by layer, by several measures.

"Unlocking the Potential of Federated Learning for Deeper Models", §3.3. The paper's networks have neither norm layers
nor given widths: here each comes with widths that grow towards the output, and with one width for all layers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.compare.table import stat
from fedstrata.core.types import Examples
from fedstrata.models.strata import strata
from fedstrata.probes.measures import GradientSpread, input_noise, within_class
from fedstrata.reproduce.claims import PLAIN, POINTS, Check, above, beyond
from fedstrata.reproduce.deeper_measures import EQ1, GRADIENTS, RELATIVE, UNSCALED, Measure
from fedstrata.reproduce.part_runs import build_config
from fedstrata.reproduce.parts import Findings, FindingsTable, PartResources, SeedFigures
from fedstrata.reproduce.plots import FULL, PART, save
from fedstrata.run import open_run
from fedstrata.system.machine import compute_with

KINDS = {"noise": "noise on an image", "class": "images of one class"}
STATES = {"trained": "trained", "new": "before training"}


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """Network → its state → kind of diversity → measure → layer → standard deviations of gradients, class by class."""
    found: dict[str, Any] = {}
    for label, model in settings["models"].items():
        federation = open_run(build_config(settings, seed, resources, model=model), None)
        with compute_with(1):
            images = first_of_each_class(federation.clients[0], settings["classes"], settings["images"])
            new = gradient_spreads(federation.model, *images, settings["draws"], seed)
            federation.fit(progress=False)
            found[label] = {"trained": gradient_spreads(federation.model, *images, settings["draws"], seed), "new": new}
            found[label]["accuracy"] = federation.records[-1].accuracy
    return found


def first_of_each_class(data: Examples, classes: int, count: int) -> tuple[Tensor, Tensor]:
    """The first so many examples of each of the first so many classes."""
    labels = data.labels()
    chosen = sorted(set(labels.tolist()))[:classes]
    return data.batch(torch.cat([torch.nonzero(labels == label).flatten()[:count] for label in chosen]))


def gradient_spreads(
    model: nn.Module, x: Tensor, y: Tensor, draws: int, seed: int
) -> dict[str, dict[str, Mapping[str, Sequence[float]]]]:
    """Kind of diversity → measure → layer → the gradients' standard deviation for each class.

    Under noise N(0, 0.1) on one image of the class, the first; and among all images of the class that there are.
    """
    layers = strata(model)
    firsts = torch.tensor([int(torch.nonzero(y == label)[0]) for label in sorted(set(y.tolist()))])
    noise = input_noise(model, x[firsts], y[firsts], layers, draws=draws, seed=seed)
    return {"noise": _by_measure(noise), "class": _by_measure(within_class(model, x, y, layers, limit=None, seed=seed))}


def _by_measure(found: GradientSpread) -> dict[str, Mapping[str, Sequence[float]]]:
    return {EQ1.name: found.figures, UNSCALED.name: found.unscaled, RELATIVE.name: found.relative}


def assess(found: SeedFigures) -> Findings:
    """Divergence grows towards the input, and the deeper network's first layers have more of it."""
    networks = list(next(iter(found.values())))
    checks = [check for measure in GRADIENTS for kind in KINDS for check in _claims(found, networks, measure, kind)]
    notes = (
        "log10 of the standard deviation of a layer's gradient, in the mean over the classes: 0.3 more is twice as "
        "much; layers are counted from the input; ± is over the seeds",
        "Eq. 1: of an entry, in the square mean over the layer's d entries; un-normalised: of the whole layer, √d "
        "times as much, which is what Theorem 1 is about; relative: that, over the length of the mean gradient",
        "noise is N(0, 0.1) on the normalised image; the networks have no norm layers",
        "accuracy: " + ", ".join(f"{label} {_accuracy_text(found, label)}" for label in networks),
    )
    return Findings(
        tuple(_table(found, networks, measure, state) for state in STATES for measure in GRADIENTS),
        tuple(checks),
        notes,
        {"accumulation.png": partial(plot_accumulation, found, networks)},
        {str(seed): mine for seed, mine in found.items()},
    )


def _claims(found: SeedFigures, networks: Sequence[str], measure: Measure, kind: str) -> Iterator[Check]:
    """Of the trained networks, by one measure and under one kind of diversity; networks are in pairs, shallow first."""
    lines = {
        label: {s: log_means(f[label]["trained"][kind][measure.name]) for s, f in found.items()} for label in networks
    }
    where = f"({KINDS[kind]}), {measure.claim}"
    for label, by_seed in lines.items():
        first, last = ({s: line[at] for s, line in by_seed.items()} for at in (0, -1))
        yield above(f"{label}: the first layer diverges more than the last {where}", first, last, unit=PLAIN)
        name = f"{label}: most layers diverge more than the next {where}"
        yield beyond(name, _growing_shares(by_seed), 0.5, unit=POINTS)
    for shallow, deep in zip(networks[::2], networks[1::2], strict=True):
        firsts = ({s: line[0] for s, line in lines[label].items()} for label in (deep, shallow))
        name = f"the {deep}'s first layer diverges more than the {shallow}'s {where}"
        yield above(name, *firsts, unit=PLAIN)


def log_means(layers: Mapping[str, Sequence[float]]) -> list[float]:
    """Layer by layer: log10 of the mean over the classes."""
    return [_log10(statistics.fmean(values)) for values in layers.values()]


def _log10(value: float) -> float:
    return math.log10(max(value, 1e-30))


def _growing_shares(lines: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Seed → the share of layers that diverge more than the next one."""
    return {s: statistics.fmean(one > other for one, other in pairwise(line)) for s, line in lines.items()}


def _table(found: SeedFigures, networks: Sequence[str], measure: Measure, state: str) -> FindingsTable:
    columns = {
        f"{label}, {diversity}": {s: log_means(f[label][state][kind][measure.name]) for s, f in found.items()}
        for kind, diversity in KINDS.items()
        for label in networks
    }
    depth = max(len(line) for lines in columns.values() for line in lines.values())
    rows = tuple((str(at + 1), *(_layer_cell(lines, at) for lines in columns.values())) for at in range(depth))
    title = f"Divergence of the gradient, {measure.claim}, log10, {STATES[state]}"
    return FindingsTable(title, ("layer", *columns), rows)


def _layer_cell(lines: Mapping[int, Sequence[float]], at: int) -> str:
    """A cell of the table; empty if the network has no such layer."""
    values = [line[at] for line in lines.values() if at < len(line)]
    return PLAIN.spread(stat(values)) if values else ""


def _accuracy_text(found: SeedFigures, label: str) -> str:
    return POINTS.spread(stat(mine[label]["accuracy"] for mine in found.values()))


def plot_accumulation(found: SeedFigures, networks: Sequence[str], path: Path) -> None:
    """Fig. 3: layer by layer, the mean over classes and seeds, and the range of all of them; a row for each measure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 3 * len(GRADIENTS) + 0.6), layout="constrained")
    panels = figure.subplots(len(GRADIENTS), len(KINDS), sharex=True)
    for row, measure in zip(panels, GRADIENTS, strict=True):
        for axes, (kind, diversity) in zip(row, KINDS.items(), strict=True):
            for at, label in enumerate(networks):
                layers = [mine[label]["trained"][kind][measure.name] for mine in found.values()]
                _plot_line(axes, [[value for mine in layers for value in mine[name]] for name in layers[0]], at, label)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.set_title(f"{diversity}, {measure.claim}", loc="left", fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.supxlabel("layer, from the input", fontsize=9)
    figure.supylabel("standard deviation of the gradient, log10", fontsize=9)
    save(figure, path)


def _plot_line(axes: Any, every: Sequence[Sequence[float]], at: int, label: str) -> None:
    """One network's: the pairs of networks are told apart by their lines, the shallow and the deep one by colour."""
    places, colour = range(1, len(every) + 1), (PART, FULL)[at % 2]
    line = ("o-", "s--", "^:")[at // 2 % 3]
    mean, least, most = ([_log10(of(values)) for values in every] for of in (statistics.fmean, min, max))
    axes.plot(places, mean, line, color=colour, label=label, markersize=4)
    axes.fill_between(places, least, most, color=colour, alpha=0.12, linewidth=0)
