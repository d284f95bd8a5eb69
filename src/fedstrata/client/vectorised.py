"""Many clients trained at once: their models stacked, their batches padded, one vectorised step for all of them.

Python's and torch's costs of a step are paid once instead of once per client, which is most of the time of a small
dense model. The results equal those of one client after the other up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from fedstrata.client.compiling import compile_function
from fedstrata.client.context import ClientContext, ModelReplica
from fedstrata.client.dense import find_chain, known_chain
from fedstrata.client.dropout import is_dropout
from fedstrata.client.group import ClientGroup, SharedAssignment, UnreadableExamples, shared_answers
from fedstrata.client.hooks import HookSet, build_hooks
from fedstrata.client.padded_batches import COMPILED_STEPS, PaddedBatches, draw_padded
from fedstrata.client.personal import params_to_begin_with, personal_names, personal_params
from fedstrata.client.preparing import draw_steps, open_views, pack_slots, prepare_group
from fedstrata.client.stacked import chain_of, count_flops, find_prefix, run_links, train_stacked
from fedstrata.client.step import FunctionalSteps
from fedstrata.client.train import train_client
from fedstrata.client.visit import count_classes
from fedstrata.core.method import Method
from fedstrata.core.stacks import Assignments, Memories, UpdateStack, structure_of
from fedstrata.core.task import Task
from fedstrata.core.technique import overrides
from fedstrata.core.tensors import Tensors, clone, one_by_one
from fedstrata.core.types import PERSONAL, Assignment, Examples, Slots, Update, replace_fields
from fedstrata.data.batching import batch_sizes
from fedstrata.data.examples import sizes
from fedstrata.errors import UsageError, one_line
from fedstrata.models.norms import running_statistics
from fedstrata.system.devices import HOST, slots_on, visits_on
from fedstrata.system.timing import timed


class CannotVectorise(UsageError):
    """A technique or a layer that only works on one client at a time."""


def check_vectorises(method: Method, task: Task, model: nn.Module, sample: Tensor | None) -> None:
    """Raise CannotVectorise, with the reason, if this method cannot train many of these models at once."""
    if not task.has_terms:
        raise CannotVectorise(
            f"the engine 'vmap' cannot train the task '{task.name}': batches are padded, and it has no loss per example"
        )
    for technique in method.techniques:
        if overrides(technique, "local") and not technique.vectorises:
            raise CannotVectorise(
                f"the engine 'vmap' cannot run '{technique.name}': its hooks work on one client at a time"
            )
    for name, p in model.named_parameters():
        if p.dtype in (torch.float16, torch.bfloat16):
            kind = str(p.dtype).removeprefix("torch.")
            raise CannotVectorise(
                f"the engine 'vmap' cannot train '{name}' in {kind}: its results would drift far from those of one "
                "client after the other"
            )
    chain = find_chain(model, sample)
    for name, module in model.named_modules():
        if is_dropout(module) and chain is not None:
            _check_dropout(name, method)
            continue
        _check_layer(f"the engine 'vmap' cannot train the layer '{name}' ({type(module).__name__})", module)
    buffers = running_statistics(model)
    if buffers:
        raise CannotVectorise(f"the engine 'vmap' cannot train this model: it keeps a buffer ('{next(iter(buffers))}')")
    if sample is not None and chain is None and not all(type(m) in PLAIN for m in model.modules()):
        _try_vectorising(model.train(), sample)


def _check_dropout(name: str, method: Method) -> None:
    """Refuse dropout beside a technique that may add rows of its own to a batch: each client's would be others."""
    technique = next(method.at("draws"), None)
    if technique is not None:
        raise CannotVectorise(
            f"the engine 'vmap' cannot train the layer '{name}' (Dropout) with '{technique.name}': both draw random "
            "numbers in every step"
        )


def _check_layer(what: str, module: nn.Module) -> None:
    """Refuse a layer that works on one client at a time only; `what` begins the sentence."""
    if isinstance(module, _BatchNorm):
        raise CannotVectorise(f"{what}: it normalises over the batch, and batches are padded; use group norm")
    if isinstance(module, _NormBase) and module.track_running_stats:
        raise CannotVectorise(f"{what}: it keeps running statistics")
    if isinstance(module, _DropoutNd) and module.p > 0:
        raise CannotVectorise(f"{what}: it draws random numbers, which only a chain of dense layers may")
    if isinstance(module, nn.RNNBase):
        raise CannotVectorise(f"{what}: recurrent layers have no vectorised form")


PLAIN = {
    *(nn.Sequential, nn.Flatten, nn.Identity, nn.Linear, nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.LayerNorm, nn.GroupNorm),
}
"""Layers that are known to work on many clients at once; whatever else is in a model is tried."""


