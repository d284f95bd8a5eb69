"""Clients' divergence by layer, by several measures, round by round (Fig. 2a).

"Unlocking the Potential of Federated Learning for Deeper Models"; the tables of the same paper are in `deeper`, what
happens within one network (Fig. 3) in `deeper_accumulation`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedstrata.reproduce.claims import Check, above
from fedstrata.reproduce.deeper_measures import (
    MEASURES,
    NOTE,
    UPDATES,
    LayerFigures,
    Measure,
    by_gradients,
    layer_halves,
)
from fedstrata.reproduce.part_runs import build_config
from fedstrata.reproduce.parts import Findings, FindingsTable, PartResources, SeedFigures
from fedstrata.reproduce.plots import save
from fedstrata.run import open_run
from fedstrata.system.machine import compute_with

SHALLOW, DEEP = "shallow", "deep"
HALVES = ("first half", "second half")
"""Of the rounds."""


# --- Fig. 2a: round by round -----------------------------------------------------------------------------------------


def measure_rounds(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """A measure's name → every layer's divergence, after every round; that of updates is of the round's own.

    Updates are read by the probe `proxy`, which is Eq. 1 of them.
    """
    clients = max(build_config(settings, seed, resources).clients, 2)
    federation = open_run(build_config(settings, seed, resources, probe="proxy", probe_clients=clients), None)
    data, layers = list(federation.clients), federation.strata
    rounds: dict[str, list[Mapping[str, float]]] = {measure.name: [] for measure in MEASURES}
    for _ in federation.rounds():
        with compute_with(1):
            found: LayerFigures = by_gradients(federation.model, data, layers)
        for name, figures in {**found, UPDATES.name: federation.probes[-1]["proxy"]}.items():
            rounds[name].append(figures)
    return {"rounds": rounds, "stages": {layer.name: layer.stage for layer in layers}}


def assess_rounds(found: SeedFigures) -> Findings:
    """Shallow layers diverge more than deep ones; their divergence falls while that of the others grows."""
    stages = list(dict.fromkeys(next(iter(found.values()))["stages"].values()))
    rows = [(f"{label} half", partial(_half_curve, deep=label == DEEP)) for label in (SHALLOW, DEEP)]
    rows += [(stage, partial(_stage_curve, stage=stage)) for stage in stages]
    cells = [(label, *_round_cells(found, curve)) for label, curve in rows]
    columns = ("layers", *(f"{measure.column}, {half}" for measure in MEASURES for half in HALVES))
    notes = (
        f"{NOTE}; updates: Eq. 1 of what the clients sent in the round instead of their gradients after it",
        "the mean over the layers of a stage or of half of the model, and over the rounds",
    )
    first = min(found)
    return Findings(
        (FindingsTable("Divergence in the first and in the second half of the rounds", columns, tuple(cells)),),
        tuple(check for measure in MEASURES for check in _round_claims(found, measure)),
        notes,
        {"rounds.png": partial(plot_rounds, found[first]["rounds"], first)},
        {str(seed): mine for seed, mine in found.items()},
    )


Curve = Callable[[Mapping[str, Any], Measure], list[float]]
"""(a seed's figures, measure) → a figure for every round."""


def _round_claims(found: SeedFigures, measure: Measure) -> tuple[Check, ...]:
    """The three claims by one measure."""
    shallow, deep = ({s: _half_curve(mine, measure, deep=side) for s, mine in found.items()} for side in (False, True))
    early, late = ({s: _half_mean(c, end) for s, c in shallow.items()} for end in (False, True))
    before, after = ({s: _half_mean(c, end) for s, c in deep.items()} for end in (False, True))
    whole = [{s: statistics.fmean(curve) for s, curve in curves.items()} for curves in (shallow, deep)]
    by, unit = measure.claim, measure.unit
    return (
        above(f"shallow layers diverge more than deep ones, {by}", *whole, unit=unit),
        above(f"shallow layers' divergence falls, {by}", early, late, unit=unit),
        above(f"deep layers' divergence grows, {by}", after, before, unit=unit),
    )


def _round_cells(found: SeedFigures, curve: Curve) -> list[str]:
    """By each measure, the mean over each half of the rounds."""
    return [
        measure.unit.cell({s: _half_mean(curve(mine, measure), end) for s, mine in found.items()})
        for measure in MEASURES
        for end in (False, True)
    ]


def _half_mean(curve: Sequence[float], end: bool) -> float:
    """The mean over the first half of the rounds, or over the second."""
    middle = max(len(curve) // 2, 1)
    return statistics.fmean(curve[-middle:] if end else curve[:middle])


def _half_curve(mine: Mapping[str, Any], measure: Measure, *, deep: bool) -> list[float]:
    """Round by round, the mean over the first half of the layers, or over the second."""
    return [layer_halves(layers)[deep] for layers in mine["rounds"][measure.name]]


def _stage_curve(mine: Mapping[str, Any], measure: Measure, *, stage: str) -> list[float]:
    names = [name for name, of in mine["stages"].items() if of == stage]
    return [statistics.fmean(layers[name] for name in names) for layers in mine["rounds"][measure.name]]


# --- pictures --------------------------------------------------------------------------------------------------------


def plot_rounds(rounds: Mapping[str, Sequence[Mapping[str, float]]], seed: int, path: Path) -> None:
    """Fig. 2a: log10 of the divergence, a row for each layer from the input on, a column for each round."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = list(next(iter(rounds.values()))[0])
    figure = Figure(figsize=(3.6 * len(rounds) + 1, 1.6 + 0.11 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(rounds))
    for axes, (label, found) in zip(panels, rounds.items(), strict=True):
        values = [[math.log10(max(layers[name], 1e-30)) for layers in found] for name in names]
        extent = (0.5, len(found) + 0.5, len(names) - 0.5, -0.5)
        shown = axes.imshow(values, aspect="auto", cmap="viridis", extent=extent)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_yticks([])
        axes.set_title(label, loc="left", fontsize=10)
        figure.colorbar(shown, ax=axes, ticks=MaxNLocator(5))
    panels[0].set_yticks(range(len(names)), names, fontsize=6)
    figure.supxlabel(f"round (seed {seed}); divergence, log10", fontsize=9)
    save(figure, path)
