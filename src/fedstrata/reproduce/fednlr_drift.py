"""FedNLR's Appendix A: what a visit to a client of one class does to the neurons that are bound to another."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.config.schema import RunConfig, Settings, validate_settings
from fedstrata.data.examples import TensorExamples
from fedstrata.federation import Federation
from fedstrata.models.stages import tap
from fedstrata.probes.measures.neurons import activation_change, bound_neurons
from fedstrata.reproduce.claims import POINTS, Check, above, beyond
from fedstrata.reproduce.parts import Findings, FindingsTable, PartResources, SeedFigures
from fedstrata.reproduce.verdicts import Seeds
from fedstrata.run import deal, open_run
from fedstrata.runs.records import History

METHODS = {"FedAvg": "fedavg", "FedNLR": "fednlr"}
CONTROL = "FedAvg, a client of all classes"
EVEN = {"partition": "iid"}
HIDDEN = "fc1"
"""The stage whose outputs are the hidden neurons' activations."""

_WITHOUT = {"method", "rounds", "target", "stop_at_target", "eval_every", "participation"}


def activations(model: nn.Module, examples: TensorExamples) -> Tensor:
    """The mean activation of each hidden neuron over all examples."""
    with torch.no_grad():
        return tap(model, examples.batch(torch.arange(len(examples)))[0], HIDDEN).mean(0)


def activation_range(model: nn.Module, examples: TensorExamples) -> list[list[float]]:
    """The smallest and the largest activation of each hidden neuron on any example."""
    with torch.no_grad():
        found = tap(model, examples.batch(torch.arange(len(examples)))[0], HIDDEN)
    return [found.amin(0).tolist(), found.amax(0).tolist()]


def strictly_bound(ranges: Sequence[Sequence[Sequence[float]]]) -> list[int]:
    """How many neurons are bound to each class by Definition 1, word for word.

    The smallest activation on any example of the class is above the largest on any example of any other.

    Args:
        ranges: class → (smallest, largest) activation of each neuron.
    """
    low, high = torch.tensor(ranges, dtype=torch.float64).unbind(1)
    others = [torch.cat([high[:c], high[c + 1 :]]).amax(0) for c in range(len(high))]
    return [int((low[c] > above).sum()) for c, above in enumerate(others)]


@dataclass(frozen=True)
class Start:
    """What all visits begin with.

    Args:
        config: of the run that the model is from.
        history: that run.
        clients: class → the data of the client that holds it alone.
    """

    config: RunConfig
    history: History
    clients: Mapping[int, TensorExamples]

    def visit(self, method: str, data: TensorExamples, **others: Any) -> nn.Module:
        """The model after a visit to one client."""
        return visit(self.history.model, data, self.config, method, **others)

    def activations(self, model: nn.Module) -> list[list[float]]:
        """Class → the mean activation of each hidden neuron."""
        return [activations(model, self.clients[c]).tolist() for c in sorted(self.clients)]


def train_start(settings: Mapping[str, Any], seed: int, resources: PartResources) -> Start:
    """The global model that the visits begin with, and its clients, each of one class."""
    own = {"seed": seed, "data_dir": resources.data_dir, "workers": 1}
    config = validate_settings(RunConfig, {**settings["run"], **own})
    history = open_run(config, None).fit(progress=False)
    dataset, parts = deal(config)
    return Start(config, history, {int(d.labels()[0]): d for d in (dataset.train.select(part) for part in parts)})


def visit(model: nn.Module, data: TensorExamples, config: RunConfig, method: str, **others: Any) -> nn.Module:
    """The model after a visit to one client, trained as a configuration says, or with other settings."""
    settings = {name: getattr(config, name) for name in Settings.model_fields if name not in _WITHOUT}
    return Federation(model, [data], **{**settings, **others, "method": method, "rounds": 1}).fit(progress=False).model


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """Activations on every class before a visit, and after one to each class's client and to a client of all classes.

    The last, by FedAvg, is the control: the same model and as many steps, but no class is missing.
    """
    start = train_start(settings, seed, resources)
    history, clients, every = start.history, start.clients, sorted(start.clients)
    dataset, even = deal(validate_settings(RunConfig, {**start.config.model_dump(), **EVEN}))
    return {
        "accuracy": history.accuracy,
        "rounds": len(history.records),
        "before": start.activations(history.model),
        "after": {
            label: [start.activations(start.visit(text, clients[c])) for c in every] for label, text in METHODS.items()
        },
        "even": [start.activations(start.visit("fedavg", dataset.train.select(even[c]))) for c in every],
        "ranges": [activation_range(history.model, clients[c]) for c in every],
    }


def activation_table(rows: Sequence[Sequence[float]], classes: Iterable[int]) -> Tensor:
    """Activations of every neuron (columns) on some of the classes (rows)."""
    return torch.tensor([rows[c] for c in classes], dtype=torch.float64)


def activation_gain(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], visited: int, others: Sequence[int]
) -> float | None:
    """The share of their activation that neurons bound to the other classes, and not to the visited one, gain."""
    rows, asked = [visited, *others], torch.tensor([False] + [True] * len(others))
    return activation_change(activation_table(before, rows), activation_table(after, rows), asked)


