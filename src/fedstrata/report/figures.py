"""Figures as plain dicts, in Plotly's form: curves over rounds, bytes and operations, and the partition.

A figure may depend on controls, such as a slider over rounds: then it has a frame with the traces of every choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fedstrata.core.text import SHARES, metric_title, time_unit
from fedstrata.diagnosis.evidence import finite_number
from fedstrata.report.formatting import distinct_names, escape, round_digits
from fedstrata.report.run_groups import (
    PALETTE,
    Places,
    Point,
    RunGroup,
    Value,
    by_bytes,
    by_flops,
    by_round,
    by_simulated,
    judged_alike,
    mean_curve,
    metrics_of,
    primary_of,
)
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.records import Record

Trace = dict[str, Any]
BAND = 0.16
"""Opacity of the band that shows a range over seeds."""
PERCENT = ".2~%"
HEIGHT = 330
"""The height of a figure that does not set its own; report.js has the same."""
BLUES = (
    (0.0, "#f1f4f8", "#222a33"),
    (0.01, "#dcefb9", "#1e3d68"),
    (0.25, "#9bd7b4", "#1f6596"),
    (0.5, "#41a8be", "#2f9cb5"),
    (0.75, "#2166a8", "#8ad1b0"),
    (1.0, "#172a6b", "#eef8c4"),
)
"""Few to many, on light and on dark backgrounds: ever further from the background, so that it reads in grey and with
any colour vision; zero has a colour of its own."""
OUTLIERS = (
    (0.0, "#f3f5f7", "#222a33"),
    (0.3, "#cfdbe6", "#3b4b5c"),
    (0.5, "#f0a04b", "#b06a22"),
    (0.75, "#c4510f", "#f0a24d"),
    (1.0, "#7a1f06", "#ffe9c4"),
)
"""Ordinary to far out, on light and on dark backgrounds: ever further from the background, so that it reads in grey and
with any colour vision, and from blue-grey to orange where a score stops to be ordinary."""


MOST_TICKS = 8
"""Rounds that are named below a heat-map, which a phone has room for."""


def colour_scale(stops: Sequence[tuple[float, str, str]]) -> list[list[Any]]:
    """The colours of a heat-map as they are on a light background; `dark_colours` has the others."""
    return [[at, light] for at, light, _ in stops]


INK = ("#1d232b", "#e6eaef")
"""The colour of text, on light and on dark backgrounds."""


@dataclass(frozen=True)
class Control:
    """What a reader may choose.

    Args:
        name: how figures refer to it.
        label: what the reader sees.
        values: the choices, as they are shown.
        slides: whether it is a slider instead of a list.
        start: the first choice, as an index into the values.
        whole: whether the first choice stands for all of them, so that a paper needs no other.
    """

    name: str
    label: str
    values: tuple[str, ...]
    slides: bool = False
    start: int = 0
    whole: bool = False

    @staticmethod
    def rounds(name: str, rounds: Sequence[int]) -> Control:
        """A slider over rounds that starts at the last."""
        return Control(name, "Round", tuple(map(str, rounds)), True, max(len(rounds) - 1, 0))


@dataclass(frozen=True)
class Figure:
    """One picture.

    Args:
        name: unique; its file is named after it.
        title: what it shows, in a few words.
        about: the same in a sentence, for those who cannot see it.
        data: traces; `meta.line` is the index of the group of runs that a trace belongs to.
        layout: axes and the like, without colours and fonts.
        by: names of the controls that it depends on.
        frames: choices, as places joined by commas → what each trace is then, over what `data` says.
        cursor: the control whose choice is marked on the axis of rounds.
        log: axes that can be logarithmic; `z` are the colours of a heat-map.
        titles: of panels, where it has several.
        columns: of panels.
        linear: choices of a control under which no axis is logarithmic.
    """

    name: str
    title: str
    about: str
    data: list[Trace]
    layout: dict[str, Any]
    by: tuple[Control, ...] = ()
    frames: dict[str, list[Trace]] = field(default_factory=dict)
    cursor: Control | None = None
    log: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()
    columns: int = 1
    linear: tuple[str, ...] = ()

    def traces(self, *places: int) -> list[Trace]:
        """The traces that are drawn when the controls are at these places."""
        if not self.by:
            return self.data
        patches = self.frames.get(",".join(map(str, places)), [])
        bare: list[Trace] = [{}] * (len(patches) - len(self.data))
        return [{**base, **patch} for base, patch in zip([*self.data, *bare], patches, strict=False)]

    def as_dict(self) -> dict[str, Any]:
        """The figure as report.js reads it."""
        return {
            "title": self.title,
            "data": self.data,
            "layout": self.layout,
            "by": [control.name for control in self.by],
            "frames": self.frames,
            "cursor": self.cursor.name if self.cursor else None,
            "log": list(self.log),
            "linear": list(self.linear),
            "columns": self.columns,
            "panels": max(len(self.titles), 1),
        }


def frame_key(*chosen: int) -> str:
    """The key of a frame: the controls' places, joined by commas."""
    return ",".join(map(str, chosen))


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with its title."""
    return {"title": {"text": title}, "automargin": True, **more}


def layout(x: dict[str, Any], y: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A layout of two axes."""
    return {"xaxis": x, "yaxis": y, **more}


