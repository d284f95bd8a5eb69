"""Commands under tests/fence.c, an allocator that lets nothing be touched beyond a tensor, with AVX2's kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

SOURCE = Path(__file__).parent / "fence.c"
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}

needs_fence = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="the fence needs Linux and a C compiler"
)


@cache
def library() -> Path:
    built = Path(mkdtemp()) / "fence.so"
    subprocess.run(["cc", "-O2", "-Wall", "-shared", "-fPIC", "-o", built, SOURCE, "-ldl"], check=True)
    return built


def fenced(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python arguments…`, where every access beyond a tensor kills the process."""
    env = {**os.environ, **AVX2, "LD_PRELOAD": str(library()), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=900)
