"""One client after the other, in this process; and the same with every message encoded and decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from fedstrata import wire
from fedstrata.client import train_client
from fedstrata.core import Assignment, Slots, Update
from fedstrata.data.examples import Examples
from fedstrata.tensors import Tensors
from fedstrata.workshop import Workshop

Recall = Callable[[int], Slots]
"""Client → its memory."""


@dataclass(eq=False)
class Serial:
    """Trains clients one after the other."""

    shop: Workshop
    clients: Sequence[Examples]

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[tuple[Update, Slots]]:
        """Updates in client order, each with what its client will remember."""
        for assignment in assignments:
            yield train_client(self.shop, assignment, self.clients[assignment.client], recall(assignment.client))

    def close(self) -> None:
        """Nothing to release."""


@dataclass(eq=False)
class Wire:
    """Trains clients one after the other, but every message goes through its bytes, as it would across a network.

    Each client keeps the parameters of its last visit, and is sent only what changed since; slow, for tests.
    """

    shop: Workshop
    clients: Sequence[Examples]
    held: dict[int, Tensors] = field(default_factory=dict)

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[tuple[Update, Slots]]:
        """Updates in client order, each with what its client will remember."""
        for sent in assignments:
            if sent.client not in self.held:
                sent = replace(sent, fresh=None)
            assignment = wire.decode_assignment(wire.encode(sent), self.held.get(sent.client))
            self.held[sent.client] = assignment.params
            update, memory = train_client(self.shop, assignment, self.clients[sent.client], recall(sent.client))
            yield wire.decode_update(wire.encode(update)), memory

    def close(self) -> None:
        """Nothing to release."""
