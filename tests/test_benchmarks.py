"""What benchmarks promise: counted work per visit stays as recorded, and both doors of data give the same numbers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def load(path: str) -> ModuleType:
    """A benchmark as a module: they are scripts, and no package."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{Path(path).stem}", BENCHMARKS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_work_per_visit_is_what_was_recorded() -> None:
    """Bytecodes and operators: a cost per visit that creeps in is seen on any machine, however busy."""
    command = [sys.executable, str(BENCHMARKS / "instructions.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_count_that_deviates_is_told() -> None:
    deviations = load("instructions.py").deviations
    recorded = {"serial": {"bytecodes": 1000.0, "operators": 10.0}}
    assert deviations({"serial": {"bytecodes": 1049.0, "operators": 9.6}}, recorded) == []
    (told,) = deviations({"serial": {"bytecodes": 1060.0, "operators": 10.0}}, recorded)
    assert told == "serial: 1,060.0 bytecodes per visit, +6.0% from the recorded 1,000.0"
    assert len(deviations({"serial": {"bytecodes": 900.0, "operators": 11.0}}, recorded)) == 2


def test_both_doors_give_the_same_batches() -> None:
    work = load("peers/work.py")
    index = torch.tensor([3, 0, 31])
    for name in ("device", "mlp-25m"):
        plain, examples = (work.client_data(work.workload(name, door))[9] for door in ("plain", "examples"))
        assert isinstance(plain, tuple)
        for one, other in zip(work.batch(plain, index), work.batch(examples, index), strict=True):
            assert torch.equal(one, other)
