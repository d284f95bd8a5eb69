"""Many clients' dense networks trained at once, with kernels for stacks of matrices in place of `torch.func`.

A chain of linear layers and functions of single numbers needs no transformation to be computed for many clients: its
parameters are stacked, a linear layer is one product of stacks, and whatever lies in between works on any shape. That
leaves some ten calls per step for all clients together, and the gradients come out as the parameters lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.client.context import ModelReplica
from fedstrata.client.dropout import DropoutLayer, is_dropout
from fedstrata.client.group import ClientGroup, SharedAssignment, UnreadableExamples, shared_answers
from fedstrata.client.hooks import HookSet, build_hooks
from fedstrata.client.padded_batches import PaddedBatches
from fedstrata.client.step import LocalSteps, is_plain
from fedstrata.client.visit import personal_names
from fedstrata.core.parts import Parts
from fedstrata.core.technique import Batch, Buffers
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Slots, Work, replace_fields
from fedstrata.errors import UsageError
from fedstrata.models.passes import preserve_model

POINTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity)
"""Layers that look at every number by itself."""


class GradientSink(Protocol):
    """What takes the gradients of a backward pass, layer by layer from the last to the first."""

    def take_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """A weight's gradient is leftᵀ·right, client by client."""
        ...

    def take(self, name: str, gradient: Tensor) -> None:
        """The gradient of anything else."""
        ...


Back = Callable[[Tensor, bool, GradientSink], Tensor | None]
"""(gradient of a layer's outputs, whether that of its inputs is wanted, who takes its parameters') → of its inputs."""


@dataclass(frozen=True, eq=False)
class Link:
    """A layer of a chain, the names of its parameters, where it has any, and what it draws, if it is dropout."""

    module: nn.Module
    weight: str = ""
    bias: str = ""
    dropout: DropoutLayer | None = None

    def run(
        self, x: Tensor, params: Mapping[str, Tensor], trains: Container[str], masks: Iterator[Tensor]
    ) -> tuple[Tensor, Back]:
        """(what the layer puts out for inputs [clients, rows, …], its backward pass).

        Parameters are stacked, or shared by all clients; gradients are taken of those that train. A layer that drops
        multiplies with the next mask.
        """
        if self.dropout is not None:
            mask = next(masks)
            return x * mask, lambda g, wanted, sink: g * mask
        if isinstance(self.module, nn.Linear):
            return self._run_linear(x, params[self.weight], params.get(self.bias), trains)
        if isinstance(self.module, nn.Flatten):
            return x.flatten(2), lambda g, wanted, sink: g.view(x.shape)
        if isinstance(self.module, nn.ReLU):
            out = x.relu()
            return out, lambda g, wanted, sink: torch.ops.aten.threshold_backward(g, out, 0)
        return self._run_other(x, {n: params[n] for n in (self.weight, self.bias) if n in params}, trains)

    def _run_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, trains: Container[str]
    ) -> tuple[Tensor, Back]:
        """y = x·Wᵀ + b; the gradient of W is laid out as W is, which torch's own product of stacks does not do."""

        def back(g: Tensor, wanted: bool, sink: GradientSink) -> Tensor | None:
            same = _shared(weight)
            before = None if not wanted else torch.bmm(g, weight) if same is None else g @ same
            if self.weight in trains:
                sink.take_product(self.weight, g, x)
            if self.bias in trains:
                sink.take(self.bias, g.sum(1))
            return before

        return _multiply(x, weight, bias), back

    def _run_other(self, x: Tensor, params: Tensors, trains: Container[str]) -> tuple[Tensor, Back]:
        """Any other layer, by torch's tape."""
        leaf = x.detach().requires_grad_()
        leaves = {n: t.detach().requires_grad_() for n, t in params.items() if n in trains}
        with torch.enable_grad():
            out = self._call(leaf, {**params, **leaves})

        def back(g: Tensor, wanted: bool, sink: GradientSink) -> Tensor | None:
            before, *grads = torch.autograd.grad(out, [leaf, *leaves.values()], g)
            for name, gradient in zip(leaves, grads, strict=True):
                sink.take(name, gradient)
            return before

        return out.detach(), back

    def _call(self, x: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        if isinstance(self.module, nn.LayerNorm):
            x = F.layer_norm(x, self.module.normalized_shape, None, None, self.module.eps)
            x = x * _over_rows(params[self.weight]) if self.weight else x
            return x + _over_rows(params[self.bias]) if self.bias else x
        out: Tensor = self.module(x.clone() if getattr(self.module, "inplace", False) else x)
        return out


def _over_rows(weight: Tensor) -> Tensor:
    """A vector per client, to be combined with each of the client's rows."""
    return weight.unsqueeze(1) if weight.dim() == 2 else weight


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x·Wᵀ + b for all clients; one product where they have the same W."""
    same, own = _shared(weight), None if bias is None else _shared(bias, axes=1)
    if same is None:
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(_over_rows(bias), x, weight.mT)
    if bias is None or own is not None:
        return F.linear(x, same, own)
    return F.linear(x, same) + bias.unsqueeze(1)


def _shared(tensor: Tensor, axes: int = 2) -> Tensor | None:
    """The tensor that all clients have in common, where there is one: products need not be taken for each then."""
    if tensor.dim() == axes:
        return tensor
    return None if tensor.stride(0) and len(tensor) > 1 else tensor[0]


def find_chain(model: nn.Module, x: Tensor | None) -> tuple[Link, ...] | None:
    """A model, for inputs like these, as a chain of layers that can be computed for many clients at once, or None.

    What the chain puts out is compared with what the model does, whatever its code may be.
    """
    links: list[Link] = []
    if x is None or isinstance(x, Parts) or x.dtype != torch.float32 or not _collect(model, "", links):
        return None
    params = {n: p.detach() for n, p in model.named_parameters()}
    names = [name for link in links for name in (link.weight, link.bias) if name]
    if sorted(names) != sorted(params) or any(p.dtype != torch.float32 for p in params.values()):
        return None  # of weights that layers share, only one name is a parameter's
    with torch.no_grad(), preserve_model(model):
        out = x.clone().unsqueeze(0)
        for place, link in enumerate(links):
            if out.dim() != 3 and isinstance(link.module, nn.Linear | nn.LayerNorm):
                return None
            if link.dropout is None:
                out, _ = link.run(out, params, (), iter(()))
            else:
                links[place] = replace(link, dropout=replace(link.dropout, shape=tuple(out.shape[2:])))
        whole = model(x.clone())
        same = isinstance(whole, Tensor) and torch.allclose(out[0], whole, rtol=1e-4, atol=1e-5)
    return tuple(links) if same else None


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where torch keeps what is attached to a module: a chain would not run it."""


def _collect(module: nn.Module, name: str, links: list[Link]) -> bool:
    """Add a module's layers, in order; False if one of them cannot be computed for many clients."""
    kind = type(module)
    if any(getattr(module, hooks) for hooks in HOOKS) or "forward" in vars(module):
        return False
    if kind is nn.Sequential:  # a layer may stand in several places, of which `named_children` tells one
        layers = ((key, layer) for key, layer in module._modules.items() if layer is not None)
        return all(_collect(layer, f"{name}.{key}" if name else key, links) for key, layer in layers)
    if is_dropout(module):
        links.append(Link(module, dropout=DropoutLayer(name, module.p, ())))
        return True
    whole = isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1)
    idle = kind is nn.Dropout and module.p == 0
    if not (kind in POINTWISE or whole or idle or kind in (nn.Linear, nn.LayerNorm)):
        return False
    named = {key: f"{name}.{key}" if name else key for key, _ in module.named_parameters()}
    links.append(Link(module, named.get("weight", ""), named.get("bias", "")))
    return True


