"""Where the tensors of jobs are: in segments of memory, of one process or shared by several.

Shared memory has no name, no limit such as that of /dev/shm, and leaves nothing behind when a process dies. It is one
file in memory, mapped segment by segment as far as it is needed. Segments are far apart in the file and empty until
they are written, so each can grow on its own.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.core.tensors import FlatTensors, Tensors, whole_lines
from fedstrata.errors import UsageError

SPACING = 1 << 36
"""Room of one segment, in bytes; only what is written takes memory."""

Block = tuple[torch.dtype, int, tuple[str, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]
"""Tensors of one type, one after the other, each at the beginning of a cache line, as torch's own are: products round
differently elsewhere. (type, offset, names, shapes, numbers of elements with what fills the last line)."""
Layout = tuple[Block, ...]
"""Where tensors are in a segment."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
TensorRef = tuple[int, Layout]
"""(segment, where tensors are in it)."""


def plan_layout(tensors: Mapping[str, Tensor], begin: int) -> tuple[Layout, int]:
    """Where tensors will be from `begin` on, and where they will end."""
    blocks: list[Block] = []
    for dtype, items in groupby(tensors.items(), key=lambda item: item[1].dtype):
        rows = [(name, tuple(t.shape), whole_lines(t.numel(), dtype)) for name, t in items]
        names, shapes, sizes = zip(*rows, strict=True)
        blocks.append((dtype, begin, names, shapes, sizes))
        begin += sum(sizes) * dtype.itemsize
    return tuple(blocks), begin


def end_of(layout: Layout) -> int:
    """Where the last tensor of a layout ends."""
    dtype, offset, _, _, sizes = layout[-1]
    return offset + sum(sizes) * dtype.itemsize


