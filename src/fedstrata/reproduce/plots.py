"""Pictures of a reproduction (extra `report`)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

from fedstrata.core.extras import missing
from fedstrata.runs.files import write_atomic

FULL, PART, FAINT = "#2166a8", "#ec7f2c", "#6b7480"
_COLOURS = (FULL, FAINT, PART)
"""The colours of lines, in turn."""
DPI = 140


def check_plots() -> None:
    """Refuse early if pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise missing("matplotlib", "pictures need") from None


def plot_norms(found: Mapping[str, Any], seed: int, path: Path) -> None:
    """The gradient's norm over the steps of all rounds, full and partial updates one above the other."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    figure = Figure(figsize=(10, 5.2), layout="constrained")
    panels = figure.subplots(len(found), 1, sharex=True, sharey=True)
    for axes, (label, run) in zip(panels, found.items(), strict=True):
        norms, most = run["norms"], max(map(len, run["active"]))
        starts = [0, *accumulate(map(len, norms))]
        for at, steps in enumerate(norms):
            full = len(run["active"][at]) == most
            places = range(starts[at], starts[at + 1])
            axes.axvline(starts[at] - 0.5, color="#d9dde2", linewidth=0.7, zorder=0)
            axes.plot(places, steps, color=FULL if full else PART, linewidth=1.1)
            axes.plot(starts[at], steps[0], "o", color=FULL if full else PART, markersize=3.2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("gradient norm")
        axes.set_title(f"{label} updates" if label == "full" else label, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for colour, label in ((FULL, "all strata train"), (PART, "only the active stratum trains")):
        panels[-1].plot([], [], color=colour, label=label)
    panels[-1].legend(frameon=False, ncols=2, loc="upper right", fontsize=8)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlabel(f"local step; dots and lines: the first step after the server has averaged (seed {seed})")
    save(figure, path)


def plot_divergence(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """How far local models are apart after every round, a line for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for (label, curve), colour in zip(curves.items(), cycle(_COLOURS), strict=False):
        axes.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=1.5, label=label)
    axes.set(xlabel="round", ylabel="weight divergence", ylim=(0, None))
    _tidy(axes)
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)


def plot_layers(panels: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """The divergence of FedAvg's strata and stages over the rounds, each line over its maximum, from low to high."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    every = figure.subplots(1, len(panels), sharey=True)
    every[0].set_ylabel("divergence, of its maximum")
    for axes, (kind, lines) in zip(every, panels.items(), strict=True):
        for at, (name, curve) in enumerate(lines.items()):
            colour = colormaps["viridis"](0.92 * at / max(len(lines) - 1, 1))
            axes.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=1.3, label=name)
        axes.set_title(kind, loc="left", fontsize=10)
        axes.set(xlabel="round", ylim=(0, None))
        _tidy(axes)
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def plot_stages(curves: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """How alike clients' models are at each stage, a line for each case."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    for at, (label, curve) in enumerate(curves.items()):
        axes.plot(list(curve), list(curve.values()), "o-", color=colormaps["tab10"](at), linewidth=1.5, label=label)
    axes.set(xlabel="stage", ylabel="CKA between clients")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def plot_heatmaps(matrices: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], seed: int, path: Path) -> None:
    """CKA of every two clients: a row of squares for each case, a column for each stage."""
    from matplotlib.figure import Figure

    columns = max(map(len, matrices.values()))
    figure = Figure(figsize=(2.1 * columns + 1.6, 2.1 * len(matrices) + 0.6), layout="constrained")
    panels = figure.subplots(len(matrices), columns, squeeze=False)
    for at, (row, (label, stages)) in enumerate(zip(panels, matrices.items(), strict=True)):
        for axes, (stage, matrix) in zip(row, stages.items(), strict=True):
            shown = axes.imshow(matrix, vmin=0, vmax=1, cmap="magma")
            axes.set(xticks=[], yticks=[])
            axes.set_title("" if at else stage, pad=16, fontsize=10)
        row[0].text(-0.5, -0.7, label, fontsize=8, va="bottom")
    figure.colorbar(shown, ax=panels, shrink=0.5, label="CKA")
    figure.supxlabel(f"clients; models of different depth from the shallowest on (seed {seed})", fontsize=8)
    save(figure, path)


