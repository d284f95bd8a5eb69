"""How far apart does the same command end on other kernels? The same runs with AVX-512 and with AVX2, seed by seed.

    python benchmarks/processors.py --data-dir DIR [--seeds 4,5,6,7,8]

Run it on a processor with AVX-512. Every row is one command with the same seed and the same torch; the columns are what
its libraries may use: all that there is; AVX2 in torch, oneDNN and MKL; and, for the first seed, all once more (the
same bits?) and AVX2 in one of them alone. A digest of the final model tells whether bits are the same, its accuracy
what the difference comes to.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WORLDS = {
    "ResNet-18 on CIFAR-10 (reproduce deeper, base)": {
        "dataset": "cifar-10(examples=2000, test_examples=2000, resolution=32)",
        "model": "resnet18(width=8, stem='7x7', maxpool=True)",
        "partition": "iid",
        "clients": "8",
        "rounds": "6",
        "epochs": "4",
        "batch-size": "32",
        "lr": "0.02",
        "optimizer": "sgd(momentum=0.9)",
        "augment": "rrc",
    },
    "CNN on digits, Dirichlet(0.1)": {"model": "cnn2(width=16)", "rounds": "30", "epochs": "5"},
}
ATEN, ONEDNN, MKL = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"
KERNELS = {"all": {}, "AVX2": {ATEN: "avx2", ONEDNN: "AVX2", MKL: "AVX2"}}
PARTLY = {
    "all, again": {},
    "AVX2 in torch": {ATEN: "avx2"},
    "AVX2 in oneDNN": {ONEDNN: "AVX2"},
    "AVX2 in MKL": {MKL: "AVX2"},
}


def run(world: dict[str, str], seed: int, limits: dict[str, str], data_dir: str | None) -> tuple[str, float]:
    """(digest of the final model, its accuracy)."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "run"
        words = [word for name, value in world.items() for word in (f"--{name}", value)]
        words += ["--seed", str(seed), "--out", str(out), "--quiet", "--no-report"]
        words += ["--data-dir", data_dir] if data_dir else []
        env = {n: v for n, v in os.environ.items() if n not in (ATEN, ONEDNN, MKL)} | limits
        command = [sys.executable, "-m", "fedstrata", "run", *words]
        subprocess.run(command, env=env, check=True, capture_output=True)
        digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()[:8]
        last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        return digest, 100 * last["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir")
    parser.add_argument("--seeds", default="4,5,6,7,8")
    given = parser.parse_args()
    columns = {**KERNELS, **PARTLY}
    for name, world in WORLDS.items():
        print(f"\n{name}\n\n| seed | {' | '.join(columns)} |\n|--:|{'--:|' * len(columns)}", flush=True)
        found: list[dict[str, tuple[str, float]]] = []
        for seed in map(int, given.seeds.split(",")):
            which = KERNELS if found else columns
            found.append({label: run(world, seed, limits, given.data_dir) for label, limits in which.items()})
            cells = [f"{found[-1][c][1]:.2f} ({found[-1][c][0][:4]})" if c in which else "" for c in columns]
            print(f"| {seed} | {' | '.join(cells)} |", flush=True)
        apart = [row["AVX2"][1] - row["all"][1] for row in found]
        size, largest = statistics.mean(map(abs, apart)), max(map(abs, apart))
        among = statistics.stdev([row["all"][1] for row in found])
        print(f"\nAVX2 − all: mean {statistics.mean(apart):+.2f}, mean size {size:.2f}, largest {largest:.2f} points;")
        print(f"deviation over the seeds {among:.2f} points", flush=True)


if __name__ == "__main__":
    main()
