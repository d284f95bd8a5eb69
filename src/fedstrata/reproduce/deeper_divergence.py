"""Divergence by layer: within one network (Fig. 3), round by round (Fig. 2a), and at the end of a table's runs.

"Unlocking the Potential of Federated Learning for Deeper Models"; the tables of the same paper are in `deeper`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.compare import ComparisonRow
from fedstrata.compare.runner import read_finished_records
from fedstrata.compare.table import stat
from fedstrata.config.schema import RunConfig
from fedstrata.core.rng import derive
from fedstrata.core.types import Examples
from fedstrata.data.datasets import load_dataset
from fedstrata.data.partitions import partition
from fedstrata.models.strata import strata
from fedstrata.probes.measures import client_gradients, divergence, input_noise, within_class
from fedstrata.reproduce.claims import PLAIN, POINTS, Check, above, beyond, plain_unit
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
from fedstrata.reproduce.plots import FULL, PART, save
from fedstrata.reproduce.verdicts import Seeds, differences
from fedstrata.run import final_model, open_run
from fedstrata.runs.records import Record, rounds_to
from fedstrata.system.devices import devices_by_name
from fedstrata.system.machine import compute_with

KINDS = {"noise": "noise on an image", "class": "images of one class"}
STATES = {"trained": "trained", "new": "before training"}
SHALLOW, DEEP = "shallow", "deep"


MILLI = plain_unit(3, 1000)
"""Of divergences, in thousandths: they are as small as entries of a gradient."""


def layer_halves(layers: Mapping[str, float]) -> tuple[float, float]:
    """The means over the first and over the second half of the layers, which are in order from the input."""
    values = list(layers.values())
    middle = (len(values) + 1) // 2
    return statistics.fmean(values[:middle]), statistics.fmean(values[middle:])


# --- Fig. 3: within one network --------------------------------------------------------------------------------------


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """Network → its state → kind of diversity → layer → standard deviations of gradients, class by class."""
    found: dict[str, Any] = {}
    for label, model in settings["models"].items():
        federation = open_run(build_config(settings, seed, resources, model=model), None)
        with compute_with(1):
            images = _first_of_each_class(federation.clients[0], settings["images"])
            new = gradient_spreads(federation.model, *images, settings["draws"], seed)
            federation.fit()
            found[label] = {"trained": gradient_spreads(federation.model, *images, settings["draws"], seed), "new": new}
            found[label]["accuracy"] = federation.records[-1].accuracy
    return found


def _first_of_each_class(data: Examples, count: int) -> tuple[Tensor, Tensor]:
    """The first so many examples of each class."""
    labels = data.labels()
    return data.batch(
        torch.cat([torch.nonzero(labels == label).flatten()[:count] for label in sorted(set(labels.tolist()))])
    )


def gradient_spreads(
    model: nn.Module, x: Tensor, y: Tensor, draws: int, seed: int
) -> dict[str, Mapping[str, Sequence[float]]]:
    """Kind of diversity → layer → the gradients' standard deviation for each class.

    Under noise N(0, 0.1) on one image of the class, the first; and among all images of the class that there are.
    """
    layers = strata(model)
    firsts = torch.tensor([int(torch.nonzero(y == label)[0]) for label in sorted(set(y.tolist()))])
    noise = input_noise(model, x[firsts], y[firsts], layers, draws=draws, seed=seed)
    return {"noise": noise.figures, "class": within_class(model, x, y, layers, limit=None, seed=seed).figures}


def assess(found: SeedFigures) -> Findings:
    """Divergence grows towards the input, and the deeper network's first layers have more of it."""
    networks = list(next(iter(found.values())))
    checks: list[Check] = []
    for kind, diversity in KINDS.items():
        lines = {label: {s: log_means(f[label]["trained"][kind]) for s, f in found.items()} for label in networks}
        for label, by_seed in lines.items():
            first, last = ({s: line[at] for s, line in by_seed.items()} for at in (0, -1))
            checks += [
                above(f"{label}: the first layer diverges more than the last ({diversity})", first, last, unit=PLAIN),
                beyond(
                    f"{label}: most layers diverge more than the next ({diversity})",
                    _growing_shares(by_seed),
                    0.5,
                    unit=POINTS,
                ),
            ]
        deep, shallow = ({s: line[0] for s, line in lines[label].items()} for label in reversed(networks))
        name = f"the {networks[1]}'s first layer diverges more than the {networks[0]}'s ({diversity})"
        checks.append(above(name, deep, shallow, unit=PLAIN))
    notes = (
        "log10 of the standard deviation of a layer's gradient, in the square mean over its entries, in the mean over "
        "the classes: 0.3 more is twice as much; layers are counted from the input; ± is over the seeds",
        "noise is N(0, 0.1) on the normalised image; the networks have no norm layers",
        "accuracy: " + ", ".join(f"{label} {_accuracy_text(found, label)}" for label in networks),
    )
    return Findings(
        tuple(_table(found, networks, state) for state in STATES),
        tuple(checks),
        notes,
        {"accumulation.png": partial(plot_accumulation, found, networks)},
        {str(seed): mine for seed, mine in found.items()},
    )


