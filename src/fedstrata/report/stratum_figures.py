"""Figures of what probes found per stratum: divergence and its kin, gradient norms, running statistics, θ and β."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fedstrata.report.figures import PERCENT, Control, Figure, Trace, axis, band, drawn, key, layout, rounds_axis
from fedstrata.report.formatting import distinct, known, number, rounded, text
from fedstrata.report.run_groups import Line, order, probed, stages_of, strata_of, tables

MOST_ROUNDS = 200
"""Columns of a heat-map, and steps of a slider: more could not be told apart."""
MOST_TRACES = 40
"""Steps of a slider over what is large for one round."""

Tables = Mapping[int, Mapping[str, float]]

QUANTITIES = {
    "divergence": "gradient divergence",
    "proxy": "divergence of updates",
    "weightdiv": "weight divergence",
    "cosine": "cosine of updates",
}
"""Probes that give one number per stratum, and what it is."""
SIGNED = (QUANTITIES["cosine"],)
"""Those that may be negative, and have no logarithm."""

DEPTH = ("#3b6fd4", "#2f9fc4", "#2bb391", "#7fb83c", "#d9a520", "#e8743b", "#d8457a")
"""From low layers to high ones; seen on light and on dark ground."""


def thinned(rounds: Sequence[int], limit: int) -> list[int]:
    """At most so many of the rounds, evenly, the first and the last among them."""
    if len(rounds) <= limit:
        return list(rounds)
    step = (len(rounds) - 1) / (limit - 1)
    return [rounds[round(at * step)] for at in range(limit)]


def rounds_in(found: Sequence[Mapping[int, Any]], limit: int = MOST_ROUNDS) -> list[int]:
    """The rounds in which anything was found, thinned."""
    return thinned(sorted({at for table in found for at in table}), limit)


def methods(name: str, lines: Sequence[Line]) -> Control:
    """A list of the lines' names."""
    return Control(name, "Method", tuple(line.label for line in lines))


def divergence(lines: Sequence[Line]) -> list[Figure]:
    """Stratum × round as a heat-map, and the profile over the strata in one round."""
    found = {probe: [tables(line, probe) for line in lines] for probe in QUANTITIES}
    found = {probe: by_line for probe, by_line in found.items() if any(by_line)}
    if not found:
        return []
    rounds = rounds_in([table for by_line in found.values() for table in by_line])
    held = [line for at, line in enumerate(lines) if any(by_line[at] for by_line in found.values())]
    quantity = Control("quantity", "Quantity", tuple(QUANTITIES[probe] for probe in found))
    method, slider = methods("divergence-method", held), Control.rounds("divergence-round", rounds)
    names = order([table for by_line in found.values() for table in by_line], strata_of(lines))
    frames = {}
    for q, by_line in enumerate(found.values()):
        low, high = _limits(by_line)
        for m, line in enumerate(held):
            frames[key(q, m)] = [_heat(by_line[lines.index(line)], names, rounds, low, high)]
    height = 170 + 21 * len(names)
    shape = layout(rounds_axis(), _downwards(names), height=height)
    about = "Every stratum, from the input at the top to the output, in every probed round, of one method."
    name, title, by = "divergence", "Strata over the rounds", (quantity, method)
    heat = Figure(name, title, about, [], shape, by, frames, slider, ("z",), linear=SIGNED)
    return [heat, _profile(found, lines, names, rounds, quantity, slider, height)]


def _downwards(names: Sequence[str]) -> dict[str, Any]:
    """An axis of strata from the input down, the same in both figures, so that rows stand beside each other."""
    return axis(
        "", type="category", categoryorder="array", categoryarray=distinct(names), range=[len(names) - 0.5, -0.5]
    )


def _limits(by_line: Sequence[Tables]) -> tuple[float, float]:
    """Of all lines, so that their colours mean the same."""
    values = [value for table in by_line for row in table.values() for value in row.values()]
    return min(values, default=0.0), max(values, default=1.0)


