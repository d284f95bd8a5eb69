"""FedNLR: a learning rate for each neuron.

Wang et al., "FedNLR: Federated Learning with Neuron-wise Learning Rates", KDD 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import ClassVar, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fedstrata.core import ClientView, Hooks, Into, Setting, Technique
from fedstrata.errors import UsageError, did_you_mean, not_negative
from fedstrata.strata import Stratum
from fedstrata.tensors import Tensors


def pace(activations: Tensor, mu: float) -> Tensor:
    """The factor of each neuron's learning rate: M·softmax(h̄/T) with T = (h̄_max − h̄_min)/ln μ.

    Their mean is 1, the largest is μ times the smallest, and their order is that of the activations; where all
    activations are equal, each is 1.
    """
    spread = activations.max() - activations.min()
    if not spread > 0:
        return torch.ones_like(activations)
    away = (activations - activations.max()) / spread
    return len(activations) * torch.softmax(away * math.log(mu), 0)


@dataclass(eq=False)
class _Layer:
    """A layer's neurons, and what they do during the pass: the sum over samples and positions, and how many these are.

    The activation is that of the layer or, where a norm layer takes the layer's very output, of the norm layer.
    """

    stratum: Stratum
    weight: nn.Linear | _ConvNd
    norms: tuple[str, ...]
    classifier: bool
    total: Tensor | float = 0.0
    count: int = 0
    waiting: list[Tensor] = field(default_factory=list)
    joined: set[str] = field(default_factory=set)

    @property
    def axis(self) -> int:
        """Where the neurons are in the layer's output."""
        return -1 if isinstance(self.weight, nn.Linear) else 1

    def watch(self) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        """What to do where the model comes by."""
        yield self.stratum.name, self._put_out
        for norm in self.norms:
            yield Into(norm), partial(self._go_in, norm)
            yield norm, partial(self._normalised, norm)

    def _put_out(self, there: Tensor) -> None:
        self.settle()
        self.waiting = [there]

    def _go_in(self, norm: str, there: Tensor) -> None:
        if self.waiting and there is self.waiting[0]:
            self.joined.add(norm)

    def _normalised(self, norm: str, there: Tensor) -> None:
        if norm in self.joined:
            self.waiting = [there]

    def settle(self) -> None:
        """Add what was put out last, if that is not done yet."""
        for there in self.waiting:
            rows = there.movedim(self.axis, -1).flatten(0, -2)
            rows = rows if self.classifier else rows.clamp(min=0)
            self.total = self.total + rows.sum(0).double()
            self.count += len(rows)
        self.waiting = []

    def scales(self, mu: float, trains: set[str]) -> Tensors:
        """The factors of the parameters of all neurons that train; empty if the layer did not run."""
        self.settle()
        if not isinstance(self.total, Tensor):
            return {}
        factors = pace(self.total / self.count, mu)
        owners = {self.stratum.name, *self.joined}
        scales: Tensors = {}
        for name in self.stratum.params:
            owner, _, kind = name.rpartition(".")
            if owner in owners and name in trains:
                axes = self.weight.weight.dim() if (owner, kind) == (self.stratum.name, "weight") else 1
                shape = [1] * axes
                shape[1 if axes > 1 and isinstance(self.weight, _ConvTransposeNd) else 0] = len(factors)
                scales[name] = factors.to(self.weight.weight.dtype).view(shape)
        return scales


def _has_neurons(module: nn.Module) -> TypeGuard[nn.Linear | _ConvNd]:
    """True for convolutions and linear layers; a grouped transposed convolution has no weight of a channel's own."""
    if isinstance(module, _ConvTransposeNd) and module.groups > 1:
        return False
    return isinstance(module, nn.Linear | _ConvNd)


def _layers(model: nn.Module, strata: tuple[Stratum, ...]) -> list[_Layer]:
    """The model's layers of neurons, in order; the last is the classifier."""
    found = [(s, module) for s in strata if _has_neurons(module := model.get_submodule(s.name))]
    layers = []
    for index, (stratum, module) in enumerate(found, 1):
        owners = dict.fromkeys(name.rpartition(".")[0] for name in stratum.params)
        norms = tuple(owner for owner in owners if owner != stratum.name)
        norms = tuple(n for n in norms if n and not n.startswith(f"{stratum.name}."))
        layers.append(_Layer(stratum, module, norms, index == len(found)))
    return layers


@dataclass(frozen=True, kw_only=True)
class FedNLR(Technique):
    """A learning rate for each neuron: η·M_l·q, q = softmax(h̄/T_l), T_l = (h̄_max − h̄_min)/ln μ_l.

    h̄ is a neuron's mean activation over the client's data and all positions, in one pass with the received model before
    training: after ReLU, or for the classifier its logits. M_l is the number of neurons in layer l, and μ_l = μ0 +
    a1·l/L + a2·log₁₀ M_l the ratio of its largest to its smallest learning rate. A neuron is a channel of a convolution
    or a unit of a linear layer; to it belong its weights, its bias and its affine parameters in a norm layer that takes
    the layer's output. Everything else (embeddings, recurrent layers, other norm layers) has the learning rate η.

    Args:
        mu0: μ0.
        a1: how much the ratio grows with the depth of a layer.
        a2: how much it grows with the width. The paper's tables have a1 = 0.45 and a2 = 0.3; it recommends 1 and 1.
        mu: one ratio for all layers instead; 1 is FedAvg.
        layers: name patterns of the strata whose neurons have rates of their own; by default all.

    The ReLU is applied to what a layer, or its norm layer, puts out, also where the model goes on with another
    activation or adds a residual link first.
    """

    name: ClassVar[str] = "fednlr"
    mu0: float = 1.0
    a1: float = 1.0
    a2: float = 1.0
    mu: float | None = None
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        not_negative("fednlr", a1=self.a1, a2=self.a2)
        for name, value in (("mu0", self.mu0), ("mu", self.mu)):
            if value is not None and not 1 <= value < math.inf:
                raise UsageError(f"fednlr's {name} must be 1 or more, not {value}: largest over smallest rate")

    def check(self, setting: Setting) -> None:
        names = [layer.stratum.name for layer in _layers(setting.model, setting.strata)]
        for pattern in self.layers:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"fednlr's layers: no layer of neurons is called '{pattern}'{did_you_mean(pattern, names)}"
                )

    def ratio(self, layer: int, of: int, width: int) -> float:
        """μ_l of a layer, counted from 1, with so many neurons."""
        return self.mu if self.mu is not None else self.mu0 + self.a1 * layer / of + self.a2 * math.log10(width)

    def local(self, view: ClientView) -> Hooks:
        trains = set(view.assignment.trains)
        layers = _layers(view.model, view.strata)
        mine = {
            index: layer
            for index, layer in enumerate(layers, 1)
            if not trains.isdisjoint(layer.stratum.params)
            and (not self.layers or any(fnmatchcase(layer.stratum.name, pattern) for pattern in self.layers))
        }
        if not mine or self.mu == 1:
            return Hooks()
        view.observe({place: look for layer in mine.values() for place, look in layer.watch()})
        scales: Tensors = {}
        for index, layer in mine.items():
            width = layer.weight.out_features if isinstance(layer.weight, nn.Linear) else layer.weight.out_channels
            scales |= layer.scales(self.ratio(index, len(layers), width), trains)
        return Hooks(scale=scales)
