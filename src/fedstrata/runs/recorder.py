"""Where a run is kept as it goes on: in its directory, or in memory alone where it has none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from fedstrata.config.identity import check_same_config, select_deciding
from fedstrata.config.toml import to_toml
from fedstrata.core.method import Method
from fedstrata.core.stacks import Memories
from fedstrata.core.types import Slots
from fedstrata.errors import UsageError
from fedstrata.runs.client_memory import RowStore, Store
from fedstrata.runs.directory import RunDirectory, versions
from fedstrata.runs.extension import Step, extension_notes, read_steps, write_steps
from fedstrata.runs.reader import check_records, read_probes
from fedstrata.runs.records import Record
from fedstrata.server.compatibility import state_mismatch
from fedstrata.server.state import ServerState

MemoryCheck = Callable[[ServerState, int, Slots], str | None]
"""(state, client, memory) → why this cannot be what the client remembers at that state, or None."""


@dataclass(frozen=True, eq=False)
class ResumedRun:
    """A run that goes on: its state, None if none was kept, and what was written of it."""

    state: ServerState | None
    records: tuple[Record, ...]
    probes: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Extension:
    """More rounds than the run in the directory was planned to have.

    Args:
        rounds: how many there are to be in all.
        versions: what versions.json says of it.
        begun: True if files have changed, which can be undone until a round has come of it.
    """

    rounds: int
    versions: Mapping[str, str] = field(default_factory=dict)
    begun: bool = False


class RunRecorder:
    """A run's records, checkpoints, and its clients' memories.

    Args:
        out: the run's directory; None keeps everything in memory.
        seconds: least time between two checkpoints.
        check_memory: looks at every memory that is read from files.
        store: where memories are kept; None for the directory, or for memory where there is none.
        before_end: the round whose state is saved in any case, since what comes after it would be done again if the run
            got more rounds; None for none.
    """

    def __init__(
        self,
        out: str | Path | None,
        seconds: float,
        check_memory: MemoryCheck,
        store: Store | None = None,
        before_end: int | None = None,
    ) -> None:
        self.check_memory = check_memory
        self._directory = None if out is None else RunDirectory(Path(out))
        self._injected = store is not None
        own = RowStore() if self._directory is None else self._directory.store()
        self.store: Store = own if store is None else store
        self._seconds, self._before_end = seconds, before_end
        self._deciding: Mapping[str, str] = {}
        self._extension: _Extension | None = None
        self._saved_at, self._saved_round = time.monotonic(), -1

    @property
    def path(self) -> Path | None:
        """The run's directory."""
        return None if self._directory is None else self._directory.path

    @property
    def versions(self) -> dict[str, str]:
        """What versions.json of a run that goes on says; empty where there is none."""
        return {} if self._directory is None else self._directory.versions()

    def begin(
        self,
        config: Mapping[str, Any],
        header: Sequence[str],
        about: Callable[[], Mapping[str, str]],
        facts: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Make the directory of a new run, if it is to have one."""
        self._deciding = select_deciding(config)
        if self._directory is not None:
            self._directory.create(to_toml(dict(config), list(header)), about(), facts())

    def resume(
        self, config: Mapping[str, Any], about: Mapping[str, str], fresh: ServerState, method: Method
    ) -> ResumedRun:
        """Go on with the run that is in the directory, if it is the same; `fresh` is the state of a new one.

        Where it is to have more rounds than before, nothing changes until `go_on`.

        Raises:
            UsageError: if it has another configuration, another model or other data.
        """
        if self._directory is None:
            raise UsageError("resume=True needs out=, the directory of the run to continue")
        directory = self._directory
        if directory.config.exists():
            directory.claim()
        notes, planned = directory.check_unedited(), directory.planned
        more = planned is not None and config["rounds"] > planned
        check_same_config(directory.config, {**config, "rounds": planned} if more else dict(config))
        directory.check_models(config)
        self._deciding = select_deciding(config)
        states, rows, damaged = directory.look(planned) if more and planned else directory.recover()
        for state in states[:1]:
            why = state_mismatch(fresh, state)
            if why is not None:
                raise UsageError(f"{directory.path} was run with {why}")
        notes += directory.differences({**versions(), **about})
        instead = "the checkpoint before it was used" if states else "the run starts from the beginning"
        notes += tuple(f"{path.name} was damaged: {instead}" for path in damaged)
        steps = read_steps(directory.versions())
        if more and planned:
            done = states[0].round if states else 0
            steps = (*steps, Step(done, planned)) if done else steps
            self._extension = _Extension(config["rounds"], write_steps(steps))
        notes += extension_notes(steps, config, method)
        self._open_store(states, sweep=not more)
        if not states:
            return ResumedRun(None, (), (), notes)
        self._saved_round = states[0].round
        records = check_records(rows, directory.metrics)
        return ResumedRun(states[0], records, read_probes(directory.probes, len(records)), notes)

    def _open_store(self, states: Sequence[ServerState], sweep: bool) -> None:
        """Look for memories in the directory; `sweep` drops those that no state needs."""
        if self._directory is not None and not self._injected:
            store = self.store = self._directory.store()
            if sweep:
                store.sweep([state.remembers for state in states])

    def go_on(self, state: ServerState) -> None:
        """Begin to run on from a state: forget what was written of later rounds, which will be done again."""
        if self._directory is None:
            return
        if self._extension is not None and not self._extension.begun:
            extension = self._extension
            self._directory.extend(state, extension.rounds, self._deciding, extension.versions)
            self._extension = replace(extension, begun=True)
            self._open_store([state], sweep=True)
        self._directory.trim(state.round)

    def undo(self) -> bool:
        """Leave the run as it was before it was extended, if nothing has come of that yet; True if that is so."""
        if self._directory is None or self._extension is None or not self._extension.begun:
            return False
        self._directory.undo()
        self._extension = replace(self._extension, begun=False)
        self._open_store([], sweep=False)
        return True

    def _settle(self) -> None:
        """Let an extension count: a round has come of it, or there is none to come."""
        if self._directory is not None and self._extension is not None:
            self._directory.settle()
            self._extension = None

    def recall(self, state: ServerState, clients: Sequence[int]) -> Memories:
        """What clients remember at a state; good until the run is at the next one."""
        return read_memories(self.store, self.check_memory, state, clients)

    def keep(self, state: ServerState, clients: Sequence[int], memories: Memories) -> None:
        """Keep what clients will remember if the round on this state counts."""
        self.store.put(clients, state.round, memories, state.remembers.numpy()[list(clients)].tolist())

    def add_probes(self, row: Mapping[str, Any]) -> None:
        """Write down what was measured in a round; before its record, which makes the round complete."""
        if self._directory is not None:
            self._directory.append_probes(row)

    def add(self, record: Record) -> None:
        """Write down a round."""
        self._settle()
        if self._directory is not None:
            self._directory.append(asdict(record))

    def advance(self, state: ServerState) -> None:
        """Let go of what is no longer needed, once the run is at a state; save that, if it is time."""
        if self._directory is None:
            self.store.forget(state.round)
        elif state.round == self._before_end or time.monotonic() - self._saved_at >= self._seconds:
            self.save(state)

    def save(self, state: ServerState) -> None:
        """Write a checkpoint, if there is a directory and the state is not saved yet."""
        if self._directory is not None and self._extension is None and state.round > self._saved_round:
            self.store.forget(self._directory.save(state, self._deciding))
            self._saved_at, self._saved_round = time.monotonic(), state.round

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write down what model and data are."""
        if self._directory is not None:
            self._directory.describe(facts)

    def finish(
        self, model: nn.Module, summary: Mapping[str, Any], details: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Write the final model, what it does on the test set, and the summary."""
        self._settle()
        if self._directory is not None:
            self._directory.finish(model, summary, details)


def read_memories(store: Store, check: MemoryCheck, state: ServerState, clients: Sequence[int]) -> Memories:
    """What a store holds of clients at a state.

    Raises:
        UsageError: if one cannot be a memory of the method and the model.
    """
    memories = store.get(clients, state.remembers.numpy()[list(clients)].tolist())
    for client, memory in () if store.trusted else zip(clients, memories, strict=True):
        why = check(state, client, memory) if memory else None
        if why is not None:
            raise UsageError(f"what client {client} remembers does not fit the run: {why}")
    return memories
