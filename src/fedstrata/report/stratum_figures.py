"""Figures of what probes found per stratum: divergence and its kin, gradient norms, running statistics, θ and β."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fedstrata.diagnosis.evidence import finite_number, finite_numbers
from fedstrata.report.figures import (
    PERCENT,
    Control,
    Figure,
    Trace,
    axis,
    band_traces,
    cell_rounds_axis,
    frame_key,
    layout,
    line_trace,
    rounds_axis,
)
from fedstrata.report.formatting import distinct_names, escape, round_digits
from fedstrata.report.run_groups import RunGroup, model_order, probe_curve, probe_tables, stages_of, strata_of

MOST_ROUNDS = 200
"""Columns of a heat-map, and steps of a slider, at most: nobody could tell more of them apart."""
MOST_TRACES = 40
"""Steps of a slider, at most, over figures that are large for one round."""

Tables = Mapping[int, Mapping[str, float]]

QUANTITIES = {
    "divergence": "gradient divergence",
    "proxy": "divergence of updates",
    "weightdiv": "weight divergence",
    "cosine": "cosine of updates",
    "scores": "score of the choice",
    "aggregation": "error of averaged adapters",
}
"""Probes that give one number per stratum, and what it is."""
SIGNED = (QUANTITIES["cosine"],)
"""Those that may be negative, and so have no logarithm."""

DEPTH = ("#3b6fd4", "#2f9fc4", "#2bb391", "#7fb83c", "#d9a520", "#e8743b", "#d8457a")
"""Colours from low layers to high ones, visible on light and on dark backgrounds."""


def thin_rounds(rounds: Sequence[int], limit: int) -> list[int]:
    """Choose at most so many of the rounds, evenly spaced, with the first and the last."""
    if len(rounds) <= limit:
        return list(rounds)
    step = (len(rounds) - 1) / (limit - 1)
    return [rounds[round(at * step)] for at in range(limit)]


def rounds_in(found: Sequence[Mapping[int, Any]], limit: int = MOST_ROUNDS) -> list[int]:
    """The rounds in which anything was found, thinned."""
    return thin_rounds(sorted({at for table in found for at in table}), limit)


def method_control(name: str, groups: Sequence[RunGroup]) -> Control:
    """A control that chooses one of the groups."""
    return Control(name, "Method", tuple(group.label for group in groups))


def divergence(groups: Sequence[RunGroup]) -> list[Figure]:
    """Stratum × round as a heat-map, and the profile over the strata in one round."""
    found = {probe: [probe_tables(group, probe) for group in groups] for probe in QUANTITIES}
    found = {probe: by_group for probe, by_group in found.items() if any(by_group)}
    if not found:
        return []
    rounds = rounds_in([table for by_group in found.values() for table in by_group])
    held = [group for at, group in enumerate(groups) if any(by_group[at] for by_group in found.values())]
    quantity = Control("quantity", "Quantity", tuple(QUANTITIES[probe] for probe in found))
    method, slider = method_control("divergence-method", held), Control.rounds("divergence-round", rounds)
    names = model_order([table for by_group in found.values() for table in by_group], strata_of(groups))
    frames = {}
    for q, by_group in enumerate(found.values()):
        low, high = _value_range(by_group)
        for m, group in enumerate(held):
            frames[frame_key(q, m)] = [_heat_trace(by_group[groups.index(group)], names, rounds, low, high)]
    height = 170 + 21 * len(names)
    shape = layout(cell_rounds_axis(rounds), _strata_axis(names), height=height)
    about = "Every stratum, from the input at the top to the output, in every probed round, of one method."
    name, title, by = "divergence", "Strata over the rounds", (quantity, method)
    heat = Figure(name, title, about, [], shape, by, frames, slider, ("z",), linear=SIGNED)
    return [heat, _profile_figure(found, groups, names, rounds, quantity, slider, height)]


def _strata_axis(names: Sequence[str]) -> dict[str, Any]:
    """An axis of strata from the input down, the same in both figures, so that their rows are level."""
    return axis(
        "", type="category", categoryorder="array", categoryarray=distinct_names(names), range=[len(names) - 0.5, -0.5]
    )


def _value_range(by_group: Sequence[Tables]) -> tuple[float, float]:
    """The smallest and largest value of all groups, so that colours mean the same in each."""
    values = [value for table in by_group for row in table.values() for value in row.values()]
    return min(values, default=0.0), max(values, default=1.0)


def _heat_trace(table: Tables, names: Sequence[str], rounds: Sequence[int], low: float, high: float) -> Trace:
    held = [at for at in rounds if at in table]
    return {
        "type": "heatmap",
        "x": held,
        "y": distinct_names(names),
        "z": [[round_digits(table[at].get(name)) for at in held] for name in names],
        "zmin": round_digits(low),
        "zmax": round_digits(high),
        "colorscale": "Viridis",
        "colorbar": {"thickness": 12, "tickformat": ".4~g", "exponentformat": "e"},
        "hovertemplate": "%{y}, round %{x}: %{z:.4g}<extra></extra>",
    }


def _profile_figure(
    found: Mapping[str, Sequence[Tables]],
    groups: Sequence[RunGroup],
    names: Sequence[str],
    rounds: Sequence[int],
    quantity: Control,
    slider: Control,
    height: int,
) -> Figure:
    base = [_strata_trace(group, names) for group in groups]
    frames = {}
    for q, by_group in enumerate(found.values()):
        for r, at in enumerate(rounds):
            rows = [table.get(at, {}) for table in by_group]
            frames[frame_key(q, r)] = [{"x": [round_digits(row.get(name)) for name in names]} for row in rows]
    shape = layout(
        axis("", tickformat=".4~g", tickangle=0, nticks=6),
        _strata_axis(names),
        height=height,
        hovermode="y unified",
        showlegend=False,
    )
    about = "The same quantity over the strata in the round that the slider shows, a line for each method."
    name, by = "divergence-profile", (quantity, slider)
    return Figure(name, "Profile", about, base, shape, by, frames, log=("xaxis",), linear=SIGNED)


def _strata_trace(group: RunGroup, names: Sequence[str]) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape(group.label),
        "y": distinct_names(names),
        "line": {"color": group.colour, "width": 2, "dash": group.dash},
        "marker": {"color": group.colour, "size": 5},
        "hovertemplate": "%{x:.4g}",
        "legendgroup": f"line{group.index}",
        "meta": {"line": group.index},
    }


def traces_over_rounds(
    groups: Sequence[RunGroup],
    probe: str,
    value: Callable[[Any], Any],
    form: str,
    suffix: str = "",
    dash: str | None = None,
) -> list[Trace]:
    """A number that a probe found, over the rounds, thinned, with its range over seeds."""
    traces: list[Trace] = []
    for group in groups:
        rounds = rounds_in([run.series(probe) for run in group.runs])
        points = probe_curve(group, probe, value, rounds)
        if points:
            traces += [
                *band_traces(group, points),
                line_trace(group, points, form, name=group.label + suffix, dash=dash),
            ]
    return traces


def gradnorm(groups: Sequence[RunGroup]) -> list[Figure]:
    """How gradients jump where a client goes on from the averaged model instead of its own."""
    held = [group for group in groups if any(run.series("gradnorm") for run in group.runs)]
    if not held:
        return []
    alone = [lists_by_stratum(group, "gradnorm", "alone") for group in held]
    names = model_order(alone, strata_of(held))
    chosen = Control("gradnorm-stratum", "Stratum", ("all strata", *names), whole=True)
    slider = Control.rounds("gradnorm-round", rounds_in(alone, MOST_TRACES))
    return [_spike_figure(held, names, chosen), _step_figure(held, names, chosen, slider)]


def lists_by_stratum(group: RunGroup, probe: str, part: str) -> dict[int, dict[str, Any]]:
    """Round → {stratum: what was found}, of the run that is shown for the probe."""
    found = {
        at: what.get(part) for at, what in group.run_with(probe).series(probe).items() if isinstance(what, Mapping)
    }
    return {at: dict(table) for at, table in found.items() if isinstance(table, Mapping) and table}


def _norms(table: Any, stratum: str | None, steps: int | None = None) -> list[float]:
    """Norms step by step, of one stratum or of all: ‖g‖ = √Σ‖g_L‖²; of the first steps only, if a number is given."""
    if not isinstance(table, Mapping):
        return []
    wanted = list(table.values()) if stratum is None else [table.get(stratum)]
    rows = [finite_numbers(row[:steps]) for row in wanted if isinstance(row, list)]
    return [math.sqrt(sum(norm**2 for norm in step)) for step in zip(*rows, strict=False)] if rows else []


def _norm_ratio(stratum: str | None, found: Any) -> float | None:
    """The first gradient's norm from the averaged model over that from the client's own."""
    if not isinstance(found, Mapping):
        return None
    averaged, alone = _norms(found.get("averaged"), stratum, 1), _norms(found.get("alone"), stratum, 1)
    return averaged[0] / alone[0] if averaged and alone and alone[0] > 0 else None


def _spike_figure(groups: Sequence[RunGroup], names: Sequence[str], chosen: Control) -> Figure:
    frames = {}
    for s, stratum in enumerate([None, *names]):
        frames[frame_key(s)] = traces_over_rounds(groups, "gradnorm", partial(_norm_ratio, stratum), ".3~g")
    shape = layout(
        rounds_axis(),
        axis("averaged ÷ alone", tickformat=".4~g"),
        hovermode="x unified",
        shapes=[level_line(1)],
    )
    about = (
        "The norm of the first gradient after averaging, over what it is, in that round, for a client that goes on "
        "alone. Far above 1 the averaged layers do not fit each other."
    )
    if any(len(run.series("gradnorm")) > MOST_ROUNDS for group in groups for run in group.runs):
        about += " Some rounds are left out."
    return Figure("gradnorm-spike", "The jump at averaging", about, [], shape, (chosen,), frames, log=("yaxis",))


def level_line(y: float) -> dict[str, Any]:
    """A faint horizontal line across a figure."""
    ends = {"x0": 0, "x1": 1, "xref": "paper", "y0": y, "y1": y, "yref": "y"}
    return {"type": "line", **ends, "line": {"width": 1, "dash": "dot", "color": "#8a929c"}}


def _step_figure(groups: Sequence[RunGroup], names: Sequence[str], chosen: Control, slider: Control) -> Figure:
    base = [
        trace
        for group in groups
        for trace in (*leave_out_of_legend([_norm_trace(group, "alone")], groups), _norm_trace(group, "averaged"))
    ]
    frames = {}
    found = [group.run_with("gradnorm").series("gradnorm") for group in groups]
    for s, stratum in enumerate([None, *names]):
        for r, at in enumerate(slider.values):
            rows = [series.get(int(at)) or {} for series in found]
            norms = [_norms(row.get(part), stratum) for row in rows for part in ("alone", "averaged")]
            frames[frame_key(s, r)] = [{"y": [round_digits(norm) for norm in steps]} for steps in norms]
    shape = layout(axis("local step", tickformat="d"), axis("gradient norm", tickformat=".4~g"), hovermode="x unified")
    about = (
        "Gradient norms of one client over the same batches: from its own local model (dotted) and from the averaged "
        "one (solid), in the round that the slider shows."
    )
    return Figure("gradnorm", "Step by step", about, base, shape, (chosen, slider), frames, log=("yaxis",))


def _norm_trace(group: RunGroup, part: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{escape(group.label)}, {part}",
        "x0": 0,
        "dx": 1,
        "line": {"color": group.colour, "width": 2, "dash": "solid" if part == "averaged" else "dot"},
        "marker": {"color": group.colour, "size": 5},
        "hovertemplate": "%{y:.4g}",
        "legendgroup": f"line{group.index}",
        "meta": {"line": group.index},
    }


def leave_out_of_legend(traces: Sequence[Trace], groups: Sequence[RunGroup]) -> list[Trace]:
    """Traces of a second kind, left out of a legend of several methods, which names each method once."""
    return [{**trace, "showlegend": len(groups) == 1 and trace.get("showlegend", True)} for trace in traces]


def statistics(groups: Sequence[RunGroup]) -> list[Figure]:
    """What running statistics cost: accuracy with them and with each batch's own, and how far clients' are apart."""
    data = traces_over_rounds(groups, "statistics", _part_reader("running"), PERCENT, ", running")
    data += leave_out_of_legend(
        traces_over_rounds(groups, "statistics", _part_reader("batch"), PERCENT, ", batch's own", "dot"), groups
    )
    if not data:
        return []
    y = axis("test accuracy", tickformat=PERCENT)
    about = "Accuracy of the averaged model with its running statistics (solid), and with each batch's own (dotted)."
    shape = layout(rounds_axis(), y, hovermode="x unified")
    found = [Figure("statistics", "With running statistics, and without", about, data, shape)]
    by_group = [probe_tables(group, "statistics", "spread") for group in groups]
    names = model_order(by_group, strata_of(groups))
    if names:
        found.append(_statistics_figure(groups, by_group, names))
    return found


def _part_reader(name: str) -> Callable[[Any], Any]:
    return lambda found: found.get(name) if isinstance(found, Mapping) else None


def _statistics_figure(groups: Sequence[RunGroup], by_group: Sequence[Tables], names: Sequence[str]) -> Figure:
    slider = Control.rounds("statistics-round", rounds_in(by_group))
    about = "How far clients' running means are from the average, in running standard deviations, over the strata."
    name, title = "statistics-spread", "How far clients' statistics are apart"
    return over_depth(name, title, about, groups, by_group, names, slider, "deviations", ("yaxis",))


def over_depth(
    name: str,
    title: str,
    about: str,
    groups: Sequence[RunGroup],
    by_group: Sequence[Tables],
    names: Sequence[str],
    slider: Control,
    unit: str,
    log: tuple[str, ...] = (),
) -> Figure:
    """One number per stratum or stage in the slider's round, one line per method."""
    base = []
    for group in groups:
        trace = _strata_trace(group, names)
        base.append({**trace, "x": trace["y"], "hovertemplate": "%{y:.4g}"})
        del base[-1]["y"]
    frames = {}
    for r, at in enumerate(slider.values):
        rows = [table.get(int(at), {}) for table in by_group]
        frames[frame_key(r)] = [{"y": [round_digits(row.get(part)) for part in names]} for row in rows]
    shape = layout(axis("", type="category"), axis(unit, tickformat=".4~g"), hovermode="x unified")
    return Figure(name, title, about, base, shape, (slider,), frames, log=log)