def _try_vectorising(model: nn.Module, sample: Tensor) -> None:
    """See whether a model's own code can be vectorised: two copies at once, and rows that do not know of each other."""
    params = {n: torch.stack([p.detach()] * 2) for n, p in model.named_parameters()}

    def loss(params: Tensors, x: Tensor) -> Tensor:
        logits: Tensor = functional_call(model, params, (x,))
        return logits.sum()

    try:
        vmap(grad(loss))(params, torch.stack([sample] * 2))
        with torch.no_grad():
            whole, rows = model(sample), torch.cat([model(sample[i : i + 1]) for i in range(len(sample))])
    except Exception as error:  # whatever torch.func says of what it does not know
        why = one_line(str(error).strip().partition("\n")[0], 200)
        raise CannotVectorise(f"the engine 'vmap' cannot train this model: {why}") from error
    if not torch.allclose(whole, rows, rtol=1e-3, atol=1e-4):
        raise CannotVectorise("the engine 'vmap' cannot train this model: rows of a batch change each other's outputs")


@dataclass(frozen=True, eq=False)
class ClientTensors:
    """The tensors of a vectorised visit: of one client where it is computed, of all of them where it is asked for.

    Args:
        params: the model's parameters, the same for all.
        lr: the learning rate; a tensor, so that what is compiled serves all rounds of a schedule.
        x: inputs of every step.
        y: labels.
        rows: 1 where a row is real and 0 where it is padded; None where all are real.
        last: the number of the client's own steps.
        slots: what techniques sent.
        memory: what the client remembers.
        prepared: what techniques prepared.
        drawn: the random numbers of all steps.
        masks: what dropout multiplies with in every step, in the order in which it is asked for.
        counts: its examples of each class, where a technique may ask for them.
    """

    params: Tensors
    lr: Tensor
    x: Tensor
    y: Tensor
    rows: Tensor | None
    last: Tensor
    slots: Slots
    memory: Slots
    prepared: Slots
    drawn: Slots
    masks: Sequence[Tensor]
    counts: Tensor | None


Ended = tuple[Tensors, Slots, Tensor]
"""(parameters, tallies, mean loss) after a client's last step."""


@dataclass(frozen=True, eq=False)
class VectorisedVisit:
    """What all clients of a group share: everything but their batches, slots, memories and counts.

    Args:
        method: what is run.
        replica: the model.
        assignment: of one of them.
        steps: of the longest visit.
        ends: the steps after which some client is done.
        idle: parameters that get no gradient.
        dropouts: the names of the layers that drop.
    """

    method: Method
    replica: ModelReplica
    assignment: Assignment
    steps: int
    ends: tuple[int, ...]
    idle: frozenset[str]
    dropouts: tuple[str, ...]

    def train(self, *tensors: Any) -> tuple[Tensors, Slots, Slots, Tensor]:
        """One client's local training, as a function of tensors alone: (delta, slots, memory, mean loss).

        Args:
            tensors: the fields of `ClientTensors`, in order.
        """
        a, given = self.assignment, ClientTensors(*tensors)
        start = {n: given.params[n] for n in a.trains} | personal_params(a, given.memory)
        hooks = self._build_hooks(given)
        trained, tallies, mean = self._take_steps(given, hooks, start)
        delta = {n: trained[n] - start[n] for n in a.uploads}
        slots, remembers = hooks.finish(delta, tallies, given.memory)
        own = {n: trained[n] for n in personal_names(a)}
        if own:
            remembers[PERSONAL] = {**given.memory.get(PERSONAL, {}), **own}
        return hooks.build_upload(delta), slots, remembers, mean

    def _take_steps(self, given: ClientTensors, hooks: HookSet, start: Tensors) -> Ended:
        """Train from the start on.

        A client with fewer steps than the others goes on with padded batches; what counts is kept at its own last step.
        """
        a, params = self.assignment, given.params
        trained = {n: p + _zero_like(given.last) for n, p in start.items()}
        moved = {n: trained[n] for n in a.trains if n not in self.idle}
        work = replace_fields(a.work, lr=given.lr)
        steps = FunctionalSteps(self.replica, self.method.buffers, hooks, work, {**params, **start}, moved)
        total = _zero_like(given.last)
        final: Ended | None = None
        with steps.objective.attach_features(), steps.objective.attach_masks(self.dropouts):
            for step in range(self.steps):
                if step == 1:  # all begin at the same place: the first pass is one product for all
                    steps.objective.params = {**params, **trained}
                steps.objective.masks = iter([mask[step] for mask in given.masks])
                steps.objective.rows = rows = None if given.rows is None else given.rows[step]
                steps.objective.task_loss = partial(self.replica.task.padded_loss, rows)
                total = total + steps.step(given.x[step], given.y[step])
                if step + 1 in self.ends:
                    now = (clone(trained), steps.tallies, total / (step + 1))
                    final = now if final is None else _where(given.last == step + 1, now, final)
        assert final is not None
        return final

    def _build_hooks(self, given: ClientTensors) -> HookSet:
        def counts() -> Tensor:
            assert given.counts is not None
            return given.counts

        work = replace_fields(self.assignment.work, lr=given.lr)
        assignment = replace_fields(self.assignment, params=given.params, slots=given.slots, work=work)
        assignment = replace_fields(assignment, params=params_to_begin_with(assignment, given.memory))
        answers = shared_answers(given.prepared, given.drawn, counts)
        return build_hooks(self.method, self.replica, UnreadableExamples(), assignment, given.memory, answers)


