"""Seconds of a serial FedAvg round against the bare SGD steps that it contains.

    python benchmarks/overhead.py [--repeats 15] [--json]

Three loops do the same steps on the same batches, one after the other in every repeat (the machine's mood then hits all
alike), and the figure is the median over repeats of the ratio to the first:

    bare      the SGD steps alone with torch.optim.SGD: no parameters loaded, no average, nothing counted
    by hand   FedAvg as one would write it in forty lines: load_state_dict, the steps, the weighted average
    fedstrata Federation's round: the same, with byte and FLOP counts, validation and the record; no evaluation
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.core.rng import derive, generator

Clients = list[fs.TensorExamples]
LR = 0.05


def make_clients(shape: tuple[int, ...], clients: int, examples: int) -> Clients:
    """uint8 images, as real data is held."""
    rng = generator("overhead")
    x = torch.randint(0, 256, (clients * examples, *shape), dtype=torch.uint8, generator=rng)
    y = torch.randint(0, 10, (clients * examples,), generator=rng)
    whole = fs.TensorExamples(x, y, mean=(0.5,) * shape[0], std=(0.25,) * shape[0])
    return [whole.select(torch.arange(c * examples, (c + 1) * examples)) for c in range(clients)]


def steps(model: nn.Module, data: fs.TensorExamples, batch: int, epochs: int, rng: torch.Generator) -> None:
    """The bare steps of one client."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(epochs):
        for index in torch.randperm(len(data), generator=rng).split(batch):
            x, y = data.batch(index)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def bare(model: nn.Module, clients: Clients, batch: int, epochs: int) -> Callable[[int], None]:
    model = copy.deepcopy(model).train()

    def round_(number: int) -> None:
        for client, data in enumerate(clients):
            steps(model, data, batch, epochs, generator(derive(0, "visit", number, client), "order"))

    return round_


def by_hand(model: nn.Module, clients: Clients, batch: int, epochs: int) -> Callable[[int], None]:
    model = copy.deepcopy(model).train()
    state = {n: v.clone() for n, v in model.state_dict().items()}

    def round_(number: int) -> None:
        sums = {n: torch.zeros_like(v, dtype=torch.float32) for n, v in state.items()}
        total = 0
        for client, data in enumerate(clients):
            model.load_state_dict(state)
            steps(model, data, batch, epochs, generator(derive(0, "visit", number, client), "order"))
            for n, v in model.state_dict().items():
                sums[n] += v * len(data)
            total += len(data)
        for n, v in state.items():
            v.copy_((sums[n] / total).to(v.dtype))

    return round_


def ours(model: nn.Module, clients: Clients, batch: int, epochs: int, rounds: int) -> Callable[[int], None]:
    settings = {"batch_size": batch, "epochs": epochs, "lr": LR, "engine": "serial", "channels_last": False}
    federation = fs.Federation(model, clients, rounds=rounds, eval_every=10**9, **settings)
    records = federation.rounds()
    return lambda number: next(records, None)  # type: ignore[return-value]


WORKLOADS = {
    # name: (model, shape, clients, examples per client, batch, epochs, largest ratio that we accept)
    "resnet8(width=16), 10 clients × 200": ("resnet8(width=16)", (3, 32, 32), 10, 200, 32, 1, 1.05),
    "resnet8(width=16), 10 clients × 64": ("resnet8(width=16)", (3, 32, 32), 10, 64, 32, 1, None),
    "mlp 784-64-10, 50 clients × 32, batch 8": ("mlp(hidden=(64,))", (1, 28, 28), 50, 32, 8, 1, 1.3),
    "mlp 784-64-10, 50 clients × 32, batch 32, 5 epochs": ("mlp(hidden=(64,))", (1, 28, 28), 50, 32, 32, 5, 1.3),
    "mlp 784-64-10, 50 clients × 32, one step": ("mlp(hidden=(64,))", (1, 28, 28), 50, 32, 32, 1, 1.3),
}


def measure(name: str, repeats: int) -> dict[str, object]:
    """Medians of one workload."""
    spec, shape, count, examples, batch, epochs, goal = WORKLOADS[name]
    model = fs.build_model(spec, shape, 10, seed=0)
    clients = make_clients(shape, count, examples)
    loops = {
        "bare": bare(model, clients, batch, epochs),
        "by hand": by_hand(model, clients, batch, epochs),
        "fedstrata": ours(model, clients, batch, epochs, repeats + 2),
    }
    seconds: dict[str, list[float]] = {loop: [] for loop in loops}
    for repeat in range(repeats + 1):
        for loop, run in loops.items():
            begin = time.perf_counter()
            run(repeat)
            if repeat:  # the first is the warm-up, in which fedstrata also counts FLOPs
                seconds[loop].append(time.perf_counter() - begin)
    ratio = {
        loop: statistics.median(a / b for a, b in zip(seconds[loop], seconds["bare"], strict=True)) for loop in loops
    }
    return {
        "workload": name,
        "bare_ms": 1000 * statistics.median(seconds["bare"]),
        "by_hand": ratio["by hand"],
        "fedstrata": ratio["fedstrata"],
        "goal": goal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, options.repeats) for name in WORKLOADS]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print("| workload | bare steps, ms | by hand | fedstrata | goal |\n|---|--:|--:|--:|--:|")
    for row in rows:
        goal = f"≤ {row['goal']}" if row["goal"] else "–"
        print(
            f"| {row['workload']} | {row['bare_ms']:.1f} | {row['by_hand']:.2f}× | {row['fedstrata']:.2f}× | {goal} |"
        )


if __name__ == "__main__":
    main()
