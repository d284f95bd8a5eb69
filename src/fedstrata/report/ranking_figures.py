"""Figures that rank methods: mean ranks with the critical difference, and who is better than whom at which cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedstrata.core.text import metric_title, plural, time_unit
from fedstrata.report.figures import (
    INK,
    PERCENT,
    Control,
    Figure,
    Trace,
    axis,
    frame_key,
    layout,
    metric_axis,
    metric_form,
    sentence_title,
)
from fedstrata.report.formatting import escape, mean, round_digits
from fedstrata.report.run_groups import RunGroup, is_lower_better, judged_alike, primary_of
from fedstrata.report.significance import LEVEL, Ranking, rank_methods
from fedstrata.report.tables import final_score, sound_runs
from fedstrata.report.verdict import PROBLEM
from fedstrata.runs.records import Costs

ALIKE = "#8a929c"
"""The colour of what joins methods that do not differ."""
FEWEST = 3
"""Methods, below which a picture tells no more than the table."""
CRITICAL = "critical difference"


def competitors(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Groups that can be ranked: judged alike, all by the global model or all by clients' own, and no references."""
    held = [group for group in judged_alike(groups) if not group.is_reference and sound_runs(group)]
    whole = [group for group in held if not group.is_own]
    return whole or held


def settings(groups: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    """What is learnt and from whom, told by what differs → the groups for which it is so."""
    configs = [group.runs[0].config for group in groups]
    differing = [name for name in PROBLEM if len({repr(config.get(name)) for config in configs}) > 1]
    found: dict[str, list[RunGroup]] = {}
    for group in groups:
        told = ", ".join(f"{name} {group.runs[0].config.get(name)}" for name in differing)
        found.setdefault(told, []).append(group)
    return found


def ranks(groups: Sequence[RunGroup]) -> list[Figure]:
    """Mean ranks of the methods over all seeds and settings that all of them have, and who differs from whom."""
    held = competitors(groups)
    methods = _methods(held)
    scores = _scores(methods)
    if len(methods) < FEWEST or not all(scores.values()):
        return []
    found = rank_methods(scores, is_lower_better(held))
    if found is None:
        return []
    order = sorted(methods, key=lambda name: found.ranks[name])
    about = (
        f"Mean ranks over {plural(found.blocks, 'block')}, a seed under one setting each; 1 is the best. That all rank "
        f"alike has p = {found.p:.2g} (Friedman). Methods that a grey line joins do not differ significantly: their "
        f"ranks are less than {found.critical:.2f} apart (Nemenyi, {100 * LEVEL:g} %)."
    )
    shape = layout(
        axis("mean rank", range=[0.8, len(methods) + 0.2], dtick=1, zeroline=False),
        axis("", type="category", autorange="reversed", dtick=1),
        showlegend=False,
        hovermode="closest",
        height=130 + 30 * (1 + len(order) + len(found.cliques)),
    )
    return [Figure("ranks", "How methods rank", about, _rank_traces(found, order, methods), shape)]


def _methods(groups: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    """Method → its groups, one for each setting; methods with settings of their own by all of them."""
    apart = {*PROBLEM, "seed"}
    by_identity: dict[str, list[RunGroup]] = {}
    for group in groups:
        config = {name: value for name, value in group.runs[0].config.items() if name not in apart}
        by_identity.setdefault(repr(sorted(config.items(), key=str)), []).append(group)
    found = [*by_identity.values()]
    short = [held[0].shown_run.method for held in found]
    names = short if len({*short}) == len(short) else [held[0].label for held in found]
    return dict(zip(names, found, strict=True))


def _scores(methods: dict[str, list[RunGroup]]) -> dict[str, list[float]]:
    """Method → its final scores in the blocks that all methods have: a seed under a setting each."""
    blocks: dict[str, dict[str, float]] = {}
    for name, groups in methods.items():
        for group in groups:
            setting = repr([group.runs[0].config.get(field) for field in PROBLEM])
            for run in sound_runs(group):
                score = final_score(run)
                if score is not None:
                    blocks.setdefault(name, {})[f"{setting} {run.config.get('seed', 0)}"] = score
    common = [block for block in next(iter(blocks.values()), {}) if all(block in own for own in blocks.values())]
    return {name: [blocks.get(name, {})[block] for block in common] if name in blocks else [] for name in methods}


def _rank_traces(found: Ranking, order: Sequence[str], methods: dict[str, list[RunGroup]]) -> list[Trace]:
    """The critical difference, a point for each method, and a line for each group of methods that do not differ."""
    thick: dict[str, Any] = {"type": "scatter", "mode": "lines", "hoverinfo": "skip"}
    data: list[Trace] = [
        {
            **thick,
            "name": CRITICAL,
            "x": [1, 1 + found.critical],
            "y": [CRITICAL] * 2,
            "line": {"color": INK[0], "width": 3},
        }
    ]
    for name in order:
        group, rank = methods[name][0], round_digits(found.ranks[name], 6)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": escape(name),
                "x": [rank],
                "y": [escape(name)],
                "marker": {"color": group.colour, "size": 11},
                "hovertemplate": "%{y}: %{x:.2f}<extra></extra>",
                "meta": {"line": group.index} if len(methods[name]) == 1 else {},
            }
        )
    for at, clique in enumerate(found.cliques, 1):
        ends = [found.ranks[clique[0]], found.ranks[clique[-1]]]
        row = "no difference" + (f" ({at})" if at > 1 else "")
        xs = [round_digits(end, 6) for end in ends]
        data.append({**thick, "name": row, "x": xs, "y": [row] * 2, "line": {"color": ALIKE, "width": 6}})
    return data


