"""Seconds per round and memory as the population grows, at a fixed number of clients per round.

    python benchmarks/scaling.py [--clients 100 1000 … 1000000] [--rounds 40] [--json FILE]

Two workloads, each population in a process of its own: FedAvg on an MLP, and a method with control variates as large as
the model on every client (as SCAFFOLD's), kept in the directory of the run. Clients are parts of one tensor, so the
data is the same for all populations; memory is the resident set of the main process and of its workers at the end, and
of it the index that says whose examples are whose.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

import fedstrata as fs
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Tensors, add, scale, subtract, zeros_like

EXAMPLES, SAMPLED = 32, 50


@dataclass(frozen=True, kw_only=True)
class Variates(fs.Technique):
    """Control variates: every client remembers the mean gradient of its last visit."""

    name: ClassVar[str] = "variates"
    vectorises: ClassVar[bool] = True

    def init(self, params: Tensors, setting: fs.Setting) -> Tensors:
        return zeros_like(params)

    def send(self, state: Tensors, assignment: fs.Assignment) -> Tensors:
        return state

    def local(self, view: fs.ClientView) -> fs.Hooks:
        names = view.assignment.trains
        mine = {n: view.memory.get(n, torch.zeros_like(view.slot[n])) for n in names}
        shift = subtract(view.slot, mine, names)

        def tally(total: Tensors, grads: Tensors, batch: fs.Batch) -> Tensors:
            return add(grads, total) if total else grads

        def finish(delta: Tensors, tally: Tensors) -> tuple[Tensors, Tensors | None]:
            mean = scale(tally, 0.25)  # four steps per visit
            return subtract(mean, mine, names), mean

        return fs.Hooks(correct=lambda grads, batch: shift, tally=tally, finish=finish)

    def accumulate(self, total: Tensors, slot: Tensors, delta: Tensors, weight: float) -> Tensors:
        return add(slot, total) if total else slot

    def apply(self, state: Tensors, delta: Tensors, round: fs.RoundView) -> tuple[Tensors, Tensors]:
        return delta, add(state, scale(round.totals["variates"], 1 / round.population))


def resident(pid: int | str) -> int:
    """Bytes of a process's resident set."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def children(pid: str) -> list[str]:
    return Path(f"/proc/self/task/{pid}/children").read_text().split()


def one(kind: str, clients: int, rounds: int) -> dict[str, Any]:
    """One population, measured in this process."""
    torch.set_num_threads(1)
    rng = generator("scaling")
    whole = fs.TensorExamples(
        torch.randint(0, 256, (100_000, 1, 28, 28), dtype=torch.uint8, generator=rng),
        torch.randint(0, 10, (100_000,), generator=rng),
        mean=(0.5,),
        std=(0.25,),
    )
    index = torch.arange(100_000).view(-1, EXAMPLES)
    data = whole.split(index[torch.arange(clients) % len(index)].unbind())
    model = fs.build_model("mlp(hidden=(64,))", (1, 28, 28), 10, seed=0)
    method = fs.chain(Variates()) if kind == "memory" else "fedavg"
    settings = {"rounds": rounds + 5, "participation": SAMPLED, "batch_size": 8, "lr": 0.05, "workers": "auto"}
    with tempfile.TemporaryDirectory() as out:
        federation = fs.Federation(model, data, method=method, **settings, out=Path(out) / "run")
        before = resident("self")
        seconds = []
        for number, _ in enumerate(federation.rounds()):
            if number < 4:
                begin = time.perf_counter()
                continue
            seconds.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            if len(seconds) == rounds:
                workers = [resident(pid) for pid in children(str(os.getpid()))]
                rss = resident("self")
                break
        return {
            "kind": kind,
            "clients": clients,
            "ms": 1000 * statistics.median(seconds),
            "rss": rss,
            "grown": rss - before,
            "workers": max(workers, default=0),
            "index": data.order.nbytes + data.ends.nbytes,
            "engine": federation.engine,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--kinds", nargs="+", default=["fedavg", "memory"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one[0], int(options.one[1]), int(options.one[2]))))
        return
    rows: list[dict[str, Any]] = []
    for _ in range(options.repeats):  # interleaved: the machine's mood hits all populations alike
        for kind in options.kinds:
            for clients in options.clients:
                command = [sys.executable, __file__, "--one", kind, str(clients), str(options.rounds)]
                rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for kind in options.kinds:
        print(f"\n{kind}\n\n| clients | ms per round | main process, MB | of it index, MB | largest worker, MB |")
        print("|--:|--:|--:|--:|--:|")
        for clients in options.clients:
            mine = [r for r in rows if r["kind"] == kind and r["clients"] == clients]
            ms, *held = (statistics.median(r[k] for r in mine) for k in ("ms", "rss", "index", "workers"))
            print(f"| {clients:,} | {ms:.1f} | {' | '.join(f'{each / 1e6:.1f}' for each in held)} |")


if __name__ == "__main__":
    main()
