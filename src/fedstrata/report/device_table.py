"""What visits take on each kind of device of a fleet, and how well its clients are served."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from fedstrata.core.text import simulated_text
from fedstrata.errors import UsageError
from fedstrata.fleet.devices import devices_of
from fedstrata.report.client_figures import global_scores, own_scores
from fedstrata.report.formatting import NONE, bytes_or_dash, flops_or_dash, spread
from fedstrata.report.run_groups import RunGroup, is_lower_better, primary_of
from fedstrata.report.tables import HtmlTable, drop_empty_columns
from fedstrata.runs.reader import SavedRun

HEAD = ("method", "device", "clients", "visits", "in time", "up", "down", "computed", "simulated time", "memory")
SCORES = (
    "global model, mean score",
    "global model, worst score",
    "own models, mean score",
    "own models, worst score",
)


def device_table(groups: Sequence[RunGroup]) -> HtmlTable | None:
    """A row per method and kind of device: a visit in the mean, and its clients' scores; None without a fleet."""
    rows, places = list[tuple[str, ...]](), list[int]()
    for group in groups:
        held = _clients_of(group.shown_run)
        for device in held:
            rows.append((group.name, device, *_row(group, device, held[device])))
            places.append(group.index)
    if not rows:
        return None
    caption = "By device: a visit in the mean, the largest step in memory, and its clients' scores on their own tests"
    table = HtmlTable(caption, (*HEAD, *SCORES), tuple(rows), tuple(places), frozenset({0, 1}))
    return drop_empty_columns(table)


def _clients_of(run: SavedRun) -> Mapping[str, list[int]]:
    """Device → its clients; nothing where the fleet is not known, or names files that are not here."""
    fleet, clients = run.config.get("fleet"), run.facts.get("clients")
    if fleet is None or not isinstance(clients, int):
        return {}
    try:
        devices = devices_of(str(fleet), clients)
    except (UsageError, OSError):
        return {}
    found: dict[str, list[int]] = {}
    for client, device in enumerate(devices):
        found.setdefault(device.name, []).append(client)
    return found


def _row(group: RunGroup, device: str, clients: Sequence[int]) -> tuple[str, ...]:
    """The cells after the device's name."""
    uses = [use for run in group.runs for record in run.records for use in record.devices if use.device == device]
    visits = sum(use.visits for use in uses)
    late = sum(client in clients for run in group.runs for record in run.records for client in record.late)
    per_visit = (
        [sum(getattr(use, name) for use in uses) / visits for name in ("bytes_up", "bytes_down", "flops", "seconds")]
        if visits
        else [None] * 4
    )
    up, down, flops, seconds = per_visit
    judged = ([_scores(read(run), clients) for run in group.runs] for read in (global_scores, own_scores))
    worst, metric = max if is_lower_better([group]) else min, primary_of([group])
    return (
        str(len(clients)),
        f"{visits:,}",
        NONE if not late else f"{visits / (visits + late):.0%}",
        bytes_or_dash(up),
        bytes_or_dash(down),
        flops_or_dash(flops),
        NONE if seconds is None else simulated_text(seconds),
        bytes_or_dash(max((use.memory for use in uses), default=None)),
        *(
            spread([of(found) for found in scores if found], metric)
            for scores in judged
            for of in (statistics.fmean, worst)
        ),
    )


def _scores(found: Mapping[int, float], clients: Sequence[int]) -> list[float]:
    """Those of these clients."""
    return [found[client] for client in clients if client in found]
