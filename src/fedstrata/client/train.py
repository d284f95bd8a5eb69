"""One client, one round: `train_client` turns an assignment, the client's data and its memory into an update.

It is pure: the model instance is scratch that is loaded anew, the random streams come from the assignment's seed, and
what the client will remember is returned, not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fedstrata.client.context import ClientContext
from fedstrata.client.cost import CostMeter
from fedstrata.client.hooks import NO_HOOKS, HookSet
from fedstrata.client.large_params import NOTHING_LARGE, LargeParams, find_large
from fedstrata.client.personal import personal_names
from fedstrata.client.step import AutogradSteps, CachedPrefix
from fedstrata.client.visit import ClientVisit, owner_of
from fedstrata.core.parts import Parts
from fedstrata.core.rng import derive, generator, seed_global
from fedstrata.core.tensors import Tensors, all_finite, subtract
from fedstrata.core.types import BUFFERS, PERSONAL, Assignment, Examples, Slots, Update, make_quickly, replace_fields
from fedstrata.data.batching import batches
from fedstrata.data.examples import TensorExamples
from fedstrata.data.labels import UnknownClass
from fedstrata.models.frozen_prefix import Cut, cut_at
from fedstrata.system.devices import HOST, assignment_on, slots_on, to_device
from fedstrata.system.timing import timed


def train_client(context: ClientContext, assignment: Assignment, data: Examples, memory: Slots) -> tuple[Update, Slots]:
    """Train one client for one round: (update as it travels, what the client will remember if the server accepts it).

    Seeds global generators, which dropout, augmentation and datasets draw from; the caller restores them
    (`preserve_rng`).
    """
    update, remembers = train_unencoded(context, assignment, data, memory)
    encoding = context.encoding(assignment.arch)
    if encoding is None:
        return update, remembers
    with timed("techniques"):
        return encoding.encode(update, remembers, assignment)


def train_unencoded(
    context: ClientContext, assignment: Assignment, data: Examples, memory: Slots
) -> tuple[Update, Slots]:
    """The same, with the update as it is before techniques encode it."""
    with timed("load the model"):
        a = assignment_on(context.device, assignment)
        named = {"data": data, "memory": slots_on(context.device, memory), "replica": context.replica(a.arch)}
        visit = make_quickly(ClientVisit, context=context, assignment=a, **named)
        large = find_large(visit) if visit.replica.large and not a.turns else NOTHING_LARGE
        visit.prepare(but=large.names)
    if large is NOTHING_LARGE:
        return _train(visit, large)
    with large.borrow():
        return _train(visit, large)


def _train(visit: ClientVisit, large: LargeParams) -> tuple[Update, Slots]:
    """Train a client whose replica is ready."""
    context, a = visit.context, visit.assignment
    meter = CostMeter(visit)
    hooks = _build_hooks(visit, meter)
    steps, loss = _take_turns(visit, hooks, meter) if a.turns else _take_steps(visit, hooks, meter, large)
    delta = _compute_delta(visit, large)
    slots, remembers, sent = _finish(visit, steps, delta, meter)
    update = make_quickly(
        Update,
        round=a.round,
        client=a.client,
        method=context.method.digest,
        examples=len(visit.data),
        steps=steps.taken,
        delta=sent if sent is delta and context.device == HOST else _bring_home({"": sent})[""],
        buffers=_collect_buffers(visit, remembers),
        slots=_bring_home(slots),
        metrics={"train_loss": loss, "flops": float(meter.total), "memory": float(meter.memory)},
        finite=False,
    )
    _keep_steps(visit, steps, large)
    return _look_at_rest(update, large), _bring_home(remembers)


def _build_hooks(visit: ClientVisit, meter: CostMeter) -> HookSet:
    """The hooks of the techniques that have a part on the client."""
    context = visit.context
    if not context.hooked:
        return NO_HOOKS
    seed_global(derive(visit.assignment.seed, "local"), context.device)
    with timed("techniques"):
        hooks = meter.count("hooks", visit.build_hooks)
        visit.prepare()  # a technique's own passes may have moved statistics or modes
    return hooks


def _take_turns(visit: ClientVisit, hooks: HookSet, meter: CostMeter) -> tuple[AutogradSteps, float]:
    """Train one part of the model after the other: (the steps of the last turn, with what they all came to; loss)."""
    total, taken = 0.0, 0
    tallies: Slots = {}
    a = visit.assignment
    for number, (turn, work) in enumerate(zip(a.turns, a.works, strict=True)):
        mine = replace_fields(a, trains=turn.trains, work=work, seed=derive(a.seed, "turn", number))
        part = replace_fields(visit, assignment=mine)
        part.freeze()
        own = CostMeter(part)
        steps, loss = _take_steps(part, hooks, own, NOTHING_LARGE, tallies)
        meter.total, meter.memory = meter.total + own.total, max(meter.memory, own.memory)
        total, taken, tallies = total + loss * steps.taken, taken + steps.taken, steps.tallies
    visit.freeze()
    steps.taken = taken
    return steps, total / max(taken, 1)


def _take_steps(
    visit: ClientVisit, hooks: HookSet, meter: CostMeter, large: LargeParams, tallies: Slots | None = None
) -> tuple[AutogradSteps, float]:
    """Take the steps of a visit: (what they came to, the mean of the task's loss over them).

    `tallies` are what techniques have summed up before.
    """
    context, replica, a, data = visit.context, visit.replica, visit.assignment, visit.data
    foreign = replica.own_code or not isinstance(data, TensorExamples)  # may draw from Python's and NumPy's generators
    seed_global(derive(a.seed, "train"), context.device, everything=foreign)
    steps = _open_steps(visit, hooks, large)
    steps.tallies = tallies or {}
    if not steps.names:
        return steps, 0.0
    order = list(batches(len(data), a.work, generator(a.seed, "order"), replica.batch_norm))
    prefix = _cache_prefix(visit, steps, meter) if a.cache_prefix else None
    if steps.forward is not replica.model and prefix is None:
        meter.estimate_steps(map(len, order), hooks)
        visit.prepare()
    nobody_looks = replica.forward is replica.model and not hooks.hooks
    with steps.running(replica, nobody_looks, whole=prefix is None):
        total = _follow(order, visit, steps, meter, large, prefix)
    return steps, total.item() / max(steps.taken, 1)


def _follow(
    order: Sequence[Tensor],
    visit: ClientVisit,
    steps: AutogradSteps,
    meter: CostMeter,
    large: LargeParams,
    prefix: CachedPrefix | None,
) -> Tensor:
    """Take a step for each of the batches: the sum of their losses."""
    context, replica, data = visit.context, visit.replica, visit.data
    here = context.device == HOST
    total = torch.zeros((), dtype=replica.scalar_dtype, device=context.device)
    for index in order:
        with timed("batches"):
            x, y = data.batch(index, context.augment)
            if not here:
                x, y = to_device(x, context.device), to_device(y, context.device)
            x = replica.inputs(x)
            if prefix is not None:
                prefix.rows = index
        if large.names and index is order[-1]:
            large.end_in(_allocate_delta(visit, large))
        try:
            total.add_(meter.count_step(steps, x, y))
        except UnknownClass as error:
            raise error.at(owner_of(data, visit.assignment.client), y, index) from None
    return total


def _open_steps(visit: ClientVisit, hooks: HookSet, large: LargeParams) -> AutogradSteps:
    """The steps of a visit; those of the last one, begun anew, if it was of the same kind and nothing is special."""
    context, replica, a = visit.context, visit.replica, visit.assignment
    plain = bool(hooks.all("features") or a.turns)  # a compiled step's cost is estimated on a replica made ready anew
    forward = replica.model if plain else replica.forward
    if _is_plain(visit, hooks, large):
        kept: AutogradSteps | None = context.cache.pop(("steps", a.arch, a.trains), None)
        if kept is not None and kept.work == a.work:
            kept.begin()
            return kept
    return AutogradSteps(replica, context.method.buffers, hooks, a.work, forward, large)


def _keep_steps(visit: ClientVisit, steps: AutogradSteps, large: LargeParams) -> None:
    """Keep steps for the next visit of the same kind."""
    if _is_plain(visit, steps.hooks, large):
        steps.forget()
        visit.context.cache["steps", visit.assignment.arch, visit.assignment.trains] = steps


def _is_plain(visit: ClientVisit, hooks: HookSet, large: LargeParams) -> bool:
    """True if the steps of a visit have nothing of their own that another visit of its kind has not."""
    return (
        hooks is NO_HOOKS
        and large is NOTHING_LARGE
        and visit.replica.server.steady
        and not visit.assignment.cache_prefix
        and not visit.assignment.turns
    )


def _cache_prefix(visit: ClientVisit, steps: AutogradSteps, meter: CostMeter) -> CachedPrefix | None:
    """Compute once what lies below everything that trains, where that is wanted and there is something."""
    context, replica, a, data = visit.context, visit.replica, visit.assignment, visit.data
    if steps.forward is not replica.model or context.augment is not None:
        return None
    if isinstance(replica.sample, Parts):  # tracing does not look into them
        return None
    cut = _find_cut(visit, tuple(steps.hooks.places))
    if cut is None:
        return None

    def read(index: Tensor) -> Tensor:
        return replica.inputs(to_device(data.batch(index)[0], context.device))

    inputs = map(read, torch.split(torch.arange(len(data)), 256))
    with timed("prefix"):
        return meter.count("prefix", partial(steps.cache_prefix, cut, inputs), a.update_buffers, *steps.hooks.places)


def _find_cut(visit: ClientVisit, places: tuple[str, ...]) -> Cut | None:
    """The model in two parts, cut below everything that trains; found once for a plan."""
    replica, a, cache = visit.replica, visit.assignment, visit.context.cache
    frozen = visit.frozen_buffers()
    kind = ("cut", a.arch, a.trains, frozen, places)
    if kind not in cache:
        assert replica.sample is not None
        cache[kind] = cut_at(replica.model, a.trains, frozen, replica.inputs(replica.sample), places)
    cut: Cut | None = cache[kind]
    return cut


def _allocate_delta(visit: ClientVisit, large: LargeParams) -> Tensors:
    """Memory for the delta: of all that travels where a place for it is given, else of the large parameters alone."""
    a, allocate = visit.assignment, visit.context.allocate_delta
    if allocate is not None:
        return allocate(a.params, a.uploads)
    return {n: torch.empty_like(a.params[n]) for n in large.names}


def _compute_delta(visit: ClientVisit, large: LargeParams) -> Tensors:
    """What training changed of what travels."""
    a, params, allocate = visit.assignment, visit.replica.params, visit.context.allocate_delta
    with timed("difference"):
        if large is NOTHING_LARGE:
            out = None if allocate is None else allocate(a.params, a.uploads)
            return visit.replica.server.subtract(a.params, a.uploads, out)
        out = None if allocate is None else large.delta or allocate(a.params, a.uploads)
        rest = [n for n in a.uploads if n not in large.differences]
        delta = subtract({n: params[n].detach().contiguous() for n in rest}, a.params, rest, out) | large.differences
        return {n: delta[n] for n in a.uploads} if large.differences else delta


def _look_at_rest(update: Update, large: LargeParams) -> Update:
    """The update, known to be finite if the large parameters' part is: whoever takes it need not go through it."""
    if not (large.names and large.finite):
        return update
    rest = [t for n, t in update.delta.items() if n not in large.differences]
    slots = (t for slot in update.slots.values() for t in slot.values())
    return replace_fields(update, finite=all_finite([*rest, *update.buffers.values(), *slots]))


def _finish(visit: ClientVisit, steps: AutogradSteps, delta: Tensors, meter: CostMeter) -> tuple[Slots, Slots, Tensors]:
    """(slots that travel, what the client will remember, the delta that travels)."""
    hooks, memory = steps.hooks, visit.memory
    slots: Slots = {}
    remembers, sent = dict(memory), delta

    def finish() -> tuple[Slots, Slots, Tensors]:
        return *hooks.finish(delta, steps.tallies, memory), hooks.build_upload(delta)

    if hooks.hooks and (hooks.all("finish") or hooks.all("upload")):
        with timed("techniques"):
            slots, remembers, sent = meter.count("finish", finish, *hooks.signature)
    names = personal_names(visit.assignment)
    if names:
        own = {n: visit.replica.params[n].detach().clone() for n in names}
        remembers[PERSONAL] = {**memory.get(PERSONAL, {}), **own}
    return slots, remembers, sent


def _collect_buffers(visit: ClientVisit, remembers: Slots) -> Tensors:
    """The running statistics that travel; under the policy `local`, and of a client's own model, all are remembered."""
    policy, held, a = visit.context.method.buffers, visit.replica.buffers, visit.assignment
    if policy == "drop" or not held or not a.trains:
        return {}
    buffers = {n: b.detach().to("cpu", copy=True) for n, b in held.items()}
    if visit.context.method.keeps_statistics(a.is_after_training):
        remembers[BUFFERS] = buffers
    return buffers if a.upload_buffers is None else {n: buffers[n] for n in a.upload_buffers}


def _bring_home(slots: Slots) -> Slots:
    """The tensors on the CPU in the usual layout, as they are after any way through memory or files.

    Sums depend on it.
    """
    if not slots:
        return slots
    home = slots_on(HOST, slots)
    return {name: {n: t.contiguous() for n, t in slot.items()} for name, slot in home.items()}
