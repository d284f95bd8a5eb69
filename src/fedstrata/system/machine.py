"""What this machine has, and how a process that trains should use it."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.core.lazy import torch
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2  # glibc's M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD

_PARENT_DEATH = 1  # Linux's PR_SET_PDEATHSIG
_LOOK = 0.5  # seconds between looks at the parent

CACHE_VARIABLE = "FEDSTRATA_CACHE"
"""The variable that says where what was measured once is kept; otherwise where the user's other caches are."""
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
"""Variables that tell torch, oneDNN and MKL to use fewer instruction sets than there are."""


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_memory() -> bool:
    """Let this process keep the memory that training frees, instead of giving it back and faulting it in every step.

    What is free at the time of the call is given back first. Only glibc has the switches; elsewhere nothing happens.
    Returns True where they were set.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    try:
        library = ctypes.CDLL(None)
        mallopt, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        return False
    trim(0)  # what was freed before, such as a partition's hundred thousand tensors, is not to be kept
    # Any one switch turns off glibc's own, growing thresholds, so the first must hold: old versions allow 32 MB.
    if not (mallopt(_MMAP_THRESHOLD, 1 << 30) or mallopt(_MMAP_THRESHOLD, 32 << 20)):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, 1 << 30)) and bool(mallopt(_TOP_PAD, 16 << 20))


def end_with_parent(parent: int, lasting: bool) -> None:
    """Let this process end at once when its parent does, however the parent ends.

    Args:
        parent: its number.
        lasting: whether the thread that started this process lives as long as the parent: Linux takes the thread's end
            for the parent's.
    """
    if not (lasting and _dies_with_parent()):
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before anybody watched
        os._exit(1)


def _dies_with_parent() -> bool:
    """Ask Linux to kill this process when its parent ends; False elsewhere."""
    if sys.platform != "linux":
        return False
    try:
        return not ctypes.CDLL(None).prctl(_PARENT_DEATH, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):
        return False


def _watch_parent(parent: int) -> None:
    """End this process when it has another parent, also in the middle of a step."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)


@contextmanager
def compute_with(threads: int) -> Iterator[None]:
    """torch with this many threads and without denormal numbers, and as before afterwards."""
    before, flushed = torch.get_num_threads(), _flushes()
    if before != threads:
        torch.set_num_threads(threads)
    if not flushed:
        torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if not flushed:
            torch.set_flush_denormal(False)
        if before != threads:
            torch.set_num_threads(before)


def _flushes() -> bool:
    """True if this thread takes denormal numbers for zero; torch has no other way to ask."""
    return not (_tiny() * 1.0).item()


@cache
def _tiny() -> Tensor:
    """1e-40, which is denormal, by its bits: a thread that flushes would read the number as 0."""
    return torch.tensor(71362, dtype=torch.int32).view(torch.float32)


def processor() -> str:
    """The processor, and the kernels that torch and its libraries choose on it: results depend on both, by rounding.

    Kernels of other instruction sets add numbers in another order. torch says which set its own kernels use; oneDNN and
    MKL take the largest that there is, unless the environment says otherwise.
    """
    return ", ".join([processor_name(), torch.backends.cpu.get_cpu_capability(), *kernel_limits()])


def kernel_limits() -> list[str]:
    """What the environment says of the instruction sets that may be used."""
    return [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]


def processor_name() -> str:
    """The processor as it calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_memory() -> int:
    """The most memory that this process has had so far, in bytes; 0 where that cannot be told."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def installed_memory() -> int:
    """The machine's memory in bytes; 0 where that cannot be told."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def available_memory() -> int:
    """The memory in bytes that could be had now without swapping; 0 where that cannot be told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 0


def cache_directory() -> Path:
    """Where what was measured once is kept for later runs: FEDSTRATA_CACHE, or a folder among the user's other caches.

    Raises:
        UsageError: if there is no such place.
    """
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(caches if os.path.isabs(caches) else os.path.expanduser("~/.cache"))  # as its specification asks
    if not home.is_absolute():
        raise UsageError(f"there is no home directory: say where to keep what is measured, in {CACHE_VARIABLE}")
    return home / "fedstrata"
