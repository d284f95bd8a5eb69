"""InCo Aggregation: clients of different depth, and cross-layer gradients on the server; and what it is compared with.

Chan, Zhou, Zhao, Jiang and Ngai, "Internal Cross-Layer Gradients for Extending Homogeneity to Heterogeneity in
Federated Learning", ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, get_args

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import torch
from fedstrata.core.rng import generator
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
Control = Literal["none", "shuffled", "length"]

MOST_THETA, MOST = 5.0, 0.1
"""The released code's limits of θ, and of a crossed change."""


PAPERS = (
    Paper(
        "Yun-Hin Chan and Rui Zhou and Running Zhao and Zhihan Jiang and Edith C.-H. Ngai",
        "Internal Cross-Layer Gradients for Extending Homogeneity to Heterogeneity in Federated Learning",
        "ICLR",
        2024,
    ),
)


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
    axes = _axes(own, form)
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


def _axes(change: Tensor, form: Form) -> tuple[int, ...]:
    """Over which a change is crossed as one vector: all of it or, as released, a kernel."""
    return (-2, -1) if form == "released" and change.dim() == 4 else tuple(range(change.dim()))


def shuffle(first: Tensor, order: Tensor, signs: Tensor, form: Form) -> Tensor:
    """The control `shuffled`: g_0 without what it says of its layer, but as long, and with the same kernels.

    The kernels of a convolution change places, and half of them their sign; of any other layer the numbers do. Where
    kernels are crossed by themselves (`released`), each is then brought to the length that g_0 has at its new place
    (unless it is 0). So lengths are mixed as with g_0, and what no data reaches, such as all but the middle of a kernel
    above a single pixel, still does not move; only which channel goes which way is drawn by lot.

    Args:
        first: g_0.
        order: which kernel, or number, comes to each place: a permutation.
        signs: 1 or −1 for each place.
        form: as in `cross`.
    """
    pieces = first.reshape(len(order), -1)
    mixed = pieces[order] * signs[:, None].to(first)
    if form == "released" and first.dim() == 4:
        wanted, found = (g.square().sum(1, keepdim=True).sqrt() for g in (pieces, mixed))
        mixed = mixed * torch.where(found > 0, wanted / torch.where(found > 0, found, 1.0), 0.0)
    return mixed.reshape(first.shape)


def stretch(own: Tensor, crossed: Tensor) -> Tensor:
    """The control `length`: θ = 0. The layer goes its own way, g_k, as far as it would have gone crossed."""
    length = own.norm()
    return own * (crossed.norm() / length) if length > 0 else own


def measure_step(own: Tensor, first: Tensor, result: Tensor) -> dict[str, Tensor]:
    """What crossing made of a layer's step: with cos(a, b) = ⟨a, b⟩/(‖a‖·‖b‖), 0 where a length is 0,

    - `cosine`: cos(g_0, g_k);
    - `length`: ‖g'_k‖/‖g_k‖, of the crossed step g'_k, 1 where g_k is 0;
    - `kept`: cos(g'_k, g_k).
    """
    length = own.norm()
    ratio = result.norm() / length if length > 0 else torch.ones_like(length)
    return {"cosine": _cosine(first, own), "length": ratio, "kept": _cosine(result, own)}


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    lengths = one.norm(), other.norm()
    if not all(length > 0 for length in lengths):
        return torch.zeros_like(lengths[0])
    return torch.sum((one / lengths[0]) * (other / lengths[1]))


