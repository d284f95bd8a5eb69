"""Many clients' dense networks trained at once, with kernels for stacks of matrices in place of `torch.func`.

A chain of linear layers and functions of single numbers needs no transformation to be computed for many clients: its
parameters are stacked, a linear layer is one product of stacks, and whatever lies in between works on any shape. That
leaves some ten calls per step for all clients together, and the gradients come out as the parameters lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstrata.client.dropout import DropoutLayer, is_dropout
from fedstrata.client.group import ClientGroup
from fedstrata.core.parts import Parts
from fedstrata.core.tensors import Tensors
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


def known_chain(group: ClientGroup) -> tuple[Link, ...] | None:
    """A group's model as a chain of layers, or None; found once for an architecture."""
    key, cache = ("chain", group.template.arch), group.context.cache
    if key not in cache:
        cache[key] = find_chain(group.replica.model, group.replica.sample)
    chain: tuple[Link, ...] | None = cache[key]
    return chain