def _heat(table: Tables, names: Sequence[str], rounds: Sequence[int], low: float, high: float) -> Trace:
    held = [at for at in rounds if at in table]
    return {
        "type": "heatmap",
        "x": held,
        "y": distinct(names),
        "z": [[rounded(table[at].get(name)) for at in held] for name in names],
        "zmin": rounded(low),
        "zmax": rounded(high),
        "colorscale": "Viridis",
        "colorbar": {"thickness": 12, "tickformat": ".2~g", "exponentformat": "e"},
        "hovertemplate": "%{y}, round %{x}: %{z:.4g}<extra></extra>",
    }


def _profile(
    found: Mapping[str, Sequence[Tables]],
    lines: Sequence[Line],
    names: Sequence[str],
    rounds: Sequence[int],
    quantity: Control,
    slider: Control,
    height: int,
) -> Figure:
    base = [_over_strata(line, names) for line in lines]
    frames = {}
    for q, by_line in enumerate(found.values()):
        for r, at in enumerate(rounds):
            rows = [table.get(at, {}) for table in by_line]
            frames[key(q, r)] = [{"x": [rounded(row.get(name)) for name in names]} for row in rows]
    shape = layout(
        axis("", tickformat=".2~g", tickangle=0, nticks=6),
        _downwards(names),
        height=height,
        hovermode="y unified",
        showlegend=False,
    )
    about = "The same quantity over the strata in the round that the slider shows, a line for each method."
    name, by = "divergence-profile", (quantity, slider)
    return Figure(name, "Profile", about, base, shape, by, frames, log=("xaxis",), linear=SIGNED)


def _over_strata(line: Line, names: Sequence[str]) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": text(line.label),
        "y": distinct(names),
        "line": {"color": line.colour, "width": 2, "dash": line.dash},
        "marker": {"color": line.colour, "size": 5},
        "hovertemplate": "%{x:.4g}",
        "legendgroup": f"line{line.index}",
        "meta": {"line": line.index},
    }


def lines_over_rounds(
    lines: Sequence[Line], probe: str, value: Callable[[Any], Any], form: str, suffix: str = "", dash: str | None = None
) -> list[Trace]:
    """A number that a probe found, over the rounds, thinned, with its range over seeds."""
    traces: list[Trace] = []
    for line in lines:
        rounds = rounds_in([run.series(probe) for run in line.runs])
        points = probed(line, probe, value, rounds)
        if points:
            traces += [*band(line, points), drawn(line, points, form, name=line.label + suffix, dash=dash)]
    return traces


def gradnorm(lines: Sequence[Line]) -> list[Figure]:
    """How gradients jump where a client goes on from the averaged model instead of its own."""
    held = [line for line in lines if any(run.series("gradnorm") for run in line.runs)]
    if not held:
        return []
    alone = [tables_of_lists(line, "gradnorm", "alone") for line in held]
    names = order(alone, strata_of(held))
    chosen = Control("gradnorm-stratum", "Stratum", ("all strata", *names), whole=True)
    slider = Control.rounds("gradnorm-round", rounds_in(alone, MOST_TRACES))
    return [_spikes(held, names, chosen), _steps(held, names, chosen, slider)]


def tables_of_lists(line: Line, probe: str, part: str) -> dict[int, dict[str, Any]]:
    """Round → {stratum: what was found}, of the run whose pictures are shown."""
    found = {at: what.get(part) for at, what in line.seen(probe).series(probe).items() if isinstance(what, Mapping)}
    return {at: dict(table) for at, table in found.items() if isinstance(table, Mapping) and table}


def _norms(table: Any, stratum: str | None, steps: int | None = None) -> list[float]:
    """Step by step, of one stratum or of all: ‖g‖ = √Σ‖g_L‖²; only the first few where so many are wanted."""
    if not isinstance(table, Mapping):
        return []
    wanted = list(table.values()) if stratum is None else [table.get(stratum)]
    rows = [known(row[:steps]) for row in wanted if isinstance(row, list)]
    return [math.sqrt(sum(norm**2 for norm in step)) for step in zip(*rows, strict=False)] if rows else []