def crossing(groups: Sequence[RunGroup]) -> list[Figure]:
    """InCo's coefficients of every layer over the rounds, and what they made of its step."""
    signs = {
        "theta": "θ",
        "beta": "β",
        "cosine": "cos(g₀, g)",
        "length": "step’s length, of g’s",
        "kept": "cos(step, g)",
    }
    signs = {part: text for part, text in signs.items() if any(probe_tables(g, "crossing", part) for g in groups)}
    held = [group for group in groups if any(probe_tables(group, "crossing", part) for part in signs)]
    if not held:
        return []
    quantity, method = (
        Control("crossing-sign", "Quantity", tuple(signs.values())),
        method_control("crossing-method", held),
    )
    frames = {}
    for q, part in enumerate(signs):
        for m, group in enumerate(held):
            frames[frame_key(q, m)] = _layer_traces(probe_tables(group, "crossing", part))
    shape = layout(rounds_axis(), axis("", tickformat=".3~g"), hovermode="x unified", showlegend=True)
    about = (
        "Over the rounds: θ, how much of a lower layer's change g₀ comes to a layer's own, g; β, their product, and "
        "their cosine; and the step that is taken, against g: its length and its direction."
    )
    return [Figure("crossing", "Crossed layers", about, [], shape, (quantity, method), frames)]