def faint_colour(colour: str) -> str:
    """The same colour, translucent, for a range."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{BAND})"


def dark_colours() -> dict[str, str]:
    """A colour on a light background → what replaces it on a dark one."""
    found: dict[str, str] = {}
    for light, dark in PALETTE:
        found |= {light: dark, faint_colour(light): faint_colour(dark)}
    return found | {light: dark for _, light, dark in (*OUTLIERS, *BLUES)} | dict([INK])


def line_trace(
    group: RunGroup, points: Sequence[Point], form: str, *, name: str | None = None, dash: str | None = None
) -> Trace:
    """The trace of a group's means."""
    several = any(point.seeds > 1 for point in points)
    spread = f" (%{{customdata[1]:{form}}} – %{{customdata[2]:{form}}}, %{{customdata[3]}} seeds)" if several else ""
    return {
        "type": "scatter",
        "mode": "lines" if len(points) > 1 else "markers",
        "name": escape(name or group.label),
        "x": [round_digits(p.x, 10) for p in points],
        "y": [round_digits(p.mean, 6) for p in points],
        "customdata": [[p.round, round_digits(p.low), round_digits(p.high), p.seeds] for p in points],
        "line": {"color": group.colour, "width": 2, "dash": dash or group.dash},
        "marker": {"color": group.colour},
        "hovertemplate": f"%{{y:{form}}}{spread}",
        "legendgroup": f"line{group.index}",
        "meta": {"line": group.index},
    }


def band_traces(group: RunGroup, points: Sequence[Point]) -> list[Trace]:
    """The range over seeds, behind the means; none where there is one seed."""
    if not any(point.seeds > 1 for point in points):
        return []
    xs = [round_digits(p.x, 10) for p in points]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"{escape(group.label)}, range",
            "x": xs + xs[::-1],
            "y": [round_digits(p.high, 6) for p in points] + [round_digits(p.low, 6) for p in reversed(points)],
            "fill": "toself",
            "fillcolor": faint_colour(group.colour),
            "line": {"width": 0, "color": group.colour},
            "hoverinfo": "skip",
            "showlegend": False,
            "legendgroup": f"line{group.index}",
            "meta": {"line": group.index, "band": True},
        }
    ]


def curve_traces(groups: Sequence[RunGroup], value: Value, form: str, at: Places = by_round) -> list[Trace]:
    """The traces of all groups, bands first, so that they hide no line."""
    points = [(group, found) for group in groups if (found := mean_curve(group, value, at))]
    return [t for group, found in points for t in band_traces(group, found)] + [
        line_trace(group, p, form) for group, p in points
    ]


def rounds_axis(**more: Any) -> dict[str, Any]:
    """An axis of rounds, which are whole numbers."""
    return axis("round", tickformat="d", **more)


