"""How the clients of a job are trained: one after the other, or many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fedstrata.client.context import ClientContext
from fedstrata.client.results import TrainResult
from fedstrata.client.train import train_client
from fedstrata.client.vectorised import train_vectorised
from fedstrata.core.types import Assignment, Examples, Slots
from fedstrata.data.examples import sizes


@dataclass(frozen=True)
class Trainer:
    """A way to train clients.

    Args:
        groups: gives the positions of the assignments that are trained together; the same for any number of workers.
        train: gives what comes of the visits of a group, in any order; tensors are good until the next is asked for.
    """

    groups: Callable[[Sequence[Assignment], Sequence[Examples]], list[list[int]]]
    train: Callable[[ClientContext, Sequence[Assignment], Sequence[Examples], Sequence[Slots]], Iterator[TrainResult]]


def _group_alone(assignments: Sequence[Assignment], clients: Sequence[Examples]) -> list[list[int]]:
    """Every client by itself."""
    return [[position] for position in range(len(assignments))]


def _train_one_by_one(
    context: ClientContext, assignments: Sequence[Assignment], data: Sequence[Examples], memories: Sequence[Slots]
) -> Iterator[TrainResult]:
    """Train the clients of a group one after the other."""
    for place, visit in enumerate(zip(assignments, data, memories, strict=True)):
        yield TrainResult.of(place, *train_client(context, *visit))


MIN_SIZE, MAX_SIZE, MIN_GROUPS = 8, 16, 4
"""Clients of the smallest and the largest group, and how many groups a round should have at least."""


def _group_by_steps(assignments: Sequence[Assignment], clients: Sequence[Examples]) -> list[list[int]]:
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
        size = min(MAX_SIZE, max(MIN_SIZE, -(-len(positions) // MIN_GROUPS)))
        ordered = sorted(positions, key=steps, reverse=True)
        groups += [ordered[i : i + size] for i in range(0, len(ordered), size)]
    return groups


ONE_BY_ONE = Trainer(_group_alone, _train_one_by_one)
VECTORISED = Trainer(_group_by_steps, train_vectorised)
"""The groups depend on the clients alone, not on the number of workers, and so do the bits."""
