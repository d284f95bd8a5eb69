"""How long the decoder takes for a megabyte of hostile bytes, family by family, against an honest message.

CPU seconds, by the slower of the two decoders (of updates and of assignments); the median of some passes. Each family
is made to be slow in its own way (`tests/hostile.py`); the fuzz test bounds the same figures.

    python benchmarks/decode.py [--part BYTES] [--passes N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hostile import FAMILIES, honest, seconds

HONEST = "honest: many small layers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, default=500_000, help="bytes of the head, and of the index, about")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    made = {HONEST: honest(given.part), **{name: make(given.part) for name, make in FAMILIES.items()}}
    found: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(given.passes):
        for name, data in made.items():
            found[name].append(seconds(data))
    print("| family | bytes | CPU s per MB |\n|---|---:|---:|")
    for name, data in made.items():
        print(f"| {name} | {len(data):,} | {statistics.median(found[name]):.4f} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps({name: statistics.median(times) for name, times in found.items()}) + "\n")


if __name__ == "__main__":
    main()
