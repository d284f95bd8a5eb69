"""Figures of what probes found in features and outputs: CKA, drift, forgetting and calibration, t-SNE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstrata.diagnosis.evidence import finite_number
from fedstrata.report.figures import PERCENT, Control, Figure, Trace, axis, class_names, frame_key, layout, rounds_axis
from fedstrata.report.formatting import escape, round_digits
from fedstrata.report.run_groups import PALETTE, RunGroup, model_order, stages_of
from fedstrata.report.stratum_figures import (
    MOST_ROUNDS,
    leave_out_of_legend,
    method_control,
    over_depth,
    round_entry,
    rounds_in,
    stage_tables,
    traces_over_rounds,
)

NUMBERS = 150_000
"""How many numbers all CKA matrices together may have; beyond that, some rounds are left out."""
MAGMA = ((0, "#000004"), (0.25, "#51127c"), (0.5, "#b73779"), (0.75, "#fc8961"), (1, "#fcfdbf"))
CLASSES = (*(light for light, _ in PALETTE), "#f0c808", "#8c564b", "#17becf")


def cka(groups: Sequence[RunGroup]) -> list[Figure]:
    """How alike clients' features are, over the depth and client by client."""
    by_group, stages = stage_tables(groups, "cka", "mean")
    held = [group for group in groups if any(_matrices(what) for what in group.run_with("cka").series("cka").values())]
    rows = [{row["round"]: row for row in group.run_with("cka").probes if _matrices(row.get("cka"))} for group in held]
    slider = Control.rounds("cka-round", rounds_in([*by_group, *rows], _round_limit(rows)))
    found = []
    if stages:
        about = "CKA between clients' local models, mean over pairs, at every stage, a line for each method."
        found.append(over_depth("cka-depth", "Over the depth", about, groups, by_group, stages, slider, "CKA"))
    return [*found, *([_pairs_figure(held, rows, slider)] if held else [])]


def _matrices(found: Any) -> Mapping[str, Any]:
    matrices = found.get("matrix") if isinstance(found, Mapping) else None
    return matrices if isinstance(matrices, Mapping) else {}


