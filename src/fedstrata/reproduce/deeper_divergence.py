"""Clients' divergence by layer, by several measures: round by round (Fig. 2a), and at the end of a table's runs.

"Unlocking the Potential of Federated Learning for Deeper Models"; the tables of the same paper are in `deeper`, what
happens within one network (Fig. 3) in `deeper_accumulation`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedstrata.compare import ComparisonRow
from fedstrata.compare.runner import read_finished_records
from fedstrata.config.schema import RunConfig
from fedstrata.core.rng import derive
from fedstrata.data.datasets import load_dataset
from fedstrata.data.partitions import partition
from fedstrata.models.strata import strata
from fedstrata.reproduce.claims import Check, above
from fedstrata.reproduce.deeper_measures import MEASURES, NOTE, UPDATES, LayerFigures, Measure, by_gradients
from fedstrata.reproduce.part_runs import build_config
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    PartResources,
    SeedFigures,
    figures_by_seed,
    highest_accuracy,
    load_or_compute,
)
from fedstrata.reproduce.plots import save
from fedstrata.reproduce.verdicts import Seeds, differences
from fedstrata.run import final_model, open_run
from fedstrata.runs.records import Record, rounds_to
from fedstrata.system.devices import devices_by_name
from fedstrata.system.machine import compute_with

SHALLOW, DEEP = "shallow", "deep"
HALVES = ("first half", "second half")
"""Of the rounds."""


def layer_halves(layers: Mapping[str, float]) -> tuple[float, float]:
    """The means over the first and over the second half of the layers, which are in order from the input."""
    values = list(layers.values())
    middle = (len(values) + 1) // 2
    return statistics.fmean(values[:middle]), statistics.fmean(values[middle:])


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


# --- at the end of a table's runs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SettingFigures:
    """Centralised and federated training under one setting: every seed's figures.

    Args:
        cl: centralised training's best accuracy.
        fl: federated training's.
        layers: a measure's name → layer → its divergence at the end of the federated run.
        curves: the federated run's rounds.
    """

    cl: Seeds
    fl: Seeds
    layers: Mapping[int, LayerFigures]
    curves: Mapping[int, list[Record]]

    @property
    def gap(self) -> dict[int, float]:
        """CL − FL."""
        return differences(self.cl, self.fl)

    @property
    def loss(self) -> dict[int, float]:
        """(CL − FL)/CL."""
        return {seed: gap / self.cl[seed] for seed, gap in self.gap.items() if self.cl[seed]}

    def div(self, measure: Measure) -> dict[int, float]:
        """The mean over all layers."""
        return {seed: statistics.fmean(found[measure.name].values()) for seed, found in self.layers.items()}

    def deep(self, measure: Measure) -> dict[int, float]:
        """The mean over the second half of the layers."""
        return {seed: layer_halves(found[measure.name])[1] for seed, found in self.layers.items()}

    @property
    def falls(self) -> dict[int, float]:
        """The mean loss of accuracy per round of the federated run; a gain counts as 0."""
        return {seed: _mean_fall(rounds) for seed, rounds in self.curves.items()}


def figures_of_setting(central: ComparisonRow, federated: ComparisonRow) -> SettingFigures:
    """The figures of a setting's finished runs."""
    results = {result.seed: Path(result.directory) for result in federated.sound_results}
    return SettingFigures(
        figures_by_seed(central, highest_accuracy),
        figures_by_seed(federated, highest_accuracy),
        {seed: final_divergences(directory, federated.run.config, seed) for seed, directory in results.items()},
        {seed: read_finished_records(directory) for seed, directory in results.items()},
    )


def _mean_fall(rounds: Sequence[Record]) -> float:
    known = [record.accuracy for record in rounds if record.accuracy is not None]
    falls = [max(before - after, 0.0) for before, after in pairwise(known)]
    return statistics.fmean(falls) if falls else 0.0


def rounds_to_share(cells: Mapping[str, SettingFigures], share: float) -> dict[str, dict[int, int | None]]:
    """Label → seed → the first round of FL that reaches a share of the lowest best accuracy of all labels."""
    shared = set.intersection(*(set(cell.fl) for cell in cells.values()))
    targets = {seed: share * min(cell.fl[seed] for cell in cells.values()) for seed in sorted(shared)}
    return {
        label: {seed: rounds_to(cell.curves[seed], target) for seed, target in targets.items()}
        for label, cell in cells.items()
    }


_load_dataset = lru_cache(maxsize=1)(load_dataset)


def final_divergences(directory: Path, config: RunConfig, seed: int) -> LayerFigures:
    """A measure's name → layer → divergence at a finished run's model; measured once, and kept beside it."""
    return load_or_compute(directory / "divergences.json", lambda: _measure_divergences(directory, config, seed))


def _measure_divergences(directory: Path, config: RunConfig, seed: int) -> dict[str, Any]:
    dataset = _load_dataset(config.dataset, config.data_dir)
    dealt = partition(dataset.labels, config.partition, config.clients, derive(seed, "partition"), dataset.groups)
    model = final_model(directory, config, dataset)
    with compute_with(1):
        clients = list(dataset.train.split(dealt))
        return by_gradients(model.to(devices_by_name(config.device)[0]), clients, strata(model))


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
