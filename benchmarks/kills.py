"""Kill a run at random, go on with it until it is finished, and see whether the result has the same bits.

A trial is a run of the command in a process of its own, with worker processes. At random moments SIGKILL, SIGTERM or
SIGHUP goes to its main process, to one of its workers or to all of them, three times at most; and it is resumed until
it is finished. Model and metrics must be those of a run that was left alone, to the last bit, but for seconds and
memory. A quarter of the moments is drawn from the time that a run needs to begin, the others from the time after the
first round that was done since the run began or was resumed: at least half of all kills must come there.

    python benchmarks/kills.py [--trials 100] [--seed 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedstrata.__main__ import main as command

RUN = {
    "dataset": "digits",
    "model": "cnn2(width=8)",
    "partition": "dirichlet(alpha=0.3)",
    "clients": "8",
    "participation": "0.5",
    "rounds": "24",
    "engine": "processes",
    "workers": "2",
}
METHODS = ("feddyn(alpha=0.1) + fednlr + fedpart(full_rounds=2, rounds_per_stratum=1)", "scaffold")
SECONDS = (0.0, 0.3)
"""Least time between checkpoints: one every round, and one every few rounds."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
TARGETS = ("main", "worker", "all")
MOST = 3
"""Kills in a trial, at most."""
EARLY = 0.25
"""Share of the kills that do not wait for a round."""
HANGS = 600
"""Seconds after which a run counts as hanging."""
NEEDED = (
    "torch",
    "numpy.random",
    "fedstrata.cli.main",
    "fedstrata.cli.console",
    "fedstrata.engines.processes",
    "fedstrata.engines.ray",
    "fedstrata.federation",
    "fedstrata.run",
)
"""What the command imports on its way, which would be most of the time of so short a run."""


@dataclass
class Kill:
    """One signal, and how far the run had come."""

    signal: str
    target: str
    rounds: int
    """Rounds that metrics.jsonl held."""
    new: int
    """Those of them that were done since the run began or was last resumed."""


@dataclass
class Whole:
    """A run that was left alone: seconds up to its first round, seconds from there on, and its result."""

    first: float
    rest: float
    result: tuple[bytes, list[Any]]


@dataclass
class DryRun:
    """What was done to a run, and what came of it."""

    seed: int
    method: str
    checkpoint_seconds: float
    kills: list[Kill] = field(default_factory=list)
    same: bool = False
    outlived: float = 0.0
    """Seconds that a worker lived on after its main process, at most."""


def start(*words: object) -> int:
    """The command in a process of its own, forked from this one, which has imported what it needs. Its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1), os.dup2(nowhere, 2)
        sys.argv = ["fedstrata", *map(str, words)]
        command()
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    finally:
        os._exit(70)


def children(pid: int) -> list[int]:
    """The workers of a process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def gone(pid: int) -> bool:
    """True if a process is not there any more, or only as a name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def never() -> bool:
    return False


def ended(pid: int, seconds: float, sooner: Callable[[], bool] = never) -> int | None:
    """The exit code of a child, as shells have it; None if it lives on after some time, or once `sooner` holds."""
    end = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code
        if time.monotonic() >= end or sooner():
            return None
        time.sleep(0.002)


def rows(run: Path) -> list[str]:
    """The whole lines of metrics.jsonl, of which no two are alike: seconds have all their digits."""
    try:
        return (run / "metrics.jsonl").read_text().split("\n")[:-1]
    except OSError:
        return []


def reach(pid: int, dice: random.Random, whole: Whole, run: Path, old: set[str]) -> int | None:
    """Let a run that began with `old` rows go on up to a random moment: its exit code if it ends before, else None."""

    def begun() -> bool:
        return not old.issuperset(rows(run))

    if dice.random() < EARLY:
        return ended(pid, dice.uniform(0, whole.first))
    code = ended(pid, HANGS, begun)
    if code is None and not begun():
        raise SystemExit(f"a run hangs before its first round, process {pid}")
    return ended(pid, dice.uniform(0, 0.7 * whole.rest)) if code is None else code


def kill(pid: int, dice: random.Random, trial: DryRun, far: tuple[int, int]) -> int | None:
    """Send a signal to a run that has come so far: its exit code, None if it goes on."""
    number, target = dice.choice(SIGNALS), dice.choice(TARGETS)
    workers = children(pid)
    if target == "worker" and not workers:
        target = "main"
    hit = {"main": [pid], "worker": [dice.choice(workers)] if workers else [], "all": [pid, *workers]}[target]
    for victim in hit:
        with suppress(ProcessLookupError):  # workers end by themselves once their main process is hit
            os.kill(victim, number)
    trial.kills.append(Kill(number.name, target, *far))
    if target == "worker":
        return None
    code = ended(pid, 60)
    begin = time.monotonic()
    while not all(map(gone, workers)) and time.monotonic() < begin + 60:
        time.sleep(0.002)
    trial.outlived = max(trial.outlived, time.monotonic() - begin)
    if code != 128 + number and code != 0:
        raise SystemExit(f"{trial}: exit code {code} after {number.name}")
    return code


def options(method: str, seconds: float) -> list[str]:
    """A run as options of the command."""
    fields = {**RUN, "method": method, "checkpoint_seconds": seconds}
    return [word for name, value in fields.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def result(run: Path) -> tuple[bytes, list[Any]]:
    """What must be the same: the model's bytes, and the rows of metrics.jsonl without seconds and memory."""
    records = [json.loads(line) for line in rows(run)]
    timeless = [{name: v for name, v in row.items() if name not in ("seconds", "memory")} for row in records]
    return (run / "model.safetensors").read_bytes(), timeless


