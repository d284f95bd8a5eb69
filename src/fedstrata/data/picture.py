"""The class × client picture of a partition: in the terminal, and as a PNG, SVG or PDF file.

Both take the counts of `describe`: one row per class, one column per client. Counts of skewed partitions span
three orders of magnitude, so shades and bars go with the square root of a count; empty cells are always told
from small ones.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from fedstrata.core.extras import missing
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

Ints = NDArray[np.int64]

RAMP = ("#dcefb9", "#9bd7b4", "#41a8be", "#2166a8", "#172a6b")
"""Few to many: ever darker, so it reads in grey and with any colour vision."""

_INK = ("#5b8fcf", "#8d86bd", "#c07f8e", "#ec7f2c")  # bars, few to many: seen on dark and on light terminals
_LEVELS = 8
_BARS, _BARS_ASCII = "·▁▂▃▄▅▆▇█", ".12345678"
_LABEL = 16  # widest class name in the terminal, in columns

_FORMATS: dict[str, dict[str, None]] = {  # suffix → the metadata that would differ from run to run
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_TEXT, _FAINT, _BLANK = "#222831", "#6b7480", "#f5f6f7"
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _FAINT,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "svg.hashsalt": "fedstrata",
}


def terminal(
    counts: Tensor, class_names: Sequence[str] = (), *, max_clients: int = 100, max_classes: int = 100
) -> HeatMap:
    """A heat map for the terminal: numbers on shades where they fit, bars of eight heights where they do not.

    It is legible without colours, and fills no more than the width it is given: clients and classes beyond
    what fits (or beyond the limits) are left out, which a line below the map says.

    Args:
        counts: examples of each class (row) at each client (column).
        class_names: one name per class; empty for numbers.
        max_clients: show only the first clients, at most this many.
        max_classes: show only the first classes, at most this many.
    """
    if max_clients < 1 or max_classes < 1:
        raise UsageError("a picture shows at least 1 client and 1 class")
    table, names = _check_table(counts, class_names)
    return HeatMap(table, names, max_clients, max_classes)


@dataclass(frozen=True, eq=False)
class HeatMap:
    """A rich renderable, made by `terminal`."""

    counts: Ints
    names: tuple[str, ...]
    max_clients: int
    max_classes: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows, clients = min(len(self.counts), self.max_classes), min(self.counts.shape[1], self.max_clients)
        totals = [f"{int(total):,}" for total in (*self.counts[:rows].sum(1), self.counts.sum())]
        longest = max(cell_len(name) for name in (*self.names[:rows], "client"))
        left = min(longest, _LABEL, max(6, options.max_width // 4)) + 1
        right = max(map(len, totals)) + 2
        room = max(1, options.max_width - left - right)
        sizes = self.counts.sum(0)
        digits = max(len(str(int(sizes[:clients].max()))), len(str(clients - 1)))
        if clients * (digits + 1) > room:
            digits = 0  # no numbers, bars
        widths = (digits + 2, digits + 1) if digits else (3, 2, 1)
        width = next((w for w in widths if clients * w <= room), 1)
        clients = min(clients, room // width)
        glyphs = _BARS_ASCII if options.ascii_only else _BARS
        most, tallest = int(self.counts[:rows, :clients].max()), int(sizes[:clients].max())

        def line(name: str, cells: Iterable[Text], end: str, style: str = "") -> Text:
            start = Text(_fit(name, left - 1, options.ascii_only) + " ", style=style)
            stop = Text(end.rjust(right), style="dim")
            return Text.assemble(start, *cells, stop, no_wrap=True, overflow="crop")

        yield line("client", [Text(_ruler(clients, width, digits), style="dim")], "all", "dim")
        for name, row, end in zip(self.names, self.counts[:rows, :clients], totals, strict=False):
            yield line(name, [_cell(int(n), most, width, digits, glyphs) for n in row], end)
        if digits:
            yield line("all", [Text(_place(int(n), width, digits)) for n in sizes[:clients]], totals[-1], "bold")
        else:
            bars = [_cell(int(n), tallest, width, digits, glyphs) for n in sizes[:clients]]
            yield line("all", bars, totals[-1], "bold")
            yield Text()
            yield _legend(most, tallest, glyphs)
        for what, shown, there in (
            ("clients", clients, self.counts.shape[1]),
            ("classes", rows, len(self.counts)),
        ):
            if shown < there:
                yield Text(f"the first {shown:,} of {there:,} {what} are shown", style="italic")


def level(count: int, most: int, levels: int = _LEVELS) -> int:
    """0 for none, else 1…levels with the square root of the count's share of the largest."""
    return min(levels, math.ceil(levels * math.sqrt(count / most) - 1e-9)) if count > 0 else 0


