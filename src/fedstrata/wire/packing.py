"""A JSON head and named tensors as bytes, and back: safetensors, never pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors
import torch
from torch import Tensor

from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Slots
from fedstrata.errors import FedstrataError

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

Names = tuple[str, ...]
Structure = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
"""Name, type and shape of every tensor of a message, in order."""

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


class WireError(FedstrataError):
    """Bytes that are not a message of ours."""


class NotHeld(WireError):
    """An assignment that counts on parameters which the client does not hold."""


def carries(tensor: Tensor) -> bool:
    """True if messages can hold tensors of this type."""
    return tensor.dtype in _DTYPES


def _build_index(structure: Structure) -> tuple[bytes, int]:
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
    """Results of `_build_index`, for the next message; all of them are dropped when there is no room for more."""

    room = 0

    def __missing__(self, structure: Structure) -> tuple[bytes, int]:
        made = _build_index(structure)
        self.room += len(made[0])
        if self.room > REMEMBERED:
            self.clear()
            self.room = len(made[0])
        self[structure] = made
        return made


index_of = _Index()


def structure_of(tensors: Mapping[str, Tensor]) -> Structure:
    """The names, types and shapes of tensors, in order."""
    return tuple((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's own bytes, without a copy where it is contiguous and on the CPU."""
    flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def pack(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """A JSON head and named tensors as bytes."""
    text = json_bytes(head)
    header, _ = index_of[structure_of(tensors)]
    data = [bytes_of(t) for t in tensors.values()]
    return b"".join([len(text).to_bytes(8, "little"), text, header, *data])


def json_bytes(value: Any) -> bytes:
    """A value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


def _json_end(message: memoryview, what: str) -> int:
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
    end = _json_end(memoryview(message), "head")
    body = memoryview(message)[end:]
    index = _json_end(body, "index")
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
        WireError: if a name is listed twice, or there are more than `most`.
    """
    if most is not None and len(names) > most:
        raise WireError(f"the message lists {len(names):,} {what}, and {most} are the limit")
    if len(set(names)) < len(names):
        raise WireError(f"the message lists one of its {what} twice")
    return tuple(names)


def slots_of(found: Mapping[str, Tensors], kind: str, techniques: Sequence[str]) -> Slots:
    """Technique → the tensors of its section, `kind:technique`; empty where it has none.

    Raises:
        WireError: if a technique is listed twice, there are too many, or one could not have a section.
    """
    if any("/" in technique for technique in techniques):
        raise WireError("the message lists a slot whose name holds a '/'")
    return {technique: found.get(f"{kind}:{technique}", {}) for technique in distinct(techniques, "slots", FEW)}