def _round_limit(rows: Sequence[Mapping[int, Any]]) -> int:
    """How many rounds the page has room for."""
    every = [_matrices(row["cka"]).values() for table in rows for row in table.values()]
    largest = max((sum(len(matrix) ** 2 for matrix in matrices) for matrices in every), default=0)
    return max(2, min(MOST_ROUNDS, NUMBERS // max(largest * len(rows), 1)))


def _pairs_figure(groups: Sequence[RunGroup], rows: Sequence[Mapping[int, Any]], slider: Control) -> Figure:
    found = [{at: _matrices(row["cka"]) for at, row in table.items()} for table in rows]
    stages = model_order(found, stages_of(groups))
    method = method_control("cka-method", groups)
    columns = min(4, len(stages))
    frames = {}
    for m, table in enumerate(rows):
        for r, at in enumerate(slider.values):
            if int(at) in table:
                frames[frame_key(m, r)] = [_square_patch(table[int(at)], stage) for stage in stages]
    base = [_square_trace(at) for at in range(len(stages))]
    shape = _panel_layout(stages, columns)
    about = "CKA of every two clients that took part, a square for each stage: 1 where features are the same."
    if any(str(at) not in slider.values for table in rows for at in table):
        about += " Matrices are large, so that some rounds are left out."
    name, title = "cka", "Client by client"
    return Figure(name, title, about, base, shape, (method, slider), frames, titles=tuple(stages), columns=columns)


def _square_patch(row: Mapping[str, Any], stage: str) -> Trace:
    matrix = _matrices(row["cka"]).get(stage) or []
    clients = [f"client {escape(client)}" for client in row.get("clients", [])][: len(matrix)]
    return {"z": [[round_entry(value) for value in line] for line in matrix], "x": clients, "y": clients}


def _square_trace(at: int) -> Trace:
    place = "" if not at else str(at + 1)
    return {
        "type": "heatmap",
        "zmin": 0,
        "zmax": 1,
        "colorscale": [list(stop) for stop in MAGMA],
        "showscale": not at,
        "colorbar": {"thickness": 12, "title": {"text": "CKA"}},
        "xaxis": f"x{place}",
        "yaxis": f"y{place}",
        "hovertemplate": "%{x} and %{y}: %{z:.3f}<extra></extra>",
    }


def _panel_layout(titles: Sequence[str], columns: int) -> dict[str, Any]:
    """Panels in rows, each with its title above."""
    rows = -(-len(titles) // columns)
    wide, high, gap = 1 / columns, 1 / rows, 34 / (190 * rows)
    shape: dict[str, Any] = {"height": 70 + 190 * rows, "annotations": [], "margin": {"t": 30, "l": 8, "b": 8}}
    for at, title in enumerate(titles):
        row, column = divmod(at, columns)
        place = "" if not at else str(at + 1)
        left, top = column * wide, 1 - row * high
        bare = {"showticklabels": False, "ticks": "", "showgrid": False, "zeroline": False, "type": "category"}
        shape[f"xaxis{place}"] = {**bare, "domain": [left, left + 0.92 * wide], "anchor": f"y{place}"}
        bottom = top - high + (gap if rows > 1 else 0)
        shape[f"yaxis{place}"] = {**bare, "domain": [bottom, top], "anchor": f"x{place}", "autorange": "reversed"}
        shape["annotations"].append(
            {
                "text": escape(title),
                "x": left,
                "y": top,
                "xref": "paper",
                "yref": "paper",
                "xanchor": "left",
                "yanchor": "bottom",
                "showarrow": False,
            }
        )
    return shape


def drift(groups: Sequence[RunGroup]) -> list[Figure]:
    """How far neurons bound to a class move in local training, for classes that a client holds and lacks."""
    held, _ = stage_tables(groups, "drift", "held")
    missing, _ = stage_tables(groups, "drift", "missing")
    stages = model_order([*held, *missing], stages_of(groups))
    if not stages:
        return []
    slider = Control.rounds("drift-round", rounds_in([*held, *missing]))
    about = (
        "Relative change of the activation of neurons bound to a class, on that class's examples: classes that the "
        "client holds (solid) and classes that it lacks (dotted). Neurons are bound to a class if they are more active "
        "on it than on every class of the other kind."
    )
    name, title = "drift", "Drift of neurons"
    one = over_depth(name, title, about, groups, held, stages, slider, "relative change")
    two = over_depth(name, title, about, groups, missing, stages, slider, "")
    base = [_relabel_trace(t, "held") for t in one.data] + leave_out_of_legend(
        [_relabel_trace(t, "missing", "dot") for t in two.data], groups
    )
    frames = {at: patches + two.frames[at] for at, patches in one.frames.items()}
    return [Figure(name, title, about, base, one.layout, (slider,), frames)]  # a change may be negative: no logarithm


def _relabel_trace(trace: Trace, what: str, dash: str = "solid") -> Trace:
    return {**trace, "name": f"{trace['name']}, {what}", "line": {**trace["line"], "dash": dash}}


def calibration(groups: Sequence[RunGroup]) -> list[Figure]:
    """Forgetting over the rounds, and the accuracy of every class before and after local training."""
    held = [group for group in groups if group.run_with("calibration").series("calibration")]
    if not held:
        return []
    found = []
    data = traces_over_rounds(held, "calibration", lambda c: c.get("forgetting"), PERCENT)
    if data:
        about = "Mean fall of accuracy, by local training, on the classes that a client lacks, over the rounds."
        shape = layout(rounds_axis(), axis("forgetting", tickformat=PERCENT), hovermode="x unified")
        found.append(Figure("forgetting", "Forgetting", about, data, shape))
    return [*found, _classes_figure(held)]


def _classes_figure(groups: Sequence[RunGroup]) -> Figure:
    series = [group.run_with("calibration").series("calibration") for group in groups]
    slider, method = (
        Control.rounds("calibration-round", rounds_in(series)),
        method_control("calibration-method", groups),
    )
    base = [_bar_trace("before local training", PALETTE[0][0]), _bar_trace("after, mean over clients", PALETTE[1][0])]
    frames = {}
    for m, (group, table) in enumerate(zip(groups, series, strict=True)):
        for r, at in enumerate(slider.values):
            row = table.get(int(at)) or {}
            both = [row.get(part) or [] for part in ("before", "after")]
            frames[frame_key(m, r)] = [
                {"x": class_names(group.shown_run, len(y)), "y": [round_digits(v) for v in y]} for y in both
            ]
    about = "Accuracy of every class, of the global model and of clients' models after local training, in one round."
    y = axis("accuracy", tickformat=PERCENT, range=[0, 1])
    shape = layout(axis("class", type="category"), y, barmode="group", bargap=0.25, showlegend=True)
    return Figure("calibration", "Class by class", about, base, shape, (method, slider), frames)


def _bar_trace(name: str, colour: str) -> Trace:
    return {"type": "bar", "name": name, "marker": {"color": colour}, "hovertemplate": "%{y:.2%}"}


def embedding(groups: Sequence[RunGroup]) -> list[Figure]:
    """t-SNE of features, coloured by class or by client."""
    held = [(group, found) for group in groups if _has_points(found := group.run_with("embedding").latest("embedding"))]
    if not held:
        return []
    method = method_control("embedding-method", [group for group, _ in held])
    colour = Control("embedding-colour", "Colour", ("by class", "by client"))
    frames = {}
    for m, (group, found) in enumerate(held):
        frames[frame_key(m, 0)] = _cloud_traces(found, found.get("labels"), _class_namer(group))
        frames[frame_key(m, 1)] = _cloud_traces(found, found.get("clients"), "client {}".format)
    bare = {"showticklabels": False, "ticks": "", "zeroline": False, "showgrid": False}
    shape = layout(
        axis("", **bare), axis("", scaleanchor="x", **bare), height=520, hovermode="closest", showlegend=True
    )
    about = "Features of clients' models on examples, laid out by t-SNE: near points have like features."
    return [Figure("embedding", "t-SNE of features", about, [], shape, (method, colour), frames)]


def _has_points(found: Any) -> bool:
    return isinstance(found, Mapping) and isinstance(found.get("points"), list) and bool(found["points"])


def _class_namer(group: RunGroup) -> Any:
    names = group.shown_run.facts.get("class_names") or []
    return lambda c: str(names[c]) if isinstance(c, int) and 0 <= c < len(names) else str(c)


def _cloud_traces(found: Mapping[str, Any], kinds: Any, name: Any) -> list[Trace]:
    """One trace per class or client."""
    groups: dict[Any, list[tuple[float | None, float | None]]] = {}
    for point, kind in zip(found["points"], kinds or [0] * len(found["points"]), strict=False):
        groups.setdefault(kind, []).append((round_digits(point[0]), round_digits(point[1])))
    shapes = ("circle", "diamond", "square", "cross")
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": escape(name(kind)),
            "x": [x for x, _ in groups[kind]],
            "y": [y for _, y in groups[kind]],
            "marker": {
                "size": 6,
                "opacity": 0.8,
                "color": CLASSES[at % len(CLASSES)],
                "symbol": shapes[at // len(CLASSES) % len(shapes)],
            },
            "hovertemplate": "%{fullData.name}<extra></extra>",
        }
        for at, kind in enumerate(
            sorted(groups, key=lambda k: (finite_number(k) is None, finite_number(k) or 0, str(k)))
        )
    ]
