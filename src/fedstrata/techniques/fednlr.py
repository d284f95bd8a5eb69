"""FedNLR: a learning rate for each neuron.

Wang et al., "FedNLR: Federated Learning with Neuron-wise Learning Rates", KDD 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeGuard

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import nn, torch
from fedstrata.core.technique import ClientView, Hooks, Setting, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Into, Stratum
from fedstrata.errors import UsageError, not_negative
from fedstrata.models.strata import check_patterns
from fedstrata.models.units import is_norm

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.modules.conv import _ConvNd

    Draw = Callable[[Sequence[int], torch.dtype], Tensor]


PAPERS = (
    Paper(
        "Haozhao Wang and Peirong Zheng and Xingshuo Han and Wenchao Xu and Ruixuan Li and Tianwei Zhang",
        "FedNLR: Federated Learning with Neuron-wise Learning Rates",
        "KDD",
        2024,
    ),
)


def pace(activations: Tensor, mu: float) -> Tensor:
    """The factor of each neuron's learning rate: M·softmax(h̄/T) with T = (h̄_max − h̄_min)/ln μ.

    Their mean is 1, the largest is μ times the smallest, and their order is that of the activations; where all
    activations are equal, each is 1. The neurons are the last axis; there may be an axis of clients before it.
    """
    largest = activations.amax(-1, keepdim=True)
    spread = largest - activations.amin(-1, keepdim=True)
    away = (activations - largest) / spread
    factors = activations.shape[-1] * torch.softmax(away * math.log(mu), -1)
    return torch.where(spread > 0, factors, torch.ones_like(factors))


def temperature(activations: Tensor, mu: float) -> Tensor:
    """T = (h̄_max − h̄_min)/ln μ of a layer's neurons, which are the last axis; the smaller, the more rates differ."""
    return (activations.amax(-1) - activations.amin(-1)) / math.log(mu)


