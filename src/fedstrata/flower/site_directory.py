"""Where each client is: sites are asked who they are, once, and again when one appears that is not known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

from fedstrata.errors import FedstrataError, UsageError
from fedstrata.flower.messages import HEAD_LIMIT, ClientInfo, Greeting, Head, from_records, to_records
from fedstrata.flower.transport import Reply, Transport

PAUSE = 0.5
"""Seconds between two looks for sites, at least."""
TRIES = 5
"""How often a node is asked that answers with an error."""
HELLO = 600.0
"""Seconds that a site has to say who it is; a slow one keeps nobody waiting."""


class Hello(Head):
    """The question who somebody is."""


@dataclass(eq=False)
class SiteDirectory:
    """Clients and the SuperNodes that have their data.

    Args:
        transport: sends messages.
        wait: seconds to wait for sites that are not there.
        note: told in one sentence what a reader of the log should know.
    """

    transport: Transport
    wait: float
    note: Callable[[str], None]
    parties: dict[int, ClientInfo] = field(default_factory=dict)
    _where: dict[int, int] = field(default_factory=dict)
    _met: set[int] = field(default_factory=set)
    _ask: dict[str, int] = field(default_factory=dict)
    _online: set[int] = field(default_factory=set)
    _tries: dict[int, int] = field(default_factory=dict)

    def node(self, client: int) -> int | None:
        """The node of a client, if it is there."""
        node = self._where.get(client)
        return node if node in self._online else None

    def gather(self, population: int | None) -> list[ClientInfo]:
        """Wait until all clients have come: one for every number below `population`, or as many as they say they are.

        Raises:
            UsageError: if they do not come in time, or do not agree.
        """
        deadline = time.monotonic() + self.wait
        while True:
            self._look()
            expected = population or self._agreed_population()
            if expected is not None and len(self._within(expected)) == expected:
                return [self.parties[client] for client in range(expected)]
            if time.monotonic() > deadline:
                raise UsageError(self._missing(expected))
            time.sleep(PAUSE)

    def find(self, clients: Iterable[int]) -> None:
        """See who is there; if it is none of these, wait for one.

        Raises:
            UsageError: if nobody comes.
        """
        asked, deadline = list(clients), time.monotonic() + self.wait
        while True:
            self._look()
            if any(self.node(client) is not None for client in asked):
                return
            if time.monotonic() > deadline:
                raise UsageError(f"none of this round's clients {asked[:10]} was there for {self.wait:g} seconds")
            time.sleep(PAUSE)

    def _within(self, population: int) -> list[int]:
        return [client for client in self.parties if client < population]

    def _agreed_population(self) -> int | None:
        """How many clients there are, if somebody said so."""
        said = {party.population for party in self.parties.values()} - {None}
        if len(said) > 1:
            raise UsageError(f"the sites do not agree on num-partitions: {sorted(n for n in said if n is not None)}")
        return next(iter(said), None)

    def _missing(self, expected: int | None) -> str:
        if expected is None:
            return (
                f"{len(self.parties)} clients came within {self.wait:g} seconds, and nobody says how many there are: "
                "give clients=…, or start the SuperNodes with --node-config 'partition-id=… num-partitions=…'"
            )
        absent = list(islice((client for client in range(expected) if client not in self.parties), 20))
        return f"clients {absent} of {expected} did not come within {self.wait:g} seconds"

    def _look(self) -> None:
        """Ask nodes that are new who they are, and hear who has answered; nobody is waited for."""
        self._online = self.transport.online()
        self._met &= self._online
        self._ask = {message_id: node for message_id, node in self._ask.items() if node in self._online}
        transport = replace(self.transport, patience=HELLO)
        for node in sorted(self._online - self._met - set(self._ask.values())):
            message_id = transport.send(node, "query", to_records(Hello()), "hello")
            if message_id is not None:
                self._ask[message_id] = node
        for message_id, reply in transport.fetch_replies(list(self._ask)):
            self._hear(self._ask.pop(message_id), reply)

    def _hear(self, node: int, reply: Reply) -> None:
        """Note what a node answered; one that could not is asked again, a few times."""
        if reply.content is None:
            self._tries[node] = self._tries.get(node, 0) + 1
            if self._tries[node] < TRIES:
                return
        try:
            if reply.content is None:
                raise UsageError(reply.why)
            greeting, _ = from_records(reply.content, Greeting, HEAD_LIMIT)
            if greeting.refusal:
                raise UsageError(greeting.refusal)
            self._welcome(node, greeting)
        except FedstrataError as error:
            self.note(f"SuperNode {node} takes no part: {error}")
        self._met.add(node)
        self._tries.pop(node, None)

    def _welcome(self, node: int, greeting: Greeting) -> None:
        for party in greeting.parties:
            there = self.node(party.client)
            if there not in (None, node):
                raise UsageError(f"the data of client {party.client} is at SuperNode {there} already")
            known = self.parties.get(party.client, party)
            if (known.examples, known.shape, known.dtype) != (party.examples, party.shape, party.dtype):
                raise UsageError(f"client {party.client} had {known.examples} examples before, now {party.examples}")
        for party in greeting.parties:
            self.parties.setdefault(party.client, party)
            self._where[party.client] = node
