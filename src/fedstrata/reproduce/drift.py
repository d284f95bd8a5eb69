"""FedNLR's Appendix A: what a visit to a client of one class does to the neurons that are bound to another."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.compare.table import stat
from fedstrata.config import RunConfig, Settings, checked
from fedstrata.data.examples import TensorExamples
from fedstrata.federation import Federation
from fedstrata.reproduce.claims import PLAIN, above, beyond
from fedstrata.reproduce.parts import Bench, Findings, Table
from fedstrata.run import deal, open_run
from fedstrata.strata import tap

METHODS = {"FedAvg": "fedavg", "FedNLR": "fednlr"}
HIDDEN = "fc1"
"""The stage whose outputs are the hidden neurons' activations."""

_WITHOUT = {"method", "rounds", "target", "stop_at_target", "eval_every"}


def activations(model: nn.Module, examples: TensorExamples) -> Tensor:
    """The mean activation of each hidden neuron over all examples."""
    with torch.no_grad():
        return tap(model, examples.batch(torch.arange(len(examples)))[0], HIDDEN).mean(0)


def bound(on_own: Sequence[float], on_other: Sequence[float]) -> list[int]:
    """The neurons of a class: those more active on it than on the other, in the mean over its examples."""
    return [at for at, (own, other) in enumerate(zip(on_own, on_other, strict=True)) if own > other]


def work(settings: Mapping[str, Any], seed: int, bench: Bench) -> dict[str, Any]:
    """Activations on every class before a visit, and for each method after a visit to each class's client."""
    own = {"seed": seed, "data_dir": bench.data_dir, "workers": 1}
    config = checked(RunConfig, {**settings["run"], **own})
    history = open_run(config, None).fit()
    dataset, parts = deal(config)
    clients = {int(data.labels()[0]): data for data in (dataset.train.select(part) for part in parts)}
    visit = {n: getattr(config, n) for n in Settings.model_fields if n not in _WITHOUT}
    after: dict[str, list[list[list[float]]]] = {}
    for label, text in METHODS.items():
        after[label] = []
        for visited in range(dataset.classes):
            alone = Federation(history.model, [clients[visited]], **visit, method=text, rounds=1)
            model = alone.fit().model
            after[label].append([activations(model, clients[c]).tolist() for c in range(dataset.classes)])
    before = [activations(history.model, clients[c]).tolist() for c in range(dataset.classes)]
    return {"accuracy": history.accuracy, "rounds": len(history.records), "before": before, "after": after}


def change(found: Mapping[str, Any], method: str, visited: int, other: int) -> float | None:
    """The mean change, on the other class's data, of its bound neurons by a visit to a client of the visited class."""
    before = found["before"][other]
    neurons = bound(before, found["before"][visited])
    after = found["after"][method][visited][other]
    return statistics.fmean(after[at] - before[at] for at in neurons) if neurons else None


def judge(found: Mapping[int, dict[str, Any]], visited: int, other: int) -> Findings:
    """The paper's pair of classes, and all pairs."""
    pair: dict[str, dict[int, float]] = {method: {} for method in METHODS}
    every: dict[str, dict[int, float]] = {method: {} for method in METHODS}
    for seed, figures in found.items():
        classes = range(len(figures["before"]))
        for method in METHODS:
            one = change(figures, method, visited, other)
            if one is not None:
                pair[method][seed] = one
            changes = (change(figures, method, a, b) for a in classes for b in classes if a != b)
            every[method][seed] = statistics.fmean(value for value in changes if value is not None)
    count = len(next(iter(found.values()))["before"])
    where = {f"clients {visited} and {other}": pair, f"all {count * (count - 1)} pairs of clients": every}
    checks = []
    for place, drifts in where.items():
        checks.append(beyond(f"bound neurons fall with FedAvg ({place})", drifts["FedAvg"], 0, below=True))
        name = f"bound neurons fall less with FedNLR ({place})"
        paper = "−0.01, −0.03, −0.04 against −0.03, −0.06, −0.06, of three neurons" if drifts is pair else ""
        checks.append(above(name, drifts["FedNLR"], drifts["FedAvg"], unit=PLAIN, paper=paper))
    summary = tuple(
        (place, *(PLAIN.spread(stat(drifts[m].values())) for m in METHODS)) for place, drifts in where.items()
    )
    seed, first = next(iter(found.items()))
    trained = ", ".join(
        f"{100 * figures['accuracy']:.1f} % after {figures['rounds']} rounds" for figures in found.values()
    )
    return Findings(
        (
            Table("Mean change of the activation of bound neurons", ("", *METHODS), summary),
            _neurons(first, visited, other, seed),
        ),
        tuple(checks),
        (
            f"accuracy of the global model before the visit, seed by seed: {trained}",
            "a neuron is bound to a class if it is more active on it than on the other class in the mean over the "
            "examples; Definition 1 asks it of every example",
        ),
        data={str(seed): figures for seed, figures in found.items()},
    )


def _neurons(found: Mapping[str, Any], visited: int, other: int, seed: int) -> Table:
    """The hidden neurons one by one, as in the paper's Table 4."""
    before = found["before"]
    mine = set(bound(before[other], before[visited]))
    rows = []
    for at, value in enumerate(before[other]):
        after = [found["after"][method][visited][other][at] for method in METHODS]
        changes = (f"{new - value:+.3f}" if at in mine else "" for new in after)
        told = (before[visited][at], value, *after)
        rows.append((str(at + 1), "yes" if at in mine else "", *(f"{number:.3f}" for number in told), *changes))
    columns = (
        "neuron",
        f"bound to {other}",
        f"before, on {visited}",
        f"before, on {other}",
        *(f"{method}, on {other}" for method in METHODS),
        *(f"{method}, change" for method in METHODS),
    )
    return Table(
        f"Mean activations of the hidden neurons around a visit to client {visited}, seed {seed}", columns, tuple(rows)
    )
