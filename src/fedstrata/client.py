"""One client, one round: `train_client` turns an assignment, the client's data and its memory into an update.

It is pure: the model instance is scratch that is loaded anew, the random streams come from the assignment's seed, and
what the client will remember is returned, not stored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial, reduce
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.core import Assignment, Batch, ClientView, Hooks, Method, Slots, Update, Work
from fedstrata.cost import FlopCount
from fedstrata.data.examples import Augment, Examples, TensorExamples
from fedstrata.errors import FedstrataError, UsageError, did_you_mean
from fedstrata.optim import build_optimizer
from fedstrata.strata import Stratum, strata
from fedstrata.tensors import Tensors, clone, derive, generator, subtract

T = TypeVar("T")

BUFFERS = "(buffers)"
"""Where a client's memory keeps its own running statistics under the policy `local`."""

Build = Callable[[str], nn.Module]
"""Makes the model of an architecture; "" is the server's own."""


@dataclass(frozen=True, eq=False)
class Bench:
    """A scratch model with its tensors by name."""

    model: nn.Module
    params: Tensors
    buffers: Tensors
    initial: Tensors
    constants: tuple[Tensors, Tensors]
    strata: tuple[Stratum, ...]
    batch_norm: bool


@dataclass(eq=False)
class Workshop:
    """What a worker keeps between visits, none of it state of the federation: scratch models, and measured FLOPs.

    Args:
        build: makes the model of an architecture.
        method: the method that this federation runs.
        augment: changes training inputs, batch by batch.
        device: where training runs.
        sample: one batch of inputs, to find the strata's order of execution.
    """

    build: Build
    method: Method
    augment: Augment | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sample: Tensor | None = None
    benches: dict[str, Bench] = field(default_factory=dict)
    flops: dict[Any, int] = field(default_factory=dict)

    def bench(self, arch: str) -> Bench:
        """The scratch model of an architecture, made at its first use."""
        if arch not in self.benches:
            model = self.build(arch).to(self.device).train()
            self.benches[arch] = Bench(
                model=model,
                params=dict(model.named_parameters()),
                buffers=running(model),
                initial=clone(running(model)),
                constants=_constants(model),
                strata=strata(model, self.sample if self.sample is None else self.sample.to(self.device)),
                batch_norm=any(isinstance(m, _BatchNorm) for m in model.modules()),
            )
        return self.benches[arch]


def running(model: nn.Module) -> Tensors:
    """A model's buffers by name, without those that its own state_dict leaves out (constants, caches)."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _constants(model: nn.Module) -> tuple[Tensors, Tensors]:
    """(the buffers that state_dict leaves out, their first values): every visit begins with these."""
    kept = model.state_dict().keys()
    live = {name: buffer for name, buffer in model.named_buffers() if name not in kept}
    return live, clone(live)


def load(into: Tensors, values: Tensors) -> None:
    """Copy named values into a model's own tensors."""
    if values:
        with torch.no_grad():
            torch._foreach_copy_([into[n] for n in values], list(values.values()))


def batches(examples: int, work: Work, rng: torch.Generator, drop_single: bool) -> Iterator[Tensor]:
    """Index tensors, one a step: a fresh permutation every epoch, the last batch of an epoch possibly smaller.

    `drop_single` leaves out a last batch of one example, which normalisation over the batch cannot use.
    """
    left = work.steps
    if examples == 0 or (drop_single and min(examples, work.batch_size) == 1):
        return
    for _ in range(work.epochs if left is None else left):
        for index in torch.split(torch.randperm(examples, generator=rng), work.batch_size):
            if drop_single and len(index) == 1:
                continue
            if left is not None:
                if left == 0:
                    return
                left -= 1
            yield index


def seed_global(seed: int, device: torch.device, everything: bool = True) -> None:
    """Seed what dropout and augmentation draw from and, with `everything`, what a user's dataset may draw from."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    if everything:
        random.seed(seed)
        np.random.seed(seed % 2**32)


def _starting_buffers(method: Method, bench: Bench, assignment: Assignment, memory: Slots) -> Tensors:
    """The client's own running statistics, the server's, or, where there are none yet, the model's initial ones."""
    if method.buffers == "local":
        return memory.get(BUFFERS, bench.initial)
    return assignment.buffers or bench.initial


