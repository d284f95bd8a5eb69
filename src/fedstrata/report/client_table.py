"""Every client in a row: what it holds, how often it took part, how well it is served; and scores over clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedstrata.diagnosis.evidence import finite_number
from fedstrata.report.client_figures import client_name, global_scores, own_scores, shown_runs
from fedstrata.report.figures import class_names
from fedstrata.report.formatting import NONE, comma_list, mean, spread
from fedstrata.report.run_groups import RunGroup, is_lower_better, judged_alike, primary_of
from fedstrata.report.tables import HtmlTable
from fedstrata.runs.reader import SavedRun

MOST = 200
"""Rows at most: as many clients as facts.json tells of."""


def client_table(groups: Sequence[RunGroup]) -> HtmlTable | None:
    """A row per client, those first that the diagnosis names, then the worst served; None where nothing is known."""
    held = [(group, run) for group, run in shown_runs(judged_alike(groups)) if run.records]
    clients = _clients(held)
    if not clients:
        return None
    named = _named([group for group, _ in held])
    scores = {(at, kind): read(run) for at, (_, run) in enumerate(held) for kind, read in _SCORES.items()}
    usual = {client: mean(found.get(client) for found in scores.values()) for client in clients}
    sign = -1 if held and is_lower_better([held[0][0]]) else 1
    order = sorted(clients, key=lambda c: (c not in named, usual[c] is None, sign * (usual[c] or 0.0), c))[:MOST]
    columns = [*_data_columns(held), *_visit_columns(held), *_score_columns(held, scores)]
    rows = [
        (client_name(held[0][1], client), *(cells.get(client, NONE) for _, cells in columns), _why(named, client))
        for client in order
    ]
    head = ("client", *(name for name, _ in columns), "named by the diagnosis")
    words = frozenset(at for at, name in enumerate(head) if name in ("client", "classes", "named by the diagnosis"))
    return HtmlTable(_caption(held, len(clients)), head, tuple(rows), words=words).without()


_SCORES = {"global model": global_scores, "own model": own_scores}
Cells = Mapping[int, str]
"""Client → what its row says."""
Held = Sequence[tuple[RunGroup, SavedRun]]


def _caption(held: Held, count: int) -> str:
    seeds = {str(run.config.get("seed", 0)) for _, run in held}
    several = any(len(group.runs) > 1 for group, _ in held)
    return (
        "Client by client"
        + (f", {MOST} of {count}" if count > MOST else "")
        + (f", of seed {comma_list(sorted(seeds))} alone" if several else "")
    )


def _clients(held: Held) -> list[int]:
    """All that are known to exist."""
    found = {client for _, run in held for record in run.records for client in record.clients}
    for _, run in held:
        examples = run.facts.get("examples")
        found |= set(range(len(examples))) if isinstance(examples, list) else set()
        found |= set(global_scores(run)) | set(own_scores(run))
    return sorted(found)


def _data_columns(held: Held) -> list[tuple[str, Cells]]:
    """How many examples and classes each has, where all runs are of the same data."""
    facts = [{name: run.facts.get(name) for name in ("examples", "counts", "newcomers")} for _, run in held]
    if any(one != facts[0] for one in facts):
        return []
    examples, counts, late = (facts[0][name] for name in ("examples", "counts", "newcomers"))
    found: list[tuple[str, Cells]] = []
    if isinstance(examples, list):
        found.append(("examples", {c: f"{n:,}" for c, n in enumerate(examples) if isinstance(n, int)}))
    if isinstance(counts, list):
        names = class_names(held[0][1], max(map(len, counts)))
        found.append(("classes", {c: _classes_text(row, names) for c, row in enumerate(counts)}))
    if isinstance(late, list):
        found.append(("newcomer", dict.fromkeys(late, "yes")))
    return found


def _classes_text(row: Sequence[Any], names: Sequence[str]) -> str:
    """'3 of 10, most cat (62 %)'."""
    counts = [finite_number(value) or 0 for value in row]
    if not sum(counts):
        return NONE
    most = max(range(len(counts)), key=counts.__getitem__)
    present = sum(count > 0 for count in counts)
    return f"{present} of {len(names)}, most {names[most]} ({100 * counts[most] / sum(counts):.0f} %)"


def _visit_columns(held: Held) -> list[tuple[str, Cells]]:
    """In how many rounds each took part, and how many of its updates were not used."""
    found: list[tuple[str, Cells]] = []
    for group, run in held:
        seen = Counter(client for record in run.records for client in record.clients)
        refused = Counter(one["client"] for record in run.records for one in record.refused)
        found.append((_column("rounds", group, held), {client: f"{n:,}" for client, n in seen.items()}))
        found.append((_column("refused", group, held), {client: f"{n:,}" for client, n in refused.items()}))
    same = len({tuple(sorted(cells.items())) for name, cells in found if name.startswith("rounds")}) == 1
    return [("rounds", found[0][1]), *(one for one in found if one[0].startswith("refused"))] if same else found


def _score_columns(held: Held, scores: Mapping[tuple[int, str], Mapping[int, float]]) -> list[tuple[str, Cells]]:
    metric = primary_of([group for group, _ in held])
    return [
        (_column(kind, held[at][0], held), {client: spread([value], metric) for client, value in found.items()})
        for (at, kind), found in scores.items()
    ]


def _column(name: str, group: RunGroup, held: Held) -> str:
    return name if len(held) == 1 else f"{name}, {group.label}"


def _named(groups: Sequence[RunGroup]) -> dict[int, list[str]]:
    """Client → the findings that name it."""
    found: dict[int, list[str]] = {}
    for group in groups:
        for finding in () if isinstance(group.diagnosis, Exception) else group.diagnosis.findings:
            for client in finding.clients:
                found.setdefault(client, []).append(finding.name.replace("-", " "))
    return found


def _why(named: Mapping[int, Sequence[str]], client: int) -> str:
    return comma_list(list(dict.fromkeys(named[client]))) if client in named else NONE
