"""The local step: loss → tally → correct → clip → move. It is written once, in `LocalSteps.step`.

One client and many at once differ in how they get their gradients, and in nothing else. `AutogradSteps` differentiates
at the model's own parameters by torch's tape, and moves them in place. `FunctionalSteps` differentiates a function of
the parameters by `torch.func`, which `vmap` turns into the steps of many clients. Whatever changes the loss, the
gradients or the move for all methods, such as a new setting of `Work`, belongs into this file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value

from fedstrata.client.context import ModelReplica
from fedstrata.client.gradients import compute_gradient
from fedstrata.client.hooks import HookSet
from fedstrata.client.large_params import LargeParams, MovedGradients
from fedstrata.core.optim import Move, Sgd, build_optimizer, move_in_place
from fedstrata.core.technique import Batch, Buffers
from fedstrata.core.tensors import Tensors, are_disjoint, clone, scale, swap_values, whole_norm
from fedstrata.core.types import Precision, Slots, Work
from fedstrata.errors import FedstrataError
from fedstrata.models.frozen_prefix import Cut
from fedstrata.models.in_place import work_in_place
from fedstrata.models.layer_gradients import Gradients, Layer
from fedstrata.models.norms import evaluation_mode
from fedstrata.models.taps import hook_place, stages_to, value_at
from fedstrata.system.timing import timed

Forward = Callable[[Tensor], Tensor]
"""Inputs → logits."""


@dataclass(eq=False)
class Objective:
    """The local loss of a visit: the task's, on outputs that techniques may change, plus the techniques' terms.

    Args:
        model: called with parameters of its own, or with others for a hook that asks for them.
        params: the parameters at the current step.
        buffers: the running statistics; a hook's own passes leave them as they are.
        hooks: of the techniques.
        policy: for running statistics, in passes that a hook asks for.
        functional: True if the parameters are given to the model, False if it holds them itself.
        precision: that the loss is computed in; gradients are taken outside of it, as torch asks for.
        task_loss: (outputs, targets) → the task's loss.
        rows: which rows of the batch at hand are real; None where all are.
        masks: what dropout layers multiply with, one after the other, where they do not draw themselves.
    """

    model: nn.Module
    params: Tensors
    buffers: Tensors
    hooks: HookSet
    policy: Buffers
    functional: bool
    task_loss: Callable[[Tensor, Tensor], Tensor]
    precision: Precision = "fp32"
    rows: Tensor | None = None
    masks: Iterator[Tensor] = field(default_factory=lambda: iter(()))
    _current: list[Batch] = field(default_factory=list)
    _nested: bool = False
    _silent: bool = False
    _stages: dict[str, list[nn.Module]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._outputs, self._losses = self.hooks.outputs, self.hooks.all("loss")

    @cached_property
    def _own_tensors(self) -> Tensors:
        """The model's tensors by name, where it holds them itself."""
        return {**self.params, **self.buffers}

    @cached_property
    def _modules(self) -> tuple[nn.Module, ...]:
        return tuple(self.model.modules())

    def batch(self, x: Tensor, y: Tensor, step: int, params: Tensors) -> Batch:
        """A step as the hooks will see it."""
        gradient, forward = partial(self._gradient, x, y, step), partial(self._forward, x)
        return Batch(x, y, params, step, x, gradient, forward, rows=self.rows)

    def __call__(self, batch: Batch, forward: Forward) -> tuple[Tensor, Tensor]:
        """(the task's loss, the whole loss)."""
        self._current[:] = [batch]
        with computing_in(self.precision, batch.x.device):
            batch.logits = forward(batch.x)
            for output in self._outputs:
                batch.logits = output(batch)
            task_loss = loss = self.task_loss(batch.logits, batch.y)
            for term in self._losses:
                loss = loss + term(batch)
        return task_loss, loss

    def forget(self) -> None:
        """Let go of the last batch."""
        self._current.clear()

    @contextmanager
    def attach_features(self) -> Iterator[None]:
        """Inside, the `features` hooks are attached to the modules that they name."""
        handles = []
        for functions in self.hooks.all("features"):
            for name in (name for name in functions if name != ""):
                handles.append(hook_place(self.model, name, partial(self._replace_features, functions[name])))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def attach_masks(self, layers: Sequence[str]) -> Iterator[None]:
        """Inside, these dropout layers multiply with what they are given, and draw nothing."""
        modules = [self.model.get_submodule(name) for name in dict.fromkeys(layers)]
        handles = [m.eval().register_forward_hook(self._drop) for m in dict.fromkeys(modules)]
        try:
            yield
        finally:
            for module, handle in zip(dict.fromkeys(modules), handles, strict=True):
                module.train()
                handle.remove()

    def _drop(self, module: nn.Module, args: Any, there: Tensor) -> Tensor:
        return there if self._silent else there * next(self.masks).to(there.dtype)

    def _replace_features(self, function: Callable[[Batch, Tensor], Tensor], there: Tensor) -> Tensor:
        return there if self._silent else function(self._current[-1], there)

    def _forward(self, x: Tensor, given: Tensors, module: str) -> Tensor:
        """What the model or one of its modules puts out at other parameters, without hooks, as in an evaluation."""
        given = {**given, **clone({n: given.get(n, b) for n, b in self.buffers.items()})}
        self._silent = True
        try:
            with self._evaluation(len(x)):
                if not self.functional and not torch.is_grad_enabled():
                    with swap_values(self._own_tensors, given):
                        return self._run_to(x, module)
                values = {**self.params, **given}
                return value_at(self.model, module, partial(functional_call, self.model, values, (x,)))
        finally:
            self._silent = False

    @contextmanager
    def _evaluation(self, rows: int) -> Iterator[None]:
        """Inside, the model is in the modes of an evaluation; afterwards in those that it trains in."""
        modes = [module.training for module in self._modules]
        try:
            with evaluation_mode(self.model, self.policy, rows):
                yield
        finally:
            for module, mode in zip(self._modules, modes, strict=True):
                module.training = mode

    def _run_to(self, x: Tensor, place: str) -> Tensor:
        """What is at a place for these inputs; where stages lead there, without any hook."""
        stages = self._stages.get(place)
        if stages is None:
            stages = self._stages[place] = stages_to(self.model, place)
        if not stages:
            return value_at(self.model, place, partial(self.model, x))
        for stage in stages:
            x = stage(x)
        return x

    def _gradient(self, x: Tensor, y: Tensor, step: int, given: Tensors) -> Tensors:
        """Gradient of the whole loss at other parameters; running statistics stay untouched."""
        if self._nested:
            raise FedstrataError("Batch.gradient cannot be asked for by a loss or output hook: it would call itself")
        before, self._nested = list(self._current), True
        buffers = clone(self.buffers)

        def loss(moved: Tensors, forward: Forward) -> Tensor:
            batch = self.batch(x, y, step, moved)
            batch.again = True
            return self(batch, forward)[1]

        def elsewhere(moved: Tensors) -> Tensor:
            params = {**self.params, **moved}
            return loss(params, lambda x: functional_call(self.model, {**params, **buffers}, (x,)))

        try:
            if self.functional:
                grads: Tensors = grad(elsewhere)(given)
                return grads
            with swap_values(self._own_tensors, {**given, **buffers}):
                return compute_gradient(lambda: loss(self.params, self.model), {n: self.params[n] for n in given})
        finally:
            self._current[:], self._nested = before, False


