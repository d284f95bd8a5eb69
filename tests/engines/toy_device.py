"""A script that trains on `toy:0` and `toy:1`, devices that are not the CPU but compute as it does.

They are made by toy_device.cpp, which is compiled to the directory that TOY_DEVICE_BUILD names. Workers that are
spawned import this file, and so have the devices too.
"""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

import fedstrata as fs
from fedstrata.techniques.scaffold import Scaffold
from tests.contract.standins import Limit
from tests.engines.worlds import EIGHT, SIZES, check_close, check_same, convnet, flat, noisy, pictures, run

SOURCE = Path(__file__).with_suffix(".cpp")
KERNELS = 0.2
"""By what share the memory of training may differ: a device's kernels hold other things, and the models are tiny."""


def make_devices() -> None:
    """Make torch know the devices; it keeps them as long as the process lives."""
    module: Any = types.ModuleType("torch.toy")
    module.is_available = lambda: True
    module.device_count = lambda: 2
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = torch.default_generator.manual_seed  # kernels are the CPU's, and draw from its generator
    module.get_rng_state = lambda device: torch.zeros(1)
    module.set_rng_state = lambda state, device: None
    rename_privateuse1_backend("toy")
    load_devices(Path(os.environ["TOY_DEVICE_BUILD"]))
    torch._register_device_module("toy", module)


def load_devices(build: Path) -> None:
    """Compile them, unless the process that started this one has."""
    library = build / "toy_device.so"
    if library.exists():
        torch.ops.load_library(library)
        return
    from torch.utils.cpp_extension import load

    load("toy_device", [str(SOURCE)], ["-O0", "-w"], build_directory=str(build), is_python_module=False)


def main() -> None:
    """Federations that have on these devices what they have on the CPU; prints an engine's name when it is done."""
    photos = {"clients": [pictures(size, seed) for seed, size in enumerate(SIZES)], "test": pictures(40, 99)}
    worlds: list[dict[str, Any]] = [
        {**photos, "model": convnet(), "buffers": "local", "eval_clients": True},
        {"method": EIGHT},
        {"model": noisy(), "probe": "all"},
    ]
    for world in worlds:
        check_same(run(**world, engine="serial", device="toy:1"), run(**world, engine="serial"), KERNELS)
    print("serial")
    remembering: dict[str, Any] = {"method": fs.chain(Scaffold(), Limit(limit=0.05)), "rounds": 4}
    found = run(**remembering, engine="processes", workers=2, device="toy:1,toy:0")
    check_same(found, run(**remembering, engine="serial"), KERNELS)
    print("processes")
    unequal: dict[str, Any] = {"clients": flat(*range(3, 23)), "participation": 1.0}
    for world in (unequal, {"method": "scaffold + feddyn(alpha=0.1) + fedlc"}, {"method": "local"}):
        check_close(run(**world, engine="vmap", device="toy:1"), run(**world, engine="vmap"))
    print("vmap")
    alike: dict[str, Any] = {"clients": flat(*[8] * 20), "participation": 1.0, "method": "scaffold"}
    check_close(run(**alike, engine="vmap", workers=2, device="toy:0,toy:1"), run(**alike, engine="vmap"))
    print("vmap")


make_devices()
if __name__ == "__main__":
    main()
