"""Many clients' dense networks trained at once, with kernels for stacks of matrices in place of `torch.func`.

A chain of linear layers and functions of single numbers needs no transformation to be computed for many clients: its
parameters are stacked, a linear layer is one product of stacks, and whatever lies in between works on any shape. That
leaves some ten calls per step for all clients together, and the gradients come out as the parameters lie in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.client.context import ModelReplica
from fedstrata.client.dropout import DropoutLayer, is_dropout
from fedstrata.client.group import ClientGroup, SharedAssignment, UnreadableExamples, shared_answers
from fedstrata.client.hooks import HookSet, build_hooks
from fedstrata.client.padded_batches import PaddedBatches
from fedstrata.client.step import LocalSteps
from fedstrata.client.visit import personal_names
from fedstrata.core.parts import Parts
from fedstrata.core.technique import Batch, Buffers
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Slots, Work, replace_fields
from fedstrata.errors import UsageError

POINTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity)
"""Layers that look at every number by itself."""


@dataclass(frozen=True, eq=False)
class Link:
    """A layer of a chain, the names of its parameters, where it has any, and what it draws, if it is dropout."""

    module: nn.Module
    weight: str = ""
    bias: str = ""
    dropout: DropoutLayer | None = None

    def run(self, x: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """What the layer puts out for inputs [clients, rows, …]; its parameters are stacked, or shared by all."""
        module = self.module
        if isinstance(module, nn.Flatten):
            return x.flatten(2)
        weight, bias = params.get(self.weight), params.get(self.bias)
        if isinstance(module, nn.Linear):
            assert weight is not None
            return _StackedLinear.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
        if isinstance(module, nn.LayerNorm):
            x = F.layer_norm(x, module.normalized_shape, None, None, module.eps)
            x = x if weight is None else x * _over_rows(weight)
            return x if bias is None else x + _over_rows(bias)
        out: Tensor = module(x)
        return out


def _over_rows(weight: Tensor) -> Tensor:
    """A vector per client, to be combined with each of the client's rows."""
    return weight.unsqueeze(1) if weight.dim() == 2 else weight


class _StackedLinear(torch.autograd.Function):
    """y = x·Wᵀ + b for a stack of clients; gradients are laid out as W is, which torch's own product does not do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        same, own = _shared(weight), None if bias is None else _shared(bias, axes=1)
        if same is None:
            rows = bias.unsqueeze(1) if bias is not None and bias.dim() == 2 else bias
            return torch.bmm(x, weight.mT) if rows is None else torch.baddbmm(rows, x, weight.mT)
        if bias is None or own is not None:
            return F.linear(x, same, own)
        return F.linear(x, same) + bias.unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (g,), (x, weight) = grads, ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        back = None
        if wants_x:
            same = _shared(weight)
            back = torch.bmm(g, weight) if same is None else g @ same
        return back, torch.bmm(g.mT, x) if wants_weight else None, g.sum(1) if wants_bias else None


def _shared(tensor: Tensor, axes: int = 2) -> Tensor | None:
    """The tensor that all clients have in common, where there is one: products need not be taken for each then."""
    if tensor.dim() == axes:
        return tensor
    return None if tensor.stride(0) and len(tensor) > 1 else tensor[0]


def find_chain(model: nn.Module, x: Tensor | None) -> tuple[Link, ...] | None:
    """A model, for inputs like these, as a chain of layers that can be computed for many clients at once, or None."""
    links: list[Link] = []
    if x is None or isinstance(x, Parts) or not _collect(model, "", links):
        return None
    with torch.no_grad():
        for place, link in enumerate(links):
            rows = x.dim() == 2 or not isinstance(link.module, nn.Linear | nn.LayerNorm)
            if not rows or not x.is_floating_point() or x.dtype != torch.float32:
                return None
            if link.dropout is None:
                x = link.module(x)
            else:
                links[place] = replace(link, dropout=replace(link.dropout, shape=tuple(x.shape[1:])))
    return tuple(links)


def _collect(module: nn.Module, name: str, links: list[Link]) -> bool:
    """Add a module's layers, in order; False if one of them cannot be computed for many clients."""
    kind = type(module)
    if isinstance(module, nn.Sequential) and kind is nn.Sequential:  # iterated: named_children skips repetitions
        named_layers = zip(module._modules, module, strict=True)
        return all(_collect(child, f"{name}.{key}" if name else key, links) for key, child in named_layers)
    hooked = module._forward_hooks or module._forward_pre_hooks
    if is_dropout(module) and not hooked:
        links.append(Link(module, dropout=DropoutLayer(name, module.p, ())))
        return True
    whole = isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1)
    if hooked or not (kind in POINTWISE or whole or kind in (nn.Linear, nn.LayerNorm) or _does_nothing(module)):
        return False
    named = {key: f"{name}.{key}" if name else key for key, _ in module.named_parameters()}
    links.append(Link(module, named.get("weight", ""), named.get("bias", "")))
    return True


def _does_nothing(module: nn.Module) -> bool:
    return type(module) is nn.Dropout and module.p == 0


