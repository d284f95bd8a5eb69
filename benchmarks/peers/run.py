"""Seconds per round of the same federated work in several systems, as ratios to a floor.

    python benchmarks/peers/run.py [--workloads device cnn] [--systems floor bare flower] [--repeats 5] [--json FILE]
    python benchmarks/peers/run.py --isa default avx2       # everything with all instruction sets, then with AVX2 alone
    python benchmarks/peers/run.py --door examples          # data as fedstrata's own datasets hold it
    python benchmarks/peers/run.py --quick                  # some minutes: the floor, the loop by hand and fedstrata

Every system runs in a process of its own. In every repeat each system in turn runs a burst of rounds while the others
sleep; the figure is the median over repeats of its seconds per round over the floor's in the same repeat. README.md
says what the systems are.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from work import DOORS, WORKLOADS, Workload, difference, workload

import fedstrata as fs

HERE = Path(__file__).resolve().parent
LIBC = ctypes.CDLL(None)
FLOOR = "floor"
OURS = ("serial", "workers", "vmap", "vmap+compile", "workers+compile", "auto", "auto+compile")
SYSTEMS = (FLOOR, "bare", "bare-2", "flower", "pfl", *OURS)
QUICK = {
    "workloads": ["device", "small-cnn", "resnet8-64", "mlp-25m"],
    "systems": ["bare-2", "auto", "auto+compile"],
    "repeats": 3,
    "burst": 0.8,
}
"""What `--quick` measures, where nothing else is asked for: no peers, so nothing has to be installed."""
ISAS = {"default": {}, "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}}
"""Instruction sets, and what limits a process to them."""
LIMITS = {
    "default": "of which all that the libraries choose is used",
    "avx2": "of which torch and oneDNN use AVX2 at most",
}
"""What a table says of them."""
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
    def start(cls, system: str, work: Workload, isa: str, weights: Path, *more: str) -> Process:
        """Start a worker with one thread, on the fedstrata that is imported here."""
        limits = {name: value for all_of_it in ISAS.values() for name, value in all_of_it.items()}
        environment = {name: value for name, value in os.environ.items() if name not in limits}
        environment |= {**ISAS[isa], "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(Path(fs.__file__).parent.parent)
        command = [interpreter(system), str(HERE / "worker.py"), "--system", system, "--workload", work.name]
        command += ["--door", work.door, "--weights", str(weights), *more]
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

    def members(self) -> dict[int, float]:
        """Every process that lives in the session, with its processor time in seconds, user and system."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.child.pid:
                    found[int(stat.parent.name)] = process_seconds(int(stat.parent.name))
        return found

    def processor_seconds(self) -> float:
        """Processor time of every process that lives in the session."""
        return sum(self.members().values())

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


class Meter:
    """The processor time of a process's session, looked at again and again: for systems that end with their burst."""

    def __init__(self, process: Process) -> None:
        self.process, self.used, self.seen = process, dict[int, float](), [(process.began, 0.0)]
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while not self.done.wait(0.2):
            self.used |= self.process.members()  # processes that have ended keep what they had
            self.seen.append((time.perf_counter(), sum(self.used.values())))

    def stop(self) -> None:
        """Look no more."""
        self.done.set()
        self.thread.join()

    def between(self, start: float, end: float) -> float:
        """Seconds used between two moments."""
        return self._at(end) - self._at(start)

    def _at(self, moment: float) -> float:
        for (before, least), (after, most) in zip(self.seen, self.seen[1:], strict=False):
            if before <= moment <= after:
                return least + (most - least) * (moment - before) / (after - before)
        return self.seen[-1][1]


@dataclass
class Column:
    """What is known of a system on a workload."""

    system: str
    rounds: int = LEAST
    begins: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    bursts: list[list[float]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    engine: str = ""
    gap: tuple[float, float | None] | None = None
    others: list[float] = field(default_factory=list)
    idle: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    failed: str = ""

    @property
    def seconds(self) -> list[float]:
        """Seconds per round in each repeat."""
        return [statistics.mean(burst) for burst in self.bursts]

    @property
    def title(self) -> str:
        """Its name, with the engine that it chose by itself."""
        return f"{self.system} ({self.engine})" if self.system.startswith("auto") and self.engine else self.system

    def row(self, floor: Column) -> str:
        """Its line of the table."""
        if self.failed or not self.bursts:
            return f"| {self.system} | failed | | | | | | | |"
        ratios, used = ratio(self.seconds, floor.seconds), ratio(self.cpu, floor.cpu)
        cells = (
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f}–{max(ratios):.2f}",
            f"{1000 * statistics.median(self.seconds):.1f}",
            f"{statistics.median(used):.2f}",
            f"{1000 * statistics.median(self.cpu):.1f}",
            f"{statistics.median(self.begins):.1f}",
            f"{statistics.median(self.done):.1f}",
            off_by(self),
        )
        return f"| {self.title} | {' | '.join(cells)} |"


