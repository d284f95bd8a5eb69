"""Many clients' chains of dense layers trained at once: parameters with an axis of clients, and the steps on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedstrata.client.context import ModelReplica
from fedstrata.client.dense import GradientSink, Link, known_chain
from fedstrata.client.gram import GramLayer, saves_work
from fedstrata.client.group import ClientGroup, SharedAssignment, UnreadableExamples, shared_answers
from fedstrata.client.hooks import HookSet, build_hooks
from fedstrata.client.padded_batches import PaddedBatches, StepBatch, find_pool
from fedstrata.client.personal import is_personal
from fedstrata.client.step import LocalSteps, is_plain
from fedstrata.core.task import Task
from fedstrata.core.technique import Batch, Buffers
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Slots, Work, replace_fields
from fedstrata.errors import UsageError


class ChainPass:
    """Forward and backward passes of many clients' batches through a chain of layers.

    No client's loss depends on another's parameters, so the gradient of their sum is each one's own.

    Args:
        chain: the layers.
        task: what is learnt.
        trains: the parameters whose gradients are wanted.
        below: True if something below the chain wants the gradient of its inputs.
    """

    def __init__(self, chain: Sequence[Link], task: Task, trains: frozenset[str], below: bool = False) -> None:
        self._chain, self._task, self._trains, self._below = chain, task, trains, below

    def run(self, batch: StepBatch, params: Tensors, sink: GradientSink) -> tuple[Tensor, Tensor]:
        """Hand gradients on, the last layer's first: (each client's loss, the gradient of the inputs if wanted)."""
        x, backs, masks = batch.x, [], iter(batch.masks)
        for link in self._chain:
            x, back = link.run(x, params, self._trains, masks)
            backs.append(back)
        losses, g = self._task.differentiate(x, batch.y, None if batch.rows is None else batch.rows > 0)
        for at in range(len(backs) - 1, -1, -1):
            g = backs[at](g, at > 0 or self._below, sink)  # type: ignore[assignment]  # nobody looks at the last one
        return losses, g


class _Gradients(dict[str, Tensor]):
    """Keeps the gradients."""

    def take_product(self, name: str, left: Tensor, right: Tensor) -> None:
        self[name] = torch.bmm(left.mT, right)

    def take(self, name: str, gradient: Tensor) -> None:
        self[name] = gradient


class StackedSteps(LocalSteps):
    """The steps of many clients, their parameters stacked.

    Args:
        chain: the model's layers from the first one on that trains.
        replica: the model.
        policy: for running statistics.
        hooks: of the techniques; they work on stacked tensors.
        work: how to train.
        params: the parameters that the first step begins with; those that move have an axis of clients without memory
            of its own.
        moved: those that the steps move, in memory of their own.
    """

    functional = False

    def __init__(
        self,
        chain: Sequence[Link],
        replica: ModelReplica,
        policy: Buffers,
        hooks: HookSet,
        work: Work,
        params: Tensors,
        moved: Tensors,
    ) -> None:
        self.untracked, self._pass = torch.no_grad(), ChainPass(chain, replica.task, frozenset(moved))
        self.batch: StepBatch
        super().__init__(replica, policy, hooks, work, params, moved)

    def differentiate(self, x: Tensor, y: Tensor) -> tuple[Batch, Tensor, Sequence[Tensor | None]]:
        """Forward and backward pass of all clients together, on `batch`; the loss is one per client."""
        grads, at = _Gradients(), self.objective.params
        losses, _ = self._pass.run(self.batch, at, grads)
        return self.objective.batch(x, y, self.taken, at), losses, [grads.get(n) for n in self.names]

    def clip_gradients(self, grads: Tensors) -> Tensors:
        """Every client's gradients, scaled down where their norm is above the limit."""
        if self.clip is None or not grads:
            return grads
        norm = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads.values()]).norm(dim=0)
        factor = torch.clamp(self.clip / (norm + 1e-6), max=1.0)
        return {n: g * factor.view(-1, *(1,) * (g.dim() - 1)) for n, g in grads.items()}


