"""Kill a run at random, go on with it until it is finished, and see whether the result has the same bits.

A trial is a run of the command in a process of its own, with worker processes. At random moments SIGKILL, SIGTERM or
SIGHUP goes to its main process, to one of its workers or to all of them, three times at most; and it is resumed until
it is finished. Model and metrics must be those of a run that was left alone, to the last bit, but for seconds and
memory.

    python benchmarks/kills.py [--trials 100] [--seed 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedstrata.__main__ import main as command

RUN = {
    "dataset": "digits",
    "model": "cnn2(width=8)",
    "partition": "dirichlet(alpha=0.3)",
    "clients": "8",
    "participation": "0.5",
    "rounds": "12",
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


@dataclass
class Trial:
    """What was done to a run, and what came of it."""

    seed: int
    method: str
    checkpoint_seconds: float
    kills: list[str] = field(default_factory=list)
    same: bool = False
    outlived: float = 0.0
    """Seconds that a worker lived on after its main process, at most."""


def start(*words: object) -> int:
    """The command in a process of its own, forked: this one has imported what it needs. Its number."""
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


def ended(pid: int, seconds: float) -> int | None:
    """The exit code of a child that ends within some time, as shells have it."""
    end = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code
        if time.monotonic() >= end:
            return None
        time.sleep(0.002)


def kill(pid: int, dice: random.Random, trial: Trial) -> int | None:
    """Send a signal to a run: its exit code, None if it goes on."""
    number, target = dice.choice(SIGNALS), dice.choice(TARGETS)
    workers = children(pid)
    if target == "worker" and not workers:
        target = "main"
    hit = {"main": [pid], "worker": [dice.choice(workers)] if workers else [], "all": [pid, *workers]}[target]
    for victim in hit:
        if not gone(victim):
            os.kill(victim, number)
    trial.kills.append(f"{number.name} {target}")
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


def result(run: Path) -> tuple[bytes, list[object]]:
    """What must be the same: the model's bytes, and the rows of metrics.jsonl without seconds and memory."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timeless = [{name: v for name, v in row.items() if name not in ("seconds", "memory")} for row in rows]
    return (run / "model.safetensors").read_bytes(), timeless


def attempt(seed: int, whole: dict[str, tuple[float, tuple[bytes, list[object]]]], place: Path) -> Trial:
    """One trial: kill and resume until the run is finished."""
    dice, run = random.Random(seed), place / str(seed)
    method = METHODS[seed % len(METHODS)]
    trial = Trial(seed, method, dice.choice(SECONDS))
    usual, expected = whole[method]
    while not (run / "summary.json").exists():
        words = (
            ("resume", run)
            if (run / "run.toml").exists()
            else ("run", "--out", run, *options(method, trial.checkpoint_seconds))
        )
        pid = start(*words, "--quiet", "--no-report")
        code = None
        while code is None and len(trial.kills) < MOST:
            code = ended(pid, dice.uniform(0, 0.7 * usual))
            if code is None:
                code = kill(pid, dice, trial)
        code = ended(pid, 600) if code is None else code
        if code not in (0, *(128 + number for number in SIGNALS)):
            raise SystemExit(f"{trial}: exit code {code}")
    trial.same = result(run) == expected and not list(run.rglob(".*.tmp"))
    return trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the others count on from it")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    trials = []
    with tempfile.TemporaryDirectory() as place:
        whole = {}
        for number, method in enumerate(METHODS):
            begin, run = time.monotonic(), Path(place) / f"whole-{number}"
            if ended(start("run", "--out", run, *options(method, 0.0), "--quiet", "--no-report"), 600):
                raise SystemExit(f"the run with {method} fails by itself")
            whole[method] = time.monotonic() - begin, result(run)
        for seed in range(given.seed, given.seed + given.trials):
            trials.append(attempt(seed, whole, Path(place)))
            last = trials[-1]
            print(
                f"seed {seed}: {', '.join(last.kills) or 'no kill'}: {'same' if last.same else 'DIFFERENT'}", flush=True
            )
    kills = Counter(kill for trial in trials for kill in trial.kills)
    print(f"\n{sum(t.same for t in trials)} of {len(trials)} results are the same, after {kills.total()} kills")
    print("\n| | " + " | ".join(TARGETS) + " |\n|---|" + "--:|" * len(TARGETS))
    for number in SIGNALS:
        print(f"| {number.name} | " + " | ".join(str(kills[f"{number.name} {t}"]) for t in TARGETS) + " |")
    print(f"\nworkers lived on after their main process for {1000 * max(t.outlived for t in trials):.0f} ms at most")
    if given.json:
        given.json.write_text(json.dumps([asdict(trial) for trial in trials], indent=1) + "\n")
    sys.exit(not all(t.same for t in trials))


if __name__ == "__main__":
    main()
