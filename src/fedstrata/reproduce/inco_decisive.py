"""InCo's decisive part: is it the content of the crossed layers that helps? And what crossing does to each layer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from fedstrata.compare import Comparison, ComparisonRow
from fedstrata.compare.table import spread, stat
from fedstrata.models.stages import stage_of
from fedstrata.probes.measures.crossing import CROSSING_FIGURES, Crossing, crossing
from fedstrata.reproduce.claims import PLAIN, Check, above, beyond, cell
from fedstrata.reproduce.fednlr_settings import skew_name
from fedstrata.reproduce.inco_settings import HETERO, INCO, InCoScale, accuracies, clients_accuracy
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    Grid,
    dataset_name,
    figures_by_seed,
    mean_curve,
    published,
    unfinished_note,
)
from fedstrata.reproduce.plots import plot_architectures, plot_coefficients
from fedstrata.reproduce.verdicts import Seeds, differences

SHUFFLED, LENGTH = "InCo with layer 0 shuffled", "InCo by length alone"
PLAIN_INCO = "InCo without optimisation"
MARGIN = 0.01
"""A control does as well as InCo if it is less than this below it."""

CONTROL_NOTE = (
    f"{SHUFFLED}: the kernels of layer 0's change stand in another order, half of them with the other sign, as drawn "
    "once for a run, and with the lengths of those whose places they take; "
    f"{LENGTH}: θ = 0, each layer goes its own way as far as InCo would have gone"
)


# --- the decisive part -----------------------------------------------------------------------------------------------


def decisive(scale: InCoScale) -> list[Grid]:
    """A part for each dataset or, where they are not apart, one of the first."""
    datasets = scale.datasets if scale.apart else scale.datasets[:1]
    return [_decisive(scale, data) for data in datasets]


def _methods(scale: InCoScale) -> dict[str, str]:
    return {
        HETERO: "heteroavg",
        INCO: scale.inco(),
        SHUFFLED: scale.inco(control="shuffled"),
        LENGTH: scale.inco(control="length"),
    }


def _decisive(scale: InCoScale, data: str) -> Grid:
    return Grid(
        scale.part_name("decisive", data),
        f"is it what the other layer says? InCo on {dataset_name(data)} against HeteroAvg and two controls",
        scale.values(method=scale.entries(_methods(scale)), dataset=data, partition=list(scale.partitions)),
        lambda comparison: _assess_decisive(scale, data, comparison),
        draws=True,
        tuning=scale.tuning,
    )


def _assess_decisive(scale: InCoScale, data: str, comparison: Comparison) -> Findings:
    found: dict[str, dict[str, Seeds]] = {}
    curves: dict[str, dict[str, dict[int, float]]] = {}
    for row in comparison.rows:
        where = f"{dataset_name(data)}, {skew_name(row.run.config.partition)}"
        found.setdefault(where, {})[row.method] = figures_by_seed(row, clients_accuracy(scale.evaluations))
        curves.setdefault(where, {})[row.method] = _mean_curve(row)
    checks = [check for where, of in found.items() for check in _decisive_checks(where, of)]
    rows = tuple((label, *(cell(of[label]) for of in found.values())) for label in _methods(scale))
    gains = tuple(
        (f"{INCO} − {other}, points", *(cell(differences(of[INCO], of[other])) for of in found.values()))
        for other in (HETERO, SHUFFLED, LENGTH)
    )
    table = FindingsTable("Accuracy of the clients' models, %", ("", *found), (*rows, *gains))
    notes = (scale.note, CONTROL_NOTE, *unfinished_note(comparison))
    pictures = {f"{scale.part_name('decisive', data)}.png": partial(plot_architectures, curves)}
    return Findings((table,), tuple(checks), notes, pictures)


def _decisive_checks(where: str, found: Mapping[str, Seeds]) -> list[Check]:
    """InCo against all; the controls against HeteroAvg; and whether a control does as well as InCo."""
    checks = [
        above(f"InCo beats {label} on {where}", found[INCO], found[label]) for label in (HETERO, SHUFFLED, LENGTH)
    ]
    for label in (SHUFFLED, LENGTH):
        checks.append(above(f"{label} beats HeteroAvg on {where}", found[label], found[HETERO]))
        name = f"{label} does as well as InCo, within a point, on {where}"
        checks.append(above(name, found[label], found[INCO], margin=MARGIN))
    return checks


def _mean_curve(row: ComparisonRow) -> dict[int, float]:
    """Round → the clients' accuracy, in the mean over the seeds that evaluated it then."""
    return mean_curve(row, lambda record: clients_accuracy(1)([record]))


