"""Figures of who trained what: strata over the rounds, of all clients or of one, and client by client."""

from __future__ import annotations

from collections.abc import Sequence

from fedstrata.report.client_figures import client_name
from fedstrata.report.figures import PERCENT, Control, Figure, Trace, axis, cell_rounds_axis, frame_key, layout
from fedstrata.report.formatting import distinct_names, escape, round_digits
from fedstrata.report.outlier_figures import MOST_CLIENTS
from fedstrata.report.run_groups import RunGroup, merge_orders, strata_of
from fedstrata.report.stratum_figures import MOST_ROUNDS, MOST_TRACES, method_control, thin_rounds
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.trainings import strata_trained_by, trained_rounds, trained_shares

MOST_CELLS = 200_000
"""Of all pictures of single clients together, so that a page of many methods stays small."""
_SHARE = {"zmin": 0, "zmax": 1, "colorbar": {"thickness": 12, "tickformat": PERCENT}}


def who_trained_what(groups: Sequence[RunGroup]) -> list[Figure]:
    """Stratum × round, of all or of one client, and client × stratum; nothing where all always train everything."""
    held = [group for group in groups if _is_partial(group.shown_run)]
    if not held:
        return []
    method = method_control("training-method", held)
    names = [_strata_in(group) for group in held]
    chosen = _single_clients(held, names)
    who = Control("training-client", "Clients", ("all", *chosen.values()), whole=True)
    over = {frame_key(m, 0): [_round_trace(group.shown_run, names[m])] for m, group in enumerate(held)}
    for c, client in enumerate(chosen, 1):
        over |= {frame_key(m, c): [_own_trace(group.shown_run, names[m], client)] for m, group in enumerate(held)}
    by_client = {frame_key(m): [_client_trace(group.shown_run, names[m])] for m, group in enumerate(held)}
    most = max(map(len, names))
    clients = max(len(trained_rounds(group.shown_run.records)) for group in held)
    rows = axis("", type="category", autorange="reversed", dtick=1, showgrid=False)
    about = (
        "The share of the round's clients that trained a stratum, from the input at the top to the output; of one "
        "client, whether it did, in the rounds in which it took part. What was refused, or came too late, is not "
        "counted."
    )
    about_clients = "In how many rounds each client trained each stratum, and its update was used." + (
        f" Of {clients} clients the {MOST_CLIENTS} that trained least are shown." if clients > MOST_CLIENTS else ""
    )
    every = sorted({at for group in held for at in _rounds_of(group.shown_run)})
    first = layout(cell_rounds_axis(every), rows, height=170 + 21 * most)
    second = layout(axis("", type="category"), rows, height=190 + 17 * min(clients, MOST_CLIENTS))
    return [
        Figure("trained-rounds", "Strata over the rounds", about, [], first, (method, who), over),
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
    rounds = _rounds_of(run)
    shares = {record.round: trained_shares(record) for record in run.records if record.round in set(rounds)}
    rows = [[round_digits(shares[at].get(name, 0.0), 4) for at in rounds] for name in names]
    hover = f"%{{y}}, round %{{x}}: %{{z:{PERCENT}}} of its clients<extra></extra>"
    return {**_heat(rounds, distinct_names(names), rows, hover), **_SHARE}


def _single_clients(held: Sequence[RunGroup], names: Sequence[Sequence[str]]) -> dict[int, str]:
    """Client → its name, of as many as a page can show one by one: those that trained least."""
    cells = sum(len(names[m]) * len(_rounds_of(group.shown_run)) for m, group in enumerate(held))
    order = _by_training(held[0].shown_run)
    order += sorted({c for group in held[1:] for c in _by_training(group.shown_run)}.difference(order))
    chosen = sorted(order[: min(MOST_TRACES, MOST_CELLS // max(cells, 1))])
    return dict(zip(chosen, distinct_names(_label(held[0].shown_run, client) for client in chosen), strict=True))


def _rounds_of(run: SavedRun) -> list[int]:
    """The rounds that are shown: those in which anything trained."""
    return thin_rounds([record.round for record in run.records if record.active], MOST_ROUNDS)


def _own_trace(run: SavedRun, names: Sequence[str], client: int) -> Trace:
    """1 where a client trained a stratum, 0 where it took part and did not, nothing where it did not take part."""
    rounds, records = _rounds_of(run), {record.round: record for record in run.records}
    found = {at: strata_trained_by(records[at], client) for at in rounds}
    rows = [[None if (own := found[at]) is None else int(name in own) for at in rounds] for name in names]
    hover = f"{escape(_label(run, client))}, %{{y}}, round %{{x}}: %{{z}}<extra></extra>"
    return {**_heat(rounds, distinct_names(names), rows, hover), **_SHARE}


def _client_trace(run: SavedRun, names: Sequence[str]) -> Trace:
    found = trained_rounds(run.records)
    order = _by_training(run)[:MOST_CLIENTS]
    labels = distinct_names(_label(run, client) for client in order)
    rows = [[found[client][name] for name in names] for client in order]
    hover = "%{y}, %{x}: %{z} rounds<extra></extra>"
    most = max(sum(bool(record.active) for record in run.records), 1)
    look = {"zmin": 0, "zmax": most, "colorbar": {"thickness": 12, "title": {"text": "rounds"}, "tickformat": "d"}}
    return {**_heat(distinct_names(names), labels, rows, hover), **look}


def _by_training(run: SavedRun) -> list[int]:
    """All clients, those that trained least first."""
    found = trained_rounds(run.records)
    return sorted(found, key=lambda client: (found[client].total(), client))


def _label(run: SavedRun, client: int) -> str:
    name = client_name(run, client)
    return f"client {client}" if name == str(client) else name


def _heat(x: Sequence[object], y: Sequence[str], rows: Sequence[Sequence[object]], hover: str) -> Trace:
    look = {"colorscale": "Viridis", "xgap": 1, "ygap": 1, "hovertemplate": hover}
    return {"type": "heatmap", "x": x, "y": y, "z": rows, **look}
