"""Secure aggregation: clients mask their updates with Flower's SecAgg+ mod, and the server sees their sum alone.

Bell, Bonawitz, Gascón, Lepoint and Raykova, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS
2020, with every client of a round as every other one's neighbour. Flower has the clients' side and the primitives; this
is the server's side for any method whose mean is all that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedstrata import wire
from fedstrata.core.method import Method
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Absence, Assignment, Update, Visit
from fedstrata.engines.protocol import Recall
from fedstrata.errors import FedstrataError, UsageError, one_line
from fedstrata.flower.engine import KEPT, Flower
from fedstrata.flower.messages import ClientInfo, TrainReply, from_records, to_records
from fedstrata.flower.mods import CONFIGS
from fedstrata.flower.transport import Reply

if TYPE_CHECKING:
    from flwr.app import RecordDict

LEVELS = 2**22
"""Steps between the smallest and the largest number that is sent."""
SECRET = 2**12
"""Longest key or share that is looked at, in bytes."""
LEAST = 3
"""Fewest clients whose sum is opened."""
NPY = b"\x93NUMPY\x01\x00"
"""How an array begins in the form in which Flower's mod sends it, version 1.0 of .npy."""
MODULUS = 2**32
"""Masks and sums are taken modulo this: room for 1,023 clients."""


def check_sums(method: Method, archs: int) -> None:
    """Refuse what needs more than the sum of a round's updates.

    Raises:
        UsageError: with what it is.
    """
    for door in ("rescale", "accumulate"):
        for technique in method.at(door):
            raise UsageError(_refusal(technique.name))
    for technique in method.techniques:
        if technique.needs_deltas or technique.per_client:
            raise UsageError(_refusal(technique.name))
    for encoder in method.encoders:
        raise UsageError(
            f"'{encoder.name}' lets every client send its change in a form of its own, and under secure aggregation "
            "changes are added up before anybody reads them"
        )
    if method.reducer is not None:
        raise UsageError(_refusal(str(method.base.reduce)))
    if archs > 1:
        raise UsageError("under secure aggregation all clients have the same model: leave archs out")


def check_clients(
    participation: int | float, parties: Sequence[ClientInfo], node_of: Callable[[int], int | None]
) -> None:
    """Refuse too few clients per round to hide in, more than fit, and several at one SuperNode.

    Raises:
        UsageError: with what there may be.
    """
    some = sum(party.examples > 0 for party in parties)
    clients = participation if isinstance(participation, int) else round(participation * some)
    if not LEAST <= clients < MODULUS // LEVELS:
        raise UsageError(f"secure aggregation needs between {LEAST} and 1,023 clients per round, not {clients}")
    nodes = [node for party in parties if (node := node_of(party.client)) is not None]
    if len(set(nodes)) < len(nodes):
        raise UsageError("a SuperNode has several clients, and secure aggregation needs one for each")


def _refusal(name: str) -> str:
    return f"'{name}' looks at clients one by one, and under secure aggregation only their sum is seen"


