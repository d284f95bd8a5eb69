"""What local training does to a model: gradient norms around the averaging, forgotten classes, drifting neurons.

Also how far apart it takes the running statistics of norm layers. Gradient norms around the averaging are what FedPart
(NeurIPS 2024) shows as layer mismatch; bound neurons are those of FedNLR's Definition 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedstrata.client.objective import by_autograd
from fedstrata.core.rng import derive, generator, seed_global
from fedstrata.core.tensors import Tensors, load, scale, subtract, whole_norm
from fedstrata.core.types import Examples, Stratum
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError, positive
from fedstrata.models.norms import normalises_batches
from fedstrata.models.stages import stages
from fedstrata.models.strata import classifier, strata
from fedstrata.models.taps import watch_places
from fedstrata.probes.measures.reading import (
    Data,
    batches,
    check_clients,
    check_labelled,
    check_names,
    device_of,
    scratch_copy,
)
from fedstrata.tasks.classification import task_loss
from fedstrata.techniques.fedimpro import channel_axis

_T = TypeVar("_T")

EPSILON = 1e-5
"""What norm layers add to a variance before they divide by its root."""


# Gradient norms ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientTrace:
    """Stratum name → the norm of its gradient at every step, from a client's own model on, and from the averaged."""

    alone: dict[str, list[float]]
    averaged: dict[str, list[float]]

    @property
    def jumps(self) -> dict[str, float]:
        """Stratum name → the norm at the first step after averaging over the norm without; far above 1 is a spike."""
        pairs = {name: (norms[0], self.alone[name][0]) for name, norms in self.averaged.items()}
        return {name: after / before for name, (after, before) in pairs.items() if before > 0}


def gradient_trace(
    local: nn.Module,
    averaged: nn.Module,
    data: Data,
    strata: Sequence[Stratum],
    steps: int = 10,
    batch_size: int = 32,
    lr: float = 0.01,
    seed: int = 0,
) -> GradientTrace:
    """Gradient norms step by step if a client had gone on alone, and as it goes on from the averaged model.

    Both make the same plain steps θ ← θ − η∇L of SGD, in training mode, on the same batches with the same random
    numbers. All batches are of one size: the gradient of a smaller one is larger by chance alone.

    Args:
        local: the client's model after its training.
        averaged: the server's model after the round, for the same client.
        data: the client's, in any form that `Federation` takes.
        strata: of both models.
        steps: how many.
        batch_size: examples per step, or all if the client has fewer.
        lr: η.
        seed: of batches and of what training draws.
    """
    positive("gradient_trace", steps=steps, batch_size=batch_size, lr=lr)
    (held,) = check_clients([data])
    if min(batch_size, len(held)) == 1 and (normalises_batches(local) or normalises_batches(averaged)):
        raise UsageError("a batch of one example has no statistics, which this model normalises by")
    order = list(islice(_full_batches(len(held), batch_size, seed), steps))
    return GradientTrace(*(_norms(model, held, order, strata, lr, seed) for model in (local, averaged)))