@dataclass(eq=False)
class _Layer:
    """A layer's neurons, and what they do during the pass: sums over samples and positions, and how many these are.

    The activation is that of the layer or, where a norm layer takes the layer's very output, of the norm layer.

    Args:
        stratum: the layer's.
        weight: the layer.
        norms: the norm layers of its stratum.
        classes: how many classes there are; a layer of as many neurons may be the classifier, and what it puts out is
            summed up without ReLU as well.
        counts: False if nobody asks for its activations, only whether it runs.
        sum_rows: gives the sum of rows of activations, and how many they are: of one client, or of each of many.
    """

    stratum: Stratum
    weight: nn.Linear | _ConvNd
    norms: Mapping[str, nn.Module]
    classes: int
    counts: bool
    sum_rows: Callable[[Tensor], tuple[Tensor, Tensor | int]]
    runs: bool = False
    total: Tensor | float = 0.0
    plain: Tensor | float = 0.0
    count: Tensor | int = 0
    output: Tensor | None = None
    waiting: tuple[Tensor, Tensor, Tensor | int] | None = None
    joined: dict[str, list[int]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """How many neurons there are."""
        return self.weight.out_features if isinstance(self.weight, nn.Linear) else self.weight.out_channels

    @property
    def axis(self) -> int:
        """Where the neurons are in the layer's output."""
        return -1 if isinstance(self.weight, nn.Linear) else 1

    def watch(self) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        """What to do where the model comes by."""
        yield self.stratum.name, self._put_out
        for norm in self.norms if self.counts else ():
            yield Into(norm), partial(self._go_in, norm)
            yield norm, partial(self._note_normalised, norm)

    def _put_out(self, there: Tensor) -> None:
        self.runs = True
        if self.counts:
            self.settle()
            self.output, self.waiting = there, self._sums(there)

    def _go_in(self, norm: str, there: Tensor) -> None:
        shape = _affine(self.norms[norm], there.dim(), self.axis % there.dim(), self.width)
        if there is self.output and shape is not None:
            self.joined[norm] = shape

    def _note_normalised(self, norm: str, there: Tensor) -> None:
        if norm in self.joined:
            self.output, self.waiting = there, self._sums(there)

    def _sums(self, there: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
        """Taken at once: the model may go on in the same memory."""
        rows = there.movedim(self.axis, -1).flatten(0, -2)
        plain = self.sum_rows(rows)[0].double() if self.width == self.classes else torch.zeros(())
        total, count = self.sum_rows(rows.clamp(min=0))
        return total.double(), plain, count

    def settle(self) -> None:
        """Add what was put out last, if that is not done yet."""
        if self.waiting is not None:
            total, plain, count = self.waiting
            self.total, self.plain, self.count = self.total + total, self.plain + plain, self.count + count
        self.output = self.waiting = None

    def activations(self) -> Tensor:
        """h̄ of every neuron."""
        self.settle()
        total = self.plain if self.stratum.classifies and self.width == self.classes else self.total
        assert isinstance(total, torch.Tensor)
        return total / self.count

    def scales(self, mu: float, trains: set[str], draw: Draw | None) -> Tensors:
        """The factors of the parameters of all neurons that train; dealt by lot, if something is given to draw with."""
        factors = pace(self.activations(), mu)
        if draw is not None:
            factors = factors.gather(-1, draw([self.width], torch.float64).argsort(-1))
        kernel = [1] * self.weight.weight.dim()
        kernel[1 if isinstance(self.weight, nn.modules.conv._ConvTransposeNd) else 0] = self.width
        own = f"{self.stratum.name}." if self.stratum.name else ""  # the model itself may be the layer
        shapes = {f"{own}weight": kernel, f"{own}bias": [self.width]}
        shapes |= {f"{norm}.{kind}": shape for norm, shape in self.joined.items() for kind in ("weight", "bias")}
        dtype = self.weight.weight.dtype
        found = {n: s for n, s in shapes.items() if n in trains and n in self.stratum.params}
        return {n: torch.unflatten(factors.to(dtype), -1, s) for n, s in found.items()}


def _affine(norm: nn.Module, axes: int, neurons: int, width: int) -> list[int] | None:
    """How a norm layer's parameters lie along the neurons, which are at one of the axes of its input; None if not."""
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        at = neurons - (axes - len(norm.normalized_shape))
        return [width if i == at else 1 for i in range(len(norm.normalized_shape))] if at >= 0 else None
    return [width] if neurons == 1 else None


def _has_neurons(module: nn.Module) -> TypeGuard[nn.Linear | _ConvNd]:
    """True for convolutions and linear layers; a grouped transposed convolution has no weight of a channel's own."""
    if isinstance(module, nn.modules.conv._ConvTransposeNd) and module.groups > 1:
        return False
    return isinstance(module, nn.Linear | nn.modules.conv._ConvNd)


def _neurons(model: nn.Module, strata: tuple[Stratum, ...]) -> list[tuple[Stratum, nn.Linear | _ConvNd]]:
    """The model's layers of neurons, in order, but for those that nothing trains."""
    return [(s, module) for s in strata if not s.idle and _has_neurons(module := model.get_submodule(s.name))]


def _norms(model: nn.Module, stratum: Stratum) -> dict[str, nn.Module]:
    """The norm layers of a stratum."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in stratum.params)
    return {owner: module for owner in owners if is_norm(module := model.get_submodule(owner))}


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
        shuffle: a control: at every visit each layer's rates are dealt to its neurons by lot, so that their spread is
            the paper's, and only which neuron has which is not.

    The ReLU is applied to what a layer, or its norm layer, puts out, also where the model goes on with another
    activation or adds a residual link first.
    """

    name: ClassVar[str] = "fednlr"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    vectorises: ClassVar[bool] = True
    stacks: ClassVar[bool] = True
    mu0: float = 1.0
    a1: float = 1.0
    a2: float = 1.0
    mu: float | None = None
    layers: tuple[str, ...] = ()
    shuffle: bool = False

    def __post_init__(self) -> None:
        not_negative("fednlr", a1=self.a1, a2=self.a2)
        if isinstance(self.layers, str):
            raise UsageError(f"fednlr's layers are a tuple of patterns: write ({self.layers!r},)")
        for name, value in (("mu0", self.mu0), ("mu", self.mu)):
            if value is not None and not 1 <= value < math.inf:
                raise UsageError(f"fednlr's {name} must be 1 or more, not {value}: largest over smallest rate")

    def check(self, setting: Setting) -> None:
        """Refuse patterns that name no layer of neurons."""
        names = [stratum.name for stratum, _ in _neurons(setting.model, setting.strata)]
        if setting.arch == "":  # sub-models may lack layers
            check_patterns("fednlr's layers: no layer of neurons is called", self.layers, names)

    def ratio(self, layer: int, of: int, width: int) -> float:
        """μ_l of a layer, counted from 1, with so many neurons."""
        return self.mu if self.mu is not None else self.mu0 + self.a1 * layer / of + self.a2 * math.log10(width)

    def _is_chosen(self, name: str) -> bool:
        return not self.layers or any(fnmatchcase(name, pattern) for pattern in self.layers)

    def prepare(self, view: ClientView) -> Tensors:
        """The factors of all neurons' learning rates, from one pass over the client's data."""
        trains: set[str] = set(view.assignment.trains)
        scales: Tensors = {}
        for layer, mu in self._watch(view):
            scales |= layer.scales(mu, trains, view.normal if self.shuffle else None)
        return scales

    def temperatures(self, view: ClientView) -> dict[str, tuple[Tensor, float]]:
        """Layer → (T_l, μ_l), as `prepare` has them, from one pass over the client's data."""
        return {layer.stratum.name: (temperature(layer.activations(), mu), mu) for layer, mu in self._watch(view)}

    def _watch(self, view: ClientView) -> Iterator[tuple[_Layer, float]]:
        """The layers that run and are to have rates, each with its ratio, after one pass over the client's data."""
        trains = set(view.assignment.trains)
        layers = [
            _Layer(
                stratum=stratum,
                weight=module,
                norms=_norms(view.model, stratum),
                classes=view.width(),
                counts=not trains.isdisjoint(stratum.params) and self._is_chosen(stratum.name),
                sum_rows=view.sum_rows,
            )
            for stratum, module in _neurons(view.model, view.strata)
        ]
        if self.mu == 1 or not any(layer.counts for layer in layers):
            return
        view.observe({place: look for layer in layers for place, look in layer.watch()})
        layers = [layer for layer in layers if layer.runs]
        for index, layer in enumerate(layers, 1):
            if layer.counts:
                yield layer, self.ratio(index, len(layers), layer.width)

    def local(self, view: ClientView) -> Hooks:
        """The factors multiply the steps."""
        return Hooks(scale=view.prepared or None)
