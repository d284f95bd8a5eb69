"""Eq. 11's two terms, and Assumption 1, measured on real networks, layer by layer.

"Unlocking the Potential of Federated Learning for Deeper Models", §3.2 and §6.1. Symbols: layer i with weight A_i, what
it is given Z_{i−1}, what it puts out H_i, ε_i = ∂L/∂A_i − ∂L̄/∂A_i, where L̄ is the loss of a prototype X̄.

Eq. 10 has (Z_{i−1}ᵀ)⁻¹, which does not exist where Z_{i−1} is not square, as it never is here. The terms are therefore
defined by what they mean: T1 is how far ∂L/∂A_{i−1} deviates if nothing deviates but the signal ∂L/∂H_i that comes back
from the next layer, while the layer's own input Z_{i−2} and σ'(H_{i−1}), and which places a max-pool chose, are the
prototype's; T2 = ε_{i−1} − T1 is the rest, which comes from different inputs. Theorem 1 follows from E‖T1‖² = E‖ε_i‖²
(Assumption 1) and E[T1ᵀT2] = 0. It also takes E[ε] = 0 for granted; a clean image, or a class's mean image, does not
promise that.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.core.rng import generator
from fedstrata.core.tensors import Tensors
from fedstrata.errors import UsageError
from fedstrata.probes.measures.gradient_spread import single_gradients
from fedstrata.probes.measures.reading import device_of, scratch_copy
from fedstrata.reproduce.claims import PLAIN, POINTS, Check, beyond, plain_unit
from fedstrata.reproduce.deeper_accumulation import KINDS, STATES, first_of_each_class
from fedstrata.reproduce.part_runs import build_config
from fedstrata.reproduce.parts import Findings, FindingsTable, PartResources, SeedFigures
from fedstrata.run import open_run
from fedstrata.system.machine import compute_with
from fedstrata.tasks.classification import CLASSIFICATION

NOISE = 0.1
"""The noise's standard deviation, as in Fig. 3."""
FACTOR = 2.0
"""How far from 1 the ratio of Assumption 1 may be."""
_TOGETHER = 64
"""Images that are differentiated together."""


@dataclass(frozen=True)
class LayerTerms:
    """Of one layer, in the mean over the images around one prototype.

    Args:
        deviation: E‖ε‖².
        back: E‖T1‖², of the signal from the next layer; None for the last layer, as all that follows.
        inputs: E‖T2‖², of the layer's own inputs.
        cross: 2E[T1ᵀT2]; the deviation is the sum of the three.
    """

    deviation: float
    back: float | None = None
    inputs: float | None = None
    cross: float | None = None


# --- one prototype ---------------------------------------------------------------------------------------------------


def gradient_terms(model: nn.Module, prototype: Tensor, images: Tensor, label: int) -> dict[str, LayerTerms]:
    """Layer → its terms, from the input on, for images around a prototype, all of one class.

    Args:
        model: of linear layers and convolutions, one after the other, without norms over the batch; at whose parameters
            the gradients are taken, in evaluation mode and in double precision.
        prototype: X̄, as the model takes one image.
        images: that deviate from it.
        label: of all of them.
    """
    with scratch_copy(model) as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that run one by one
        scratch.double()
        device = device_of(scratch)
        middle = prototype.double().unsqueeze(0).to(device)
        here = _run(scratch, middle, label)
        names = [f"{layer}.weight" for layer in here.outputs]
        each = single_gradients(scratch, names, middle, _labels(middle, label))
        sums = {layer: [0.0] * 4 for layer in here.outputs}
        for part in torch.split(images, _TOGETHER):
            moved = part.double().to(device)
            _add_terms(sums, here, _run(scratch, moved, label), each(moved, _labels(moved, label)))
    means = {layer: [total / len(images) for total in mine] for layer, mine in sums.items()}
    *others, last = means
    return {layer: LayerTerms(*means[layer]) for layer in others} | {last: LayerTerms(means[last][0])}


def _labels(images: Tensor, label: int) -> Tensor:
    return torch.full((len(images),), label, device=images.device)


