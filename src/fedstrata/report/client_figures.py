"""Figures of clients that are judged for themselves: each by its own test examples, and how far they are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from fedstrata.core.text import SHARES
from fedstrata.diagnosis.evidence import finite_number
from fedstrata.report.figures import (
    Control,
    Figure,
    Trace,
    axis,
    curve_traces,
    frame_key,
    layout,
    metric_axis,
    metric_form,
    rounds_axis,
    sentence_title,
)
from fedstrata.report.formatting import comma_list, distinct_names, escape, mean, round_digits
from fedstrata.report.run_groups import RunGroup, judged_alike, primary_of
from fedstrata.runs.reader import SavedRun

NAMED_TICKS = 60
"""Clients whose names an axis has room for."""
_OVER_CLIENTS = {
    "worst client": "worst",
    "worst tenth": "worst_tenth",
    "mean": "mean",
    "standard deviation": "std",
    "Jain's index": "jain",
}
"""What is told of a distribution over clients → its field."""
_GLOBAL, _OWN = "global model", "own models"
_OF = {_GLOBAL: "the global model", _OWN: "clients' own models"}
Scores = dict[int, float]


def clients(groups: Sequence[RunGroup]) -> list[Figure]:
    """The primary metric of every client after the last evaluated round, the worst first."""
    held = [(group, run, scores) for group, run in shown_runs(groups) if (scores := last_scores(run))]
    if not held:
        return []
    metric = primary_of([group for group, *_ in held])
    found = [one for one in held if primary_of([one[0]]) == metric]
    numbers = sorted({client for *_, scores in found for client in scores})
    means = {client: mean(scores.get(client) for *_, scores in found) or 0.0 for client in numbers}
    less = any(record.better == "lower" for _, run, _ in found for record in run.records[-1:])
    order = sorted(numbers, key=lambda client: -means[client] if less else means[client])
    names = dict(zip(order, distinct_names(client_name(found[0][1], client) for client in order), strict=True))
    data = [_dots(group, scores, names, metric) for group, _, scores in found]
    return [_clients_figure(found[0][1], [group for group, *_ in found], data, list(names.values()), metric)]


def _clients_figure(
    run: SavedRun, groups: Sequence[RunGroup], data: list[Trace], names: Sequence[str], metric: str
) -> Figure:
    title = sentence_title(metric)
    about = (
        f"{title} of {_whose(groups)} on each client's own test examples after the last evaluated round, the worst "
        "client first."
    )
    if any(len(group.runs) > 1 for group in groups):
        about += f" Of seed {run.config.get('seed', 0)} alone."
    x = axis("client", type="category", categoryarray=list(names), showticklabels=len(names) <= NAMED_TICKS)
    shape = layout(x, metric_axis(metric), hovermode="x unified", showlegend=len(data) > 1)
    return Figure("clients", f"{title} by client", about, data, shape)


def shown_runs(groups: Sequence[RunGroup]) -> list[tuple[RunGroup, SavedRun]]:
    """The run of each group that is shown, of the same seed where they have one in common: clients differ by seed."""
    common = [seed for seed in (groups[0].seeds if groups else ()) if all(seed in group.seeds for group in groups)]
    if not common:
        return [(group, group.shown_run) for group in groups]
    return [(group, group.runs[group.seeds.index(common[0])]) for group in groups]


def last_scores(run: SavedRun) -> Scores:
    """Client → primary metric of its own model where it has one, else of the global one; of the last such round."""
    return own_scores(run) or global_scores(run)


def own_scores(run: SavedRun) -> Scores:
    """Client → primary metric of its own model; of the last round in which clients were judged."""
    return _last_of(run, "own_metrics")


def global_scores(run: SavedRun) -> Scores:
    """Client → primary metric of the global model; of the last round in which clients were judged."""
    return _last_of(run, "client_metrics")


def _last_of(run: SavedRun, metrics: Literal["own_metrics", "client_metrics"]) -> Scores:
    record = next((r for r in reversed(run.records) if r.own_metrics or r.client_metrics), None)
    if record is None:
        return {}
    late = run.facts.get("newcomers")
    others = late if isinstance(late, list) else ()  # newcomers have no part in the model's fairness
    entries = enumerate(getattr(record, metrics) or ())
    seen = ((client, one) for client, one in entries if one is not None and client not in others)
    found = {client: finite_number(one.get(record.primary)) for client, one in seen}
    return {client: value for client, value in found.items() if value is not None}


def client_name(run: SavedRun, client: int) -> str:
    """As the facts have it; its number where they do not."""
    names = run.facts.get("client_names")
    return str(names[client]) if isinstance(names, list) and client < len(names) else str(client)


def _dots(group: RunGroup, scores: Scores, names: Mapping[int, str], metric: str) -> Trace:
    held = [client for client in names if client in scores]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape(group.label),
        "x": [names[client] for client in held],
        "y": [round_digits(scores[client], 6) for client in held],
        "marker": {"color": group.colour, "size": 8 if len(names) <= NAMED_TICKS else 5},
        "hovertemplate": f"%{{y:{metric_form(metric)}}}",
        "legendgroup": f"line{group.index}",
        "meta": {"line": group.index},
    }


def _whose(groups: Sequence[RunGroup]) -> str:
    """Whose models the dots are of: a client's own where it has one, else the global one."""
    own = [group.label for group, run in shown_runs(groups) if own_scores(run)]
    if not own:
        return "the global model"
    if len(own) == len(groups):
        return "clients' own models"
    return f"the global model, or of clients' own models ({comma_list(own)}),"


