"""What clients remember between their rounds: in rows of tensors, or one sealed file per client and version.

A version is the round in which it was written. The server's state says which version of each client counts, so a run
that is killed and resumed never reads a memory from rounds that it has not done yet.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedstrata.core.stacks import Memories, gather_rows, row_structure
from fedstrata.core.types import Slots
from fedstrata.runs.files import Damaged, disk_errors, read_sealed, write_sealed
from fedstrata.wire.packing import WireError, distinct, pack, sections, unpack


def pack_memory(memory: Slots) -> bytes:
    """A client's memory as bytes."""
    tensors = {f"{technique}/{name}": t for technique, slot in memory.items() for name, t in slot.items()}
    return pack({"techniques": list(memory)}, tensors)


def unpack_memory(data: bytes) -> Slots:
    """What `pack_memory` packed.

    Raises:
        WireError: if it is nothing of that form.
    """
    head, tensors = unpack(data)
    listed, found = head.get("techniques"), sections(tensors)
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise WireError("the memory does not say whose it is")
    techniques = distinct(listed, "techniques")
    if sum(len(found.get(name, ())) for name in techniques) < len(tensors):
        raise WireError("the memory holds tensors of techniques that it does not list")
    return {name: found.get(name, {}) for name in techniques}


class Store(Protocol):
    """Where client memory is kept."""

    trusted: ClassVar[bool]
    """True if nobody can have changed what it holds: it need not be looked at when it is read."""

    def get(self, clients: Sequence[int], versions: Sequence[int]) -> Memories:
        """The memories that clients wrote in the rounds `versions`; empty for −1. Good until the next `forget`."""
        ...

    def put(self, clients: Sequence[int], version: int, memories: Memories, before: Sequence[int]) -> None:
        """Keep copies of clients' memories of round `version`, which take the places of versions `before`."""
        ...

    def forget(self, until: int) -> None:
        """Drop versions that were replaced before round `until`: no checkpoint needs them any more."""
        ...


CHUNK_BYTES = 64 << 20
"""Room of a chunk of rows, at most; the first ones are smaller, and no chunk is ever copied into a larger one."""
FIRST_ROWS = 16
"""Rows of the first chunk."""

Row = tuple["_Chunk", int]
"""Where a memory is."""


class _Chunk:
    """Room for memories that are alike: tensors with a row for each, and the rows that are free."""

    def __init__(self, structure: tuple[Any, ...], rows: int) -> None:
        self.rows = rows
        self.stack: Slots = {
            name: {n: torch.empty((rows, *shape), dtype=dtype) for n, dtype, shape in slot} for name, slot in structure
        }
        self.free = list(range(rows))  # a heap: rows that were never used take no memory as long as others are free

    def write(self, rows: Sequence[int], stack: Slots, theirs: Sequence[int]) -> None:
        """Copy rows of a stack into rows of this one."""
        index, sources = torch.tensor(rows), gather_rows(stack, theirs)
        for name, slot in self.stack.items():
            for n, tensor in slot.items():
                source = sources[name][n].detach()
                if source.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                    source = source.clone()  # what was remembered before, and is still
                tensor.index_copy_(0, index, source)


