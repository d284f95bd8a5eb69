"""How the clients of a task are trained: one after the other, or many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from fedstrata.client import train_client
from fedstrata.cohort import Harvest, train_cohort
from fedstrata.core import Assignment, Slots
from fedstrata.data.examples import Examples, sizes
from fedstrata.workshop import Workshop


class Trainer(Protocol):
    """A way to train clients."""

    def groups(self, assignments: Sequence[Assignment], clients: Sequence[Examples]) -> list[list[int]]:
        """The positions of the assignments that are trained together; the same for any number of workers."""
        ...

    def train(
        self,
        shop: Workshop,
        assignments: Sequence[Assignment],
        data: Sequence[Examples],
        memories: Sequence[Slots],
    ) -> Iterator[Harvest]:
        """What comes of the visits, in any order; good until the next is asked for."""
        ...


class OneByOne:
    """Trains clients one after the other."""

    def groups(self, assignments: Sequence[Assignment], clients: Sequence[Examples]) -> list[list[int]]:
        return [[position] for position in range(len(assignments))]

    def train(
        self,
        shop: Workshop,
        assignments: Sequence[Assignment],
        data: Sequence[Examples],
        memories: Sequence[Slots],
    ) -> Iterator[Harvest]:
        for place, visit in enumerate(zip(assignments, data, memories, strict=True)):
            yield Harvest.of(place, *train_client(shop, *visit))


class Cohorts:
    """Trains many clients at once.

    The cohorts depend on the clients alone, not on the number of workers, and so do the bits. Clients with about the
    same number of steps go together: the others would only wait for the longest.
    """

    LEAST, MOST, PARTS = 8, 16, 4

    def groups(self, assignments: Sequence[Assignment], clients: Sequence[Examples]) -> list[list[int]]:
        size_of = sizes(clients)

        def steps(position: int) -> int:
            a = assignments[position]
            return a.work.steps or a.work.epochs * -(-size_of(a.client) // a.work.batch_size)

        kinds: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for position, a in enumerate(assignments):
            kinds.setdefault((a.arch, a.trains), []).append(position)
        groups = []
        for positions in kinds.values():
            size = min(self.MOST, max(self.LEAST, -(-len(positions) // self.PARTS)))
            ordered = sorted(positions, key=steps, reverse=True)
            groups += [ordered[i : i + size] for i in range(0, len(ordered), size)]
        return groups

    def train(
        self,
        shop: Workshop,
        assignments: Sequence[Assignment],
        data: Sequence[Examples],
        memories: Sequence[Slots],
    ) -> Iterator[Harvest]:
        return train_cohort(shop, assignments, data, memories)