# --- transformers ----------------------------------------------------------------------------------------------------


def transformers(scale: InCoScale) -> list[Grid]:
    """One pair on small transformers that were never trained before; the paper's are pretrained."""
    if not scale.transformers:
        return []
    values = scale.values(
        method=scale.entries({HETERO: "heteroavg", INCO: scale.inco()}),
        archs="; ".join(scale.transformers),
        model=scale.transformers[-1],
    )
    return [
        Grid(
            "transformers",
            "InCo and HeteroAvg on vision transformers of five depths, from new weights",
            values,
            lambda comparison: _assess_transformers(scale, comparison),
            tuning=scale.tuning,
        )
    ]


def _assess_transformers(scale: InCoScale, comparison: Comparison) -> Findings:
    found = accuracies(scale, comparison)
    rows = tuple((label, cell(seeds), cell(differences(seeds, found[HETERO]))) for label, seeds in found.items())
    title = f"Accuracy of the clients' transformers on {scale.where}, %"
    check = above(f"InCo beats HeteroAvg on transformers, {scale.where}", found[INCO], found[HETERO])
    note = (
        "the paper's are pretrained, on images of 224 pixels; its authors' code divides a transformer's changes by the "
        "number of local epochs before it averages them, which is not done here"
    )
    table = FindingsTable(title, ("", "accuracy", "gain over HeteroAvg, points"), rows)
    return Findings((table,), (check,), (scale.note, note, *unfinished_note(comparison)))


# --- what crossing does to each layer --------------------------------------------------------------------------------


def coefficients(scale: InCoScale) -> Grid:
    """Fig. 9 and Table 3, from what the runs' probes wrote."""
    methods = {INCO: scale.inco(), SHUFFLED: scale.inco(control="shuffled"), PLAIN_INCO: scale.inco(optimise=False)}
    return Grid(
        "coefficients",
        "Fig. 9 and Table 3: θ, β, and the crossed steps' lengths and cosines, layer by layer and round by round",
        scale.values(method=scale.entries(methods)),
        lambda comparison: _assess_coefficients(scale, comparison),
        draws=True,
        tuning=scale.tuning,
    )


def _assess_coefficients(scale: InCoScale, comparison: Comparison) -> Findings:
    found = {row.method: _crossings(row) for row in comparison.rows}
    tables = tuple(_coefficient_table(label, of) for label, of in found.items() if of)
    curves = {row.method: _layer_curves(row) for row in comparison.rows}
    notes = (
        "θ and β of a convolution are means over its kernels; cos(g₀, g): of what a layer is crossed with and its "
        "own change; length: of the crossed step, of the change's; cos(step, g): of both; means over measured rounds "
        "and a stage's layers",
        CONTROL_NOTE.rpartition(";")[0],
        *unfinished_note(comparison),
    )
    pictures = {"coefficients.png": partial(plot_coefficients, curves)}
    return Findings(tables, tuple(_coefficient_checks(found)), notes, pictures)


def _crossings(row: ComparisonRow) -> dict[int, Crossing]:
    """Seed → what was published of every layer, over the rounds that were measured."""
    return {
        result.seed: crossing(published(Path(result.directory), "crossing").values()) for result in row.sound_results
    }


