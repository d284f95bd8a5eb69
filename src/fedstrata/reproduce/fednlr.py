"""FedNLR: against other methods, over learning rates and ratios μ, and the drift of neurons.

Wang et al., "FedNLR: Federated Learning with Neuron-wise Learning Rates", KDD 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedstrata.compare import Comparison
from fedstrata.reproduce import fednlr_drift
from fedstrata.reproduce.claims import Check, above, always_above, best, cell
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    Grid,
    OwnWork,
    Part,
    Tuning,
    figures_by_label,
    figures_by_seed,
    gain_rows,
    label_methods,
    mean_of_last,
    unfinished_note,
)
from fedstrata.reproduce.verdicts import Seeds

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
    "Dirichlet(0.05)": ("66.11 against 65.42 %", "51.06 against 48.29 %", "FedNLR 66.11, FedAvg 65.42 %"),
    "Dirichlet(0.5)": ("81.65 against 80.13 %", "85.82 against 84.70 %", "FedDyn + FedNLR 85.82, FedDyn 84.70 %"),
    "Shards(2)": ("74.11 against 72.11 %", "73.27 against 68.33 %", "FedNLR 74.11, FedRS 72.13 %"),
}
"""CIFAR-10: FedNLR and FedAvg; with FedDyn and FedDyn alone; the best and the best of the others."""

LOSES = ("Dirichlet(0.05)",)
"""Where the paper has FedNLR on top of FedDyn below FedDyn alone."""

FIXED = (1.75, 2.0, 4.0)
FORMULAS = {
    "formula (0.45, 0.3)": "fednlr(a1=0.45, a2=0.3)",
    "formula (1, 1)": "fednlr",
    "depth only (1, 0)": "fednlr(a2=0.0)",
    "width only (0, 1)": "fednlr(a1=0.0)",
}


TUNING_SEED = 0


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
        sweep_nlr: FedNLR in the sweep of learning rates.
        last: an accuracy is the mean of so many last evaluations.
        partitions: kinds of label skew; the first is that of all parts but the table.
        trials: learning rates that all methods of a table are tried with; none to leave them all as they are.
    """

    run: Mapping[str, Any]
    neurons: Mapping[str, Any]
    seeds: tuple[int, ...] = (0, 1, 2)
    neuron_seeds: tuple[int, ...] = ()
    lrs: tuple[float, ...] = (0.01, 0.03, 0.06)
    nlr: str = "fednlr"
    sweep_nlr: str = "fednlr"
    last: int = 3
    partitions: tuple[str, ...] = tuple(PARTITIONS)
    trials: tuple[float, ...] = ()

    @property
    def tuning(self) -> Tuning | None:
        """Trials on the first kind of skew."""
        fields = {"partition": self.partitions[0]}
        return Tuning(self.trials, TUNING_SEED, mean_of_last(self.last), fields) if self.trials else None

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
    "evidence": FedNLRScale(
        {
            "dataset": "fashion-mnist(examples=10000, test_examples=2000)",
            "model": "vgg9(width=4, hidden=64)",
            "clients": 20,
            "participation": 0.4,
            "rounds": 60,
            "epochs": 2,
            "batch_size": 64,
            "lr": 0.01,
        },
        _MNIST,
        seeds=(1, 2, 3, 4, 5),
        lrs=(0.005, 0.01, 0.03, 0.06),
        nlr="fednlr(a1=0.45, a2=0.3)",
        sweep_nlr="fednlr(a1=0.45, a2=0.3)",
        last=5,
        trials=(0.01, 0.03, 0.06),
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
    usual: list[Part] = [_permuted(chosen), _lr(chosen), _mu(chosen)]
    if scale != "evidence":
        return [_table(chosen), *usual, _drift(chosen)]
    others: list[Part] = [
        _table(chosen, "methods"),
        _table(chosen, "cifar-10", FOUR, dataset="cifar-10(examples=20000, test_examples=2000)"),
        _table(chosen, "clients", FOUR, clients=100, participation=0.1),
        *usual,
    ]
    return [_table(chosen, "table", FOUR), _drift(chosen), *(replace(part, headline=False) for part in others)]


# --- the table of methods --------------------------------------------------------------------------------------------


OURS = ("FedNLR", "FedDyn + FedNLR")
FOUR = ("FedAvg", "FedDyn", *OURS)
"""The methods of the headline claims."""


def _table(scale: FedNLRScale, name: str = "table", labels: Sequence[str] = (), **fields: Any) -> Grid:
    every = {**OTHERS, "FedNLR": scale.nlr, "FedDyn + FedNLR": f"{OTHERS['FedDyn']} + {scale.nlr}"}
    methods = {label: text for label, text in every.items() if not labels or label in labels}
    return Grid(
        name,
        "FedNLR against other methods, under three kinds of label skew",
        scale.values(method=label_methods(methods), partition=list(scale.partitions), **fields),
        lambda comparison: _assess_table(scale, comparison),
        tuning=scale.tuning,
    )


def _assess_table(scale: FedNLRScale, comparison: Comparison) -> Findings:
    found = _by_skew(scale, comparison)
    checks: list[Check] = []
    for skew, column in found.items():
        alone, together, top = PAPER[skew]
        pair = column["FedDyn + FedNLR"], column["FedDyn"]
        checks += [
            above(f"FedNLR beats FedAvg on {skew}", column["FedNLR"], column["FedAvg"], paper=alone),
            _beside_feddyn(skew, *pair, paper=together),
        ]
        if column.keys() >= OTHERS.keys():
            checks.append(best(f"FedNLR, alone or with FedDyn, is the best on {skew}", OURS, column, paper=top))
    return Findings(
        (_skew_table(found),),
        tuple(checks),
        (_mean_note(scale), *unfinished_note(comparison)),
    )


def _beside_feddyn(skew: str, both: Seeds, alone: Seeds, paper: str) -> Check:
    """As the paper has it: FedNLR on top of FedDyn gains or, with the worst skew, loses."""
    if skew in LOSES:
        return above(f"FedDyn beats FedDyn + FedNLR on {skew}", alone, both, paper=paper)
    return above(f"FedDyn + FedNLR beats FedDyn on {skew}", both, alone, paper=paper)


def _mean_note(scale: FedNLRScale) -> str:
    over = "the last evaluation" if scale.last == 1 else f"the last {scale.last} evaluations"
    return f"an accuracy is the mean of {over}; ± is the sample standard deviation over the seeds"


# --- is it the neurons? ----------------------------------------------------------------------------------------------


PERMUTED = "FedNLR, permuted"


def _permuted(scale: FedNLRScale) -> Grid:
    """The control of the paper's mechanism: as many fast and slow neurons, but not those that the paper means."""
    shuffled = f"{scale.nlr[:-1]}, shuffle=True)" if scale.nlr.endswith(")") else f"{scale.nlr}(shuffle=True)"
    return Grid(
        "permuted",
        "FedNLR against the same rates permuted among a layer's neurons",
        scale.values(
            method=label_methods({"FedAvg": "fedavg", "FedNLR": scale.nlr, PERMUTED: shuffled}),
            partition=list(scale.partitions),
        ),
        lambda comparison: _assess_permuted(scale, comparison),
        tuning=scale.tuning,
    )


def _assess_permuted(scale: FedNLRScale, comparison: Comparison) -> Findings:
    found = _by_skew(scale, comparison)
    checks = []
    for skew, column in found.items():
        checks.append(above(f"FedNLR beats its own rates permuted on {skew}", column["FedNLR"], column[PERMUTED]))
        checks.append(above(f"permuted rates beat FedAvg on {skew}", column[PERMUTED], column["FedAvg"]))
    notes = (_mean_note(scale), *unfinished_note(comparison))
    return Findings((_skew_table(found),), tuple(checks), notes)


def _skew_table(found: Mapping[str, Mapping[str, Seeds]]) -> FindingsTable:
    labels = next(iter(found.values()))
    rows = [(label, *(cell(column[label]) for column in found.values())) for label in labels]
    return FindingsTable("Accuracy, %", ("method", *found), tuple(rows))


def _by_skew(scale: FedNLRScale, comparison: Comparison) -> dict[str, dict[str, Seeds]]:
    """Kind of skew → method → its figures."""
    found: dict[str, dict[str, Seeds]] = {PARTITIONS[p]: {} for p in scale.partitions}
    for row in comparison.rows:
        found[PARTITIONS[row.run.config.partition]][row.method] = figures_by_seed(row, mean_of_last(scale.last))
    return found


# --- learning rates and μ --------------------------------------------------------------------------------------------


def _lr(scale: FedNLRScale) -> Grid:
    methods = label_methods({"FedAvg": "fedavg", "FedNLR": scale.sweep_nlr})
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