def cell_rounds_axis(rounds: Sequence[int]) -> dict[str, Any]:
    """An axis of rounds below the cells of a heat-map: ticks are at cells, and not between two of them."""
    step = -(-len(rounds) // MOST_TICKS)
    return rounds_axis(tickvals=list(rounds[::-1][:: max(step, 1)][::-1]))


def metrics(groups: Sequence[RunGroup]) -> list[Figure]:
    """The metric that runs are judged by over the rounds, and the task's others, one at a time."""
    primary, *others = metrics_of(groups)
    title = sentence_title(primary)
    about = f"{title} of {_whose(groups)} on the test set after every evaluated round, a line for each method."
    data = curve_traces(groups, partial(_metric, primary), metric_form(primary))
    shape = layout(rounds_axis(), metric_axis(primary), hovermode="x unified")
    return ([Figure(primary, title, about, data, shape)] if data else []) + _other_metrics(groups, others)


def _whose(groups: Sequence[RunGroup]) -> str:
    """Which models are judged on the test set: of some methods the clients' own, since the server has no whole one."""
    own = [group for group in groups if group.is_own]
    if not own:
        return "the global model"
    mean = "the clients' own models, in the mean over the clients,"
    return mean if len(own) == len(groups) else f"the global model, or of {mean} where the server has no whole one,"


def _other_metrics(groups: Sequence[RunGroup], names: Sequence[str]) -> list[Figure]:
    """The metrics that runs are not judged by, to choose from."""
    form = PERCENT if set(names) <= SHARES else ".4~f"
    found = {name: data for name in names if (data := curve_traces(groups, partial(_metric, name), form))}
    if not found:
        return []
    control = Control("metric", "Metric", tuple(metric_title(name) for name in found))
    frames = {frame_key(at): data for at, data in enumerate(found.values())}
    about = "Another of the task's metrics on the test set over the rounds, a line for each method."
    y = axis("on the test set", tickformat=form, **_share_range(names))
    shape = layout(rounds_axis(), y, hovermode="x unified")
    return [Figure("metrics", "Other metrics", about, [], shape, (control,), frames)]


def _metric(name: str, record: Record) -> float | None:
    return record.all_metrics.get(name)


def sentence_title(name: str) -> str:
    """A metric's name at the beginning of a sentence."""
    title = metric_title(name)
    return title[0].upper() + title[1:] if title.islower() else title


def metric_form(name: str) -> str:
    """How Plotly writes a metric."""
    return PERCENT if name in SHARES else ".4~f"


def metric_axis(name: str) -> dict[str, Any]:
    """An axis of a metric on the test set."""
    return axis(f"test {metric_title(name)}", tickformat=metric_form(name), **_share_range([name]))


def _share_range(names: Sequence[str]) -> dict[str, str]:
    """Shares begin at 0: a curve that never moves would be put into the middle."""
    return {"rangemode": "nonnegative"} if set(names) <= SHARES else {}


def loss(groups: Sequence[RunGroup]) -> list[Figure]:
    """Test loss and the clients' training loss over the rounds."""
    wanted: dict[str, Value] = {"test loss": lambda r: r.loss, "training loss": lambda r: r.train_loss}
    found = {name: data for name, value in wanted.items() if (data := curve_traces(groups, value, ".4~f"))}
    if not found:
        return []
    control = Control("loss", "Loss", tuple(found))
    frames = {frame_key(at): data for at, data in enumerate(found.values())}
    about = "The task's mean loss over the rounds, on the test set or of the clients' training, a line for each method."
    shape = layout(rounds_axis(), axis("loss"), hovermode="x unified")
    return [Figure("loss", "Loss", about, [], shape, (control,), frames, log=("yaxis",))]


def against_costs(groups: Sequence[RunGroup]) -> list[Figure]:
    """The primary metric against bytes, against operations and, with a fleet, against simulated time."""
    groups, metric = judged_alike(groups), primary_of(groups)
    title = sentence_title(metric)
    times = [time for group in groups for run in group.runs for time in by_simulated(1, run.records)]
    size, unit_name, sign = time_unit(max(times, default=0))
    kinds: tuple[tuple[str, str, str, str, Places], ...] = (
        ("bytes", "bytes", "sent, up and down", "B", by_bytes),
        ("flops", "operations", "computed in local training", "FLOP", by_flops),
        ("simulated", f"simulated {unit_name}", "of the clients' devices", f" {sign}", partial(by_simulated, size)),
    )
    found = []
    for name, what, how, unit, at in kinds:
        held = [group for group in groups if any(any(at(run.records)) for run in group.runs)]
        data = curve_traces(held, lambda r: r.score, metric_form(metric), at)
        for trace in data:
            if "hovertemplate" in trace:
                trace["hovertemplate"] += f"<br>after %{{x:.3s}}{unit}, round %{{customdata[0]}}"
        x = axis(f"{what} {how}", tickformat="~g" if name == "simulated" else "~s", ticksuffix=unit, rangemode="tozero")
        shape = layout(x, metric_axis(metric), hovermode="closest")
        about = (
            f"{title} of {_whose(held)} on the test set against all {what} {how} until then, a line for each method."
        )
        if data:
            found.append(Figure(f"{metric}-{name}", f"{title} against {what}", about, data, shape, log=("xaxis",)))
    return found


def architectures(groups: Sequence[RunGroup]) -> list[Figure]:
    """The primary metric of each architecture's part of the global model."""
    held = judged_alike([g for g in groups if any(r.arch_accuracy for run in g.runs for r in run.records)])
    if not held:
        return []
    control = Control("arch-method", "Method", tuple(group.label for group in held))
    frames = {frame_key(at): _architecture_traces(group) for at, group in enumerate(held)}
    metric = primary_of(held)
    title = sentence_title(metric)
    about = f"{title} on the test set of each architecture's part of the global model, over the rounds."
    shape = layout(rounds_axis(), metric_axis(metric), hovermode="x unified", showlegend=True)
    return [Figure("architectures", f"{title} by architecture", about, [], shape, (control,), frames)]


def _architecture_traces(group: RunGroup) -> list[Trace]:
    names = dict.fromkeys(name for run in group.runs for r in run.records for name in r.arch_accuracy)
    traces = []
    for at, name in enumerate(names):
        part = RunGroup(name or "whole model", name or "whole model", group.runs, at)
        points = mean_curve(part, partial(_architecture_accuracy, name))
        traces += [*band_traces(part, points), line_trace(part, points, metric_form(primary_of([group])))]
    return [{n: v for n, v in trace.items() if n != "meta"} for trace in traces]


def _architecture_accuracy(name: str, record: Record) -> Any:
    return record.arch_accuracy.get(name)


def partition(groups: Sequence[RunGroup]) -> list[Figure]:
    """How many examples of each class each client holds."""
    found: dict[str, tuple[str, SavedRun]] = {}
    for group in groups:
        for run in group.runs:
            counts = run.facts.get("counts")
            if counts and all(isinstance(row, list) for row in counts):
                label = f"{group.label}, seed {run.config.get('seed', 0)}" if len(groups) > 1 else _seed_text(run)
                found.setdefault(repr(counts), (label, run))
    if not found:
        return []
    control = Control("partition-run", "Run", tuple(label for label, _ in found.values()))
    frames = {frame_key(at): [_counts_trace(run)] for at, (_, run) in enumerate(found.values())}
    classes = max(_class_count(run) for _, run in found.values())
    about = "How many examples of each class each client holds; colours go with the square root of the count."
    shape = layout(
        axis("client", type="category"),
        axis("class", type="category", autorange="reversed"),
        height=min(140 + 22 * classes, 720),
    )
    return [Figure("partition", "Who holds what", about, [], shape, (control,), frames)]


def _seed_text(run: SavedRun) -> str:
    return f"seed {run.config.get('seed', 0)}"


def class_names(run: SavedRun, count: int) -> list[str]:
    """The names of a run's classes; their numbers where the facts do not name so many."""
    names = run.facts.get("class_names")
    return distinct_names(names if isinstance(names, list) and len(names) == count else range(count))


def _class_count(run: SavedRun) -> int:
    return max(map(len, run.facts["counts"]))


def _counts_trace(run: SavedRun) -> Trace:
    names, counts = class_names(run, _class_count(run)), run.facts["counts"]
    rows = [
        [max(int(finite_number(row[c]) or 0), 0) if c < len(row) else 0 for row in counts] for c in range(len(names))
    ]
    most = max((count for row in rows for count in row), default=0)
    ticks = [t for t in (0, 1, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000) if t <= most]
    ticks = [t for t in ticks if not t or math.sqrt(t / max(most, 1)) > 0.08]
    return {
        "type": "heatmap",
        "x": list(map(str, range(len(counts)))),
        "y": names,
        "z": [[round_digits(math.sqrt(count)) for count in row] for row in rows],
        "customdata": rows,
        "zmin": 0,
        "zmax": math.sqrt(max(most, 1)),
        "colorscale": colour_scale(BLUES),
        "colorbar": {
            "title": {"text": "examples"},
            "tickvals": [math.sqrt(t) for t in ticks],
            "ticktext": list(map(str, ticks)),
            "thickness": 12,
        },
        "xgap": 1 if len(counts) <= 60 else 0,
        "ygap": 1,
        "hovertemplate": "client %{x}, class %{y}: %{customdata} examples<extra></extra>",
    }
