"""Directories of runs that nobody ran, with every file and every probe, and numbers that tests know."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.config.toml import to_toml
from fedstrata.runs.reader import SavedRun

CLASSES = ["aeroplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "lorry"]
STAGES = ["stem", "stage1", "stage2", "stage3", "stage4", "head"]


def strata_names(count: int) -> list[str]:
    return ["stem.conv", *(f"stage{1 + 4 * i // (count - 2)}.{i}.conv" for i in range(count - 2)), "head"]


def config(**changes: Any) -> dict[str, Any]:
    values = {
        "method": "fedavg",
        "rounds": 10,
        "participation": 0.5,
        "epochs": 1,
        "batch_size": 32,
        "lr": 0.1,
        "optimizer": "sgd",
        "buffers": "average",
        "seed": 0,
        "engine": "serial",
        "dataset": "cifar-10",
        "model": "resnet18",
        "partition": "dirichlet(alpha=0.1)",
        "clients": 20,
    }
    return values | changes


def record(at: int, **changes: Any) -> dict[str, Any]:
    """A round: every one sends 1000 bytes up and 500 down, and computes a million operations."""
    row = {
        "round": at,
        "accuracy": None,
        "loss": None,
        "bytes_up": 1000,
        "bytes_down": 500,
        "flops": 1_000_000,
        "seconds": 0.5,
        "clients": [0, 1],
        "active": ["head"],
        "refused": [],
        "train_loss": 1.0,
        "examples": 100,
        "steps": 10,
        "lr": 0.1,
        "memory": 500_000_000,
    }
    return row | changes


def saved(accuracies: Sequence[float | None], probes: Sequence[Mapping[str, Any]] = (), **changes: Any) -> SavedRun:
    """A run in memory with these accuracies, its settings changed so."""
    from fedstrata.runs.records import Record

    facts = changes.pop("facts", {})
    summary = changes.pop("summary", {})
    rows = [Record.read(record(at, accuracy=a, loss=a)) for at, a in enumerate(accuracies, 1)]
    return SavedRun("run", config(**changes), rows, tuple(probes), facts, summary)


def write_run(
    directory: Path,
    *,
    rounds: int = 10,
    strata: int = 21,
    lift: float = 0.0,
    probes: bool = True,
    ended: bool = True,
    notes: Sequence[str] = (),
    class_names: Sequence[str] = CLASSES,
    archs: Sequence[str] = (),
    sampled: int = 10,
    planned: int | None = None,
    judged: bool = False,
    **changes: Any,
) -> Path:
    """Write a whole run, learning as runs do, or as many of its rounds as there are so far."""
    values = config(rounds=planned or max(rounds, 1), **changes)
    chance = random.Random(f"{values['method']}{values['seed']}")
    directory.mkdir(parents=True)
    (directory / "run.toml").write_text(to_toml(values))
    population = values["clients"]
    rows = [_learnt(at, rounds, lift, chance, archs) for at in range(1, rounds + 1)]
    if judged:
        rows = [row | {"client_metrics": _judged(row["accuracy"], population, chance)} for row in rows]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = strata_names(strata)
    (directory / "facts.json").write_text(json.dumps(_facts(names, class_names, chance, population)))
    told = {"fedstrata": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "machine": "Linux x86_64 AVX512"}
    (directory / "versions.json").write_text(json.dumps(told))
    if probes:
        every = range(1, rounds + 1)
        found = [probe(at, rounds, names, lift, chance, sampled, bool(archs), population) for at in every]
        (directory / "probes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    if ended:
        ends = {"method": values["method"], "buffers": values["buffers"], "rounds": rounds, "diverged": None}
        (directory / "summary.json").write_text(json.dumps({**ends, "notes": list(notes)}))
    return directory


def _learnt(at: int, rounds: int, lift: float, chance: random.Random, archs: Sequence[str]) -> dict[str, Any]:
    accuracy = (0.72 + lift) * (1 - math.exp(-4 * at / rounds)) + 0.02 * chance.random()
    return record(
        at,
        accuracy=accuracy,
        loss=2.4 * math.exp(-2 * at / rounds) + 0.5 - lift,
        train_loss=2.2 * math.exp(-3 * at / rounds) + 0.05 * chance.random(),
        bytes_up=44_700_000 + int(1e8 * lift),
        bytes_down=44_700_000,
        flops=int(3.1e12 * (1 + lift)),
        seconds=4 + chance.random(),
        memory=1_400_000_000,
        slots_up={"scaffold": 12_000_000} if lift else {},
        arch_accuracy={arch: accuracy - 0.06 * place for place, arch in enumerate(archs)},
    )


def _judged(accuracy: float, population: int, chance: random.Random) -> list[dict[str, float]]:
    """Every client's metrics on its own test examples."""
    return [{"accuracy": min(1.0, accuracy * (0.6 + 0.8 * chance.random())), "loss": 1.0} for _ in range(population)]


def _facts(names: Sequence[str], class_names: Sequence[str], chance: random.Random, population: int) -> dict[str, Any]:
    counts = [[int(400 * chance.betavariate(0.15, 1.2)) for _ in class_names] for _ in range(population)]
    strata = [
        {"name": n, "stage": n.split(".")[0], "parameters": 1000 + 500 * at, "normalised": n != "head"}
        for at, n in enumerate(names)
    ]
    return {
        "input_shape": [3, 32, 32],
        "classes": len(class_names),
        "class_names": list(class_names),
        "clients": population,
        "examples": [sum(row) for row in counts],
        "counts": counts,
        "skew": 0.61,
        "model": {"parameters": 11_173_962, "strata": strata, "fields": []},
        "buffers": True,
    }


