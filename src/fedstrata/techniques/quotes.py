"""What our studies have measured of the methods, from one file, for whoever lists or recommends them.

`benchmarks/quote_results.py` writes the file from a study's report.json. Without it nothing is quoted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("quotes.json")


def quote_gains(techniques: Iterable[str], file: Path | None = None) -> str:
    """What a method gains over its study's base, setting by setting; empty where nothing was measured of it.

    Args:
        techniques: the names of all of its techniques, in any order.
        file: instead of the package's own.
    """
    wanted = sorted(techniques)
    return "; ".join(_gain_text(entry) for entry in _entries(file or FILE) if entry["techniques"] == wanted)


def _entries(file: Path) -> list[dict[str, Any]]:
    try:
        entries: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return entries


def _gain_text(entry: dict[str, Any]) -> str:
    low, high = (f"{100 * end:+.1f}" for end in entry["interval"])
    return (
        f"{100 * entry['gain']:+.1f} points over {entry['base']}, 90 % interval {low} to {high}, on {entry['where']} "
        f"({entry['seeds']} seeds, {entry['page']})"
    )
