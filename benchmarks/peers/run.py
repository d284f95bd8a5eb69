"""Seconds per round of the same federated work in several systems, as ratios to a floor.

    python benchmarks/peers/run.py [--workloads mlp-1 cnn] [--systems floor bare flower] [--repeats 5] [--json FILE]

Every system runs in a process of its own. In every repeat each system in turn runs a burst of rounds while the others
sleep; the figure is the median over repeats of its seconds per round over the floor's in the same repeat. README.md
says what the systems are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from work import WORKLOADS, Workload, difference

import fedstrata as fs

HERE = Path(__file__).resolve().parent
FLOOR = "floor"
SYSTEMS = (FLOOR, "bare", "bare-2", "flower", "pfl", "serial", "workers", "vmap", "vmap+compile", "workers+compile")
FRESH = {"flower"}
"""Systems that cannot be held between rounds: every burst is a new process."""
LEAST, MOST = 3, 300
"""Rounds of a burst."""
TRIES = 4
"""How often a burst is measured at most, where `--quiet` asks for a quiet machine."""
PATIENCE = 900
"""Seconds that a system may take to answer."""


class Failed(Exception):
    """A system cannot go on; the message is one sentence."""


def interpreter(system: str) -> str:
    """The Python of a system: that of its own virtual environment, if it has one."""
    own = HERE / f".venv-{system}" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


@dataclass
class Process:
    """A running worker, in a session of its own so that all its children can be found and ended."""

    system: str
    child: subprocess.Popen[str]
    log: TextIO
    began: float

    @classmethod
    def start(cls, system: str, workload: str, weights: Path, once: int = 0) -> Process:
        """Start a worker with one thread, on the fedstrata that is imported here."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(Path(fs.__file__).parent.parent)
        command = [interpreter(system), str(HERE / "worker.py"), "--system", system, "--workload", workload]
        command += ["--weights", str(weights), "--once", str(once)]
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `end`)
        began = time.perf_counter()
        pipe = subprocess.PIPE
        child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=log, env=environment, text=True, start_new_session=True
        )
        return cls(system, child, log, began)

    def tell(self, line: str) -> None:
        """Send a line."""
        assert self.child.stdin is not None
        try:
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._last_words()) from None

    def hear(self, event: str) -> dict[str, Any]:
        """Wait for a line."""
        assert self.child.stdout is not None
        readable, _, _ = select.select([self.child.stdout], [], [], PATIENCE)
        line = self.child.stdout.readline() if readable else None
        if line is None:
            raise Failed(f"it did not answer within {PATIENCE} seconds")
        if not line:
            raise Failed(self._last_words())
        message: dict[str, Any] = json.loads(line)
        if message["event"] != event:
            raise Failed(str(message.get("why", message)))
        return message

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = self.log.read().strip().splitlines()
        return f"its process ended: {lines[-1][:200] if lines else 'it said nothing'}"

    def members(self) -> dict[int, int]:
        """Every process that lives in the session, with its processor time in ticks."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.child.pid:
                    found[int(stat.parent.name)] = int(fields[11]) + int(fields[12])
        return found

    def processor_seconds(self) -> float:
        """Processor time of every process that lives in the session."""
        return sum(self.members().values()) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Let it end by itself, and then see to it that nothing of its session is left."""
        with contextlib.suppress(OSError):
            if self.child.stdin is not None:
                self.child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(20 if sys.exc_info()[0] is None else 1)
        for member in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        self.child.wait()
        self.log.close()
        if self.child.stdout is not None:
            self.child.stdout.close()


@dataclass
class Column:
    """What is known of a system on a workload."""

    system: str
    rounds: int = LEAST
    begins: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    bursts: list[list[float]] = field(default_factory=list)
    gap: tuple[float, float | None] | None = None
    others: list[float] = field(default_factory=list)
    idle: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    failed: str = ""

    @property
    def seconds(self) -> list[float]:
        """Seconds per round in each repeat."""
        return [statistics.mean(burst) for burst in self.bursts]


