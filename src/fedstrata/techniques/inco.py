"""InCo Aggregation: clients of different depth, and cross-layer gradients on the server; and what it is compared with.

Chan, Zhou, Zhao, Jiang and Ngai, "Internal Cross-Layer Gradients for Extending Homogeneity to Heterogeneity in
Federated Learning", ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, get_args

from fedstrata.core.lazy import torch
from fedstrata.core.technique import Figures, RoundView, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Stratum
from fedstrata.errors import one_of
from fedstrata.models.stages import first_of_kind, partners, repeated_stages
from fedstrata.techniques.staleness import SYNCHRONOUS

if TYPE_CHECKING:
    from torch import Tensor

Form = Literal["paper", "theorem", "released"]
Reference = Literal["first", "conv2"]

MOST_THETA, MOST = 5.0, 0.1
"""The released code's limits of θ, and of a crossed change."""


class Crossed(NamedTuple):
    """A crossed change, with the θ and β that it was made with."""

    result: Tensor
    theta: Tensor
    beta: Tensor


def cross(own: Tensor, first: Tensor, form: Form, normalise: bool = True, optimise: bool = True) -> Crossed:
    """A layer's change g_k, crossed with that of its stage's layer 0, g_0.

    α = ⟨g_0, g_0⟩, β = ⟨g_0, g_k⟩, θ = β/α; with u = g/‖g‖, and (‖g_k‖ + ‖g_0‖)/2 as the length:

    - `theorem`: u_k − θ·u_0 where β < 0, else u_k (Theorem 3.1; without normalising, the nearest point to g_k that does
      not go against g_0);
    - `paper`: u_k − θ·u_0 whatever β is (Algorithm 1);
    - `released`: u_k + |θ|·u_0 for every kernel of a convolution by itself, θ at most 5, the result within ±0.1.

    Without optimising it is u_k + u_0; without normalising, u = g and the length is left out. Where there is nothing to
    divide by, the change stays as it is.
    """
    axes = (-2, -1) if form == "released" and own.dim() == 4 else tuple(range(own.dim()))
    alpha, beta = ((first * other).sum(axes, keepdim=True) for other in (first, own))
    length, other = alpha.sqrt(), own.square().sum(axes, keepdim=True).sqrt()
    sound = (length > 0) & (other > 0) if normalise else length > 0
    theta = torch.where(sound, beta / torch.where(sound, alpha, 1.0), 0.0)
    if not optimise:
        theta = torch.where(sound, -1.0, 0.0)
    elif form == "theorem":
        theta = theta.clamp(max=0)
    elif form == "released":
        theta = -theta.abs().clamp(max=MOST_THETA)
    result = own - theta * first
    if normalise:
        mean = (length + other) / 2
        result = (own / torch.where(sound, other, 1.0) - theta * first / torch.where(sound, length, 1.0)) * mean
    if form == "released":
        result = result.clamp(-MOST, MOST)
    result = torch.where(sound, result, own)
    shown = theta.abs() if form == "released" or not optimise else theta
    return Crossed(result, shown.squeeze(), beta.squeeze())


NORMS = {"norm2.weight": "norm1.weight", "layernorm_after.weight": "layernorm_before.weight"}
"""A transformer block's second norm layer → its first, as blocks name them."""


def references(
    params: Mapping[str, Tensor], strata: Sequence[Stratum], reference: Reference, form: Form
) -> dict[str, str]:
    """A weight's name → that of the layer 0 that it is crossed with: of the same shape, and earlier in its stage.

    A transformer's blocks are one stage, and its norm layers are crossed too: with the stage's first one or, as
    released, the block's second with its first. Those of convolutional blocks are not.
    """
    found = partners(params, strata)
    if reference == "conv2":
        stages, opening = repeated_stages(params, strata), dict[str, str]()
        for name in (n for stratum in strata for n in stratum.params if params[n].dim() > 1):
            opening.setdefault(stages[name.partition(".")[0]], name)
        for first in set(opening.values()) & set(found.values()):
            second, *others = (name for name, other in found.items() if other == first)
            del found[second]
            found |= dict.fromkeys(others, second)
    return found | _norms(params, strata, form)


def _norms(params: Mapping[str, Tensor], strata: Sequence[Stratum], form: Form) -> dict[str, str]:
    """The same for a transformer's norm layers."""
    stages, averages = (
        repeated_stages(params, strata),
        {n.removesuffix(".running_mean") for s in strata for n in s.buffers},
    )
    places = {
        name: suffix for name in params for suffix in (*NORMS, *NORMS.values()) if f".{name}".endswith(f".{suffix}")
    }
    held = {
        name: suffix
        for name, suffix in places.items()
        if name.removesuffix(".weight") not in averages and not _convolves(params, name.removesuffix(suffix))
    }
    if form != "released":
        in_order = (n for stratum in strata for n in stratum.params if n in held)
        return first_of_kind(in_order, lambda name: (stages[name.partition(".")[0]], params[name].shape))
    pairs = {n: n.removesuffix(suffix) + NORMS[suffix] for n, suffix in held.items() if suffix in NORMS}
    return {n: o for n, o in pairs.items() if o in params and params[o].shape == params[n].shape}


