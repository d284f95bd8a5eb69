"""Examples as a client sees them whose data are wrong: a view over its own, batch by batch; nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

from fedstrata.core.lazy import torch
from fedstrata.core.parts import Parts
from fedstrata.core.types import Augment, Examples
from fedstrata.data.examples import join_examples
from fedstrata.data.standardise import Standards, measure_clients
from fedstrata.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from fedstrata.server.setup import Setup

Spoil = Callable[[Any, "Tensor"], Any]
"""(inputs or targets of some examples, their places among the client's own) → what the client takes them for."""


def keep(part: Any, places: Tensor) -> Any:
    """The same."""
    return part


@dataclass(frozen=True, eq=False)
class SpoiltExamples:
    """A client's examples, seen wrongly.

    Args:
        examples: as they are.
        inputs: what the client takes inputs for, as the model gets them: scaled and augmented.
        targets: what it takes targets for.
    """

    examples: Examples
    inputs: Spoil = keep
    targets: Spoil = keep

    @property
    def whose(self) -> str:
        """Of whom a refusal speaks."""
        return getattr(self.examples, "whose", "")

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, index: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the examples at `index`."""
        x, y = self.examples.batch(index, augment)
        return self.inputs(x, index), self.targets(y, index)

    def labels(self) -> Tensor:
        """All labels, in order."""
        found: Tensor = self.targets(self.examples.labels(), torch.arange(len(self.examples)))
        return found


@dataclass(frozen=True, eq=False)
class SpoiltClients(Sequence[Examples]):
    """Everybody's examples, some clients' seen wrongly."""

    clients: Sequence[Examples]
    spoilt: Mapping[int, Examples]

    def __len__(self) -> int:
        return len(self.clients)

    @overload
    def __getitem__(self, client: int) -> Examples: ...
    @overload
    def __getitem__(self, client: slice) -> list[Examples]: ...
    def __getitem__(self, client: int | slice) -> Examples | list[Examples]:
        if isinstance(client, slice):
            return [self[c] for c in range(*client.indices(len(self)))]
        number = client + len(self) if client < 0 else client
        return self.spoilt[number] if number in self.spoilt else self.clients[client]


def real_clients(clients: Sequence[Examples]) -> Sequence[Examples]:
    """Everybody's examples as they are."""
    return clients.clients if isinstance(clients, SpoiltClients) else clients


def map_real_numbers(x: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Inputs with all parts that are real numbers through a function; others, such as tokens, stay."""
    if isinstance(x, Parts):
        return x.map(lambda part: map_real_numbers(part, function))
    return function(x) if x.is_floating_point() else x


def check_real_numbers(name: str, sample: Any) -> None:
    """Refuse inputs of whole numbers, such as tokens."""
    parts = sample.tensors.values() if isinstance(sample, Parts) else [sample]
    if not any(part.is_floating_point() for part in parts):
        raise UsageError(f"'{name}' changes inputs that are real numbers, and these are whole ones")


def _apply(standards: Standards, clients: Sequence[Examples], client: int, test: Examples) -> Examples:
    """A client's own test on the common scale, by its training data as it is without faults."""
    real = real_clients(clients)
    if real is clients or clients[client] is real[client] or not len(real[client]):
        return standards.apply(test, client)
    return standards.apply_measured(test, real[client])


def standardise_inputs(setup: Setup, without: Collection[int], own_test: bool) -> Setup:
    """Everybody's inputs on one scale, as each client sees them: faults in them come before it.

    Test examples are as they are, whatever happens to a client's training data, and so is what they are brought to.

    Args:
        setup: what a run is made of.
        without: clients that do not count for what is usual.
        own_test: True if the test set is all clients' own test examples.
    """
    clients, tests, test = setup.clients, setup.client_tests, setup.test
    present = {client: clients[client] for client in range(len(clients)) if len(clients[client])}
    standards = measure_clients({client: held for client, held in present.items() if client not in without})
    own = (
        None
        if tests is None
        else [None if t is None else _apply(standards, clients, c, t) for c, t in enumerate(tests)]
    )
    if own_test and own is not None:
        test = join_examples([examples for examples in own if examples is not None])
    elif test is not None:
        test = standards.apply(test)
    return replace(
        setup,
        clients=SpoiltClients(real_clients(clients), {c: standards.apply(held, c) for c, held in present.items()}),
        client_tests=own,
        test=test,
        public=None if setup.public is None else standards.apply(setup.public),
        trusted=None if setup.trusted is None else standards.apply(setup.trusted),
    )
