"""What a training step is made of: microseconds of each kernel of our step, and what its arithmetic and bytes allow.

    python benchmarks/step_profile.py [--workloads small-cnn resnet8-64] [--steps 100]

One process, one thread, the step of `AutogradSteps` where nobody looks, on the workloads of benchmarks/peers/work.py.
Every kernel is timed in its place by a dispatch mode, and a figure is the fastest of all steps, so that other work of
the machine counts little. The bound of a product or a convolution is its FLOPs over the speed of a product of two
square matrices, that of anything else its bytes, read and written once, over the speed of a copy of a megabyte.
`between kernels` is the least processor time of a step without the mode, less its kernels; what other work
takes from the caches is in it. Then the floor, the step with torch's tape and ours take turns, and their processor
times are compared.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fedstrata.client.context import ClientContext, ModelReplica
from fedstrata.client.hooks import HookSet
from fedstrata.client.step import AutogradSteps
from fedstrata.core.types import Work
from fedstrata.models.in_place import work_in_place
from fedstrata.system.machine import keep_memory
from fedstrata.techniques.fedavg import chain

sys.path.append(str(Path(__file__).parent / "peers"))
from work import LR, WORKLOADS, Workload, batch, client_data, order

Step = Callable[[int], None]
VIEWS = {"view", "t", "detach", "expand", "alias", "_unsafe_view", "permute", "transpose", "slice", "as_strided"}


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times every operation of a step in its place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place, self.found = 0, {}  # type: ignore[var-annotated]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter_ns()
        out = func(*args, **(kwargs or {}))
        spent = (time.perf_counter_ns() - start) / 1e3
        packet = func._overloadpacket
        if packet.__name__ not in VIEWS:
            self.place += 1
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
            whole = max(tensors, key=Tensor.numel, default=torch.empty(0))
            name = f"{packet.__name__} {'×'.join(map(str, whole.shape))}"
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out) if packet in flop_registry else 0
            each = {t.data_ptr(): t.numel() * t.element_size() for t in tensors}
            key = (self.place, name)
            self.found.setdefault(key, (flops, sum(each.values()), []))[2].append(spent)
        return out


def steps_of(work: Workload, tape: bool) -> tuple[Step, ModelReplica]:
    """Our step on the workload's batches, with torch's tape or without."""
    model, data = work.build(), client_data(work)
    context = ClientContext(
        build=lambda arch: copy.deepcopy(model),
        method=chain(),
        sample=batch(data[0], torch.arange(2))[0],
        channels_last=True,
    )
    replica = context.replica("")
    steps = AutogradSteps(
        replica, context.method.buffers, HookSet({}), Work(batch_size=work.batch, lr=LR), replica.model
    )
    steps.layers = None if tape else replica.known_layers
    parts = [(client, index) for client in range(5) for index in order(work, 0, client).split(work.batch)]

    def take(number: int) -> None:
        client, index = parts[number % len(parts)]
        x, y = (t.index_select(0, index) for t in data[client])  # type: ignore[union-attr]
        with work_in_place(replica.in_place):
            steps.step(replica.inputs(x), y)

    return take, replica


def floor_of(work: Workload) -> Step:
    """The step as everybody writes it."""
    model, data = work.build(), client_data(work)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    parts = [(client, index) for client in range(5) for index in order(work, 0, client).split(work.batch)]

    def take(number: int) -> None:
        client, index = parts[number % len(parts)]
        x, y = batch(data[client], index)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return take


def machine() -> tuple[float, float]:
    """(FLOPs, bytes) per microsecond of this machine, in one thread."""
    a, some = torch.randn(384, 384), torch.randn(1 << 18)
    into = torch.empty_like(some)
    return 2 * 384**3 / fastest(lambda: a @ a), 2 * 4 * len(some) / fastest(lambda: into.copy_(some))


def fastest(compute: Callable[[], object], repeats: int = 500) -> float:
    """Microseconds."""
    spent = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        compute()
        spent.append((time.perf_counter_ns() - start) / 1e3)
    return min(spent)


def table(work: Workload, count: int, speed: tuple[float, float]) -> str:
    """Markdown: a row per kind of kernel and size, the longest first."""
    take, _ = steps_of(work, tape=False)
    kernels = Kernels()
    whole = []
    for number in range(0, count * work_steps(work), work_steps(work)):  # the first step of each visit: one size
        start = time.process_time_ns()  # a whole step is seldom left alone
        take(number)
        whole.append((time.process_time_ns() - start) / 1e3)
        kernels.place = 0
        with kernels:
            take(number)
    rows: dict[str, list[float]] = {}
    for (_, name), (flops, size, spent) in kernels.found.items():
        row = rows.setdefault(name, [0.0, 0.0, 0.0])
        row[0] += 1
        row[1] += min(spent)
        row[2] += flops / speed[0] if flops else size / speed[1]
    lines = ["| kernel, largest operand | times | µs | bound, µs |", "|---|--:|--:|--:|"]
    shown = [(name, row) for name, row in sorted(rows.items(), key=lambda item: -item[1][1]) if row[1] >= 10]
    rest = [sum(row[at] for name, row in rows.items() if row[1] < 10) for at in range(3)]
    for name, (times, spent, bound) in [*shown, ("others, below 10 µs each", rest)]:
        lines.append(f"| `{name}` | {times:.0f} | {spent:.0f} | {bound:.0f} |")
    inside, bound = (sum(row[at] for row in rows.values()) for at in (1, 2))
    between = min(whole) - inside
    return "\n".join(
        [*lines, f"| between kernels | | {between:.0f} | |", f"| **all** | | {min(whole):.0f} | {bound:.0f} |"]
    )


def work_steps(work: Workload) -> int:
    """Steps of a visit."""
    return -(-work.examples // work.batch)


def compare(work: Workload, repeats: int) -> str:
    """Processor time of a step over the floor's, medians of interleaved ratios."""
    subjects = {
        "floor": floor_of(work),
        "with torch's tape": steps_of(work, tape=True)[0],
        "as it is": steps_of(work, tape=False)[0],
    }
    spent: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(repeats):
        for name, take in subjects.items():
            start = time.process_time()
            for number in range(2 * work_steps(work)):
                take(number)
            spent[name].append((time.process_time() - start) / (2 * work_steps(work)))
    lines = ["| step | × floor | ms of processor time |", "|---|--:|--:|"]
    for name, found in spent.items():
        ratio = statistics.median(a / b for a, b in zip(found[1:], spent["floor"][1:], strict=True))
        lines.append(f"| {name} | {ratio:.2f} | {1e3 * statistics.median(found[1:]):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["small-cnn", "resnet8-64"], choices=sorted(WORKLOADS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    keep_memory()
    speed = machine()
    print(f"Products: {speed[0] / 1e3:.0f} GFLOP/s, copies: {speed[1] / 1e3:.0f} GB/s read and written.\n")
    for name in options.workloads:
        work = WORKLOADS[name]
        print(
            f"## {work.name}: {work.title}\n\n{table(work, options.steps, speed)}\n\n{compare(work, options.repeats)}\n"
        )


if __name__ == "__main__":
    main()
