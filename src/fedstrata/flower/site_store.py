"""What a client keeps at its site between its visits: memories by round, and the parameters that it was sent last.

A visit's memory is kept aside until the server says, with its next assignment, which one it accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata import wire
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Slots
from fedstrata.errors import FedstrataError
from fedstrata.runs.client_memory import pack_memory, unpack_memory
from fedstrata.runs.files import disk_errors, read_sealed, write_sealed

if TYPE_CHECKING:
    from flwr.app import RecordDict

SiteStore = MutableMapping[str, bytes]
"""Where bytes are kept by name."""


class ContextStore(SiteStore):
    """Bytes in a Flower context's state, which stays at its site for as long as the run and its SuperNode live."""

    def __init__(self, state: RecordDict) -> None:
        self._records = state.config_records

    def __getitem__(self, name: str) -> bytes:
        data = self._records[name]["bytes"]
        if not isinstance(data, bytes):
            raise KeyError(name)
        return data

    def __setitem__(self, name: str, data: bytes) -> None:
        from flwr.app import ConfigRecord

        self._records[name] = ConfigRecord({"bytes": data})

    def __delitem__(self, name: str) -> None:
        del self._records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._records))

    def __len__(self) -> int:
        return len(self._records)


class SiteDirectoryStore(SiteStore):
    """Bytes in sealed files, which outlive the SuperNode; a damaged one counts as lost.

    Memories tell of the data that they come from: nobody but the SuperNode's user may read them. Those of other runs
    are never dropped here, for any of these may be under way, or be resumed one day.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __getitem__(self, name: str) -> bytes:
        try:
            return read_sealed(self._directory / name)
        except FedstrataError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, data: bytes) -> None:
        with disk_errors(self._directory):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_sealed(self._directory / name, data, mode=0o600)

    def __delitem__(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(path.name for path in self._directory.glob("*") if not path.name.startswith(".")))

    def __len__(self) -> int:
        return len(list(iter(self)))


@dataclass(frozen=True, eq=False)
class ClientStore:
    """One client's part of a store, for one run."""

    store: SiteStore
    run: str
    client: int

    def _name(self, what: str, round: int) -> str:
        return f"{self.run}-{self.client}-{what}-{round}"

    def _rounds(self, what: str) -> list[int]:
        form = re.compile(re.escape(f"{self.run}-{self.client}-{what}-") + r"(\d+)")
        return sorted(int(found[1]) for name in self.store if (found := form.fullmatch(name)))

    def _drop(self, what: str, rounds: list[int]) -> None:
        for round in rounds:
            with suppress(KeyError):
                del self.store[self._name(what, round)]

    def settle(self, held: int, memory: int, until: int) -> None:
        """Drop what the server does not count on: what it did not accept, and what no checkpoint of its needs."""
        self._drop("held", [r for r in self._rounds("held") if r != held])
        rounds = self._rounds("memory")
        oldest = max((r for r in rounds if r <= memory and r < until), default=-1)
        self._drop("memory", [r for r in rounds if r > memory or r < oldest])

    def held_assignment(self, round: int) -> Assignment | None:
        """The assignment of a round, without its slots, as far as it is still here."""
        try:
            return wire.decode_assignment(self.store[self._name("held", round)])
        except (KeyError, wire.WireError):
            return None

    def memory(self, round: int) -> Slots | None:
        """The memory of a round, nothing for −1; None where it should be here and is not."""
        if round < 0:
            return {}
        try:
            return unpack_memory(self.store[self._name("memory", round)])
        except (KeyError, wire.WireError):
            return None

    def hold(self, assignment: Assignment, base: Tensors | None = None) -> None:
        """Keep what was sent; not what is the client's own `base` anyway."""
        own = base or {}
        params = {n: p for n, p in assignment.params.items() if p is not own.get(n)}
        whole = replace(assignment, params=params, to_send=None, slots={})
        self.store[self._name("held", assignment.round)] = wire.encode(whole)

    def remember(self, round: int, memory: Slots) -> None:
        """Keep a memory, to be confirmed."""
        self.store[self._name("memory", round)] = pack_memory(memory)
