"""The same bits everywhere: in processes, in Flower's simulation.

test_deployment.py has the deployment, tests/engines/test_ray.py the eight techniques on Ray: each has started what it
takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("ray")

import fedstrata as fs
from tests.flower.worlds import at_home
from tests.small_runs import LONG, metrics, same

SIMULATION = """
from flwr.simulation import run_simulation
from fedstrata.flower import client_app, server_app
from tests.flower.task import CLIENTS, data, model, test
from tests.flower.worlds import CHAIN
import sys

server = server_app(model, test=test, out=sys.argv[1], **CHAIN)
one = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 1, "include_dashboard": False}}
run_simulation(server, client_app(model, data), num_supernodes=CLIENTS, backend_config=one)
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = at_home(tmp_path_factory.mktemp("serial") / "run", engine="serial")
    rows = metrics(run)
    assert len(rows) == 5
    assert len({stratum for row in rows[1:] for stratum in row["active"]}) == len(rows[0]["active"]) == 4
    assert all(len(row["clients"]) == 4 and not row["refused"] for row in rows)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "wire"])
def test_on_one_machine(engine: str, reference: Path, tmp_path: Path) -> None:
    workers = {} if engine == "wire" else {"workers": 2}
    assert same(at_home(tmp_path / "run", engine=engine, **workers), reference)


@pytest.mark.slow
def test_in_flowers_simulation(reference: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(Path(fs.__file__).parents[1]), str(root), os.environ.get("PYTHONPATH", "")])
    alone = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    alone["RAY_ADDRESS"] = "local"  # Flower would join the cluster of another test, and go down with it
    done = subprocess.run(
        [sys.executable, "-c", SIMULATION, str(tmp_path / "run")],
        cwd=tmp_path,
        env={**os.environ, **alone, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr
    assert same(tmp_path / "run", reference)