def pareto(groups: Sequence[RunGroup]) -> list[Figure]:
    """The final score against what a run costs in all, and the methods that none is better and cheaper than."""
    held = {told: several for told, several in settings(competitors(groups)).items() if len(several) >= FEWEST}
    if not held:
        return []
    every = [group for several in held.values() for group in several]
    times = [_cost(group, "simulated") or 0.0 for group in every]
    size, unit_name, sign = time_unit(max(times))
    kinds = (
        ("bytes", "bytes", "bytes sent, up and down", "B", 1),
        ("flops", "operations", "operations of local training", "FLOP", 1),
        ("simulated", f"simulated {unit_name}", f"simulated {unit_name} of the devices", f" {sign}", size),
    )
    metric = primary_of(every)
    found = []
    for kind, what, how, unit, per in kinds:
        if not all(_cost(group, kind) for group in every):
            continue
        control = Control(f"{kind}-setting", "Setting", tuple(held))
        data = {frame_key(at): _pareto_traces(several, kind, per) for at, several in enumerate(held.values())}
        form = "~g" if kind == "simulated" else "~s"
        x = axis(f"{how}, whole run", tickformat=form, ticksuffix=unit, rangemode="tozero")
        shape = layout(x, metric_axis(metric), hovermode="closest", showlegend=True)
        about = (
            f"Final {metric_title(metric)} against the {what} of a whole run: a point per method, means over seeds. "
            "The line joins methods that no other one is better and cheaper than."
        )
        title = f"{sentence_title(metric)} for {what}"
        still: tuple[list[Trace], tuple[Control, ...], dict[str, list[Trace]]] = ([], (control,), data)
        drawn, by, frames = still if len(held) > 1 else (data["0"], (), {})
        name = f"pareto-{kind}"
        found.append(Figure(name, title, about, drawn, shape, by, frames, log=("xaxis",)))
    return found


def _cost(group: RunGroup, kind: str) -> float | None:
    """What a run costs in all, in the mean over the seeds."""
    every = [run.records for run in sound_runs(group) if run.records]
    if kind == "simulated":
        return mean(records[-1].simulated_seconds for records in every)
    spent = [Costs.of(records) for records in every]
    return mean(c.flops if kind == "flops" else c.bytes_up + c.bytes_down for c in spent)


def frontier(points: Sequence[tuple[float, float]], lower: bool = False) -> list[int]:
    """Which (cost, score) no other one is better and no dearer than, or as good and cheaper; by cost."""
    sign = -1 if lower else 1
    found: list[int] = []
    for at in sorted(range(len(points)), key=lambda at: (points[at][0], -sign * points[at][1])):
        if not found or sign * points[at][1] > sign * points[found[-1]][1]:
            found.append(at)
    return found


def _pareto_traces(groups: Sequence[RunGroup], kind: str, per: float) -> list[Trace]:
    points = [((_cost(group, kind) or 0.0) / per, mean(map(final_score, sound_runs(group))) or 0.0) for group in groups]
    best = frontier(points, is_lower_better(groups))
    form = PERCENT if metric_form(primary_of(groups)) == PERCENT else ".4~f"
    line: Trace = {
        "type": "scatter",
        "mode": "lines",
        "name": "none is better and cheaper",
        "x": [round_digits(points[at][0], 10) for at in best],
        "y": [round_digits(points[at][1], 6) for at in best],
        "line": {"color": ALIKE, "width": 1.5, "dash": "dot"},
        "hoverinfo": "skip",
    }
    return [line] * (len(best) > 1) + [
        {
            "type": "scatter",
            "mode": "markers",
            "name": escape(group.label),
            "x": [round_digits(x, 10)],
            "y": [round_digits(y, 6)],
            "marker": {"color": group.colour, "size": 11},
            "hovertemplate": f"%{{y:{form}}} for %{{x:.3s}}",
            "legendgroup": f"line{group.index}",
            "meta": {"line": group.index},
        }
        for group, (x, y) in zip(groups, points, strict=True)
    ]
