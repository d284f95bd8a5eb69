"""What came of visits: one client's, or those of many that were trained at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from fedstrata.core.tensors import Tensors, clone
from fedstrata.core.types import Slots, Update, replace_fields


@dataclass(frozen=True, eq=False)
class TrainResult:
    """What came of visits: updates without their tensors, and the tensors, of all clients stacked or of the only one.

    Args:
        places: which of the assignments these are.
        updates: one for each, without tensors.
        delta, buffers, slots, memory: the tensors of the updates, and what the clients will remember.
        stacked: True if each tensor holds a row for every client.
    """

    places: tuple[int, ...]
    updates: tuple[Update, ...]
    delta: Tensors
    buffers: Tensors
    slots: Slots
    memory: Slots
    stacked: bool

    @staticmethod
    def of(place: int, update: Update, memory: Slots) -> TrainResult:
        """What came of one visit."""
        bare = replace_fields(update, delta={}, buffers={}, slots={})
        return TrainResult((place,), (bare,), update.delta, update.buffers, update.slots, memory, False)

    def copy(self) -> TrainResult:
        """The same in memory of its own."""
        slots = {name: clone(slot) for name, slot in self.slots.items()}
        memory = {name: clone(slot) for name, slot in self.memory.items()}
        return replace_fields(self, delta=clone(self.delta), buffers=clone(self.buffers), slots=slots, memory=memory)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that travel."""
        yield from self.delta.values()
        yield from self.buffers.values()
        for slot in self.slots.values():
            yield from slot.values()

    def visits(self) -> Iterator[tuple[int, Update, Slots]]:
        """(place, whole update, what its client will remember), one by one."""
        if not self.stacked:
            whole = replace_fields(self.updates[0], delta=self.delta, buffers=self.buffers, slots=self.slots)
            yield self.places[0], whole, self.memory
            return
        deltas, buffers = _rows(self.delta, len(self.places)), _rows(self.buffers, len(self.places))
        slots = {name: _rows(slot, len(self.places)) for name, slot in self.slots.items()}
        memory = {name: _rows(slot, len(self.places)) for name, slot in self.memory.items()}
        for c, (place, update) in enumerate(zip(self.places, self.updates, strict=True)):
            mine = {name: rows[c] for name, rows in slots.items()}
            whole = replace_fields(update, delta=deltas[c], buffers=buffers[c], slots=mine)
            yield place, whole, {name: rows[c] for name, rows in memory.items()}


def _rows(stacked: Tensors, count: int) -> list[Tensors]:
    """A dict of tensors for every client, from a dict of stacked ones."""
    if not stacked:
        return [{} for _ in range(count)]
    return [dict(zip(stacked, row, strict=True)) for row in zip(*(t.unbind() for t in stacked.values()), strict=True)]
