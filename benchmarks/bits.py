"""The bits of small runs of every method and every engine: recorded before a change of the house, compared after it.

    python benchmarks/bits.py record bits.json     before
    python benchmarks/bits.py compare bits.json    after: prints what differs, and fails if anything does

Runs are made through the public door alone, so that whatever is moved or renamed inside can be compared. The bits of
another processor differ: record and compare on the same one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedstrata as fs

METHODS = [
    "fedavg",
    "fedavg(weight='uniform', server_lr=0.5)",
    "fedavg(buffers='local')",
    "fedavg(buffers='drop')",
    "fedavg(reduce='median')",
    "fedavg(reduce='krum(share=0.2)')",
    "fedavg(reduce='trimmed_mean(share=0.25)')",
    "fedavg(reduce='geometric_median')",
    "fedpart(full_rounds=1, rounds_per_stratum=1)",
    "fedpart(full_rounds=0, rounds_per_stratum=1, cache_prefix=True, freeze_norm=True)",
    "fednlr",
    "fedimpro(split='3')",
    "fedimpro(split='3', per='channel', noise=0.1)",
    "fedprox",
    "scaffold",
    "fednova",
    "feddyn",
    "moon",
    "fedrs",
    "fedlc",
    "ccvr",
    "fedspeed",
    "feddf(noise=True, steps=5)",
    "fedavgm",
    "fedadagrad",
    "fedadam",
    "fedyogi",
    "perturb",
    "centralised",
    "local",
    "feddyn + fednlr + fedpart(full_rounds=1, rounds_per_stratum=1)",
    "scaffold + fedlc + fedavgm",
    "moon + fedprox + fednova",
]
HETEROGENEOUS = ["heteroavg", "groupavg", "inco", "inco(form='paper')", "fedprox + inco"]
ENGINES: list[dict[str, Any]] = [
    {"engine": "serial"},
    {"engine": "processes", "workers": 2},
    {"engine": "vmap"},
    {"engine": "wire"},
]
SIZES = (20, 33, 7, 48, 16, 25)


def pictures(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures of four classes."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (size,), generator=rng)
    x = torch.randn(size, 1, 8, 8, generator=rng) + y.view(-1, 1, 1, 1) / 2
    return x, y


def normalised() -> nn.Module:
    """Convolutions with batch norm."""
    layers: list[nn.Module] = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 3, 2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)]
    return nn.Sequential(*layers)


def plain() -> nn.Module:
    """Convolutions without norms, which many clients can share one computation of."""
    layers: list[nn.Module] = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, padding=1)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 4))


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every run, by name."""
    for engine in ENGINES:
        for method in METHODS:
            model = plain if engine["engine"] == "vmap" else normalised
            yield f"{engine['engine']}: {method}", {"model": model, "method": method, **engine}
        if engine["engine"] != "vmap":
            for method in HETEROGENEOUS:
                yield f"{engine['engine']}: {method}", {"model": "archs", "method": method, **engine}
    more: dict[str, dict[str, Any]] = {
        "momentum and clip": {"optimizer": "sgd(momentum=0.9, weight_decay=0.001)", "clip": 1.0, "epochs": 2},
        "adam and steps": {"optimizer": "adam", "lr": 0.01, "steps": 4, "schedule": "cosine"},
        "channels first": {"channels_last": False},
        "clients evaluated": {"eval_clients": True, "buffers": "local"},
        "probes": {"probe": "all", "probe_examples": 16},
    }
    for name, settings in more.items():
        for engine in ENGINES[:2]:
            yield (
                f"{engine['engine']}, {name}",
                {"model": normalised, "method": "scaffold + fedprox", **engine, **settings},
            )


def run(model: Any, **settings: Any) -> fs.Federation:
    """A federation of a few small clients after three rounds."""
    torch.manual_seed(1)
    if model == "archs":
        shape, archs = (1, 8, 8), {}
        for name in ("resnet10(width=4)", "resnet18(width=4)"):
            archs[name] = fs.build_model(name, shape, 4, seed=1)
        model = archs["resnet18(width=4)"]
        settings |= {"archs": archs, "arch_of": lambda client: list(archs)[client % 2]}
    else:
        model = model()
    clients = [pictures(size, seed) for seed, size in enumerate(SIZES)]
    given = {"rounds": 3, "participation": 4, "batch_size": 8, "lr": 0.05, "seed": 3, **settings}
    if given["method"] in ("centralised", "local"):
        given["participation"] = 1.0
    federation = fs.Federation(model, clients, pictures(40, 99), **given)
    federation.fit()
    return federation


def digest_of(federation: fs.Federation) -> str:
    """Of a run's parameters, statistics, states, memories, records and measurements."""
    found = hashlib.sha256()

    def add(name: str, tensor: Tensor) -> None:
        found.update(name.encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())

    state = federation.state
    slots = {"": state.params, "buffers": state.buffers, **state.techniques}
    for client in range(len(federation.clients)):
        slots |= {f"{client} {name}": tensors for name, tensors in federation.memory(client).items()}
    for slot, tensors in slots.items():
        for name, tensor in tensors.items():
            add(f"{slot} {name}", tensor)
    assert federation.out is not None
    for name in ("metrics.jsonl", "probes.jsonl"):
        path = federation.out / name
        for line in path.read_text().splitlines() if path.exists() else []:
            found.update(json.dumps({**json.loads(line), "seconds": 0, "memory": 0}, sort_keys=True).encode())
    return found.hexdigest()[:16]


def bits() -> dict[str, str]:
    """Every run's digest, or why there is none."""
    found = {}
    for name, settings in cases():
        try:
            with tempfile.TemporaryDirectory() as directory:
                with_digest = digest_of(run(**settings, out=Path(directory) / "run"))
        except fs.UsageError as error:
            with_digest = f"refused: {error}"
        found[name] = with_digest
        print(name, with_digest[:60], file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Record, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    found = bits()
    if given.what == "record":
        given.file.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    before = json.loads(given.file.read_text())
    other = [name for name in before.keys() | found.keys() if before.get(name) != found.get(name)]
    for name in sorted(other):
        print(f"{name}: {before.get(name)} before, {found.get(name)} now")
    print(f"{len(found) - len(other)} of {len(found)} runs have the same bits")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
