"""The benchmark that kills runs at random, for a few runs: every one ends with the bits of one that was left alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedstrata as fs
from tests.small_runs import LONG

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kills.py"
SEED = 1034
"""The dice send the second run's first signal early on its way to the first round, and most others after one."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it looks for workers in /proc")
def test_a_few_kills() -> None:
    """Most of them in the middle of a run, or they would show little; and some before its first round."""
    environment = {**os.environ, "PYTHONPATH": str(Path(fs.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--trials", "2", "--seed", str(SEED)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 results are the same, after " in done.stdout
    moments = re.search(r"(\d+) kills came after a round since .*, (\d+) before it", done.stdout)
    assert moments is not None, done.stdout
    middle, early = map(int, moments.groups())
    assert middle >= early > 0, done.stdout
