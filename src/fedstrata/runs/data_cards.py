"""What a client's inputs look like, in a few numbers of a few of its examples: a card per client in facts.json."""

from __future__ import annotations

import math
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
    held = [clients.whole] if isinstance(clients, Split) else [clients[place] for place in range(min(len(clients), 1))]
    first = held[0] if held else None
    if not isinstance(first, TensorExamples) or isinstance(first.x, Parts):
        return None
    if not (first.x.is_floating_point() or first.x.dtype == torch.uint8) or first.x.dim() < 2:
        return None
    size, cards = sizes(clients), []
    for client in range(min(len(clients), most)):
        count = size(client)
        mine = clients[client]
        if not isinstance(mine, TensorExamples):
            return None
        rows = torch.linspace(0, count - 1, min(count, SAMPLED)).round().long()
        cards.append(data_card((mine if seen is None else seen[client]).batch(rows)[0]) if count else None)
    return cards


def data_card(inputs: Tensor) -> dict[str, Any]:
    """What some inputs, rows first, look like.

    `mean` and `std` are of each channel of an image, of each number of a row of a table (if there are at most 64), or
    of all numbers together; `min` and `max` of all. Numbers that are not finite count as missing and are left out.
    `constant` is the share of inputs that are one number throughout, `duplicates` of those that are equal to an earlier
    one.
    """
    values = inputs.detach().double()
    apart = values.shape[1] if values.dim() in (2, 4) and values.shape[1] <= COLUMNS else 1
    columns = values.reshape(len(values), apart, -1).transpose(0, 1).reshape(apart, -1)
    there = columns.isfinite()
    known = columns.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    count = there.sum(1)
    mean = known.sum(1) / count.clamp(min=1)
    square = ((known - mean.unsqueeze(1)) * there).square().sum(1) / count.clamp(min=1)
    some = columns[there]
    flat = values.flatten(1)
    first = flat[:, :1]
    return {
        "mean": _rounded(mean, count),
        "std": _rounded(square.sqrt(), count),
        "min": _number(some.min().item() if len(some) else math.nan),
        "max": _number(some.max().item() if len(some) else math.nan),
        "missing": _number(1 - count.sum().item() / max(columns.numel(), 1)),
        "constant": _number((flat == first).all(1).double().mean().item() if flat.shape[1] > 1 else 0.0),
        "duplicates": _number(1 - _distinct(flat) / max(len(flat), 1)),
    }


def _distinct(rows: Tensor) -> int:
    """How many rows are different, by their products with one fixed vector: to sort numbers takes less than rows."""
    along = torch.linspace(1, 2, rows.shape[1], dtype=torch.float64).sqrt()
    return len(set((rows.nan_to_num() @ along).tolist()))


def _rounded(values: Tensor, count: Tensor) -> list[float | None]:
    return [_number(value if n else math.nan) for value, n in zip(values.tolist(), count.tolist(), strict=True)]


def _number(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