def computing_in(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Inside, forward passes compute in this precision; for fp32 nothing is entered at all.

    The parameters' copies in lower precision are not kept from use to use: a hook may ask for a pass with other values
    in the same parameters, and many clients' parameters are not what torch keeps them by.
    """
    if precision == "fp32":
        return _AS_IT_IS
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


_AS_IT_IS = nullcontext()


def is_plain(work: Work) -> bool:
    """True if a step of which no technique knows is w ← w − lr·∇ and nothing else."""
    return build_optimizer(work.optimizer) == Sgd() and work.clip is None


class LocalSteps(ABC):
    """The local steps of a visit, of one client or of many at once.

    Args:
        replica: the model.
        policy: for running statistics.
        hooks: of the techniques.
        work: how to train; its learning rate may be a tensor.
        params: the parameters that the first step begins with.
        moved: those that the steps move; they are changed in place.
        move: how they move, if not in place.
    """

    functional: ClassVar[bool]
    """True if the parameters are given to the model, False if it holds them itself."""

    untracked: AbstractContextManager[Any]
    """What hooks run in that must leave nothing on torch's tape."""

    def __init__(
        self,
        replica: ModelReplica,
        policy: Buffers,
        hooks: HookSet,
        work: Work,
        params: Tensors,
        moved: Tensors,
        move: Move = move_in_place,
    ) -> None:
        self.objective = Objective(
            replica.model,
            params,
            replica.buffers,
            hooks,
            policy,
            self.functional,
            replica.task.mean_loss,
            work.precision,
        )
        self.hooks, self.work, self.clip, self.precision = hooks, work, work.clip, work.precision
        self.names = list(moved)
        self.changes = bool(hooks.all("tally") or hooks.all("correct") or work.clip is not None)
        scales = hooks.step_scales(moved)
        self._start = partial(build_optimizer(work.optimizer).start, list(moved.values()), work.lr, scales, move)
        self.begin()

    def begin(self) -> None:
        """Be ready for the first step of a visit."""
        self.move = self._start()
        self.taken = 0
        self.tallies: Slots = {}
        self.grads: Sequence[Tensor | None] = ()

    def forget(self) -> None:
        """Let go of what a visit leaves; `begin` makes ready for another one."""
        del self.move, self.tallies, self.grads
        self.objective.forget()

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step of the optimiser: the task's loss before it."""
        self.grads = ()  # those of the step before: their memory is used again
        batch, task_loss, self.grads = self.differentiate(x, y)
        self.taken += 1
        if self.changes:
            with timed("techniques"), self.untracked:
                # A layer that this step did not use has no gradient and gets none.
                used = {n: g for n, g in zip(self.names, self.grads, strict=True) if g is not None}
                self.tallies = self.hooks.update_tallies(self.tallies, used, batch)
                used = self.hooks.correct_gradients(used, batch, own=are_disjoint(used, self.tallies))
                used = self.clip_gradients(used)
                self.grads = [used.get(n) for n in self.names]
        with timed("optimiser"):
            self.move(self.grads)
        return task_loss

    def clip_gradients(self, grads: Tensors) -> Tensors:
        """The gradients, scaled down where the norm of all of them together is above the limit."""
        if self.clip is None or not grads:
            return grads
        return scale(grads, torch.clamp(self.clip / (whole_norm(grads) + 1e-6), max=1.0))

    @abstractmethod
    def differentiate(self, x: Tensor, y: Tensor) -> tuple[Batch, Tensor, Sequence[Tensor | None]]:
        """(the step as hooks see it, the task's loss, the raw gradient of the whole loss for each of the names)."""


class AutogradSteps(LocalSteps):
    """The steps of one client, by torch's tape: the replica's own parameters move, in place.

    Args:
        replica: the model, loaded, with gradients required of what trains.
        policy: for running statistics.
        hooks: of the techniques.
        work: how to train.
        forward: what runs the model: the model itself, or its compiled form.
        large: parameters that the replica has borrowed, if any.
    """

    functional = False

    def __init__(
        self,
        replica: ModelReplica,
        policy: Buffers,
        hooks: HookSet,
        work: Work,
        forward: Forward,
        large: LargeParams | None = None,
    ) -> None:
        self.untracked, self.forward = torch.no_grad(), forward
        trained = {n: p for n, p in replica.params.items() if p.requires_grad}
        self.leaves = list(trained.values())
        moved = {n: p.detach() for n, p in trained.items()}
        move = move_in_place
        if large is not None and large.names:
            large.follow(moved)
            move = large.move
        super().__init__(replica, policy, hooks, work, replica.params, moved, move)
        self._open_gradients: Callable[[], Gradients] = Gradients
        if large is not None and large.names and is_plain(work) and not hooks.hooks:
            self._open_gradients = partial(MovedGradients, large, float(work.lr))
        # A task of the user's own may work on outputs in place, which torch forbids for leaves: it gets a copy.
        self._foreign_task = not type(replica.task).__module__.startswith("fedstrata.")
        self.layers: Layer | None = None
        """The model's layers, where nobody looks and torch's tape is not needed below the outputs."""

    @contextmanager
    def running(self, replica: ModelReplica, nobody_looks: bool, whole: bool = True) -> Iterator[None]:
        """Inside, steps may be taken.

        Args:
            replica: the model.
            nobody_looks: True if no technique looks at what passes, so that it may be overwritten or not be kept.
            whole: False if only a part of the model runs.
        """
        known = nobody_looks and whole and self.precision == "fp32"
        self.layers = replica.known_layers if known else None
        with work_in_place(replica.in_place) if nobody_looks else self.objective.attach_features():
            yield

    def differentiate(self, x: Tensor, y: Tensor) -> tuple[Batch, Tensor, Sequence[Tensor | None]]:
        """Forward and backward pass."""
        if self.layers is not None:
            return self._differentiate_layers(self.layers, x, y)
        with timed("forward"):
            batch = self.objective.batch(x, y, self.taken, self.objective.params)
            task_loss, loss = self.objective(batch, self.forward)
        if not loss.requires_grad:
            return batch, task_loss.detach(), [None] * len(self.leaves)
        with timed("backward"):
            return batch, task_loss.detach(), self._backward(loss)

    def _differentiate_layers(
        self, layers: Layer, x: Tensor, y: Tensor
    ) -> tuple[Batch, Tensor, Sequence[Tensor | None]]:
        """The same, with torch's tape for the loss alone."""
        gradients = self._open_gradients()
        with timed("forward"):
            with self.untracked:
                outputs, pass_back = layers(x, False)
            outputs.requires_grad_()
            batch = self.objective.batch(x, y, self.taken, self.objective.params)
            task_loss, loss = self.objective(batch, lambda x: outputs.clone() if self._foreign_task else outputs)
        with timed("backward"):
            if pass_back is not None and loss.requires_grad:
                (gradient,) = torch.autograd.grad(loss, [outputs])
                with self.untracked:
                    pass_back(gradient, gradients)
        return batch, task_loss.detach(), [gradients.get(id(leaf)) for leaf in self.leaves]

    def _backward(self, loss: Tensor) -> Sequence[Tensor | None]:
        """The raw gradients; where they will be changed, in memory that nobody else holds."""
        if not self.changes:
            return torch.autograd.grad(loss, self.leaves, allow_unused=True)
        torch.autograd.backward(loss, inputs=self.leaves)  # which copies gradients that are shared or expanded
        grads = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        return grads

    def cache_prefix(self, cut: Cut, inputs: Iterable[Tensor]) -> CachedPrefix:
        """From now on run the model above a cut alone, on what the part below it gives for all inputs, computed now."""
        with torch.no_grad(), computing_in(self.precision, self.leaves[0].device):
            parts = [cut.below(x) for x in inputs]
        self.forward = CachedPrefix(cut.above, tuple(torch.cat(t) for t in zip(*parts, strict=True)), torch.empty(0))
        return self.forward


@dataclass(eq=False)
class CachedPrefix:
    """A forward pass that begins where something trains, on what the part below it gave for all examples.

    Args:
        above: the model from there on.
        crossing: what goes into it, a row per example.
        rows: the examples of the batch at hand, whatever inputs it is called with.
    """

    above: Callable[..., Tensor]
    crossing: tuple[Tensor, ...]
    rows: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """The model's outputs for the batch at hand."""
        return self.above(*(t[self.rows] for t in self.crossing))


class FunctionalSteps(LocalSteps):
    """The steps of many clients at once: a function of tensors alone, for `vmap`.

    What stays apart from one client's: `torch.func` differentiates without a tape, so there is none to be kept out of,
    and it gives every name a gradient; and before each step the caller sets the objective's `params`, which are the
    same for all clients at first, and its `task_loss`, for padded rows do not count.
    """

    functional = True
    untracked = nullcontext()

    def differentiate(self, x: Tensor, y: Tensor) -> tuple[Batch, Tensor, Sequence[Tensor | None]]:
        """The loss as a function of what moves, differentiated."""
        at = self.objective.params
        loss = partial(self._loss, x, y)
        grads, (_, task_loss) = grad_and_value(loss, has_aux=True)({n: at[n] for n in self.names})
        return self.objective.batch(x, y, self.taken, at), task_loss, [grads[n] for n in self.names]

    def _loss(self, x: Tensor, y: Tensor, moved: Tensors) -> tuple[Tensor, Tensor]:
        """(whole loss, the task's)."""
        params = {**self.objective.params, **moved}
        batch = self.objective.batch(x, y, self.taken, params)
        task_loss, whole = self.objective(batch, lambda x: functional_call(self.objective.model, params, (x,)))
        return whole, task_loss
