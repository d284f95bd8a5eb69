"""The benchmark that kills runs at random, for a few runs: every one ends with the bits of one that was left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedstrata as fs
from tests.runs import LONG

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "kills.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it looks for workers in /proc")
def test_a_few_kills() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(fs.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--trials", "3", "--seed", "1000"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 results are the same, after " in done.stdout