def plot_architectures(
    curves: Mapping[str, Mapping[str, Mapping[int, float]]], path: Path, *, line: str = "o-"
) -> None:
    """Accuracy over the rounds: a panel for each method, or setting, a line for each architecture, or method."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(curves) + 1.2, 3.4), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    panels[0].set_ylabel("accuracy, %")
    for axes, (label, lines) in zip(panels, curves.items(), strict=True):
        for at, (name, curve) in enumerate(lines.items()):
            colour = colormaps["viridis"](0.92 * at / max(len(lines) - 1, 1))
            shown = [100 * value for value in curve.values()]
            axes.plot(list(curve), shown, line, color=colour, linewidth=1.4, markersize=3, label=name)
        axes.set_title(label, loc="left", fontsize=10)
        axes.set_xlabel("round")
        _tidy(axes)
    panels[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def plot_coefficients(curves: Mapping[str, Mapping[str, Mapping[str, Mapping[int, float]]]], path: Path) -> None:
    """What crossing does to each layer over the rounds: a column for each method, a row for each figure."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    names = {"theta": "θ", "beta": "β", "cosine": "cos(g₀, g)", "length": "length", "kept": "cos(step, g)"}
    figure = Figure(figsize=(3.6 * len(curves) + 2.4, 1.9 * len(names) + 0.5), layout="constrained")
    panels = figure.subplots(len(names), len(curves), sharex=True, sharey="row", squeeze=False)
    for column, (label, found) in enumerate(curves.items()):
        for axes, (part, text) in zip(panels[:, column], names.items(), strict=True):
            layers = found[part]
            for at, (layer, line) in enumerate(layers.items()):
                colour = colormaps["viridis"](0.92 * at / max(len(layers) - 1, 1))
                axes.plot(list(line), list(line.values()), color=colour, linewidth=1.0, label=layer)
            axes.set_ylabel("" if column else text)
            _tidy(axes)
        panels[0, column].set_title(label, loc="left", fontsize=10)
        panels[-1, column].set_xlabel("round")
    if panels[0, -1].lines:  # runs may be missing
        panels[0, -1].legend(frameon=False, fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)


def plot_environments(
    panels: Mapping[str, Mapping[str, Mapping[Any, float]]], labels: tuple[str, str], path: Path
) -> None:
    """A panel for each title, two in a row, a line for each layer; `labels` are those of the axes."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(8, 2.6 * rows + 0.3), layout="constrained")
    every = figure.subplots(rows, 2, sharex=True, squeeze=False).ravel()
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, lines) in zip(every, panels.items(), strict=False):
        for at, (layer, line) in enumerate(lines.items()):
            colour = colormaps["viridis"](0.92 * at / max(len(lines) - 1, 1))
            axes.plot(list(line), list(line.values()), color=colour, linewidth=1.3, label=layer)
        axes.set_title(title, loc="left", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=6)
    figure.supxlabel(labels[0], fontsize=9)
    figure.supylabel(labels[1], fontsize=9)
    save(figure, path)


def plot_maps(maps: Mapping[str, Mapping[str, Sequence[Any]]], seed: int, path: Path) -> None:
    """Features in the plane, a column for each case: coloured by class above, by client below."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * len(maps) + 0.4, 5.6), layout="constrained")
    panels = figure.subplots(2, len(maps), squeeze=False)
    for column, (label, found) in enumerate(maps.items()):
        across, up = zip(*found["points"], strict=True)
        for axes, (kind, colours) in zip(
            panels[:, column], {"labels": "tab10", "clients": "tab20"}.items(), strict=True
        ):
            shades = [colormaps[colours](int(value) % 20) for value in found[kind]]
            axes.scatter(across, up, c=shades, s=5, linewidths=0)
            axes.set(xticks=[], yticks=[])
        panels[0, column].set_title(label, fontsize=9)
    for axes, kind in zip(panels[:, 0], ("by class", "by client"), strict=True):
        axes.set_ylabel(kind)
    figure.supxlabel(f"t-SNE of the local models' last features (seed {seed})", fontsize=8)
    save(figure, path)


def plot_fronts(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    fronts: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
) -> None:
    """The best accuracy so far against what it has cost: a panel for each cost, a line for each method, and the front.

    Args:
        panels: cost → method → (cost, accuracy), evaluation after evaluation.
        fronts: cost → the points that no other method has at least the accuracy of for at most the cost.
        path: the picture's file.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(panels) + 2.6, 4.6), layout="constrained")
    several = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    several[0].set_ylabel("best accuracy so far, %")
    for axes, (cost, lines) in zip(several, panels.items(), strict=True):
        for at, (label, curve) in enumerate(lines.items()):
            across, up = zip(*((c, 100 * value) for c, value in curve), strict=True)
            style = "-" if at < 10 else "--"
            axes.plot(across, up, style, color=colormaps["tab10"](at % 10), linewidth=1.2, label=label)
        across, up = zip(*((c, 100 * value) for c, value in fronts[cost]), strict=True)
        axes.plot(across, up, color="black", linewidth=3, alpha=0.25, drawstyle="steps-post", label="front")
        axes.set_xscale("log")
        axes.set_xlabel(f"{cost} so far, all clients")
        axes.spines[["top", "right"]].set_visible(False)
    several[-1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def _tidy(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    """Write a picture, whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI, metadata={"Software": None})
    write_atomic(path, drawn.getvalue())