class ModelReplica:
    """All systems on one workload."""

    def __init__(self, workload: str, systems: list[str], burst: float, quiet: float, folder: Path) -> None:
        self.name, self.work, self.target, self.folder = workload, WORKLOADS[workload], burst, folder
        self.quiet = quiet
        self.columns = {system: Column(system) for system in systems}
        self.processes: dict[str, Process] = {}

    def run(self, repeats: int) -> None:
        """Start every system, warm it up, and measure."""
        try:
            for system in self.columns:
                self._guarded(system, self._start)
            for _ in range(repeats):
                for system in self.columns:
                    self._guarded(system, self._burst)
        finally:
            for process in self.processes.values():
                process.end()

    def _guarded(self, system: str, what: Any) -> None:
        column = self.columns[system]
        if column.failed:
            return
        try:
            what(column)
        except Failed as error:
            column.failed = str(error)
            print(f"{self.name}: {system} failed: {error}", file=sys.stderr)
            if system in self.processes:
                self.processes.pop(system).end()

    def _start(self, column: Column) -> None:
        """Start-up, the first round and its result, and a warm-up burst that is thrown away."""
        system, weights = column.system, self.folder / f"{self.name}-{column.system}.pt"
        if system in FRESH:
            warm = self._fresh(column, LEAST, weights)
        else:
            process = self.processes[system] = Process.start(system, self.name, weights)
            self._ready(column, process)
            warm = self._go(process, LEAST)
            per_round = statistics.median(warm)
            if per_round * LEAST < self.target:
                warm = self._go(process, self._fitting(per_round))
        column.rounds = self._fitting(statistics.median(warm))

    def _fitting(self, per_round: float) -> int:
        return max(LEAST, min(MOST, round(self.target / per_round)))

    def _ready(self, column: Column, process: Process) -> None:
        message = process.hear("ready")
        first, column.versions = message["round"], message["versions"]
        self._same_work(first)
        column.begins.append(first["start"] - process.began)
        weights = Path(process.child.args[process.child.args.index("--weights") + 1])  # type: ignore[index,union-attr]
        column.done.append(first["end"] - process.began)
        if column.gap is None and weights.exists():
            column.gap = difference(self.work, first["clients"], torch.load(weights, weights_only=True))

    def _fresh(self, column: Column, rounds: int, weights: Path) -> list[float]:
        process = Process.start(column.system, self.name, weights, once=rounds)
        try:
            self._ready(column, process)
            return self._checked(process.hear("rounds"))
        finally:
            process.end()

    def _go(self, process: Process, rounds: int) -> list[float]:
        process.tell(f"go {rounds}")
        return self._checked(process.hear("rounds"))

    def _checked(self, message: dict[str, Any]) -> list[float]:
        for each in message["rounds"]:
            self._same_work(each)
        return [each["seconds"] for each in message["rounds"]]

    def _same_work(self, each: dict[str, Any]) -> None:
        """The same work in every system: counted, round by round."""
        did = (len(set(each["clients"])), each["steps"], each["examples"])
        asked = (self.work.sampled, self.work.steps, self.work.seen)
        if did != asked:
            raise Failed(f"not the same work: clients, steps and examples of a round are {did}, not {asked}")

    def _burst(self, column: Column) -> None:
        """One burst; done again, a few times at most, where processes that are not ours were too busy meanwhile."""
        for _ in range(TRIES):
            wait_for_quiet(self.quiet)
            seconds, others = self._measured(column)
            if others <= self.quiet:
                break
        column.bursts.append(seconds)
        column.others.append(others)

    def _measured(self, column: Column) -> tuple[list[float], float]:
        """(seconds of each round, cores that processes which are not ours used meanwhile)."""
        before = {name: process.processor_seconds() for name, process in self.processes.items()}
        busy, begin = machine_seconds(), time.perf_counter()
        if column.system in FRESH:
            return self._fresh(column, column.rounds, self.folder / "again.pt"), 0.0  # its processes are gone: unknown
        seconds = self._go(self.processes[column.system], column.rounds)
        wall = time.perf_counter() - begin
        used = {name: process.processor_seconds() - before[name] for name, process in self.processes.items()}
        for name, share in used.items():
            if name != column.system:
                self.columns[name].idle = max(self.columns[name].idle, share / wall)
        return seconds, max(0.0, (machine_seconds() - busy - sum(used.values())) / wall)

    def table(self) -> str:
        """Markdown."""
        work, floor = self.work, self.columns[FLOOR]
        lines = [
            f"### {self.name}: {work.title}",
            "",
            f"`{work.model}` on {'×'.join(map(str, work.shape))}, {parameters(work):,} parameters; {work.clients:,} "
            f"clients × {work.examples} examples, {work.sampled} a round, batch {work.batch}: {work.steps} steps and "
            f"{work.seen:,} examples per round, counted in every round of every system.",
            "",
            "| system | × floor | min–max | ms per round | first round begins, s | first round done, s | off by |",
            "|---|--:|--:|--:|--:|--:|--:|",
        ]
        for column in self.columns.values():
            if column.failed or not column.bursts:
                lines.append(f"| {column.system} | failed | | | | | |")
                continue
            ratios = ratio(column, floor)
            lines.append(
                f"| {column.system} | {statistics.median(ratios):.2f} | {min(ratios):.2f}–{max(ratios):.2f} "
                f"| {1000 * statistics.median(column.seconds):.1f} | {statistics.median(column.begins):.1f} "
                f"| {statistics.median(column.done):.1f} | {off_by(column)} |"
            )
        lines.append("")
        lines += [f"- {c.system} failed: {c.failed}" for c in self.columns.values() if c.failed]
        sleepers = [c for c in self.columns.values() if c.system not in FRESH and c.bursts]
        worst = max(sleepers, key=lambda c: c.idle)
        lines.append(f"- While others ran, no held system used more than {worst.idle:.1%} of a core ({worst.system}).")
        others = [share for column in sleepers for share in column.others]
        lines.append(
            f"- In a burst, processes that are not ours used {statistics.median(others):.2f} cores in the median and "
            f"{max(others):.2f} at most."
        )
        return "\n".join(lines) + "\n"

    def as_json(self) -> dict[str, Any]:
        """Everything that was measured."""
        floor = self.columns[FLOOR]
        systems = {
            name: {
                "ratios": ratio(column, floor),
                "seconds_a_round": column.seconds,
                "rounds": column.bursts,
                "first_round_begins": column.begins,
                "first_round_done": column.done,
                "off_by": column.gap,
                "idle_cores": column.idle,
                "other_cores": column.others,
                "versions": column.versions,
                "failed": column.failed or None,
            }
            for name, column in self.columns.items()
        }
        return {
            "workload": self.name,
            "steps": self.work.steps,
            "examples": self.work.seen,
            "systems": systems,
        }


