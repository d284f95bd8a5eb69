"""What a client's inputs look like, in a few numbers of a few of its examples: a card per client in facts.json."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedstrata.core.parts import Parts
from fedstrata.core.types import Examples
from fedstrata.data.examples import Split, TensorExamples, sizes

SAMPLED = 64
"""Examples of a client that are looked at, evenly spaced, at most."""
COLUMNS = 64
"""Numbers of an input that are told apart: of a row of a table each one, of an image its channels."""
DIGITS = 4
FEWEST = 5
"""Examples of a class that a card tells anything about, at least: a mean of fewer is nearly an example."""
GROUPS = 8
"""Classes of a client that its card tells apart, the most frequent first; of targets that are numbers, as many parts
as `PARTS` says."""
PARTS = 5


def data_cards(
    clients: Sequence[Examples], most: int, seen: Sequence[Examples] | None = None
) -> list[dict[str, Any] | None] | None:
    """A card for each of the first clients, None for one without examples.

    None where inputs would have to be read one by one, consist of several parts, or are no real numbers.

    Args:
        clients: everybody's data.
        most: how many clients get a card.
        seen: the same as clients see it, where faults on purpose change that.
    """
    first = clients.whole if isinstance(clients, Split) else clients[0] if len(clients) else None
    if not isinstance(first, TensorExamples) or isinstance(first.x, Parts):
        return None
    if not (first.x.is_floating_point() or first.x.dtype == torch.uint8) or first.x.dim() < 2:
        return None
    size, cards = sizes(clients), []
    held = [clients[client] for client in range(min(len(clients), most))]
    if not all(isinstance(mine, TensorExamples) for mine in held):
        return None
    looked = [_rows(size(client)) for client in range(len(held))]
    edges = target_edges([mine.labels()[rows] for mine, rows in zip(held, looked, strict=True) if len(rows)])
    for client, rows in enumerate(looked):
        x, y = (held[client] if seen is None else seen[client]).batch(rows)
        cards.append(data_card(x, group_numbers(y, edges)) if len(rows) else None)
    return cards


def _rows(count: int) -> Tensor:
    """Which of a client's examples are looked at."""
    return torch.linspace(0, count - 1, min(count, SAMPLED)).round().long()


def target_edges(targets: Sequence[Tensor]) -> Tensor | None:
    """What parts everybody's targets into fifths; None where they are classes, or no single numbers."""
    known = [one.reshape(-1) for one in targets if one.is_floating_point() and one.numel() == len(one)]
    if not known or len(known) < len(targets):
        return None
    numbers = torch.cat(known).double()
    return numbers.quantile(torch.linspace(0, 1, PARTS + 1, dtype=torch.float64)[1:-1]) if len(numbers) else None


def group_numbers(targets: Tensor, edges: Tensor | None) -> Tensor | None:
    """The class of each example, or the fifth that its target lies in; None where there is no such thing."""
    if edges is not None:
        return torch.bucketize(targets.reshape(-1).double(), edges)
    return None if targets.dim() != 1 or targets.is_floating_point() else targets


def data_card(inputs: Tensor, groups: Tensor | None = None) -> dict[str, Any]:
    """What some inputs, rows first, look like.

    `mean` and `std` are of each channel of an image, of each number of a row of a table (if there are at most 64), or
    of all numbers together; `min` and `max` of all. Numbers that are not finite count as missing and are left out.
    `constant` is the share of inputs that are one number throughout, `duplicates` of those that are equal to an earlier
    one. `count` inputs were looked at; `groups` has `count`, `mean` and `std` of each class that has five at least.
    Where fewer than five inputs are of other classes, these are left out of all moments: the difference between all and
    the groups would give them away.

    Args:
        inputs: of one client.
        groups: the class of each, or the part of the range that its target lies in.
    """
    values = inputs.detach().double()
    flat = values.flatten(1)
    told = frequent_groups(groups)
    kept = values
    if told and groups is not None:
        rest = ~torch.isin(groups, torch.tensor(told))
        kept = values[~rest] if 0 < int(rest.sum()) < FEWEST else values
    some = kept[kept.isfinite()]
    card = {
        **_moments(kept),
        "min": _number(some.min().item() if len(some) else math.nan),
        "max": _number(some.max().item() if len(some) else math.nan),
        "missing": _number(1 - values.isfinite().double().mean().item() if values.numel() else 0.0),
        "constant": _number((flat == flat[:, :1]).all(1).double().mean().item() if flat.shape[1] > 1 else 0.0),
        "duplicates": _number(1 - _distinct(flat) / max(len(flat), 1)),
    }
    if groups is not None:
        card["groups"] = {str(group): _moments(values[groups == group]) for group in told}
    return card


def frequent_groups(groups: Tensor | None) -> list[int]:
    """The classes that a card tells apart: the most frequent ones, of five examples each at least."""
    counts = Counter([] if groups is None else groups.tolist())
    return sorted(group for group, count in counts.most_common(GROUPS) if count >= FEWEST)


def _moments(values: Tensor) -> dict[str, Any]:
    """How many inputs there are, and the mean and the deviation of each column."""
    apart = values.shape[1] if values.dim() in (2, 4) and values.shape[1] <= COLUMNS else 1
    columns = values.reshape(len(values), apart, -1).transpose(0, 1).reshape(apart, -1)
    there = columns.isfinite()
    known = columns.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    count = there.sum(1)
    mean = known.sum(1) / count.clamp(min=1)
    square = ((known - mean.unsqueeze(1)) * there).square().sum(1) / count.clamp(min=1)
    return {"count": len(values), "mean": _rounded(mean, count), "std": _rounded(square.sqrt(), count)}


def _distinct(rows: Tensor) -> int:
    """How many rows are different, by their products with one fixed vector: to sort numbers takes less than rows."""
    along = torch.linspace(1, 2, rows.shape[1], dtype=torch.float64).sqrt()
    return len(set((rows.nan_to_num() @ along).tolist()))


def _rounded(values: Tensor, count: Tensor) -> list[float | None]:
    return [_number(value if n else math.nan) for value, n in zip(values.tolist(), count.tolist(), strict=True)]


def _number(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