def _zero_like(like: Tensor) -> Tensor:
    """A zero that is vectorised like a client's own tensors, so that what it is added to may be changed in place."""
    return (like * 0).float()


def _where(condition: Tensor, new: Any, old: Any) -> Any:
    """The new tensors where the condition holds and the old ones elsewhere, through tuples and dicts."""
    if isinstance(new, Tensor):
        return torch.where(condition, new, old)
    if isinstance(new, tuple):
        return tuple(_where(condition, a, b) for a, b in zip(new, old, strict=True))
    return {name: _where(condition, new[name], old[name]) for name in new}


Trained = tuple[Sequence[int], UpdateStack | tuple[Update, Slots]]
"""(which of the assignments, what came of them): of one client, or of several at once."""


def train_vectorised(
    context: ClientContext,
    assignments: Assignments,
    clients: Sequence[Examples] | Mapping[int, Examples],
    memories: Memories,
) -> Iterator[Trained]:
    """Train clients at once, as far as they are alike."""
    assignments, memories = visits_on(context.device, assignments, memories)
    kinds = [(a.arch, a.trains, a.uploads, a.work, structure_of(a.slots)) for a in assignments.templates]
    together: dict[tuple[Any, ...], list[int]] = {}
    for place, (kind, structure) in enumerate(zip(assignments.kinds, memories.structures, strict=True)):
        together.setdefault((kinds[kind], structure), []).append(place)
    for places in together.values():
        template = assignments.template(places[0])
        if template.trains and not template.turns:
            places = _longest_first(places, template, assignments, clients)
            chosen, slots = assignments.select(places), [assignments.template(i).slots for i in places]
            about = chosen.clients, chosen.seeds, clients, slots, memories.select(places)
            for rows, came in _train_alike(ClientGroup(context, template, *about)):
                yield [places[row] for row in rows], came
            continue
        for place in places:
            a = assignments[place]
            yield (place,), train_client(context, a, clients[a.client], memories[place])


def _longest_first(
    places: Sequence[int],
    template: Assignment,
    assignments: Assignments,
    clients: Sequence[Examples] | Mapping[int, Examples],
) -> list[int]:
    """Places of visits, those with most steps first; where all have as many, in client order."""
    size = sizes(clients)
    return sorted(places, key=lambda place: -len(batch_sizes(size(assignments.clients[place]), template.work, False)))


def _train_alike(group: ClientGroup) -> Iterator[Trained]:
    """Train clients that have all in common that one computation for all of them needs."""
    context = group.context
    flops, needed, estimate = group.estimate_costs()
    dropouts = [link.dropout for link in known_chain(group) or () if link.dropout is not None]
    chain = chain_of(group)
    prefix = find_prefix(group, chain or (), estimate.idle)
    with timed("batches"):
        passes = estimate.dropout_calls // max(len(dropouts), 1)  # more than one where a technique asks for a gradient
        below = partial(run_links, prefix, group.template.params) if prefix else None
        padded = draw_padded(group, context.compile and chain is None, dropouts * passes, below)
    slots, memory = _stack_slots(group.slots), _stack_memories(group.memories)
    with timed("techniques"):
        prepared = prepare_group(group, slots[0], memory[0])
        views = open_views(group)
        drawn = draw_steps(group, views, padded.longest)
    if chain is not None:
        with timed("stacked visits"), torch.no_grad():
            came = train_stacked(group, chain[len(prefix) :], padded, estimate.idle, (slots[0], memory[0], prepared))
    else:
        tensors, dims = _stack_tensors(group, padded, slots, memory, _by_client(prepared), _by_client(drawn))
        with one_by_one(), timed("vectorised visits"):
            names = tuple(layer.name for layer in dropouts)
            came = _vectorise(group, padded, estimate.idle, names, tensors, dims)(*tensors)
    delta, sent, remembers, loss = came
    delta, sent, remembers = slots_on(HOST, {"": delta})[""], slots_on(HOST, sent), slots_on(HOST, remembers)
    flops = _subtract_saved(group, flops, count_flops(prefix))
    stack = replace(group.describe(loss.tolist(), flops, needed), delta=delta, slots=sent, memory=remembers)
    encoding = context.encoding(group.template.arch)
    if encoding is None and not any(overrides(technique, "pack") for technique in views):
        yield range(len(group)), stack
        return
    for row, visit in enumerate(pack_slots(stack, views)):
        yield (row,), visit if encoding is None else encoding.encode(*visit, group.visit(row).assignment)