FIGURES = ("theta", "beta", "cosine", "length", "kept")
"""What is published of every layer; θ and β in the mean over what is crossed by itself."""
ORDER = "order"
"""The state's name for the seed by which the control `shuffled` shuffles, drawn once for a run."""

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
        control: `none`; or, to tell what it is that helps, `shuffled`: g_0 with its kernels in another order and its
            own lengths, drawn once for a run and for each layer 0, see `shuffle`; or `length`: θ = 0, but steps as long
            as the crossed ones, layer by layer, see `stretch`.
        reference: layer 0: the `first` of the shape, or, where that is its stage's first weight, the next (`conv2`).
            The authors' results were made with `form='released', reference='conv2'`, which is not the default.

    Deviations: the paper's mean is uniform; `fedavg(weight='uniform')` or `heteroavg` says so here, too. Where layer 0
    or the layer itself did not arrive, or did not move, the mean stays. The authors' code divides a transformer's
    changes by the number of local epochs before they are averaged; here no change is.
    """

    name: ClassVar[str] = "inco"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    synchronous: ClassVar[str] = SYNCHRONOUS
    form: Form = "released"
    normalise: bool = True
    optimise: bool = True
    reference: Reference = "first"
    control: Control = "none"

    def __post_init__(self) -> None:
        one_of("inco", get_args(Form), form=self.form)
        one_of("inco", get_args(Control), control=self.control)
        one_of("inco", get_args(Reference), reference=self.reference)

    def apply(self, state: Tensors, delta: Tensors, round: RoundView) -> tuple[Tensors, Tensors]:
        """Every layer's mean change, crossed with that of its layer 0; the state is this round's `FIGURES`."""
        used = [stratum for stratum in round.strata if not stratum.idle]
        found = references(round.params, used, self.reference, self.form)
        moved = round.arrived.keys() & delta.keys()  # a reducer may leave out what arrived from some
        here = {name: first for name, first in found.items() if name in moved and first in moved}
        kept = {ORDER: state.get(ORDER, torch.tensor(round.seed))} if self.control == "shuffled" else {}
        references_of = {first: self._reference(first, delta[first], kept) for first in set(here.values())}
        results: Tensors = {}
        for name, first in here.items():
            results[name], figures = self._cross_layer(delta[name], references_of[first])
            kept |= {f"{figure}/{name}": value for figure, value in figures.items()}
        return {**delta, **results}, kept

    def _reference(self, name: str, change: Tensor, kept: Tensors) -> Tensor:
        """What layers are crossed with: the change of their layer 0, or that without its content."""
        if self.control != "shuffled":
            return change
        source = generator(int(kept[ORDER]), "inco", name)
        count = change.shape[0] * change.shape[1] if change.dim() == 4 else change.numel()
        order, signs = torch.randperm(count, generator=source), 2 * torch.randint(2, (count,), generator=source) - 1
        return shuffle(change, order.to(change.device), signs.to(change.device), self.form)

    def _cross_layer(self, own: Tensor, first: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A layer's step, and its figures."""
        result, theta, beta = cross(own, first, self.form, self.normalise, self.optimise)
        if self.control == "length":
            result, theta = stretch(own, result), torch.zeros_like(theta)
        return result, {"theta": theta.mean(), "beta": beta.mean(), **measure_step(own, first, result)}

    def publish(self, state: Tensors) -> Figures:
        """The `FIGURES` of every layer that was crossed in the last round."""
        found: dict[str, dict[str, float]] = {figure: {} for figure in FIGURES}
        for key, value in state.items():
            figure, _, layer = key.partition("/")
            if layer:
                found[figure][layer] = float(value)
        return found


@dataclass(frozen=True, kw_only=True)
class HeteroAvg(Technique):
    """Every layer averaged over the clients that hold it, all alike: InCo without cross-layer gradients."""

    name: ClassVar[str] = "heteroavg"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    defaults: ClassVar[Mapping[str, str]] = {"weight": "uniform"}


@dataclass(frozen=True, kw_only=True)
class GroupAvg(Technique):
    """FedAvg inside each group of clients with the same architecture: what federations do that cannot mix them.

    Every architecture has parameters of its own, side by side in the server's model, which answers with the largest.
    """

    name: ClassVar[str] = "groupavg"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    refuses: ClassVar[Mapping[str, str]] = {
        "inco": "inco crosses the layers of one model, and groupavg has one for each group",
        "heteroavg": "one averages over all architectures, the other inside each",
        "fedpart": "fedpart goes through the strata of one model, and groupavg has one for each group",
        "fedimpro": "fedimpro shares the features of one low part, and groupavg has one for each group",
        "ccvr": "ccvr refits one classifier, and groupavg has one for each group",
        "feddf": "feddf teaches one model, and groupavg has one for each group",
    }
    branches: ClassVar[bool] = True
