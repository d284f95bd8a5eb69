"""Updates that came before their turn: a few in memory, the others on disk.

They are not left with the SuperLink, which throws a reply away when its message's time is over or its SuperNode is
gone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO

from fedstrata import wire
from fedstrata.core.types import Slots, Update, Visit
from fedstrata.runs.files import disk_errors


class ReorderBuffer:
    """What came of visits, by client, until somebody asks for it; `with` lets go of the file.

    Args:
        few: how many updates are held in memory.
        directory: where a file without a name holds the others; None for the system's temporary directory.
    """

    def __init__(self, few: int, directory: Path | None) -> None:
        self._few, self._directory = few, directory or Path(tempfile.gettempdir())
        self._held: dict[int, Visit] = {}
        self._filed: dict[int, tuple[int, int, Slots]] = {}
        self._updates = 0
        self._file: IO[bytes] | None = None

    def __enter__(self) -> ReorderBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __contains__(self, client: int) -> bool:
        return client in self._held or client in self._filed

    def put(self, client: int, visit: Visit) -> None:
        """Take what came of a visit."""
        what, memory = visit
        if not isinstance(what, Update):
            self._held[client] = visit
        elif self._updates < self._few:
            self._held[client] = visit
            self._updates += 1
        else:
            self._filed[client] = (*self._write(wire.encode(what)), memory)

    def pop(self, client: int) -> Visit:
        """Give it back."""
        if client in self._filed:
            begin, length, memory = self._filed.pop(client)
            return wire.decode_update(self._read(begin, length)), memory
        visit = self._held.pop(client)
        self._updates -= isinstance(visit[0], Update)
        return visit

    def _write(self, data: bytes) -> tuple[int, int]:
        with disk_errors(self._directory):
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 – closed by `with`
            begin = self._file.seek(0, 2)
            self._file.write(data)
            self._file.flush()
        return begin, len(data)

    def _read(self, begin: int, length: int) -> bytes:
        assert self._file is not None
        self._file.seek(begin)
        return self._file.read(length)