def _subtract_saved(group: ClientGroup, flops: Sequence[float], per_row: int) -> list[float]:
    """Each client's FLOPs, where what takes so many per row was done once per example instead of in every step."""
    about = zip(flops, group.batches, group.examples_of_each, strict=True)
    return [cost - per_row * (sum(sizes) - examples) for cost, sizes, examples in about] if per_row else list(flops)


def _by_client(slots: Slots) -> tuple[Slots, Any]:
    """(slots, that all their tensors have a row per client, as vmap wants to know)."""
    return slots, {name: dict.fromkeys(tensors, 0) for name, tensors in slots.items()}


def _stack_tensors(
    group: ClientGroup,
    padded: PaddedBatches,
    slots: tuple[Slots, Any],
    memory: tuple[Slots, Any],
    prepared: tuple[Slots, Any],
    drawn: tuple[Slots, Any],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(the fields of `ClientTensors` for all clients, which of them have a row per client, as vmap wants to know).

    The last four come as such pairs already.
    """
    a, replica, context = group.template, group.replica, group.context
    counts = None
    if context.task.has_classes and any(context.method.at("local")):
        counts = torch.stack([count_classes(group.visit(c).data, replica) for c in range(len(group))])
    table: dict[str, tuple[Any, Any]] = {
        "params": (a.params, None),
        "lr": (torch.tensor(a.work.lr, dtype=replica.scalar_dtype, device=context.device), None),
        "x": (padded.x, 0),
        "y": (padded.y, 0),
        "rows": (padded.rows, None if padded.rows is None else 0),
        "last": (torch.tensor(padded.steps, device=context.device), 0),
        "slots": slots,
        "memory": memory,
        "prepared": prepared,
        "drawn": drawn,
        "masks": (list(padded.masks), [0] * len(padded.masks)),
        "counts": (counts, None if counts is None else 0),
    }
    return tuple(tensors for tensors, _ in table.values()), tuple(dims for _, dims in table.values())


def _vectorise(
    group: ClientGroup,
    padded: PaddedBatches,
    idle: frozenset[str],
    dropouts: tuple[str, ...],
    tensors: tuple[Any, ...],
    dims: tuple[Any, ...],
) -> Callable[..., Any]:
    """The visit of all clients, as a function of their tensors; compiled where that is asked for and feasible."""
    context = group.context
    replace_fields(group.visit(0), memory={}).prepare()
    ends = sorted(set(padded.steps))
    if context.compile and padded.rows is not None:  # one graph for all clients of this shape, wherever they end
        ends = list(range(1, padded.longest + 1))
    shared = SharedAssignment(**vars(group.template))
    visit = VectorisedVisit(context.method, group.replica, shared, padded.longest, tuple(ends), idle, dropouts)
    run = vmap(visit.train, in_dims=dims)
    if not context.compile or visit.steps > COMPILED_STEPS:
        return run
    given = ClientTensors(*tensors)
    shapes = tuple(t.shape for slot in given.drawn.values() for t in slot.values())
    key = ("compiled", *group.kind, given.x.shape, shapes, given.rows is None, visit.ends, str(dims))
    if key not in context.cache:
        context.cache[key] = compile_function(run, tensors)
    compiled: Callable[..., Any] = context.cache[key]
    return compiled


def _stack_memories(memories: Memories) -> tuple[Slots, Any]:
    """The same of what clients remember; of a single one it is shared by all."""
    return _stack_slots([memories[0]]) if len(memories) == 1 else _by_client(memories.gather())


def _stack_slots(many: Sequence[Slots]) -> tuple[Slots, Any]:
    """(tensors of all clients stacked, or the one that all share; which of them are stacked, as vmap wants to know)."""
    slots: Slots = {}
    dims: dict[str, dict[str, int | None]] = {}
    for name, slot in many[0].items():
        slots[name], dims[name] = {}, {}
        for n, tensor in slot.items():
            shared = all(one[name][n] is tensor for one in many)
            slots[name][n] = tensor if shared else torch.stack([one[name][n] for one in many])
            dims[name][n] = None if shared else 0
    return slots, dims