class PlainSteps:
    """Steps where nothing comes between a gradient and the move along it: w − lr·gᵀx is one product.

    Nothing is kept from step to step, so clients that are done are left out.

    Args:
        chain: the model's layers from the first one on that trains.
        task: what is learnt.
        params: the parameters that the first step begins with; those that move have an axis of clients without memory
            of its own.
        moved: memory for those that the steps move.
        rate: of learning.
        lowest: what stands for the first layer, if anything does.
    """

    def __init__(
        self, chain: Sequence[Link], task: Task, params: Tensors, moved: Tensors, rate: float, lowest: GramLayer | None
    ) -> None:
        self._pass = ChainPass(chain if lowest is None else chain[1:], task, frozenset(moved), lowest is not None)
        self._params, self._moved, self._rate, self._lowest = params, moved, rate, lowest
        self._start, self._clients = {n: params[n] for n in moved}, len(next(iter(moved.values())))
        self._before: Tensors = {}
        self._now: Tensors = {}
        """What moves, of the clients at hand: before the step, and memory for it after the step."""
        self._taken = 0

    def step(self, batch: StepBatch) -> Tensor:
        """One step of SGD of the first clients, as many as there are inputs of: each one's loss before it."""
        clients, before = len(batch.y), self._moved if self._taken else self._start
        self._before, self._now = before, self._moved
        if clients < self._clients:
            self._before, self._now = _first(before, clients), _first(self._moved, clients)
        if self._lowest is not None:
            batch = replace(batch, x=self._lowest.run(self._taken, clients))
        losses, g = self._pass.run(batch, {**self._params, **self._before}, self)
        if self._lowest is not None:
            self._lowest.take(self._taken, g)
        self._taken += 1
        return losses

    def take_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Move a weight."""
        torch.baddbmm(self._before[name], left.mT, right, alpha=-self._rate, out=self._now[name])

    def take(self, name: str, gradient: Tensor) -> None:
        """Move any other parameter."""
        torch.add(self._before[name], gradient, alpha=-self._rate, out=self._now[name])


def _first(tensors: Tensors, clients: int) -> Tensors:
    """The tensors of the first clients."""
    return {n: t[:clients] for n, t in tensors.items()}


def chain_of(group: ClientGroup) -> tuple[Link, ...] | None:
    """The chain of layers that a group can be trained by; None where `torch.func` has to do it.

    Where compiling is asked for, `torch.func` does whatever is quicker so: all but plain steps.
    """
    context, a = group.context, group.template
    local = tuple(context.method.acting("local", a.is_after_training))
    uneven = len(set(group.steps)) > 1
    if a.work.precision != "fp32" or is_personal(a, group.memories.structures[0]):
        return None
    if context.compile and (local or not is_plain(a.work)):
        return None
    if not all(technique.stacks for technique in local) or (local and uneven):
        return None
    return known_chain(group)


def find_prefix(group: ClientGroup, chain: Sequence[Link], idle: frozenset[str]) -> tuple[Link, ...]:
    """The layers below everything that trains, if the plan lets them be computed once per visit and that is less."""
    a, context = group.template, group.context
    moved = set(a.trains) - idle
    below = tuple(chain[: _find_lowest(chain, moved)])
    rows, examples = sum(map(sum, group.batches)), sum(group.examples_of_each)
    if not a.cache_prefix or context.augment is not None or context.device.type != "cpu" or rows <= examples:
        return ()
    if any(link.dropout is not None for link in below) or not count_flops(below) or find_pool(group) is None:
        return ()
    return below


def count_flops(links: Sequence[Link]) -> int:
    """FLOPs of a forward pass of one row."""
    layers = [link.module for link in links if isinstance(link.module, nn.Linear)]
    return sum(2 * layer.in_features * layer.out_features for layer in layers)


def run_links(links: Sequence[Link], params: Tensors, x: Tensor) -> Tensor:
    """What comes of inputs [rows, …] behind layers that are the same for all clients, none of which drops anything."""
    x = x.unsqueeze(0)
    with torch.no_grad():
        for link in links:
            x, _ = link.run(x, params, (), iter(()))
    return x.squeeze(0)


def _find_lowest(chain: Sequence[Link], moved: Collection[str]) -> int:
    """Where the first layer is that moves."""
    return next((at for at, link in enumerate(chain) if link.weight in moved or link.bias in moved), 0)


def train_stacked(
    group: ClientGroup,
    chain: Sequence[Link],
    padded: PaddedBatches,
    idle: frozenset[str],
    given: tuple[Slots, Slots, Slots],
) -> tuple[Tensors, Slots, Slots, Tensor]:
    """Train clients from the same parameters on: (deltas, slots, memories, mean losses), a row for each.

    Args:
        group: the clients, those with most steps first.
        chain: their model, or what of it is above a prefix that the batches went through.
        padded: their batches.
        idle: parameters that get no gradient.
        given: what techniques sent, what clients remember, and what was prepared; stacked, or shared by all.
    """
    a, clients = group.template, len(group)
    start = {n: a.params[n].unsqueeze(0).expand(clients, *a.params[n].shape) for n in a.trains}
    trained = group.context.allocate_stack(start) if group.context.allocate_stack else _allocate(start)
    hooks = _build_hooks(group, *given)
    for name in idle & trained.keys():
        trained[name].copy_(start[name])
    moved = {n: t for n, t in trained.items() if n not in idle}
    lowest = _find_lowest(chain, moved)
    padded = _run_below(chain[:lowest], padded, a.params)
    tallies: Slots = {}
    done: frozenset[str] = frozenset()
    if is_plain(a.work) and not hooks.hooks:
        total, done = _take_plain_steps(group, chain[lowest:], padded, start, moved)
    else:
        steps = StackedSteps(
            chain[lowest:], group.replica, group.context.method.buffers, hooks, a.work, {**a.params, **start}, moved
        )
        total, tallies = _take_steps(steps, padded, moved, start), steps.tallies
    delta = {n: trained[n] if n in done else trained[n].sub_(a.params[n]) for n in a.uploads}
    slots, remembers = hooks.finish(delta, tallies, given[1])
    rows = {**a.params, **group.replica.buffers}
    sent, kept = ({name: _expand(slot, rows, clients) for name, slot in many.items()} for many in (slots, remembers))
    return hooks.build_upload(delta), sent, kept, total / torch.tensor(padded.steps, device=total.device)


def _allocate(like: Tensors) -> Tensors:
    return {n: torch.empty(t.shape, dtype=t.dtype, device=t.device) for n, t in like.items()}


def _run_below(chain: Sequence[Link], padded: PaddedBatches, params: Tensors) -> PaddedBatches:
    """Batches as they go into the first layer that trains; what is below it is the same for all clients and steps."""
    x, drops = padded.x.flatten(0, 1), sum(link.dropout is not None for link in chain)
    masks = iter([mask.flatten(0, 1) for mask in padded.masks[:drops]])
    for link in chain:
        x, _ = link.run(x, params, (), masks)
    return replace(padded, x=torch.unflatten(x, 0, padded.x.shape[:2]), masks=padded.masks[drops:])


def _take_plain_steps(
    group: ClientGroup, chain: Sequence[Link], padded: PaddedBatches, start: Tensors, moved: Tensors
) -> tuple[Tensor, frozenset[str]]:
    """Train, each client for its own number of steps: (the sum of each one's losses, what is the delta already)."""
    params, rate, link = group.template.params, group.template.work.lr, chain[0]
    lowest = None
    if isinstance(link.module, nn.Linear) and link.weight in moved and saves_work(padded.x, params[link.weight]):
        lowest = GramLayer(link.weight, link.bias, params, moved, padded.x, rate)
    steps = PlainSteps(chain, group.replica.task, {**params, **start}, moved, rate, lowest)
    total = torch.zeros(len(padded.steps), device=padded.y.device)
    for step in range(padded.longest):
        going = sum(count > step for count in padded.steps)
        losses = steps.step(padded.cut(step, going))
        (total if going == len(total) else total[:going]).add_(losses)
    return total, frozenset() if lowest is None else lowest.write_delta(padded.steps, moved)


def _take_steps(steps: StackedSteps, padded: PaddedBatches, moved: Tensors, start: Tensors) -> Tensor:
    """Train, each client for its own number of steps: the sum of each one's losses.

    All go on as long as the longest; what counts of the others is kept at their own last step.
    """
    for name, tensor in moved.items():
        tensor.copy_(start[name])
    total = torch.zeros(len(padded.steps), device=padded.y.device)
    ended: list[tuple[slice, Tensors]] = []
    left = len(padded.steps)
    for step in range(padded.longest):
        if step == 1:
            steps.objective.params = {**steps.objective.params, **moved}
        steps.batch = padded.cut(step, len(padded.steps))
        total += steps.step(steps.batch.x, steps.batch.y)
        going = sum(count > step + 1 for count in padded.steps)
        if 0 < going < left:
            rows = slice(going, left)
            ended.append((rows, {n: t[rows].clone() for n, t in moved.items()}))
            left = going
    for rows, kept in ended:
        for name, tensor in kept.items():
            moved[name][rows] = tensor
    return total


def _build_hooks(group: ClientGroup, slots: Slots, memory: Slots, prepared: Slots) -> HookSet:
    """The techniques' hooks, on stacked tensors."""
    context = group.context
    if not any(context.method.acting("local", group.template.is_after_training)):
        return HookSet({})
    shared = SharedAssignment(**vars(replace_fields(group.template, slots=slots)))
    hooks = build_hooks(
        context.method, group.replica, UnreadableExamples(), shared, memory, shared_answers(prepared, {})
    )
    for kind in ("features", "output", "loss"):
        if hooks.all(kind):
            raise UsageError(f"a technique that stacks has no {kind} hook: it sees many clients' tensors as one")
    return hooks


def _expand(tensors: Tensors, like: Mapping[str, Tensor], clients: int) -> Tensors:
    """Tensors with a row per client, also where all clients have the same."""
    return {n: _expand_one(n, t, like.get(n), clients) for n, t in tensors.items()}


def _expand_one(name: str, tensor: Tensor, like: Tensor | None, clients: int) -> Tensor:
    rows = (clients, *(tensor.shape[1:] if like is None else like.shape))
    if tensor.shape == rows:
        return tensor
    if like is not None and tensor.shape == like.shape:
        return tensor.unsqueeze(0).expand(rows).clone()
    raise UsageError(f"a technique that stacks gave '{name}' for {clients} clients in the shape {list(tensor.shape)}")
