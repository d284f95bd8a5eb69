"""Figures of the final model on the test set: who is taken for whom, how sure it is, what it predicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedstrata.report.figures import (
    BLUES,
    PERCENT,
    Control,
    Figure,
    Trace,
    axis,
    class_names,
    colour_scale,
    frame_key,
    layout,
)
from fedstrata.report.run_groups import RunGroup
from fedstrata.runs.reader import SavedRun


def confusion(groups: Sequence[RunGroup]) -> list[Figure]:
    """How often each class is taken for each: counts, coloured by the share of the true class."""
    held = _with(groups, "confusion", _is_square)
    if not held:
        return []
    classes = max(len(run.evaluation["confusion"]) for _, run in held)
    about = "True classes in rows, predicted ones in columns; colours show the share of a true class."
    height = min(160 + 24 * classes, 760)
    shape = layout(
        axis("predicted", type="category"), axis("true", type="category", autorange="reversed"), height=height
    )
    return [_chosen("confusion", "Who is taken for whom", about, held, _confusion_traces, shape, "classes")]


def _is_square(found: Any) -> bool:
    return bool(found) and all(len(row) == len(found) for row in found)


def _confusion_traces(group: RunGroup, run: SavedRun) -> list[Trace]:
    counts = run.evaluation["confusion"]
    names = class_names(run, len(counts))
    shares = [[count / max(sum(row), 1) for count in row] for row in counts]
    return [
        {
            "type": "heatmap",
            "x": names,
            "y": names,
            "z": shares,
            "customdata": counts,
            "colorscale": colour_scale(BLUES),
            "zmin": 0,
            "zmax": 1,
            "colorbar": {"tickformat": ".0%"},
            "hovertemplate": "true %{y}, predicted %{x}: %{customdata} (%{z:.1%})<extra></extra>",
        }
    ]


def class_scores(groups: Sequence[RunGroup]) -> list[Figure]:
    """Precision, recall and F1 of each class."""
    held = _with(groups, "confusion", _is_square)
    if not held:
        return []
    about = "Of each class: the share of its predictions that are right, the share of it that is found, and F1."
    shape = layout(axis("class", type="category"), axis("", tickformat=".0%", range=[0, 1]), barmode="group")
    shape["showlegend"] = True
    return [_chosen("class-scores", "Class by class", about, held, _class_traces, shape, "classes")]


def _class_traces(group: RunGroup, run: SavedRun) -> list[Trace]:
    counts = run.evaluation["confusion"]
    names = class_names(run, len(counts))
    right = [row[at] for at, row in enumerate(counts)]
    true, made = [sum(row) for row in counts], [sum(column) for column in zip(*counts, strict=True)]
    scores = {
        "precision": [_ratio(r, m) for r, m in zip(right, made, strict=True)],
        "recall": [_ratio(r, t) for r, t in zip(right, true, strict=True)],
        "F1": [_ratio(2 * r, t + m) for r, t, m in zip(right, true, made, strict=True)],
    }
    return [
        {"type": "bar", "name": name, "x": names, "y": values, "hovertemplate": f"{name} %{{y:{PERCENT}}}"}
        for name, values in scores.items()
    ]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def calibration(groups: Sequence[RunGroup]) -> list[Figure]:
    """Reliability: how often answers are right, by how sure the model is."""
    held = _with(groups, "calibration", lambda found: bool(found["count"]))
    if not held:
        return []
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "as sure as right",
            "x": [0, 1],
            "y": [0, 1],
            "line": {"dash": "dot", "width": 1, "color": "#7a8794"},
            "hoverinfo": "skip",
        }
    ]
    traces += [_reliability_trace(group, run) for group, run in held]
    errors = "; ".join(f"{group.label} {run.evaluation['calibration']['ece']:.3f}" for group, run in held)
    about = f"How often an answer is right, by the model's confidence in it. Expected calibration error: {errors}."
    x, y = axis("confidence", tickformat=".0%", range=[0, 1]), axis("right", tickformat=".0%", range=[0, 1])
    return [Figure("reliability", "How sure it may be", about, traces, layout(x, y, hovermode="closest"))]


def _reliability_trace(group: RunGroup, run: SavedRun) -> Trace:
    found = run.evaluation["calibration"]
    points = zip(found["confidence"], found["right"], found["count"], strict=False)
    there = [(sure, right, count) for sure, right, count in points if sure is not None and right is not None]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": group.label,
        "x": [sure for sure, _, _ in there],
        "y": [right for _, right, _ in there],
        "customdata": [count for _, _, count in there],
        "line": {"color": group.colour, "width": 2, "dash": group.dash},
        "marker": {"color": group.colour},
        "hovertemplate": "confidence %{x:.1%}, right %{y:.1%}, %{customdata} examples",
        "legendgroup": f"line{group.index}",
        "meta": {"line": group.index},
    }


def predictions(groups: Sequence[RunGroup]) -> list[Figure]:
    """Predicted numbers against true ones."""
    held = _with(groups, "predictions", lambda found: bool(found["true"]))
    if not held:
        return []
    numbers = [v for _, run in held for name in ("true", "made") for v in run.evaluation["predictions"][name]]
    ends = [min(numbers), max(numbers)]
    line = {"type": "scatter", "mode": "lines", "name": "right", "x": ends, "y": ends, "hoverinfo": "skip"}
    traces: list[Trace] = [{**line, "line": {"dash": "dot", "width": 1, "color": "#7a8794"}}]
    for group, run in held:
        found = run.evaluation["predictions"]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": group.label,
                "x": found["true"],
                "y": found["made"],
                "marker": {"color": group.colour, "size": 6, "opacity": 0.6},
                "hovertemplate": "true %{x:.4~g}, predicted %{y:.4~g}",
                "legendgroup": f"line{group.index}",
                "meta": {"line": group.index},
            }
        )
    about = "Predicted against true, on the test set; on the dotted line a prediction is right."
    return [Figure("predictions", "Predicted against true", about, traces, layout(axis("true"), axis("predicted")))]


def masks(groups: Sequence[RunGroup]) -> list[Figure]:
    """True and predicted masks of a few test examples."""
    held = _with(groups, "masks", lambda found: bool(found["true"]))
    if not held:
        return []
    about = "The first test examples: true classes on the left, predicted ones on the right, pixel by pixel."
    shape = layout(axis("", visible=False), axis("", visible=False, autorange="reversed", scaleanchor="x"), height=420)
    return [_chosen("masks", "Masks", about, held, _mask_traces, shape)]


def _mask_traces(group: RunGroup, run: SavedRun) -> list[Trace]:
    """All examples in one picture, below each other, with a gap around each mask."""
    found = run.evaluation["masks"]
    rows: list[list[Any]] = []
    for true, made in zip(found["true"], found["made"], strict=False):
        rows += [[*left, None, *right] for left, right in zip(true, made, strict=False)]
        rows.append([])
    wide = max(map(len, rows))
    return [
        {
            "type": "heatmap",
            "x": list(range(wide)),
            "y": list(range(len(rows))),
            "z": [row + [None] * (wide - len(row)) for row in rows],
            "colorscale": colour_scale(BLUES),
            "hovertemplate": "class %{z}<extra></extra>",
            "colorbar": {"title": {"text": "class"}},
        }
    ]


def _with(groups: Sequence[RunGroup], part: str, shows: Callable[[Any], bool]) -> list[tuple[RunGroup, SavedRun]]:
    """The groups with a run whose evaluation has a part, and that run."""
    found = []
    for group in groups:
        run = next((run for run in group.runs if part in run.evaluation and shows(run.evaluation[part])), None)
        if run is not None:
            found.append((group, run))
    return found


def _chosen(
    name: str,
    title: str,
    about: str,
    held: Sequence[tuple[RunGroup, SavedRun]],
    traces: Callable[[RunGroup, SavedRun], list[Trace]],
    shape: dict[str, Any],
    of: str = "",
) -> Figure:
    """A figure of one method at a time; `of` names what several figures have in common, which one control serves."""
    control = Control(f"{of or name}-method", "Method", tuple(group.label for group, _ in held))
    frames = {frame_key(at): traces(group, run) for at, (group, run) in enumerate(held)}
    return Figure(name, title, about, [], shape, (control,), frames)
