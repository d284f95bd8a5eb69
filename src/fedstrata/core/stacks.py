"""Many clients as one: a round's assignments and updates that are alike, as one template, vectors and stacked tensors.

Whatever costs Python time once per client is the whole cost of a round of tiny visits. So what is the same for many is
held once, and one client's `Assignment` or `Update` is made where somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, overload

from fedstrata.core.lazy import torch
from fedstrata.core.tensors import Tensors, align, clone
from fedstrata.core.types import Assignment, Slots, Update, Visit, replace_fields

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


def pick(values: Sequence[T] | Mapping[int, T], places: Iterable[int]) -> list[T]:
    """The values at some places."""
    return [*map(values.__getitem__, places)]


@dataclass(frozen=True, eq=False)
class Assignments(Sequence[Assignment]):
    """A round's assignments, or some of them, in order.

    Args:
        templates: what assignments of a kind have in common: all but client and seed.
        kinds: the template of each.
        clients: the client of each.
        seeds: the seed of each.
    """

    templates: tuple[Assignment, ...]
    kinds: Sequence[int]
    clients: Sequence[int]
    seeds: Sequence[int]

    @staticmethod
    def of(assignments: Sequence[Assignment]) -> Assignments:
        """Assignments that were made one by one, each of a kind of its own."""
        if isinstance(assignments, Assignments):
            return assignments
        made = tuple(assignments)
        return Assignments(made, range(len(made)), [a.client for a in made], [a.seed for a in made])

    def __len__(self) -> int:
        return len(self.clients)

    @overload
    def __getitem__(self, position: int) -> Assignment: ...
    @overload
    def __getitem__(self, position: slice) -> Assignments: ...
    def __getitem__(self, position: int | slice) -> Assignment | Assignments:
        if isinstance(position, slice):
            return self.select(range(len(self))[position])
        client, seed = self.clients[position], self.seeds[position]
        return replace_fields(self.templates[self.kinds[position]], client=client, seed=seed)

    def __iter__(self) -> Iterator[Assignment]:
        for kind, client, seed in zip(self.kinds, self.clients, self.seeds, strict=True):
            yield replace_fields(self.templates[kind], client=client, seed=seed)

    def template(self, position: int) -> Assignment:
        """What the assignment at a position has in common with all of its kind."""
        return self.templates[self.kinds[position]]

    def select(self, positions: Sequence[int]) -> Assignments:
        """Those at some positions."""
        kinds = pick(self.kinds, positions)
        used = sorted(set(kinds))
        place = {kind: new for new, kind in enumerate(used)}
        return Assignments(
            tuple(self.templates[kind] for kind in used),
            pick(place, kinds),
            pick(self.clients, positions),
            pick(self.seeds, positions),
        )

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {client: position for position, client in enumerate(self.clients)}

    def of_client(self, client: int) -> Assignment | None:
        """What a client was asked for; None if it was asked for nothing."""
        position = self._positions.get(client)
        return None if position is None else self[position]

    def kinds_of(self, clients: Sequence[int]) -> list[int | None]:
        """The kinds of what clients were asked for; None for one that was asked for nothing."""
        return [None if position is None else self.kinds[position] for position in map(self._positions.get, clients)]


@dataclass(frozen=True, eq=False)
class Memories(Sequence[Slots]):
    """What some clients remember, in order: rows of stacked tensors, which are shared with whoever holds them.

    What is computed with lies as torch's own tensors do, wherever its row is: a row that does not is copied.

    Args:
        stacks: memories that are alike, each tensor with a row for every one of them.
        kinds: the stack of each client.
        rows: its row there.
    """

    stacks: tuple[Slots, ...]
    kinds: Sequence[int]
    rows: Sequence[int]

    @staticmethod
    def of(memories: Sequence[Slots]) -> Memories:
        """Memories that were made one by one, each in a stack of its own, in the same memory."""
        if isinstance(memories, Memories):
            return memories
        stacks = tuple({name: _one_row(slot) for name, slot in memory.items()} for memory in memories)
        return Memories(stacks, range(len(stacks)), [0] * len(stacks))

    def __len__(self) -> int:
        return len(self.kinds)

    @overload
    def __getitem__(self, position: int) -> Slots: ...
    @overload
    def __getitem__(self, position: slice) -> Memories: ...
    def __getitem__(self, position: int | slice) -> Slots | Memories:
        if isinstance(position, slice):
            return self.select(range(len(self))[position])
        row = self.rows[position]
        stack = self.stacks[self.kinds[position]]
        return {name: {n: align(t[row]) for n, t in slot.items()} for name, slot in stack.items()}

    def select(self, positions: Sequence[int]) -> Memories:
        """Those at some positions."""
        return Memories(self.stacks, pick(self.kinds, positions), pick(self.rows, positions))

    @cached_property
    def _structures(self) -> tuple[tuple[Any, ...], ...]:
        """Names, types and shapes of the memories of each stack."""
        return tuple(row_structure(stack) for stack in self.stacks)

    @property
    def structures(self) -> list[tuple[Any, ...]]:
        """Names, types and shapes of each client's memory."""
        return pick(self._structures, self.kinds)

    def by_stack(self) -> Iterator[tuple[Slots, Sequence[int], Sequence[int]]]:
        """(a stack, the positions of the clients that are in it, their rows), one stack after the other."""
        if len(self.stacks) == 1:
            yield self.stacks[0], range(len(self)), self.rows
            return
        found: dict[int, list[int]] = {}
        for position, kind in enumerate(self.kinds):
            found.setdefault(kind, []).append(position)
        for kind, positions in found.items():
            yield self.stacks[kind], positions, pick(self.rows, positions)

    def regroup(self, change: Callable[[Slots], T]) -> tuple[list[T], list[int], list[int]]:
        """(what becomes of each stack, from which others' rows were left out; each client's kind, its row)."""
        changed, kinds, places = list[T](), [0] * len(self), list(range(len(self)))
        for stack, positions, rows in self.by_stack():
            if len(positions) < len(self):
                for place, position in enumerate(positions):
                    kinds[position], places[position] = len(changed), place
            changed.append(change(gather_rows(stack, rows)))
        return changed, kinds, places

    def gather(self) -> Slots:
        """Memories that are all alike as one stack, a row for each of them in order."""
        parts = list(self.by_stack())
        gathered = [gather_rows(stack, rows) for stack, _, rows in parts]
        if len(parts) == 1:
            return {name: {n: align(t) for n, t in slot.items()} for name, slot in gathered[0].items()}
        places = torch.tensor([position for _, positions, _ in parts for position in positions])
        order = torch.empty_like(places).scatter_(0, places, torch.arange(len(places)))
        return {
            name: {n: torch.cat([part[name][n] for part in gathered]).index_select(0, order) for n in slot}
            for name, slot in gathered[0].items()
        }