def drifts(found: SeedFigures, visits: Sequence[tuple[int, Sequence[int]]]) -> dict[str, Seeds]:
    """Method, or the control → seed → the mean change over visits, each a (visited class, other classes)."""
    after = {label: {s: figures["after"][label] for s, figures in found.items()} for label in METHODS}
    after[CONTROL] = {seed: figures["even"] for seed, figures in found.items()}
    return {label: mean_gains(found, of, visits) for label, of in after.items()}


def mean_gains(
    found: SeedFigures, after: Mapping[int, Sequence[Any]], visits: Sequence[tuple[int, Sequence[int]]]
) -> dict[int, float]:
    """Seed → the mean change over visits, by activations after each of them; seeds where none is known have none."""
    means = {}
    for seed, figures in found.items():
        given = after[seed]
        values = [activation_gain(figures["before"], given[v], v, others) for v, others in visits if given[v]]
        known = [value for value in values if value is not None]
        if known:
            means[seed] = statistics.fmean(known)
    return means


def places(classes: int, visited: int, other: int) -> dict[str, list[tuple[int, list[int]]]]:
    """The paper's pair of classes, and every client against all other classes."""
    every = range(classes)
    return {
        f"clients {visited} and {other}": [(visited, [other])],
        f"all {classes} clients": [(v, [c for c in every if c != v]) for v in every],
    }


def assess(found: SeedFigures, visited: int, other: int) -> Findings:
    """The paper's pair of classes, and every client against all other classes."""
    visits = places(len(next(iter(found.values()))["before"]), visited, other)
    where = {place: drifts(found, those) for place, those in visits.items()}
    strict = {seed: strictly_bound(figures["ranges"]) for seed, figures in found.items() if "ranges" in figures}
    summary = tuple((place, *(POINTS.cell(seeds) for seeds in means.values())) for place, means in where.items())
    seed, first = next(iter(found.items()))
    trained = ", ".join(
        f"{100 * figures['accuracy']:.1f} % after {figures['rounds']} rounds" for figures in found.values()
    )
    return Findings(
        (
            FindingsTable(
                "Change of the activation of bound neurons, as a share of it", ("", *METHODS, CONTROL), summary
            ),
            _neuron_table(first, visited, other, seed),
        ),
        (*_drift_checks(where), *_strict_checks(strict)),
        (
            f"accuracy of the global model before the visit, seed by seed: {trained}",
            "a neuron is bound to a class if it is more active on it than on the client's own class, in the mean over "
            "the examples; Definition 1 asks it of every example. The share is that of the probe `drift`: the sum of "
            "these neurons' changes over the sum of their activations before",
            *_strict_note(strict),
        ),
        data={str(seed): figures for seed, figures in found.items()},
    )


def _drift_checks(where: Mapping[str, Mapping[str, Seeds]]) -> Iterator[Check]:
    for at, (place, means) in enumerate(where.items()):
        paper = "" if at else "−5 against −9 % of three neurons (−0.01, −0.03, −0.04 against −0.03, −0.06, −0.06)"
        fall, less = f"bound neurons fall with FedAvg ({place})", f"bound neurons fall less with FedNLR ({place})"
        yield beyond(fall, means["FedAvg"], 0, below=True, unit=POINTS)
        yield above(less, means["FedNLR"], means["FedAvg"], unit=POINTS, paper=paper)
        name = f"bound neurons fall less where no class is missing ({place})"
        yield above(name, means[CONTROL], means["FedAvg"], unit=POINTS)


def _strict_checks(strict: Mapping[int, Sequence[int]]) -> Iterator[Check]:
    if strict:
        shares = {seed: statistics.fmean(count > 0 for count in counts) for seed, counts in strict.items()}
        name = "most classes have a neuron that is bound to them by Definition 1, in every example"
        yield beyond(name, shares, 0.5, unit=POINTS, paper="Theorem 1: every class, at the optimum")


def _strict_note(strict: Mapping[int, Sequence[int]]) -> list[str]:
    told = ", ".join(f"{sum(counts)} (seed {seed})" for seed, counts in strict.items())
    return [f"neurons that Definition 1 binds to a class, in every example: {told}"] if strict else []


def _neuron_table(found: Mapping[str, Any], visited: int, other: int, seed: int) -> FindingsTable:
    """The hidden neurons one by one, as in the paper's Table 4."""
    before = found["before"]
    bound = bound_neurons(activation_table(before, (visited, other)), torch.tensor([False, True]))[1]
    mine = set(bound.nonzero().flatten().tolist())
    rows = []
    for at, value in enumerate(before[other]):
        after = [found["after"][method][visited][other][at] for method in METHODS]
        changes = (f"{new - value:+.3f}" if at in mine else "" for new in after)
        activations = (before[visited][at], value, *after)
        rows.append((str(at + 1), "yes" if at in mine else "", *(f"{number:.3f}" for number in activations), *changes))
    columns = (
        "neuron",
        f"bound to {other}",
        f"before, on {visited}",
        f"before, on {other}",
        *(f"{method}, on {other}" for method in METHODS),
        *(f"{method}, change" for method in METHODS),
    )
    return FindingsTable(
        f"Mean activations of the hidden neurons around a visit to client {visited}, seed {seed}", columns, tuple(rows)
    )