def _convolves(params: Mapping[str, Tensor], block: str) -> bool:
    return any(name.startswith(block) and tensor.dim() == 4 for name, tensor in params.items())


@dataclass(frozen=True, kw_only=True)
class InCo(Technique):
    """Cross-layer gradients: on the server, each layer's mean change is mixed with that of the first one of its shape.

    Shallow layers of different clients are more alike than deep ones. So, after the mean, the change g_k of every
    weight is crossed with that of layer 0, g_0, the earliest weight of its stage with the same shape: g_k ←
    (g_k/‖g_k‖ − θ·g_0/‖g_0‖)·(‖g_k‖ + ‖g_0‖)/2, θ = ⟨g_0, g_k⟩/⟨g_0, g_0⟩. What clients do, and send, is left alone;
    names are averaged over the clients that hold them.

    Args:
        form: `paper` as above (Algorithm 1), `theorem` with θ only where it is negative (Theorem 3.1), `released` with
            +|θ| for each kernel, and limits; see `cross`. The three disagree: the default is the one that did best in
            our comparison of them, if within noise.
        normalise: False takes changes as they are.
        optimise: False adds g_0 as it is instead.
        reference: layer 0: the `first` of the shape, or, where that is its stage's first weight, the next (`conv2`).
            The authors' results were made with `form='released', reference='conv2'`, which is not the default.

    Deviations: the paper's mean is uniform; `fedavg(weight='uniform')` or `heteroavg` says so here, too. Where layer 0
    or the layer itself did not arrive, or did not move, the mean stays.
    """

    name: ClassVar[str] = "inco"
    synchronous: ClassVar[str] = SYNCHRONOUS
    form: Form = "released"
    normalise: bool = True
    optimise: bool = True
    reference: Reference = "first"

    def __post_init__(self) -> None:
        one_of("inco", get_args(Form), form=self.form)
        one_of("inco", get_args(Reference), reference=self.reference)

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """Every layer's mean change, crossed with that of its layer 0; the state is the θ and β of this round."""
        used = [stratum for stratum in round.strata if not stratum.idle]
        found = references(round.params, used, self.reference, self.form)
        moved = round.arrived.keys() & delta.keys()  # a reducer may leave out what arrived from some
        here = {name: first for name, first in found.items() if name in moved and first in moved}
        crossed = {n: cross(delta[n], delta[o], self.form, self.normalise, self.optimise) for n, o in here.items()}
        kept = {f"theta/{n}": c.theta.mean() for n, c in crossed.items()}
        kept |= {f"beta/{n}": c.beta.mean() for n, c in crossed.items()}
        return {**delta, **{n: c.result for n, c in crossed.items()}}, kept

    def publish(self, state: Tensors) -> Figures:
        """The mean θ and β of every layer that was crossed in the last round."""
        found: dict[str, dict[str, float]] = {"theta": {}, "beta": {}}
        for key, value in state.items():
            figure, _, layer = key.partition("/")
            found[figure][layer] = float(value)
        return found


@dataclass(frozen=True, kw_only=True)
class HeteroAvg(Technique):
    """Every layer averaged over the clients that hold it, all alike: InCo without cross-layer gradients."""

    name: ClassVar[str] = "heteroavg"
    defaults: ClassVar[Mapping[str, str]] = {"weight": "uniform"}


@dataclass(frozen=True, kw_only=True)
class GroupAvg(Technique):
    """FedAvg inside each group of clients with the same architecture: what federations do that cannot mix them.

    Every architecture has parameters of its own, side by side in the server's model, which answers with the largest.
    """

    name: ClassVar[str] = "groupavg"
    refuses: ClassVar[Mapping[str, str]] = {
        "inco": "inco crosses the layers of one model, and groupavg has one for each group",
        "heteroavg": "one averages over all architectures, the other inside each",
        "fedpart": "fedpart goes through the strata of one model, and groupavg has one for each group",
        "fedimpro": "fedimpro shares the features of one low part, and groupavg has one for each group",
        "ccvr": "ccvr refits one classifier, and groupavg has one for each group",
        "feddf": "feddf teaches one model, and groupavg has one for each group",
    }
    branches: ClassVar[bool] = True