def gather_rows(stack: Slots, rows: Sequence[int]) -> Slots:
    """Rows of stacked slots, in the same memory if they follow each other."""
    if not stack:
        return stack
    after = rows[0] + len(rows)
    if rows[-1] == after - 1 and list(rows) == list(range(rows[0], after)):
        return {name: {n: t[rows[0] : after] for n, t in slot.items()} for name, slot in stack.items()}
    index = torch.tensor(rows)
    return {name: {n: t.index_select(0, index) for n, t in slot.items()} for name, slot in stack.items()}


@dataclass(eq=False)
class UpdateStack:
    """Updates that are alike, of clients of one round: vectors of what they say, and tensors with a row for each.

    Args:
        round: that they answer.
        method: digest of the method that the clients ran.
        clients: whose they are.
        examples: number of each one's examples.
        steps: that each one took.
        metrics: by name, a number for each.
        delta, buffers, slots: the tensors of the updates.
        memory: what the clients will remember.
        finite: True if this process, or one of its workers, has seen that all numbers in the tensors are finite.
        sound: whether the server has found nothing wrong with any of them; None if it has not looked.
        frame: bytes of a message but for the numbers that differ from client to client; None if nobody has counted.
    """

    round: int
    method: str
    clients: Sequence[int]
    examples: Sequence[int]
    steps: Sequence[int]
    metrics: dict[str, Sequence[float]]
    delta: Tensors
    buffers: Tensors = field(default_factory=dict)
    slots: Slots = field(default_factory=dict)
    memory: Slots = field(default_factory=dict)
    finite: bool = False
    sound: bool | None = None
    frame: int | None = None

    @staticmethod
    def of(visits: Sequence[tuple[Update, Slots]]) -> UpdateStack:
        """Updates whose tensors have the same names, types and shapes, and what their clients will remember."""
        updates, memories = [update for update, _ in visits], [memory for _, memory in visits]
        first = updates[0]
        return UpdateStack(
            round=first.round,
            method=first.method,
            clients=[update.client for update in updates],
            examples=[update.examples for update in updates],
            steps=[update.steps for update in updates],
            metrics={name: [update.metrics[name] for update in updates] for name in first.metrics},
            delta=_stack_rows([update.delta for update in updates]),
            buffers=_stack_rows([update.buffers for update in updates]),
            slots={name: _stack_rows([update.slots[name] for update in updates]) for name in first.slots},
            memory={name: _stack_rows([memory[name] for memory in memories]) for name in memories[0]},
            finite=all(update.finite for update in updates),
        )

    def __len__(self) -> int:
        return len(self.clients)

    def without_tensors(self) -> UpdateStack:
        """What it says, for a message."""
        return self.with_tensors({}, {}, {}, {})

    def with_tensors(self, delta: Tensors, buffers: Tensors, slots: Slots, memory: Slots) -> UpdateStack:
        """The same with other tensors."""
        new = replace_fields(self, delta=delta, buffers=buffers, slots=slots, memory=memory)
        for cut in ("_rows", "_slot_rows"):
            vars(new).pop(cut, None)
        return new

    def copy(self) -> UpdateStack:
        """The same in memory of its own."""
        slots = {name: clone(slot) for name, slot in self.slots.items()}
        memory = {name: clone(slot) for name, slot in self.memory.items()}
        return self.with_tensors(clone(self.delta), clone(self.buffers), slots, memory)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that travel."""
        yield from self.delta.values()
        yield from self.buffers.values()
        for slot in self.slots.values():
            yield from slot.values()

    @cached_property
    def _rows(self) -> tuple[_Rows, _Rows]:
        """(deltas, buffers), cut into rows in one go."""
        return _cut(self.delta), _cut(self.buffers)

    @cached_property
    def _slot_rows(self) -> dict[str, _Rows]:
        """Slots, cut into rows in one go."""
        return {name: _cut(slot) for name, slot in self.slots.items()}

    def visit(self, row: int) -> tuple[Update, Slots]:
        """(a client's update, what it will remember), in the same memory."""
        delta, buffers = ({n: rows[row] for n, rows in part.items()} for part in self._rows)
        update = replace_fields(self.bare(row), delta=delta, buffers=buffers, slots=self.slots_of(row))
        return update, Memories((self.memory,), (0,), (row,))[0]

    def update(self, row: int) -> Update:
        """A client's update alone: where no others are looked at, nothing is cut into rows."""
        delta, buffers = ({n: t[row] for n, t in part.items()} for part in (self.delta, self.buffers))
        slots = {name: {n: t[row] for n, t in slot.items()} for name, slot in self.slots.items()}
        return replace_fields(self.bare(row), delta=delta, buffers=buffers, slots=slots)

    def slots_of(self, row: int) -> Slots:
        """What techniques send of a client."""
        return {name: {n: rows[row] for n, rows in slot.items()} for name, slot in self._slot_rows.items()}

    def memories(self, rows: Sequence[int]) -> Memories:
        """What clients will remember."""
        return Memories((self.memory,), [0] * len(rows), rows)

    def bare(self, row: int) -> Update:
        """A client's update without its tensors."""
        return Update(
            round=self.round,
            client=self.clients[row],
            method=self.method,
            examples=self.examples[row],
            steps=self.steps[row],
            delta={},
            metrics={name: values[row] for name, values in self.metrics.items()},
            finite=self.finite,
        )


@dataclass(frozen=True, eq=False)
class VisitBlock:
    """Visits that follow each other in client order, as rows of a stack."""

    stack: UpdateStack
    rows: Sequence[int]

    @property
    def clients(self) -> list[int]:
        """Whose visits these are."""
        return pick(self.stack.clients, self.rows)

    def visits(self) -> Iterator[Visit]:
        """The visits one by one."""
        return map(self.stack.visit, self.rows)


Visits = Visit | VisitBlock
"""What an engine hands on: one visit, or several at once."""


_Rows = dict[str, tuple["Tensor", ...]]


def _cut(tensors: Tensors) -> _Rows:
    return {name: tensor.unbind() for name, tensor in tensors.items()}


def _one_row(tensors: Tensors) -> Tensors:
    return {name: tensor.unsqueeze(0) for name, tensor in tensors.items()}


def _stack_rows(many: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([tensors[name] for tensors in many]) for name in many[0]}


def structure_of(slots: Mapping[str, Tensors]) -> tuple[Any, ...]:
    """Names, types and shapes of slots."""
    return tuple((name, tuple((n, t.dtype, t.shape) for n, t in slot.items())) for name, slot in slots.items())


def row_structure(stacked: Mapping[str, Tensors]) -> tuple[Any, ...]:
    """Names, types and shapes of each row of stacked slots."""
    return tuple((name, tuple((n, t.dtype, t.shape[1:]) for n, t in slot.items())) for name, slot in stacked.items())


def expand(visits: Iterable[Visits]) -> Iterator[Visit]:
    """Visits one by one, whatever they come as."""
    for item in visits:
        if isinstance(item, VisitBlock):
            yield from item.visits()
        else:
            yield item
