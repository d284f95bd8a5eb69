"""How many bytes a message takes, without encoding it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fedstrata.core.types import Assignment, Update
from fedstrata.wire.messages import assignment_head, common_part, head_of, tensors_of
from fedstrata.wire.packing import index_of, json_bytes, structure_of


@lru_cache(maxsize=256)
def _assignment_frame(*common: Any) -> int:
    return len(json_bytes(assignment_head(*common)))


def size(message: Assignment | Update) -> int:
    """Number of bytes that the message takes on the wire, without encoding it.

    What assignments have in common is measured once.
    """
    if isinstance(message, Assignment):
        head = _assignment_frame(*common_part(message)) + len(str(message.client)) + len(str(message.seed)) - 2
    else:
        head = len(json_bytes(head_of(message)))
    header, data = index_of[structure_of(tensors_of(message))]
    return 8 + head + len(header) + data


def slot_sizes(update: Update) -> dict[str, int]:
    """Technique → how many bytes the numbers in its slot take."""
    return {name: sum(t.numel() * t.itemsize for t in slot.values()) for name, slot in update.slots.items()}
