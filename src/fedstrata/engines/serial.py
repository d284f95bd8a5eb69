"""Clients trained in this process; and the same with every message encoded and decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from fedstrata import wire
from fedstrata.client.context import ClientContext
from fedstrata.client.train import train_client
from fedstrata.core.stacks import Assignments, Memories, Visits
from fedstrata.core.types import Assignment, Examples
from fedstrata.engines.grouping import ONE_BY_ONE, ArrivedVisits, Trainer
from fedstrata.engines.protocol import Engine, Recall
from fedstrata.engines.registry import EngineRequest
from fedstrata.evaluation.evaluate import EvalRequest, Scores, evaluate
from fedstrata.system.timing import Clock


def build_serial(request: EngineRequest) -> Engine:
    """The engine `serial`."""
    return Serial(request.context, request.clients, request.test)


def build_wire(request: EngineRequest) -> Engine:
    """The engine `wire`."""
    return Wire(request.context, request.clients, request.test)


@dataclass(eq=False)
class Serial:
    """Trains clients in this process, one group after the other."""

    context: ClientContext
    clients: Sequence[Examples]
    test: Examples | None = None
    trainer: Trainer = ONE_BY_ONE
    spent: Clock = field(default_factory=Clock)
    workers: ClassVar[int] = 1
    overlaps: ClassVar[bool] = False

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[Visits]:
        """Visits in client order."""
        asked, arrived, position = Assignments.of(assignments), ArrivedVisits(), 0
        groups = self.trainer.groups(asked, self.clients) if self.trainer.groups else ([p] for p in range(len(asked)))
        for group in groups:
            chosen = asked.select(group)
            memories = Memories.of(recall(chosen.clients))
            for places, came in self.trainer.train(self.context, chosen, self.clients, memories):
                arrived.add([group[place] for place in places], came)
                while position in arrived:
                    visits, position = arrived.take(position)
                    yield visits

    def evaluate(self, request: EvalRequest) -> Callable[[], Scores]:
        """A function that evaluates on the test set when it is called."""
        assert self.test is not None
        test = self.test
        return lambda: evaluate(self.context.replica(request.arch), request, test)

    def take_events(self) -> tuple[str, ...]:
        """Nothing happens to workers where there are none."""
        return ()

    def close(self) -> None:
        """Nothing to release."""


@dataclass(eq=False)
class Wire(Serial):
    """Trains clients one after the other, but every message goes through its bytes, as it would across a network.

    Each client keeps what it was sent for its last visit, and is sent only what changed since; slow, for tests.
    """

    held: dict[int, Assignment] = field(default_factory=dict)

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[Visits]:
        """Visits in client order."""
        for sent in assignments:
            if sent.client not in self.held:
                sent = replace(sent, to_send=self._everything(sent))
            held, message = self.held.get(sent.client), wire.encode(sent)
            assignment = self.context.in_order(wire.decode_assignment(message, held, self.context.base))
            self.held[sent.client] = assignment
            update, memory = train_client(self.context, assignment, self.clients[sent.client], recall([sent.client])[0])
            yield wire.decode_update(wire.encode(update)), memory

    def _everything(self, sent: Assignment) -> tuple[str, ...] | None:
        """What a client is sent that holds nothing but the base of its own model; None for all there is."""
        base = self.context.base(sent.arch)
        own = {n for n, p in base.items() if torch.equal(p, sent.params[n])}
        return tuple(n for n in (*sent.params, *sent.buffers) if n not in own) if own else None
