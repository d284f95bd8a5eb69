"""Flower's mods around an update: clipping, noise, or whatever a user puts there, where the change is all that travels.

A mod sees what it knows from Flower's own apps: one record with the parameters as they were sent, and one with the same
names as they are now. What it makes of them is what is sent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.core import Assignment, Update
from fedstrata.errors import UsageError, one_line
from fedstrata.tensors import Tensors, own_rng

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message

Mod = Callable[..., Any]


def check_mods(mods: Sequence[Mod]) -> None:
    """Refuse what needs a server of Flower's own."""
    for mod in mods:
        name = getattr(mod, "__name__", type(mod).__name__)
        if "secagg" in name or name in ("fixedclipping_mod", "adaptiveclipping_mod"):
            raise UsageError(f"{name} needs one of Flower's own strategies on the server; LocalDpMod does without")


def modified(mods: Sequence[Mod], asked: Assignment, update: Update, message: Message, context: Context) -> Update:
    """An update after the mods.

    Raises:
        UsageError: if the method sends more than the change of parameters, which the mods would not see.
    """
    if not mods:
        return update
    more = [f"what '{name}' sends" for name in update.slots] + ["running statistics"] * bool(update.buffers)
    if more:
        raise UsageError(f"Flower's mods change parameters only, and {' and '.join(more)} would leave this site as is")
    before = {name: asked.params[name] for name in update.delta}
    after = {name: tensor + update.delta[name] for name, tensor in before.items()}
    with own_rng():  # a visit's streams are known to the server, and noise must not be
        random.seed()
        np.random.seed()
        torch.seed()
        found = _called(mods, before, after, update.examples, message, context)
    return replace(update, delta={name: found[name] - tensor for name, tensor in before.items()}, finite=False)


def _called(
    mods: Sequence[Mod], before: Tensors, after: Tensors, examples: int, message: Message, context: Context
) -> Tensors:
    """The parameters as the mods let them go, the first mod outermost."""
    from flwr.app import Message as Letter
    from flwr.app import MetricRecord, RecordDict
    from flwr.app.message import make_message

    def innermost(asked: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": examples})
        return Letter(RecordDict({"arrays": _record(after), "metrics": metrics}), reply_to=asked)

    call: Callable[[Message, Context], Message] = innermost
    for mod in reversed(mods):
        call = _around(mod, call)
    reply = call(make_message(message.metadata, RecordDict({"arrays": _record(before)})), context)
    if reply.has_error():
        raise UsageError(f"a mod refused: {one_line(str(reply.error.reason), 200)}")
    records = list(reply.content.array_records.values())
    if len(records) != 1 or list(records[0]) != list(before):
        raise UsageError("a mod must leave one record of parameters, with the names that it found")
    return {name: _tensor(array.numpy(), before[name]) for name, array in records[0].items()}


def _around(mod: Mod, call: Callable[[Message, Context], Message]) -> Callable[[Message, Context], Message]:
    return lambda message, context: mod(message, context, call)


def _record(tensors: Tensors) -> ArrayRecord:
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({name: Array(tensor.detach().numpy()) for name, tensor in tensors.items()})


def _tensor(array: Any, like: Tensor) -> Tensor:
    """An array that a mod left, in the type and shape that it had."""
    found = torch.from_numpy(np.array(array)).to(like.dtype)
    if found.shape != like.shape:
        raise UsageError(f"a mod changed a shape to {list(found.shape)}")
    return found