def _ratio(stratum: str | None, found: Any) -> float | None:
    """The first gradient's norm from the averaged model over that from the client's own."""
    if not isinstance(found, Mapping):
        return None
    averaged, alone = _norms(found.get("averaged"), stratum, 1), _norms(found.get("alone"), stratum, 1)
    return averaged[0] / alone[0] if averaged and alone and alone[0] > 0 else None


def _spikes(lines: Sequence[Line], names: Sequence[str], chosen: Control) -> Figure:
    frames = {}
    for s, stratum in enumerate([None, *names]):
        frames[key(s)] = lines_over_rounds(lines, "gradnorm", partial(_ratio, stratum), ".3~g")
    shape = layout(
        rounds_axis(),
        axis("averaged ÷ alone", tickformat=".2~g"),
        hovermode="x unified",
        shapes=[level(1)],
    )
    about = (
        "The norm of the first gradient after averaging, over what it is, in that round, for a client that goes on "
        "alone. Far above 1 the averaged layers do not fit each other."
    )
    if any(len(run.series("gradnorm")) > MOST_ROUNDS for line in lines for run in line.runs):
        about += " Some rounds are left out."
    return Figure("gradnorm-spike", "The jump at averaging", about, [], shape, (chosen,), frames, log=("yaxis",))


def level(y: float) -> dict[str, Any]:
    """A faint line across a figure."""
    ends = {"x0": 0, "x1": 1, "xref": "paper", "y0": y, "y1": y, "yref": "y"}
    return {"type": "line", **ends, "line": {"width": 1, "dash": "dot", "color": "#8a929c"}}


def _steps(lines: Sequence[Line], names: Sequence[str], chosen: Control, slider: Control) -> Figure:
    base = [
        trace
        for line in lines
        for trace in (*second([_norm_trace(line, "alone")], lines), _norm_trace(line, "averaged"))
    ]
    frames = {}
    found = [line.seen("gradnorm").series("gradnorm") for line in lines]
    for s, stratum in enumerate([None, *names]):
        for r, at in enumerate(slider.values):
            rows = [series.get(int(at)) or {} for series in found]
            norms = [_norms(row.get(part), stratum) for row in rows for part in ("alone", "averaged")]
            frames[key(s, r)] = [{"y": [rounded(norm) for norm in steps]} for steps in norms]
    shape = layout(axis("local step", tickformat="d"), axis("gradient norm", tickformat=".2~g"), hovermode="x unified")
    about = (
        "Gradient norms of one client over the same batches: from its own local model (dotted) and from the averaged "
        "one (solid), in the round that the slider shows."
    )
    return Figure("gradnorm", "Step by step", about, base, shape, (chosen, slider), frames, log=("yaxis",))


def _norm_trace(line: Line, part: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{text(line.label)}, {part}",
        "x0": 0,
        "dx": 1,
        "line": {"color": line.colour, "width": 2, "dash": "solid" if part == "averaged" else "dot"},
        "marker": {"color": line.colour, "size": 5},
        "hovertemplate": "%{y:.4g}",
        "legendgroup": f"line{line.index}",
        "meta": {"line": line.index},
    }


def second(traces: Sequence[Trace], lines: Sequence[Line]) -> list[Trace]:
    """Lines of a second kind, dotted: with several methods the legend names each method once."""
    return [{**trace, "showlegend": len(lines) == 1 and trace.get("showlegend", True)} for trace in traces]


def statistics(lines: Sequence[Line]) -> list[Figure]:
    """What running statistics cost: accuracy with them and with each batch's own, and how far clients' are apart."""
    data = lines_over_rounds(lines, "statistics", _part("running"), PERCENT, ", running")
    data += second(lines_over_rounds(lines, "statistics", _part("batch"), PERCENT, ", batch's own", "dot"), lines)
    if not data:
        return []
    y = axis("test accuracy", tickformat=PERCENT)
    about = "Accuracy of the averaged model with its running statistics (solid), and with each batch's own (dotted)."
    shape = layout(rounds_axis(), y, hovermode="x unified")
    found = [Figure("statistics", "With running statistics, and without", about, data, shape)]
    by_line = [tables(line, "statistics", "spread") for line in lines]
    names = order(by_line, strata_of(lines))
    if names:
        found.append(_statistics_spread(lines, by_line, names))
    return found


