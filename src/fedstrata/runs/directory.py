"""A run's directory: configuration, metrics, checkpoints, memory and the final model, consistent at every moment.

run.toml            the whole resolved configuration
versions.json       Python, torch and fedstrata, and the machine
facts.json          what the model and the data are, in a few numbers
metrics.jsonl       one line per round
probes.jsonl        one line per round that was measured layer by layer
checkpoints/        the last few states, sealed
memory/             what clients remember, sealed, by version
model.safetensors   the final global model: parameters and running statistics
summary.json        totals, the best round, the target
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_safetensors
from torch import nn

from fedstrata._version import __version__
from fedstrata.config.identity import MODELS_VERSION, check_models, check_unedited
from fedstrata.config.toml import read_toml, to_toml
from fedstrata.errors import UsageError
from fedstrata.runs import checkpoint
from fedstrata.runs.client_memory import DirectoryStore
from fedstrata.runs.files import (
    LOCK,
    Claim,
    Damaged,
    append_line,
    claim,
    disk_errors,
    leftovers,
    parse_object,
    read_object,
    write_atomic,
)
from fedstrata.runs.rollback import drop_kept, keep_files, restore_kept
from fedstrata.server.state import ServerState
from fedstrata.system.machine import processor

_AT_THE_END = ("model.safetensors", "evaluation.json", "summary.json")
_REPLACED = ("run.toml", "versions.json", *_AT_THE_END)


def versions() -> dict[str, str]:
    """What a result depends on besides its configuration."""
    return {
        "fedstrata": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "processor": processor(),
        "models": MODELS_VERSION,
    }


@dataclass(eq=False)
class RunDirectory:
    """One run's files. Once created or recovered, they are this process's alone for as long as the object lives.

    Args:
        path: the directory.
        keep: how many checkpoints stay.
    """

    path: Path
    keep: int = 2
    _claim: Claim | None = field(default=None, init=False, repr=False)

    @property
    def checkpoints(self) -> Path:
        """Where the server's states are."""
        return self.path / "checkpoints"

    @property
    def memory(self) -> Path:
        """Where clients' memories are."""
        return self.path / "memory"

    @property
    def metrics(self) -> Path:
        """One line per round."""
        return self.path / "metrics.jsonl"

    @property
    def probes(self) -> Path:
        """One line per measured round."""
        return self.path / "probes.jsonl"

    @property
    def config(self) -> Path:
        """What was run."""
        return self.path / "run.toml"

    def claim(self) -> None:
        """Keep other processes out, and undo what one of them began and did not come to anything.

        Raises:
            UsageError: if another process is at work here.
        """
        self._claim = claim(self.path)
        restore_kept(self.path)

    def create(
        self, config: str, about: Mapping[str, str] | None = None, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Make the directory of a new run; `about` is written beside the versions.

        Raises:
            UsageError: if a run, or anything else, is there already.
        """
        with disk_errors(self.path):
            if self.config.exists():
                raise UsageError(f"{self.path} holds {self._what_is_there()}")
            if os.path.lexists(self.path) and not self._vacant():
                raise UsageError(f"{self.path} exists and is not empty")
            made = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
        self.claim()
        try:
            write_atomic(self.config, config)  # first: from here on the run can be resumed
            self._complete(about or {})
            if facts:
                self.describe(facts)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):
                for path in made[1:]:
                    path.rmdir()
                if not made:
                    self.path.mkdir(exist_ok=True)
            raise

    def _what_is_there(self) -> str:
        """The run that is there, and what to do about it."""
        if (self.path / "summary.json").exists():
            return "a finished run already: choose another --out"
        return f"a run already; go on with it: {self.resume_command()}"

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write what model and data are."""
        write_atomic(self.path / "facts.json", json.dumps(facts) + "\n")

    def check_unedited(self) -> tuple[str, ...]:
        """Refuse a run.toml that is not what the run began with; notes, where that cannot be told.

        Raises:
            UsageError: if it was edited; the sentence names the fields.
        """
        for path in checkpoint.paths(self.checkpoints) if self.config.exists() else ():
            with suppress(Damaged):
                begun = checkpoint.settings(path)
                if begun is None:
                    return (f"{path.name} is of an older version: it cannot be told whether run.toml was edited since",)
                check_unedited(self.config, begun)
                break
        return ()

    def check_models(self, config: Mapping[str, Any]) -> None:
        """Refuse a run whose models' names meant something else when it began."""
        if self.metrics.exists():  # else it was killed before it began
            check_models(self.path, config, self.versions())

    def _vacant(self) -> bool:
        """True for a directory that holds nothing, or only what a run left that was killed before it began."""
        ours = {*leftovers(self.path), self.path / LOCK}
        return self.path.is_dir() and ours.issuperset(self.path.iterdir())

    def versions(self) -> dict[str, str]:
        """What versions.json says; what is missing, or no string because it was edited, is left out."""
        return {n: v for n, v in read_object(self.path / "versions.json").items() if isinstance(v, str)}

    def differences(self, now: Mapping[str, str]) -> tuple[str, ...]:
        """What a reader must know of a run that goes on elsewhere than it began.

        Raises:
            UsageError: if it would go on with other data, or with other devices.
        """
        before = self.versions()
        if before.get("data", now["data"]) != now["data"]:
            raise UsageError(f"{self.path} was run with other data: the clients' sizes or labels differ")
        if before.get("traces") != now.get("traces"):
            raise UsageError(f"{self.path} was run with other traces: the files that its fleet names have changed")
        told = ("fedstrata", "torch", "machine", "processor", "clients")
        other = [name for name in told if before.get(name, now[name]) != now[name]]
        return tuple(f"begun with {n} {before[n]}, now {now[n]}: the last bits may differ" for n in other)

    def _complete(self, more: Mapping[str, str]) -> None:
        """Make whatever is missing beside run.toml, and clear away what a kill left behind."""
        with disk_errors(self.path):
            self.checkpoints.mkdir(exist_ok=True)
            for directory in (self.path, self.checkpoints, self.memory):
                for stray in leftovers(directory):
                    stray.unlink(missing_ok=True)
        if not self.metrics.exists():
            write_atomic(self.metrics, "")
        about = self.path / "versions.json"
        if not about.exists():
            write_atomic(about, json.dumps({**versions(), **more}, indent=2) + "\n")

    def resume_command(self, rounds: int | None = None) -> str:
        """What a user types to go on with this run; `rounds` are those that it is to have, maybe more than planned."""
        more = "" if rounds in (None, self.planned) else f" --rounds {rounds}"
        return f"fedstrata resume {shlex.quote(str(self.path))}{more}"

    def store(self) -> DirectoryStore:
        """Where this run's clients keep their memory."""
        return DirectoryStore(self.memory)

    def recover(self) -> tuple[list[ServerState], list[dict[str, Any]], list[Path]]:
        """Whole checkpoints, newest first, the metrics up to the newest, and the damaged ones, which are removed."""
        self._complete({})
        whole, damaged = checkpoint.load_all(self.checkpoints)
        rows = self.trim(whole[0].round if whole else 0)
        for path in damaged:
            path.unlink(missing_ok=True)
        return whole, rows, damaged

    @property
    def planned(self) -> int | None:
        """How many rounds run.toml says; None if it says no number."""
        rounds = read_toml(self.config).get("rounds") if self.config.exists() else None
        return rounds if isinstance(rounds, int) else None

    def look(self, planned: int) -> tuple[list[ServerState], list[dict[str, Any]], list[Path]]:
        """As `recover`, of a run that is to get more rounds than planned; nothing changes.

        Raises:
            UsageError: if no checkpoint is from before techniques finished the run.
        """
        whole, damaged = checkpoint.load_all(self.checkpoints)
        found = [state for state in whole if state.round <= planned]
        if whole and not found:
            raise UsageError(
                f"{self.path} has no checkpoint from before its method finished the run: start a new one with more "
                "rounds"
            )
        return found, self._read_rows(found[0].round if found else 0)[0], damaged

    def extend(self, state: ServerState, rounds: int, settings: Mapping[str, str], more: Mapping[str, str]) -> None:
        """Plan more rounds, which go on from a state; until `settle` it can be undone.

        Args:
            state: the newest one that counts.
            rounds: how many there are to be in all.
            settings: those that decide about the result, for the checkpoint.
            more: is added to versions.json.
        """
        keep_files(self.path, _REPLACED, (self.metrics.name, self.probes.name))
        try:
            self._complete({})
            for path in checkpoint.paths(self.checkpoints):
                path.unlink()
            if state.round:
                checkpoint.save(self.checkpoints, state, settings)
            text = self.config.read_text(encoding="utf-8")
            header = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
            write_atomic(self.config, to_toml({**read_toml(self.config), "rounds": rounds}, header))
            write_atomic(self.path / "versions.json", json.dumps({**self.versions(), **more}, indent=2) + "\n")
            for name in _AT_THE_END:
                (self.path / name).unlink(missing_ok=True)
        except BaseException:
            restore_kept(self.path)
            raise

    def settle(self) -> None:
        """Let an extension count, if there is one."""
        drop_kept(self.path)

    def undo(self) -> None:
        """Leave the run as it was before it was extended."""
        restore_kept(self.path)

    def trim(self, rounds: int) -> list[dict[str, Any]]:
        """Cut metrics.jsonl down to its first `rounds` lines and return them; later rounds will be done again."""
        rows, text, kept = self._read_rows(rounds)
        if text != kept:
            write_atomic(self.metrics, kept)
        self._trim_probes(rounds)
        return rows

    def _read_rows(self, rounds: int) -> tuple[list[dict[str, Any]], bytes, bytes]:
        """(the first `rounds` lines of metrics.jsonl, all of its text, and that of these lines)."""
        text = self.metrics.read_bytes() if self.metrics.exists() else b""
        lines = text.split(b"\n")[:rounds]
        rows = [_row(line) for line in lines]
        if [row.get("round") for row in rows] != list(range(1, rounds + 1)):
            raise UsageError(
                f"{self.metrics} does not hold the first {rounds} rounds, which the checkpoint counts on; "
                f"without {self.checkpoints} a resume starts from the beginning"
            )
        return rows, text, b"".join(line + b"\n" for line in lines)

    def _trim_probes(self, rounds: int) -> None:
        """Cut probes.jsonl down to the same rounds."""
        text = self.probes.read_bytes() if self.probes.exists() else b""
        numbers = {line: _row(line).get("round") for line in text.split(b"\n")}
        kept = b"".join(line + b"\n" for line, n in numbers.items() if isinstance(n, int) and 0 < n <= rounds)
        if text != kept:
            write_atomic(self.probes, kept)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a round to metrics.jsonl."""
        append_line(self.metrics, json.dumps(row))

    def append_probes(self, row: Mapping[str, Any]) -> None:
        """Add a measured round to probes.jsonl."""
        append_line(self.probes, json.dumps(row, allow_nan=False))

    def save(self, state: ServerState, settings: Mapping[str, str] | None = None) -> int:
        """Write a checkpoint and drop the oldest; returns the round of the oldest kept one."""
        checkpoint.save(self.checkpoints, state, settings)
        kept = checkpoint.paths(self.checkpoints)
        for path in kept[self.keep :]:
            path.unlink(missing_ok=True)
        return checkpoint.number(kept[: self.keep][-1])

    def finish(self, model: nn.Module, summary: Mapping[str, Any], details: Mapping[str, Any]) -> None:
        """Write the final model, in the form of its own `state_dict`, what it does on the test set, and the summary."""
        tensors = {n: t.detach().clone(memory_format=torch.contiguous_format) for n, t in model.state_dict().items()}
        write_atomic(self.path / "model.safetensors", save_safetensors(tensors, {"format": "pt"}))
        if details:
            write_atomic(self.path / "evaluation.json", json.dumps(details) + "\n")
        write_atomic(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")


def _row(line: bytes) -> dict[str, Any]:
    """A line of metrics.jsonl, empty where it is none."""
    return parse_object(line) or {}


def fresh_directory(parent: Path, name: str) -> Path:
    """A path for a new run below `parent` that nothing uses yet: name, name-2, name-3, …"""
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        if not os.path.lexists(path):
            return path
        number += 1
