"""A small run whose clients remember something (their batch-norm statistics), and what makes two runs the same."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fedstrata as fs
from fedstrata.cli.main import _run_guarded
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.runs import checkpoint

LONG = 300
"""Seconds: a limit against hanging and not against slowness, for whatever takes some seconds alone."""
SETTINGS: dict[str, Any] = {
    "dataset": "synthetic(shape=(3, 8, 8), classes=4, examples=80, test_examples=40)",
    "model": "resnet8(width=2, stem='3x3', maxpool=False)",
    "partition": "iid",
    "clients": 5,
    "participation": 0.4,
    "method": "fedavg(buffers='local')",
    "rounds": 4,
    "batch_size": 8,
    "checkpoint_seconds": 0.0,
}


def config(**changes: Any) -> RunConfig:
    """The small run's configuration."""
    made = validate_settings(RunConfig, {**SETTINGS, **changes})
    assert isinstance(made, RunConfig)
    return made


def options(**changes: Any) -> list[str]:
    """The small run as options of the command."""
    return [word for n, v in {**SETTINGS, **changes}.items() for word in (f"--{n.replace('_', '-')}", str(v))]


def fedstrata(*arguments: object) -> int:
    """The command in this process: its exit code. What it prints is for `capsys`."""
    return _run_guarded([str(a) for a in arguments], debug=False)


def process(*arguments: object, cwd: Path, code: str | None = None, **streams: Any) -> subprocess.Popen[str]:
    """Start the command in a process of its own, by `python -m fedstrata` or by a piece of code."""
    command = [sys.executable, *(["-m", "fedstrata"] if code is None else ["-c", code]), *map(str, arguments)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    path = os.pathsep.join([str(Path(fs.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    # A suite that was started in the background passes an ignored SIGINT on; the command must hear Ctrl-C all the same.
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=cwd, text=True, env=environment, preexec_fn=listen, **streams)


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """What the command printed, which must be one sentence on standard error and nothing else."""
    printed = capsys.readouterr()
    assert printed.out == ""
    return sentence(printed.err)


def sentence(error: str) -> str:
    """The text of standard error, which must be one line of fedstrata's."""
    assert error.startswith("fedstrata: "), error
    assert error.endswith("\n"), error
    assert error.count("\n") == 1, error
    assert "Traceback" not in error
    assert len(error) < 700
    return error.removeprefix("fedstrata: ").rstrip()


def metrics(run: Path) -> list[dict[str, Any]]:
    """The rounds of a run, without what differs from one execution to the next."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in ("seconds", "memory")} for row in rows]


def rounds_written(run: Path) -> int:
    """Rounds whose line is whole; unlike `metrics` also for a run that somebody writes, or was killed at that."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def same(run: Path, reference: Path) -> bool:
    """True if two finished runs have the same weights, bit for bit, and the same metrics; and left nothing behind."""
    assert not strays(run)
    model = "model.safetensors"
    return (run / model).read_bytes() == (reference / model).read_bytes() and metrics(run) == metrics(reference)


def strays(directory: Path) -> list[Path]:
    """Temporary files, which nothing may leave behind."""
    return [path for path in directory.rglob("*") if path.name.endswith((".tmp", ".part"))]


def shorten(run: Path, rounds: int) -> None:
    """Let a run end in another round, as if it had begun so."""
    edit(run, "rounds", rounds)
    settle(run, rounds=rounds)


def settle(run: Path, **changes: Any) -> None:
    """Let the checkpoints of a run say that it began with other settings."""
    for path in checkpoint.paths(run / "checkpoints"):
        begun = checkpoint.settings(path)
        assert begun is not None
        checkpoint.save(path.parent, checkpoint.load(path), begun | {n: repr(v) for n, v in changes.items()})


def edit(run: Path, name: str, value: Any) -> None:
    """Change a field of run.toml, and nothing else."""
    text, changed = re.subn(rf"^{name} = .*$", f"{name} = {value}", (run / "run.toml").read_text(), flags=re.M)
    assert changed == 1
    (run / "run.toml").write_text(text)


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes: a real error of the kernel's, in the middle of a write."""
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
