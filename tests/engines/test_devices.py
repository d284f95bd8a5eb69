"""Devices: what may be named, who trains where, the way of tensors; and all of it on a device that is not the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedstrata as fs
from fedstrata.client.context import ClientContext
from fedstrata.core.parts import Parts
from fedstrata.engines.grouping import ONE_BY_ONE
from fedstrata.engines.processes import Processes
from fedstrata.engines.registry import EngineRequest, build_engine
from fedstrata.system import devices
from fedstrata.system.devices import HOST, devices_by_name, slots_on, to_device
from fedstrata.system.machine import cores
from tests.engines.test_same_bits import CASES
from tests.engines.worlds import check_same, federation, flat, run
from tests.small_runs import LONG, fedstrata, one_sentence, options, same

HERE = Path(__file__).parent
CUDA = torch.device("cuda")
TWO = (torch.device("cuda:0"), torch.device("cuda:1"))

# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "count"), [("cpu", 1), ("cpu:0", 1), ("cpu:0,cpu:1", 2), (" cpu , cpu:7 ", 2), ("cpu,cpu,cpu", 3)]
)
def test_every_cpu_is_the_cpu(names: str, count: int) -> None:
    """torch has one of them, but would copy every batch on its way from `cpu` to `cpu:0`."""
    assert devices_by_name(names) == (HOST,) * count


REFUSED = [
    ("", "device = '' has an empty entry: give a name, or several such as cuda:0,cuda:1"),
    ("cpu,", "device = 'cpu,' has an empty entry"),
    ("cpu,,cpu", "device = 'cpu,,cpu' has an empty entry"),
    ("gpu", "the device 'gpu' is unavailable on this machine"),
    ("cpu,gpu", "the device 'gpu' is unavailable on this machine"),
    ("cpu:x", "the device 'cpu:x' is unavailable on this machine"),
    ("cuda:99", "the device 'cuda:99' is unavailable on this machine"),
    ("hpu", "the device 'hpu' is unavailable on this machine"),
    ("meta", "the device 'meta' holds no numbers: nothing can be trained there"),
    ("cpu,meta:0", "the device 'meta:0' holds no numbers: nothing can be trained there"),
    ("cpu,cuda:0", "the devices cpu,cuda:0 are of different kinds: results would depend on who is trained where"),
]


@pytest.mark.parametrize(("names", "says"), REFUSED, ids=[repr(names) for names, _ in REFUSED])
def test_devices_that_cannot_be_used(names: str, says: str) -> None:
    with pytest.raises(fs.UsageError) as error:
        federation(device=names, engine="processes", workers=2)
    assert str(error.value).startswith(says)


def test_a_second_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is tried; the others are counted, since opening one takes some of its memory."""
    monkeypatch.setattr(devices, "device_by_name", torch.device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert devices_by_name("cuda:1, cuda:0, cuda") == (TWO[1], TWO[0], CUDA)
    with pytest.raises(fs.UsageError, match="the device 'cuda:2' is unavailable on this machine"):
        devices_by_name("cuda:0,cuda:2")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "cpu,,cpu"], "has an empty entry"),
        (["--device", "meta"], "the device 'meta' holds no numbers"),
        (["--device", "cpu,cuda:0"], "are of different kinds"),
        (["--device", "cpu:0,cpu:1", "--engine", "serial"], "the engine 'serial' trains on one device"),
        (["--device", "cpu:0,cpu:1", "--workers", "1"], "workers = 1 cannot use 2 devices: give 2 or more, or auto"),
    ],
)
def test_the_command_refuses(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedstrata("run", *options(), *arguments, "--out", tmp_path / "run") == 2
    assert says in one_sentence(capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("serial", "the engine 'serial' trains on one device: device must name one, not 2"),
        ("wire", "the engine 'wire' trains on one device: device must name one, not 2"),
        ("ray", "the engine 'ray' trains where its cluster says: device must name one, not 2"),
        ("auto", "workers = 1 cannot use 2 devices: give 2 or more, or auto"),
        ("processes", "workers = 1 cannot use 2 devices: give 2 or more, or auto"),
        ("vmap", "workers = 1 cannot use 2 devices: give 2 or more, or auto"),
    ],
)
def test_more_devices_than_an_engine_can_use(engine: str, says: str) -> None:
    with pytest.raises(fs.UsageError) as error:
        federation(device="cpu:0,cpu:1", engine=engine)
    assert str(error.value) == says


# Who trains where ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["batch norm, local", "dropout", "states and memories"])
def test_two_devices_give_the_bits_of_one(case: str) -> None:
    found = run(**CASES[case](), engine="processes", workers=3, device="cpu:0,cpu:1")
    check_same(found, run(**CASES[case](), engine="serial"))


def test_two_devices_give_the_bits_of_one_to_vectorised_clients() -> None:
    settings = {"clients": flat(*range(3, 23)), "participation": 1.0, "engine": "vmap"}
    check_same(run(**settings, workers=2, device="cpu:0,cpu:1"), run(**settings, device="cpu:3"))


def test_the_command_with_two_devices(tmp_path: Path) -> None:
    for name, device in {"one": "cpu", "two": "cpu:0,cpu:1"}.items():
        where = ["--device", device, "--out", tmp_path / name, "--quiet"]
        assert fedstrata("run", *options(rounds=2, workers="auto"), *where) == 0
    assert same(tmp_path / "one", tmp_path / "two")