class _Gradients(dict[str, Tensor]):
    """Keeps the gradients."""

    def take_product(self, name: str, left: Tensor, right: Tensor) -> None:
        self[name] = torch.bmm(left.mT, right)

    def take(self, name: str, gradient: Tensor) -> None:
        self[name] = gradient


class StackedSteps(LocalSteps):
    """The steps of many clients, their parameters stacked.

    No client's loss depends on another's parameters, so the gradient of their sum is each one's own.

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
        self.untracked, self._chain, self._task = torch.no_grad(), chain, replica.task
        self.rows: Tensor | None = None
        self.masks: Sequence[Tensor] = ()
        self._moved, self._rate, self._clients = moved, work.lr, 0
        self._stacked = {n for n, t in params.items() if t.dim() > replica.params[n].dim()}
        super().__init__(replica, policy, hooks, work, params, moved)

    def differentiate(self, x: Tensor, y: Tensor) -> tuple[Batch, Tensor, Sequence[Tensor | None]]:
        """Forward and backward pass of all clients together; the loss is one per client."""
        grads, at = _Gradients(), self.objective.params
        losses = self._pass_back(x, y, at, grads)
        return self.objective.batch(x, y, self.taken, at), losses, [grads.get(n) for n in self.names]

    def _pass_back(self, x: Tensor, y: Tensor, params: Tensors, sink: GradientSink) -> Tensor:
        """Run the model on a batch and hand its gradients on, the last layer's first: each client's loss."""
        backs, trains, masks = [], set(self.names), iter(self.masks)
        for link in self._chain:
            x, back = link.run(x, params, trains, masks)
            backs.append(back)
        outputs = x.detach().requires_grad_()
        with torch.enable_grad():
            losses = self._mean_losses(outputs, y)
            (g,) = torch.autograd.grad(losses.sum(), [outputs])
        for at in range(len(backs) - 1, -1, -1):
            g = backs[at](g, at > 0, sink)  # type: ignore[assignment]  # nobody looks at the last one
        return losses.detach()

    def _mean_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Each client's mean loss over its real rows; 0 where there are none."""
        losses, weights = (t.view(y.shape[:2]) for t in self._task.terms(outputs.flatten(0, 1), y.flatten(0, 1)))
        if self.rows is not None:  # not as a product: what stands in a padded row may be no number
            real = self.rows > 0
            losses, weights = losses.where(real, 0.0), weights.where(real, 0.0)
        total = weights.sum(1)
        return losses.sum(1) / torch.where(total > 0, total, torch.ones_like(total))

    def clip_gradients(self, grads: Tensors) -> Tensors:
        """Every client's gradients, scaled down where their norm is above the limit."""
        if self.clip is None or not grads:
            return grads
        norm = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads.values()]).norm(dim=0)
        factor = torch.clamp(self.clip / (norm + 1e-6), max=1.0)
        return {n: g * factor.view(-1, *(1,) * (g.dim() - 1)) for n, g in grads.items()}


