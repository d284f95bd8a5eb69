"""Memory that processes share, without names, limits of /dev/shm or anything left behind when one of them dies.

One file in memory, mapped section by section as far as it is needed. Sections lie far apart and are empty until they
are written, so each can grow on its own.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

from fedstrata.tensors import Tensors

SPACING = 1 << 36
"""Room of one section, in bytes; only what is written takes memory."""
ALIGNMENT = 64

Place = tuple[str, torch.dtype, tuple[int, ...], int, int]
"""(name, type, shape, number of elements, offset in the section) of a tensor."""
Layout = tuple[Place, ...]


def place(name: str, tensor: Tensor, offset: int) -> Place:
    """The place of a tensor at an offset."""
    return name, tensor.dtype, tuple(tensor.shape), tensor.numel(), offset


def aligned(size: int) -> int:
    """The next multiple of a cache line."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class SharedMemory:
    """Sections of memory that every process with this object sees."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("fedstrata", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        self._maps: dict[int, mmap.mmap] = {}

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._file)

    def __setstate__(self, handle: Any) -> None:
        self._file = handle.detach()
        self._maps = {}

    def _map(self, section: int, size: int) -> mmap.mmap:
        """A section, mapped at least as far as `size`. Views of a shorter mapping stay good: the memory is the same."""
        mapped = self._maps.get(section)
        if mapped is None or len(mapped) < size:
            length = max(1 << 20, 1 << (size - 1).bit_length())
            begin = section * SPACING
            if os.fstat(self._file).st_size < begin + length:
                os.pwrite(self._file, b"\0", begin + length - 1)  # setting a length could cut off another's section
            mapped = self._maps[section] = mmap.mmap(self._file, length, offset=begin)
        return mapped

    def plan(self, tensors: Mapping[str, Tensor], begin: int) -> tuple[Layout, int]:
        """Where tensors will lie from `begin` on, and where they will end."""
        layout = []
        for name, tensor in tensors.items():
            layout.append(place(name, tensor, begin))
            begin += aligned(tensor.numel() * tensor.element_size())
        return tuple(layout), begin

    def read(self, section: int, layout: Layout) -> Tensors:
        """Tensors that lie in a section, in place."""
        if not layout:
            return {}
        end = max(offset + count * dtype.itemsize for _, dtype, _, count, offset in layout)
        memory = self._map(section, max(end, 1))
        return {name: _view(memory, dtype, shape, count, offset) for name, dtype, shape, count, offset in layout}

    def write(self, section: int, tensors: Mapping[str, Tensor], begin: int = 0) -> tuple[Layout, int]:
        """Copy tensors into a section: (where they lie, where they end)."""
        layout, end = self.plan(tensors, begin)
        if layout:
            self._map(section, max(end, 1))
            torch._foreach_copy_(list(self.read(section, layout).values()), list(tensors.values()))
        return layout, end

    def close(self) -> None:
        """Let go of the file; the memory is freed when no view of it is left."""
        self._maps.clear()
        os.close(self._file)


def _view(memory: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], count: int, offset: int) -> Tensor:
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


class Shelf:
    """Tensors of the server, put into a section once each, and read there by all workers.

    What was not used in a round is taken off the shelf at the next, and its place is given to tensors of the same size:
    a model's tensors have the same sizes in every round.
    """

    def __init__(self, memory: SharedMemory, section: int) -> None:
        self._memory, self._section = memory, section
        self._placed: dict[int, tuple[Tensor, int]] = {}
        self._used: set[int] = set()
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def sweep(self) -> None:
        """Take off what nobody asked for since the last sweep."""
        for key in self._placed.keys() - self._used:
            tensor, offset = self._placed.pop(key)
            self._free.setdefault(aligned(tensor.numel() * tensor.element_size()), []).append(offset)
        self._used.clear()

    def put(self, tensors: Mapping[str, Tensor]) -> Layout:
        """Where the tensors lie, copied there if they are new. They must not be changed in place afterwards."""
        new = [t for t in tensors.values() if id(t) not in self._placed]
        for tensor in new:
            size = aligned(tensor.numel() * tensor.element_size())
            free = self._free.get(size)
            offset = free.pop() if free else self._end
            self._end = max(self._end, offset + size)
            self._placed[id(tensor)] = (tensor, offset)
        self._used.update(map(id, tensors.values()))
        if new:
            fresh = tuple(place(str(i), t, self._placed[id(t)][1]) for i, t in enumerate(new))
            torch._foreach_copy_(list(self._memory.read(self._section, fresh).values()), new)
        return tuple(place(n, t, self._placed[id(t)][1]) for n, t in tensors.items())
