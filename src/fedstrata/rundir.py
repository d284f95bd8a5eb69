"""A run's directory: configuration, metrics, checkpoints, memory and the final model, consistent at every moment.

run.toml            the whole resolved configuration
versions.json       Python, torch and fedstrata, and the machine
metrics.jsonl       one line a round
checkpoints/        the last few states, sealed
memory/             what clients remember, sealed, by version
model.safetensors   the final global model: parameters and running statistics
summary.json        totals, the best round, the target
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_safetensors

from fedstrata import checkpoint
from fedstrata._version import __version__
from fedstrata.errors import UsageError
from fedstrata.files import append_line, disk_errors, write_atomic
from fedstrata.server import ServerState
from fedstrata.store import DirectoryStore
from fedstrata.tensors import Tensors


def versions() -> dict[str, str]:
    """What a result depends on besides its configuration."""
    return {
        "fedstrata": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


@dataclass(frozen=True)
class RunDirectory:
    """One run's files.

    Args:
        path: the directory.
        keep: how many checkpoints stay.
    """

    path: Path
    keep: int = 2

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def config(self) -> Path:
        return self.path / "run.toml"

    def create(self, config: str) -> None:
        """Make the directory of a new run.

        Raises:
            UsageError: if a run, or anything else, is there already.
        """
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            hint = f"; continue it with: fedstrata resume {self.path}" if self.config.exists() else ""
            raise UsageError(f"{self.path} is there already and not empty{hint}")
        with disk_errors(self.path):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        try:
            write_atomic(self.path / "versions.json", json.dumps(versions(), indent=2) + "\n")
            write_atomic(self.metrics, "")
            write_atomic(self.config, config)
        except UsageError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def store(self) -> DirectoryStore:
        """Where this run's clients keep their memory."""
        return DirectoryStore(self.path / "memory")

    def recover(self) -> tuple[list[ServerState], list[dict[str, Any]], list[Path]]:
        """Whole checkpoints, newest first, the metrics up to the newest, and the damaged ones, which are removed."""
        with suppress(FileNotFoundError):
            for stray in [*self.path.glob(".*.tmp"), *self.checkpoints.glob(".*.tmp")]:
                stray.unlink(missing_ok=True)
        whole, damaged = checkpoint.load_all(self.checkpoints)
        rows = self.trim(whole[0].round if whole else 0)
        for path in damaged:
            path.unlink(missing_ok=True)
        return whole, rows, damaged

    def trim(self, rounds: int) -> list[dict[str, Any]]:
        """Cut metrics.jsonl down to its first `rounds` lines and return them; later rounds will be done again."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        if len(lines) < rounds:
            raise UsageError(f"{self.metrics} has {len(lines)} lines but the checkpoint is from round {rounds}")
        if len(lines) > rounds or not self.metrics.exists():
            write_atomic(self.metrics, "".join(line + "\n" for line in lines[:rounds]))
        try:
            return [json.loads(line) for line in lines[:rounds]]
        except ValueError:
            raise UsageError(f"{self.metrics} was edited: a line is not JSON") from None

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a round to metrics.jsonl."""
        append_line(self.metrics, json.dumps(row))

    def save(self, state: ServerState) -> int:
        """Write a checkpoint and drop the oldest; returns the round of the oldest kept one."""
        checkpoint.save(self.checkpoints, state)
        kept = checkpoint.paths(self.checkpoints)
        for path in kept[self.keep :]:
            path.unlink(missing_ok=True)
        return int(kept[: self.keep][-1].stem.partition("-")[2])

    def finish(self, params: Tensors, buffers: Tensors, summary: Mapping[str, Any]) -> None:
        """Write the final model and the summary."""
        tensors = {n: t.contiguous() for n, t in {**params, **buffers}.items()}
        write_atomic(self.path / "model.safetensors", save_safetensors(tensors, {"format": "pt"}))
        write_atomic(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")


def fresh_directory(parent: Path, name: str) -> Path:
    """A path for a new run below `parent` that nothing uses yet: name, name-2, name-3, …"""
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        if not os.path.lexists(path):
            return path
        number += 1
