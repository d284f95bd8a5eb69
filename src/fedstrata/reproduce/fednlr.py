"""FedNLR: against other methods, over learning rates and ratios μ, and the drift of neurons.

Wang et al., "FedNLR: Federated Learning with Neuron-wise Learning Rates", KDD 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedstrata.compare import Comparison
from fedstrata.reproduce import fednlr_drift
from fedstrata.reproduce.claims import Check, Seeds, above, always_above, best, cell
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    Grid,
    OwnWork,
    Part,
    figures_by_label,
    figures_by_seed,
    gain_rows,
    label_methods,
    mean_of_last,
    unfinished_note,
)

OTHERS = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox(mu=0.01)",
    "SCAFFOLD": "scaffold",
    "FedNova": "fednova",
    "FedRS": "fedrs(alpha=0.5)",
    "FedLC": "fedlc(tau=1.0)",
    "FedDyn": "feddyn(alpha=0.1)",
}
PARTITIONS = {
    "dirichlet(alpha=0.05)": "Dirichlet(0.05)",
    "dirichlet(alpha=0.5)": "Dirichlet(0.5)",
    "shards(classes=2)": "Shards(2)",
}
PAPER = {
    "Dirichlet(0.05)": ("66.11 against 65.42 %", "48.29 against 51.06 %", "FedNLR 66.11, FedAvg 65.42 %"),
    "Dirichlet(0.5)": ("81.65 against 80.13 %", "85.82 against 84.70 %", "FedDyn + FedNLR 85.82, FedDyn 84.70 %"),
    "Shards(2)": ("74.11 against 72.11 %", "73.27 against 68.33 %", "FedNLR 74.11, FedRS 72.13 %"),
}
"""CIFAR-10: FedNLR and FedAvg; with FedDyn and FedDyn alone; the best and the best of the others."""

FIXED = (1.75, 2.0, 4.0)
FORMULAS = {
    "formula (0.45, 0.3)": "fednlr(a1=0.45, a2=0.3)",
    "formula (1, 1)": "fednlr",
    "depth only (1, 0)": "fednlr(a2=0.0)",
    "width only (0, 1)": "fednlr(a1=0.0)",
}


@dataclass(frozen=True)
class FedNLRScale:
    """The settings of a reproduction.

    Args:
        run: fields that all runs on images have.
        neurons: fields of the runs that end in a model whose neurons are looked at.
        seeds: all of them.
        neuron_seeds: of the runs whose neurons are looked at, if there are others.
        lrs: the learning rates of the sweep.
        nlr: FedNLR in the table of methods.
        last: an accuracy is the mean of so many last evaluations.
        partitions: kinds of label skew; the first is that of all parts but the table.
    """

    run: Mapping[str, Any]
    neurons: Mapping[str, Any]
    seeds: tuple[int, ...] = (0, 1, 2)
    neuron_seeds: tuple[int, ...] = ()
    lrs: tuple[float, ...] = (0.01, 0.03, 0.06)
    nlr: str = "fednlr"
    last: int = 3
    partitions: tuple[str, ...] = tuple(PARTITIONS)

    def values(self, **others: Any) -> dict[str, Any]:
        """A comparison's fields."""
        return {**self.run, "seed": list(self.seeds), "partition": self.partitions[0], **others}


_MNIST = {
    "dataset": "mnist",
    "model": "mlp(hidden=(25,))",
    "partition": "shards(classes=1)",
    "clients": 10,
    "rounds": 300,
    "steps": 10,
    "batch_size": 64,
    "lr": 0.1,
    "target": 0.88,
    "stop_at_target": True,
}

SCALES = {
    "smoke": FedNLRScale(
        {
            "dataset": "digits(examples=400, test_examples=100)",
            "model": "vgg9(width=2, hidden=8)",
            "clients": 5,
            "participation": 2,
            "rounds": 2,
            "steps": 2,
            "batch_size": 8,
            "lr": 0.05,
            "engine": "serial",
            "workers": 1,
        },
        {**_MNIST, "dataset": "digits", "engine": "serial", "rounds": 100, "batch_size": 16, "target": 0.7},
        seeds=(0,),
        lrs=(0.02, 0.05),
        last=1,
    ),
    "small": FedNLRScale(
        {
            "dataset": "cifar-10(examples=4000, test_examples=2000)",
            "model": "vgg9(width=4, hidden=64)",
            "clients": 20,
            "participation": 0.4,
            "rounds": 90,
            "steps": 5,
            "batch_size": 16,
            "lr": 0.01,
            "eval_every": 15,
        },
        _MNIST,
        seeds=(1, 2, 3),
        neuron_seeds=(1, 2, 3, 4, 5),
    ),
    "paper": FedNLRScale(
        {
            "dataset": "cifar-10",
            "model": "vgg9",
            "clients": 20,
            "participation": 0.4,
            "rounds": 500,
            "epochs": 2,
            "batch_size": 64,
            "lr": 0.01,
            "device": "cuda",
        },
        _MNIST,
        seeds=(0, 1),
        lrs=(0.005, 0.01, 0.05, 0.1),
        nlr="fednlr(a1=0.45, a2=0.3)",
        last=5,
    ),
}


def parts(scale: str) -> list[Part]:
    """The parts of the reproduction, in the order of the report."""
    chosen = SCALES[scale]
    return [_table(chosen), _lr(chosen), _mu(chosen), _drift(chosen)]


# --- the table of methods --------------------------------------------------------------------------------------------