def log_means(layers: Mapping[str, Sequence[float]]) -> list[float]:
    """Layer by layer: log10 of the mean over the classes."""
    return [math.log10(max(statistics.fmean(values), 1e-30)) for values in layers.values()]


def _growing_shares(lines: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Seed → the share of layers that diverge more than the next one."""
    return {s: statistics.fmean(one > other for one, other in pairwise(line)) for s, line in lines.items()}


def _table(found: SeedFigures, networks: Sequence[str], state: str) -> FindingsTable:
    columns = {
        f"{label}, {diversity}": {s: log_means(f[label][state][kind]) for s, f in found.items()}
        for kind, diversity in KINDS.items()
        for label in networks
    }
    depth = max(len(line) for lines in columns.values() for line in lines.values())
    rows = tuple((str(at + 1), *(_layer_cell(lines, at) for lines in columns.values())) for at in range(depth))
    return FindingsTable(f"Divergence of the gradient, log10, {STATES[state]}", ("layer", *columns), rows)


def _layer_cell(lines: Mapping[int, Sequence[float]], at: int) -> str:
    """A cell of the table; empty if the network has no such layer."""
    values = [line[at] for line in lines.values() if at < len(line)]
    return PLAIN.spread(stat(values)) if values else ""


def _accuracy_text(found: SeedFigures, label: str) -> str:
    return POINTS.spread(stat(mine[label]["accuracy"] for mine in found.values()))


# --- Fig. 2a: round by round -----------------------------------------------------------------------------------------


def measure_rounds(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """The exact divergence (Eq. 1) of every layer, after every round, at that round's model."""
    federation = open_run(build_config(settings, seed, resources), None)
    clients, layers = list(federation.clients), federation.strata
    rounds = []
    for _ in federation.rounds():
        with compute_with(1):
            rounds.append(divergence(client_gradients(federation.model, clients), layers))
    return {"rounds": rounds, "stages": {layer.name: layer.stage for layer in layers}}


def assess_rounds(found: SeedFigures) -> Findings:
    """Shallow layers diverge more than deep ones; their divergence falls while that of the others grows."""
    halved = {seed: [layer_halves(layers) for layers in mine["rounds"]] for seed, mine in found.items()}
    parts = {
        label: {seed: [pair[at] for pair in pairs] for seed, pairs in halved.items()}
        for at, label in enumerate((SHALLOW, DEEP))
    }
    early, late = (
        {label: {s: _half_mean(curve, end) for s, curve in curves.items()} for label, curves in parts.items()}
        for end in (False, True)
    )
    whole = {label: {s: statistics.fmean(curve) for s, curve in curves.items()} for label, curves in parts.items()}
    checks = (
        above("shallow layers diverge more than deep ones", whole[SHALLOW], whole[DEEP], unit=MILLI),
        above("shallow layers' divergence falls", early[SHALLOW], late[SHALLOW], unit=MILLI),
        above("deep layers' divergence grows", late[DEEP], early[DEEP], unit=MILLI),
    )
    rows = [(f"{label} half", MILLI.cell(early[label]), MILLI.cell(late[label])) for label in (SHALLOW, DEEP)]
    stages = list(dict.fromkeys(next(iter(found.values()))["stages"].values()))
    for stage in stages:
        curves = {s: _stage_curve(mine, stage) for s, mine in found.items()}
        rows.append((stage, *(MILLI.cell({s: _half_mean(c, end) for s, c in curves.items()}) for end in (False, True))))
    notes = (
        "Eq. 1 over each client's whole data, without augmentation and with the running statistics, after every round; "
        "the mean over the layers of a stage or of half of the model, and over the rounds",
    )
    title = "Divergence in the first and in the second half of the rounds, ×10⁻³"
    first = min(found)
    return Findings(
        (FindingsTable(title, ("layers", "first half", "second half"), tuple(rows)),),
        checks,
        notes,
        {"rounds.png": partial(plot_rounds, found[first]["rounds"], first)},
        {str(seed): mine for seed, mine in found.items()},
    )


def _half_mean(curve: Sequence[float], end: bool) -> float:
    """The mean over the first half of the rounds, or over the second."""
    middle = max(len(curve) // 2, 1)
    return statistics.fmean(curve[-middle:] if end else curve[:middle])


def _stage_curve(mine: Mapping[str, Any], stage: str) -> list[float]:
    names = [name for name, of in mine["stages"].items() if of == stage]
    return [statistics.fmean(layers[name] for name in names) for layers in mine["rounds"]]


# --- at the end of a table's runs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SettingFigures:
    """Centralised and federated training under one setting: every seed's figures.

    Args:
        cl: centralised training's best accuracy.
        fl: federated training's.
        layers: layer → its divergence at the end of the federated run.
        curves: the federated run's rounds.
    """

    cl: Seeds
    fl: Seeds
    layers: Mapping[int, Mapping[str, float]]
    curves: Mapping[int, list[Record]]

    @property
    def gap(self) -> dict[int, float]:
        """CL − FL."""
        return differences(self.cl, self.fl)

    @property
    def loss(self) -> dict[int, float]:
        """(CL − FL)/CL."""
        return {seed: gap / self.cl[seed] for seed, gap in self.gap.items() if self.cl[seed]}

    @property
    def div(self) -> dict[int, float]:
        """The mean over all layers."""
        return {seed: statistics.fmean(layers.values()) for seed, layers in self.layers.items()}

    @property
    def deep(self) -> dict[int, float]:
        """The mean over the second half of the layers."""
        return {seed: layer_halves(layers)[1] for seed, layers in self.layers.items()}

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
        {seed: final_divergence(directory, federated.run.config, seed) for seed, directory in results.items()},
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


def final_divergence(directory: Path, config: RunConfig, seed: int) -> dict[str, float]:
    """Layer → divergence at a finished run's model; measured once, and kept beside it."""
    return load_or_compute(directory / "divergence.json", lambda: _measure_divergence(directory, config, seed))


def _measure_divergence(directory: Path, config: RunConfig, seed: int) -> dict[str, float]:
    dataset = _load_dataset(config.dataset, config.data_dir)
    dealt = partition(dataset.labels, config.partition, config.clients, derive(seed, "partition"), dataset.groups)
    model = final_model(directory, config, dataset)
    with compute_with(1):
        gradients = client_gradients(model.to(devices_by_name(config.device)[0]), list(dataset.train.split(dealt)))
        return divergence(gradients, strata(model))


# --- pictures --------------------------------------------------------------------------------------------------------


def plot_accumulation(found: SeedFigures, networks: Sequence[str], path: Path) -> None:
    """Fig. 3: layer by layer, the mean over classes and seeds, and the range of all of them."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    for axes, (kind, diversity) in zip(figure.subplots(1, len(KINDS)), KINDS.items(), strict=True):
        for label, colour in zip(networks, (PART, FULL), strict=True):
            layers = [mine[label]["trained"][kind] for mine in found.values()]
            every = [[value for mine in layers for value in mine[name]] for name in layers[0]]
            places = range(1, len(every) + 1)
            axes.plot(places, [statistics.fmean(values) for values in every], "o-", color=colour, label=label)
            axes.fill_between(places, [*map(min, every)], [*map(max, every)], color=colour, alpha=0.18, linewidth=0)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="layer, from the input", ylabel="standard deviation of the gradient")
        axes.set_title(diversity, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    save(figure, path)


def plot_rounds(rounds: Sequence[Mapping[str, float]], seed: int, path: Path) -> None:
    """Fig. 2a: log10 of the divergence, a row for each layer from the input on, a column for each round."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = list(rounds[0])
    values = [[math.log10(max(layers[name], 1e-30)) for layers in rounds] for name in names]
    figure = Figure(figsize=(8, 1.6 + 0.11 * len(names)), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(values, aspect="auto", cmap="viridis", extent=(0.5, len(rounds) + 0.5, len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"round (seed {seed})")
    figure.colorbar(shown, label="divergence, log10")
    save(figure, path)