def probe(
    at: int,
    rounds: int,
    names: Sequence[str],
    lift: float,
    chance: random.Random,
    sampled: int,
    crossed: bool,
    population: int = 20,
) -> dict[str, Any]:
    """A probed round with everything in it."""

    def by(keys: Sequence[str], value: Any) -> dict[str, float]:
        return {
            key: float(f"{value(i / max(len(keys) - 1, 1)) * (1 + 0.1 * chance.random()):.6g}")
            for i, key in enumerate(keys)
        }

    age = at / rounds
    stages = [s for s in STAGES if s in {n.split(".")[0] for n in names}]
    clients = sorted(chance.sample(range(population), sampled))
    alone = {n: [round(0.5 + 0.1 * chance.random(), 4) for _ in range(8)] for n in names}
    averaged = {
        n: [round(v * (1 + (3 - 4 * lift) * math.exp(-i)), 4) for i, v in enumerate(row)] for n, row in alone.items()
    }
    found: dict[str, Any] = {
        "round": at,
        "clients": clients,
        "seconds": {"divergence": 0.21, "cka": 0.4, "gradnorm": 0.33},
        "divergence": by(names, lambda d: (0.02 + 0.1 * age * (1 - d) ** 2) * (1 - lift)),
        "aggregation": by(names, lambda d: 0.3 * age * d),
        "proxy": by(names, lambda d: 0.001 + 0.01 * age * (1 - d)),
        "weightdiv": by(names, lambda d: 0.3 + d * age),
        "cosine": by(names, lambda d: 0.6 - 0.4 * age * d),
        "cka": {
            "mean": by(stages, lambda d: 0.97 - 0.5 * d * (1 - lift)),
            "matrix": {
                s: [
                    [1.0 if i == j else round(0.9 - 0.5 * k / 6 + 0.1 * chance.random(), 6) for j in clients]
                    for i in clients
                ]
                for k, s in enumerate(stages)
            },
        },
        "gradnorm": {"alone": alone, "averaged": averaged},
        "drift": {"held": by(stages, lambda d: 0.1 + 0.2 * d), "missing": by(stages, lambda d: 0.3 + 0.6 * d)},
        "calibration": {
            "before": [round(0.4 + 0.05 * c, 4) for c in range(10)],
            "after": [round(0.2 + 0.04 * c * chance.random(), 4) for c in range(9)] + [None],
            "held": 0.8,
            "missing": 0.2,
            "forgetting": 0.3 - 0.1 * age - lift,
        },
        "statistics": {"running": 0.5 + 0.2 * age, "batch": 0.55 + 0.2 * age, "spread": by(names, lambda d: 0.2 + d)},
    }
    found["visits"] = visits(names, {client: round(1 + 0.2 * chance.random(), 4) for client in clients})
    if crossed:
        layers = names[2:9]
        found["crossing"] = {
            "theta": by(layers, lambda d: 0.4 * d + age),
            "beta": by(layers, lambda d: 1 + d * age),
            "length": by(layers, lambda d: 1.2 - 0.1 * d),
        }
    if at == rounds:
        points = [(c, k) for c in range(10) for k in clients[:5] for _ in range(8)]
        found["embedding"] = {
            "points": [
                [round(12 * math.cos(c) + chance.gauss(0, 2), 3), round(12 * math.sin(c) + chance.gauss(0, 2), 3)]
                for c, _ in points
            ],
            "labels": [c for c, _ in points],
            "clients": [k for _, k in points],
        }
    return found


THREE = {"fedavg": 0.0, "fedprox(mu=0.01)": 0.04, "fedavg(buffers='drop') + scaffold": 0.1}
"""Methods of the comparison, and how much better each is."""


def write_comparison(directory: Path, *, rounds: int = 10, strata: int = 21, seeds: int = 2, **more: Any) -> Path:
    """Three methods under some seeds, as `fedstrata compare` leaves them."""
    for method, lift in THREE.items():
        for seed in range(seeds):
            name = f"{''.join(c if c.isalnum() else '-' for c in method)}-seed{seed}"
            crossed = ("resnet10", "resnet18") if lift == 0.1 else ()
            write_run(
                directory / name,
                method=method,
                seed=seed,
                lift=lift,
                rounds=rounds,
                strata=strata,
                archs=crossed,
                **more,
            )
    return directory


def visits(names: Sequence[str], norms: Mapping[int, float], cosines: Mapping[int, float] | None = None) -> Any:
    """What the probe `visits` finds of clients whose updates are so long, and point so, in every stratum."""
    ways = [(cosines or {}).get(client, 0.9) for client in norms]
    return {
        "norm": {name: list(norms.values()) for name in names},
        "cosine": dict.fromkeys(names, ways),
        "whole": {"norm": list(norms.values()), "cosine": ways, "nearest": [0.9] * len(norms)},
        "loss": [round(1.0 + 0.01 * client, 2) for client in norms],
        "examples": [100] * len(norms),
        "steps": [10] * len(norms),
        "statistics": [None] * len(norms),
    }
