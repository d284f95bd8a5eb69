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
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from fedstrata.client.compiling import compile_function
from fedstrata.client.context import PERSONAL, ClientContext, ModelReplica
from fedstrata.client.cost import estimate_flops
from fedstrata.client.hooks import HookSet, build_hooks
from fedstrata.client.objective import Objective
from fedstrata.client.prepare import own_names, own_params, prepare
from fedstrata.client.results import TrainResult
from fedstrata.client.step import clipped
from fedstrata.client.train import train_client
from fedstrata.client.visit_hooks import class_counts, whose
from fedstrata.core.method import Method
from fedstrata.core.optim import build_optimizer
from fedstrata.core.rng import derive, generator, seed_global
from fedstrata.core.technique import overrides
from fedstrata.core.tensors import Tensors, clone, one_by_one
from fedstrata.core.types import Assignment, Examples, Slots, Update, replace_fields
from fedstrata.data.batching import batch_sizes, batches
from fedstrata.data.examples import TensorExamples
from fedstrata.data.labels import check_range
from fedstrata.errors import UsageError, one_line
from fedstrata.models.norms import running_statistics
from fedstrata.system.timing import timed

COMPILED_STEPS = 16
"""Visits of more steps are not compiled: the compiler takes them apart, and would take minutes."""


class CannotVectorise(UsageError):
    """A technique or a layer that only works on one client at a time."""


def check_vectorises(method: Method, model: nn.Module, sample: Tensor | None) -> None:
    """Raise CannotVectorise, with the reason, if this method cannot train many of these models at once."""
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
    for name, module in model.named_modules():
        what = f"the engine 'vmap' cannot train the layer '{name}' ({type(module).__name__})"
        if isinstance(module, _BatchNorm):
            raise CannotVectorise(f"{what}: it normalises over the batch, and batches are padded; use group norm")
        if isinstance(module, _NormBase) and module.track_running_stats:
            raise CannotVectorise(f"{what}: it keeps running statistics")
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise CannotVectorise(f"{what}: it draws random numbers")
        if isinstance(module, nn.RNNBase):
            raise CannotVectorise(f"{what}: recurrent layers have no vectorised form")
    kept = running_statistics(model)
    if kept:
        raise CannotVectorise(f"the engine 'vmap' cannot train this model: it keeps a buffer ('{next(iter(kept))}')")
    if sample is not None and not all(type(m) in PLAIN for m in model.modules()):
        _try(model.train(), sample)


PLAIN = {
    *(nn.Sequential, nn.Flatten, nn.Identity, nn.Linear, nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.LayerNorm, nn.GroupNorm),
}
"""Layers that are known to work on many clients at once; whatever else is in a model is tried."""


def _try(model: nn.Module, sample: Tensor) -> None:
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
class _NoExamples:
    """What stands for a client's data where many are trained at once."""

    def __len__(self) -> int:
        raise UsageError(_REFUSAL)

    def batch(self, index: Tensor, augment: Any = None) -> tuple[Tensor, Tensor]:
        raise UsageError(_REFUSAL)

    def labels(self) -> Tensor:
        raise UsageError(_REFUSAL)

    def outputs(self, place: str) -> Iterator[tuple[Tensor, Tensor]]:
        raise UsageError(_REFUSAL)

    def observe(self, watch: Mapping[str, Callable[[Tensor], None]]) -> None:
        raise UsageError(_REFUSAL)


_REFUSAL = "a technique that vectorises takes class counts from view.counts(), and reads no examples"


@dataclass(eq=False)
class PaddedBatches:
    """The batches of many clients: inputs [clients, steps, rows, …], which rows are real, and each one's steps."""

    x: Tensor
    y: Tensor
    rows: Tensor | None
    steps: list[int]


