"""What benchmarks promise: counted work per visit stays as recorded, and both doors of data give the same numbers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.compare import compare, plan
from fedstrata.compare.runner import missing
from fedstrata.diagnosis import Remedy

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


def test_attacks_and_reducers_are_judged_by_seed() -> None:
    """A claim is judged by one figure per seed, against the same reducer without the attack."""
    robustness = load("robustness.py")
    job = robustness.Job("ipm, ε 0.5", "krum(share={f}, per='stratum')", "IID", 9, 1)
    assert job.faults == "ipm(epsilon=0.5, share=0.45)"
    assert job.method == "fedavg(reduce=\"krum(share=0.45, per='stratum')\")"
    assert robustness.Job("nobody", "mean", "IID", 4, 0).faults is None
    paths = [job.path for job in robustness.all_jobs([0, 1])]
    assert len(set(paths)) == len(paths)
    ends = {("nobody", 0): 0.8, ("nobody", 1): 0.82, ("alie", 0): 0.6, ("alie", 1): 0.61}
    runs = [{**vars(robustness.Job(a, "median", "IID", 4, s)), "accuracy": v} for (a, s), v in ends.items()]
    table = robustness.Table(runs)
    assert table.lost("alie", "median", "IID") == pytest.approx({0: 20.0, 1: 21.0})
    verdict, mean = robustness.broken("a paper", "alie", "median", "IID").judge(table)
    assert mean == pytest.approx(20.5)
    assert verdict.holds


def test_an_attack_is_played() -> None:
    robustness = load("robustness.py")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(400, 1, 6, 6, generator=generator), torch.arange(400) % 10
    found = robustness.play(robustness.Job("backdoor", "fltrust", "IID", 4, 0), 1, (x, y, (x, y)))
    assert 0 <= found["accuracy"] <= 1
    assert 0 <= found["success"] <= 1


def test_points_regained_are_capped_by_points_lost() -> None:
    remedies = load("remedies.py")
    case = {"points": {"healthy": [90.0, 92.0, 91.0], "broken": [80.0, 80.0, 80.0], "remedied": [95.0, 96.0, 70.0]}}
    assert remedies.figures(case) == (11.0, 15.0)
    assert remedies.ratio([case, case]) == (22.0, 30.0, 22.0)


def test_remedies_are_carried_out() -> None:
    """Settings as the diagnosis prints them; words by a function of their finding."""
    remedies = load("remedies.py")
    finding, remedy = remedies.Finding, Remedy
    case = remedies.Case("a case", ("broken-labels",), (1,), settings={"lr": 3.0})
    better = remedies.remedied(case, finding("x", 1.0, "", {}, (remedy("feddyn", {"lr": 0.3}, "", ""),)))
    assert better.settings == {"lr": 0.3, "method": "feddyn"}
    assert remedies.healthy(case).settings == {}
    words = finding("broken-labels", 1.0, "", {}, (remedy(None, {}, "look", ""),), clients=(1,))
    x, y = torch.ones(4, 2), torch.ones(4)
    left = remedies.remedied(case, words).spoil([(x, y), (x, y)], torch.Generator())
    assert [len(labels) for _, labels in left] == [4, 0]
    assert remedies.remedied(case, finding("unknown", 1.0, "", {}, (remedy(None, {}, "look", ""),))) is None


def test_packed_runs_count_as_finished_elsewhere(tmp_path: Path) -> None:
    """Two finished runs of three, packed twice to the same bytes; unpacked, the third alone is missing."""
    settings = {"dataset": "digits(examples=60, test_examples=20)", "model": "logreg", "clients": 2, "rounds": 1}
    several = {**settings, "workers": 1, "seed": [0, 1, 2]}
    compare({**several, "seed": [0, 1], "data_dir": str(tmp_path / "data")}, tmp_path / "here")
    (tmp_path / "here" / "unfinished").mkdir()
    (tmp_path / "here" / "unfinished" / "run.toml").write_text("")
    module = load("pack_runs.py")
    counts = [module.pack(tmp_path / "here", tmp_path / name) for name in ("one.tar.xz", "two.tar.xz")]
    assert counts == [8, 8]
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "two.tar.xz").read_bytes()
    with tarfile.open(tmp_path / "one.tar.xz") as packed:
        packed.extractall(tmp_path / "there", filter="data")
    assert not any(str(tmp_path) in path.read_text() for path in (tmp_path / "there").rglob("run.toml"))
    left = missing(plan(several, tmp_path / "there"))
    assert [run.config.seed for run in left] == [2]
    with pytest.raises(SystemExit, match="holds no finished run"):
        module.pack(tmp_path / "here" / "unfinished", tmp_path / "three.tar.xz")


def test_a_study_of_adapters_is_told_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From runs that are there, or were elsewhere: the better rate, the paired interval, own models judged apart."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    adapters = load("adapters.py")
    for row in adapters.ROWS.values():
        fs.method(row.method)
    rows = ("LoRA", "RoLoRA", "FedSA-LoRA")
    tables = adapters.Tables(("sst-2",), (0, 1, 2), tmp_path, "minilm", rows, tmp_path / "runs.json")
    assert tables.plan().startswith("24 runs (6 of them to choose rates)")
    assert "0 of 9 runs" in tables.table("sst-2", 0.1)

    def write(job: Any, accuracy: float, own: float) -> None:
        where = job.directory(tmp_path)
        where.mkdir(parents=True)
        rounds = [(0.1, 0.1), (accuracy - 0.1, own - 0.1), (accuracy, own), (accuracy + 0.1, own + 0.1)]
        lines = [{"accuracy": whole, "fairness": {"mean": mine}} for whole, mine in rounds]
        lines.insert(2, {"accuracy": None, "fairness": None})
        (where / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        costs = {"bytes_up": 4e6, "bytes_down": 5e6, "flops": 3e12, "training_memory": 2e8, "seconds": 60.0}
        method = adapters.ROWS[job.row].method
        (where / "summary.json").write_text(json.dumps({"diverged": None, "method": method, "costs": costs}))

    for job in tables.tuning("sst-2"):
        write(job, 0.6 + 0.1 * job.rate, 0.9 - 0.1 * job.rate)
    rates = tables.best_rates("sst-2")
    assert rates == {"LoRA": 1.0, "RoLoRA": 1.0, "FedSA-LoRA": 0.2}
    gains = {"LoRA": (0.0, 0.0, 0.0), "RoLoRA": (0.02, 0.03, 0.04), "FedSA-LoRA": (0.1, -0.1, 0.06)}
    for job in tables.reported("sst-2", 0.1, rates):
        gain = gains[job.row][job.seed]
        write(job, 0.7 + gain, 0.8 + gain)
    lines = {line.split(" | ")[0].strip("| "): line for line in tables.table("sst-2", 0.1).splitlines()}
    half = 100 * 0.01 * 2.919986 / 3**0.5  # t of two degrees of freedom, two-sided 90 %
    assert f"+3.0 [{3 - half:+.1f}, {3 + half:+.1f}] | above" in lines["RoLoRA"]
    assert "| – | 82.0 ± 10.6 | +2.0 [" in lines["FedSA-LoRA"]
    assert "not decided" in lines["FedSA-LoRA"]
    assert "4.0 MB | 5.0 MB | 3 TFLOP | 200.0 MB | 60 |" in lines["LoRA"]
    elsewhere = replace(tables, out=tmp_path / "elsewhere", folder="another/place")
    assert elsewhere.table("sst-2", 0.1) == tables.table("sst-2", 0.1)  # from what was kept
