"""How the clients of a job are trained: one after the other, or many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedstrata.client.context import ClientContext
from fedstrata.client.train import train_client
from fedstrata.client.vectorised import Trained, train_vectorised
from fedstrata.core.stacks import Assignments, Memories, UpdateStack, VisitBlock, Visits
from fedstrata.core.types import Examples, Visit
from fedstrata.data.examples import sizes_of
from fedstrata.system.devices import visits_on


@dataclass(frozen=True)
class Trainer:
    """A way to train clients.

    Args:
        groups: gives the positions of the assignments that are trained together, where results depend on that; the same
            for any number of workers. None where they do not: whoever hands out jobs may group visits as it likes.
        train: gives what comes of the visits of a group, in any order.
    """

    groups: Callable[[Assignments, Sequence[Examples]], list[list[int]]] | None
    train: Callable[
        [ClientContext, Assignments, Sequence[Examples] | Mapping[int, Examples], Memories], Iterator[Trained]
    ]


def _train_one_by_one(
    context: ClientContext,
    assignments: Assignments,
    clients: Sequence[Examples] | Mapping[int, Examples],
    memories: Memories,
) -> Iterator[Trained]:
    """Train the clients of a group one after the other."""
    assignments, memories = visits_on(context.device, assignments, memories)
    for place, (assignment, memory) in enumerate(zip(assignments, memories, strict=True)):
        yield (place,), train_client(context, assignment, clients[assignment.client], memory)


MIN_SIZE, MAX_SIZE, MIN_GROUPS = 8, 32, 4
"""Clients of the smallest and the largest group, and how many groups a round should have at least."""


def group_size(clients: int) -> int:
    """How many clients go together, of so many that are alike."""
    return min(MAX_SIZE, max(MIN_SIZE, -(-clients // MIN_GROUPS)))


def _group_by_steps(assignments: Assignments, clients: Sequence[Examples]) -> list[list[int]]:
    """Clients with about the same number of steps go together: the others would only wait for the longest."""
    kinds: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    plans = [(a.arch, a.trains) for a in assignments.templates]
    for position, kind in enumerate(assignments.kinds):
        kinds.setdefault(plans[kind], []).append(position)
    works = [a.work for a in assignments.templates]
    steps = [
        works[kind].steps or works[kind].epochs * -(-size // works[kind].batch_size)
        for kind, size in zip(assignments.kinds, sizes_of(clients, assignments.clients), strict=True)
    ]
    groups = []
    for positions in kinds.values():
        size = group_size(len(positions))
        ordered = sorted(positions, key=steps.__getitem__, reverse=True)
        groups += [ordered[i : i + size] for i in range(0, len(ordered), size)]
    return groups


ONE_BY_ONE = Trainer(None, _train_one_by_one)
VECTORISED = Trainer(_group_by_steps, train_vectorised)
"""The groups depend on the clients alone, not on the number of workers, and so do the bits."""


class ArrivedVisits:
    """What has come of a round's visits, by position, to be handed on in client order."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Visits, int]] = {}
        """By the first position: a visit or a block, and how many visits that is."""

    def add(self, positions: Sequence[int], came: UpdateStack | Visit) -> None:
        """Take what came of the visits at some positions."""
        if not isinstance(came, UpdateStack):
            self._waiting[positions[0]] = came, 1
        elif len(came) == 1:
            self._waiting[positions[0]] = came.visit(0), 1
        else:
            for rows in _runs(positions):
                self._waiting[positions[rows[0]]] = VisitBlock(came, rows), len(rows)

    def __len__(self) -> int:
        return sum(count for _, count in self._waiting.values())

    def __contains__(self, position: int) -> bool:
        """True if the visit at a position is there, all before it having been taken."""
        return position in self._waiting

    def take(self, position: int) -> tuple[Visits, int]:
        """(the visit at a position, or a block of those from there on; where the next one is)."""
        visits, count = self._waiting.pop(position)
        return visits, position + count


def _runs(positions: Sequence[int]) -> Iterator[Sequence[int]]:
    """The places of positions that follow each other, each time in order."""
    count = len(positions)
    if list(positions) == list(range(positions[0], positions[0] + count)):
        yield range(count)
        return
    places = sorted(range(count), key=positions.__getitem__)
    begin = 0
    for end in range(1, count + 1):
        if end == count or positions[places[end]] != positions[places[end - 1]] + 1:
            yield places[begin:end]
            begin = end