class PlainStackedSteps(StackedSteps):
    """The same steps where nothing comes between a gradient and the move along it: w − lr·gᵀx is one product.

    Nothing is kept from step to step, so clients that are done are left out.
    """

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step of SGD of the first clients, as many as there are inputs of: each one's loss before it."""
        self._clients, at = len(x), self.objective.params
        losses = self._pass_back(x, y, {n: t[: len(x)] if n in self._stacked else t for n, t in at.items()}, self)
        self.taken += 1
        return losses

    def take_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Move a weight."""
        weight, rate = self._moved[name][: self._clients], -self._rate
        if self.taken:
            weight.baddbmm_(left.mT, right, alpha=rate)
        else:
            torch.baddbmm(self.objective.params[name], left.mT, right, alpha=rate, out=weight)

    def take(self, name: str, gradient: Tensor) -> None:
        """Move any other parameter."""
        moved = self._moved[name][: self._clients]
        torch.add(moved if self.taken else self.objective.params[name], gradient, alpha=-self._rate, out=moved)


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
        lambda like: {n: torch.empty(t.shape, dtype=t.dtype, device=t.device) for n, t in like.items()}
    )
    trained = allocate(start)
    hooks = _build_hooks(group, *given)
    moved = {n: t for n, t in trained.items() if n not in idle}
    kind = PlainStackedSteps if is_plain(a.work, hooks) else StackedSteps
    for name in trained if kind is StackedSteps else idle & trained.keys():
        trained[name].copy_(start[name])
    policy = group.context.method.buffers
    lowest = next((at for at, link in enumerate(chain) if {link.weight, link.bias} & moved.keys()), 0)
    padded = _run_below(chain[:lowest], padded, a.params)
    steps = kind(chain[lowest:], group.replica, policy, hooks, a.work, {**a.params, **start}, moved)
    total = (
        _take_plain_steps(steps, padded, trained) if kind is PlainStackedSteps else _take_steps(steps, padded, trained)
    )
    delta = {n: trained[n].sub_(a.params[n]) for n in a.uploads}
    slots, remembers = hooks.finish(delta, steps.tallies, given[1])
    rows = {**a.params, **group.replica.buffers}
    sent, kept = ({name: _expand(slot, rows, clients) for name, slot in many.items()} for many in (slots, remembers))
    return hooks.build_upload(delta), sent, kept, total / torch.tensor(padded.steps, device=total.device)


def _run_below(chain: Sequence[Link], padded: PaddedBatches, params: Tensors) -> PaddedBatches:
    """Batches as they go into the first layer that trains; what is below it is the same for all clients and steps."""
    x, drops = padded.x.flatten(0, 1), sum(link.dropout is not None for link in chain)
    masks = iter([mask.flatten(0, 1) for mask in padded.masks[:drops]])
    for link in chain:
        x, _ = link.run(x, params, (), masks)
    return replace(padded, x=torch.unflatten(x, 0, padded.x.shape[:2]), masks=padded.masks[drops:])


def _take_plain_steps(steps: StackedSteps, padded: PaddedBatches, trained: Tensors) -> Tensor:
    """Train, each client for its own number of steps: the sum of each one's losses."""
    total = torch.zeros(len(padded.steps), device=padded.y.device)
    for step in range(padded.longest):
        if step == 1:
            steps.objective.params = {**steps.objective.params, **trained}
        going = sum(count > step for count in padded.steps)
        steps.rows = None if padded.rows is None else padded.rows[:going, step]
        steps.masks = [mask[:going, step] for mask in padded.masks]
        total[:going] += steps.step(padded.x[:going, step], padded.y[:going, step])
    return total


def _take_steps(steps: StackedSteps, padded: PaddedBatches, trained: Tensors) -> Tensor:
    """Train, each client for its own number of steps: the sum of each one's losses.

    All go on as long as the longest; what counts of the others is kept at their own last step.
    """
    total = torch.zeros(len(padded.steps), device=padded.y.device)
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
    return {n: _expand_one(n, t, like.get(n), clients) for n, t in tensors.items()}


def _expand_one(name: str, tensor: Tensor, like: Tensor | None, clients: int) -> Tensor:
    rows = (clients, *(tensor.shape[1:] if like is None else like.shape))
    if tensor.shape == rows:
        return tensor
    if like is not None and tensor.shape == like.shape:
        return tensor.unsqueeze(0).expand(rows).clone()
    raise UsageError(f"a technique that stacks gave '{name}' for {clients} clients in the shape {list(tensor.shape)}")