def over_rounds(groups: Sequence[RunGroup]) -> list[Figure]:
    """How the primary metric is distributed over clients, round by round: of the global model, and of their own."""
    groups, metric = judged_alike(groups), primary_of(groups)
    found: dict[str, list[Trace]] = {}
    kinds = [kind for kind in (_GLOBAL, _OWN) if any(_fairness_traces(groups, kind, "mean", "f"))]
    for name, field in _OVER_CLIENTS.items():
        form = ".4~f" if field == "jain" and metric not in SHARES else metric_form(metric)
        for kind in kinds:
            found[name if len(kinds) == 1 else f"{name}, {kind}"] = _fairness_traces(groups, kind, field, form)
    if not found:
        return []
    control = Control("over-clients", "Quantity", tuple(found))
    frames = {frame_key(at): data for at, data in enumerate(found.values())}
    title = sentence_title(metric)
    about = (
        f"{title} on clients' own test examples over the rounds, of {' and of '.join(_OF[kind] for kind in kinds)}: "
        "the worst client, the worst tenth, mean and standard deviation over clients, and Jain's index, "
        f"{'100 %' if metric in SHARES else '1'} where all clients are equal."
    )
    y = axis("", tickformat=metric_form(metric)) if metric in SHARES else axis("")
    shape = layout(rounds_axis(), y, hovermode="x unified")
    return [Figure("over-clients", f"{title} over clients", about, [], shape, (control,), frames)]


def _fairness_traces(groups: Sequence[RunGroup], kind: str, field: str, form: str) -> list[Trace]:
    """The curves of one quantity, of the groups that have it: the global model's, or clients' own models'."""
    apart = [group for group in groups if _judges_both(group)]
    own = [group for group in groups if group.is_own or group in apart]
    alone = own if kind == _OWN else [group for group in groups if group not in own]
    traces = curve_traces(alone, lambda r: getattr(r.fairness, field, None), form)
    if kind == _GLOBAL:
        traces += curve_traces(apart, lambda r: getattr(r.global_fairness, field, None), form)
    return traces


def _judges_both(group: RunGroup) -> bool:
    """True if clients judge the global model beside their own."""
    return any(record.global_fairness is not None for run in group.runs for record in run.records)