def _full_batches(examples: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """A fresh permutation every epoch, split into batches, without a last one that is smaller."""
    rng = generator("gradient_trace", seed)
    size = min(batch_size, examples)
    while True:
        yield from torch.split(torch.randperm(examples, generator=rng)[: examples // size * size], size)


def _norms(
    model: nn.Module, data: Examples, order: Sequence[Tensor], strata: Sequence[Stratum], lr: float, seed: int
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {stratum.name: [] for stratum in strata}
    with scratch_copy(model, training=True) as scratch:
        params: Tensors = dict(scratch.named_parameters())
        check_names((n for stratum in strata for n in stratum.params), params, "the model has")
        device = device_of(scratch)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return task_loss(scratch(x), y)

        seed_global(derive("gradient_trace", seed), device, everything=not isinstance(data, TensorExamples))
        for index in order:
            x, y = (part.to(device) for part in data.batch(index))
            grads = by_autograd(partial(loss, x, y), params)
            for stratum in strata:
                found[stratum.name].append(float(whole_norm({n: grads[n] for n in stratum.params})))
            load(params, subtract(params, scale(grads, lr), list(params)))
    return found


# Forgetting -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """Accuracies before and after local training; None where nothing could be measured.

    Attributes:
        before: of each class in order, of the model that clients begin with.
        after: of each class, of the clients' own models after training, in the mean over the clients.
        held: after training, on the classes that a client holds: in the mean over these, then over the clients.
        missing: the same on the classes that it lacks.
        forgetting: how much training lowers the accuracy on the classes that a client lacks, in the same mean.
    """

    before: tuple[float | None, ...]
    after: tuple[float | None, ...]
    held: float | None
    missing: float | None
    forgetting: float | None


def forgetting(
    before: nn.Module | Sequence[nn.Module],
    local: Sequence[nn.Module],
    held: Sequence[Collection[int]],
    inputs: Tensor,
    labels: Tensor,
) -> Calibration:
    """What clients' models know of each class, and what they forget of the classes that they lack.

    Classes weigh the same, however many examples of them there are. Models are judged in evaluation mode.

    Args:
        before: the model that all clients begin with, or one for each where they are of different depths.
        local: each client's model after its training.
        held: for each client, the classes that it has examples of.
        inputs: of examples of all classes that everybody is judged by.
        labels: theirs.
    """
    starts = _starts(before, local, held)
    check_labelled((inputs, labels))
    found = _measure_once(partial(_accuracies, inputs=inputs, labels=labels), starts)
    found += [_accuracies(model, inputs, labels) for model in local]
    if len(sizes := {len(accuracies) for accuracies in found}) > 1:
        raise UsageError(f"models of {min(sizes)} and of {max(sizes)} classes cannot be compared")
    was, now = torch.stack(found).chunk(2)
    present = ~now[0].isnan()
    own = torch.tensor([[c in mine for c in range(now.shape[1])] for mine in map(_class_set, held)])
    return Calibration(
        before=_as_tuple(was.mean(0)),
        after=_as_tuple(now.mean(0)),
        held=_mean(now, own & present),
        missing=_mean(now, ~own & present),
        forgetting=_mean(was - now, ~own & present),
    )


def _accuracies(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Of each class that the model tells apart; NaN for those without examples."""
    hits, rows = [], []
    with scratch_copy(model) as scratch, torch.no_grad():
        for _, x, y in batches(scratch, TensorExamples(inputs, labels)):
            logits = scratch(x)
            task_loss(logits, y)  # refuses labels that the model has no output for
            rows.append(y)
            hits.append(y[logits.argmax(1) == y])
    right, seen = (torch.bincount(torch.cat(part), minlength=logits.shape[1]).double().cpu() for part in (hits, rows))
    return right / seen


def _class_set(classes: Collection[int]) -> set[int]:
    return {int(c) for c in classes}


def _mean(values: Tensor, where: Tensor) -> float | None:
    """Over a row's chosen entries, then over the rows that have any."""
    rows = [float(mine[chosen].mean()) for mine, chosen in zip(values, where, strict=True) if chosen.any()]
    return fmean(rows) if rows else None


def _as_tuple(values: Tensor) -> tuple[float | None, ...]:
    return tuple(None if value != value else value for value in values.tolist())


# Neurons ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drift:
    """Stage → relative change of the activation of bound neurons (`activation_change`); −0.2 is a fifth less.

    Attributes:
        held: of neurons that are bound to a class that the client holds, in the mean over the clients.
        missing: of neurons that are bound to a class that it lacks.
    """

    held: dict[str, float]
    missing: dict[str, float]


def bound_neurons(activations: Tensor, classes: Tensor) -> Tensor:
    """Which neurons (columns) are bound to which class (rows): True for a neuron that stands for the class.

    `activations` holds a_j(c), the mean activation of neuron j on the examples of class c. Neuron j is bound to a class
    c of the `classes` if a_j(c) > 0 and a_j(c) > a_j(d) for every class d that is not one of them. With the classes
    that a client lacks, those are the neurons that answer to a missing class more than to anything that the client has;
    with two classes, the neurons of FedNLR's Table 4. Definition 1 asks it of every example instead of the mean.
    """
    others = activations[~classes]
    bar = others.max(0).values.clamp(min=0) if len(others) else torch.zeros_like(activations[0])
    return (activations > bar) & classes.unsqueeze(1)


def activation_change(was: Tensor, now: Tensor, classes: Tensor) -> float | None:
    """The drift of bound neurons: Σ(a'_j(c) − a_j(c))/Σ a_j(c), over the classes c and the neurons j bound to them.

    A share of the activation before: −0.1 is a tenth less. None where no neuron is bound.
    """
    bound = bound_neurons(was, classes)
    return float((now - was)[bound].sum() / was[bound].sum()) if bound.any() else None


def neuron_drift(
    before: nn.Module | Sequence[nn.Module],
    local: Sequence[nn.Module],
    held: Sequence[Collection[int]],
    inputs: Tensor,
    labels: Tensor,
    places: Iterable[str] | None = None,
) -> Drift:
    """What local training does to the neurons of a class (FedNLR, Definition 1 and Appendix A), stage by stage.

    A neuron is an output of a stage, or a channel of it in the mean over its positions. The figure is
    `activation_change`, for the classes that a client holds and for those that it lacks: the share by which neurons
    change that are bound to one of them (`bound_neurons`). A stage without such neurons is left out.

    Args:
        before: the model that all clients begin with, or one for each where they are of different depths.
        local: each client's model after its training.
        held: for each client, the classes that it has examples of.
        inputs: of examples of two or more classes that all models are shown.
        labels: theirs.
        places: names of modules; None for the stages of an `nn.Sequential` that training can change, without the head.
    """
    starts = _starts(before, local, held)
    check_labelled((inputs, labels))
    classes = sorted(set(labels.tolist()))
    if len(classes) < 2:
        raise UsageError(f"neurons are bound to one of 2 or more classes; the examples are all of class {classes[0]}")
    given = None if places is None else list(places)

    def first(model: nn.Module) -> dict[str, Tensor]:
        return _activations(model, inputs, labels, _changing_stages(model, inputs[:2]) if given is None else given)

    firsts = _measure_once(first, starts)
    deepest = max(firsts, key=len)  # knows the order of the stages
    changes: tuple[dict[str, list[float]], ...] = tuple({stage: [] for stage in deepest} for _ in range(2))
    for was, model, mine in zip(firsts, local, map(_class_set, held), strict=True):
        now = _activations(model, inputs, labels, list(was))
        own = torch.tensor([c in mine for c in classes])
        for stage, activations in was.items():
            if now[stage].shape != activations.shape:
                raise UsageError(f"stage '{stage}' has another number of neurons in a client's model than before")
            for into, sort in zip(changes, (own, ~own), strict=True):
                change = activation_change(activations, now[stage], sort)
                if change is not None:
                    into.setdefault(stage, []).append(change)
    return Drift(*({stage: fmean(values) for stage, values in found.items() if values} for found in changes))


def _changing_stages(model: nn.Module, sample: Tensor) -> list[str]:
    """The stages whose outputs training changes, up to the one that the classifier is in."""
    names = stages(model)
    with scratch_copy(model) as scratch:
        used = [stratum for stratum in strata(scratch, sample.to(device_of(scratch))) if not stratum.idle]
    if not used:
        return []
    held = {name.partition(".")[0] for stratum in used for name in stratum.params}
    first = next(at for at, name in enumerate(names) if name in held)
    return list(names[first : names.index((classifier(used) or used[-1]).stage)])


def _activations(model: nn.Module, inputs: Tensor, labels: Tensor, places: Sequence[str]) -> dict[str, Tensor]:
    """Place → the mean activation of each neuron (columns) on the examples of each class (rows, in order)."""
    known = torch.tensor(sorted(set(labels.tolist())))
    totals: dict[str, Tensor] = {}
    counts = torch.stack([(labels.cpu() == c).sum() for c in known]).double()
    with scratch_copy(model) as scratch, torch.no_grad():
        for _, x, y in batches(scratch, TensorExamples(inputs, labels)):
            seen: dict[str, Tensor] = {}
            with watch_places(scratch, {place: partial(_look, seen, len(x), place) for place in places}):
                scratch(x)
            rows = torch.searchsorted(known, y.cpu())
            for place in places:
                if place not in seen:
                    raise UsageError(f"the model's module '{place}' does not run")
                sums = totals.setdefault(place, torch.zeros(len(known), seen[place].shape[1], dtype=torch.float64))
                sums.index_add_(0, rows, seen[place])
    return {place: sums / counts.unsqueeze(1) for place, sums in totals.items()}


def _look(seen: dict[str, Tensor], examples: int, place: str, there: Tensor) -> None:
    """Note the neurons' activations at once: the next layer may work in place. Only the first time that they run."""
    if there.dim() < 2 or len(there) != examples:
        raise UsageError(f"stage '{place}' puts out {list(there.shape)} for {examples} examples, not a row for each")
    if place not in seen:
        last = there.movedim(channel_axis(there.dim()), -1).double().cpu()
        seen[place] = last.reshape(len(last), -1, last.shape[-1]).mean(1)


def _starts(
    before: nn.Module | Sequence[nn.Module], local: Sequence[nn.Module], held: Sequence[Collection[int]]
) -> list[nn.Module]:
    """The model that each client begins with."""
    starts = [before] * len(local) if isinstance(before, nn.Module) else list(before)
    if not len(local) == len(held) == len(starts) or not len(local):
        raise UsageError(
            "this needs 1 or more clients, each with its model, its classes and the model it begins with; "
            f"there are {len(local)}, {len(held)} and {len(starts)}"
        )
    return starts


def _measure_once(measure: Callable[[nn.Module], _T], models: Sequence[nn.Module]) -> list[_T]:
    """A result for each model; one that stands there several times is measured once."""
    found = {key: measure(model) for key, model in {id(model): model for model in models}.items()}
    return [found[id(model)] for model in models]


# Running statistics -----------------------------------------------------------------------------------------


def statistics_spread(buffers: Sequence[Mapping[str, Tensor]], strata: Sequence[Stratum]) -> dict[str, float]:
    """Stratum name → how far clients' running means are from their average, in running standard deviations.

    The mean over the clients i of the square mean over the channels of (μ_i − μ̄)/√(σ̄² + ε), where μ̄ and σ̄² are plain
    averages over the clients that hold the statistics, and ε = 10⁻⁵ as in the norm layers, so that a channel which is
    always the same counts for nothing. Strata without running statistics are left out, as are those of one client only.

    Args:
        buffers: each client's after its training.
        strata: of the whole model.
    """
    check_names({n for mine in buffers for n in mine}, {n for s in strata for n in s.buffers}, "the strata have")
    found = {}
    for stratum in strata:
        shifts: dict[int, list[Tensor]] = {}
        for name in (n for n in stratum.buffers if n.endswith("running_mean")):
            for client, shift in _shifts(buffers, name).items():
                shifts.setdefault(client, []).append(shift)
        if shifts:
            found[stratum.name] = fmean(float(torch.cat(mine).square().mean().sqrt()) for mine in shifts.values())
    return found


def _shifts(buffers: Sequence[Mapping[str, Tensor]], mean: str) -> dict[int, Tensor]:
    """Client → (μ_i − μ̄)/√(σ̄² + ε) of one norm layer, for those that have it if they are several."""
    var = f"{mean.removesuffix('running_mean')}running_var"
    holders = [client for client, mine in enumerate(buffers) if mean in mine and var in mine]
    if len(holders) < 2:
        return {}
    means, variances = ([buffers[client][name].detach().double().cpu() for client in holders] for name in (mean, var))
    if len({tensor.shape for tensor in (*means, *variances)}) > 1:
        raise UsageError(f"the clients' tensors '{mean}' are of different shapes")
    middle = torch.stack(means).mean(0)
    deviation = (torch.stack(variances).mean(0) + EPSILON).sqrt()
    return {client: (mine - middle) / deviation for client, mine in zip(holders, means, strict=True)}
