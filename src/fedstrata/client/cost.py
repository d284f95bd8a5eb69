"""What a visit costs, in FLOPs and in memory.

Each kind of work is counted once, beside the training, and known from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedstrata.client.dropout import count_calls
from fedstrata.client.hooks import HookSet
from fedstrata.client.step import AutogradSteps, CachedPrefix
from fedstrata.client.visit import ClientVisit
from fedstrata.core.optim import build_optimizer
from fedstrata.core.rng import preserve_rng
from fedstrata.models.flops import FlopCount
from fedstrata.models.memory import MemoryCount, storage_bytes
from fedstrata.system.devices import to_device

T = TypeVar("T")


class StepCost(NamedTuple):
    """What a step takes: operations, and the most bytes that it holds at once."""

    flops: int
    memory: int


class CostMeter:
    """The FLOPs of one visit, and the most memory that one of its steps takes.

    Counting every step would cost more than training. So a kind of work is counted at its first, real execution in this
    worker: what names it here (sub-model, plan, hooks, inputs) settles the number of its matrix products and
    convolutions, and the sizes of all that it makes.
    """

    def __init__(self, visit: ClientVisit) -> None:
        a = visit.assignment
        self.total = self.memory = 0
        self._visit, self._known = visit, visit.context.costs
        self._plan = (a.arch, a.trains, a.uploads, a.is_after_training)
        self._estimate: FlopEstimate | None = None
        self._steps: dict[Any, StepCost] | None = None

    def count(self, what: str, compute: Callable[[], T], *settled_by: Hashable) -> T:
        """Do work that a visit does once, and add what it costs.

        Args:
            what: the work's name.
            compute: does it.
            settled_by: what settles its cost besides the plan, the size of the data, and what techniques were sent and
                remember.
        """
        a, held = self._visit.assignment, tuple(self._visit.memory)
        return self._count((what, *self._plan, tuple(a.slots), held, len(self._visit.data), *settled_by), compute)

    def estimate_steps(self, sizes: Iterable[int], hooks: HookSet) -> None:
        """Learn on the side what steps of these sizes cost: a compiled step cannot be counted while it runs.

        The replica is to be prepared again.
        """
        self._estimate = estimate_flops(self._visit, sizes, ("steps", *self._plan, *hooks.signature))

    def count_step(self, steps: AutogradSteps, x: Tensor, y: Tensor) -> Tensor:
        """Take a step, and add what it costs: the task's loss."""
        if self._estimate is not None:
            self._add(self._estimate.steps[len(x)])
            return steps.step(x, y)
        if self._steps is None:
            kept = len(self._visit.data) if isinstance(steps.forward, CachedPrefix) else 0
            kind = ("step", kept, *self._plan, *steps.hooks.signature)
            self._steps = self._known.setdefault(kind, {})
        known = self._steps.get(x.shape)
        if known is not None:
            self._add(known)
            return steps.step(x, y)
        loss, self._steps[x.shape] = count_step(steps, x, y)
        self._add(self._steps[x.shape])
        return loss

    def _add(self, cost: StepCost) -> None:
        """Note a step."""
        self.total += cost.flops
        if cost.memory > self.memory:
            self.memory = cost.memory

    def _count(self, kind: tuple[Any, ...], compute: Callable[[], T]) -> T:
        known = self._known.get(kind)
        if known is not None:
            self.total += known
            return compute()
        with FlopCount() as counter:
            result = compute()
        self._known[kind] = counter.total
        self.total += counter.total
        return result


def count_step(steps: AutogradSteps, x: Tensor, y: Tensor) -> tuple[Tensor, StepCost]:
    """Take a step: (the task's loss, what the step took).

    Beside what it makes, it holds the model, its optimiser's state and the batch. What techniques do between the passes
    and the move is in its FLOPs alone: what they hold depends on which step it is.
    """
    held, move = resting_bytes(steps) + x.nbytes + y.nbytes, steps.move
    memory = [0]
    passes = partial(_watch, steps.differentiate, memory)
    vars(steps).update(differentiate=passes, move=lambda grads: _watch(move, memory, grads, given=grads))
    try:
        with FlopCount() as counter:
            loss = steps.step(x, y)
    finally:
        vars(steps).pop("differentiate")
        steps.move = move
    return loss, StepCost(counter.total, held + max(memory))


