"""Processor seconds until the first round of the device workload is trained, beyond `import torch` and its data.

    python benchmarks/start_up.py [--repeats 5] [--rounds 1]

Two kinds of processes take turns: one that imports torch and makes 1,000 clients of 32 images, and
one that does the same and then runs the first rounds with `Federation(…, engine="auto", workers=2)`. Workers count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

DATA = """
import torch
torch.set_num_threads(1)
from torch import nn
g = torch.Generator().manual_seed(0)
clients = [(torch.randn(32, 1, 28, 28, generator=g), torch.randint(0, 10, (32,), generator=g)) for _ in range(1000)]
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
"""
ROUNDS = """
import fedstrata as fs
fed = fs.Federation(model, clients, rounds=%d, participation=50, batch_size=16, lr=0.05, engine="%s", workers=2)
fed.fit()
fed.close()
"""


def measure(code: str) -> float:
    """Processor seconds, user and system, of a process and its children."""
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    kinds = {"data": DATA} | {engine: DATA + ROUNDS % (options.rounds, engine) for engine in ("auto", "vmap")}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.repeats):
        for kind, code in kinds.items():
            found[kind].append(measure(code))
    base = statistics.median(found.pop("data"))
    print(f"import torch and make the data: {base:.2f} s of processor time")
    for engine, seconds in found.items():
        print(f"{engine}: {statistics.median(seconds) - base:.2f} s more until {options.rounds} rounds are trained")


if __name__ == "__main__":
    main()
