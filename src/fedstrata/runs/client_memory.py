"""What clients remember between their rounds: in a dict, or one sealed file per client and version in a directory.

A version is the round in which it was written. The server's state says which version of each client counts, so a run
that is killed and resumed never reads a memory from rounds that it has not done yet.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Protocol

from torch import Tensor

from fedstrata.core.tensors import clone
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

    def get(self, client: int, version: int) -> Slots:
        """The memory that a client wrote in round `version`; empty for −1."""
        ...

    def put(self, client: int, version: int, memory: Slots, before: int) -> None:
        """Keep a copy of a client's memory of round `version`, which takes the place of version `before`."""
        ...

    def forget(self, until: int) -> None:
        """Drop versions that were replaced before round `until`: no checkpoint needs them any more."""
        ...


class DictStore:
    """Client memory in this process."""

    trusted: ClassVar[bool] = True

    def __init__(self) -> None:
        self._memories: dict[tuple[int, int], Slots] = {}
        self._replaced: deque[tuple[int, tuple[int, int]]] = deque()

    def get(self, client: int, version: int) -> Slots:
        """The memory that a client wrote in round `version`; empty for −1."""
        return self._memories[client, version] if version >= 0 else {}

    def put(self, client: int, version: int, memory: Slots, before: int) -> None:
        """Keep a copy of a client's memory, which takes the place of version `before`."""
        self._memories[client, version] = {name: clone(slot) for name, slot in memory.items()}
        if before >= 0:
            self._replaced.append((version, (client, before)))

    def forget(self, until: int) -> None:
        """Drop versions that were replaced before round `until`."""
        while self._replaced and self._replaced[0][0] < until:
            self._memories.pop(self._replaced.popleft()[1], None)


class DirectoryStore:
    """Client memory in files, so that what is held in RAM does not grow with the number of clients."""

    trusted: ClassVar[bool] = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._replaced: deque[tuple[int, Path]] = deque()

    def _path(self, client: int, version: int) -> Path:
        return self._directory / f"{client}-{version}.memory"

    def get(self, client: int, version: int) -> Slots:
        """The memory that a client wrote in round `version`; empty for −1."""
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

    def put(self, client: int, version: int, memory: Slots, before: int) -> None:
        """Keep a copy of a client's memory, which takes the place of version `before`."""
        with disk_errors(self._directory):
            self._directory.mkdir(exist_ok=True)
        write_sealed(self._path(client, version), pack_memory(memory))
        if before >= 0:
            self._replaced.append((version, self._path(client, before)))

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
