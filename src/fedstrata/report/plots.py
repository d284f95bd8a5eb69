"""A report's figures as files for papers (extra `report`): the same data, drawn by matplotlib at a column's width."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from fedstrata.core.extras import missing
from fedstrata.errors import UsageError, one_of
from fedstrata.report.figures import BAND, Figure, Trace
from fedstrata.report.run_groups import group_runs
from fedstrata.report.sections import figure_sections
from fedstrata.runs.files import disk_errors, write_atomic
from fedstrata.runs.reader import SavedRun

FORMATS = ("pdf", "png", "svg")
COLUMN, PAGE = 3.4, 7.0
"""Widths in inches: of a column, and of a page's text."""

_METADATA: dict[str, dict[str, None]] = {  # what would differ from run to run
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "axes.edgecolor": "#6b7480",
    "axes.grid": False,
    "grid.color": "#e6e9ed",
    "grid.linewidth": 0.5,
    "pdf.fonttype": 42,  # journals refuse the other kind
    "svg.hashsalt": "fedstrata",
}
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def check_plots() -> None:
    """Refuse early if figures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise missing("matplotlib", "figures for papers need") from None


def plot(runs: Sequence[SavedRun], out_dir: Path, format: str = "pdf") -> list[Path]:
    """Write every figure of a report: sliders where they begin, a file for each choice of a list.

    Args:
        runs: those that differ only in their seed are averaged into one line.
        out_dir: made where it is missing.
        format: `pdf`, `png` or `svg`.

    Returns:
        The files.

    Raises:
        UsageError: if matplotlib is missing, or there is nothing to draw.
    """
    one_of("plot", FORMATS, format=format)
    check_plots()
    import matplotlib

    found = [figure for section in figure_sections(group_runs(runs)) for figure in section.figures]
    if not found:
        raise UsageError("there is nothing to draw yet: no round has ended")
    with disk_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    paths = []
    style: Any = {**matplotlib.rcParamsDefault, **_STYLE}  # a user's own settings have no say
    with matplotlib.rc_context(style):
        for figure in found:
            for name, places in _choices(figure):
                path = out_dir / f"{name}.{format}"
                _save(_draw(figure, places), path, format)
                paths.append(path)
    return paths


def _choices(figure: Figure) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of files, and the places of the controls in each."""
    every = [[c.start] if c.slides or c.whole else list(range(len(c.values))) for c in figure.by]
    seen: set[str] = set()
    for places in product(*every):
        parts = [c.values[at] for c, at, some in zip(figure.by, places, every, strict=True) if len(some) > 1]
        name = "-".join([figure.name, *map(_slug, parts)])
        while name in seen:
            name += "x"
        seen.add(name)
        if figure.traces(*places):
            yield name, places


def _slug(words: str) -> str:
    signs = words.replace("θ", "theta").replace("β", "beta").lower()
    return re.sub(r"[^a-z0-9.]+", "-", signs).strip("-.")[:60] or "x"


