"""Work per visit around the arithmetic, counted and not timed: the same on a busy machine as on an idle one.

    python benchmarks/instructions.py [--top 15]        # count, and which functions most bytecodes are of
    python benchmarks/instructions.py --check           # exit code 1 if a count is more than 5 % from the recorded one
    python benchmarks/instructions.py --record          # write the counts of today to benchmarks/instructions.json
    python benchmarks/instructions.py --valgrind        # the processor's instructions, by callgrind; takes a minute

On the device workload of benchmarks/peers/work.py with pairs of tensors, once a federation has warmed up, two rounds
are counted. Engines are `serial` and `vmap` in this process, and of `processes` what the main process does for its
only worker. Of each visit:

    bytecodes   that Python executes, fedstrata's and its libraries'
    operators   of torch that are called, each by Python or by another one

Both are the same in every run, down to the last, with the same versions of Python and torch. Instructions repeat
within a thousandth. They are counted with a model of 8 hidden units and images of 4 × 4, so that the arithmetic is
next to nothing; valgrind knows no AVX-512, so libraries are kept from it. Bytecodes and operators take seconds, which
is why the tests compare these.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
BASELINE = HERE / "instructions.json"
TOLERANCE = 0.05
ENGINES = ("serial", "vmap", "processes")
ROUNDS = 2
CHILD = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
NARROW = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
MARKS = """
#include <valgrind/callgrind.h>
void begin_counting(void) { CALLGRIND_START_INSTRUMENTATION; }
void end_counting(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""
Counts = dict[str, dict[str, float]]
"""Engine → what → how many per visit."""


class Bytecodes:
    """Counts the bytecodes of this thread, by the code that they are of, while it is the tracer."""

    def __init__(self) -> None:
        self.found: Counter[CodeType] = Counter()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "opcode":
            self.found[frame.f_code] += 1
        return self._step


def measure(engine: str, marks: ctypes.CDLL | None) -> dict[str, Any]:
    """Counts of one engine, in this process; with marks, callgrind counts instead."""
    import torch

    import fedstrata as fs

    sys.path.append(str(HERE / "peers"))
    from work import LR, SEED, WORKLOADS, client_data

    torch.set_num_threads(1)
    work = WORKLOADS["device"]
    if marks is not None:
        work = replace(work, model="mlp(hidden=(8,))", shape=(1, 4, 4))
    settings = {"participation": work.sampled, "batch_size": work.batch, "lr": LR, "seed": SEED}
    settings |= {"rounds": 10**6, "engine": engine, "workers": 1}
    federation = fs.Federation(work.build(), list(client_data(work)), **settings)  # type: ignore[arg-type]
    if engine == "processes":  # jobs of as many visits as fit, however long they take here
        federation._engine.job_seconds = 1e9  # type: ignore[attr-defined]
    records, visits = federation.rounds(), ROUNDS * work.sampled

    def run() -> None:
        for _ in range(ROUNDS):
            next(records)

    run()  # what is done once
    gc.collect()
    gc.disable()  # when it comes depends on what was made before
    try:
        if marks is not None:
            marks.begin_counting()
            run()
            marks.end_counting(engine.encode())
            return {"visits": visits}
        return count(run, visits)
    finally:
        gc.enable()
        federation.close()


def count(run: Callable[[], None], visits: int) -> dict[str, Any]:
    """Bytecodes and operators per visit, each in a run of its own, and functions by bytecodes."""
    from torch.autograd.profiler import profile

    tracer = Bytecodes()
    sys.settrace(tracer)
    try:
        run()
    finally:
        sys.settrace(None)
    with profile() as profiler:
        run()
    functions: Counter[str] = Counter()
    for code, many in tracer.found.items():
        module = re.sub(r".*/(site-packages|src|lib/python[^/]*)/", "", code.co_filename)
        functions[f"{module}:{code.co_qualname}"] += many
    return {
        "bytecodes": tracer.found.total() / visits,
        "operators": len(profiler.function_events) / visits,
        "functions": {name: many / visits for name, many in functions.most_common()},
    }


def start(command: list[str], environment: dict[str, str]) -> list[dict[str, Any]]:
    """Run this file in a process of its own, and read what it counted of each engine."""
    whole = [*command, sys.executable, __file__, "--child"]
    done = subprocess.run(whole, env={**os.environ, **CHILD, **environment}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}\nthe process that counts failed")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def count_work() -> tuple[Counts, dict[str, dict[str, float]]]:
    """Bytecodes and operators, and functions by bytecodes."""
    found = dict(zip(ENGINES, start([], {}), strict=True))
    functions = {engine: each.pop("functions") for engine, each in found.items()}
    return {engine: {what: round(n, 2) for what, n in each.items()} for engine, each in found.items()}, functions


def count_instructions() -> Counts:
    """The processor's instructions, by callgrind."""
    with tempfile.TemporaryDirectory() as folder:
        source, marks = Path(folder) / "marks.c", Path(folder) / "marks.so"
        source.write_text(MARKS)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(marks), str(source)], check=True)
        out = f"--callgrind-out-file={folder}/counts"
        found = start(["valgrind", "--tool=callgrind", "--instr-atstart=no", out], {**NARROW, "MARKS": str(marks)})
        counts = {}
        for number, (engine, each) in enumerate(zip(ENGINES, found, strict=True), 1):
            total = re.search(r"^totals: (\d+)", (Path(folder) / f"counts.{number}").read_text(), re.MULTILINE)
            assert total is not None
            counts[engine] = {"instructions": int(total[1]) / each["visits"]}
    return counts


