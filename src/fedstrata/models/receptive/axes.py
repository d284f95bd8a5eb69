"""How a tensor's axes see the image: the note that every tensor of a followed model carries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Axis:
    """One axis of the image, as a tensor holds it.

    Position i along it sees the image from start + jump·i on, `length` pixels far, and all of it if `whole`.

    Attributes:
        input: the image's size along this axis.
        outer: where the axis lies in the tensor: the product of all sizes before it, which no view changes.
        size: how many positions it has there; 0 if it is nowhere, since all positions were mixed.
        enlarged: (length, jump) of each tensor on the way that was enlarged: a window behind it sees whole positions.
    """

    input: int
    outer: int
    size: int
    start: float = 0
    jump: float = 1
    length: float = 1
    whole: bool = False
    enlarged: tuple[tuple[float, float], ...] = ()

    @property
    def field(self) -> int:
        """How many of the image's pixels one position sees; the most, where positions differ.

        Behind an enlarged tensor they do: a window over three of its positions, twice as many as before, reaches into
        two or three of the old ones. What it reaches into it sees wholly, and so on, down to the image.
        """
        seen = self.length
        for length, jump in reversed(self.enlarged):
            seen = length + jump * math.ceil((seen - length) / jump - 1e-6)
        whole_pixels = math.ceil(seen - 1e-6)
        return max(whole_pixels, self.input) if self.whole else whole_pixels

    @property
    def is_original(self) -> bool:
        """Whether these are still the image's own pixels."""
        return (self.start, self.jump, self.length, self.whole) == (0, 1, 1, False)

    def window(self, kernel: float, stride: float = 1, padding: int = 0, dilation: int = 1) -> Axis:
        """Behind a sliding window."""
        return replace(
            self,
            start=self.start - padding * self.jump,
            jump=self.jump * stride,
            length=self.length + (kernel - 1) * dilation * self.jump,
        )

    def resize(self, taps: float, scale: float) -> Axis:
        """Behind an interpolation between so many positions; `scale` is the old size over the new one."""
        seen = self.window(taps)
        grown = scale < 1 and self.jump > 0
        levels = (*self.enlarged, (seen.length, seen.jump)) if grown else self.enlarged
        return replace(seen, jump=seen.jump * scale, enlarged=levels)

    def see_all(self) -> Axis:
        """Behind something that sees all positions; a window over the result sees no more."""
        return replace(self, jump=0, whole=True)

    def lose_positions(self) -> Axis:
        """Mixed, with no positions left."""
        return replace(self.see_all(), outer=0, size=0)


Trace = tuple[Axis, ...]
"""A tensor's note: all axes of the image."""

Change = Callable[[Axis, int], Axis]
"""What becomes of an axis that lies in a dimension."""


def prefix(shape: Sequence[int], dim: int) -> int:
    """The product of the sizes before a dimension."""
    return math.prod(shape[:dim])


def places(trace: Trace, shape: Sequence[int]) -> list[tuple[int, int] | None]:
    """For each axis the dimension that it lies in, and its offset there (1 unless axes were merged).

    From the last on: where there is nothing but single positions, an image's axes come after the others.
    """
    found: list[tuple[int, int] | None] = []
    free = list(range(len(shape)))
    for axis in reversed(trace):
        place = _place(axis, shape, free) if axis.size else None
        if place is not None and place[1] == 1:
            free.remove(place[0])
        found.append(place)
    return found[::-1]


def _place(axis: Axis, shape: Sequence[int], free: Sequence[int]) -> tuple[int, int] | None:
    for dim in reversed(free):
        if axis.outer == prefix(shape, dim) and axis.size == shape[dim]:
            return dim, 1
    end = axis.outer * axis.size
    for dim in free:
        before = prefix(shape, dim)
        if axis.size > 1 and axis.outer % before == 0 and (before * shape[dim]) % end == 0:
            return dim, axis.outer // before
    return None


def carry(
    trace: Trace,
    old: Sequence[int],
    new: Sequence[int],
    to: Callable[[int], int | None] = lambda dim: dim,
    change: Change = lambda axis, dim: axis,
) -> Trace:
    """The note in a tensor of shape `new`, where dimension d of the `old` one has become `to(d)`, or none."""
    moved = []
    for axis, place in zip(trace, places(trace, old), strict=True):
        there = None if place is None else to(place[0])
        if place is None or there is None:
            moved.append(axis.lose_positions())
            continue
        dim, within = place
        exact = within == 1 and axis.size == old[dim]
        outer = prefix(new, there) * within
        if exact:
            moved.append(change(replace(axis, outer=outer, size=new[there]), dim))
        else:
            same = old[dim] == new[there] and change(axis, dim) == axis
            moved.append(replace(axis, outer=outer) if same else axis.lose_positions())
    return tuple(moved)


def join_traces(one: Trace, other: Trace) -> Trace:
    """What two paths see that meet."""
    return tuple(_join_axes(a, b) for a, b in zip(one, other, strict=True))


def _join_axes(a: Axis, b: Axis) -> Axis:
    if not (a.size and b.size):
        return replace(a if a.size else b, whole=True, length=max(a.length, b.length))
    if (a.outer, a.size) != (b.outer, b.size):
        return replace(a, length=max(a.length, b.length)).lose_positions()
    start, length = min(a.start, b.start), max(a.length, b.length)
    if a.jump == b.jump:
        length = max(a.start + a.length, b.start + b.length) - start
    levels = (a if a.length >= b.length else b).enlarged
    return replace(a, start=start, jump=max(a.jump, b.jump), length=length, whole=a.whole or b.whole, enlarged=levels)
