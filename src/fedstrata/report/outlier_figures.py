"""Figures of clients one by one: how unlike the others each is, stratum by stratum, and its own curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from fedstrata.core.text import metric_title
from fedstrata.diagnosis.cleaning import drop_malformed
from fedstrata.diagnosis.evidence import finite_number
from fedstrata.diagnosis.outliers import column, outlier_scores
from fedstrata.report.client_figures import client_name
from fedstrata.report.figures import (
    HEIGHT,
    OUTLIERS,
    Control,
    Figure,
    Trace,
    axis,
    colour_scale,
    frame_key,
    layout,
    rounds_axis,
)
from fedstrata.report.formatting import distinct_names, round_digits
from fedstrata.report.run_groups import DASHES, PALETTE, RunGroup, merge_orders, strata_of
from fedstrata.report.stratum_figures import MOST_ROUNDS, MOST_TRACES, method_control, rounds_in, thin_rounds
from fedstrata.runs.reader import SavedRun

MOST_CLIENTS = 40
"""Rows of the heat-map, and lines among the curves, at most: nobody could read more of them."""
ORDINARY, FAR, TOP = 3, 5, 10
"""Outlier scores up to which a client is ordinary, from which on it is far out, and where the colours end."""
MARK = "▶ "
"""Stands before the name of a client that the diagnosis names."""
FAINT = "#8a929c"
"""The colour of clients that nobody named, on any background."""
FRAME = "#1f8fd6"
"""The colour of the frame around clients that the diagnosis names: blue stands out from the colours of scores."""

Numbers = Mapping[int, Mapping[int, float]]
"""Client → round → a number."""


@dataclass(frozen=True, eq=False)
class Clients:
    """A run's clients, those first that the diagnosis names, then the most conspicuous.

    Args:
        group: of the run.
        run: the one that is shown, without what cannot be read in it.
        scores: round → client → stratum → outlier score.
        named: those that the diagnosis names.
    """

    group: RunGroup
    run: SavedRun
    scores: Mapping[int, Mapping[int, Mapping[str, float]]]
    named: frozenset[int]

    @staticmethod
    def of(group: RunGroup) -> Clients:
        """Those of the group's run that is shown for the probe `visits`."""
        shown = group.run_with("visits")
        run = replace(drop_malformed(shown), facts=shown.facts)
        rounds = set(thin_rounds(sorted(run.series("visits")), MOST_ROUNDS))
        scores = outlier_scores(replace(run, probes=[row for row in run.probes if row["round"] in rounds]))
        return Clients(group, run, scores, frozenset(group.named_clients if shown is group.shown_run else ()))

    @property
    def furthest(self) -> dict[int, dict[int, float]]:
        """Client → round → its score in the stratum where it is furthest out."""
        found: dict[int, dict[int, float]] = {}
        for at, clients in sorted(self.scores.items()):
            for client, strata in clients.items():
                found.setdefault(client, {})[at] = max(strata.values())
        return found

    def order(self, clients: Sequence[int]) -> list[int]:
        """Clients, named ones first, then by the median of their scores in the later half of their rounds."""
        usual = {client: _later_median(list(scores.values())) for client, scores in self.furthest.items()}
        return sorted(clients, key=lambda client: (client not in self.named, -usual.get(client, 0.0), client))

    def label(self, client: int) -> str:
        """The client's name, with a mark if the diagnosis names it."""
        name = client_name(self.run, client)
        return f"{MARK if client in self.named else ''}{f'client {client}' if name == str(client) else name}"


def _later_median(scores: Sequence[float]) -> float:
    return median(scores[-math.ceil(len(scores) / 2) :])


def _cap_remark(count: int) -> str:
    return f" Of {count} clients the {MOST_CLIENTS} most conspicuous are shown." if count > MOST_CLIENTS else ""


def _mark_remark(held: Sequence[Clients]) -> str:
    return f" {MARK}marks clients that the diagnosis names." if any(one.named for one in held) else ""


def clients_one_by_one(groups: Sequence[RunGroup]) -> list[Figure]:
    """Client × stratum as a heat-map with a slider over the rounds, and every client's curves."""
    every = [Clients.of(group) for group in groups]
    scored = [one for one in every if one.scores]
    slider = _slider(scored)
    heat = [_outliers_figure(scored, slider)] if scored else []
    return heat + _curves_figure(every, slider if scored else None)


