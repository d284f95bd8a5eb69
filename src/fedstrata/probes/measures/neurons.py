"""What local training does to the neurons that are bound to a class (FedNLR, Definition 1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn

from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError
from fedstrata.models.stages import stages
from fedstrata.models.strata import classifier, strata
from fedstrata.models.taps import watch_places
from fedstrata.probes.measures.reading import (
    batches,
    check_labelled,
    class_set,
    device_of,
    measure_once,
    scratch_copy,
    start_models,
)
from fedstrata.techniques.feature_gaussians import channel_axis


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
    starts = start_models(before, local, held)
    check_labelled((inputs, labels))
    classes = sorted(set(labels.tolist()))
    if len(classes) < 2:
        raise UsageError(f"neurons are bound to one of 2 or more classes; the examples are all of class {classes[0]}")
    given = None if places is None else list(places)

    def first(model: nn.Module) -> dict[str, Tensor]:
        return _activations(model, inputs, labels, _changing_stages(model, inputs[:2]) if given is None else given)

    firsts = measure_once(first, starts)
    deepest = max(firsts, key=len)  # knows the order of the stages
    changes: tuple[dict[str, list[float]], ...] = tuple({stage: [] for stage in deepest} for _ in range(2))
    for was, model, mine in zip(firsts, local, map(class_set, held), strict=True):
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
