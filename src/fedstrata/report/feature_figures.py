"""Figures of what probes found in features and outputs: CKA, drift, forgetting and calibration, t-SNE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstrata.report.figures import PERCENT, Control, Figure, Trace, axis, key, layout, rounds_axis
from fedstrata.report.formatting import distinct, number, rounded, text
from fedstrata.report.run_groups import PALETTE, Line, order, stages_of
from fedstrata.report.stratum_figures import (
    MOST_ROUNDS,
    lines_over_rounds,
    methods,
    over_depth,
    plain,
    rounds_in,
    second,
    stage_tables,
)

NUMBERS = 150_000
"""Of all CKA matrices together; beyond, some rounds are left out."""
MAGMA = ((0, "#000004"), (0.25, "#51127c"), (0.5, "#b73779"), (0.75, "#fc8961"), (1, "#fcfdbf"))
CLASSES = (*(light for light, _ in PALETTE), "#f0c808", "#8c564b", "#17becf")


def cka(lines: Sequence[Line]) -> list[Figure]:
    """How alike clients' features are, over the depth and client by client."""
    by_line, stages = stage_tables(lines, "cka", "mean")
    held = [line for line in lines if any(_matrices(what) for what in line.seen("cka").series("cka").values())]
    rows = [{row["round"]: row for row in line.seen("cka").probes if _matrices(row.get("cka"))} for line in held]
    slider = Control.rounds("cka-round", rounds_in([*by_line, *rows], _limit(rows)))
    found = []
    if stages:
        about = "CKA between clients' local models, mean over pairs, at every stage, a line for each method."
        found.append(over_depth("cka-depth", "Over the depth", about, lines, by_line, stages, slider, "CKA"))
    return [*found, *([_pairs(held, rows, slider)] if held else [])]


def _matrices(found: Any) -> Mapping[str, Any]:
    matrices = found.get("matrix") if isinstance(found, Mapping) else None
    return matrices if isinstance(matrices, Mapping) else {}