class Comparison:
    """All systems on one workload, with one choice of instruction sets."""

    def __init__(self, work: Workload, isa: str, systems: list[str], options: argparse.Namespace, folder: Path) -> None:
        self.work, self.isa, self.folder = work, isa, folder
        self.target, self.quiet = options.burst, options.quiet
        self.columns = {system: Column(system) for system in systems}
        self.processes: dict[str, Process] = {}
        self.plain: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}

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
            print(f"{self.work.name}: {system} failed: {error}", file=sys.stderr)
            if system in self.processes:
                self.processes.pop(system).end()

    def _start(self, column: Column) -> None:
        """Start-up, the first round and its result, and a warm-up burst that is thrown away."""
        system, weights = column.system, self.folder / f"{self.work.name}-{self.isa}-{column.system}.pt"
        if system in FRESH:
            warm, _ = self._fresh(column, LEAST, weights)
        else:
            process = self.processes[system] = Process.start(system, self.work, self.isa, weights)
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
        first, column.versions, column.engine = message["round"], message["versions"], message["engine"]
        self._same_work(first)
        column.begins.append(first["start"] - process.began)
        weights = Path(process.child.args[process.child.args.index("--weights") + 1])  # type: ignore[index,union-attr]
        column.done.append(first["end"] - process.began)
        if column.gap is None and weights.exists():
            after = torch.load(weights, weights_only=True)
            column.gap = difference(self.work, self._plain(tuple(first["clients"])), after)

    def _plain(self, clients: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """A plain FedAvg of the first round, by a process with the same instruction sets."""
        if clients not in self.plain:
            path = self.folder / f"{self.work.name}-{self.isa}-reference.pt"
            process = Process.start("reference", self.work, self.isa, path, "--clients", *map(str, clients))
            try:
                process.hear("ready")
            finally:
                process.end()
            self.plain[clients] = torch.load(path, weights_only=True)
        return self.plain[clients]

    def _fresh(self, column: Column, rounds: int, weights: Path) -> tuple[list[float], float]:
        """(seconds of each round, processor time per round) of a process that ends with them."""
        process = Process.start(column.system, self.work, self.isa, weights, "--once", str(rounds))
        meter = Meter(process)
        try:
            self._ready(column, process)
            message = process.hear("rounds")
        finally:
            meter.stop()
            process.end()
        seconds = self._checked(message)
        end = message["rounds"][-1]["end"]
        return seconds, meter.between(end - sum(seconds), end) / rounds

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
            seconds, cpu, others = self._measured(column)
            if others <= self.quiet:
                break
        column.bursts.append(seconds)
        column.cpu.append(cpu)
        column.others.append(others)

    def _measured(self, column: Column) -> tuple[list[float], float, float]:
        """(seconds of each round, processor time per round, cores that processes which are not ours used meanwhile)."""
        if column.system in FRESH:
            return *self._fresh(column, column.rounds, self.folder / "again.pt"), 0.0  # who else was busy is unknown
        before = {name: process.processor_seconds() for name, process in self.processes.items()}
        busy, begin = machine_seconds(), time.perf_counter()
        seconds = self._go(self.processes[column.system], column.rounds)
        wall = time.perf_counter() - begin
        used = {name: process.processor_seconds() - before[name] for name, process in self.processes.items()}
        for name, share in used.items():
            if name != column.system:
                self.columns[name].idle = max(self.columns[name].idle, share / wall)
        others = max(0.0, (machine_seconds() - busy - sum(used.values())) / wall)
        return seconds, used[column.system] / column.rounds, others

    def table(self) -> str:
        """Markdown."""
        work, floor = self.work, self.columns[FLOOR]
        lines = [
            f"### {work.name}: {work.title} ({self.isa})",
            "",
            f"`{work.model}` on {'×'.join(map(str, work.shape))}, {parameters(work):,} parameters; {work.clients:,} "
            f"clients × {work.examples} examples, {work.sampled} per round, batch {work.batch}: {work.steps} steps and "
            f"{work.seen:,} examples per round, counted in every round of every system. Data: {DOORS[work.door]}. "
            f"Processor: {processor()}, {LIMITS[self.isa]}.",
            "",
            "| system | × floor | min–max | ms per round | CPU × floor | CPU ms per round | first round begins, s "
            "| first round done, s | off by |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]
        lines += [column.row(floor) for column in self.columns.values()]
        return "\n".join([*lines, "", *self._notes()]) + "\n"

    def _notes(self) -> list[str]:
        """What went wrong, and who else used the processor."""
        lines = [f"- {c.system} failed: {c.failed}" for c in self.columns.values() if c.failed]
        sleepers = [c for c in self.columns.values() if c.system not in FRESH and c.bursts]
        worst = max(sleepers, key=lambda c: c.idle)
        lines.append(f"- While others ran, no held system used more than {worst.idle:.1%} of a core ({worst.system}).")
        others = [share for column in sleepers for share in column.others]
        lines.append(
            f"- In a burst, processes that are not ours used {statistics.median(others):.2f} cores in the median and "
            f"{max(others):.2f} at most."
        )
        return lines

    def as_json(self) -> dict[str, Any]:
        """Everything that was measured."""
        floor = self.columns[FLOOR]
        systems = {
            name: {
                "ratios": ratio(column.seconds, floor.seconds),
                "seconds_a_round": column.seconds,
                "cpu_ratios": ratio(column.cpu, floor.cpu),
                "cpu_seconds_a_round": column.cpu,
                "engine": column.engine,
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
            "workload": self.work.name,
            "door": self.work.door,
            "isa": self.isa,
            "steps": self.work.steps,
            "examples": self.work.seen,
            "systems": systems,
        }


def process_seconds(pid: int) -> float:
    """Processor time of a process, finer than the hundredths of a second that /proc tells."""
    clock = ctypes.c_int()
    if LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise ProcessLookupError(pid)
    return time.clock_gettime(clock.value)


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


def processor() -> str:
    """The processor's model, and which wide instructions it has."""
    text = Path("/proc/cpuinfo").read_text()
    facts = dict(line.split(":", 1) for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    known = {name.strip(): value.strip() for name, value in facts.items()}
    flags = known.get("flags", "").split()
    wide = [title for flag, title in (("avx2", "AVX2"), ("avx512f", "AVX-512")) if flag in flags]
    return f"{known.get('model name', platform.machine())} ({', '.join(wide) or 'neither AVX2 nor AVX-512'})"


def ratio(ours: list[float], floor: list[float]) -> list[float]:
    """One system's figures over the floor's, repeat by repeat."""
    return [mine / least if least else math.nan for mine, least in zip(ours, floor, strict=False)]


def off_by(column: Column) -> str:
    """The largest difference of a parameter (and of a running statistic) from plain FedAvg after the first round."""
    if column.gap is None:
        return "–"
    parameter, running = column.gap
    return f"{parameter:.0e}" if running is None else f"{parameter:.0e} (statistics {running:.0e})"


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="the floor always runs")
    parser.add_argument("--door", choices=DOORS, default="plain", help="how clients' data is held")
    parser.add_argument("--isa", nargs="+", choices=ISAS, default=["default"], help="instruction sets to measure with")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--burst", type=float, default=1.5, help="seconds that a burst should take")
    parser.add_argument("--quiet", type=float, default=math.inf, help="cores that other processes may use in a burst")
    parser.add_argument("--json", type=Path, help="also write everything that was measured to this file")
    parser.add_argument("--quick", action="store_true", help="other defaults, for some minutes")
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


def compare(options: argparse.Namespace) -> list[Comparison]:
    """All workloads with all instruction sets, each told as soon as it is known."""
    systems = [s for s in SYSTEMS if s == FLOOR or s in options.systems]
    found = []
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        for isa in options.isa:
            for name in options.workloads:
                comparison = Comparison(workload(name, options.door), isa, systems, options, Path(folder))
                comparison.run(options.repeats)
                if comparison.columns[FLOOR].failed:
                    sys.exit(f"{name}: the floor failed: {comparison.columns[FLOOR].failed}")
                print(comparison.table(), flush=True)
                found.append(comparison)
    return found


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # an exit ends the children, too
    comparisons = compare(options)
    columns = [column for comparison in comparisons for column in comparison.columns.values()]
    found: dict[str, str] = {}
    for column in columns:
        found |= column.versions
    print(f"{processor()}; Python {platform.python_version()}, " + ", ".join(f"{n} {v}" for n, v in found.items()))
    if options.json:
        rows = [comparison.as_json() for comparison in comparisons]
        whole = {"processor": processor(), "versions": found, "workloads": rows}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    if any("not the same work" in column.failed for column in columns):
        sys.exit("a system did not do the same work")


if __name__ == "__main__":
    main()
