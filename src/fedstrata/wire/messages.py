"""Assignments and updates as bytes, and back: what stands in their heads, and under which names their tensors travel.

The names of the heads' fields are the wire's own (`travels` for an assignment's `uploads`): they do not change with
those in the code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Slots, Turn, Update, Work
from fedstrata.wire.packing import FEW, Names, NotHeld, WireError, distinct, pack, sections, slots_of, unpack
from fedstrata.wire.sparse import pack_sparse, unpack_sparse

Head = TypeVar("Head", bound=BaseModel)

_WORK = TypeAdapter(Work)
_WORK_FIELDS = {f.name for f in fields(Work)}


class _AssignmentHead(BaseModel):
    """What an assignment says besides its tensors."""

    model_config = ConfigDict(extra="forbid", strict=True)
    round: int
    rounds: int
    run_seed: int
    client: int
    arch: str
    trains: list[str] | None
    travels: list[str] | None
    held: bool
    work: dict[str, Any]
    seed: int
    method: str
    slots: list[str]
    reports: list[str] | None = None
    moves: list[str] | None = None
    reuse: bool = False
    turns: list[list[str]] = []
    turn_epochs: list[int] = []
    sparse: list[str] = []
    shapes: list[list[int]] = []


_FIRST_WORK = ("epochs", "steps", "batch_size", "optimizer", "lr", "clip")
"""Fields of Work that every message names; later ones are named where they are not the default."""


class _UpdateHead(BaseModel):
    """What an update says besides its tensors."""

    model_config = ConfigDict(extra="forbid", strict=True)
    round: int
    client: int
    method: str
    examples: int
    steps: int
    metrics: dict[str, float] = Field(max_length=FEW)
    slots: list[str]


def _work_head(work: Work) -> dict[str, Any]:
    """How to train; what was added to the format later is named only where it is unusual: other messages stay."""
    return {f.name: v for f in fields(Work) if (v := getattr(work, f.name)) != f.default or f.name in _FIRST_WORK}


def encode(message: Assignment | Update) -> bytes:
    """The message as bytes. An assignment carries only what its client does not hold (`to_send`)."""
    return pack(head_of(message), tensors_of(message))


def assignment_head(
    round: int,
    rounds: int,
    run_seed: int,
    arch: str,
    trains: Names | None,
    travels: Names | None,
    held: bool,
    work: Work,
    method: str,
    slots: Names,
    unusual: tuple[tuple[str, Any], ...],
) -> dict[str, Any]:
    """An assignment's head, for client 0 and seed 0."""
    return {
        "round": round,
        "rounds": rounds,
        "run_seed": run_seed,
        "client": 0,
        "arch": arch,
        "trains": trains,
        "travels": travels,
        "held": held,
        "work": _work_head(work),
        "seed": 0,
        "method": method,
        "slots": slots,
        **dict(unusual),
    }


def common_part(a: Assignment) -> tuple[Any, ...]:
    """What assignments of a round have in common: the arguments of `assignment_head`."""
    # A plan that lets everything train and travel is the usual case: null says so.
    trains = None if len(a.trains) == len(a.params) else a.trains
    travels = None if a.uploads == a.trains else a.uploads
    plan: tuple[tuple[str, Any, Any], ...] = (
        *(("reports", a.upload_buffers, None), ("moves", a.update_buffers, None)),
        *(("reuse", a.cache_prefix, False), ("turns", tuple(turn.trains for turn in a.turns), ())),
        ("turn_epochs", tuple(turn.epochs for turn in a.turns), ()),
        ("sparse", _sparse_names(a), ()),
        ("shapes", tuple(tuple(a.params[n].shape) for n in _sparse_names(a)), ()),
    )
    unusual = tuple((name, value) for name, value, usual in plan if value != usual)
    first, last = (a.round, a.rounds, a.run_seed, a.arch), (a.work, a.method, tuple(a.slots), unusual)
    return *first, trains, travels, a.to_send is not None, *last


def _sparse_names(a: Assignment) -> tuple[str, ...]:
    """The parameters that travel without their zeros."""
    return a.sparse if a.to_send is None or not a.sparse else tuple(n for n in a.sparse if n in set(a.to_send))


def head_of(message: Assignment | Update) -> dict[str, Any]:
    """What a message says besides its tensors."""
    if isinstance(message, Assignment):
        return {**assignment_head(*common_part(message)), "client": message.client, "seed": message.seed}
    return {
        "round": message.round,
        "client": message.client,
        "method": message.method,
        "examples": message.examples,
        "steps": message.steps,
        "metrics": message.metrics,
        "slots": tuple(message.slots),
    }


def tensors_of(message: Assignment | Update) -> Tensors:
    """The tensors that a message carries, under `section/name`."""
    if isinstance(message, Update):
        return _join(delta=message.delta, buffer=message.buffers, **_slot_sections(message.slots))
    params, buffers = message.params, message.buffers
    if message.to_send is not None:
        params = {n: params[n] for n in message.to_send if n in params}
        buffers = {n: buffers[n] for n in message.to_send if n in buffers}
    without_zeros = {n: pack_sparse(params[n]) for n in _sparse_names(message)}
    if not without_zeros:
        return _join(param=params, buffer=buffers, **_slot_sections(message.slots))
    values, places = ({n: both[at] for n, both in without_zeros.items()} for at in (0, 1))
    whole = {n: t for n, t in params.items() if n not in without_zeros}
    return _join(param=whole, buffer=buffers, nonzero=values, place=places, **_slot_sections(message.slots))


