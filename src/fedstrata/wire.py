"""Assignments and updates as bytes: a JSON head and safetensors, never pickle; and their sizes without encoding them.

A message is: 8 bytes (little endian) with the length of the head, the head as JSON, and one safetensors file with every
tensor under `section/name`. Sizes in `bytes_up` and `bytes_down` are the lengths of exactly these messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

import safetensors
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from fedstrata.core import Assignment, Slots, Update, Work
from fedstrata.errors import FedstrataError
from fedstrata.tensors import Tensors

HEAD_LIMIT = 4 * 2**20
"""Largest JSON that is read, in bytes, for the head and for the index of tensors alike: room for 30,000 names.

What JSON says in a byte takes up to fifty in memory."""
REMEMBERED = 4 * 2**20
"""Bytes of safetensors headers that are kept for the next message; with all that belongs to it, one takes up to six.

Clients choose the names in what they send: a server must not fill its memory with them."""
FEW = 256
"""Most slots, and most metrics, of one message: several times the techniques of any method."""
AXES = 64
"""Most axes of a tensor: torch and numpy reckon with no more."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH = {name: dtype for dtype, name in _DTYPES.items()}


def carries(tensor: Tensor) -> bool:
    """True if messages can hold tensors of this type."""
    return tensor.dtype in _DTYPES


class WireError(FedstrataError):
    """Bytes that are not a message of ours."""


class NotHeld(WireError):
    """An assignment that counts on parameters which the client does not hold."""


Names = tuple[str, ...]
Structure = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


def _made(structure: Structure) -> tuple[bytes, int]:
    """(safetensors header, number of bytes of tensor data) for tensors of this structure, in this order."""
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in structure:
        begin, size = end, dtype.itemsize
        for length in shape:
            size *= length
        end += size
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


class _Index(dict[Structure, tuple[bytes, int]]):
    """What `_made` made, for the next message; all of it is dropped when there is no room for more."""

    room = 0

    def __missing__(self, structure: Structure) -> tuple[bytes, int]:
        made = _made(structure)
        self.room += len(made[0])
        if self.room > REMEMBERED:
            self.clear()
            self.room = len(made[0])
        self[structure] = made
        return made


_index = _Index()