def _table(scale: FedNLRScale) -> Grid:
    methods = {**OTHERS, "FedNLR": scale.nlr, "FedDyn + FedNLR": f"{OTHERS['FedDyn']} + {scale.nlr}"}
    return Grid(
        "table",
        "FedNLR against other methods, under three kinds of label skew",
        scale.values(method=label_methods(methods), partition=list(scale.partitions)),
        lambda comparison: _assess_table(scale, comparison),
    )


def _assess_table(scale: FedNLRScale, comparison: Comparison) -> Findings:
    found: dict[str, dict[str, Seeds]] = {PARTITIONS[p]: {} for p in scale.partitions}
    for row in comparison.rows:
        found[PARTITIONS[row.run.config.partition]][row.method] = figures_by_seed(row, mean_of_last(scale.last))
    labels = list(next(iter(found.values())))
    rows = [(label, *(cell(column[label]) for column in found.values())) for label in labels]
    checks: list[Check] = []
    for skew, column in found.items():
        alone, together, top = PAPER[skew]
        pair = column["FedDyn + FedNLR"], column["FedDyn"]
        checks += [
            above(f"FedNLR beats FedAvg on {skew}", column["FedNLR"], column["FedAvg"], paper=alone),
            above(f"FedDyn + FedNLR beats FedDyn on {skew}", *pair, paper=together),
            best(
                f"FedNLR, alone or with FedDyn, is the best on {skew}", ("FedNLR", "FedDyn + FedNLR"), column, paper=top
            ),
        ]
    return Findings(
        (FindingsTable("Accuracy, %", ("method", *found), tuple(rows)),),
        tuple(checks),
        (_mean_note(scale), *unfinished_note(comparison)),
    )


def _mean_note(scale: FedNLRScale) -> str:
    over = "the last evaluation" if scale.last == 1 else f"the last {scale.last} evaluations"
    return f"an accuracy is the mean of {over}; ± is the sample standard deviation over the seeds"


# --- learning rates and μ --------------------------------------------------------------------------------------------


def _lr(scale: FedNLRScale) -> Grid:
    methods = label_methods({"FedAvg": "fedavg", "FedNLR": "fednlr"})
    return Grid(
        "lr",
        "FedNLR against FedAvg at several learning rates",
        scale.values(method=methods, lr=list(scale.lrs)),
        lambda comparison: _assess_lr(scale, comparison),
    )


def _assess_lr(scale: FedNLRScale, comparison: Comparison) -> Findings:
    found: dict[str, dict[str, Seeds]] = {}
    for row in comparison.rows:
        found.setdefault(f"lr {row.run.config.lr:g}", {})[row.method] = figures_by_seed(row, mean_of_last(scale.last))
    rows = [(lr, *(cell(seeds) for seeds in pair.values())) for lr, pair in found.items()]
    pairs = {lr: (pair["FedNLR"], pair["FedAvg"]) for lr, pair in found.items()}
    paper = "at every learning rate, CIFAR-100 with Dirichlet(0.05)"
    check = always_above("FedNLR gains at every learning rate", pairs, paper=paper)
    table = FindingsTable(f"Accuracy on {_skew(scale)}, %", ("", "FedAvg", "FedNLR"), tuple(rows))
    return Findings((table,), (check,), (_mean_note(scale), *unfinished_note(comparison)))


def _skew(scale: FedNLRScale) -> str:
    return PARTITIONS[scale.partitions[0]]


def _mu(scale: FedNLRScale) -> Grid:
    fixed = {f"μ = {mu:g}": f"fednlr(mu={mu})" for mu in FIXED}
    return Grid(
        "mu",
        "where μ comes from: fixed, or from depth and width",
        scale.values(method=label_methods({"FedAvg": "fedavg", **fixed, **FORMULAS})),
        lambda comparison: _assess_mu(scale, comparison),
    )


def _assess_mu(scale: FedNLRScale, comparison: Comparison) -> Findings:
    found = figures_by_label(comparison, mean_of_last(scale.last))
    base = found["FedAvg"]
    fixed = {label: seeds for label, seeds in found.items() if label in {f"μ = {mu:g}" for mu in FIXED}}
    formula = found["formula (1, 1)"]
    several = {label: (formula, seeds) for label, seeds in fixed.items()}
    halves = {label: (formula, found[label]) for label in ("depth only (1, 0)", "width only (0, 1)")}
    checks = (
        always_above("formula beats fixed μ", several),
        always_above("depth and width together beat each alone", halves),
        above("formula (1, 1) beats (0.45, 0.3)", formula, found["formula (0.45, 0.3)"]),
        above("μ = 1.75 beats FedAvg", fixed["μ = 1.75"], base),
        above("μ = 2 beats FedAvg", fixed["μ = 2"], base),
    )
    title = f"Accuracy on {_skew(scale)} by the ratio μ, %"
    table = FindingsTable(title, ("μ", "accuracy", "gain over FedAvg, points"), gain_rows(found, "FedAvg"))
    return Findings((table,), checks, (_mean_note(scale), *unfinished_note(comparison)))


# --- neurons ---------------------------------------------------------------------------------------------------------


def _drift(scale: FedNLRScale) -> OwnWork:
    visited, other = 1, 2
    return OwnWork(
        "drift",
        "Appendix A: bound neurons of one class after a visit to a client of another",
        {"run": dict(scale.neurons), "even": fednlr_drift.EVEN},
        scale.neuron_seeds or scale.seeds,
        fednlr_drift.work,
        lambda found: fednlr_drift.assess(found, visited, other),
    )
