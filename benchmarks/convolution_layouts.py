"""Which convolutions are memory-safe with the channels last? A sweep over geometries, each in a process that may die.

    python benchmarks/convolution_layouts.py [--threads 1] [--isa AVX2] [--only PART] [--out sweep.jsonl]

Every case runs forward, input gradient and weight gradient, with the channels last or contiguous, and its numbers are
compared with float64. It does so under tests/fence.c, an allocator that ends every block at a page that may not be
touched, so that silent corruption shows, too. `--isa` is oneDNN's limit (ONEDNN_MAX_CPU_ISA).

One line of JSON per case is appended to `--out`. At the end a table of all that is in it is printed, and the exit
code is 1 if a case misbehaved that the rule in fedstrata.models.layouts lets have its channels last, or that is
contiguous.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedstrata.models.layouts import allows_channels_last

FENCE = Path(__file__).parent.parent / "tests" / "fence.c"
PATIENCE = 120
"""Seconds without a result after which a case counts as hanging."""
REPEATS = 3
TOLERANCE = 1e-4
"""Largest relative error of a float32 convolution or gradient here against float64."""
STEPS = ("forward", "input gradient", "weight gradient")


@dataclass(frozen=True)
class Case:
    """One convolution on one input; sizes are those of one spatial axis, or of each."""

    part: str
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: int
    padding: tuple[int, ...]
    groups: int
    inputs: int
    outputs: int
    size: tuple[int, ...]
    transposed: bool = False
    layout: str = "last"
    batch: int = 4


def _square(part: str, kernel: int, stride: int, channels: tuple[int, int], size: int, **more: int) -> Case:
    dilation, groups = more.get("dilation", 1), more.get("groups", 1)
    padding = (dilation * (kernel // 2),) * 2
    return Case(part, (kernel,) * 2, (stride,) * 2, dilation, padding, groups, *channels, (size,) * 2)


def pointwise() -> Iterator[Case]:
    """Kernel 1, the known trouble, densely; with padding and with strides that differ by axis as well."""
    channels = [*range(1, 18), 20, 24, 31, 32, 33, 40, 48, 64]
    for stride, ins, outs, size in itertools.product((1, 2, 3), channels, (1, 2, 4, 8, 16, 24, 32), (8, 31)):
        yield _square("pointwise", 1, stride, (ins, outs), size)
    for ins, outs, size in itertools.product(channels, (4, 8, 16), (7, 32)):
        yield _square("pointwise", 1, 2, (ins, outs), size)
    for stride, ins, outs in itertools.product(((1, 2), (2, 1)), range(1, 18), (4, 16)):
        yield Case("pointwise", (1, 1), stride, 1, (0, 0), 1, ins, outs, (8, 8))
    for ins, outs in itertools.product(range(1, 18), (4, 16)):
        yield Case("pointwise", (1, 1), (2, 2), 1, (1, 1), 1, ins, outs, (8, 8))
        yield Case("pointwise", (1, 1), (2, 2), 1, (0, 0), 1, ins, outs, (1, 1))


def wider() -> Iterator[Case]:
    """Kernels 3, 5 and 7, also dilated and without padding; kernels that are 1 along one axis."""
    forms = itertools.product((3, 5, 7), (1, 2, 3), (1, 2), range(1, 18), (2, 8, 17))
    for kernel, stride, dilation, ins, outs in forms:
        yield _square("wider", kernel, stride, (ins, outs), 8 if dilation == 1 else 15, dilation=dilation)
    for stride, ins, outs in itertools.product((1, 2), range(1, 18), (4, 16)):
        yield _square("wider", 3, stride, (ins, outs), 32)
        yield Case("wider", (3, 3), (stride,) * 2, 1, (0, 0), 1, ins, outs, (8, 8))
        yield Case("wider", (1, 3), (stride,) * 2, 1, (0, 1), 1, ins, outs, (8, 8))
        yield Case("wider", (3, 1), (1, stride), 1, (1, 0), 1, ins, outs, (8, 8))


def grouped() -> Iterator[Case]:
    """Two groups, and depthwise with one and two outputs per input."""
    for kernel, stride, ins in itertools.product((1, 3, 5), (1, 2, 3), range(1, 18)):
        for outs in (ins, 2 * ins):
            yield _square("grouped", kernel, stride, (ins, outs), 8, groups=ins)
        for outs in (4, 16):
            yield _square("grouped", kernel, stride, (2 * ins, outs), 8, groups=2)


def transposed() -> Iterator[Case]:
    """Transposed convolutions."""
    for kernel, stride, ins, outs in itertools.product((1, 2, 3), (1, 2), range(1, 18), (1, 3, 4, 8, 12, 16)):
        yield Case("transposed", (kernel,) * 2, (stride,) * 2, 1, (0, 0), 1, ins, outs, (7, 7), transposed=True)


def other_axes() -> Iterator[Case]:
    """One and three axes: sequences whose channels lie last, and volumes."""
    for kernel, stride, ins, outs in itertools.product((1, 3), (1, 2), range(1, 18), (4, 16)):
        yield Case("other axes", (kernel,), (stride,), 1, (kernel // 2,), 1, ins, outs, (16,))
    for kernel, stride, ins, outs in itertools.product((1, 3), (1, 2), range(1, 18), (4, 8)):
        yield Case("other axes", (kernel,) * 3, (stride,) * 3, 1, (kernel // 2,) * 3, 1, ins, outs, (6,) * 3)


PARTS = {p.__name__.replace("_", " "): p for p in (pointwise, wider, grouped, transposed, other_axes)}


def cases(only: str | None) -> list[Case]:
    """The whole sweep with the channels last, and the strided pointwise ones contiguous, too."""
    chosen = [case for name, part in PARTS.items() if only in (None, name) for case in part()]
    plain = [replace(c, layout="contiguous") for c in chosen if set(c.kernel) == {1} and max(c.stride) > 1]
    return list(dict.fromkeys([*chosen, *plain]))


def errors(case: Case) -> Iterator[tuple[str, float]]:
    """(step, relative error) of each step of a case."""
    name = f"conv{'_transpose' if case.transposed else ''}{len(case.kernel)}d"
    how = {"stride": case.stride, "padding": case.padding, "dilation": case.dilation, "groups": case.groups}
    first, second = (case.inputs, case.outputs) if case.transposed else (case.outputs, case.inputs)
    for _ in range(REPEATS):
        x = torch.randn(case.batch, case.inputs, *case.size)
        w = torch.randn(first, second // case.groups, *case.kernel)
        exact = list(_steps(getattr(F, name), x.double(), w.double(), how))
        found = _steps(getattr(F, name), laid(x, case.layout), laid(w, case.layout), how)
        for step, a, b in zip(STEPS, found, exact, strict=True):
            error = (a.double() - b).abs().max() / (b.abs().max() + 1e-30)
            yield step, error.nan_to_num(1e9).item()


def _steps(convolve: Any, x: Tensor, w: Tensor, how: dict[str, Any]) -> Iterator[Tensor]:
    x, w = x.requires_grad_(), w.requires_grad_()
    y = convolve(x, w, **how)
    yield y.detach()
    # The gradient from above varies over positions, the same way in both precisions.
    up = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    yield torch.autograd.grad(y, x, up, retain_graph=True)[0]
    yield torch.autograd.grad(y, w, up)[0]


def laid(t: Tensor, layout: str) -> Tensor:
    """A copy whose strides say what the layout is, even along axes of length 1."""
    if layout == "contiguous":
        return t.clone()
    last = t.permute(0, *range(2, t.dim()), 1).clone(memory_format=torch.contiguous_format)
    return last.permute(0, t.dim() - 1, *range(1, t.dim() - 1))


# Processes: this one starts one under the fence, which forks one after the other until all cases are done.


def sweep(todo: Sequence[Case]) -> Iterator[tuple[Case, str]]:
    """(case, what is wrong with it): each case in a forked process, which goes on with the next until one kills it."""
    left = list(todo)
    while left:
        done = 0
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            _work(left, write)
        os.close(write)
        with os.fdopen(read, "rb", buffering=0) as lines:
            step = ""
            while ready := select.select([lines], [], [], PATIENCE)[0]:
                line = lines.readline().decode().strip()
                if not line:
                    break
                kind, _, rest = line.partition(" ")
                if kind == "step":
                    step = rest
                else:
                    yield left[done], rest
                    done, step = done + 1, ""
            if not ready:
                os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if done < len(left):
            how = "hangs" if not ready else signal.Signals(os.WTERMSIG(status)).name
            yield left[done], f"{step}: {how}"
            done += 1
        left = left[done:]


def _work(todo: Sequence[Case], write: int) -> None:
    with os.fdopen(write, "w", buffering=1) as told:
        for case in todo:
            wrong = ""
            steps = itertools.cycle(STEPS)
            told.write(f"step {next(steps)}\n")
            for step, error in errors(case):
                told.write(f"step {next(steps)}\n")
                wrong = wrong or (f"{step}: wrong numbers" if not error < TOLERANCE else "")
            told.write(f"done {wrong}\n")
    os._exit(0)


def table(rows: Sequence[dict[str, Any]]) -> tuple[str, int]:
    """(what was swept and what misbehaved; how many misbehave that should not)."""
    counts: dict[tuple[str, ...], Counter[str]] = {}
    loose = 0
    for row in rows:
        case = Case(**{n: tuple(v) if isinstance(v, list) else v for n, v in row["case"].items()})
        allowed = allows_channels_last(case.kernel, case.stride, case.inputs // case.groups, case.transposed)
        uncovered = bool(row["wrong"]) and (allowed or case.layout == "contiguous")
        kept = case.layout == "last" and not allowed
        key = (row["isa"], str(row["threads"]), case.part, case.layout)
        count = {"cases": 1, "bad": bool(row["wrong"]), "kept": kept, "loose": uncovered}
        counts.setdefault(key, Counter()).update(count)
        if uncovered:
            loose += 1
            print(f"not covered by the rule: {row}")
    head = "| kernels up to | threads | part | layout | cases | misbehave | not covered by the rule | kept contiguous |"
    lines = [f"| {' | '.join(k)} | {c['cases']} | {c['bad']} | {c['loose']} | {c['kept']} |" for k, c in counts.items()]
    return "\n".join([head, "|---|--:|---|---|--:|--:|--:|--:|", *lines]), loose


def fenced(threads: int, isa: str) -> dict[str, str]:
    """An environment with the fence, which is compiled for it."""
    library = Path(tempfile.mkdtemp()) / "fence.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, FENCE, "-ldl"], check=True)
    settings = {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": str(threads), "ONEDNN_MAX_CPU_ISA": isa}
    return {**os.environ, **settings} | ({"ATEN_CPU_CAPABILITY": "avx2"} if isa == "AVX2" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(PARTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default="AVX2", help="AVX2, AVX512_CORE, …, or DEFAULT for all that there is")
    parser.add_argument("--out", type=Path, default=Path("sweep.jsonl"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        with given.out.open("a", buffering=1) as file:
            for case, wrong in sweep(cases(given.only)):
                row = {"isa": given.isa, "threads": given.threads, "wrong": wrong, "case": asdict(case)}
                file.write(json.dumps(row) + "\n")
        return
    subprocess.run([sys.executable, *sys.argv, "--child"], env=fenced(given.threads, given.isa), check=True)
    text, loose = table([json.loads(line) for line in given.out.read_text().splitlines()])
    print(text)
    sys.exit(1 if loose else 0)


if __name__ == "__main__":
    main()
