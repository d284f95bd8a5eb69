"""Quote a study's gains where methods are listed and recommended: writes src/fedstrata/techniques/quotes.json.

    python benchmarks/quote_results.py runs/together/report.json docs/results/together.md

From report.json of `fedstrata reproduce together --scale evidence`: the gain of every method over its base at equal
rounds, with the 90 % interval over the seeds. `fedstrata list methods` and `fedstrata diagnose` quote what is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedstrata.reproduce.verdicts import t_interval
from fedstrata.techniques import method
from fedstrata.techniques.quotes import FILE


def quote(report: Mapping[str, Any], page: str) -> Iterator[dict[str, Any]]:
    """An entry for each method and setting of which at least two seeds were made."""
    for part in report["parts"]:
        for label, gains in part["data"].get("gains", {}).items():
            interval = t_interval(gains.values())
            if interval is not None:
                yield {
                    "techniques": sorted(one.name for one in method(part["data"]["methods"][label]).techniques),
                    "base": part["data"]["base"],
                    "where": part["data"]["where"],
                    "gain": round(statistics.fmean(gains.values()), 4),
                    "interval": [round(end, 4) for end in interval],
                    "seeds": len(gains),
                    "page": page,
                }


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the study's report.json")
    parser.add_argument("page", help="where the figures are explained, such as docs/results/together.md")
    parser.add_argument("--out", type=Path, default=FILE)
    arguments = parser.parse_args()
    entries = list(quote(json.loads(arguments.report.read_text()), arguments.page))
    arguments.out.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n")
    print(f"{len(entries)} figures in {arguments.out.name}")


if __name__ == "__main__":
    main()