def _structure(tensors: Mapping[str, Tensor]) -> Structure:
    return tuple((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's own bytes, without a copy where it is contiguous and on the CPU."""
    flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def pack(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """A JSON head and named tensors as bytes."""
    text = _text(head)
    header, _ = _index[_structure(tensors)]
    data = [bytes_of(t) for t in tensors.values()]
    return b"".join([len(text).to_bytes(8, "little"), text, header, *data])


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _announced(message: memoryview, what: str) -> int:
    """Where the JSON ends whose length the first eight bytes tell."""
    length = int.from_bytes(message[:8], "little")
    if len(message) < 8 or length > min(HEAD_LIMIT, len(message) - 8):
        raise WireError(f"the message is truncated or its {what} is too long")
    return 8 + length


def unpack(message: bytes) -> tuple[dict[str, Any], Tensors]:
    """The head and the tensors of packed bytes; lengths are checked before anything is read.

    Raises:
        WireError: if the bytes are truncated, oversized or not of this form.
    """
    end = _announced(memoryview(message), "head")
    body = memoryview(message)[end:]
    index = _announced(body, "index")
    try:
        head = json.loads(message[8:end])
        rows = dict(safetensors.deserialize(bytes(body)))  # type: ignore[no-untyped-call]
        # The library returns tensors in no particular order; ours is the order in which they were packed.
        order = [n for n in json.loads(bytes(body[8:index])) if n in rows]
    except (ValueError, RecursionError, safetensors.SafetensorError):
        raise WireError("the message is not a JSON head followed by safetensors") from None
    if not isinstance(head, dict):
        raise WireError("the message's head is not a JSON object")
    tensors = {}
    for name in order:
        row = rows[name]
        if row["dtype"] not in _TORCH:
            raise WireError(f"tensor '{name[:100]}' has the unknown type {row['dtype']}")
        dtype, shape, data = _TORCH[row["dtype"]], row["shape"], row["data"]
        if len(shape) > AXES:
            raise WireError(f"tensor '{name[:100]}' has an impossible shape")
        try:
            # A copy, which torch aligns: products of what lies elsewhere may round differently.
            flat = torch.frombuffer(data, dtype=dtype).clone() if data else torch.empty(0, dtype=dtype)
            tensors[name] = flat.view(shape)
        except (RuntimeError, TypeError, ValueError, OverflowError):
            raise WireError(f"tensor '{name[:100]}' has an impossible shape") from None
    return head, tensors


def _join(**sections: Mapping[str, Tensor]) -> Tensors:
    return {f"{section}/{name}": t for section, tensors in sections.items() for name, t in tensors.items()}


def _slot_sections(slots: Slots) -> dict[str, Tensors]:
    return {f"slot:{technique}": tensors for technique, tensors in slots.items()}


def sections(tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """Section → its tensors, in one pass: a name is what stands before its first '/', and what comes after."""
    found: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        section, slash, rest = name.partition("/")
        if slash:
            found.setdefault(section, {})[rest] = tensor
    return found


def distinct(names: Sequence[str], what: str, most: int | None = None) -> Names:
    """Names that a message lists, which a sender must not use to have the same work done again and again.

    Raises:
        WireError: if a name stands there twice, or there are more than `most`.
    """
    if most is not None and len(names) > most:
        raise WireError(f"the message lists {len(names):,} {what}, and {most} are the limit")
    if len(set(names)) < len(names):
        raise WireError(f"the message lists one of its {what} twice")
    return tuple(names)


def slots_of(found: Mapping[str, Tensors], kind: str, techniques: Sequence[str]) -> Slots:
    """Technique → the tensors of its section, `kind:technique`; empty where it has none.

    Raises:
        WireError: if a technique stands there twice, there are too many, or one could not have a section.
    """
    if any("/" in technique for technique in techniques):
        raise WireError("the message lists a slot whose name holds a '/'")
    return {technique: found.get(f"{kind}:{technique}", {}) for technique in distinct(techniques, "slots", FEW)}


class _AssignmentHead(BaseModel):
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


_WORK = TypeAdapter(Work)
_WORK_FIELDS = {f.name for f in fields(Work)}


class _UpdateHead(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    round: int
    client: int
    method: str
    examples: int
    steps: int
    metrics: dict[str, float] = Field(max_length=FEW)
    slots: list[str]


def _assignment_head(
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
        "work": asdict(work),
        "seed": 0,
        "method": method,
        "slots": slots,
        **dict(unusual),
    }


def _common(a: Assignment) -> tuple[Any, ...]:
    """What assignments of a round have in common: the arguments of `_assignment_head`."""
    # A plan that lets everything train and travel is the usual case: null says so.
    trains = None if len(a.trains) == len(a.params) else a.trains
    travels = None if a.travels == a.trains else a.travels
    plan = (("reports", a.reports, None), ("moves", a.moves, None), ("reuse", a.reuse, False))
    unusual = tuple((name, value) for name, value, usual in plan if value != usual)
    first, last = (a.round, a.rounds, a.run_seed, a.arch), (a.work, a.method, tuple(a.slots), unusual)
    return *first, trains, travels, a.fresh is not None, *last


def _head(message: Assignment | Update) -> dict[str, Any]:
    if isinstance(message, Assignment):
        return {**_assignment_head(*_common(message)), "client": message.client, "seed": message.seed}
    return {
        "round": message.round,
        "client": message.client,
        "method": message.method,
        "examples": message.examples,
        "steps": message.steps,
        "metrics": message.metrics,
        "slots": tuple(message.slots),
    }


def _tensors(message: Assignment | Update) -> Tensors:
    if isinstance(message, Update):
        return _join(delta=message.delta, buffer=message.buffers, **_slot_sections(message.slots))
    params, buffers = message.params, message.buffers
    if message.fresh is not None:
        params = {n: params[n] for n in message.fresh if n in params}
        buffers = {n: buffers[n] for n in message.fresh if n in buffers}
    return _join(param=params, buffer=buffers, **_slot_sections(message.slots))


@lru_cache(maxsize=256)
def _assignment_frame(*common: Any) -> int:
    return len(_text(_assignment_head(*common)))


def size(message: Assignment | Update) -> int:
    """Number of bytes that the message takes on the wire, without encoding it.

    What assignments have in common is measured once.
    """
    if isinstance(message, Assignment):
        head = _assignment_frame(*_common(message)) + len(str(message.client)) + len(str(message.seed)) - 2
    else:
        head = len(_text(_head(message)))
    header, data = _index[_structure(_tensors(message))]
    return 8 + head + len(header) + data


def slot_sizes(update: Update) -> dict[str, int]:
    """Technique → how many bytes the numbers in its slot take."""
    return {name: sum(t.numel() * t.itemsize for t in slot.values()) for name, slot in update.slots.items()}


def encode(message: Assignment | Update) -> bytes:
    """The message as bytes. An assignment carries only what its client does not hold (`fresh`)."""
    return pack(_head(message), _tensors(message))


def decode_assignment(message: bytes, held: Assignment | None = None) -> Assignment:
    """An assignment from bytes; `held` is the assignment of the client's last accepted round, as far as it kept it.

    Raises:
        WireError: if the bytes are not an assignment, or name parameters that the client does not hold.
    """
    raw, tensors = unpack(message)
    try:
        head = _AssignmentHead.model_validate(raw)
        work = _WORK.validate_json(json.dumps(head.work), strict=True)
    except ValidationError:
        raise WireError("the message is not an assignment") from None
    if not head.work.keys() <= _WORK_FIELDS:
        raise WireError("the assignment asks for an unknown way to train")
    found = sections(tensors)
    fresh, statistics = found.get("param", {}), found.get("buffer", {})
    if head.held and held is None:
        raise NotHeld("the assignment counts on parameters that this client does not hold")
    params, buffers = fresh, statistics
    if head.held and held is not None:
        params, buffers = {**held.params, **fresh}, {**held.buffers, **statistics}
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
        travels=travels,
        work=work,
        seed=head.seed,
        method=head.method,
        slots=slots_of(found, "slot", head.slots),
        fresh=(*fresh, *statistics) if head.held else None,
        reports=None if head.reports is None else distinct(head.reports, "names to report"),
        moves=None if head.moves is None else distinct(head.moves, "names to move"),
        reuse=head.reuse,
    )


def decode_update(message: bytes) -> Update:
    """An update from bytes.

    Raises:
        WireError: if the bytes are not an update.
    """
    raw, tensors = unpack(message)
    try:
        head = _UpdateHead.model_validate(raw)
    except ValidationError:
        raise WireError("the message is not an update") from None
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