@dataclass(frozen=True)
class _Pass:
    """A pass over images, whose graph is kept.

    Args:
        weights: layer → A.
        outputs: layer → H, images first.
        signals: layer → ∂L/∂H, each image's own.
    """

    weights: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    signals: Mapping[str, Tensor]


def _run(model: nn.Module, images: Tensor, label: int) -> _Pass:
    """One pass; every weight layer notes what it puts out, in the order in which they run."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)}
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, given, out: outputs.update({name: out})

    handles = [module.register_forward_hook(note(name)) for name, module in layers.items()]
    logits = model(images)
    for handle in handles:
        handle.remove()
    if len(outputs) < 2:
        raise UsageError("the terms of back-propagation need 2 or more linear layers or convolutions")
    loss, _ = CLASSIFICATION.sums(logits, _labels(images, label))
    signals = torch.autograd.grad(loss, list(outputs.values()), retain_graph=True)
    weights = {name: layers[name].weight for name in outputs}
    return _Pass(weights, outputs, dict(zip(outputs, signals, strict=True)))


def _add_terms(sums: dict[str, list[float]], here: _Pass, there: _Pass, gradients: Tensors) -> None:
    """Add ‖ε‖², ‖T1‖², ‖T2‖² and 2T1ᵀT2 of all images, from the prototype's pass, theirs, and their gradients."""
    layers = list(sums)
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        (middle,) = torch.autograd.grad(
            here.outputs[layer], here.weights[layer], here.signals[layer], retain_graph=True
        )
        deviations = gradients[f"{layer}.weight"] - middle
        found = [deviations.square().sum()]
        if following is not None:
            moved = (there.signals[following] - here.signals[following]).unsqueeze(1)
            (back,) = torch.autograd.grad(
                here.outputs[following], here.weights[layer], moved, retain_graph=True, is_grads_batched=True
            )
            rest = deviations - back
            found += [back.square().sum(), rest.square().sum(), 2 * (back * rest).sum()]
        for at, value in enumerate(found):
            sums[layer][at] += float(value)


# --- the part --------------------------------------------------------------------------------------------------------


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """Network → its state → kind of diversity → for each class, layer → its terms."""
    found: dict[str, Any] = {}
    for label, model in settings["models"].items():
        federation = open_run(build_config(settings, seed, resources, model=model), None)
        with compute_with(1):
            images = first_of_each_class(federation.clients[0], settings["classes"], settings["images"])
            sets = list(_deviating(*images, settings["draws"], seed))
            new = _terms_by_kind(federation.model, sets)
            federation.fit(progress=False)
            found[label] = {"trained": _terms_by_kind(federation.model, sets), "new": new}
    return found


Deviating = tuple[str, Tensor, Tensor, int]
"""(kind of diversity, prototype, images that deviate from it, their class)."""


def _deviating(x: Tensor, y: Tensor, draws: int, seed: int) -> Iterator[Deviating]:
    """For each class: its first image under noise, and its images around their mean."""
    for label in sorted(set(y.tolist())):
        own = x[y == label].cpu()
        rng = generator("deeper_terms", seed, label)
        noise = torch.randn((draws, *own.shape[1:]), generator=rng, dtype=own.dtype)
        yield "noise", own[0], own[0] + NOISE * noise, label
        yield "class", own.mean(0), own, label


def _terms_by_kind(model: nn.Module, sets: Sequence[Deviating]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for kind, prototype, images, label in sets:
        terms = gradient_terms(model, prototype, images, label)
        found[kind].append({layer: asdict(mine) for layer, mine in terms.items()})
    return found


@dataclass(frozen=True)
class LayerRatios:
    """Of one layer and the next, over all classes.

    Args:
        kept: E‖T1‖²/E‖ε_i‖² of the next layer i, in the geometric mean over the classes; Assumption 1 says 1.
        grown: E‖ε_{i−1}‖²/E‖ε_i‖², likewise; Theorem 1 says no less than 1.
        inputs: E‖T2‖²/E‖ε_{i−1}‖², in the mean over the classes.
        cross: 2E[T1ᵀT2]/E‖ε_{i−1}‖², likewise; the proof says 0.
    """

    kept: float
    grown: float
    inputs: float
    cross: float


def layer_ratios(classes: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, LayerRatios]:
    """Layer → its ratios, without the last one; classes where some layer does not deviate are left out.

    Nothing, if no class is left.
    """
    sound = [mine for mine in classes if all(terms["deviation"] > 0 for terms in mine.values())]
    found = {}
    for layer, following in pairwise(sound[0] if sound else ()):
        pairs = [(mine[layer], mine[following]["deviation"]) for mine in sound]
        found[layer] = LayerRatios(
            _geometric([one["back"] / after for one, after in pairs]),
            _geometric([one["deviation"] / after for one, after in pairs]),
            statistics.fmean(one["inputs"] / one["deviation"] for one, _ in pairs),
            statistics.fmean(one["cross"] / one["deviation"] for one, _ in pairs),
        )
    return found


def _geometric(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(max(value, 1e-30)) for value in values))


