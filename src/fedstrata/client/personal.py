"""What of a model is a client's own: the parameters that it trains and does not send."""

from __future__ import annotations

from typing import Any

from fedstrata.core.tensors import Tensors
from fedstrata.core.types import PERSONAL, Assignment, Slots


def personal_names(assignment: Assignment) -> tuple[str, ...]:
    """The parameters that train and do not travel: the client keeps them."""
    if len(assignment.trains) == len(assignment.uploads):
        return ()
    sent = set(assignment.uploads)
    return tuple(n for n in assignment.trains if n not in sent)


def personal_params(assignment: Assignment, memory: Slots) -> Tensors:
    """The parameters of its own that a client goes on with: what it has kept, as far as it does not travel now."""
    held = memory.get(PERSONAL)
    if not held:
        return {}
    sent = set(assignment.uploads)
    return {n: held[n] for n in assignment.params if n in held and n not in sent}


def params_to_begin_with(assignment: Assignment, memory: Slots) -> Tensors:
    """All parameters, as training begins with them."""
    return {**assignment.params, **personal_params(assignment, memory)} if PERSONAL in memory else assignment.params


def is_personal(assignment: Assignment, structure: tuple[Any, ...]) -> bool:
    """True if a client with a memory of this structure has parameters of its own, or will have some."""
    return bool(personal_names(assignment)) or any(kind == PERSONAL for kind, _ in structure)
