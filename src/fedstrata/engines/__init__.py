"""How a round's clients are run: an engine turns assignments into updates, in client order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from fedstrata.core import Assignment, Slots, Update
from fedstrata.data.examples import Examples
from fedstrata.engines.serial import Recall, Serial, Wire
from fedstrata.errors import UsageError
from fedstrata.spec import Table, lookup
from fedstrata.workshop import Workshop

ENGINES: Table = {"serial": Serial, "wire": Wire}


class Engine(Protocol):
    """Runs one round's assignments."""

    def run(self, assignments: Sequence[Assignment], recall: Recall) -> Iterator[tuple[Update, Slots]]: ...

    def close(self) -> None: ...


def build_engine(name: str, workers: int, shop: Workshop, clients: Sequence[Examples]) -> Engine:
    """The engine of a name; `workers` is how many clients train at once."""
    target = lookup("engine", ENGINES, name)
    if workers != 1:
        raise UsageError(f"the engine '{name}' trains one client at a time: workers must be 1, not {workers}")
    engine: Engine = target(shop, clients)
    return engine