@contextmanager
def _tapped(
    model: nn.Module, objective: _Objective, features: Sequence[Mapping[str, Callable[[Batch, Tensor], Tensor]]]
) -> Iterator[None]:
    """The techniques' `features` hooks, attached to the modules that they name."""
    handles = []
    for functions in features:
        for name, function in functions.items():
            hook = partial(_replace_output, function, objective)
            handles.append(_module(model, name).register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _replace_output(
    function: Callable[[Batch, Tensor], Tensor],
    objective: _Objective,
    module: nn.Module,
    args: Any,
    output: Tensor,
) -> Tensor | None:
    return None if objective.silent else function(objective.current[-1], output)


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [known for known, _ in model.named_modules() if known]
        raise UsageError(f"the model has no module '{name}'{did_you_mean(name, known)}") from None


def task_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy, with one sentence for a label that the model has no output for."""
    try:
        return F.cross_entropy(logits, labels, reduction=reduction)
    except IndexError:
        low, high = int(labels.min()), int(labels.max())
        wrong = high if high >= logits.shape[1] else low
        raise UsageError(f"there is a label {wrong}, but the model has {logits.shape[1]} outputs") from None


@dataclass(eq=False)
class _Objective:
    """The local loss of a visit: the task's, on outputs that techniques may change, plus the techniques' terms."""

    bench: Bench
    outputs: Sequence[Callable[[Batch], Tensor]]
    losses: Sequence[Callable[[Batch], Tensor]]
    current: list[Batch] = field(default_factory=list)
    nested: bool = False
    silent: bool = False

    def batch(self, x: Tensor, y: Tensor, step: int, params: Tensors) -> Batch:
        """A step as the hooks will see it."""
        return Batch(x, y, params, step, x, partial(self._gradient, x, y, step), partial(self._forward, x))

    def __call__(self, batch: Batch, forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """(task loss, whole loss)."""
        self.current[:] = [batch]
        batch.logits = forward(batch.x)
        for output in self.outputs:
            batch.logits = output(batch)
        task = loss = task_loss(batch.logits, batch.y)
        for term in self.losses:
            loss = loss + term(batch)
        return task, loss

    def _forward(self, x: Tensor, given: Tensors, module: str) -> Tensor:
        """What the model or one of its modules puts out at other parameters, without hooks."""
        buffers = {n: b.clone() for n, b in self.bench.buffers.items()}
        seen: list[Tensor] = []
        handle = _module(self.bench.model, module).register_forward_hook(lambda m, args, output: seen.append(output))
        self.silent = True
        try:
            functional_call(self.bench.model, {**self.bench.params, **given, **buffers}, (x,))
        finally:
            self.silent = False
            handle.remove()
        return seen[0]

    def _gradient(self, x: Tensor, y: Tensor, step: int, given: Tensors) -> Tensors:
        """Gradient of the whole loss at other parameters; running statistics stay untouched."""
        moved = {n: p.detach().requires_grad_() for n, p in given.items()}
        params = {**self.bench.params, **moved}
        buffers = {n: b.clone() for n, b in self.bench.buffers.items()}
        if self.nested:
            raise FedstrataError("Batch.gradient cannot be asked for by a loss or output hook: it would call itself")
        before, self.nested = list(self.current), True
        try:
            with torch.enable_grad():
                batch = self.batch(x, y, step, params)
                batch.again = True
                _, loss = self(batch, lambda x: functional_call(self.bench.model, {**params, **buffers}, (x,)))
                grads = torch.autograd.grad(loss, list(moved.values()), allow_unused=True, materialize_grads=True)
        finally:
            self.current[:], self.nested = before, False
        return dict(zip(moved, grads, strict=True))


def _corrected(corrections: Sequence[Callable[[Tensors, Batch], Tensors]], grads: Tensors, batch: Batch) -> Tensors:
    """The gradients with every technique's correction, each computed from the raw gradients, added."""
    out = dict(grads)
    for correct in corrections:
        for name, term in correct(grads, batch).items():
            if name in out:
                out[name] = out[name] + term
    return out


def _product(scales: Sequence[Tensors], names: Sequence[str], device: torch.device) -> list[Tensor] | None:
    """The product of the techniques' scales for the trained names, or None where nobody scales."""
    if not scales:
        return None
    one = torch.ones((), device=device)
    return [reduce(torch.mul, (s[n] for s in scales if n in s), one) for n in names]


@contextmanager
def own_rng() -> Iterator[None]:
    """Give the global generators of torch, Python and NumPy back as they were."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def train_client(shop: Workshop, assignment: Assignment, data: Examples, memory: Slots) -> tuple[Update, Slots]:
    """Train one client for one round: (update, what the client will remember if the server accepts it).

    Seeds global generators, which dropout, augmentation and datasets draw from; the caller gives them back (`own_rng`).
    """
    a, method = _assignment_on(shop.device, assignment), shop.method
    memory = _slots_on(shop.device, memory)
    bench = shop.bench(a.arch)
    _prepare(bench, method, a, memory)
    hooks: dict[str, Hooks] = {}
    before = after = 0
    if any(method.at("local")):
        seed_global(derive(a.seed, "local"), shop.device)
        key: Any = (a.arch, a.trains, tuple(a.slots), tuple(memory), len(data))
        hooks, before = _counted(shop, key, lambda: _open_hooks(method, bench, data, a, memory))
        _prepare(bench, method, a, memory)  # a technique's own passes may have moved statistics or modes
    seed_global(derive(a.seed, "train"), shop.device, everything=not isinstance(data, TensorExamples))
    train_loss, steps, flops = _train(shop, bench, a, data, hooks)

    delta = subtract({n: bench.params[n].detach() for n in a.travels}, a.params, a.travels)
    slots: Slots = {}
    kept, sent = dict(memory), delta
    if hooks:
        key = ("finish", a.arch, a.trains, *_present(hooks), len(data))
        (slots, kept, sent), after = _counted(
            shop, key, lambda: (*_finish(hooks, delta, memory), _uploaded(hooks, delta))
        )
    buffers: Tensors = {}
    if method.buffers != "drop" and bench.buffers:
        buffers = {n: b.detach().to("cpu", copy=True) for n, b in bench.buffers.items()}
        if method.buffers == "local":
            kept[BUFFERS] = buffers
    metrics = {"train_loss": train_loss, "flops": float(before + flops + after)}
    home = torch.device("cpu")
    sent, slots, kept = _slots_on(home, {"": sent})[""], _slots_on(home, slots), _slots_on(home, kept)
    return Update(a.round, a.client, method.digest, len(data), steps, sent, buffers, slots, metrics), kept


def _slots_on(device: torch.device, slots: Slots) -> Slots:
    """The tensors on a device, the very same ones where they are there already: a visit computes in one place."""
    if all(t.device.type == device.type for slot in slots.values() for t in slot.values()):
        return slots
    return {name: {n: t.to(device) for n, t in slot.items()} for name, slot in slots.items()}


def _assignment_on(device: torch.device, assignment: Assignment) -> Assignment:
    if device.type == "cpu":
        return assignment
    params = _slots_on(device, {"": assignment.params})[""]
    return replace(assignment, params=params, slots=_slots_on(device, assignment.slots))


def _prepare(bench: Bench, method: Method, assignment: Assignment, memory: Slots) -> None:
    """Load the scratch model, and freeze what does not train: autograd then skips the frozen prefix by itself."""
    load(bench.params, assignment.params)
    load(bench.buffers, _starting_buffers(method, bench, assignment, memory))
    load(*bench.constants)
    trains = set(assignment.trains)
    for name, p in bench.params.items():
        if p.requires_grad is not (name in trains):
            p.requires_grad_(name in trains)
    if not bench.model.training or method.techniques:
        bench.model.train()


def _train(
    shop: Workshop, bench: Bench, a: Assignment, data: Examples, hooks: Mapping[str, Hooks]
) -> tuple[float, int, int]:
    """The local steps of a visit: (mean loss, steps, FLOPs). The scratch model ends up trained."""
    outputs = [h.output for h in hooks.values() if h.output is not None]
    losses = [h.loss for h in hooks.values() if h.loss is not None]
    corrections = [h.correct for h in hooks.values() if h.correct is not None]
    features = [h.features for h in hooks.values() if h.features is not None]
    scales = [h.scale for h in hooks.values() if h.scale is not None]
    key = (a.arch, a.trains, *_present(hooks))
    model, params, device = bench.model, bench.params, shop.device
    names = [n for n in params if params[n].requires_grad]
    leaves = [params[n] for n in names]
    if not names:
        return 0.0, 0, 0
    objective = _Objective(bench, outputs, losses)
    optimizer = build_optimizer(a.work.optimizer)
    move = optimizer.start([p.detach() for p in leaves], a.work.lr, _product(scales, names, device))
    total, steps, flops = torch.zeros((), device=device), 0, 0

    def step(x: Tensor, y: Tensor) -> None:
        batch = objective.batch(x, y, steps, params)
        task, loss = objective(batch, model)
        total.add_(task.detach())
        grads: Sequence[Tensor | None] = [None] * len(leaves)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        if corrections or a.work.clip is not None:
            grads = _changed_gradients(corrections, a.work.clip, names, grads, batch)
        move(grads)

    with _tapped(model, objective, features) if features else nullcontext():
        for index in batches(len(data), a.work, generator(a.seed, "order"), bench.batch_norm):
            x, y = data.batch(index, shop.augment)
            if device.type != "cpu":
                x, y = x.to(device), y.to(device)
            flops += _counted(shop, (*key, x.shape), partial(step, x, y))[1]
            steps += 1
    return total.item() / max(steps, 1), steps, flops


def _changed_gradients(
    corrections: Sequence[Callable[[Tensors, Batch], Tensors]],
    clip: float | None,
    names: Sequence[str],
    grads: Sequence[Tensor | None],
    batch: Batch,
) -> list[Tensor | None]:
    """The gradients corrected and clipped; a layer that this step did not use has none and gets none."""
    used = _corrected(corrections, {n: g for n, g in zip(names, grads, strict=True) if g is not None}, batch)
    if clip is not None and used:
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(used.values()))))
        factor = torch.clamp(clip / (norm + 1e-6), max=1.0)
        used = dict(zip(used, torch._foreach_mul(list(used.values()), factor), strict=True))
    return [used.get(n) for n in names]


def _counted(shop: Workshop, key: Any, compute: Callable[[], T]) -> tuple[T, int]:
    """(result, FLOPs): counted at the first, real execution with this key, and known from then on.

    Counting every step would cost more than training; what the key names (sub-model, plan, hooks, inputs) settles the
    number of matrix products and convolutions.
    """
    known = shop.flops.get(key)
    if known is not None:
        return compute(), known
    with FlopCount() as counter:
        result = compute()
    shop.flops[key] = counter.total
    return result, counter.total


def _open_hooks(method: Method, bench: Bench, data: Examples, a: Assignment, memory: Slots) -> dict[str, Hooks]:
    return {
        t.name: t.local(
            ClientView(
                model=bench.model,
                data=data,
                assignment=a,
                strata=bench.strata,
                slot=a.slots.get(t.name, {}),
                memory=memory.get(t.name, {}),
                rng=generator(a.seed, t.name),
            )
        )
        for t in method.at("local")
    }


def _present(hooks: Mapping[str, Hooks]) -> Iterator[tuple[Any, ...]]:
    """What settles how much the hooks compute: which of them there are, and the variant that they name."""
    for name, hook in hooks.items():
        yield (name, hook.variant, *(getattr(hook, f.name) is None for f in fields(hook)))


def _uploaded(hooks: Mapping[str, Hooks], delta: Tensors) -> Tensors:
    """The delta that travels: what was trained, plus what techniques add; each sees what was trained."""
    sent = dict(delta)
    for hook in hooks.values():
        if hook.upload is not None:
            for name, term in hook.upload(delta).items():
                if name in sent:
                    sent[name] = sent[name] + term
    return sent


def _finish(hooks: dict[str, Hooks], delta: Tensors, memory: Slots) -> tuple[Slots, Slots]:
    """(slots that travel, the client's whole new memory)."""
    slots: Slots = {}
    kept = dict(memory)
    for name, hook in hooks.items():
        if hook.finish is not None:
            slot, remembered = hook.finish(delta)
            if slot:
                slots[name] = slot
            if remembered is not None:
                kept[name] = remembered
    return slots, kept
