"""Time, not rounds: who reaches an accuracy first, in simulated time, on three fleets of devices.

Every row gets the best of the same learning rates, by its last accuracy with seed 9 on the first fleet, which is not
reported; then several seeds on every fleet. Times are compared with the first row's by the interval of their paired
logarithms. Time to the target is that of the fleet's devices: bytes and operations as
they are counted, at the rates of each device. The model is small, so a run takes minutes of simulated time, and the
days on which phones come and go are as short. Runs that are there are not run again.

    python benchmarks/simulated.py [--data-dir DIR] [--out runs/simulated]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from studies import Job, Study, Summary, best_rates, interval, run_all, spread_text

from fedstrata.core.text import bytes_text, simulated_text
from fedstrata.system.machine import processor

FLEETS = {
    "alike": "device*20(up='200kB/s', down='1MB/s', flops='1G/s')",
    "phones and servers": (
        "phone*12(up='100kB/s', down='500kB/s', flops='300M/s', available='daily(p=0.5, hours=0.05)'); "
        "gateway*6(up='500kB/s', down='2MB/s', flops='2G/s'); server*2(up='10MB/s', down='10MB/s', flops='50G/s')"
    ),
    "slow uplinks": (
        "sensor*16(up='10kB/s', down='100kB/s', flops='2G/s'); gateway*4(up='1MB/s', down='2MB/s', flops='4G/s')"
    ),
}
DEEP, SHALLOW = "resnet14(width=8, norm='group')", "resnet10(width=8, norm='group')"
CYCLE = "full_rounds=4, rounds_per_stratum=1"
ONE = f"--model|{DEEP}|--participation|10"
ROWS = {
    "fedavg": f"{ONE}|--method|fedavg|--rounds|40",
    "fedpart": f"{ONE}|--method|fedpart({CYCLE})|--rounds|60",
    "select": f"{ONE}|--method|select(score='divergence', {CYCLE})|--rounds|60",
    "heteroavg + inco, shallow first 12": (
        f"--archs|{SHALLOW}*0.6; {DEEP}*0.4|--participation|10|--method|heteroavg + inco|--rounds|40"
    ),
    "fedbuff": f"{ONE}|--method|fedbuff(buffer=5)|--rounds|80",
}
"""Rounds so that all compute about as much: a round of FedBuff ends with five updates."""


def build_studies(target: float) -> dict[str, Study]:
    """A study per fleet."""
    options = (
        "--dataset|fashion-mnist(resolution=14, examples=2000, test_examples=1000)|--partition|dirichlet(alpha=0.3)"
        f"|--clients|20|--epochs|1|--target|{target}"
    )
    return {
        name: Study(name.replace(" ", "-"), f"{options}|--fleet|{fleet}", (0.05, 0.1, 0.2), ROWS)
        for name, fleet in FLEETS.items()
    }


def times_to_target(summaries: Sequence[Summary]) -> list[float | None]:
    """Simulated seconds, seed by seed; None where the target was not reached."""
    return [s.get("simulated_seconds_to_target") for s in summaries]


def ratio_text(times: Sequence[float | None], first: Sequence[float | None]) -> str:
    """Over the first row's times: the geometric mean of the seeds in which both got there, with its interval."""
    pairs = [math.log(a / b) for a, b in zip(times, first, strict=True) if a and b]
    if len(pairs) < 2:
        return ""
    mean, low, high = map(math.exp, interval(pairs))
    return f"; × {mean:.2f} [{low:.2f}, {high:.2f}]"


def to_target(times: Sequence[float | None]) -> str:
    """The median simulated time to the target, and in how many seeds it was reached."""
    reached = [time for time in times if time is not None]
    if len(reached) <= len(times) / 2:
        return f"in {len(reached)} of {len(times)} seeds"
    ordered = sorted(reached) + [float("inf")] * (len(times) - len(reached))
    return simulated_text(statistics.median(ordered)) + (
        f" ({len(reached)} of {len(times)})" if len(reached) < len(times) else ""
    )


def table(studies: dict[str, Study], seeds: Sequence[int], out: Path) -> str:
    """A row per method, a column per fleet."""
    rates = best_rates(next(iter(studies.values())), out)
    jobs = [Job(study, row, rates[row], seed) for study in studies.values() for row in ROWS for seed in seeds]
    found = run_all(jobs, out)
    lines = [
        f"| method | lr | last accuracy (%), {next(iter(studies))} | up | {' | '.join(studies)} |",
        "|---|--:|--:|--:|" + "--:|" * len(studies),
    ]
    base: dict[str, list[float | None]] = {}
    for row in ROWS:
        by_fleet = {
            name: [found[Job(study, row, rates[row], seed)] for seed in seeds] for name, study in studies.items()
        }
        times = {name: times_to_target(summaries) for name, summaries in by_fleet.items()}
        base = base or times
        first = next(iter(by_fleet.values()))
        up = bytes_text(statistics.fmean(s["costs"]["bytes_up"] for s in first))
        last = spread_text("accuracy", [None if s["diverged"] else s["score"] for s in first])
        told = [to_target(own) + ("" if times is base else ratio_text(own, base[at])) for at, own in times.items()]
        cells = [f"`{row}`", f"{rates[row]:g}", last, up, *told]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/simulated"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--target", type=float, default=0.65)
    given = parser.parse_args()
    if given.data_dir is not None:
        os.environ["FEDSTRATA_DATA"] = str(given.data_dir)
    print(f"{processor()}\n\n{table(build_studies(given.target), given.seeds, given.out)}", flush=True)


if __name__ == "__main__":
    main()
