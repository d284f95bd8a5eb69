"""Is FedNLR merely slower learning? Its drift of neurons against FedAvg's at the same local training loss."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedstrata.data.examples import TensorExamples
from fedstrata.reproduce.claims import POINTS, Check, above, plain_unit
from fedstrata.reproduce.fednlr_drift import METHODS, Start, mean_gains, places, train_start
from fedstrata.reproduce.parts import Findings, FindingsTable, PartResources, SeedFigures
from fedstrata.reproduce.verdicts import Seeds

EQUAL = "FedAvg at equal loss"
_WIDER, _TRIES = 1.5, 8
"""How the interval of rates grows, and how often, until it holds the one that is looked for."""


def match_rate(ends: Callable[[float], float], wanted: float, rate: float, within: float, most: int) -> float | None:
    """The learning rate at which a visit ends with a loss, by bisection; None if none is found.

    Args:
        ends: a rate → the loss that the visit ends with, which falls as the rate grows from 0.
        wanted: the loss.
        rate: where to begin.
        within: how far the loss may be off, as a share of it.
        most: how many visits at the most, besides those that look for an interval.
    """
    low, high = 0.0, rate
    for _ in range(_TRIES):
        if ends(high) <= wanted:
            break
        low, high = high, high * _WIDER
    else:
        return None
    for _ in range(most):
        middle = (low + high) / 2
        loss = ends(middle)
        if abs(loss - wanted) <= within * wanted:
            return middle
        low, high = (middle, high) if loss > wanted else (low, middle)
    return None


def mean_loss(model: nn.Module, data: TensorExamples) -> float:
    """The mean cross-entropy over all of a client's examples."""
    with torch.no_grad():
        x, y = data.batch(torch.arange(len(data)))
        return float(nn.functional.cross_entropy(model(x), y))


@dataclass(frozen=True)
class Visit:
    """What a visit leads to.

    Args:
        activations: class → the mean activation of each hidden neuron.
        loss: on the client's own examples.
    """

    activations: list[list[float]]
    loss: float

    @staticmethod
    def after(start: Start, method: str, data: TensorExamples, **others: Any) -> Visit:
        """Make one."""
        model = start.visit(method, data, **others)
        return Visit(start.activations(model), mean_loss(model, data))


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """As the part `drift` has it, and after visits of FedAvg with the same batches at another rate.

    Returns:
        Activations before, and after each class's visit by each method; for FedAvg at equal loss an empty list where no
        rate was found, and the rates as shares of the run's own. Training losses before and after.
    """
    start = train_start(settings, seed, resources)
    own = [start.clients[c] for c in sorted(start.clients)]
    made = {label: [Visit.after(start, text, data) for data in own] for label, text in METHODS.items()}
    rates = [
        equal_rate(start, data, one.loss, settings["within"], settings["most"])
        for data, one in zip(own, made["FedNLR"], strict=True)
    ]
    equal = [
        None if rate is None else Visit.after(start, "fedavg", data, lr=rate)
        for data, rate in zip(own, rates, strict=True)
    ]
    every: dict[str, list[Visit | None]] = {**{label: [*visits] for label, visits in made.items()}, EQUAL: equal}
    losses = {label: [visit.loss for visit in visits if visit is not None] for label, visits in every.items()}
    return {
        "accuracy": start.history.accuracy,
        "rounds": len(start.history.records),
        "before": start.activations(start.history.model),
        "losses": {"before": [mean_loss(start.history.model, data) for data in own], **losses},
        "after": {label: [[] if v is None else v.activations for v in visits] for label, visits in every.items()},
        "rates": [None if rate is None else rate / start.config.lr for rate in rates],
    }


def equal_rate(start: Start, data: TensorExamples, wanted: float, within: float, most: int) -> float | None:
    """The rate at which FedAvg's visit to a client, with the same batches, ends with a loss."""
    return match_rate(
        lambda rate: mean_loss(start.visit("fedavg", data, lr=rate), data), wanted, start.config.lr, within, most
    )


# --- findings --------------------------------------------------------------------------------------------------------


def assess(found: SeedFigures, visited: int, other: int) -> Findings:
    """Whether the drift is smaller with FedNLR than with FedAvg that has learnt as much."""
    labels = (*METHODS, EQUAL)
    visits = places(len(next(iter(found.values()))["before"]), visited, other)
    means = {
        place: {
            label: mean_gains(found, {seed: mine["after"][label] for seed, mine in found.items()}, those)
            for label in labels
        }
        for place, those in visits.items()
    }
    drift = tuple((place, *(POINTS.cell(by_label[label]) for label in labels)) for place, by_label in means.items())
    unit = plain_unit(4)
    losses = tuple(
        (label, unit.cell({seed: statistics.fmean(mine["losses"][label]) for seed, mine in found.items()}))
        for label in ("before", *labels)
    )
    missed = sum(rate is None for mine in found.values() for rate in mine["rates"])
    known = [rate for mine in found.values() for rate in mine["rates"] if rate is not None]
    notes = (
        "FedAvg at equal loss: the same model, client and batches, with the learning rate at which the visit ends with "
        f"the training loss that FedNLR's ends with; {_rates_text(known)}",
        *([f"for {missed} visits no such rate was found; they are left out of its figures"] if missed else []),
        "the measure of the change is that of the part `drift`",
    )
    title = "Change of the activation of bound neurons, as a share of it"
    tables = (
        FindingsTable(title, ("", *labels), drift),
        FindingsTable("A client's training loss, before a visit and after it", ("", "loss"), losses),
    )
    return Findings(tables, tuple(_claims(means)), notes, data={str(seed): mine for seed, mine in found.items()})


def _rates_text(known: list[float]) -> str:
    if not known:
        return "none was found"
    return f"it is {min(known):.2f} to {max(known):.2f} of FedNLR's, {statistics.fmean(known):.2f} in the mean"


def _claims(means: Mapping[str, Mapping[str, Seeds]]) -> Iterator[Check]:
    for place, by_label in means.items():
        name = f"bound neurons fall less with FedNLR than with FedAvg at equal local loss ({place})"
        yield above(name, by_label["FedNLR"], by_label[EQUAL], unit=POINTS)
        name = f"they fall less with FedNLR than with FedAvg at an equal learning rate ({place})"
        yield above(name, by_label["FedNLR"], by_label["FedAvg"], unit=POINTS)