def _place(what: object, width: int, digits: int) -> str:
    """A number in its cell: a space before it, and one after it where there is room."""
    return (" " + str(what).rjust(digits)).ljust(width)


def _cell(count: int, most: int, width: int, digits: int, glyphs: str) -> Text:
    """One cell: the number on its shade or, where there is no room for numbers, a bar with a gap beside it."""
    if not count:
        return Text(_place(glyphs[0], width, digits) if digits else glyphs[0].ljust(width), style="dim")
    if digits:
        back = shade(math.sqrt(count / most))
        ink = "#000000" if _luminance(back) > 0.3 else "#ffffff"
        return Text(_place(count, width, digits), style=Style(color=ink, bgcolor=back))
    height = level(count, most)
    bar = glyphs[height] * max(1, width - 1)
    return Text(bar.ljust(width), style=_INK[(height - 1) * len(_INK) // _LEVELS])


def _legend(most: int, tallest: int, glyphs: str) -> Text:
    """What the bars stand for."""
    legend = Text(f"examples: {glyphs[0]} none")
    for height in (2, 4, 6, 8):
        if bound := int(most * (height / _LEVELS) ** 2):
            legend.append(f"   {glyphs[height]} ", style=_INK[(height - 1) * len(_INK) // _LEVELS])
            legend.append(f"up to {bound:,}")
    return legend.append(f"\nin the row 'all': {glyphs[8]} up to {tallest:,}")


def _ruler(clients: int, width: int, digits: int) -> str:
    """The clients' numbers above their columns, as many as fit."""
    step = _step(len(str(clients - 1)) + 1, width)
    marks = [" "] * (clients * width)
    for client in range(0, clients, step):
        text = _place(client, width, digits) if digits else str(client)
        place = client * width
        if place + len(text) <= len(marks):
            marks[place : place + len(text)] = text
    return "".join(marks)


def _fit(name: str, width: int, ascii_only: bool) -> str:
    """The name in exactly `width` columns."""
    name = "".join(c if c.isprintable() else "?" for c in name)
    if cell_len(name) <= width:
        return set_cell_size(name, width)
    dots = "..." if ascii_only else "…"
    return set_cell_size(name, width - len(dots)) + dots


def shade(share: float) -> Color:
    """The ramp's colour at 0…1."""
    place = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    ends = [Color.parse(colour).get_truecolor() for colour in RAMP[low : low + 2]]
    mix = [a + (b - a) * (place - low) for a, b in zip(*ends, strict=True)]
    return Color.from_rgb(*mix)


def _luminance(colour: Color) -> float:
    """Relative luminance of an sRGB colour, 0 (black) to 1 (white)."""
    parts = [c / 255 for c in colour.get_truecolor()]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def plot(counts: Tensor, path: str | os.PathLike[str], class_names: Sequence[str] = (), title: str = "") -> None:
    """Write the heat map, with the clients' sizes above it, to a PNG, SVG or PDF file.

    The file appears complete or not at all, and the same counts always give the same bytes.

    Args:
        counts: examples of each class (row) at each client (column).
        path: the file; its suffix (.png, .svg, .pdf) decides the format.
        class_names: one name per class; empty for numbers.
        title: written above the picture.

    Raises:
        UsageError: for an unknown suffix, a place that cannot be written to, or where matplotlib is missing.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in _FORMATS:
        raise UsageError(f"a picture ends in .png, .svg or .pdf, not in '{path.suffix}': {path}")
    table, names = _check_table(counts, class_names)
    try:
        import matplotlib
    except ImportError:
        raise missing("matplotlib", "pictures need") from None
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with matplotlib.rc_context(_STYLE), partial.open("wb") as file:
            _draw(table, names, title).savefig(
                file, format=suffix[1:], dpi=160, bbox_inches="tight", pad_inches=0.2, metadata=_FORMATS[suffix]
            )
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"the picture {path} cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _draw(counts: Ints, names: tuple[str, ...], title: str) -> Figure:
    """The figure: a heat map, bars of the clients' sizes above it, a colour scale beside it."""
    figure, (grid, top, scale), cell = _lay_out_axes(*counts.shape)
    mesh = _draw_grid(grid, counts, names, cell)
    _draw_sizes(top, counts.sum(0))
    for axes in (grid, top):
        for side in axes.spines.values():
            side.set_visible(False)
    _draw_scale(figure, scale, mesh, max(1, int(counts.max())))
    _write_title(top, counts, title)
    return figure


def _lay_out_axes(classes: int, clients: int) -> tuple[Figure, tuple[Axes, Axes, Axes], tuple[float, float]]:
    """(figure, (grid, bars above it, scale beside it), width and height of a cell in inches)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wanted = min(0.46, max(0.11, 9.5 / clients)), min(0.34, max(0.105, 7.0 / classes))
    wide, high = min(13.0, max(2.6, wanted[0] * clients)), min(30.0, max(1.2, wanted[1] * classes))
    bars, gap = 0.75, 0.07
    figure = Figure(figsize=(wide, high + gap + bars))
    FigureCanvasAgg(figure)
    tall = high + gap + bars
    grid = figure.add_axes((0, 0, 1, high / tall))
    top = figure.add_axes((0, (high + gap) / tall, 1, bars / tall))
    scale = figure.add_axes((1 + 0.15 / wide, max(0, high - 2.4) / tall, 0.11 / wide, min(high, 2.4) / tall))
    return figure, (grid, top, scale), (wide / clients, high / classes)


def _draw_grid(grid: Axes, counts: Ints, names: tuple[str, ...], cell: tuple[float, float]) -> Any:
    """Draw a shade, and where there is room a number, per class and client."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    classes, clients = counts.shape
    ramp = LinearSegmentedColormap.from_list("fedstrata", RAMP).with_extremes(bad=_BLANK)
    look: dict[str, Any] = {"cmap": ramp, "norm": PowerNorm(0.5, vmin=0, vmax=max(1, int(counts.max())))}
    cells = np.ma.masked_equal(counts, 0)
    mesh: Any
    if counts.size > 20_000:  # as pixels, not as so many shapes
        mesh = grid.imshow(cells, extent=(0, clients, classes, 0), aspect="auto", interpolation="nearest", **look)
    else:
        line = 0.6 if min(cell) > 0.2 else 0.3
        mesh = grid.pcolormesh(cells, edgecolors="white", linewidth=line if min(cell) > 0.08 else 0, **look)
        grid.invert_yaxis()
    _number_cells(grid, counts, cell)
    _tick(grid, names, cell)
    grid.set_xlabel("client")
    return mesh


def _draw_sizes(top: Axes, sizes: Ints) -> None:
    """Draw a bar per client, as high as it has examples."""
    from matplotlib.ticker import MaxNLocator

    clients = len(sizes)
    if clients <= 200:
        top.bar(np.arange(clients) + 0.5, sizes, width=0.86, color=RAMP[2])
    else:
        top.stairs(sizes, np.arange(clients + 1), fill=True, color=RAMP[2])
    top.set_xlim(0, clients)
    top.set_xticks([])
    top.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    top.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    top.tick_params(length=0, labelsize=7)
    top.set_ylabel("examples", fontsize=7, color=_FAINT)
    top.grid(axis="y", color="#d9dde2", linewidth=0.6)
    top.set_axisbelow(True)


def _draw_scale(figure: Figure, scale: Axes, mesh: Any, most: int) -> None:
    """Draw the colour scale, from one example to the most that a cell has."""
    marks = sorted({1, most, *(_round(most * share) for share in (1 / 16, 1 / 4, 9 / 16))})
    colours = figure.colorbar(mesh, cax=scale, ticks=marks)
    colours.ax.set_yticks([], minor=True)
    colours.ax.set_yticklabels([f"{mark:,}" for mark in marks])
    colours.outline.set_visible(False)
    colours.ax.tick_params(length=0, labelsize=7)
    colours.ax.set_title("examples", fontsize=7, color=_FAINT, loc="left", pad=8)


def _write_title(top: Axes, counts: Ints, title: str) -> None:
    """Write the partition in numbers above the bars, and a title above that."""
    (classes, clients), sizes = counts.shape, counts.sum(0)
    facts = f"{classes:,} classes, {clients:,} clients, {int(sizes.sum()):,} examples"
    facts += f"; {int(sizes.min()):,} to {int(sizes.max()):,} per client"
    top.set_title(facts, fontsize=8, color=_FAINT, loc="left", pad=8)
    if title:
        top.annotate(
            title, (0, 1), (0, 24), "axes fraction", "offset points", fontsize=11, weight="bold", parse_math=False
        )


def _number_cells(grid: Axes, counts: Ints, cell: tuple[float, float]) -> None:
    """Write the counts into the cells, where these are large enough to read them."""
    size = min(8.0, 72 * 0.9 * cell[0] / (0.64 * len(f"{int(counts.max())}")), 72 * 0.6 * cell[1])
    if size < 5.5:
        return
    most = int(counts.max())
    for (row, column), count in np.ndenumerate(counts):
        if count:
            light = _luminance(shade(math.sqrt(count / most))) > 0.3
            ink = _TEXT if light else "white"
            grid.text(column + 0.5, row + 0.5, str(count), ha="center", va="center", fontsize=size, color=ink)


def _tick(grid: Axes, names: tuple[str, ...], cell: tuple[float, float]) -> None:
    """Name the rows and number the columns, as many as can be read."""
    clients = int(grid.get_xlim()[1])
    digits = len(str(clients - 1))
    step = _step(0.09 * digits + 0.06, cell[0])
    grid.set_xticks(np.arange(0, clients, step) + 0.5, [str(k) for k in range(0, clients, step)], fontsize=7)
    step = _step(0.1, cell[1])
    size = max(5.5, min(8.0, 72 * 0.8 * cell[1] * step))
    labels = [name if len(name) <= 24 else name[:23] + "…" for name in names[::step]]
    grid.set_yticks(np.arange(0, len(names), step) + 0.5, labels, fontsize=size, parse_math=False, color=_TEXT)
    grid.tick_params(length=0)


def _round(number: float) -> int:
    """To two digits, at least 1."""
    return max(1, int(float(f"{number:.2g}")))


def _step(needed: float, each: float) -> int:
    """Label every 1st, 2nd, 5th, 10th, … so that each label has the room it needs."""
    steps = (base * int(f"1{'0' * zeros}") for zeros in range(9) for base in (1, 2, 5))
    return next(step for step in steps if step * each >= needed)


def _check_table(counts: Tensor, class_names: Sequence[str]) -> tuple[Ints, tuple[str, ...]]:
    """The counts as an array and one name per row, or a refusal."""
    table = counts.detach().cpu().numpy()
    if table.ndim != 2 or not table.size or table.dtype.kind not in "iu" or int(table.min()) < 0:
        raise UsageError(
            f"a picture needs a table of counts, classes × clients, not {counts.dtype} of shape {tuple(counts.shape)}"
        )
    if class_names and len(class_names) != len(table):
        raise UsageError(f"{len(class_names)} class names do not fit {len(table)} classes")
    return table.astype(np.int64), tuple(class_names) or tuple(str(c) for c in range(len(table)))
