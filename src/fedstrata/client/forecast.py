"""What a visit will cost, before anybody trains: the bytes and the FLOPs that decide how long a device takes.

A server that waits for some clients, or orders their updates by time, has to know before it trains them in a
simulation. So each kind of visit is looked at once, on the side: one step with each size of batch, and what techniques
do before and after. The result does not depend on which client of a kind was looked at first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from fedstrata import wire
from fedstrata.client.context import ClientContext
from fedstrata.client.cost import StepCost, count_step
from fedstrata.client.hooks import NO_HOOKS, HookSet
from fedstrata.client.large_params import NOTHING_LARGE, LargeParams, find_large
from fedstrata.client.step import AutogradSteps
from fedstrata.client.visit import ClientVisit
from fedstrata.core.rng import preserve_rng
from fedstrata.core.stacks import structure_of
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Examples, Slots, Update, replace_fields
from fedstrata.data.batching import batch_sizes
from fedstrata.models.flops import FlopCount
from fedstrata.system.devices import HOST, assignment_on, slots_on, to_device


@dataclass(frozen=True)
class VisitCost:
    """What a visit takes: bytes down, FLOPs, bytes up; and the most bytes that one of its steps holds at once."""

    down: int
    flops: int
    up: int
    memory: int


@dataclass(eq=False)
class _Kind:
    """What is known of visits of one kind: (what trains, rows) → what a step takes, and of what comes after steps."""

    steps: dict[tuple[tuple[str, ...], int], StepCost] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    after: int = 0
    sent: Update | None = None


class Forecast:
    """Tells what visits cost; the first time that it sees a kind of visit, it looks at one.

    What `cache_prefix` saves is not foreseen, nor are the digits of a training loss in a message (some twenty bytes).

    Args:
        context: with a replica to look with, which whoever trains on it loads again.
        clients: everybody's examples.
    """

    def __init__(self, context: ClientContext, clients: Sequence[Examples]) -> None:
        self._context, self._clients = context, clients
        self._kinds: dict[Hashable, _Kind] = {}

    def cost(self, assignment: Assignment, memory: Slots) -> VisitCost:
        """What a client's visit will cost; `memory` is what it remembers."""
        data = self._clients[assignment.client]
        known = self._kinds.setdefault(_kind_of(assignment, memory), _Kind())
        replica = self._context.replica(assignment.arch)
        steps = Counter(
            (trains, size)
            for trains, work in zip(_parts(assignment), assignment.works, strict=True)
            for size in (batch_sizes(len(data), work, replica.batch_norm) if trains else ())
        )
        missing = steps.keys() - known.steps.keys()
        if known.sent is None or len(data) not in known.before or missing:
            self._look(assignment, data, memory, known, missing)
        assert known.sent is not None
        flops = known.before[len(data)] + known.after + sum(known.steps[step].flops * n for step, n in steps.items())
        most = max((known.steps[step].memory for step in steps), default=0)
        metrics = {**known.sent.metrics, "flops": float(flops)}
        sent = replace_fields(known.sent, examples=len(data), steps=steps.total(), metrics=metrics)
        return VisitCost(wire.size(assignment), flops, wire.size(sent), most)

    def _look(
        self,
        assignment: Assignment,
        data: Examples,
        memory: Slots,
        known: _Kind,
        missing: set[tuple[tuple[str, ...], int]],
    ) -> None:
        """Make a visit to a client, as short as will do, of which nothing is kept but what it cost."""
        context = self._context
        a, held = assignment_on(context.device, assignment), slots_on(context.device, memory)
        visit = ClientVisit(context, a, data, held, context.replica(a.arch))
        large = NOTHING_LARGE if a.turns else find_large(visit)
        with preserve_rng(), large.borrow():
            visit.prepare(but=large.names)
            hooks = NO_HOOKS
            if context.hooked:
                with FlopCount() as counter:
                    hooks = visit.build_hooks()
                known.before[len(data)] = counter.total
                visit.prepare()
            known.before.setdefault(len(data), 0)
            steps = _look_at_steps(visit, hooks, known, missing, large)
            if known.sent is None:
                _look_at_end(visit, steps, known)


def _parts(a: Assignment) -> list[tuple[str, ...]]:
    """What trains in each turn of a visit."""
    return [turn.trains for turn in a.turns] or [a.trains]


def _kind_of(a: Assignment, memory: Slots) -> Hashable:
    """What settles the cost of a visit besides the client's number of examples."""
    plan = a.arch, a.trains, a.uploads, a.upload_buffers, a.update_buffers, a.turns, a.is_after_training
    return *plan, replace_fields(a.work, lr=0.0), structure_of(a.slots), tuple(memory)


def _look_at_steps(
    visit: ClientVisit,
    hooks: HookSet,
    known: _Kind,
    missing: set[tuple[tuple[str, ...], int]],
    large: LargeParams,
) -> AutogradSteps:
    """Take a step of each size that is not known yet: the steps, with what they summed up."""
    context, a = visit.context, visit.assignment
    tallies: Slots = {}
    for trains in _parts(a):
        part = replace_fields(visit, assignment=replace_fields(a, trains=trains))
        part.freeze()
        steps = AutogradSteps(visit.replica, context.method.buffers, hooks, a.work, visit.replica.model, large)
        steps.tallies = tallies
        with steps.running(visit.replica, nobody_looks=not hooks.hooks):
            for size in sorted(size for names, size in missing if names == trains):
                x, y = visit.data.batch(torch.arange(size), context.augment)
                inputs = visit.replica.inputs(to_device(x, context.device))
                _, known.steps[trains, size] = count_step(steps, inputs, to_device(y, context.device))
        tallies = steps.tallies
    visit.freeze()
    return steps


def _look_at_end(visit: ClientVisit, steps: AutogradSteps, known: _Kind) -> None:
    """What techniques do after the steps, and what travels: of numbers that mean nothing."""
    a, context, replica = visit.assignment, visit.context, visit.replica
    delta: Tensors = {n: torch.zeros_like(replica.params[n], memory_format=torch.contiguous_format) for n in a.uploads}
    with FlopCount() as counter:
        slots, _ = steps.hooks.finish(delta, steps.tallies, visit.memory)
        sent = steps.hooks.build_upload(delta)
    known.after = counter.total
    names = tuple(replica.buffers) if a.upload_buffers is None else a.upload_buffers
    silent = context.method.buffers == "drop" or not a.trains
    update = Update(
        round=0,
        client=0,
        method=context.method.digest,
        examples=0,
        steps=0,
        delta=slots_on(HOST, {"": sent})[""],
        buffers={} if silent else {n: replica.buffers[n] for n in names},
        slots=slots_on(HOST, slots),
        metrics={"train_loss": 0.0, "flops": 0.0, "memory": 0.0},
    )
    encoding = context.encoding(a.arch)
    if encoding is not None:  # into lengths that do not depend on the numbers
        update, _ = encoding.encode(update, slots_on(HOST, visit.memory), assignment_on(HOST, a))
    known.sent = replace_fields(
        update,
        delta=_shapes(update.delta),
        buffers=_shapes(update.buffers),
        slots={name: _shapes(slot) for name, slot in update.slots.items()},
    )


def _shapes(tensors: Tensors) -> Tensors:
    """Tensors without their numbers, which take no memory."""
    return {n: torch.empty_like(t, device="meta") for n, t in tensors.items()}
