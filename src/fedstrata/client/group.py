"""Clients that are trained at once: who they are, what they have in common, and each one's data and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedstrata.client.context import ClientContext, ModelReplica
from fedstrata.client.cost import FlopEstimate, estimate_flops
from fedstrata.client.hooks import Answers
from fedstrata.client.visit import ClientVisit
from fedstrata.core.stacks import Memories, UpdateStack, structure_of
from fedstrata.core.technique import Measure
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Examples, Slots, replace_fields
from fedstrata.data.batching import batch_sizes
from fedstrata.data.examples import sizes
from fedstrata.errors import UsageError


@dataclass(frozen=True, eq=False)
class ClientGroup:
    """Visits that differ in client, seed, data and memory alone.

    Args:
        context: where they are trained.
        template: what the server asks of all of them.
        clients: their numbers.
        seeds: of their random streams.
        examples: everybody's data, by number.
        slots: what techniques send to each of them; mostly the same tensors.
        memories: what each of them remembers; all are alike.
    """

    context: ClientContext
    template: Assignment
    clients: Sequence[int]
    seeds: Sequence[int]
    examples: Sequence[Examples] | Mapping[int, Examples]
    slots: Sequence[Slots]
    memories: Memories

    def __len__(self) -> int:
        return len(self.clients)

    @cached_property
    def replica(self) -> ModelReplica:
        """The model of their architecture."""
        return self.context.replica(self.template.arch)

    @cached_property
    def examples_of_each(self) -> list[int]:
        """How many examples each of them has."""
        size = sizes(self.examples)
        return [size(client) for client in self.clients]

    @cached_property
    def batches(self) -> list[list[int]]:
        """The sizes of each one's batches, step by step."""
        known = {n: batch_sizes(n, self.template.work, False) for n in set(self.examples_of_each)}
        return [known[n] for n in self.examples_of_each]

    @cached_property
    def steps(self) -> list[int]:
        """How many steps each of them takes."""
        return [len(batches) for batches in self.batches]

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """What decides how such a visit is computed."""
        a = self.template
        plan = a.arch, a.trains, a.uploads, a.is_after_training, replace(a.work, lr=0.0)
        return *plan, structure_of(a.slots), self.memories.structures[0]

    def visit(self, place: int) -> ClientVisit:
        """One of the visits."""
        named = {"client": self.clients[place], "seed": self.seeds[place], "slots": self.slots[place]}
        assignment = replace_fields(self.template, **named)
        data = self.examples[self.clients[place]]
        return ClientVisit(self.context, assignment, data, self.memories[place], self.replica)

    def estimate_costs(self) -> tuple[list[float], list[float], FlopEstimate]:
        """(each client's FLOPs, its memory if it were alone, the estimate that they are from).

        The estimate knows every size of batch.
        """
        cache = self.context.cache
        key = ("group", *self.kind)
        known: dict[int, tuple[float, float]] = cache.setdefault(("costs", *self.kind), {})
        for place, examples in enumerate(self.examples_of_each):
            if examples not in known:
                row = self.batches[place]
                cost = estimate_flops(self.visit(place), row, key)
                known[examples] = float(cost.total(examples, row)), float(cost.memory(row))
        estimate: FlopEstimate = cache[key]
        each = [known[examples] for examples in self.examples_of_each]
        return [flops for flops, _ in each], [memory for _, memory in each], estimate

    def describe(self, loss: Sequence[float], flops: Sequence[float], memory: Sequence[float]) -> UpdateStack:
        """The updates of these visits, without tensors."""
        return UpdateStack(
            round=self.template.round,
            method=self.context.method.digest,
            clients=self.clients,
            examples=self.examples_of_each,
            steps=self.steps,
            metrics={"train_loss": loss, "flops": flops, "memory": memory},
            delta={},
        )


@dataclass(frozen=True, eq=False)
class UnreadableExamples:
    """What stands for a client's data where many are trained at once."""

    def __len__(self) -> int:
        raise UsageError(_REFUSAL)

    def batch(self, index: Tensor, augment: Any = None) -> tuple[Tensor, Tensor]:
        """Refused."""
        raise UsageError(_REFUSAL)

    def labels(self) -> Tensor:
        """Refused."""
        raise UsageError(_REFUSAL)

    def counts(self) -> Tensor:
        """Refused."""
        raise UsageError(_REFUSAL)

    def outputs(self, place: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Refused."""
        raise UsageError(_REFUSAL)

    def observe(self, watch: Mapping[str, Callable[[Tensor], None]]) -> None:
        """Refused."""
        raise UsageError(_REFUSAL)

    def sum_rows(self, rows: Tensor) -> tuple[Tensor, Tensor | int]:
        """Refused."""
        raise UsageError(_REFUSAL)

    def sizes(self) -> Tensor:
        """Refused."""
        raise UsageError(_REFUSAL)

    def measure_gradients(self, parts: int, measure: Measure) -> Tensors:
        """Refused."""
        raise UsageError(_REFUSAL)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Refused."""
        raise UsageError("a technique that vectorises draws random numbers in its doors prepare and draws alone")


_REFUSAL = (
    "a technique that vectorises takes class counts from view.counts(), and reads no examples: what needs them belongs "
    "into its door prepare"
)


def shared_answers(prepared: Slots, drawn: Slots, counts: Callable[[], Tensor] | None = None) -> Answers:
    """What hooks that serve many clients are told.

    Args:
        prepared: what techniques prepared.
        drawn: the random numbers of all steps, by technique.
        counts: gives the class counts, if they may be asked for.
    """
    data = UnreadableExamples()
    return Answers(
        rng=lambda name: torch.Generator(),  # vmap refuses whatever is drawn from it
        prepare=lambda technique, view: prepared.get(technique.name, {}),
        draws=lambda technique, view: (
            lambda batch: {n: t[batch.step] for n, t in drawn.get(technique.name, {}).items()}
        ),
        normal=lambda name, rng: data.normal,
        counts=counts or data.counts,
        outputs=data.outputs,
        observe=data.observe,
        sum_rows=data.sum_rows,
        sizes=data.sizes,
        measure_gradients=data.measure_gradients,
    )


class SharedAssignment(Assignment):
    """An assignment of which only what all clients of a kind have in common may be read: hooks serve many of them."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("round", "client", "seed"):
            raise UsageError(f"a technique that vectorises cannot read its assignment's {name}: many clients share it")
        return super().__getattribute__(name)
