"""A grid in this process, whose nodes can be told to fail; and federations on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

pytest.importorskip("flwr")

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

import fedstrata as fs
from fedstrata.flower.client import client_app
from fedstrata.flower.server import ServerSpec, server_app
from tests.engines.worlds import EIGHT, Pair, points, staged
from tests.flower import task

CHAIN: dict[str, Any] = {"method": EIGHT, "rounds": 5, "participation": 4, "batch_size": 5, "lr": 0.05}
"""The run that has the same bits everywhere: four of eight clients in a round with all strata, and in one with each."""


def at_home(out: Path, **how: Any) -> Path:
    """Run the chain where all data is."""
    clients = [task.data(client) for client in range(task.CLIENTS)]
    fs.Federation(task.model(), clients, task.test(), out=out, **{**CHAIN, **how}).fit()
    return out


Fault = Callable[[Message, Callable[[], Message]], Message | None]
"""(what was asked, what would answer it) → the reply, or None for none."""


class Loopback:
    """Flower's grid, as far as it is used: every node is a ClientApp in this process."""

    def __init__(self, app: ClientApp, configs: Sequence[dict[str, Any]]) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 7, 1
        self.app = app
        self.contexts = {100 + n: context(100 + n, config) for n, config in enumerate(configs)}
        self.online = set(self.contexts)
        self.faults: dict[int, Fault] = {}
        self.sent: list[Message] = []
        self.replies: dict[str, Message] = {}
        self._numbers = itertools.count()

    def get_node_ids(self) -> Iterable[int]:
        return list(self.online)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = number = str(next(self._numbers))
            self.sent.append(message)
            reply = self._answer(node, message)
            if reply is not None:
                self.replies[number] = reply
            yield number

    def _answer(self, node: int, message: Message) -> Message | None:
        def answer() -> Message:
            try:
                return self.app(message, self.contexts[node])
            except Exception as error:
                return Message(Error(2, repr(error)), reply_to=message)

        fault = self.faults.get(node) if message.metadata.message_type == "train" else None
        return answer() if fault is None else fault(message, answer)

    def pull_messages(self, numbers: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(number) for number in numbers if number in self.replies]


def context(node: int, config: dict[str, Any]) -> Context:
    """A node's context, with nothing in it yet."""
    return Context(7, node, config, RecordDict(), {})


def sites(clients: int) -> list[dict[str, Any]]:
    """A node for each client."""
    return [{"partition-id": n, "num-partitions": clients} for n in range(clients)]


def data(partition: int) -> Pair:
    """A client's points."""
    return points(10 + 3 * partition, partition)


def plan(model: Any = staged, **given: Any) -> ServerSpec:
    """A server's plan, small and quick, through the public door."""
    test = given.pop("test", points(40, 99))
    settings = {"rounds": 4, "participation": 3, "batch_size": 5, "lr": 0.05, "checkpoint_seconds": 0.0, **given}
    server_app(model, test=test, **settings)  # what it refuses is refused
    own: dict[str, Any] = {"out": None, "resume": False, "timeout": 5.0, "wait": 5.0, "clients": None}
    own |= {"secure": False, "secure_clip": 1.0, "secure_quorum": 0.67, "dp_clip": 0.0, "dp_noise": 0.0}
    own |= {name: settings.pop(name) for name in list(settings) if name in own}
    arch_of, public, trusted = (settings.pop(name, None) for name in ("arch_of", "public", "trusted"))
    archs = settings.pop("archs", None) or {}
    return ServerSpec(model, test, archs, arch_of, public, trusted, own, {"method": "fedavg", **settings})


def silos(grid: Loopback, **given: Any) -> Any:
    """A federation that has run on the grid."""
    return plan(**given).with_config({}).run(grid)  # type: ignore[arg-type]


def grid(clients: int = 5, model: Any = staged, keep: Path | None = None, **given: Any) -> Loopback:
    """A grid of as many nodes as clients."""
    return Loopback(client_app(model, data, keep=keep, **given), sites(clients))


def made(*names: str) -> Callable[[], nn.Module]:
    """What makes a part of the model of stages."""
    return lambda: staged(*names)
