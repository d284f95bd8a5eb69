"""The local loss of a visit: the task's, on outputs that techniques may change, plus the techniques' terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedstrata.core.technique import Batch, Buffers
from fedstrata.core.tensors import Tensors, clone, swap_values
from fedstrata.errors import FedstrataError
from fedstrata.models.norms import evaluation_mode
from fedstrata.models.taps import stages_to, value_at
from fedstrata.tasks.classification import task_loss

Differentiate = Callable[[Callable[[Tensors], Tensor], Tensors], Tensors]
"""(loss as a function of named tensors, where) → its gradient there."""


def by_autograd(loss: Callable[[], Tensor], leaves: Tensors) -> Tensors:
    """The gradient by torch's tape; what the loss does not use has a gradient of zero."""
    frozen = [p for p in leaves.values() if not p.requires_grad]
    for p in frozen:
        p.requires_grad_()
    try:
        with torch.enable_grad():
            value = loss()
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    finally:
        for p in frozen:
            p.requires_grad_(False)
    return dict(zip(leaves, grads, strict=True))


@dataclass(eq=False)
class Objective:
    """The local loss of a visit: the task's, on outputs that techniques may change, plus the techniques' terms.

    Args:
        model: called with parameters of its own, or with others for a hook that asks for them.
        params: the parameters at the current step.
        buffers: the running statistics; a hook's own passes leave them as they are.
        outputs: what changes the model's outputs.
        losses: their `loss` hooks.
        task: (logits, labels) → the task's loss.
        differentiate: how a hook's wish for a gradient elsewhere is met where the model does not hold its parameters
            itself; None where it does.
        policy: for running statistics, in passes that a hook asks for.
    """

    model: nn.Module
    params: Tensors
    buffers: Tensors
    outputs: Sequence[Callable[[Batch], Tensor]]
    losses: Sequence[Callable[[Batch], Tensor]]
    task: Callable[[Tensor, Tensor], Tensor] = task_loss
    differentiate: Differentiate | None = None
    policy: Buffers = "average"
    current: list[Batch] = field(default_factory=list)
    nested: bool = False
    silent: bool = False
    _ways: dict[str, list[nn.Module]] = field(default_factory=dict)

    @cached_property
    def _own(self) -> Tensors:
        """The model's tensors by name, where it holds them itself."""
        return {**self.params, **self.buffers}

    @cached_property
    def _modules(self) -> tuple[nn.Module, ...]:
        return tuple(self.model.modules())

    def batch(self, x: Tensor, y: Tensor, step: int, params: Tensors) -> Batch:
        """A step as the hooks will see it."""
        return Batch(x, y, params, step, x, partial(self._gradient, x, y, step), partial(self._forward, x))

    def __call__(self, batch: Batch, forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """(task loss, whole loss)."""
        self.current[:] = [batch]
        batch.logits = forward(batch.x)
        for output in self.outputs:
            batch.logits = output(batch)
        task = loss = self.task(batch.logits, batch.y)
        for term in self.losses:
            loss = loss + term(batch)
        return task, loss

    def _forward(self, x: Tensor, given: Tensors, module: str) -> Tensor:
        """What the model or one of its modules puts out at other parameters, without hooks, as in an evaluation."""
        given = {**given, **clone({n: given.get(n, b) for n, b in self.buffers.items()})}
        self.silent = True
        try:
            with self._evaluated(len(x)):
                if self.differentiate is None and not torch.is_grad_enabled():
                    with swap_values(self._own, given):
                        return self._seen(x, module)
                values = {**self.params, **given}
                return value_at(self.model, module, partial(functional_call, self.model, values, (x,)))
        finally:
            self.silent = False

    @contextmanager
    def _evaluated(self, rows: int) -> Iterator[None]:
        """Inside, the model is in the modes of an evaluation; afterwards in those that it trains in."""
        modes = [module.training for module in self._modules]
        try:
            with evaluation_mode(self.model, self.policy, rows):
                yield
        finally:
            for module, mode in zip(self._modules, modes, strict=True):
                module.training = mode

    def _seen(self, x: Tensor, place: str) -> Tensor:
        """What is at a place for these inputs; where stages lead there, without any hook."""
        way = self._ways.get(place)
        if way is None:
            way = self._ways[place] = stages_to(self.model, place)
        if not way:
            return value_at(self.model, place, partial(self.model, x))
        for stage in way:
            x = stage(x)
        return x

    def _gradient(self, x: Tensor, y: Tensor, step: int, given: Tensors) -> Tensors:
        """Gradient of the whole loss at other parameters; running statistics stay untouched."""
        if self.nested:
            raise FedstrataError("Batch.gradient cannot be asked for by a loss or output hook: it would call itself")
        before, self.nested = list(self.current), True
        buffers = clone(self.buffers)

        def loss(moved: Tensors, forward: Callable[[Tensor], Tensor]) -> Tensor:
            batch = self.batch(x, y, step, moved)
            batch.again = True
            return self(batch, forward)[1]

        def elsewhere(moved: Tensors) -> Tensor:
            params = {**self.params, **moved}
            return loss(params, lambda x: functional_call(self.model, {**params, **buffers}, (x,)))

        try:
            if self.differentiate is not None:
                return self.differentiate(elsewhere, given)
            with swap_values(self._own, {**given, **buffers}):
                return by_autograd(lambda: loss(self.params, self.model), {n: self.params[n] for n in given})
        finally:
            self.current[:], self.nested = before, False
