"""Figures of who trained what: strata over the rounds, and client by client."""

from __future__ import annotations

from collections.abc import Sequence

from fedstrata.report.client_figures import client_name
from fedstrata.report.figures import PERCENT, Figure, Trace, axis, frame_key, layout, rounds_axis
from fedstrata.report.formatting import distinct_names, round_digits
from fedstrata.report.outlier_figures import MOST_CLIENTS
from fedstrata.report.run_groups import RunGroup, merge_orders, strata_of
from fedstrata.report.stratum_figures import MOST_ROUNDS, method_control, thin_rounds
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.trainings import trained_rounds, trained_shares


def who_trained_what(groups: Sequence[RunGroup]) -> list[Figure]:
    """Stratum × round, and client × stratum; nothing where all clients always train everything."""
    held = [group for group in groups if _is_partial(group.shown_run)]
    if not held:
        return []
    method = method_control("training-method", held)
    names = [_strata_in(group) for group in held]
    over = {frame_key(m): [_round_trace(group.shown_run, names[m])] for m, group in enumerate(held)}
    by_client = {frame_key(m): [_client_trace(group.shown_run, names[m])] for m, group in enumerate(held)}
    most = max(map(len, names))
    clients = max(len(trained_rounds(group.shown_run.records)) for group in held)
    rows = axis("", type="category", autorange="reversed", dtick=1, showgrid=False)
    about = (
        "The share of the round's clients that trained a stratum, from the input at the top to the output. What was "
        "refused, or came too late, is not counted."
    )
    about_clients = "In how many rounds each client trained each stratum, and its update was used." + (
        f" Of {clients} clients the {MOST_CLIENTS} that trained least are shown." if clients > MOST_CLIENTS else ""
    )
    first = layout(rounds_axis(), rows, height=170 + 21 * most)
    second = layout(axis("", type="category"), rows, height=190 + 17 * min(clients, MOST_CLIENTS))
    return [
        Figure("trained-rounds", "Strata over the rounds", about, [], first, (method,), over),
        Figure("trained-clients", "Client by client", about_clients, [], second, (method,), by_client),
    ]


def _is_partial(run: SavedRun) -> bool:
    """True if some stratum was left out somewhere: for a whole round, or by some of its clients."""
    shares = [trained_shares(record) for record in run.records if record.active]
    strata = {name for found in shares for name in found}
    partly = any(found.get(name, 0.0) < 1 for found in shares for name in strata)
    return partly or bool(strata and run.facts.get("unaffordable"))


def _strata_in(group: RunGroup) -> list[str]:
    """The strata that anybody trained, and those that nobody can afford, in the model's order."""
    orders = [tuple(part.strata) for record in group.shown_run.records for part in record.trainings]
    seen = {name for names in orders for name in names} | set(group.shown_run.facts.get("unaffordable", ()))
    return [name for name in merge_orders([tuple(strata_of([group])), *dict.fromkeys(orders)]) if name in seen]


def _round_trace(run: SavedRun, names: Sequence[str]) -> Trace:
    rounds = thin_rounds([record.round for record in run.records if record.active], MOST_ROUNDS)
    shares = {record.round: trained_shares(record) for record in run.records if record.round in set(rounds)}
    rows = [[round_digits(shares[at].get(name, 0.0), 4) for at in rounds] for name in names]
    look = {"zmin": 0, "zmax": 1, "colorbar": {"thickness": 12, "tickformat": PERCENT}}
    hover = f"%{{y}}, round %{{x}}: %{{z:{PERCENT}}} of its clients<extra></extra>"
    return {**_heat(rounds, distinct_names(names), rows, hover), **look}


def _client_trace(run: SavedRun, names: Sequence[str]) -> Trace:
    found = trained_rounds(run.records)
    order = sorted(found, key=lambda client: (found[client].total(), client))[:MOST_CLIENTS]
    labels = distinct_names(_label(run, client) for client in order)
    rows = [[found[client][name] for name in names] for client in order]
    hover = "%{y}, %{x}: %{z} rounds<extra></extra>"
    most = max(sum(bool(record.active) for record in run.records), 1)
    look = {"zmin": 0, "zmax": most, "colorbar": {"thickness": 12, "title": {"text": "rounds"}, "tickformat": "d"}}
    return {**_heat(distinct_names(names), labels, rows, hover), **look}


def _label(run: SavedRun, client: int) -> str:
    name = client_name(run, client)
    return f"client {client}" if name == str(client) else name


def _heat(x: Sequence[object], y: Sequence[str], rows: Sequence[Sequence[object]], hover: str) -> Trace:
    look = {"colorscale": "Viridis", "xgap": 1, "ygap": 1, "hovertemplate": hover}
    return {"type": "heatmap", "x": x, "y": y, "z": rows, **look}
