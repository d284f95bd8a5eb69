"""Flower's mods around an update: clipping, noise, or whatever a user puts there, where the change is all that travels.

A mod sees what it knows from Flower's own apps: one record with the parameters as they were sent, and one with the same
names as they are now. What it makes of them is what is sent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedstrata import wire
from fedstrata.core.rng import preserve_rng
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Update
from fedstrata.errors import UsageError, one_line
from fedstrata.flower.messages import TrainReply, to_records

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message, RecordDict

Mod = Callable[..., Any]
CONFIGS = "secaggplus_configs"
"""The record in which a mod of secure aggregation and the server talk."""


def check_mods(mods: Sequence[Mod]) -> None:
    """Refuse what needs a server of Flower's own, and what would come after the masks."""
    for number, mod in enumerate(mods):
        if name_of(mod) == "adaptiveclipping_mod":
            raise UsageError(
                "adaptiveclipping_mod needs one of Flower's own strategies on the server; fixedclipping_mod does not"
            )
        if masks(mod) and number:
            raise UsageError(f"{name_of(mod)} must be the first mod: what it has masked cannot be changed any more")


def name_of(mod: Mod) -> str:
    """What a mod is called."""
    return str(getattr(mod, "__name__", type(mod).__name__))


def masks(mod: Mod) -> bool:
    """True for Flower's mods of secure aggregation."""
    return name_of(mod) in ("secagg_mod", "secaggplus_mod")


@contextmanager
def fresh_numbers() -> Iterator[None]:
    """Random numbers that nobody can know: a visit's streams are known to the server."""
    with preserve_rng():
        random.seed()
        np.random.seed()
        torch.seed()
        yield


def apply_mods(
    mods: Sequence[Mod], asked: Assignment, update: Update, clip: float, message: Message, context: Context
) -> Update:
    """An update after the mods; `clip` is the largest norm that the server allows, 0 for any.

    Raises:
        UsageError: if the method sends more than the change of parameters, which the mods would not see, or if one
            side wants changes clipped and the other does not.
    """
    clips = any(name_of(mod) == "fixedclipping_mod" for mod in mods)
    if clips and not clip:
        raise UsageError("fixedclipping_mod needs a norm from the server: server_app(…, dp_clip=…)")
    if clip and not clips:
        raise UsageError("the server wants changes clipped: client_app(…, mods=[fixedclipping_mod])")
    if not mods:
        return update
    inner = [mod for mod in mods if not masks(mod)]
    more = [f"what '{name}' sends" for name in update.slots] + ["running statistics"] * bool(update.buffers)
    if more:
        raise UsageError(f"Flower's mods change parameters only, and {' and '.join(more)} would leave this site as is")
    if not inner or not update.delta:
        return update
    before = {name: asked.params[name] for name in update.delta}
    after = {name: tensor + update.delta[name] for name, tensor in before.items()}
    with fresh_numbers():
        found = _call(inner, before, after, (update.examples, clip), message, context)
    return replace(update, delta={name: found[name] - tensor for name, tensor in before.items()}, finite=False)


Answered = Callable[["Message", "Context"], tuple[TrainReply, Update | None, float]]
"""What trains: the answer, the update and the client's weight."""


def answer_masked(mod: Mod, answer_message: Answered, message: Message, context: Context) -> Message:
    """The reply to one stage of secure aggregation; in the stage that asks for an update, what trains is called."""
    from flwr.app import Message as FlowerMessage
    from flwr.app import RecordDict as Records

    asked = message.content.config_records.get(CONFIGS)
    if asked is None:
        why = "this site sends updates only under secure aggregation: the server needs secure=true"
        return FlowerMessage(to_records(TrainReply(refusal=why)), reply_to=message)
    why = _hides_nothing(asked)
    if why:
        return FlowerMessage(to_records(TrainReply(refusal=why)), reply_to=message)
    content = Records()
    if asked.get("stage") == "collect_masked_vectors":
        answer, update, weight = answer_message(message, context)
        if update is None:
            return FlowerMessage(to_records(answer), reply_to=message)
        content = _result(update.delta, weight)
        content.update(to_records(answer, wire.encode(replace(update, delta={})), inside=True))
    with fresh_numbers():
        reply: Message = mod(message, context, lambda message, context: FlowerMessage(content, reply_to=message))
    return reply


def _hides_nothing(asked: Mapping[str, Any]) -> str:
    """Why a site must not take part in a stage that would unmask it; the mod itself does not look."""
    if asked.get("stage") == "setup":
        clients, threshold = asked.get("sample_num"), asked.get("threshold")
        if not (isinstance(clients, int) and isinstance(threshold, int) and 3 <= clients < 2 * threshold):
            return "so few clients, or so few that could unmask one, hide nothing"
    if asked.get("stage") == "unmask":
        stayed, gone = asked.get("active_nids"), asked.get("dead_nids")
        if not (isinstance(stayed, list) and isinstance(gone, list)) or set(stayed) & set(gone):
            return "the shares of both secrets of a client would unmask it"
    return ""


def _result(delta: Tensors, weight: float) -> RecordDict:
    """A change of parameters as such a mod expects it: in the form of what Flower's older clients return."""
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
    from flwr.compat.common.recorddict_compat import fitres_to_recorddict

    arrays = ndarrays_to_parameters([tensor.detach().cpu().numpy() for tensor in delta.values()])
    return fitres_to_recorddict(FitRes(Status(Code.OK, ""), arrays, int(weight), {}), keep_input=False)


def _call(
    mods: Sequence[Mod],
    before: Tensors,
    after: Tensors,
    about: tuple[int, float],
    message: Message,
    context: Context,
) -> Tensors:
    """The parameters as the mods let them go, the first mod outermost; `about` are the examples and the norm."""
    from flwr.app import ConfigRecord, MetricRecord, RecordDict
    from flwr.app import Message as FlowerMessage
    from flwr.app.message import make_message

    def innermost(asked: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": about[0]})
        return FlowerMessage(RecordDict({"arrays": _record(after), "metrics": metrics}), reply_to=asked)

    call: Callable[[Message, Context], Message] = innermost
    for mod in reversed(mods):
        call = _around(mod, call)
    sent = RecordDict({"arrays": _record(before), "config": ConfigRecord({"clipping_norm": about[1]})})
    reply = call(make_message(message.metadata, sent), context)
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