def _slider(held: Sequence[Clients]) -> Control:
    """Over the rounds; it begins where a client that the diagnosis names is furthest out, or else at the last."""
    rounds = rounds_in([one.scores for one in held], MOST_TRACES)
    found = Control.rounds("outliers-round", rounds)
    worst = {at: score for one in held for client in one.named for at, score in one.furthest.get(client, {}).items()}
    seen = [at for at in rounds if at in worst]
    return replace(found, start=rounds.index(max(seen, key=lambda at: (worst[at], at)))) if seen else found


def _outliers_figure(held: Sequence[Clients], slider: Control) -> Figure:
    clients = [one.order(list(one.furthest)) for one in held]
    strata = [_strata_names(one) for one in held]
    frames = {}
    for m, one in enumerate(held):
        for r, at in enumerate(slider.values):
            rows = one.scores.get(int(at), {})
            frames[frame_key(m, r)] = [_heat_patch(one, clients[m][:MOST_CLIENTS], strata[m], rows)]
    count = max(map(len, clients))
    about = (
        "How unlike the other clients' updates each client's is, in every stratum, in the round that the slider shows: "
        "its robust z-score (value − median) / (1.4826 · median absolute deviation) over the round's clients, of the "
        f"update's length or its direction, whichever is larger. Up to {ORDINARY} is ordinary, from {FAR} on far out; "
        f"empty cells have no update.{_mark_remark(held)}{_cap_remark(count)}"
    )
    shape = layout(
        axis("", type="category", showgrid=False),
        axis("", type="category", autorange="reversed", dtick=1, showgrid=False),
        height=_height(count),
        shapes=_frames_around(held[0], clients[0]) if len(held) == 1 else [],
    )
    method = method_control("outliers-method", [one.group for one in held])
    return Figure("outliers", "Outlier scores", about, [_heat_base()], shape, (method, slider), frames)


def _height(count: int) -> int:
    """Room for the names of so many clients, and below them for those of strata."""
    return max(HEIGHT + 50, 190 + 17 * min(count, MOST_CLIENTS))


def _strata_names(one: Clients) -> list[str]:
    """In the model's order."""
    orders = [tuple(strata) for clients in one.scores.values() for strata in clients.values()]
    seen = {name for names in orders for name in names}
    return [name for name in merge_orders([tuple(strata_of([one.group])), *dict.fromkeys(orders)]) if name in seen]


def _heat_base() -> Trace:
    return {
        "type": "heatmap",
        "zmin": 0,
        "zmax": TOP,
        "colorscale": colour_scale(OUTLIERS),
        "colorbar": {
            "title": {"text": "score"},
            "tickvals": [0, ORDINARY, FAR, TOP],
            "ticktext": ["0", f"{ORDINARY}", f"{FAR}", f"{TOP}+"],
            "thickness": 12,
        },
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": "%{y}, %{x}: %{z:.1f}<extra></extra>",
    }


def _heat_patch(one: Clients, clients: Sequence[int], strata: Sequence[str], rows: Mapping[int, Any]) -> Trace:
    return {
        "x": distinct_names(strata),
        "y": distinct_names(one.label(client) for client in clients),
        "z": [[round_digits(rows.get(client, {}).get(name), 3) for name in strata] for client in clients],
    }


def _frames_around(one: Clients, clients: Sequence[int]) -> list[dict[str, Any]]:
    """A frame around the rows of named clients, which are the first."""
    last = sum(client in one.named for client in clients[:MOST_CLIENTS]) - 0.5
    corners = {"xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": -0.5, "y1": last}
    return [{"type": "rect", **corners, "line": {"color": FRAME, "width": 2}}] if last > 0 else []