class RowStore:
    """Client memory in this process: memories that are alike are rows of the same tensors.

    A client that never took part has no row. A row is used again once no state counts on it any more.
    """

    trusted: ClassVar[bool] = True

    def __init__(self) -> None:
        self._chunks: dict[tuple[Any, ...], list[_Chunk]] = {}
        self._rows: dict[tuple[int, int], Row] = {}
        self._replaced: deque[tuple[int, tuple[int, int]]] = deque()

    def get(self, clients: Sequence[int], versions: Sequence[int]) -> Memories:
        """The memories that clients wrote in the rounds `versions`, in place; empty for −1."""
        if max(versions, default=-1) < 0:
            return Memories(({},), [0] * len(clients), [0] * len(clients))
        found = [
            self._rows[client, version] if version >= 0 else _NOWHERE
            for client, version in zip(clients, versions, strict=True)
        ]
        places = {chunk: place for place, chunk in enumerate(dict.fromkeys(chunk for chunk, _ in found))}
        stacks = tuple(chunk.stack for chunk in places)
        return Memories(stacks, [places[chunk] for chunk, _ in found], [row for _, row in found])

    def put(self, clients: Sequence[int], version: int, memories: Memories, before: Sequence[int]) -> None:
        """Keep copies of clients' memories, which take the places of versions `before`."""
        for stack, positions, rows in memories.by_stack():
            structure, of_chunk = row_structure(stack), dict[_Chunk, tuple[list[int], list[int]]]()
            for position, row in zip(positions, rows, strict=True):
                key = (clients[position], version)
                self._free(key)  # of a round that is done again
                chunk, own = self._rows[key] = self._take_row(structure)
                mine, theirs = of_chunk.setdefault(chunk, ([], []))
                mine.append(own)
                theirs.append(row)
            for chunk, (mine, theirs) in of_chunk.items():
                chunk.write(mine, stack, theirs)
        keys = zip(clients, before, strict=True)
        self._replaced.extend((version, (client, old)) for client, old in keys if old >= 0)

    def _take_row(self, structure: tuple[Any, ...]) -> Row:
        """A row that is free."""
        chunks = self._chunks.setdefault(structure, [])
        chunk = next((chunk for chunk in chunks if chunk.free), None)
        if chunk is None:
            size = sum(dtype.itemsize * shape.numel() for _, slot in structure for _, dtype, shape in slot)
            rows = 2 * chunks[-1].rows if chunks else FIRST_ROWS
            chunk = _Chunk(structure, max(1, min(rows, CHUNK_BYTES // max(size, 1))))
            chunks.append(chunk)
        return chunk, heapq.heappop(chunk.free)

    def _free(self, key: tuple[int, int]) -> None:
        """Let the row of a memory be used again, if there is one."""
        chunk, row = self._rows.pop(key, _NOWHERE)
        if chunk is not _NOWHERE[0]:
            heapq.heappush(chunk.free, row)

    def forget(self, until: int) -> None:
        """Drop versions that were replaced before round `until`."""
        while self._replaced and self._replaced[0][0] < until:
            self._free(self._replaced.popleft()[1])
        for structure in list(self._chunks) if len(self._chunks) > 1 else ():  # a technique may change what it keeps
            if all(len(chunk.free) == chunk.rows for chunk in self._chunks[structure]):
                del self._chunks[structure]


_NOWHERE: Row = (_Chunk((), 0), 0)
"""Of clients that remember nothing."""


class DirectoryStore:
    """Client memory in files, so that what is held in RAM does not grow with the number of clients."""

    trusted: ClassVar[bool] = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._replaced: deque[tuple[int, Path]] = deque()

    def _path(self, client: int, version: int) -> Path:
        return self._directory / f"{client}-{version}.memory"

    def get(self, clients: Sequence[int], versions: Sequence[int]) -> Memories:
        """The memories that clients wrote in the rounds `versions`; empty for −1."""
        return Memories.of([self._read(*pair) for pair in zip(clients, versions, strict=True)])

    def _read(self, client: int, version: int) -> Slots:
        if version < 0:
            return {}
        path = self._path(client, version)
        try:
            return unpack_memory(read_sealed(path))
        except (Damaged, WireError) as error:
            what = error if isinstance(error, Damaged) else f"{path} is damaged"
            raise Damaged(
                f"{what}, and with it what client {client} remembers: the run cannot go on from its checkpoint; "
                f"without {self._directory.parent / 'checkpoints'} a resume starts from the beginning"
            ) from error

    def put(self, clients: Sequence[int], version: int, memories: Memories, before: Sequence[int]) -> None:
        """Keep copies of clients' memories, which take the places of versions `before`."""
        with disk_errors(self._directory):
            self._directory.mkdir(exist_ok=True)
        for client, memory, old in zip(clients, memories, before, strict=True):
            write_sealed(self._path(client, version), pack_memory(memory))
            if old >= 0:
                self._replaced.append((version, self._path(client, old)))

    def forget(self, until: int) -> None:
        """Drop versions that were replaced before round `until`."""
        while self._replaced and self._replaced[0][0] < until:
            self._replaced.popleft()[1].unlink(missing_ok=True)

    def sweep(self, needed: list[Tensor]) -> None:
        """Drop every file that no kept state (its `remembers`) names; once, when a run is resumed."""
        wanted = {(c, int(v)) for versions in needed for c, v in enumerate(versions.tolist()) if v >= 0}
        newest = {c: int(v) for c, v in enumerate(needed[0].tolist())} if needed else {}
        for path in self._directory.glob("*-*.memory"):
            client, _, version = path.stem.partition("-")
            with suppress(ValueError):
                pair = (int(client), int(version))
                if pair not in wanted:
                    path.unlink(missing_ok=True)
                elif pair[1] != newest.get(pair[0]):
                    self._replaced.append((newest.get(pair[0], pair[1]), path))
        self._replaced = deque(sorted(self._replaced))