@dataclass(eq=False)
class SecAggEngine(Flower):
    """Trains clients at their sites, and sees the weighted mean of their changes.

    Every accepted client is then taken to have sent that mean, which leaves the mean of a round what it is.

    Args:
        validate: (assignment, update, running statistics) → why the update must be refused, or None.
        clip: largest number of a change that is sent, times the client's share of the largest client's examples.
        quorum: share of a round's clients that must hold out to the end, and that could unmask a client together.
        weighs: True if clients are weighed by their examples.
    """

    validate: Callable[[Assignment, Update, Tensors], str | None] = lambda assignment, update, buffers: None
    clip: float = 1.0
    quorum: float = 0.67
    weighs: bool = True

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[Visit]:
        """What came of the assignments, in client order."""
        self.look_for(assignments)
        absent: dict[int, str] = {}
        asked: dict[int, Assignment] = {}
        for assignment in assignments:
            node = self.directory.node(assignment.client)
            if node is None:
                absent[assignment.client] = "its SuperNode is not connected"
            elif node in asked:
                absent[assignment.client] = "another client of its SuperNode takes part"
            else:
                asked[node] = assignment
        try:
            found = self._sum(asked, max(LEAST, math.ceil(self.quorum * len(assignments))), absent)
        except FedstrataError as error:
            found = {}
            absent = {a.client: str(error) for a in asked.values()} | absent
        for assignment in assignments:
            client = assignment.client
            yield found.get(client) or (Absence(client, absent.get(client, "it did not answer in time")), {})

    def _sum(self, asked: Mapping[int, Assignment], least: int, absent: dict[int, str]) -> dict[int, Visit]:
        """The visits of those who held out, each with the mean; why others did not is put into `absent`.

        Raises:
            UsageError: if fewer than `least` hold out, or somebody does not keep to the protocol.
        """
        if len(asked) < least:
            raise UsageError(f"{len(asked)} clients are there, too few to hide in: {least} are needed")
        first = next(iter(asked.values()))
        largest = max(self.directory.parties[a.client].examples for a in asked.values()) if self.weighs else 1
        exchange = Exchange(tuple(asked), least, self.clip, float(max(largest, 1)))
        clients = {node: assignment.client for node, assignment in asked.items()}
        group = str(first.round + 1)

        def stage(configs: Configs) -> Answers:
            return dict(self._ask(configs, {}, len(configs), clients, group, absent))

        exchange.take_keys(stage(exchange.setup()))
        exchange.take_shares(stage(exchange.share_keys()))
        message_ids = {node: self._message(asked[node]) for node in exchange.shared}
        shapes = [first.params[name].shape for name in first.uploads]
        visits = {}
        replies = self._ask(exchange.collect(), message_ids, self.few, clients, group, absent)
        for node, (configs, content) in replies:  # each is added to the sum as it comes
            try:
                visits[clients[node]] = self._read_update(asked[node], content)
                exchange.take_masked(node, configs, shapes)
            except FedstrataError as error:
                visits.pop(clients[node], None)
                absent[clients[node]] = str(error)
        mean = exchange.open_sum(stage(exchange.unmask()))
        found = (torch.from_numpy(np.asarray(x)) for x in mean)
        delta = {n: x.to(first.params[n].dtype) for n, x in zip(first.uploads, found, strict=True)}
        return {client: (replace(update, delta=delta), kept) for client, (update, kept) in visits.items()}

    def _message(self, assignment: Assignment) -> RecordDict:
        return to_records(self.head(assignment), wire.encode(assignment))

    def _read_update(self, assignment: Assignment, content: RecordDict) -> tuple[Update, Any]:
        """A client's update without its change."""
        answer, message = from_records(content, TrainReply, self.limit)
        if answer.lost:
            raise UsageError(self.note_loss(assignment.client, answer))
        update = wire.decode_update(message)
        if update.client != assignment.client or update.delta or update.slots or update.buffers:
            raise UsageError("its update is not what secure aggregation leaves of one")
        nothing = {name: torch.zeros_like(assignment.params[name]) for name in assignment.uploads}
        assert self.state is not None
        sent = replace(update, delta=nothing)  # later it would be in the sum already
        why = self.validate(assignment, sent, self.state.buffers)
        if why is not None:
            raise UsageError(why)
        return update, KEPT if answer.kept else {}

    def _ask(
        self,
        configs: Configs,
        extra: Mapping[int, RecordDict],
        few: int,
        clients: Mapping[int, int],
        group: str,
        absent: dict[int, str],
    ) -> Iterator[tuple[int, Part]]:
        """Send every node its part of a stage; (node, answer) as they come, `few` of them at a time."""
        from flwr.app import ConfigRecord, RecordDict

        message_ids: dict[str, int] = {}
        for node, values in configs.items():
            content = extra.get(node) or RecordDict()
            content[CONFIGS] = ConfigRecord(values)
            message_id = self.transport.send(node, "train", content, group)
            if message_id is None:
                absent[clients[node]] = "its SuperNode is not connected"
            else:
                message_ids[message_id] = node
        for message_id, reply in self.transport.replies(list(message_ids), few):
            node = message_ids[message_id]
            try:
                part = self._part(reply)
            except FedstrataError as error:
                absent[clients[node]] = str(error)
            else:
                yield node, part

    def _part(self, reply: Reply) -> Part:
        """What a node answers to a stage."""
        if reply.content is None:
            raise UsageError(reply.why)
        said = reply.content.config_records.get(CONFIGS)
        if said is None:
            answer, _ = from_records(reply.content, TrainReply, self.limit)
            if answer.refusal:
                raise UsageError(f"it says: {one_line(answer.refusal, 300)}")
        return said or {}, reply.content


