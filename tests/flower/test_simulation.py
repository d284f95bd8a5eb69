"""Flower's own simulation, in a process of its own: a chain of eight techniques has the bits of serial."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import fedstrata as fs
from tests.engines.worlds import points, staged
from tests.flower.deployment import PATIENCE
from tests.flower.worlds import EIGHT, data
from tests.runs import same

SETTINGS: dict[str, Any] = {"method": EIGHT, "rounds": 8, "participation": 4, "batch_size": 5, "lr": 0.05}

SIMULATION = """
from flwr.simulation import run_simulation
from fedstrata.flower import client_app, server_app
from tests.engines.worlds import points, staged
from tests.flower.test_simulation import SETTINGS
from tests.flower.worlds import data
import sys

server = server_app(staged, test=points(40, 99), out=sys.argv[1], **SETTINGS)
one = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 1}}
run_simulation(server, client_app(staged, data), num_supernodes=8, backend_config=one)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Flower simulates with Ray")
def test_four_of_eight_clients_in_flowers_simulation(tmp_path: Path) -> None:
    clients = [data(client) for client in range(8)]
    reference = tmp_path / "reference"
    fs.Federation(staged(), clients, points(40, 99), engine="serial", out=reference, **SETTINGS).fit()
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(Path(fs.__file__).parents[1]), str(root), os.environ.get("PYTHONPATH", "")])
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SIMULATION, str(tmp_path / "run")],
        cwd=tmp_path,
        env={**os.environ, **quiet, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=170 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert same(tmp_path / "run", reference)
