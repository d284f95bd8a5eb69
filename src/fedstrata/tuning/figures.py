"""Figures of a search: what was tried and how good it was, as plain dicts in Plotly's form.

Parallel coordinates are drawn as lines: Plotly's own need WebGL that compiles text, which a page's policy forbids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedstrata.core.text import metric_text, metric_title
from fedstrata.report.figures import INK, Figure, Trace, axis, layout, metric_form, rounds_axis, sentence_title
from fedstrata.report.formatting import escape, round_digits
from fedstrata.report.run_groups import PALETTE
from fedstrata.tuning.outcome import Searched, TriedTrial, Tuned, TunedMethod, numbers

BEST, USUAL, EARLY = PALETTE[1][0], PALETTE[0][0], "#9aa5b1"
"""The colours of the best trial, of others that are complete, and of those that ended early."""
DEEP = 300


def method_figures(tuned: Tuned, method: TunedMethod, at: int) -> list[Figure]:
    """The figures of a method, whose place in the table keeps their names apart."""
    rated = [trial for trial in method.trials if _last(trial) is not None]
    if not rated:
        return []
    several = len(method.spaces) > 1
    found = [_coordinates(tuned, method, rated, at) if several else _slice(tuned, method, rated, at)]
    found.append(_curves(tuned, method, rated, at))
    found.append(_progress(tuned, method, rated, at))
    return found + ([_importance(method, at)] if method.importance else [])


def _last(trial: TriedTrial) -> float | None:
    """What a trial has come to: its score, or that of the round with which it ended."""
    if trial.score is not None:
        return trial.score
    return trial.by_round[max(trial.by_round)] if trial.by_round else None


def _colour(method: TunedMethod, trial: TriedTrial) -> str:
    if trial.number == method.best:
        return BEST
    return USUAL if trial.state == "complete" else EARLY


def _told(tuned: Tuned, trial: TriedTrial) -> str:
    values = "<br>".join(f"{escape(name)} = {escape(value)}" for name, value in trial.values.items())
    after = "" if trial.state == "complete" else f", {trial.state} after round {trial.rounds}"
    return f"trial {trial.number}<br>{values}<br>{metric_text(tuned.metric, _last(trial))}{after}"


def _drawn(method: TunedMethod, trials: Sequence[TriedTrial]) -> list[TriedTrial]:
    """Those that ended early first, the best last, so that it hides behind no other."""
    return sorted(trials, key=lambda trial: (trial.number == method.best, trial.state == "complete"))


def share(space: Searched, value: float) -> float:
    """Where a value lies between the ends of its space, from 0 to 1."""
    if space.options:
        return value / max(len(space.options) - 1, 1)
    low, high = float(space.low or 0.0), float(space.high or 1.0)
    if space.log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / (high - low)


def _ticks(space: Searched) -> list[tuple[float, str]]:
    """(place, what it says) along the axis of a space."""
    if space.options:
        return [(share(space, at), option) for at, option in enumerate(space.options)]
    low, high = float(space.low or 0.0), float(space.high or 1.0)
    inner = [math.sqrt(low * high) if space.log else (low + high) / 2]
    if space.log:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        inner = [10.0**power for power in powers if low * 1.5 < 10.0**power < high / 1.5] or inner
    return [(share(space, value), f"{value:.3g}") for value in (low, *inner, high)]


def _coordinates(tuned: Tuned, method: TunedMethod, trials: Sequence[TriedTrial], at: int) -> Figure:
    """A line per trial through all of its values to its score."""
    names = [*method.spaces]
    scores = [score for trial in trials if (score := _last(trial)) is not None]
    low, high = min(scores), max(scores)
    ends = Searched("", low, high if high > low else low + 1)
    columns = {name: numbers(method, name, trials) for name in names}
    lines: list[Trace] = []
    for place, trial in enumerate(trials):
        values = [columns[name][place] for name in names]
        ys = [
            None if v is None else round_digits(share(method.spaces[n], v), 4)
            for n, v in zip(names, values, strict=True)
        ]
        ys.append(round_digits(share(ends, _last(trial) or 0.0), 4))
        lines.append(_line(tuned, method, trial, [*range(len(names) + 1)], ys, [*values, _last(trial)]))
    order = {trial.number: place for place, trial in enumerate(_drawn(method, trials))}
    lines.sort(key=lambda line: order[line["meta"]["trial"]])
    top, bottom = metric_text(tuned.metric, high), metric_text(tuned.metric, low)
    ticks = [*(_ticks(method.spaces[name]) for name in names), [(0.0, bottom), (1.0, top)]]
    x = axis("", tickvals=[*range(len(names) + 1)], ticktext=[*map(escape, names), metric_title(tuned.metric)])
    x |= {"range": [-0.15, len(names) + 0.35], "showgrid": False, "zeroline": False}
    y = axis("", showticklabels=False, showgrid=False, zeroline=False, range=[-0.04, 1.04])
    shape = layout(x, y, showlegend=False, hovermode="closest", height=380, annotations=_labels(ticks))
    shape["shapes"] = [
        {"type": "line", "x0": k, "x1": k, "y0": 0, "y1": 1, "line": {"color": EARLY, "width": 1}}
        for k in range(len(ticks))
    ]
    about = (
        f"A line per trial of {method.name} through all values that it had, to its score; the best one is drawn last."
    )
    return Figure(f"coordinates-{at}", "What was tried", about, lines, shape)


def _labels(ticks: Sequence[Sequence[tuple[float, str]]]) -> list[dict[str, object]]:
    """What stands beside the axes."""
    style = {"showarrow": False, "xanchor": "left", "xshift": 5, "font": {"size": 11}}
    return [
        {"x": place, "y": round_digits(y, 4), "text": escape(text), **style}
        for place, found in enumerate(ticks)
        for y, text in found
    ]


def _line(
    tuned: Tuned,
    method: TunedMethod,
    trial: TriedTrial,
    xs: Sequence[float],
    ys: Sequence[float | None],
    told: Sequence[float | None],
) -> Trace:
    best = trial.number == method.best
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"trial {trial.number}",
        "x": [*xs],
        "y": [*ys],
        "text": [_told(tuned, trial)] * len(xs),
        "hovertemplate": "%{text}<extra></extra>",
        "line": {"color": _colour(method, trial), "width": 3 if best else 1.3},
        "marker": {"color": _colour(method, trial), "size": 7 if best else 4},
        "opacity": 1 if best or trial.state == "complete" else 0.55,
        "meta": {"trial": trial.number, "told": [*told]},
    }


def _slice(tuned: Tuned, method: TunedMethod, trials: Sequence[TriedTrial], at: int) -> Figure:
    """The score against the only value that was searched."""
    ((name, space),) = method.spaces.items()
    about = f"A point per trial of {method.name}: the value that it had, and its score."
    kinds = {"category": bool(space.options), "log": space.log}
    kind = next((kind for kind, holds in kinds.items() if holds), "linear")
    shape = layout(axis(escape(name), type=kind), _score_axis(tuned), showlegend=True, hovermode="closest", height=380)
    values = numbers(method, name, trials)
    shown = [space.options[int(v)] if space.options and v is not None else v for v in values]
    return Figure(f"slice-{at}", "What was tried", about, _points(tuned, method, trials, shown), shape)


def _score_axis(tuned: Tuned) -> dict[str, object]:
    return axis(f"validation {metric_title(tuned.metric)}", tickformat=metric_form(tuned.metric))


def _points(tuned: Tuned, method: TunedMethod, trials: Sequence[TriedTrial], places: Sequence[object]) -> list[Trace]:
    """Trials as points: those that ended early, those that are complete, the best."""
    kinds = {"ended early": EARLY, "complete": USUAL, "best": BEST}
    found: list[Trace] = []
    for kind, colour in kinds.items():
        held = [(x, trial) for x, trial in zip(places, trials, strict=True) if _kind(method, trial) == kind]
        if held:
            found.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": kind,
                    "x": [x for x, _ in held],
                    "y": [round_digits(_last(trial) or 0.0, 6) for _, trial in held],
                    "text": [_told(tuned, trial) for _, trial in held],
                    "hovertemplate": "%{text}<extra></extra>",
                    "marker": {"color": colour, "size": 11 if kind == "best" else 8},
                }
            )
    return found


def _kind(method: TunedMethod, trial: TriedTrial) -> str:
    if trial.number == method.best:
        return "best"
    return "complete" if trial.state == "complete" else "ended early"


def _curves(tuned: Tuned, method: TunedMethod, trials: Sequence[TriedTrial], at: int) -> Figure:
    """The scores of all trials at the rungs and at their ends."""
    lines = []
    for trial in _drawn(method, trials):
        rounds = sorted(trial.by_round)
        ys = [round_digits(trial.by_round[r], 6) for r in rounds]
        lines.append(_line(tuned, method, trial, rounds, ys, ys))
    about = (
        f"The score of every trial of {method.name} at the rungs, where it may end early, and at its end. Those that "
        "go on were among the best at each rung."
    )
    shape = layout(rounds_axis(), _score_axis(tuned), showlegend=False, hovermode="closest")
    return Figure(f"rungs-{at}", "Who went on", about, lines, shape)


def _progress(tuned: Tuned, method: TunedMethod, trials: Sequence[TriedTrial], at: int) -> Figure:
    """The scores in the order of the trials, and the best so far."""
    better = min if tuned.better == "lower" else max
    complete = [trial for trial in trials if trial.score is not None]
    so_far = [better(t.score for t in complete[: n + 1] if t.score is not None) for n in range(len(complete))]
    line: Trace = {
        "type": "scatter",
        "mode": "lines",
        "name": "best so far",
        "x": [trial.number for trial in complete],
        "y": [round_digits(score, 6) for score in so_far],
        "line": {"color": INK[0], "width": 1.5, "shape": "hv", "dash": "dot"},
        "hoverinfo": "skip",
    }
    about = f"The score of every trial of {method.name} in the order in which they were chosen, and the best so far."
    shape = layout(axis("trial", tickformat="d"), _score_axis(tuned), showlegend=True, hovermode="closest")
    data = [line, *_points(tuned, method, trials, [trial.number for trial in trials])]
    return Figure(f"progress-{at}", "Trial by trial", about, data, shape)


def _importance(method: TunedMethod, at: int) -> Figure:
    """How much each value explains of the scores."""
    names = sorted(method.importance, key=lambda name: method.importance[name])
    bars: Trace = {
        "type": "bar",
        "orientation": "h",
        "name": "importance",
        "x": [round_digits(method.importance[name], 4) for name in names],
        "y": [escape(name) for name in names],
        "marker": {"color": USUAL},
        "hovertemplate": "%{y}: %{x:.0%}<extra></extra>",
    }
    about = (
        f"How much of the spread of the complete trials' scores each value of {method.name} explains (fANOVA). With "
        "few trials this is a hint, no more."
    )
    shape = layout(
        axis("share of the variance", tickformat=".0%", range=[0, 1]),
        axis("", type="category"),
        showlegend=False,
        height=130 + 34 * len(names),
    )
    return Figure(f"importance-{at}", sentence_title("what matters"), about, [bars], shape)