def test_workers_are_dealt_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs and five workers, which train on the CPU here, for there are none."""
    seen: list[torch.device] = []
    there = ClientContext.for_worker

    def for_worker(context: ClientContext, device: torch.device) -> ClientContext:
        seen.append(device)
        return there(context, HOST)

    monkeypatch.setattr(ClientContext, "for_worker", for_worker)
    fed = federation(engine="processes", workers=5)
    fed._engine._devices = TWO  # type: ignore[attr-defined]
    fed.fit()
    assert seen == [*TWO, *TWO, TWO[0]]
    check_same(fed, run(engine="serial"))


@pytest.mark.skipif(sys.platform != "linux", reason="workers are spawned anyway")
def test_workers_on_a_gpu_are_spawned() -> None:
    for where, start in {TWO: "spawn", (HOST, HOST): "fork"}.items():
        pool = Processes(federation()._context, [], None, 2, 1, ONE_BY_ONE, where)
        assert pool._multiprocessing.get_start_method() == start


def asked(where: Sequence[torch.device], workers: int | None = None, **settings: Any) -> EngineRequest:
    """A request for an engine on devices that this machine may not have, of a model that is fit for `vmap`."""
    context = replace(federation()._context, device=where[0])
    return EngineRequest(
        context, federation().clients, None, workers, rounds=10**6, per_round=5, settings=settings, devices=where
    )


@pytest.mark.parametrize(
    ("where", "workers", "engine", "count"),
    [
        ((CUDA,), None, "serial", 1),
        ((CUDA,), 3, "processes", 3),
        (TWO, None, "processes", 2),
        (TWO, 6, "processes", 6),
        ((HOST,), None, "vmap", cores()),
        ((HOST,) * 40, None, "vmap", max(cores(), 40)),
    ],
)
def test_what_auto_means(where: tuple[torch.device, ...], workers: int | None, engine: str, count: int) -> None:
    chosen, built = build_engine("auto", asked(where, workers))
    assert (chosen.name, built.workers) == (engine, count)


@pytest.mark.parametrize("name", ["processes", "vmap"])
def test_engines_that_have_workers_take_a_gpu(name: str) -> None:
    assert build_engine(name, asked(TWO, 4))[1].workers == 4


def test_actors_of_ray_need_a_gpu_to_train_on_one() -> None:
    with pytest.raises(fs.UsageError, match="with device = cuda each of Ray's actors wants a GPU: ray_gpus must be"):
        build_engine("ray", asked((CUDA,), 2, ray_address="local", ray_cpus=1.0, ray_gpus=0.0))
    assert devices.assigned(torch.device("cuda:3")) == CUDA  # Ray shows an actor no others than its own


# The way there, and home ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Traveller:
    """What stands for a tensor, and writes down where it is asked to go."""

    device: torch.device
    log: list[str] = field(default_factory=list)

    def pin_memory(self) -> Traveller:
        self.log.append("pinned")
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> Traveller:
        self.log.append(f"{self.device}→{device}{', on its own' if non_blocking else ''}")
        return Traveller(device, self.log)


@pytest.mark.parametrize(
    ("start", "end", "log"),
    [
        ("cpu", "cuda:1", ["pinned", "cpu→cuda:1, on its own"]),
        ("cuda:1", "cuda:1", ["cuda:1→cuda:1"]),
        ("cpu", "cpu", ["cpu→cpu"]),
        ("cpu", "mps", ["cpu→mps"]),
    ],
)
def test_only_cuda_copies_on_its_own(start: str, end: str, log: list[str]) -> None:
    one: Any = Traveller(torch.device(start))
    assert to_device(one, torch.device(end)).device == torch.device(end)
    assert one.log == log


def test_what_comes_home_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            log.append("waited")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    slots: Any = {"a": {"x": Traveller(TWO[1], log)}, "b": {"y": Traveller(TWO[1], log), "z": Traveller(HOST, log)}}
    home = slots_on(HOST, slots)
    assert [t.device for slot in home.values() for t in slot.values()] == [HOST] * 3
    assert log == ["cuda:1→cpu, on its own"] * 2 + ["cpu→cpu", "waited"]


def test_what_is_there_already_stays() -> None:
    slots = {"a": {"x": torch.zeros(2)}}
    assert slots_on(HOST, slots) is slots
    assert to_device(slots["a"]["x"], HOST) is slots["a"]["x"]


def test_parts_are_pinned_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1)
    parts = Parts({"a": torch.zeros(2), "b": torch.ones(2)}, True).pin_memory()
    assert {name: part.tolist() for name, part in parts.tensors.items()} == {"a": [1, 1], "b": [2, 2]}


# A device of our own -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("ninja")), reason="needs a C++ compiler and ninja")
def test_a_device_that_is_not_the_cpu(tmp_path: Path) -> None:
    """A device that refuses tensors of another one, as GPUs do; in a process of its own, for torch keeps it."""
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    paths = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PATH": tools, "PYTHONPATH": paths, "TOY_DEVICE_BUILD": str(tmp_path)}
    script = [sys.executable, "-W", "ignore", str(HERE / "toy_device.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["serial", "processes", "vmap", "vmap"]
