"""The golden run: a refactor leaves its bits unchanged.

Bits depend on the processor, so they are compared only where they were recorded on a like one; the numbers themselves
are compared everywhere. After a change that is meant to change results: `python -m tests.test_golden`, and say why in
the commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.system.machine import LIMITS

GOLDEN = Path(__file__).parent / "golden" / "fedavg.json"


def processor() -> str:
    """torch's version and everything about the processor that may choose another kernel."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = sorted({line for line in lines if line.startswith(("model", "flags", "cpu family", "Features"))})
    except OSError:
        facts = [platform.processor()]
    torch_version = torch.__version__.partition("+")[0]
    return hashlib.sha256("\n".join([torch_version, platform.machine(), *facts]).encode()).hexdigest()[:16]


def golden_run() -> dict[str, Any]:
    """Convolutions, batch norm, momentum, a schedule, partial participation and two epochs on real digits."""
    data = fs.load_dataset("digits")
    parts = fs.partition(data.train.labels(), "dirichlet(alpha=0.5)", clients=6, seed=5)
    model = fs.build_model("resnet8(width=4, stem='3x3', maxpool=False)", data.input_shape, data.classes, seed=5)
    federation = fs.Federation(
        model,
        [data.train.select(p) for p in parts],
        data.test,
        rounds=4,
        participation=0.5,
        epochs=2,
        lr=0.05,
        optimizer="sgd(momentum=0.9, weight_decay=0.0005)",
        schedule="cosine",
        seed=5,
        channels_last=False,
    )
    history = federation.fit()
    digest = hashlib.sha256()
    for tensors in (federation.state.params, federation.state.buffers):
        for name, tensor in tensors.items():
            digest.update(name.encode())
            digest.update(tensor.numpy().tobytes())
    return {
        "accuracy": [r.accuracy for r in history.records],
        "train_loss": [r.train_loss for r in history.records],
        "bytes_down": [r.bytes_down for r in history.records],
        "flops": [r.flops for r in history.records],
        "clients": [r.clients for r in history.records],
        "bits": digest.hexdigest(),
    }


def test_golden_run() -> None:
    recorded = json.loads(GOLDEN.read_text())
    now = golden_run()
    for name in ("bytes_down", "flops", "clients"):
        assert now[name] == recorded[name], name
    assert now["train_loss"] == pytest.approx(recorded["train_loss"], rel=1e-2)
    assert now["accuracy"] == pytest.approx(recorded["accuracy"], abs=0.03)
    if processor() == recorded["processor"] and not any(name in os.environ for name in LIMITS):
        assert now["bits"] == recorded["bits"]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({"processor": processor(), **golden_run()}, indent=1) + "\n")