def _draw(
    context: ClientContext, assignments: Sequence[Assignment], data: Sequence[Examples], sizes: Sequence[Sequence[int]]
) -> PaddedBatches:
    """Every client's batches, drawn from its own random streams as if it were alone, and padded to one shape."""
    steps, width = [len(row) for row in sizes], max(max(row) for row in sizes)
    full = all(min(row) == width for row in sizes) and len(set(steps)) == 1
    longest = max(steps)
    if context.compile and not full and longest <= COMPILED_STEPS:  # few shapes, for each is compiled on its own
        longest = 1 << (longest - 1).bit_length()
    shape = (len(sizes), longest, width)
    rows = None if full else torch.zeros(shape)
    pool = _common(data) if context.augment is None else None
    if pool is not None:  # one tensor holds everybody's examples: gather all batches from it in one go
        index = torch.zeros(shape, dtype=torch.int64)
        rng = torch.Generator()
        for c, (a, examples) in enumerate(zip(assignments, data, strict=True)):
            order = list(batches(len(examples), a.work, rng.manual_seed(derive(a.seed, "order")), False))
            mine = examples.index if isinstance(examples, TensorExamples) else None
            flat = order[0] if len(order) == 1 else torch.cat(order)
            flat = flat if mine is None else mine[flat]
            if rows is None:
                index[c] = flat.view(shape[1:])
                continue
            for s, part in enumerate(torch.split(flat, list(sizes[c]))):
                index[c, s, : len(part)], rows[c, s, : len(part)] = part, 1.0
        x, y = pool.batch(index.view(-1))
        return PaddedBatches(x.view(*shape, *x.shape[1:]), y.view(shape), rows, steps)
    inputs: Tensor | None = None
    labels = torch.zeros(shape, dtype=torch.int64)
    for c, (a, examples) in enumerate(zip(assignments, data, strict=True)):
        order = list(batches(len(examples), a.work, generator(a.seed, "order"), False))
        seed_global(derive(a.seed, "train"), context.device, everything=not isinstance(examples, TensorExamples))
        for s, part in enumerate(order):
            x, y = examples.batch(part, context.augment)
            check_range(y, context.replica(a.arch).classes, whose(examples, a.client), part)
            if inputs is None:
                inputs = x.new_zeros(*shape, *x.shape[1:])
            inputs[c, s, : len(y)], labels[c, s, : len(y)] = x, y
            if rows is not None:
                rows[c, s, : len(y)] = 1.0
    assert inputs is not None
    return PaddedBatches(inputs, labels, rows, steps)


def _common(data: Sequence[Examples]) -> TensorExamples | None:
    """The tensors that all clients' examples are parts of, or None."""
    first = data[0]
    if not isinstance(first, TensorExamples):
        return None
    same = all(isinstance(d, TensorExamples) and d.x is first.x and d.y is first.y for d in data)
    return replace(first, index=None) if same else None


