"""How the clients of a job are trained: one after the other, or many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedstrata.client.context import ClientContext
from fedstrata.client.train import train_client
from fedstrata.client.vectorised import Trained, train_vectorised
from fedstrata.core.stacks import Assignments, UpdateStack, VisitBlock, Visits
from fedstrata.core.types import Examples, Slots, Visit
from fedstrata.data.examples import sizes
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
        [ClientContext, Assignments, Sequence[Examples] | Mapping[int, Examples], Sequence[Slots]], Iterator[Trained]
    ]


def _train_one_by_one(
    context: ClientContext,
    assignments: Assignments,
    clients: Sequence[Examples] | Mapping[int, Examples],
    memories: Sequence[Slots],
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
    size_of = sizes(clients)
    kinds: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    plans = [(a.arch, a.trains) for a in assignments.templates]
    for position, kind in enumerate(assignments.kinds):
        kinds.setdefault(plans[kind], []).append(position)

    def steps(position: int) -> int:
        work = assignments.template(position).work
        return work.steps or work.epochs * -(-size_of(assignments.clients[position]) // work.batch_size)

    groups = []
    for positions in kinds.values():
        size = group_size(len(positions))
        ordered = sorted(positions, key=steps, reverse=True)
        groups += [ordered[i : i + size] for i in range(0, len(ordered), size)]
    return groups


ONE_BY_ONE = Trainer(None, _train_one_by_one)
VECTORISED = Trainer(_group_by_steps, train_vectorised)
"""The groups depend on the clients alone, not on the number of workers, and so do the bits."""


class ArrivedVisits:
    """What has come of a round's visits, by position, to be handed on in client order."""

    def __init__(self) -> None:
        self._single: dict[int, Visit] = {}
        self._stacked: dict[int, tuple[UpdateStack, int]] = {}

    def add(self, positions: Sequence[int], came: UpdateStack | Visit) -> None:
        """Take what came of the visits at some positions."""
        if isinstance(came, UpdateStack):
            self._stacked.update((position, (came, row)) for row, position in enumerate(positions))
        else:
            self._single[positions[0]] = came

    def __len__(self) -> int:
        return len(self._single) + len(self._stacked)

    def __contains__(self, position: int) -> bool:
        return position in self._stacked or position in self._single

    def take(self, position: int) -> tuple[Visits, int]:
        """(the visit at a position, or a block of those from there on; where the next one is)."""
        if position in self._single:
            return self._single.pop(position), position + 1
        stack = self._stacked[position][0]
        rows = []
        while (found := self._stacked.get(position)) is not None and found[0] is stack:
            rows.append(self._stacked.pop(position)[1])
            position += 1
        return (VisitBlock(stack, rows) if len(stack) > 1 else stack.visit(0)), position
