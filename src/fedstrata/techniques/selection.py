"""What techniques share that choose among strata: how a stratum is named, measured and chosen, who said what of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedstrata.core.lazy import torch
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Stratum

if TYPE_CHECKING:
    from torch import Tensor

CHOICE = "both say which strata train"
ONE_MODEL = "strata are chosen in one model, and groupavg has one for each group"
REFUSED = {"fedpart": CHOICE, "groupavg": ONE_MODEL}
SCORE = "score/"
"""Where a state keeps a number per stratum."""
LARGEST = 1e30
"""Largest score that is believed: weighted means of such numbers are finite, also in single precision."""
_CLIENTS, _ROW = "clients", "client/"


def key_of(stratum: Stratum) -> str:
    """What stands for a stratum in states and slots: the name of its first parameter."""
    return stratum.params[0]


def train_only(assignment: Assignment, chosen: Iterable[Stratum]) -> Assignment:
    """Only these strata train and travel, with their running statistics."""
    group = tuple(chosen)
    params = tuple(n for s in group for n in s.params)
    return replace(assignment, trains=params, uploads=params, upload_buffers=tuple(n for s in group for n in s.buffers))


def squared_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Σ‖t‖², in single precision at least."""
    wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    return torch.stack([t.square().sum() for t in wide]).sum()


def names_by_stratum(strata: Sequence[Stratum], names: Iterable[str]) -> dict[str, list[str]]:
    """Stratum's key → those of its parameters that are among the names; without strata that have none."""
    there = set(names)
    found = {key_of(s): [n for n in s.params if n in there] for s in strata if not s.idle}
    return {key: held for key, held in found.items() if held}


def validate_scores(slot: Tensors, assignment: Assignment) -> str | None:
    """Why numbers per stratum from a client must be refused, or None; −1 stands for one that it cannot tell."""
    for name, value in slot.items():
        if name not in assignment.params:
            return f"its score of '{name[:100]}' is of no part of the model"
        if value.dim() or not value.is_floating_point() or (value < 0 and value != -1):
            return f"its score of '{name}' is no number of 0 or more"
        if value > LARGEST:
            return f"its score of '{name}' is {float(value):.3g}, and none is believed above {LARGEST:g}"
    return None


def read_scores(slot: Tensors) -> dict[str, float]:
    """The numbers per stratum that a client sent, without those that it could not tell."""
    return {name: number for name, value in slot.items() if (number := float(value)) >= 0}


def weighted_means(reports: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Stratum's key → Σ weight·number / Σ weight over those who sent one."""
    sums: dict[str, tuple[float, float]] = {}
    for report, weight in zip(reports, weights, strict=True):
        for key, number in report.items():
            total, count = sums.get(key, (0.0, 0.0))
            sums[key] = total + weight * number, count + weight
    return {key: total / count for key, (total, count) in sums.items() if count}


def score_tensors(scores: Mapping[str, float]) -> Tensors:
    """Numbers per stratum as a state keeps them."""
    return {SCORE + key: torch.tensor(number, dtype=torch.float64) for key, number in scores.items()}


def scores_in(state: Tensors) -> dict[str, float]:
    """Stratum's key → the number that a state keeps of it."""
    return {name.removeprefix(SCORE): float(value) for name, value in state.items() if name.startswith(SCORE)}


def remember_reports(state: Tensors, reports: Mapping[int, Mapping[str, float]], keys: Iterable[str]) -> Tensors:
    """The part of a state that holds a row for each client that ever sent numbers: after a round's reports.

    Clients are sorted; what one did not tell now stays as it was.
    """
    before = state.get(_CLIENTS, torch.empty(0, dtype=torch.int64))
    came = torch.tensor(sorted(reports), dtype=torch.int64)
    new = came[~torch.isin(came, before)]
    clients, order = torch.cat([before, new]).sort()
    places = torch.searchsorted(clients, came)
    kept = {_CLIENTS: clients}
    for key in keys:
        column = state.get(_ROW + key, torch.full((len(before),), -1.0))
        column = torch.cat([column, torch.full((len(new),), -1.0)])[order]
        told = torch.tensor([reports[client].get(key, -1.0) for client in came.tolist()], dtype=column.dtype)
        column[places] = torch.where(told >= 0, told, column[places])
        kept[_ROW + key] = column
    return kept


def recall_report(state: Tensors, client: int) -> dict[str, float]:
    """Stratum's key → the last number that a client sent of it; empty for one that never sent any."""
    number, clients = int(client), state.get(_CLIENTS)
    if clients is None:
        return {}
    place = int(torch.searchsorted(clients, number))
    if place == len(clients) or int(clients[place]) != number:
        return {}
    columns = ((name, column) for name, column in state.items() if name.startswith(_ROW))
    row = {name.removeprefix(_ROW): float(column[place]) for name, column in columns}
    return {key: told for key, told in row.items() if told >= 0}


def last_reports(state: Tensors) -> dict[str, Tensor]:
    """Stratum's key → the last numbers of all clients that ever sent one of it."""
    columns = {name.removeprefix(_ROW): column for name, column in state.items() if name.startswith(_ROW)}
    return {key: column[column >= 0] for key, column in columns.items()}