Configs = Mapping[int, dict[str, Any]]
"""Node → what its mod is told."""
Part = tuple[Mapping[str, Any], "RecordDict"]
"""What a node's mod says, and everything that came with it."""
Answers = dict[int, Part]


@dataclass(eq=False)
class Exchange:
    """One round of the protocol.

    Args:
        nodes: who takes part.
        threshold: how many shares open a secret.
        clip: largest number that is sent.
        largest: the largest weight of a client.
        keys: nodes that have sent their public keys → the keys.
        shared: nodes that have sent shares of their secrets → {receiver: encrypted share}.
        masked: nodes whose masked vector is in the sum.
        total: that sum: the weight first, then the numbers of every tensor.
    """

    nodes: tuple[int, ...]
    threshold: int
    clip: float
    largest: float
    keys: dict[int, list[bytes]] = field(default_factory=dict)
    shared: dict[int, dict[int, bytes]] = field(default_factory=dict)
    masked: list[int] = field(default_factory=list)
    total: list[Any] = field(default_factory=list)

    def setup(self) -> Configs:
        """Tell everybody the rules."""
        rules = {
            "stage": "setup",
            "sample_num": len(self.nodes),
            "share_num": len(self.nodes),
            "threshold": self.threshold,
            "clipping_range": float(self.clip),
            "target_range": LEVELS,
            "mod_range": MODULUS,
            "max_weight": self.largest,
        }
        return {node: dict(rules) for node in self.nodes}

    def take_keys(self, answers: Answers) -> None:
        """Take up the public keys that nodes have sent."""
        for node, (said, _) in answers.items():
            keys = [said.get("pk1"), said.get("pk2")]
            if all(isinstance(key, bytes) and len(key) < SECRET for key in keys):
                self.keys[node] = [key for key in keys if isinstance(key, bytes)]
        self._enough(len(self.keys))

    def share_keys(self) -> Configs:
        """Tell everybody the others' public keys."""
        known = {str(node): keys for node, keys in self.keys.items()}
        return {node: {**known, "stage": "share_keys"} for node in self.keys}

    def take_shares(self, answers: Answers) -> None:
        """Take up the shares of keys that nodes have sent for each other."""
        for node, (said, _) in answers.items():
            to, secrets = said.get("dsts"), said.get("ctxts")
            if not isinstance(to, list) or not isinstance(secrets, list) or len(to) != len(secrets):
                continue
            sound = all(isinstance(secret, bytes) and len(secret) < SECRET for secret in secrets)
            if sound and set(to) == self.keys.keys() - {node}:
                self.shared[node] = dict(zip(to, secrets, strict=True))
        self._enough(len(self.shared))

    def collect(self) -> Configs:
        """Hand on the shares, and ask for masked vectors."""
        configs = {}
        for node in self.shared:
            sources = [other for other in self.shared if other != node]
            secrets = [self.shared[other][node] for other in sources]
            configs[node] = {"stage": "collect_masked_vectors", "srcs": sources, "ctxts": secrets}
        return configs

    def take_masked(self, node: int, said: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> None:
        """Add a masked vector to the sum.

        Raises:
            UsageError: if it is not of this form.
        """
        parts, wanted = said.get("masked_params"), [(1,), *map(tuple, shapes)]
        if not isinstance(parts, list) or len(parts) != len(wanted):
            raise UsageError("it sent no masked update")
        arrays = [_array(part, shape) for part, shape in zip(parts, wanted, strict=True)]
        self.total = [(a + b) % MODULUS for a, b in zip(self.total, arrays, strict=True)] if self.total else arrays
        self.masked.append(node)

    def unmask(self) -> Configs:
        """Ask for shares: of the own masks of those who sent a vector, of the keys of those who did not."""
        self._enough(len(self.masked))
        gone = [node for node in self.shared if node not in self.masked]
        return {node: {"stage": "unmask", "active_nids": self.masked, "dead_nids": gone} for node in self.masked}

    def open_sum(self, answers: Answers) -> list[np.ndarray[Any, Any]]:
        """The weighted mean, after the masks are taken away.

        Raises:
            UsageError: if too few shares came.
        """
        shares: dict[int, list[bytes]] = {node: [] for node in self.shared}
        for said, _ in answers.values():
            nodes, parts = said.get("nids"), said.get("shares")
            if isinstance(nodes, list) and isinstance(parts, list):
                for node, part in dict(zip(nodes, parts, strict=False)).items():  # opening takes the square of a number
                    if node in shares and isinstance(part, bytes) and len(part) < SECRET:
                        shares[node].append(part)
        total = [array.copy() for array in self.total]
        for node, found in shares.items():
            self._enough(len(found))
            for mask, sign in self._masks(node, found, [array.shape for array in total]):
                total = [(array - sign * part) % MODULUS for array, part in zip(total, mask, strict=True)]
        if any((array > len(self.masked) * LEVELS).any() for array in total):
            raise UsageError("the masks do not cancel: somebody did not keep to the protocol")
        weight = float(total[0][0]) / LEVELS
        if not weight > 0:
            raise UsageError("the clients' weights add up to zero")
        step, shift = 2 * self.clip / LEVELS, len(self.masked) * self.clip
        return [(array * step - shift) / weight for array in total[1:]]

    def _masks(
        self, node: int, shares: list[bytes], shapes: list[tuple[int, ...]]
    ) -> Iterator[tuple[list[np.ndarray[Any, Any]], int]]:
        """The masks that are in the sum because of a node, and their signs."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from flwr.common.secure_aggregation.crypto.shamir import combine_shares
        from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
        from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
        from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

        try:
            if len(set(map(len, shares))) > 1:  # the first one's length would decide how much is done for all
                raise ValueError
            secret = combine_shares(shares)
            if node in self.masked:  # the mask of its own
                yield pseudo_rand_gen(secret, MODULUS, shapes), 1
                return
            key = bytes_to_private_key(secret)
            for other in self.masked:  # the masks between it and those who stayed
                both = generate_shared_key(key, bytes_to_public_key(self.keys[other][0]))
                yield pseudo_rand_gen(both, MODULUS, shapes), 1 if other > node else -1
        except (ValueError, TypeError, AttributeError, IndexError, UnsupportedAlgorithm):
            # Keys and shares are others' bytes: what they turn out to be fails in many ways.
            raise UsageError("the shares of a secret do not fit together") from None

    def _enough(self, found: int) -> None:
        if found < self.threshold:
            raise UsageError(f"{found} of {len(self.nodes)} clients stayed to the end, too few to see the sum")


def _array(data: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A masked tensor; its head is compared with the one that it must have, and never evaluated."""
    size = 8 * math.prod(shape)
    head = data[: max(len(data) - size, 0)] if isinstance(data, bytes) else b""
    length = int.from_bytes(head[8:10], "little")
    wanted = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    if head[:8] != NPY or len(head) != 10 + length or head[10:].strip() != wanted:
        raise UsageError("its masked update does not have the model's shapes")
    return np.frombuffer(data, "<i8", offset=len(head)).reshape(shape) % MODULUS