class StackedSteps(LocalSteps):
    """The steps of many clients, their parameters stacked; torch's tape gives each client its own gradient.

    The loss is the sum of the clients' losses, none of which depends on another's parameters.

    Args:
        chain: the model's layers.
        replica: the model.
        policy: for running statistics.
        hooks: of the techniques; they work on stacked tensors.
        work: how to train.
        params: the parameters that the first step begins with; those that move with an axis of clients, of one stride.
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
        self.untracked, self._chain, self._task = torch.no_grad(), chain, replica.task
        self.rows: Tensor | None = None
        self.masks: Sequence[Tensor] = ()
        super().__init__(replica, policy, hooks, work, params, moved)

    def differentiate(self, x: Tensor, y: Tensor) -> tuple[Batch, Tensor, Sequence[Tensor | None]]:
        """Forward and backward pass of all clients together; the loss is one per client."""
        at = self.objective.params
        leaves = {n: at[n].detach().requires_grad_() for n in self.names}
        params = {**at, **leaves}
        masks = iter(self.masks)
        with torch.enable_grad():
            out = x
            for link in self._chain:
                out = link.run(out, params) if link.dropout is None else out * next(masks)
            losses = self._mean_losses(out, y)
            grads = torch.autograd.grad(losses.sum(), list(leaves.values()))
        return self.objective.batch(x, y, self.taken, at), losses.detach(), grads

    def _mean_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Each client's mean loss over its real rows; 0 where there are none."""
        losses, weights = (t.view(y.shape[:2]) for t in self._task.terms(outputs.flatten(0, 1), y.flatten(0, 1)))
        if self.rows is not None:
            losses, weights = losses * self.rows, weights * self.rows
        total = weights.sum(1)
        return losses.sum(1) / torch.where(total > 0, total, torch.ones_like(total))

    def clip_gradients(self, grads: Tensors) -> Tensors:
        """Every client's gradients, scaled down where their norm is above the limit."""
        if self.clip is None or not grads:
            return grads
        norm = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads.values()]).norm(dim=0)
        factor = torch.clamp(self.clip / (norm + 1e-6), max=1.0)
        return {n: g * factor.view(-1, *(1,) * (g.dim() - 1)) for n, g in grads.items()}


def chain_of(group: ClientGroup) -> tuple[Link, ...] | None:
    """The chain of layers that a group can be trained by; None where `torch.func` has to do it."""
    context, a = group.context, group.template
    local = tuple(context.method.at("local"))
    uneven = len(set(group.steps)) > 1
    if context.compile or a.work.precision != "fp32" or personal_names(a):
        return None
    if not all(technique.stacks for technique in local) or (local and uneven):
        return None
    return known_chain(group)


def known_chain(group: ClientGroup) -> tuple[Link, ...] | None:
    """A group's model as a chain of layers, or None; found once for an architecture."""
    key, cache = ("chain", group.template.arch), group.context.cache
    if key not in cache:
        cache[key] = find_chain(group.replica.model, group.replica.sample)
    chain: tuple[Link, ...] | None = cache[key]
    return chain


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
        chain: their model.
        padded: their batches.
        idle: parameters that get no gradient.
        given: what techniques sent, what clients remember, and what was prepared; stacked, or shared by all.
    """
    a, clients = group.template, len(group)
    start = {n: a.params[n].unsqueeze(0).expand(clients, *a.params[n].shape) for n in a.trains}
    allocate = group.context.allocate_stack or (
        lambda like: {n: torch.empty(t.shape, dtype=t.dtype) for n, t in like.items()}
    )
    trained = allocate(start)
    for name, tensor in trained.items():
        tensor.copy_(start[name])
    hooks = _build_hooks(group, *given)
    moved = {n: t for n, t in trained.items() if n not in idle}
    params = {**a.params, **start}
    steps = StackedSteps(chain, group.replica, group.context.method.buffers, hooks, a.work, params, moved)
    total = _take_steps(steps, padded, trained)
    delta = {n: trained[n].sub_(a.params[n]) for n in a.uploads}
    slots, remembers = hooks.finish(delta, steps.tallies, given[1])
    rows = {**a.params, **group.replica.buffers}
    sent, kept = ({name: _expand(slot, rows, clients) for name, slot in many.items()} for many in (slots, remembers))
    return hooks.build_upload(delta), sent, kept, total / torch.tensor(padded.steps)


def _take_steps(steps: StackedSteps, padded: PaddedBatches, trained: Tensors) -> Tensor:
    """Train, each client for its own number of steps: the sum of each one's losses.

    All go on as long as the longest; what counts of the others is kept at their own last step.
    """
    total = torch.zeros(len(padded.steps))
    ended: list[tuple[slice, Tensors]] = []
    left = len(padded.steps)
    for step in range(padded.longest):
        if step == 1:
            steps.objective.params = {**steps.objective.params, **trained}
        steps.rows = None if padded.rows is None else padded.rows[:, step]
        steps.masks = [mask[:, step] for mask in padded.masks]
        total += steps.step(padded.x[:, step], padded.y[:, step])
        going = sum(count > step + 1 for count in padded.steps)
        if 0 < going < left:
            rows = slice(going, left)
            ended.append((rows, {n: t[rows].clone() for n, t in trained.items()}))
            left = going
    for rows, kept in ended:
        for name, tensor in kept.items():
            trained[name][rows] = tensor
    return total


def _build_hooks(group: ClientGroup, slots: Slots, memory: Slots, prepared: Slots) -> HookSet:
    """The techniques' hooks, on stacked tensors."""
    context = group.context
    if not any(context.method.at("local")):
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
    return {
        n: t.unsqueeze(0).expand(clients, *t.shape).clone() if n in like and t.shape == like[n].shape else t
        for n, t in tensors.items()
    }
