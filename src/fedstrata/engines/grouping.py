"""How the clients of a task are trained: one after the other, or many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fedstrata.client.context import Workshop
from fedstrata.client.results import Harvest
from fedstrata.client.train import train_client
from fedstrata.client.vectorised import train_cohort
from fedstrata.core.types import Assignment, Examples, Slots
from fedstrata.data.examples import sizes


@dataclass(frozen=True)
class Trainer:
    """A way to train clients.

    Args:
        groups: the positions of the assignments that are trained together; the same for any number of workers.
        train: what comes of the visits of a group, in any order; good until the next is asked for.
    """

    groups: Callable[[Sequence[Assignment], Sequence[Examples]], list[list[int]]]
    train: Callable[[Workshop, Sequence[Assignment], Sequence[Examples], Sequence[Slots]], Iterator[Harvest]]


def _alone(assignments: Sequence[Assignment], clients: Sequence[Examples]) -> list[list[int]]:
    return [[position] for position in range(len(assignments))]


def _one_by_one(
    shop: Workshop, assignments: Sequence[Assignment], data: Sequence[Examples], memories: Sequence[Slots]
) -> Iterator[Harvest]:
    for place, visit in enumerate(zip(assignments, data, memories, strict=True)):
        yield Harvest.of(place, *train_client(shop, *visit))


LEAST, MOST, PARTS = 8, 16, 4
"""Clients of the smallest and the largest cohort, and how many cohorts a round should have at least."""


def _cohorts(assignments: Sequence[Assignment], clients: Sequence[Examples]) -> list[list[int]]:
    """Clients with about the same number of steps go together: the others would only wait for the longest."""
    size_of = sizes(clients)

    def steps(position: int) -> int:
        a = assignments[position]
        return a.work.steps or a.work.epochs * -(-size_of(a.client) // a.work.batch_size)

    kinds: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for position, a in enumerate(assignments):
        kinds.setdefault((a.arch, a.trains), []).append(position)
    groups = []
    for positions in kinds.values():
        size = min(MOST, max(LEAST, -(-len(positions) // PARTS)))
        ordered = sorted(positions, key=steps, reverse=True)
        groups += [ordered[i : i + size] for i in range(0, len(ordered), size)]
    return groups


ONE_BY_ONE = Trainer(_alone, _one_by_one)
COHORTS = Trainer(_cohorts, train_cohort)
"""The cohorts depend on the clients alone, not on the number of workers, and so do the bits."""