def _watch(run: Callable[..., T], peaks: list[int], *args: Any, given: Iterable[Tensor | None] = ()) -> T:
    """Run a part of a step, and note the most bytes that it holds of what it is given and makes."""
    with MemoryCount() as counter:
        found = run(*args)
    peaks.append(storage_bytes(given) + counter.peak)
    return found


def resting_bytes(steps: AutogradSteps) -> int:
    """Bytes that are held from one step to the next: weights, statistics, the optimiser's state, a cached prefix."""
    objective = steps.objective
    tensors = [*objective.params.values(), *objective.buffers.values()]
    if isinstance(steps.forward, CachedPrefix):
        tensors += steps.forward.crossing
    state = build_optimizer(steps.work.optimizer).kept * sum(leaf.nbytes for leaf in steps.leaves)
    return sum(t.nbytes for t in tensors) + state


@dataclass(eq=False)
class FlopEstimate:
    """What visits of one kind cost, and the parameters that they leave without a gradient.

    Args:
        before: number of a client's examples, where techniques look at all of them, or else 0 → FLOPs before the steps.
        steps: number of examples → what a step with so many takes.
        after: FLOPs after the steps.
        idle: parameters that the steps do not use.
        dropout_calls: how often a step calls a dropout layer.
    """

    before: dict[int, int] = field(default_factory=dict)
    steps: dict[int, StepCost] = field(default_factory=dict)
    after: int = 0
    idle: frozenset[str] = frozenset()
    dropout_calls: int = 0

    def total(self, examples: int, sizes: Iterable[int]) -> int:
        """FLOPs of a visit to a client with so many examples, in batches of these sizes."""
        around = self.before[examples if examples in self.before else 0] + self.after
        return around + sum(self.steps[size].flops for size in sizes)

    def memory(self, sizes: Iterable[int]) -> int:
        """The most bytes that a step with one of these numbers of examples holds at once."""
        return max((self.steps[size].memory for size in sizes), default=0)


def estimate_flops(visit: ClientVisit, sizes: Iterable[int], kind: Hashable) -> FlopEstimate:
    """What a visit of this kind costs, counted on the side: for ways of training that cannot be counted themselves.

    Nothing changes but the replica, which the caller prepares again.
    """
    context, a = visit.context, visit.assignment
    known: FlopEstimate | None = context.cache.get(kind)
    estimate = context.cache[kind] = known or FlopEstimate()
    missing = sorted(set(sizes) - estimate.steps.keys())
    examples = len(visit.data) if any(context.method.at("prepare")) else 0
    if not missing and examples in estimate.before:
        return estimate
    with preserve_rng():
        visit.prepare()
        with FlopCount() as before:
            hooks = visit.build_hooks()
        visit.prepare()
        estimate.before[examples] = before.total
        steps = AutogradSteps(visit.replica, context.method.buffers, hooks, a.work, visit.replica.model)
        with steps.running(visit.replica, nobody_looks=not hooks.hooks):
            for size in missing if steps.names else ():
                with count_calls(visit.replica.model) as calls:
                    estimate.steps[size] = _count_step(visit, steps, size)
                estimate.dropout_calls = calls[0]
        if known is None:
            estimate.after = _count_finish(visit, steps)
            estimate.idle = frozenset(n for n, g in zip(steps.names, steps.grads, strict=False) if g is None)
    return estimate


def _count_step(visit: ClientVisit, steps: AutogradSteps, size: int) -> StepCost:
    """What a step with the first examples of a client takes."""
    device = visit.context.device
    x, y = visit.data.batch(torch.arange(size), visit.context.augment)
    return count_step(steps, visit.replica.inputs(to_device(x, device)), to_device(y, device))[1]


def _count_finish(visit: ClientVisit, steps: AutogradSteps) -> int:
    """FLOPs of what techniques do after the steps."""
    params, uploads = visit.replica.params, visit.assignment.uploads
    delta = {n: torch.zeros_like(params[n], memory_format=torch.contiguous_format) for n in uploads}
    with FlopCount() as counter:
        steps.hooks.finish(delta, steps.tallies, visit.memory)
        steps.hooks.build_upload(delta)
    return int(counter.total)
