"""The local step: loss, tally, correction, clipping, move."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedstrata.client.context import ClientContext, ModelReplica
from fedstrata.client.hooks import HookSet
from fedstrata.client.objective import Objective
from fedstrata.core.optim import build_optimizer
from fedstrata.core.tensors import Tensors, are_disjoint, scale, whole_norm
from fedstrata.core.types import Assignment, Slots
from fedstrata.system.timing import timed

Forward = Callable[[Tensor], Tensor]


class LocalSteps:
    """The local steps of a visit; they train the scratch model in place."""

    def __init__(
        self, context: ClientContext, replica: ModelReplica, a: Assignment, hooks: HookSet, forward: Forward
    ) -> None:
        self.hooks, self.forward, self.clip = hooks, forward, a.work.clip
        self.names = [n for n, p in replica.params.items() if p.requires_grad]
        self.leaves = [replica.params[n] for n in self.names]
        self.objective = Objective(
            replica.model,
            replica.params,
            replica.buffers,
            hooks.outputs,
            hooks.all("loss"),
            policy=context.method.buffers,
        )
        self.move = build_optimizer(a.work.optimizer).start(
            [p.detach() for p in self.leaves], a.work.lr, hooks.scale(self.names, context.device)
        )
        self.changes = bool(hooks.all("tally") or hooks.all("correct") or a.work.clip is not None)
        self.no_grad = torch.no_grad()
        self.total = torch.zeros((), dtype=replica.exact, device=context.device)
        self.taken = 0
        self.tallies: Slots = {}
        self.grads: Sequence[Tensor | None] = ()

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step of the optimiser."""
        with timed("forward"):
            batch = self.objective.batch(x, y, self.taken, self.objective.params)
            task, loss = self.objective(batch, self.forward)
            self.total.add_(task.detach())
        self.taken += 1
        self.grads = [None] * len(self.leaves)
        if loss.requires_grad:
            with timed("backward"):
                self.grads = self._gradients(loss)
        if self.changes:
            with timed("techniques"), self.no_grad:
                # A layer that this step did not use has no gradient and gets none.
                used = {n: g for n, g in zip(self.names, self.grads, strict=True) if g is not None}
                self.tallies = self.hooks.tallied(self.tallies, used, batch)
                used = clipped(self.hooks.corrected(used, batch, are_disjoint(used, self.tallies)), self.clip)
                self.grads = [used.get(n) for n in self.names]
        with timed("optimiser"):
            self.move(self.grads)

    def _gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        """The raw gradients; where they will be changed, in memory that nobody else holds."""
        if not self.changes:
            return torch.autograd.grad(loss, self.leaves, allow_unused=True)
        torch.autograd.backward(loss, inputs=self.leaves)  # which copies gradients that are shared or expanded
        grads = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        return grads

    @property
    def loss(self) -> float:
        """The mean of the task's loss over the steps."""
        return self.total.item() / max(self.taken, 1)


def clipped(grads: Tensors, limit: float | None) -> Tensors:
    """The gradients, scaled down where the norm of all of them together is above the limit."""
    if limit is None or not grads:
        return grads
    factor = torch.clamp(limit / (whole_norm(grads) + 1e-6), max=1.0)
    return scale(grads, factor)