def machine_seconds() -> float:
    """Processor time of the whole machine so far, without idling and waiting."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(int(f) for i, f in enumerate(fields) if i not in (3, 4, 7)) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(cores: float) -> None:
    """Sleep until the machine is as good as idle, but for a minute at most."""
    if math.isinf(cores):
        return
    for _ in range(120):
        before = machine_seconds()
        time.sleep(0.5)
        if machine_seconds() - before <= 0.5 * cores + 0.02:
            return


def parameters(work: Workload) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in work.build().parameters())


def ratio(column: Column, floor: Column) -> list[float]:
    """Seconds per round over the floor's, repeat by repeat."""
    return [ours / bare for ours, bare in zip(column.seconds, floor.seconds, strict=False)]


def off_by(column: Column) -> str:
    """The largest difference of a parameter (and of a running statistic) from plain FedAvg after the first round."""
    if column.gap is None:
        return "–"
    parameter, running = column.gap
    return f"{parameter:.0e}" if running is None else f"{parameter:.0e} (statistics {running:.0e})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="the floor always runs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--burst", type=float, default=1.5, help="seconds that a burst should take")
    parser.add_argument("--quiet", type=float, default=math.inf, help="cores that other processes may use in a burst")
    parser.add_argument("--json", type=Path, help="also write everything that was measured to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # an exit ends the children, too
    systems = [s for s in SYSTEMS if s == FLOOR or s in options.systems]
    replicas = []
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        for workload in options.workloads:
            replica = ModelReplica(workload, systems, options.burst, options.quiet, Path(folder))
            replica.run(options.repeats)
            if replica.columns[FLOOR].failed:
                sys.exit(f"{workload}: the floor failed: {replica.columns[FLOOR].failed}")
            print(replica.table(), flush=True)
            replicas.append(replica)
    found: dict[str, str] = {}
    for column in (column for replica in replicas for column in replica.columns.values()):
        found |= column.versions
    print(f"Python {platform.python_version()}, " + ", ".join(f"{name} {v}" for name, v in found.items()))
    if options.json:
        rows = [replica.as_json() for replica in replicas]
        options.json.write_text(json.dumps({"versions": found, "workloads": rows}, indent=1) + "\n")
    if any("not the same work" in column.failed for replica in replicas for column in replica.columns.values()):
        sys.exit("a system did not do the same work")


if __name__ == "__main__":
    main()