def alone(method: str, run: Path) -> Whole:
    """A run that nobody kills."""
    begin = time.monotonic()
    pid = start("run", "--out", run, *options(method, 0.0), "--quiet", "--no-report")
    code = ended(pid, HANGS, lambda: bool(rows(run)))
    first = time.monotonic()
    if code is not None or ended(pid, HANGS) != 0:
        raise SystemExit(f"the run with {method} fails by itself")
    return Whole(first - begin, time.monotonic() - first, result(run))


def attempt(seed: int, wholes: dict[str, Whole], place: Path) -> DryRun:
    """One trial: kill and resume until the run is finished."""
    dice, run = random.Random(seed), place / str(seed)
    method = METHODS[seed % len(METHODS)]
    trial, whole = DryRun(seed, method, dice.choice(SECONDS)), wholes[method]
    while not (run / "summary.json").exists():
        words = (
            ("resume", run)
            if (run / "run.toml").exists()
            else ("run", "--out", run, *options(method, trial.checkpoint_seconds))
        )
        old = set(rows(run))
        pid = start(*words, "--quiet", "--no-report")
        code = None
        while code is None and len(trial.kills) < MOST:
            code = reach(pid, dice, whole, run, old)
            if code is None:
                done = rows(run)
                code = kill(pid, dice, trial, (len(done), len(set(done) - old)))
        code = ended(pid, HANGS) if code is None else code
        if code not in (0, *(128 + number for number in SIGNALS)):
            raise SystemExit(f"{trial}: exit code {code}")
    trial.same = result(run) == whole.result and not list(run.rglob(".*.tmp"))
    return trial


def tell(trials: list[DryRun]) -> None:
    """What was done, and what came of it.

    Raises:
        SystemExit: if a result differs, or most kills came too early to say much.
    """
    kills = [kill for trial in trials for kill in trial.kills]
    middle = sum(kill.new > 0 for kill in kills)
    print(f"\n{sum(t.same for t in trials)} of {len(trials)} results are the same, after {len(kills)} kills")
    print(f"{middle} kills came after a round since the run began or was resumed, {len(kills) - middle} before it")
    edges = range(1, int(RUN["rounds"]), 6)
    spread = Counter(sum(kill.rounds >= edge for edge in edges) for kill in kills)
    parts = ["0", *(f"{edge} to {edge + 5}" for edge in edges)]
    print("\n| rounds written | " + " | ".join(parts) + " |\n|---|" + "--:|" * len(parts))
    print("| kills | " + " | ".join(str(spread[part]) for part in range(len(parts))) + " |")
    table = Counter((kill.signal, kill.target) for kill in kills)
    print("\n| | " + " | ".join(TARGETS) + " |\n|---|" + "--:|" * len(TARGETS))
    for number in SIGNALS:
        print(f"| {number.name} | " + " | ".join(str(table[number.name, target]) for target in TARGETS) + " |")
    print(f"\nworkers lived on after their main process for {1000 * max(t.outlived for t in trials):.0f} ms at most")
    if not all(t.same for t in trials):
        raise SystemExit("some results differ")
    if 2 * middle < len(kills):
        raise SystemExit("fewer than half of the kills came in the middle of a run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the others count on from it")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    for name in NEEDED:
        importlib.import_module(name)
    trials = []
    with tempfile.TemporaryDirectory() as place:
        wholes = {method: alone(method, Path(place) / f"whole-{n}") for n, method in enumerate(METHODS)}
        for method, whole in wholes.items():
            print(f"{method}: {whole.first:.1f} s up to the first round, {whole.rest:.1f} s from there on", flush=True)
        for seed in range(given.seed, given.seed + given.trials):
            last = attempt(seed, wholes, Path(place))
            trials.append(last)
            kills = ", ".join(f"{kill.signal} {kill.target} at {kill.rounds} (+{kill.new})" for kill in last.kills)
            print(f"seed {seed}: {kills or 'no kill'}: {'same' if last.same else 'DIFFERENT'}", flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(trial) for trial in trials], indent=1) + "\n")
    tell(trials)


if __name__ == "__main__":
    main()