def _curves_figure(every: Sequence[Clients], slider: Control | None) -> list[Figure]:
    """A line per client over the rounds, of one quantity and one method."""
    found = [_quantities(one) for one in every]
    names = list(dict.fromkeys(name for quantities in found for name in quantities))
    held = [at for at, quantities in enumerate(found) if quantities]
    if not names:
        return []
    orders = {at: every[at].order(sorted({c for numbers in found[at].values() for c in numbers})) for at in held}
    frames = {}
    for q, name in enumerate(names):
        for m, at in enumerate(held):
            shown = orders[at][:MOST_CLIENTS]
            frames[frame_key(q, m)] = _client_lines(every[at], shown, found[at].get(name, {}))
    about = (
        "A line for each client over the rounds in which it was seen; the outlier score is that of the stratum where "
        "the client is furthest out. Clients that the diagnosis names are coloured, the others grey."
        + _cap_remark(max(map(len, orders.values())))
    )
    quantity = Control("client-quantity", "Curves", tuple(names))
    same = held == [at for at, one in enumerate(every) if one.scores]
    method = method_control("outliers-method" if same else "curves-method", [every[at].group for at in held])
    shape = layout(
        rounds_axis(),
        axis(""),
        height=min(_height(max(map(len, orders.values()))), 520),
        hovermode="closest",
        showlegend=any(every[at].named for at in held),
    )
    title, by = "Every client's curve", (quantity, method)
    return [Figure("client-curves", title, about, [], shape, by, frames, slider, ("yaxis",))]


def _quantities(one: Clients) -> dict[str, Numbers]:
    """What there is to draw: its name → client → round → number."""
    run = one.run
    metric = run.records[-1].primary if run.records else ""
    judged = {r.round: r.own_metrics or r.client_metrics for r in run.records if r.own_metrics or r.client_metrics}
    found: dict[str, Numbers] = {
        "outlier score": one.furthest,
        "training loss": _by_client({row["round"]: _visits_column(row, "loss") for row in run.probes}),
        "norm of the update": _by_client({row["round"]: _visits_column(row, "whole", "norm") for row in run.probes}),
        f"{metric_title(metric)} on its own test examples": _by_client(
            {at: _metric_column(metric, entries or ()) for at, entries in judged.items()}
        ),
    }
    return {name: numbers for name, numbers in found.items() if numbers}


def _visits_column(row: Mapping[str, Any], *path: str) -> dict[int, float]:
    values = row.get("visits", {})
    for step in path:
        values = values.get(step, {})
    return column(row, values)


def _metric_column(metric: str, entries: Sequence[Mapping[str, Any] | None]) -> dict[int, float]:
    read = {client: finite_number(entry.get(metric)) for client, entry in enumerate(entries) if entry is not None}
    return {client: value for client, value in read.items() if value is not None}


def _by_client(rounds: Mapping[int, Mapping[int, float]]) -> Numbers:
    found: dict[int, dict[int, float]] = {}
    for at in thin_rounds(sorted(rounds), MOST_ROUNDS):
        for client, value in rounds[at].items():
            found.setdefault(client, {})[at] = value
    return found


def _client_lines(one: Clients, clients: Sequence[int], numbers: Numbers) -> list[Trace]:
    """The lines of those clients that have numbers, the named ones last, so that none hides them."""
    held = [client for client in clients if client in numbers]
    labels = dict(zip(clients, distinct_names(map(one.label, clients)), strict=True))
    named = [client for client in held if client in one.named]
    faint = [_client_line(labels[client], numbers[client]) for client in held if client not in one.named]
    return faint + [_client_line(labels[client], numbers[client], at) for at, client in enumerate(named)]


def _client_line(label: str, numbers: Mapping[int, float], place: int | None = None) -> Trace:
    """A client's line; `place` is its place among those that the diagnosis names, if it is one of them."""
    at = 1 if place is None else place + 1  # the first colour is the methods'
    colour = FAINT if place is None else PALETTE[at % len(PALETTE)][0]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(numbers) <= 30 else "lines",
        "name": label,
        "x": sorted(numbers),
        "y": [round_digits(numbers[at], 5) for at in sorted(numbers)],
        "line": {
            "color": colour,
            "width": 1 if place is None else 3,
            "dash": DASHES[at // len(PALETTE) % len(DASHES)],
        },
        "marker": {"color": colour, "size": 3 if place is None else 6},
        "showlegend": place is not None,
        "meta": {"faint": place is None},
        "hovertemplate": "%{fullData.name}, round %{x}: %{y:.4~g}<extra></extra>",
    }