def _part(name: str) -> Callable[[Any], Any]:
    return lambda found: found.get(name) if isinstance(found, Mapping) else None


def _statistics_spread(lines: Sequence[Line], by_line: Sequence[Tables], names: Sequence[str]) -> Figure:
    slider = Control.rounds("statistics-round", rounds_in(by_line))
    about = "How far clients' running means are from the average, in running standard deviations, over the strata."
    name, title = "statistics-spread", "How far clients' statistics are apart"
    return over_depth(name, title, about, lines, by_line, names, slider, "deviations", ("yaxis",))


def over_depth(
    name: str,
    title: str,
    about: str,
    lines: Sequence[Line],
    by_line: Sequence[Tables],
    names: Sequence[str],
    slider: Control,
    unit: str,
    log: tuple[str, ...] = (),
) -> Figure:
    """One number per stratum or stage in the slider's round, a line for each method."""
    base = []
    for line in lines:
        trace = _over_strata(line, names)
        base.append({**trace, "x": trace["y"], "hovertemplate": "%{y:.4g}"})
        del base[-1]["y"]
    frames = {}
    for r, at in enumerate(slider.values):
        rows = [table.get(int(at), {}) for table in by_line]
        frames[key(r)] = [{"y": [rounded(row.get(part)) for part in names]} for row in rows]
    shape = layout(axis("", type="category"), axis(unit, tickformat=".2~g"), hovermode="x unified")
    return Figure(name, title, about, base, shape, (slider,), frames, log=log)


def crossing(lines: Sequence[Line]) -> list[Figure]:
    """InCo's θ and β of every layer over the rounds."""
    signs = {"theta": "θ", "beta": "β"}
    held = [line for line in lines if any(tables(line, "crossing", part) for part in signs)]
    if not held:
        return []
    quantity, method = Control("crossing-sign", "Quantity", tuple(signs.values())), methods("crossing-method", held)
    frames = {}
    for q, part in enumerate(signs):
        for m, line in enumerate(held):
            frames[key(q, m)] = _layers(tables(line, "crossing", part))
    shape = layout(rounds_axis(), axis("", tickformat=".3~g"), hovermode="x unified", showlegend=True)
    about = "θ, which turns a layer's gradient towards a lower layer's, or β, its length, over the rounds."
    return [Figure("crossing", "θ and β", about, [], shape, (quantity, method), frames)]


def _layers(table: Tables) -> list[Trace]:
    """A line for each layer, from low to high."""
    names = order([table], [])
    last = max(len(names) - 1, 1)
    colours = [DEPTH[round(at * (len(DEPTH) - 1) / last)] for at in range(len(names))]
    rounds = thinned(list(table), MOST_ROUNDS)
    return [
        {
            "type": "scatter",
            "mode": "lines" if len(rounds) > 1 else "markers",
            "name": text(name),
            "x": rounds,
            "y": [rounded(table[at].get(name)) for at in rounds],
            "line": {"color": colour, "width": 1.6},
            "marker": {"color": colour},
            "hovertemplate": "%{y:.4g}",
        }
        for name, colour in zip(names, colours, strict=True)
    ]


def stage_tables(lines: Sequence[Line], probe: str, *path: str) -> tuple[list[dict[int, dict[str, float]]], list[str]]:
    """A table for each line, and the stages in order."""
    by_line = [tables(line, probe, *path) for line in lines]
    return by_line, order(by_line, stages_of(lines))


def plain(value: Any) -> float | None:
    """A number of a matrix, three digits after the point."""
    found = number(value)
    return None if found is None else round(found, 3)