def _draw(figure: Figure, places: tuple[int, ...]) -> Any:
    from matplotlib.figure import Figure as Picture

    traces = figure.traces(*places)
    heat = traces[0]["type"] == "heatmap"
    panels = max(len(figure.titles), 1)
    rows = -(-panels // figure.columns)
    wide = PAGE if panels > 2 else COLUMN
    high = wide / figure.columns * rows * 0.95 if panels > 1 else _height(traces[0], figure)
    picture = Picture(figsize=(wide, high), layout="constrained")
    every = picture.subplots(rows, figure.columns, squeeze=False).flatten().tolist()
    for axes in every[panels:]:
        axes.remove()
    quantity = next((c.values[at] for c, at in zip(figure.by, places, strict=True) if c.label in NAMING), "")
    if heat:
        _draw_heat_maps(picture, every[:panels], traces, figure, quantity)
    else:
        _draw_curves(every[0], traces, figure.layout, quantity)
        _add_legend(picture, every[0], any(trace.get("meta", {}).get("faint") for trace in traces))
    return picture


NAMING = ("Quantity", "Loss", "Curves")
"""Labels of controls that name what is drawn, for an axis without a title."""


def _height(trace: Trace, figure: Figure) -> float:
    if trace["type"] == "heatmap" and "scaleanchor" in figure.layout["yaxis"]:  # square pixels
        return 0.8 * COLUMN * len(trace["y"]) / max(len(trace["x"]), 1)
    rows = len(trace["y"]) if trace["type"] == "heatmap" or figure.layout["yaxis"].get("type") == "category" else 0
    return max(2.4, 0.8 + 0.125 * rows)


def _label_text(name: Any) -> str:
    """A label for matplotlib: without the entities that Plotly needs, and with dollar signs that begin no formula."""
    return html.unescape(str(name)).replace("$", r"\$")


def _numbers(values: Sequence[Any]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def _positions(axes: Any, which: str, values: Sequence[Any], axis: Mapping[str, Any]) -> list[float]:
    """The positions of values on an axis; names are placed in their order."""
    if axis.get("type") != "category":
        return _numbers(values)
    names = list(dict.fromkeys([*axis.get("categoryarray", []), *getattr(axes, f"_{which}_names", []), *values]))
    setattr(axes, f"_{which}_names", names)
    step = -(-len(names) // 30)
    shown = list(range(0, len(names), step))
    lengths = [len(_label_text(names[at])) for at in shown]
    turned = {"rotation": 90} if which == "x" and max(sum(lengths), 4 * max(lengths) + sum(lengths) // 2) > 48 else {}
    axes.__getattribute__(f"set_{which}ticks")(shown, [_label_text(names[at]) for at in shown], **turned)
    return [names.index(value) for value in values]


def _draw_curves(axes: Any, traces: Sequence[Trace], layout: Mapping[str, Any], quantity: str) -> None:
    x_axis, y_axis = layout["xaxis"], layout["yaxis"]
    bars = [trace for trace in traces if trace["type"] == "bar"]
    for trace in traces:
        ys = trace.get("y", [])
        xs = trace.get("x", list(range(len(ys))))
        x, y = _positions(axes, "x", xs, x_axis), _positions(axes, "y", ys, y_axis)
        if trace.get("orientation") == "h":
            _draw_bars(axes, x, y, trace)
        elif trace["type"] == "bar":
            wide = 0.8 / len(bars)
            shifted = [at - 0.4 + wide * (bars.index(trace) + 0.5) for at in x]
            color = trace.get("marker", {}).get("color")  # matplotlib's next one where there is none
            axes.bar(shifted, [at or 0.0 for at in y], wide, color=color, label=_label_text(trace["name"]))
        elif trace.get("fill"):
            axes.fill(x, y, color=trace["line"]["color"], alpha=BAND, linewidth=0)
        else:
            _draw_curve(axes, x, y, trace)
    for shape in layout.get("shapes", []):
        axes.axhline(shape["y0"], color="#8a929c", linewidth=0.7, linestyle=":")
    _format_axis(axes, "x", x_axis, quantity)
    _format_axis(axes, "y", y_axis, quantity)
    axes.grid(True)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bars(axes: Any, x: Sequence[float], y: Sequence[float], trace: Trace) -> None:
    """Bars that lie, with their intervals."""
    if "error_x" not in trace:  # it only puts names in order
        return
    ends = [trace["error_x"]["arrayminus"], trace["error_x"]["array"]]
    label, colour = _label_text(trace["name"]), trace["marker"]["color"]
    axes.barh(y, x, 0.6, xerr=ends, color=colour, ecolor=trace["error_x"]["color"], capsize=2, label=label)


def _draw_curve(axes: Any, x: Sequence[float], y: Sequence[float], trace: Trace) -> None:
    line, marker = trace.get("line", {}), trace.get("marker", {})
    mode = trace.get("mode", "lines")
    axes.plot(
        x,
        y,
        color=line.get("color") or marker.get("color"),
        linestyle=_DASHES[line.get("dash", "solid")] if "lines" in mode else "none",
        linewidth=0.6 * line.get("width", 2),
        marker="o" if "markers" in mode else None,
        markersize=2.4 if "lines" in mode else 3,
        markeredgewidth=0,
        label="" if trace.get("meta", {}).get("faint") else _label_text(trace["name"]),
    )


def _format_axis(axes: Any, which: str, axis: Mapping[str, Any], quantity: str) -> None:
    """Title and ticks as the page has them."""
    from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

    category = axis.get("type") == "category"
    title = axis.get("title", {}).get("text", "") or ("" if category else quantity)
    axes.set(**{f"{which}label": title})
    form, own = axis.get("tickformat", ""), axes.__getattribute__(f"{which}axis")
    if which == "y" and (axis.get("autorange") == "reversed" or (category and axis.get("range"))):
        axes.invert_yaxis()
    if not axis.get("visible", True):
        own.set_visible(False)
    elif category:
        pass  # its ticks are the names
    elif not axis.get("showticklabels", True):
        own.set_ticks([])
    elif form.endswith("%"):
        own.set_major_formatter(PercentFormatter(1.0))
    elif form == "~s":
        own.set_major_formatter(EngFormatter(unit=axis.get("ticksuffix", "")))
        own.set_major_locator(MaxNLocator(5))
    elif form == "d":
        own.set_major_locator(MaxNLocator(6, integer=True))


def _add_legend(picture: Any, axes: Any, unnamed: bool = False) -> None:
    """A legend of what is named, but not by its row; of one line alone only if there are others without a name."""
    marks, names = axes.get_legend_handles_labels()
    if {*names} <= {*map(_label_text, getattr(axes, "_y_names", ()))}:
        return
    if len(names) > 1 or (names and unnamed):
        columns = max(1, min(4, int(62 / (max(map(len, names)) + 6))))
        rows = -(-len(names) // columns)
        picture.set_figheight(picture.get_figheight() + 0.14 * rows)  # it takes no room from the picture
        picture.legend(marks, names, loc="outside upper center", ncols=columns, frameon=False, handlelength=1.6)


def _draw_heat_maps(picture: Any, every: Sequence[Any], traces: Sequence[Trace], figure: Figure, quantity: str) -> None:
    shown = None
    for at, (axes, trace) in enumerate(zip(every, traces, strict=True)):
        place = "" if not at else str(at + 1)
        x_axis, y_axis = figure.layout[f"xaxis{place}"], figure.layout[f"yaxis{place}"]
        if trace.get("z") and trace["z"][0]:
            shown = _draw_heat_map(axes, trace, x_axis, y_axis)
        for which, axis in (("x", x_axis), ("y", y_axis)):
            _format_axis(axes, which, axis, "")
            if not axis.get("showticklabels", True):
                axes.__getattribute__(f"{which}axis").set_ticks([])
        if figure.titles:
            axes.set_title(_label_text(figure.titles[at]), loc="left")
        if figure.titles or "scaleanchor" in y_axis:
            axes.set_aspect("equal")
    if shown is not None:
        settings = traces[0].get("colorbar", {})
        bar = picture.colorbar(shown, ax=list(every), shrink=0.9, aspect=30, pad=0.02)
        bar.set_label(settings.get("title", {}).get("text", quantity))
        bar.outline.set_visible(False)
        if "tickvals" in settings:
            bar.set_ticks(settings["tickvals"], labels=settings["ticktext"])


def _draw_heat_map(axes: Any, trace: Trace, x_axis: Mapping[str, Any], y_axis: Mapping[str, Any]) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    scale = trace["colorscale"]
    colours = scale.lower() if isinstance(scale, str) else LinearSegmentedColormap.from_list("own", scale)
    x, y = _positions(axes, "x", trace["x"], x_axis), _positions(axes, "y", trace["y"], y_axis)
    values = [_numbers(row) for row in trace["z"]]
    return axes.pcolormesh(
        _edges(x), _edges(y), values, cmap=colours, vmin=trace.get("zmin"), vmax=trace.get("zmax"), rasterized=True
    )


def _edges(places: Sequence[float]) -> list[float]:
    """The borders of cells: half-way between their positions, and as far beyond the ends."""
    if len(places) == 1:
        return [places[0] - 0.5, places[0] + 0.5]
    middles = [(a + b) / 2 for a, b in pairwise(places)]
    return [2 * places[0] - middles[0], *middles, 2 * places[-1] - middles[-1]]


def _save(picture: Any, path: Path, form: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(picture)
    drawn = io.BytesIO()
    picture.savefig(drawn, format=form, dpi=300, metadata=_METADATA[form])
    write_atomic(path, drawn.getvalue())