def _layer_curves(row: ComparisonRow) -> dict[str, dict[str, dict[int, float]]]:
    """Figure → layer → round → the mean over the seeds."""
    several: dict[str, dict[str, dict[int, list[float]]]] = {figure: {} for figure in CROSSING_FIGURES}
    for result in row.sound_results:
        for number, figures in published(Path(result.directory), "crossing").items():
            for figure in CROSSING_FIGURES:
                for layer, value in figures.get(figure, {}).items():
                    several[figure].setdefault(layer, {}).setdefault(number, []).append(value)
    return {
        figure: {layer: {n: statistics.fmean(v) for n, v in sorted(of.items())} for layer, of in layers.items()}
        for figure, layers in several.items()
    }


def _coefficient_table(label: str, found: Mapping[int, Crossing]) -> FindingsTable:
    """A row for each stage: share of β > 0, and means of all else."""
    stages = list(dict.fromkeys(stage_of(layer) for of in found.values() for layer in of.theta))
    rows = []
    for stage in (*stages, "all"):
        chosen = partial(_in_stage, stage)
        positive = {s: _mean_over(of.positive, chosen) for s, of in found.items()}
        numbers = [{s: _mean_of(of, figure, chosen) for s, of in found.items()} for figure in ("theta", *MEASURED)]
        rows.append((stage, spread(stat(positive.values())), *(PLAIN.cell(seeds) for seeds in numbers)))
    columns = ("stage", "β > 0, % of rounds", "θ", "cos(g₀, g)", "length", "cos(step, g)")
    return FindingsTable(label, columns, tuple(rows))


MEASURED = ("cosine", "length", "kept")


def _in_stage(stage: str, layer: str) -> bool:
    return stage in ("all", stage_of(layer))


def _mean_over(layers: Mapping[str, float], chosen: Callable[[str], bool]) -> float:
    return statistics.fmean(value for layer, value in layers.items() if chosen(layer))


def _mean_of(found: Crossing, figure: str, chosen: Callable[[str], bool] = lambda layer: True) -> float:
    """The mean over layers of the mean over rounds."""
    values: Mapping[str, Sequence[float]] = getattr(found, figure)
    return _mean_over({layer: statistics.fmean(several) for layer, several in values.items()}, chosen)


def _coefficient_checks(found: Mapping[str, Mapping[int, Crossing]]) -> list[Check]:
    def over(label: str, figure: Callable[[Crossing], float]) -> dict[int, float]:
        return {seed: figure(of) for seed, of in found.get(label, {}).items()}

    def positive(of: Crossing) -> float:
        return statistics.fmean(of.positive.values())

    def cosine(of: Crossing) -> float:
        return _mean_of(of, "cosine")

    paper = "83.8 and 74.4 against 53.5 and 50.2 % in two layers"
    mine, shuffled = ({part: over(label, part) for part in (positive, cosine)} for label in (INCO, SHUFFLED))
    name = "β > 0 in more layers and rounds with optimisation than without"
    shrinks = "β shrinks: its size in the last fifth of the rounds, of that in the first"
    return [
        above(name, mine[positive], over(PLAIN_INCO, positive), paper=paper),
        above("β > 0 more often than with layer 0 shuffled", mine[positive], shuffled[positive]),
        above("cos(g₀, g) is larger than with layer 0 shuffled", mine[cosine], shuffled[cosine], unit=PLAIN),
        beyond("crossed steps are longer than the layers' own", over(INCO, partial(_mean_of, figure="length")), 1.0),
        beyond(shrinks, over(INCO, beta_left), 1.0, below=True, paper="falls over the rounds (Fig. 9b, c)"),
    ]


def beta_left(found: Crossing) -> float:
    """Mean |β| over the layers in the last fifth of the rounds, of that in the first fifth."""
    early, late = 0.0, 0.0
    for values in found.beta.values():
        part = max(1, len(values) // 5)
        early += statistics.fmean(map(abs, values[:part]))
        late += statistics.fmean(map(abs, values[-part:]))
    return late / early if early else math.inf
