"""The engine of a Flower federation: assignments go to SuperNodes as messages, and updates come back."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from fedstrata import wire
from fedstrata.core.parts import zeros_of
from fedstrata.core.stacks import Memories
from fedstrata.core.types import Absence, Assignment, Augment, Slots, Visit
from fedstrata.engines.protocol import Recall
from fedstrata.errors import FedstrataError, UsageError, one_line
from fedstrata.evaluation.evaluate import EvalRequest, Scores
from fedstrata.flower.differential_privacy import check_length
from fedstrata.flower.messages import TrainReply, TrainRequest, TrainSettings, from_records, to_records
from fedstrata.flower.reorder_buffer import ReorderBuffer
from fedstrata.flower.site_directory import SiteDirectory
from fedstrata.flower.transport import Reply, Transport
from fedstrata.runs.files import write_atomic
from fedstrata.server.state import ServerState
from fedstrata.system.timing import Clock

RUN_ID = "flower.json"
"""The file of a run's directory that says which run its clients know it as."""
BARREN = 3
"""Rounds in a row without any update after which a run stops, rather than count rounds in which nothing is learnt."""
KEPT: Slots = {"(kept)": {}}
"""What stands here for a memory, which stays at its client's site."""


@dataclass(frozen=True, eq=False)
class RemoteExamples:
    """The data of a client, of which the server knows how much there is and what an example looks like.

    Args:
        examples: how many.
        inputs: no row of inputs, for their shape and type.
        targets: no row of targets.
    """

    examples: int
    inputs: Any
    targets: Tensor

    def __len__(self) -> int:
        return self.examples

    def batch(self, index: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Zeros in the form of its inputs and targets."""
        return zeros_of(self.inputs, len(index)), zeros_of(self.targets, len(index))

    def labels(self) -> Tensor:
        """Nobody on the server knows them."""
        raise FedstrataError("a client's labels are not on the server")


@dataclass(eq=False)
class RemoteStore:
    """The store of a federation whose clients keep their memories themselves."""

    trusted: ClassVar[bool] = True
    until: int = 0

    def get(self, clients: Sequence[int], versions: Sequence[int]) -> Memories:
        """Nothing: it is at the clients' sites."""
        return Memories.of([{} for _ in clients])

    def put(self, clients: Sequence[int], version: int, memories: Memories, before: Sequence[int]) -> None:
        """Nothing to do: the clients have kept it, and will be told that it counts."""

    def forget(self, until: int) -> None:
        """Let clients drop what was replaced before a round."""
        self.until = until


@dataclass(eq=False)
class Flower:
    """Trains clients at their sites.

    Args:
        transport: sends messages.
        directory: where each client is.
        regime: how clients train.
        limit: longest update that is looked at, in bytes.
        holds: True if clients should hold on to parameters.
        memories: which memories clients may drop.
        few: how many updates are fetched at once, and held in memory before their turn: what a round takes does not
            grow with its clients.
        base: parameters of a frozen base beneath adapters, which sites have by themselves.
        out: the run's directory, in which the others wait for their turn; None for the system's temporary one.
        state: what the server knows before the round; to be set before every `run`.
        lost: clients that said they have lost what they held or remembered → which of the two.
        barren: rounds in a row in which nobody sent an update.
    """

    transport: Transport
    directory: SiteDirectory
    regime: TrainSettings
    limit: int
    holds: bool
    memories: RemoteStore
    few: int
    out: Path | None = None
    base: frozenset[str] = frozenset()
    state: ServerState | None = None
    lost: dict[int, str] = field(default_factory=dict)
    barren: int = 0
    spent: Clock = field(default_factory=Clock)
    workers: ClassVar[int] = 1
    overlaps: ClassVar[bool] = False

    @cached_property
    def run_id(self) -> str:
        """What clients know the run as; asked for once the directory is there."""
        return read_run_id(self.out)

    def begin(self, state: ServerState) -> ServerState:
        """Take up a state, in which clients that have lost their memories begin anew."""
        if self.lost:
            held, remembers = state.held.clone(), state.remembers.clone()
            for client, what in self.lost.items():
                held[client] = -1
                remembers[client] = -1 if what == "memory" else remembers[client]
            state = replace(state, held=held, remembers=remembers)
            self.lost.clear()
        self.state = state
        return state

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[Visit]:
        """What came of the assignments, in client order."""
        self.look_for(assignments)
        with ReorderBuffer(self.few, self.out) as early:
            yield from self._visits(assignments, early)

    def _visits(self, assignments: Sequence[Assignment], early: ReorderBuffer) -> Iterator[Visit]:
        """Ask everybody, and put what comes in order."""
        order = [assignment.client for assignment in assignments]
        asked: dict[str, Assignment] = {}
        again: set[int] = set()
        message_ids: list[str] = []

        def ask(assignment: Assignment) -> None:
            """Send an assignment, or note that it cannot be sent."""
            message_id = self._send(assignment)
            if message_id is None:
                early.put(assignment.client, (Absence(assignment.client, "its SuperNode is not connected"), {}))
            else:
                asked[message_id] = assignment
                message_ids.append(message_id)

        def due() -> Iterator[Visit]:
            """Those whose turn it is."""
            while order and order[0] in early:
                yield early.pop(order.pop(0))

        for assignment in assignments:
            ask(assignment)
        yield from due()
        for message_id, reply in self.transport.replies(message_ids, self.few):
            assignment = asked.pop(message_id)
            visit = self._read(assignment, reply, last=assignment.client in again)
            if visit is None:
                again.add(assignment.client)
                ask(self._with_everything(assignment))
            elif assignment.client == order[0]:
                order.pop(0)
                yield visit
            else:
                early.put(assignment.client, visit)
            yield from due()

    def look_for(self, assignments: Sequence[Assignment]) -> None:
        """See which of a round's clients are there.

        Raises:
            UsageError: if it has no point to go on.
        """
        if self.barren >= BARREN:
            raise UsageError(f"nothing that can be used came from any client in {BARREN} rounds in a row")
        self.directory.find([a.client for a in assignments])

    def count_barren(self, anything: bool) -> None:
        """Count the rounds in a row in which nothing came."""
        self.barren = 0 if anything else self.barren + 1

    def _send(self, assignment: Assignment) -> str | None:
        """Send an assignment; the message's number, or None if its client's SuperNode is not there."""
        node = self.directory.node(assignment.client)
        if node is None:
            return None
        content = to_records(self.head(assignment), wire.encode(assignment))
        return self.transport.send(node, "train", content, str(assignment.round + 1))

    def head(self, assignment: Assignment) -> TrainRequest:
        """What stands in front of an assignment."""
        assert self.state is not None
        client = assignment.client
        return TrainRequest(
            run=self.run_id,
            regime=self.regime,
            client=client,
            held=-1 if self._brings_everything(assignment) else int(self.state.held[client]),
            memory=int(self.state.remembers[client]),
            until=self.memories.until,
            holds=self.holds,
        )

    def _with_everything(self, assignment: Assignment) -> Assignment:
        """An assignment for a client that holds nothing, but the base of its own model as far as that is unchanged."""
        assert self.state is not None
        own = {n for n in self.base.intersection(assignment.params) if self.state.changed.get(n, -1) < 0}
        names = (*assignment.params, *assignment.buffers)
        return replace(assignment, to_send=tuple(n for n in names if n not in own) if own else None)

    def _brings_everything(self, assignment: Assignment) -> bool:
        """True if a client need not hold anything of an earlier round."""
        return assignment.to_send is None or assignment.to_send == self._with_everything(assignment).to_send

    def note_loss(self, client: int, answer: TrainReply) -> str:
        """Note what a client has lost; says what comes of it."""
        self.lost[client] = answer.lost
        if answer.lost == "memory":
            return "it has lost what it remembered, and will begin anew"
        return "it has lost the parameters that it held, and will be sent all of them"

    def _read(self, assignment: Assignment, reply: Reply, last: bool) -> Visit | None:
        """What a reply says; None if the client does not find what it held or remembered, and this was not its last
        chance: Flower may have kept its context a little later than its answer.
        """
        client = assignment.client
        try:
            if reply.content is None:
                raise UsageError(reply.why)
            answer, message = from_records(reply.content, TrainReply, self.limit)
            if answer.lost and not last:
                return None
            if answer.lost:
                raise UsageError(self.note_loss(client, answer))
            if answer.refusal:
                raise UsageError(f"it says: {one_line(answer.refusal, 300)}")
            update = wire.decode_update(message)
            if update.client != client:
                raise UsageError(f"it answers for client {one_line(str(update.client), 20)}")
            check_length(update.delta, self.regime.clip)
        except FedstrataError as error:
            return Absence(client, str(error)), {}
        return update, KEPT if answer.kept else {}

    def evaluate(self, request: EvalRequest) -> Callable[[], Scores]:
        """Nothing is evaluated at the sites."""
        raise FedstrataError("the server evaluates its own model")

    def take_events(self) -> tuple[str, ...]:
        """Nothing that concerns the whole run: what went wrong in a round stands in its record."""
        return ()

    def close(self) -> None:
        """Nothing to release."""


def read_run_id(out: Path | None) -> str:
    """What clients know a run as: the same after it was resumed, and no other's."""
    new = secrets.token_hex(8)
    if out is None:
        return new
    path = out / RUN_ID
    try:
        known = json.loads(path.read_text())["run"]
        if re.fullmatch("[0-9a-f]{16}", known):
            return str(known)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    write_atomic(path, json.dumps({"run": new}) + "\n")
    return new