def _layer_traces(table: Tables) -> list[Trace]:
    """One line per layer, from low to high."""
    names = model_order([table], [])
    last = max(len(names) - 1, 1)
    colours = [DEPTH[round(at * (len(DEPTH) - 1) / last)] for at in range(len(names))]
    rounds = thin_rounds(list(table), MOST_ROUNDS)
    return [
        {
            "type": "scatter",
            "mode": "lines" if len(rounds) > 1 else "markers",
            "name": escape(name),
            "x": rounds,
            "y": [round_digits(table[at].get(name)) for at in rounds],
            "line": {"color": colour, "width": 1.6},
            "marker": {"color": colour},
            "hovertemplate": "%{y:.4g}",
        }
        for name, colour in zip(names, colours, strict=True)
    ]


def stage_tables(
    groups: Sequence[RunGroup], probe: str, *path: str
) -> tuple[list[dict[int, dict[str, float]]], list[str]]:
    """A table per group, and the stages in order."""
    by_group = [probe_tables(group, probe, *path) for group in groups]
    return by_group, model_order(by_group, stages_of(groups))


def round_entry(value: Any) -> float | None:
    """An entry of a matrix, rounded to three digits after the point; None for no number."""
    found = finite_number(value)
    return None if found is None else round(found, 3)
