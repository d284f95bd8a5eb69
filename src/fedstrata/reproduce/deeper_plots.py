"""Pictures of deeper models' tables: Fig. 1 (accuracies, and training curves) and Figs. 4 to 7 (divergence by layer).

The paper's figures of divergence are of gradients over the rounds. Over the rounds there are the clients' updates
here, which cost nothing to watch, and at the end of a run gradients, layer by layer.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from fedstrata.reproduce.deeper_figures import SettingFigures
from fedstrata.reproduce.deeper_measures import GRADIENTS, UPDATES, Measure, layer_halves
from fedstrata.reproduce.plots import save

Curve = Mapping[float, float]
"""Place on the horizontal axis → value."""
_MARKS = ("o", "s", "^", "D")


def plot_table(cells: Mapping[str, SettingFigures], title: str, path: Path) -> None:
    """A table's settings as lines, in the mean over the seeds.

    Above: accuracies of both, FL's by round, and the updates' divergence by round of the shallow and of the deep half
    of the layers. Below: divergence by layer, of gradients at the end, and of updates over all rounds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 7.2), layout="constrained")
    above, below = figure.subplots(2, 4)
    _plot_accuracies(above[0], cells)
    _plot_lines(above[1], "FL's accuracy, %", "round", {n: accuracy_by_round(c) for n, c in cells.items()})
    for axes, half in zip(above[2:], ("shallow", "deep"), strict=True):
        lines = {name: updates_by_round(cell, deep=half == "deep") for name, cell in cells.items()}
        _plot_lines(axes, f"divergence, {half} half, {UPDATES.column}", "round", lines)
    for axes, measure in zip(below, (*GRADIENTS, UPDATES), strict=True):
        lines = {name: by_layer(cell, measure) for name, cell in cells.items()}
        _plot_lines(axes, f"divergence, {measure.column}", "layer, from the input", lines)
        if any(value > 0 for line in lines.values() for value in line.values()):
            _scale_by_logarithm(axes)
    above[1].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    save(figure, path)


def _plot_accuracies(axes: Any, cells: Mapping[str, SettingFigures]) -> None:
    """Fig. 1a: both methods' best accuracies by setting; dashed, the gap."""
    for label, colour in (("cl", "#6b7480"), ("fl", "#2166a8")):
        found = [_mean_and_deviation(getattr(cell, label).values()) for cell in cells.values()]
        places = [at for at, value in enumerate(found) if value is not None]
        known = [value for value in found if value is not None]
        means, deviations = ([100 * value[part] for value in known] for part in (0, 1))
        axes.errorbar(places, means, deviations, fmt="o-", color=colour, capsize=3, label=label.upper())
    for at, cell in enumerate(cells.values()):
        ends = [_mean_and_deviation(seeds.values()) for seeds in (cell.cl, cell.fl)]
        if ends[0] is not None and ends[1] is not None:
            axes.plot([at, at], [100 * end[0] for end in ends if end is not None], "--", color="#d08a4e", linewidth=1)
    axes.set_xticks(range(len(cells)), list(cells), fontsize=8)
    axes.set_title("best accuracy, %; dashed: the gap", loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _plot_lines(axes: Any, title: str, across: str, lines: Mapping[str, Curve]) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    for at, ((label, line), mark) in enumerate(zip(lines.items(), cycle(_MARKS), strict=False)):
        colour = colormaps["viridis"](0.9 * at / max(len(lines) - 1, 1))
        axes.plot(list(line), list(line.values()), f"{mark}-", color=colour, linewidth=1.3, markersize=2.5, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(across, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _scale_by_logarithm(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


# --- the lines -------------------------------------------------------------------------------------------------------


def accuracy_by_round(cell: SettingFigures) -> dict[float, float]:
    """FL's accuracy in percent, in the mean over the seeds that were evaluated in that round."""
    found: dict[float, list[float]] = {}
    for curve in cell.curves.values():
        for record in curve:
            if record.accuracy is not None:
                found.setdefault(record.round, []).append(100 * record.accuracy)
    return {number: statistics.fmean(values) for number, values in found.items()}


def updates_by_round(cell: SettingFigures, *, deep: bool) -> dict[float, float]:
    """The updates' divergence as its column has it: the mean over half of the layers and over the seeds."""
    found: dict[float, list[float]] = {}
    for rounds in cell.updates.values():
        for number, layers in enumerate(rounds, start=1):
            found.setdefault(number, []).append(UPDATES.factor * layer_halves(layers)[deep])
    return {number: statistics.fmean(values) for number, values in found.items()}


def by_layer(cell: SettingFigures, measure: Measure) -> dict[float, float]:
    """Layer, counted from the input → divergence as the measure's column has it, in the mean over the seeds."""
    if measure is UPDATES:
        rows = [layers for rounds in cell.updates.values() for layers in rounds]
    else:
        rows = [found[measure.name] for found in cell.layers.values()]
    lines = [list(layers.values()) for layers in rows]
    return {
        at: measure.factor * statistics.fmean(values) for at, values in enumerate(zip(*lines, strict=True), start=1)
    }


def _mean_and_deviation(values: Any) -> tuple[float, float] | None:
    found: Sequence[float] = list(values)
    if not found:
        return None
    return statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else 0.0


def pictures(name: str, found: Mapping[str, Mapping[str, SettingFigures]]) -> dict[str, Any]:
    """File name → what draws it: a picture of a table for each of its datasets."""
    several = len(found) > 1
    return {
        f"{name}-{data.lower()}.png" if several else f"{name}.png": partial(plot_table, cells, f"{name}, {data}")
        for data, cells in found.items()
    }