class SegmentedMemory:
    """Segments of memory that tensors are in."""

    def _region(self, segment: int, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        """So many numbers of a segment, in place."""
        raise NotImplementedError

    def _reach(self, segment: int, end: int) -> None:
        """Let a segment be at least as long as `end`, so that all tensors up to there are views of the same memory."""

    def read(self, segment: int, layout: Layout) -> Tensors:
        """Tensors of a segment, in place."""
        tensors: Tensors = {}
        if layout:
            self._reach(segment, end_of(layout))
        for dtype, offset, names, shapes, sizes in layout:
            region = self._region(segment, dtype, offset, sum(sizes))
            parts: Sequence[Tensor] = region.split_with_sizes(sizes)
            for name, shape, size, part in zip(names, shapes, sizes, parts, strict=True):
                count = math.prod(shape)
                tensors[name] = (part if count == size else part[:count]).view(shape)
        return FlatTensors(tensors, region) if len(layout) == 1 else tensors

    def read_rows(self, segment: int, layout: Layout, rows: int) -> tuple[Tensors, Tensor | None]:
        """Tensors of so many rows, of which each is laid out as the first, in place.

        Returns:
            (each tensor with all its rows; all tensors of a row as one, row by row, if they are of one type).
        """
        if not layout:
            return {}, None
        width = end_of(layout) - layout[0][1]
        self._reach(segment, layout[0][1] + rows * width)
        tensors: Tensors = {}
        for dtype, offset, names, shapes, sizes in layout:
            step, count = width // dtype.itemsize, sum(sizes)
            region = self._region(segment, dtype, offset, (rows - 1) * step + count).as_strided(
                (rows, count), (step, 1)
            )
            parts: Sequence[Tensor] = region.split_with_sizes(sizes, 1)
            for name, shape, part in zip(names, shapes, parts, strict=True):
                tensors[name] = part[:, : math.prod(shape)].view(rows, *shape)
        return tensors, region if len(layout) == 1 else None

    @torch.no_grad()
    def write(self, segment: int, tensors: Mapping[str, Tensor], begin: int = 0) -> tuple[Layout, int]:
        """Copy tensors into a segment: (where they are, where they end)."""
        layout, end = plan_layout(tensors, begin)
        for dtype, offset, names, _, sizes in layout:
            region = self._region(segment, dtype, offset, sum(sizes))
            parts = []
            for name, size in zip(names, sizes, strict=True):
                flat = tensors[name].reshape(-1)
                parts.append(flat)
                if len(flat) < size:
                    parts.append(flat.new_zeros(size - len(flat)))
            torch.cat(parts, out=region)
        return layout, end


class SharedMemory(SegmentedMemory):
    """Segments of memory that every process with this object sees."""

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

    def _map(self, segment: int, size: int) -> mmap.mmap:
        """A segment, mapped at least as far as `size`. Views of a shorter mapping stay good: the memory is the same."""
        mapped = self._maps.get(segment)
        if mapped is None or len(mapped) < size:
            length = max(1 << 20, 1 << (size - 1).bit_length())
            begin = segment * SPACING
            if os.fstat(self._file).st_size < begin + length:
                try:
                    os.pwrite(self._file, b"\0", begin + length - 1)  # setting a length could cut off another's segment
                except OSError as error:
                    raise UsageError(
                        f"worker processes cannot share memory here ({error.strerror}): use workers = 1"
                    ) from None
            mapped = self._maps[segment] = mmap.mmap(self._file, length, offset=begin)
        return mapped

    def _region(self, segment: int, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        if not count:
            return torch.empty(0, dtype=dtype)
        memory = self._map(segment, offset + count * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)

    def close(self) -> None:
        """Let go of the file; the memory is freed when no view of it is left."""
        self._maps.clear()
        os.close(self._file)


class OwnMemory(SegmentedMemory):
    """Segments of memory of this process alone, for bytes that go to another one or come from there."""

    def __init__(self) -> None:
        self._segments: dict[int, Tensor] = {}
        self._ends: dict[int, int] = {}

    def _reach(self, segment: int, end: int) -> None:
        self._grow(segment, end)

    def _grow(self, segment: int, end: int) -> Tensor:
        """A segment, at least as long as `end`. What is written to a view of a shorter one from now on is lost."""
        memory = self._segments.get(segment)
        if memory is None or len(memory) < end:
            longer = torch.empty(max(1 << 12, 1 << (end - 1).bit_length()), dtype=torch.uint8)
            if memory is not None:
                longer[: len(memory)] = memory
            memory = self._segments[segment] = longer
        self._ends[segment] = max(end, self._ends.get(segment, 0))
        return memory

    def _region(self, segment: int, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        end = offset + count * dtype.itemsize
        return self._grow(segment, end)[offset:end].view(dtype)

    def fill(self, segment: int, data: Bytes) -> None:
        """Make a segment of a copy of these bytes, which may be in memory that must not be written to."""
        memory = self._segments[segment] = torch.empty(len(data), dtype=torch.uint8)
        memory.numpy()[:] = data
        self._ends[segment] = len(data)

    def bytes(self, segment: int) -> Bytes:
        """The bytes of a segment as far as it was used, in place."""
        found: Bytes = self._region(segment, torch.uint8, 0, self._ends.get(segment, 0)).numpy()
        return found

    def clear(self, segment: int) -> None:
        """Use a segment from its beginning again."""
        self._ends.pop(segment, None)

    def drop(self, segment: int) -> None:
        """Forget a segment; its memory is freed when no view of it is left."""
        self._segments.pop(segment, None)
        self.clear(segment)


Key = tuple[tuple[str, int], ...]
"""(name, id of the tensor) of each."""


class TensorStore:
    """Tensors of the server, written to a segment once, and read there by all workers.

    What was not used in a round is removed at the next, and its place is given to tensors of the same size: what the
    server sends has the same sizes in every round.
    """

    def __init__(self, memory: SegmentedMemory, segment: int) -> None:
        self._memory, self._segment = memory, segment
        self._stored: dict[Key, tuple[list[Tensor], TensorRef]] = {}
        self._used: set[Key] = set()
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def sweep(self) -> None:
        """Remove what nobody asked for since the last sweep."""
        for key in self._stored.keys() - self._used:
            self._remove(self._stored.pop(key)[1])
        self._used.clear()

    def put(self, tensors: Mapping[str, Tensor]) -> TensorRef:
        """Where the tensors are; they are written if they are new, and must not be changed in place afterwards."""
        if not tensors:
            return self._segment, ()
        key = tuple((name, id(tensor)) for name, tensor in tensors.items())
        self._used.add(key)
        stored = self._stored.get(key)
        if stored is None:  # tensors that are held keep their ids
            stored = self._stored[key] = (list(tensors.values()), self._write(tensors))
        return stored[1]

    def _write(self, tensors: Mapping[str, Tensor]) -> TensorRef:
        """Copy tensors to a free place."""
        size = plan_layout(tensors, 0)[1]
        free = self._free.get(size)
        offset = free.pop() if free else self._end
        self._end = max(self._end, offset + size)
        return self._segment, self._memory.write(self._segment, tensors, offset)[0]

    def _remove(self, ref: TensorRef) -> None:
        """Free the place of tensors."""
        _, layout = ref
        begin = layout[0][1]
        self._free.setdefault(end_of(layout) - begin, []).append(begin)