def _task(rows: Tensor | None, logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of the real rows; of a padded step, which has none, zero."""
    if rows is None:
        return F.cross_entropy(logits, labels)
    each = F.cross_entropy(logits, labels, reduction="none")
    return (each * rows).sum() / rows.sum().clamp(min=1.0)


def _by_func(loss: Callable[[Tensors], Tensor], at: Tensors) -> Tensors:
    grads: Tensors = grad(loss)(at)
    return grads


class _Watched(Assignment):
    """An assignment of which only what all clients of a kind have in common may be read: hooks serve many of them."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("round", "client", "seed"):
            raise UsageError(f"a technique that vectorises cannot read its assignment's {name}: many clients share it")
        return super().__getattribute__(name)


@dataclass(frozen=True, eq=False)
class VectorisedVisit:
    """What all clients of a group share: everything but their batches, slots, memories and counts."""

    method: Method
    replica: ModelReplica
    assignment: Assignment
    steps: int
    ends: tuple[int, ...]
    idle: frozenset[str]

    def visit(
        self,
        params: Tensors,
        lr: Tensor,
        x: Tensor,
        y: Tensor,
        rows: Tensor | None,
        last: Tensor,
        slots: Slots,
        memory: Slots,
        counts: Tensor | None,
    ) -> tuple[Tensors, Slots, Slots, Tensor]:
        """One client's local training, as a function of tensors alone: (delta, slots, memory, mean loss).

        A client with fewer steps than the others goes on with padded batches; what counts is kept at its own last step.
        """
        a, replica = self.assignment, self.replica
        start = {n: params[n] for n in a.trains} | own_params(a, memory)
        hooks = self._hooks(params, lr, slots, memory, counts)
        trained = {n: p + _nothing(last) for n, p in start.items()}
        moving = [n for n in a.trains if n not in self.idle]
        move = build_optimizer(a.work.optimizer).start([trained[n] for n in moving], lr, hooks.scale(moving, x.device))
        total = _nothing(last)
        tallies: Slots = {}
        final: tuple[Tensors, Slots, Tensor] | None = None
        for step in range(self.steps):
            here = None if rows is None else rows[step]
            at = trained if step else start  # all begin at the same place: the first pass is one product for all
            objective = Objective(
                replica.model,
                {**params, **at},
                replica.buffers,
                hooks.outputs,
                hooks.all("loss"),
                partial(_task, here),
                _by_func,
                self.method.buffers,
            )

            with hooks.tapped(objective):
                loss = partial(self._loss, objective, x[step], y[step], step)
                grads, (_, task) = grad_and_value(loss, has_aux=True)({n: at[n] for n in moving})
                batch = objective.batch(x[step], y[step], step, objective.params)
                tallies = hooks.tallied(tallies, grads, batch)
                grads = clipped(hooks.corrected(grads, batch), a.work.clip)
            total = total + task
            move([grads[n] for n in moving])
            if step + 1 in self.ends:
                now = (clone(trained), tallies, total / (step + 1))
                final = now if final is None else _where(last == step + 1, now, final)
        assert final is not None
        trained, tallies, mean = final
        delta = {n: trained[n] - start[n] for n in a.uploads}
        slots, kept = hooks.finished(delta, tallies, memory)
        mine = {n: trained[n] for n in own_names(a)}
        if mine:
            kept[PERSONAL] = {**memory.get(PERSONAL, {}), **mine}
        return hooks.uploaded(delta), slots, kept, mean

    def _loss(self, objective: Objective, x: Tensor, y: Tensor, step: int, given: Tensors) -> tuple[Tensor, Tensor]:
        """(whole loss, the task's) of a step, as a function of what moves."""
        params = {**objective.params, **given}
        batch = objective.batch(x, y, step, params)
        task, whole = objective(batch, lambda x: functional_call(self.replica.model, params, (x,)))
        return whole, task

    def _hooks(self, params: Tensors, lr: Tensor, slots: Slots, memory: Slots, counts: Tensor | None) -> HookSet:
        def counted() -> Tensor:
            assert counts is not None
            return counts

        work = replace_fields(self.assignment.work, lr=lr)  # a tensor: what is compiled serves all rounds of a schedule
        assignment = replace_fields(self.assignment, params=params, slots=slots, work=work)
        none = torch.Generator()  # vmap refuses whatever is drawn from it
        data = _NoExamples()
        own = (lambda name: none), counted, data.outputs, data.observe
        return build_hooks(self.method, self.replica, data, assignment, memory, *own)


def _nothing(like: Tensor) -> Tensor:
    """A zero that is vectorised like a client's own tensors, so that what it is added to may be changed in place."""
    return (like * 0).float()


def _where(condition: Tensor, new: Any, old: Any) -> Any:
    """The new tensors where the condition holds and the old ones elsewhere, through tuples and dicts."""
    if isinstance(new, Tensor):
        return torch.where(condition, new, old)
    if isinstance(new, tuple):
        return tuple(_where(condition, a, b) for a, b in zip(new, old, strict=True))
    return {name: _where(condition, new[name], old[name]) for name in new}


def _structure(slots: Mapping[str, Tensors]) -> tuple[Any, ...]:
    return tuple((name, tuple((n, t.dtype, t.shape) for n, t in slot.items())) for name, slot in slots.items())


def alike(assignment: Assignment, memory: Slots) -> tuple[Any, ...]:
    """What two clients must have in common to be trained at once."""
    a = assignment
    return a.arch, a.trains, a.uploads, a.work, _structure(a.slots), _structure(memory)


def train_vectorised(
    context: ClientContext,
    assignments: Sequence[Assignment],
    data: Sequence[Examples],
    memories: Sequence[Slots],
) -> Iterator[TrainResult]:
    """Train clients at once, as far as they are alike."""
    together: dict[tuple[Any, ...], list[int]] = {}
    for place, (a, memory) in enumerate(zip(assignments, memories, strict=True)):
        together.setdefault(alike(a, memory), []).append(place)
    for places in together.values():
        asked, theirs, held = [assignments[i] for i in places], [data[i] for i in places], [memories[i] for i in places]
        if asked[0].trains:
            yield _train_alike(context, tuple(places), asked, theirs, held)
            continue
        for place, visit in zip(places, zip(asked, theirs, held, strict=True), strict=True):
            yield TrainResult.of(place, *train_client(context, *visit))


def _train_alike(
    context: ClientContext,
    places: tuple[int, ...],
    assignments: Sequence[Assignment],
    data: Sequence[Examples],
    memories: Sequence[Slots],
) -> TrainResult:
    a = assignments[0]
    replica = context.replica(a.arch)
    sizes = [batch_sizes(len(d), a.work, False) for d in data]
    kind = (a.arch, a.trains, a.uploads, replace(a.work, lr=0.0), _structure(a.slots), _structure(memories[0]))
    flops, idle = _costs(context, assignments, data, memories, sizes, kind)
    prepare(replica, context.method, a, {})
    with timed("batches"):
        padded = _draw(context, assignments, data, sizes)
    ends = sorted(set(padded.steps))
    if context.compile and padded.rows is not None:  # one graph for all clients of this shape, wherever they end
        ends = list(range(1, padded.x.shape[1] + 1))
    visit = VectorisedVisit(
        context.method,
        replica,
        _Watched(**vars(a)),
        padded.x.shape[1],
        tuple(ends),
        idle,
    )
    counts = torch.stack([class_counts(d, replica) for d in data]) if any(context.method.at("local")) else None
    slots, slot_dims = _stacked([a.slots for a in assignments])
    memory, memory_dims = _stacked(memories)
    # Names, tensors, and whether each client has its own.
    table: dict[str, tuple[Any, Any]] = {
        "params": (a.params, None),
        "lr": (torch.tensor(a.work.lr, dtype=replica.exact), None),
        "x": (padded.x, 0),
        "y": (padded.y, 0),
        "rows": (padded.rows, None if padded.rows is None else 0),
        "last": (torch.tensor(padded.steps), 0),
        "slots": (slots, slot_dims),
        "memory": (memory, memory_dims),
        "counts": (counts, None if counts is None else 0),
    }
    arguments = tuple(value for value, _ in table.values())
    run = vmap(visit.visit, in_dims=tuple(dim for _, dim in table.values()))
    with one_by_one(), timed("vectorised visits"):
        if context.compile and visit.steps <= COMPILED_STEPS:
            key = ("compiled", *kind, padded.x.shape, padded.rows is None, visit.ends, str(slot_dims))
            if key not in context.kept:
                context.kept[key] = compile_function(run, arguments)
            run = context.kept[key]
        delta, sent, kept, loss = run(*arguments)
    rows = zip(assignments, data, padded.steps, loss.tolist(), flops, strict=True)
    updates = [
        Update(
            round=a.round,
            client=a.client,
            method=context.method.digest,
            examples=len(examples),
            steps=steps,
            delta={},
            metrics={"train_loss": mean, "flops": cost},
        )
        for a, examples, steps, mean, cost in rows
    ]
    return TrainResult(places, tuple(updates), delta, {}, sent, kept, True)


def _stacked(many: Sequence[Slots]) -> tuple[Slots, Any]:
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


def _costs(
    context: ClientContext,
    assignments: Sequence[Assignment],
    data: Sequence[Examples],
    memories: Sequence[Slots],
    sizes: Sequence[Sequence[int]],
    kind: tuple[Any, ...],
) -> tuple[list[float], frozenset[str]]:
    """(each client's FLOPs, the parameters that get no gradient), known from estimates of every size of batch."""
    flops = []
    idle: frozenset[str] = frozenset()
    for a, examples, memory, row in zip(assignments, data, memories, sizes, strict=True):
        cost = estimate_flops(context, a, examples, memory, row, ("group", *kind))
        flops.append(float(cost.around + sum(cost.steps[size] for size in row)))
        idle = cost.idle
    return flops, idle
