"""FedNLR's "the deeper the layer, the more serious the neuron drift": bound neurons of a deep network, by layer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.data.examples import Dataset
from fedstrata.diagnosis.evidence import rank_correlation
from fedstrata.probes.measures.neurons import neuron_drift
from fedstrata.reproduce.claims import POINTS, Check, above, beyond
from fedstrata.reproduce.fednlr_drift import METHODS, visit
from fedstrata.reproduce.part_runs import build_config
from fedstrata.reproduce.parts import Findings, FindingsTable, PartResources, SeedFigures
from fedstrata.run import deal, open_run


def work(settings: Mapping[str, Any], seed: int, resources: PartResources) -> dict[str, Any]:
    """Layer → the change of neurons bound to classes that a client holds and that it lacks, by method.

    A global model is trained; every client then trains it by itself, with each method.
    """
    config = build_config(settings, seed, resources)
    history = open_run(config, None).fit(progress=False)
    dataset, parts = deal(config)
    clients = [dataset.train.select(part) for part in parts]
    held = [sorted(set(data.labels().tolist())) for data in clients]
    inputs, labels = shown_examples(dataset, settings["shown"])
    places = activation_places(history.model)
    found: dict[str, Any] = {}
    for label, text in settings["methods"].items():
        local = [visit(history.model, data, config, text) for data in clients]
        drift = neuron_drift(history.model, local, held, inputs, labels, places)
        found[label] = {"missing": drift.missing, "held": drift.held}
    return {"drift": found, "places": places, "accuracy": history.accuracy, "rounds": len(history.records)}


def shown_examples(dataset: Dataset, count: int) -> tuple[Tensor, Tensor]:
    """The inputs and labels of the first test examples: neurons are judged on what nobody trained on."""
    return dataset.test.batch(torch.arange(min(count, len(dataset.test))))


def activation_places(model: nn.Module) -> list[str]:
    """The modules whose outputs are the activations of the hidden layers: the ReLUs, from the input on."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.ReLU)]


# --- findings --------------------------------------------------------------------------------------------------------


def assess(found: SeedFigures) -> Findings:
    """Whether the fall grows with depth, and is smaller with FedNLR."""
    first = next(iter(found.values()))
    methods, places = list(first["drift"]), first["places"]
    columns = ("layer", *(f"{label}, {kind}" for label in methods for kind in ("missing", "held")))
    rows = tuple(
        (
            place,
            *(POINTS.cell(_changes(found, label, kind, place)) for label in methods for kind in ("missing", "held")),
        )
        for place in places
    )
    trained = ", ".join(f"{100 * one['accuracy']:.1f} % after {one['rounds']} rounds" for one in found.values())
    notes = (
        f"accuracy of the global model before the visits, seed by seed: {trained}",
        "change of the activation of neurons that are bound to classes that a client lacks (missing) or holds, as a "
        "share of it, on test examples, in the mean over visits to all clients; the measure of the probe `drift`. The "
        "neurons of a convolution are its channels, in the mean over their positions",
        "depth: the rank correlation over the hidden layers, of each seed, between a layer's place and the fall",
    )
    return Findings(
        (FindingsTable("Change of the activation of bound neurons after a visit, by layer", columns, rows),),
        tuple(_claims(found, places)),
        notes,
        data={str(seed): mine for seed, mine in found.items()},
    )


def _changes(found: SeedFigures, label: str, kind: str, place: str) -> dict[int, float]:
    """Seed → the change in a layer; seeds where no neuron is bound have none."""
    figures = {seed: mine["drift"][label][kind].get(place) for seed, mine in found.items()}
    return {seed: value for seed, value in figures.items() if value is not None}


def depth_correlation(changes: Mapping[str, float], places: Sequence[str]) -> float:
    """Between a layer's place and how much its bound neurons fall: 1 if each layer falls more than the one before."""
    known = [(at, -changes[place]) for at, place in enumerate(places) if place in changes]
    return rank_correlation([at for at, _ in known], [fall for _, fall in known])


def _claims(found: SeedFigures, places: Sequence[str]) -> Iterator[Check]:
    missing = {label: {s: m["drift"][label]["missing"] for s, m in found.items()} for label in METHODS}
    for label, seeds in missing.items():
        ranks = {seed: depth_correlation(changes, places) for seed, changes in seeds.items()}
        paper = "the deeper the layer, the more serious the neuron drift" if label == "FedAvg" else ""
        yield beyond(f"bound neurons fall more the deeper the layer ({label})", ranks, 0.0, paper=paper)
    falls = {s: statistics.fmean(v < 0 for v in changes.values()) for s, changes in missing["FedAvg"].items()}
    yield beyond("bound neurons of missing classes fall in most layers (FedAvg)", falls, 0.5, unit=POINTS)
    means = [{s: statistics.fmean(changes.values()) for s, changes in missing[n].items()} for n in ("FedNLR", "FedAvg")]
    yield above("bound neurons fall less with FedNLR, in the mean over the layers", means[0], means[1], unit=POINTS)
