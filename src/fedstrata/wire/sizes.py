"""How many bytes a message takes, without encoding it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from fedstrata.core.stacks import Assignments, UpdateStack, pick
from fedstrata.core.types import Assignment, Update, replace_fields
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


def size_of_all(assignments: Assignments) -> int:
    """Number of bytes that a round's assignments take."""
    zero = (replace_fields(template, client=0, seed=0) for template in assignments.templates)
    frames = [size(template) - 2 for template in zero]
    digits = len("".join(map(str, (*assignments.clients, *assignments.seeds))))
    return digits + sum(pick(frames, assignments.kinds))


def size_of_rows(stack: UpdateStack, rows: Sequence[int]) -> int:
    """Number of bytes that some updates of a stack take, whose numbers are finite."""
    varying = [stack.clients, stack.examples, stack.steps, *stack.metrics.values()]
    if stack.frame is None:
        stack.frame = size(stack.update(0)) - sum(len(repr(values[0])) for values in varying)
    return len(rows) * stack.frame + sum(len("".join(map(repr, pick(values, rows)))) for values in varying)


def slot_sizes(update: Update | UpdateStack) -> dict[str, int]:
    """Technique → how many bytes the numbers in its slot take, of one client where there are several."""
    clients = len(update) if isinstance(update, UpdateStack) else 1
    return {name: sum(t.numel() * t.itemsize for t in slot.values()) // clients for name, slot in update.slots.items()}