def assess(found: SeedFigures) -> Findings:
    """Whether what comes back is kept, how much comes from inputs, and whether divergence never falls."""
    networks = list(next(iter(found.values())))
    ratios = {
        (label, state, kind): {s: r for s, f in found.items() if (r := layer_ratios(f[label][state][kind]))}
        for label in networks
        for state in STATES
        for kind in KINDS
    }
    notes = (
        "T1: how far a layer's gradient deviates from a prototype's if only the signal from the next layer does, while "
        "its own input, σ' and the max-pools' choices are the prototype's; T2: the rest. Eq. 10's inverse of Z does "
        "not exist, so that this is what the terms are taken to be",
        "kept: E‖T1‖² over the next layer's E‖ε‖², which Assumption 1 sets to 1; grown: E‖ε‖² over the next layer's, "
        "which Theorem 1 has at 1 or more; both in the geometric mean over the classes. Of Assumption "
        "1 the largest |log2| of what is kept in a layer is judged: 1 is a factor of 2",
        "inputs: E‖T2‖², and cross: 2E[T1ᵀT2], which the proof sets to 0, as shares of the layer's own E‖ε‖²; with "
        "T1's share they add up to 1",
        f"prototypes: a class's first image under noise N(0, {NOISE:g}), and the mean of a class's images",
    )
    tables = tuple(_table(ratios, networks, state) for state in STATES)
    return Findings(tables, tuple(_claims(ratios)), notes, data={str(seed): mine for seed, mine in found.items()})


Ratios = Mapping[tuple[str, str, str], Mapping[int, Mapping[str, LayerRatios]]]
"""(network, its state, kind of diversity) → seed → layer → its ratios."""


def _claims(ratios: Ratios) -> Iterator[Check]:
    for (label, state, kind), by_seed in ratios.items():
        where = f"({KINDS[kind]}, {STATES[state]})"
        worst = {s: max(abs(math.log2(one.kept)) for one in layers.values()) for s, layers in by_seed.items()}
        name = f"{label}: Assumption 1 holds within a factor of {FACTOR:g} in every layer {where}"
        yield beyond(name, worst, math.log2(FACTOR), below=True, unit=plain_unit(2))
        shares = {s: statistics.fmean(one.grown >= 1 for one in layers.values()) for s, layers in by_seed.items()}
        yield beyond(f"{label}: divergence never falls towards the input {where}", shares, 0.99, unit=POINTS)


def _table(ratios: Ratios, networks: Sequence[str], state: str) -> FindingsTable:
    columns = ("kept", "grown", "inputs", "cross")
    rows = []
    for label in networks:
        kinds = [ratios[label, state, kind] for kind in KINDS]
        layers_of = max((layers for by_seed in kinds for layers in by_seed.values()), key=len, default={})
        for at, layer in enumerate(layers_of, start=1):
            cells = [
                PLAIN.cell({s: getattr(layers[layer], name) for s, layers in by_seed.items()})
                for by_seed in kinds
                for name in columns
            ]
            rows.append((label, str(at), *cells))
    heads = [f"{name}, {diversity}" for diversity in KINDS.values() for name in columns]
    title = f"The terms of a layer's squared deviation, {STATES[state]}"
    return FindingsTable(title, ("network", "layer", *heads), tuple(rows), left=2)