def _join(**sections: Mapping[str, Tensor]) -> Tensors:
    return {f"{section}/{name}": t for section, tensors in sections.items() for name, t in tensors.items()}


def _slot_sections(slots: Slots) -> dict[str, Tensors]:
    return {f"slot:{technique}": tensors for technique, tensors in slots.items()}


def decode_assignment(
    message: bytes, held: Assignment | None = None, base: Callable[[str], Tensors] = lambda arch: {}
) -> Assignment:
    """An assignment from bytes.

    Args:
        message: the bytes.
        held: the assignment of the client's last accepted round, as far as it kept it.
        base: architecture → the parameters that a client has by itself, the frozen base beneath adapters.

    Raises:
        WireError: if the bytes are not an assignment, or name parameters that the client does not hold.
    """
    raw, tensors = unpack(message)
    head = _read_head(_AssignmentHead, raw, "an assignment")
    work = _read_work(head)
    found = sections(tensors)
    fresh, statistics = {**found.get("param", {}), **_read_sparse(head, found)}, found.get("buffer", {})
    params, buffers = fresh, statistics
    if head.held:
        own = base(head.arch)
        if held is None and not own:
            raise NotHeld("the assignment counts on parameters that this client does not hold")
        kept = ({}, {}) if held is None else (held.params, held.buffers)
        params, buffers = {**own, **kept[0], **fresh}, {**kept[1], **statistics}
    trains = tuple(params) if head.trains is None else distinct(head.trains, "names to train")
    travels = trains if head.travels is None else distinct(head.travels, "names to send")
    if not set(trains) | set(travels) <= set(params):
        raise WireError("the assignment trains parameters that it does not bring")
    return Assignment(
        round=head.round,
        rounds=head.rounds,
        run_seed=head.run_seed,
        client=head.client,
        arch=head.arch,
        params=params,
        buffers=buffers,
        trains=trains,
        uploads=travels,
        work=work,
        seed=head.seed,
        method=head.method,
        slots=slots_of(found, "slot", head.slots),
        to_send=(*fresh, *statistics) if head.held else None,
        sparse=tuple(head.sparse),
        upload_buffers=None if head.reports is None else distinct(head.reports, "names to report"),
        update_buffers=None if head.moves is None else distinct(head.moves, "names to move"),
        cache_prefix=head.reuse,
        turns=_read_turns(head, set(trains)),
    )


def _read_head(kind: type[Head], raw: dict[str, Any], what: str) -> Head:
    """A head whose fields are all there and of the right types."""
    try:
        return kind.model_validate(raw)
    except ValidationError:
        raise WireError(f"the message is not {what}") from None


def _read_turns(head: _AssignmentHead, trains: set[str]) -> tuple[Turn, ...]:
    """What trains one after the other."""
    if len(head.turns) != len(head.turn_epochs) or min(head.turn_epochs, default=0) < 0:
        raise WireError("the assignment does not say how long each of its turns is")
    if not all(trains.issuperset(names) for names in head.turns):
        raise WireError("the assignment has turns of what does not train")
    lengths = zip(head.turns, head.turn_epochs, strict=True)
    return tuple(Turn(distinct(names, "names of a turn"), epochs) for names, epochs in lengths)


def _read_sparse(head: _AssignmentHead, found: Mapping[str, Tensors]) -> Tensors:
    """The parameters that came without their zeros, whole."""
    names, values, places = distinct(head.sparse, "sparse names"), found.get("nonzero", {}), found.get("place", {})
    if not (len(names) == len(head.shapes) and values.keys() == places.keys() == set(names)):
        raise WireError("the assignment does not say what its sparse parameters are")
    shapes = zip(names, head.shapes, strict=True)
    return {name: unpack_sparse(values[name], places[name], shape) for name, shape in shapes}


def _read_work(head: _AssignmentHead) -> Work:
    """How an assignment says to train."""
    try:
        work = _WORK.validate_json(json.dumps(head.work), strict=True)
    except ValidationError:
        raise WireError("the message is not an assignment") from None
    if not head.work.keys() <= _WORK_FIELDS:
        raise WireError("the assignment asks for an unknown way to train")
    return work


def decode_update(message: bytes) -> Update:
    """An update from bytes.

    Raises:
        WireError: if the bytes are not an update.
    """
    raw, tensors = unpack(message)
    head = _read_head(_UpdateHead, raw, "an update")
    found = sections(tensors)
    return Update(
        round=head.round,
        client=head.client,
        method=head.method,
        examples=head.examples,
        steps=head.steps,
        delta=found.get("delta", {}),
        buffers=found.get("buffer", {}),
        slots=slots_of(found, "slot", head.slots),
        metrics=head.metrics,
    )