def _limit(rows: Sequence[Mapping[int, Any]]) -> int:
    """How many rounds there is room for."""
    every = [_matrices(row["cka"]).values() for table in rows for row in table.values()]
    largest = max((sum(len(matrix) ** 2 for matrix in matrices) for matrices in every), default=0)
    return max(2, min(MOST_ROUNDS, NUMBERS // max(largest * len(rows), 1)))


def _pairs(lines: Sequence[Line], rows: Sequence[Mapping[int, Any]], slider: Control) -> Figure:
    found = [{at: _matrices(row["cka"]) for at, row in table.items()} for table in rows]
    stages = order(found, stages_of(lines))
    method = methods("cka-method", lines)
    columns = min(4, len(stages))
    frames = {}
    for m, table in enumerate(rows):
        for r, at in enumerate(slider.values):
            if int(at) in table:
                frames[key(m, r)] = [_square(table[int(at)], stage) for stage in stages]
    base = [_square_base(at) for at in range(len(stages))]
    shape = _grid(stages, columns)
    about = "CKA of every two clients that took part, a square for each stage: 1 where features are the same."
    if any(str(at) not in slider.values for table in rows for at in table):
        about += " Matrices are large, so that some rounds are left out."
    name, title = "cka", "Client by client"
    return Figure(name, title, about, base, shape, (method, slider), frames, titles=tuple(stages), columns=columns)


def _square(row: Mapping[str, Any], stage: str) -> Trace:
    matrix = _matrices(row["cka"]).get(stage) or []
    clients = [f"client {text(client)}" for client in row.get("clients", [])][: len(matrix)]
    return {"z": [[plain(value) for value in line] for line in matrix], "x": clients, "y": clients}


def _square_base(at: int) -> Trace:
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


def _grid(titles: Sequence[str], columns: int) -> dict[str, Any]:
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
                "text": text(title),
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


def drift(lines: Sequence[Line]) -> list[Figure]:
    """How far neurons bound to a class move in local training, for classes that a client holds and lacks."""
    held, _ = stage_tables(lines, "drift", "held")
    missing, _ = stage_tables(lines, "drift", "missing")
    stages = order([*held, *missing], stages_of(lines))
    if not stages:
        return []
    slider = Control.rounds("drift-round", rounds_in([*held, *missing]))
    about = (
        "Relative change of the activation of neurons bound to a class, on that class's examples: classes that the "
        "client holds (solid) and classes that it lacks (dotted). Neurons are bound to a class if they are more active "
        "on it than on every class of the other kind."
    )
    name, title = "drift", "Drift of neurons"
    one = over_depth(name, title, about, lines, held, stages, slider, "relative change")
    two = over_depth(name, title, about, lines, missing, stages, slider, "")
    base = [_told(t, "held") for t in one.data] + second([_told(t, "missing", "dot") for t in two.data], lines)
    frames = {at: patches + two.frames[at] for at, patches in one.frames.items()}
    return [Figure(name, title, about, base, one.layout, (slider,), frames)]  # a change may be negative: no logarithm


def _told(trace: Trace, what: str, dash: str = "solid") -> Trace:
    return {**trace, "name": f"{trace['name']}, {what}", "line": {**trace["line"], "dash": dash}}


def calibration(lines: Sequence[Line]) -> list[Figure]:
    """Forgetting over the rounds, and the accuracy of every class before and after local training."""
    held = [line for line in lines if line.seen("calibration").series("calibration")]
    if not held:
        return []
    found = []
    data = lines_over_rounds(held, "calibration", lambda c: c.get("forgetting"), PERCENT)
    if data:
        about = "Mean fall of accuracy, by local training, on the classes that a client lacks, over the rounds."
        shape = layout(rounds_axis(), axis("forgetting", tickformat=PERCENT), hovermode="x unified")
        found.append(Figure("forgetting", "Forgetting", about, data, shape))
    return [*found, _classes(held)]


def _classes(lines: Sequence[Line]) -> Figure:
    series = [line.seen("calibration").series("calibration") for line in lines]
    slider, method = Control.rounds("calibration-round", rounds_in(series)), methods("calibration-method", lines)
    base = [_bars("before local training", PALETTE[0][0]), _bars("after, mean over clients", PALETTE[1][0])]
    frames = {}
    for m, (line, table) in enumerate(zip(lines, series, strict=True)):
        for r, at in enumerate(slider.values):
            row = table.get(int(at)) or {}
            both = [row.get(part) or [] for part in ("before", "after")]
            frames[key(m, r)] = [{"x": _named(line, len(y)), "y": [rounded(v) for v in y]} for y in both]
    about = "Accuracy of every class, of the global model and of clients' models after local training, in one round."
    y = axis("accuracy", tickformat=PERCENT, range=[0, 1])
    shape = layout(axis("class", type="category"), y, barmode="group", bargap=0.25, showlegend=True)
    return Figure("calibration", "Class by class", about, base, shape, (method, slider), frames)


def _named(line: Line, count: int) -> list[str]:
    names = line.first.facts.get("class_names")
    return distinct(names if isinstance(names, list) and len(names) == count else range(count))


def _bars(name: str, colour: str) -> Trace:
    return {"type": "bar", "name": name, "marker": {"color": colour}, "hovertemplate": "%{y:.2%}"}


def embedding(lines: Sequence[Line]) -> list[Figure]:
    """t-SNE of features, coloured by class or by client."""
    held = [(line, found) for line in lines if _points(found := line.seen("embedding").latest("embedding"))]
    if not held:
        return []
    method = methods("embedding-method", [line for line, _ in held])
    colour = Control("embedding-colour", "Colour", ("by class", "by client"))
    frames = {}
    for m, (line, found) in enumerate(held):
        frames[key(m, 0)] = _clouds(found, found.get("labels"), _class_name(line))
        frames[key(m, 1)] = _clouds(found, found.get("clients"), "client {}".format)
    bare = {"showticklabels": False, "ticks": "", "zeroline": False, "showgrid": False}
    shape = layout(
        axis("", **bare), axis("", scaleanchor="x", **bare), height=520, hovermode="closest", showlegend=True
    )
    about = "Features of clients' models on examples, laid out by t-SNE: near points have like features."
    return [Figure("embedding", "t-SNE of features", about, [], shape, (method, colour), frames)]


def _points(found: Any) -> bool:
    return isinstance(found, Mapping) and isinstance(found.get("points"), list) and bool(found["points"])


def _class_name(line: Line) -> Any:
    names = line.first.facts.get("class_names") or []
    return lambda c: str(names[c]) if isinstance(c, int) and 0 <= c < len(names) else str(c)


def _clouds(found: Mapping[str, Any], kinds: Any, name: Any) -> list[Trace]:
    """A trace for each class or client."""
    groups: dict[Any, list[tuple[float | None, float | None]]] = {}
    for point, kind in zip(found["points"], kinds or [0] * len(found["points"]), strict=False):
        groups.setdefault(kind, []).append((rounded(point[0]), rounded(point[1])))
    shapes = ("circle", "diamond", "square", "cross")
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": text(name(kind)),
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
        for at, kind in enumerate(sorted(groups, key=lambda k: (number(k) is None, number(k) or 0, str(k))))
    ]