def versions() -> dict[str, str]:
    """What bytecodes and operators depend on."""
    from importlib.metadata import version

    return {"python": ".".join(platform.python_version_tuple()[:2]), "torch": version("torch").partition("+")[0]}


def deviations(counts: Counts, recorded: Counts) -> list[str]:
    """A sentence for every count that is not what was recorded."""
    return [
        f"{engine}: {now:,.1f} {what} per visit, {now / recorded[engine][what] - 1:+.1%} from the recorded "
        f"{recorded[engine][what]:,.1f}"
        for engine, each in counts.items()
        for what, now in each.items()
        if abs(now / recorded[engine][what] - 1) > TOLERANCE
    ]


def check(counts: Counts) -> None:
    """Compare with what was recorded, and exit with 1 if it is too far away, with 3 if it cannot be compared."""
    known = json.loads(BASELINE.read_text())
    if known["versions"] != versions():
        print(f"not compared: recorded with {known['versions']}, and this is {versions()}")
        sys.exit(3)
    if wrong := deviations(counts, known["per_visit"]):
        print("\n".join(wrong))
        sys.exit(
            f"more than {TOLERANCE:.0%} from {BASELINE.name}: look for the cause (--top 15 names functions); if it is "
            "meant, record anew with `python benchmarks/instructions.py --record`, and say why in the commit"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=0, help="functions to name, per engine")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare with what was recorded")
    what.add_argument("--record", action="store_true", help="write what was counted to the file")
    what.add_argument("--valgrind", action="store_true", help="count the processor's instructions")
    what.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        marks = ctypes.CDLL(os.environ["MARKS"]) if "MARKS" in os.environ else None
        print(json.dumps([measure(engine, marks) for engine in ENGINES]))
        return
    counts, functions = (count_instructions(), {}) if options.valgrind else count_work()
    for engine, each in counts.items():
        print(f"{engine}: " + ", ".join(f"{many:,.1f} {what}" for what, many in each.items()) + " per visit")
        for name, many in [*functions.get(engine, {}).items()][: options.top]:
            print(f"  {many:9,.1f}  {name}")
    if options.record:
        BASELINE.write_text(json.dumps({"versions": versions(), "per_visit": counts}, indent=1) + "\n")
    if options.check:
        check(counts)


if __name__ == "__main__":
    main()
