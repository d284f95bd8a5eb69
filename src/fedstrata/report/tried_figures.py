"""What the remedies of a diagnosis brought when they were tried (`fedstrata diagnose RUN --try`): bars and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedstrata.core.text import SHARES, metric_title, plural
from fedstrata.diagnosis.evidence import finite_numbers
from fedstrata.report.figures import INK, Control, Figure, Trace, axis, frame_key, layout
from fedstrata.report.formatting import NONE, comma_list, distinct_names, escape, round_digits, spread
from fedstrata.report.run_groups import PALETTE, RunGroup, hide_folders
from fedstrata.report.tables import HtmlTable
from fedstrata.runs.tried import HELPS, HURTS, NO_GAIN, UNDECIDED, Gain, Reference, Tried, TriedRemedy

REFERENCE = "for comparison"
KINDS = {HELPS: PALETTE[0][0], HURTS: PALETTE[1][0], NO_GAIN: PALETTE[6][0], UNDECIDED: PALETTE[4][0]}
KINDS[REFERENCE] = PALETTE[2][0]
"""Verdict → the colour of its bars; those of the references, which are no advice, are last."""
LONGEST = 30
"""Characters of a change beside its bar."""


def tried_notes(groups: Sequence[RunGroup]) -> list[str]:
    """Why what was tried cannot be shown."""
    broken = [str(group.tried) for group in groups if isinstance(group.tried, Exception)]
    return [f"What was tried cannot be shown: {why}." for why in dict.fromkeys(broken)]


def _held(groups: Sequence[RunGroup]) -> list[tuple[RunGroup, Tried]]:
    """Groups for which something was tried, judged by the metric of the first of them."""
    found = [(group, group.tried) for group in groups if isinstance(group.tried, Tried)]
    return [(group, tried) for group, tried in found if tried.metric == found[0][1].metric]


def tried_tables(groups: Sequence[RunGroup]) -> list[HtmlTable]:
    """A table per group for which something was tried."""
    return [_table(group, tried, len(groups) > 1) for group, tried in _held(groups)]


def _table(group: RunGroup, tried: Tried, several: bool) -> HtmlTable:
    name = f"{group.label}: " if several else ""
    usual = spread(finite_numbers(tried.control.scores), tried.metric)
    budget = f"{plural(tried.rounds, 'round')} and seeds {comma_list(tried.seeds)}"
    caption = f"{name}{metric_title(tried.metric)} gained over the unchanged run ({usual}), each with {budget}"
    return HtmlTable(
        caption,
        ("change", "against", metric_title(tried.metric), "gained", "90 % interval", "bytes", "verdict"),
        tuple(_row(tried, gain) for gain in _gains(tried)),
        words=frozenset({0, 1, 6}),
    )


def _row(tried: Tried, gain: TriedRemedy | Reference) -> tuple[str, ...]:
    remedy = gain if isinstance(gain, TriedRemedy) else None
    ends = [_gain_text(tried, end) for end in (gain.low, gain.high)]
    return (
        _change(gain),
        remedy.finding.replace("-", " ") if remedy else NONE,
        spread(finite_numbers(gain.scores), tried.metric),
        _gain_text(tried, gain.gained),
        NONE if NONE in ends else " to ".join(ends),
        NONE if gain.cost is None else f"× {gain.cost:.2f}",
        remedy.verdict if remedy else REFERENCE,
    )


def _gain_text(tried: Tried, value: float | None) -> str:
    return NONE if value is None else f"{_factor(tried) * value:+.{1 if tried.metric in SHARES else 3}f}"


def _factor(tried: Tried) -> float:
    """Shares are told in points."""
    return 100.0 if tried.metric in SHARES else 1.0


def _change(gain: TriedRemedy | Reference) -> str:
    return hide_folders(gain.change if isinstance(gain, TriedRemedy) else gain.name)


def tried(groups: Sequence[RunGroup]) -> list[Figure]:
    """A bar per remedy: what it gained, with its interval."""
    held = [(group, found) for group, found in _held(groups) if any(one.gained is not None for one in _gains(found))]
    if not held:
        return []
    control = Control("tried-method", "Method", tuple(group.label for group, _ in held))
    frames = {frame_key(at): _bars(found) for at, (_, found) in enumerate(held)}
    metric = held[0][1].metric
    unit = "points gained" if metric in SHARES else f"{metric_title(metric)} gained; more is better"
    about = (
        "What each remedy gained over the unchanged run, in the mean over the same seeds; lines are 90 % intervals. "
        "Bars for comparison are no advice: they show what could be reached."
    )
    rows = max(len(_gains(found)) for _, found in held)
    shape = layout(
        axis(unit, zeroline=True, tickformat=".3~g"),
        axis("", type="category", autorange="reversed", dtick=1),
        height=130 + 34 * rows,
        barmode="overlay",
        bargap=0.35,
        showlegend=True,
    )
    return [Figure("tried", "What was gained", about, [], shape, (control,), frames)]


def _gains(tried: Tried) -> list[TriedRemedy | Reference]:
    """The best first, then references."""
    order = sorted(tried.remedies, key=lambda one: -(one.gained if one.gained is not None else -1e9))
    return [*order, *tried.references]


def _bars(tried: Tried) -> list[Trace]:
    """A trace for each verdict that occurs, so that a legend can name them."""
    gains = _gains(tried)
    names = distinct_names(_shorten(_change(one)) for one in gains)
    kinds = [one.verdict if isinstance(one, TriedRemedy) else REFERENCE for one in gains]
    rows = [row for row in zip(names, gains, kinds, strict=True) if row[1].gained is not None]
    held = {kind: [(name, gain) for name, gain, own in rows if own == kind] for kind in KINDS}
    every = [_bar(kind, found, _factor(tried)) for kind, found in held.items() if found]
    return [_order_trace([name for name, *_ in rows]), *every]


def _order_trace(names: Sequence[str]) -> Trace:
    """Nothing to see: it puts the names in their order, which would be that of the verdicts."""
    unseen = {"showlegend": False, "hoverinfo": "skip", "meta": {"band": True}}
    return {"type": "bar", "orientation": "h", "name": "", "y": list(names), "x": [None] * len(names), **unseen}


def _shorten(change: str) -> str:
    """A change beside its bar: of a method alone its name."""
    alone = change.count(" --") == 0 and change.startswith("--method ")
    text = change.removeprefix("--method ").strip('"') if alone else change
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _bar(kind: str, held: Sequence[tuple[str, Gain]], factor: float) -> Trace:
    gains = [gain for _, gain in held]
    return {
        "type": "bar",
        "orientation": "h",
        "name": escape(kind),
        "y": [name for name, _ in held],
        "x": [round_digits(factor * (gain.gained or 0.0)) for gain in gains],
        "marker": {"color": KINDS[kind]},
        "opacity": 0.85,
        "error_x": _interval(gains, factor),
        "customdata": [_interval_text(gain, factor) for gain in gains],
        "hovertemplate": "%{y}: %{x:+.3~g}%{customdata}<extra>%{fullData.name}</extra>",
    }


def _interval(gains: Sequence[Gain], factor: float) -> dict[str, Any]:
    """How far the ends of the intervals are from the means, as Plotly wants it."""
    middles = [gain.gained or 0.0 for gain in gains]
    highs = [middle if gain.high is None else gain.high for middle, gain in zip(middles, gains, strict=True)]
    lows = [middle if gain.low is None else gain.low for middle, gain in zip(middles, gains, strict=True)]
    return {
        "type": "data",
        "symmetric": False,
        "array": [round_digits(factor * max(a - b, 0.0)) for a, b in zip(highs, middles, strict=True)],
        "arrayminus": [round_digits(factor * max(b - a, 0.0)) for a, b in zip(lows, middles, strict=True)],
        "color": INK[0],
        "thickness": 2,
        "width": 5,
    }


def _interval_text(gain: Gain, factor: float) -> str:
    if gain.low is None or gain.high is None:
        return ""
    return f" ({factor * gain.low:+.3g} to {factor * gain.high:+.3g})"
