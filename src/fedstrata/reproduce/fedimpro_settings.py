"""FedImpro's settings at four scales, its rivals, and the paper's own figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstrata.reproduce.parts import Tuning, dataset_name, highest_accuracy
from fedstrata.techniques.fedimpro import FedImpro

OTHERS = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox(mu=0.01)",
    "SCAFFOLD": "scaffold",
    "FedNova": "fednova",
    "FedDyn": "feddyn(alpha=0.1)",
}
FEDAVG, IMPRO, DYN_IMPRO, CENTRALISED = "FedAvg", "FedImpro", "FedDyn + FedImpro", "centralised"
SKEWS = {"dirichlet(alpha=0.1)": "Dirichlet(0.1)", "dirichlet(alpha=0.05)": "Dirichlet(0.05)"}
MILD, SEVERE = SKEWS.values()
TUNING_SEED = 0
MOMENTUM = "sgd(momentum=0.9, weight_decay=0.0001)"
"""The optimiser of Table 6; elsewhere the paper has no momentum."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "Eq. 5 (the default)": {},
    "mean over n + n̂ (C.3)": {"loss": "mean"},
    "the batch's labels (Algorithm 1)": {"labels": "batch"},
    "mean, and the batch's labels": {"loss": "mean", "labels": "batch"},
    "λ from 0 to 2": {"weight": "ramp-to-2"},
    "β_m = 0": {"beta_client": 0.0},
    "pooled variance": {"variance": "pooled"},
    "σ at most 0.1": {"std_cap": 0.1},
    "as released": {
        "form": "released",
        "std_cap": 0.1,
        "weight": "ramp-to-2",
        "beta_client": 0.0,
        "noise": 0.001,
    },
}
"""FedImpro's arguments, where the paper says several things or its code does another: one at a time, and the code's."""


@dataclass(frozen=True)
class FedImproFigures:
    """The paper's figures under one setting: FedImpro against FedAvg, against the best other, and in rounds."""

    fedavg: str
    best: str
    rounds: str


PAPER = {
    f"CIFAR-10, {MILD}": FedImproFigures(
        "88.45 against 83.65 %", "88.45, FedNova 84.97 %", "128, FedProx 128, FedAvg 142"
    ),
    f"CIFAR-10, {SEVERE}": FedImproFigures(
        "81.75 against 75.36 %", "81.75, FedProx 77.49 %", "112, FedProx 121, FedAvg 247"
    ),
    f"Fashion-MNIST, {MILD}": FedImproFigures(
        "90.83 against 88.67 %", "90.83, FedDyn 89.01 %", "32, FedDyn 62, FedAvg 83"
    ),
    f"Fashion-MNIST, {SEVERE}": FedImproFigures(
        "86.42 against 82.73 %", "86.42, FedProx 83.66 %", "52, FedDyn 82, FedAvg 94"
    ),
}
PAPER |= {
    f"Fashion-MNIST, {MILD}, E = 5": FedImproFigures(
        "89.87 against 87.60 %", "89.87, FedDyn 88.50 %", "17, FedDyn 29, FedAvg 147"
    ),
    f"CIFAR-10, {MILD}, E = 5": FedImproFigures(
        "88.10 against 85.69 %", "88.10, FedNova 86.92 %", "78, FedNova 80, FedAvg 128"
    ),
    f"Fashion-MNIST, {MILD}, M = 100": FedImproFigures(
        "90.98 against 90.12 %", "90.98, FedDyn 90.57 %", "441, FedNova 317, FedAvg 375"
    ),
    f"CIFAR-10, {MILD}, M = 100": FedImproFigures(
        "77.56 against 73.42 %", "77.56, FedDyn 75.29 %", "706, FedDyn 820, FedAvg 957"
    ),
    f"CIFAR-10, {MILD}, VGG-9": FedImproFigures(
        "84.52 against 82.58 %", "84.52, FedProx 82.92 %", "426, SCAFFOLD 512, FedAvg 836"
    ),
    f"CIFAR-100, {MILD}": FedImproFigures(
        "70.28 against 69.38 %", "70.28, FedProx 69.78 %", "614, FedDyn 682, FedAvg 712"
    ),
}
"""Tables 1, 2 and 9."""
PAPER_RIVALS = {
    "CCVR": "68.29 against 62.68 %",
    "FedDF": "68.29 against 38.60 %",
    "FedDyn": "85.14 against 77.33 %",
    "FedSpeed": "85.14 against 82.68 %",
}
"""Table 10: FedImpro against others' own figures, on CIFAR-10."""
PAPER_MOMENTUM = {"FedAvg": "88.67 against 86.81 %", "FedProx": "88.92 against 87.12 %"} | {
    "SCAFFOLD": "87.81 against 86.21 %",
    "FedNova": "87.97 against 86.99 %",
}
"""Tables 1 and 6: without and with momentum, on Fashion-MNIST with Dirichlet(0.1)."""
PAPER_GAINS = {"CIFAR-10": "6.39 against 4.80 points", "Fashion-MNIST": "3.69 against 2.16 points"}


@dataclass(frozen=True)
class FedImproScale:
    """The settings of a reproduction.

    Args:
        run: fields that all runs have.
        datasets: of the table of methods; the first is that of all other parts.
        seeds: all of them.
        splits: stages after which the model is cut, from the input to the last before the classifier.
        split: the one of all parts but that of the splits.
        noises: standard deviations of the noise on what is shared.
        selected: clients per round, the usual number first.
        own: method → fields that only it has, in the table of methods.
        features: of a client, and shared ones, between which distances are measured.
        looks: last rounds whose local models are judged.
        attack: how images are rebuilt.
        extras: table → fields that only its runs have: of `epochs` (E = 5), `many` (M = 100), `vgg9`, `cifar-100`;
            none where they, and all that only larger scales have, are not made.
        apart: True if every dataset has tables of its own, with learning rates of its own.
        trials: learning rates that every method is tried with; none to leave them all as they are.
        trial_rounds: of each trial.
        last: evaluations over which the accuracy at the end is averaged, where a method changes the last model.
    """

    run: Mapping[str, Any]
    datasets: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    splits: tuple[str, ...] = ("stem", "layer1", "layer2", "layer3")
    split: str = "layer1"
    noises: tuple[float, ...] = (0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5)
    selected: tuple[int, int] = (5, 10)
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    features: int = 100
    looks: int = 3
    attack: Mapping[str, Any] = field(default_factory=lambda: {"noise": [0.0, 0.01, 0.1, 0.5]})
    extras: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    apart: bool = False
    trials: tuple[float, ...] = ()
    trial_rounds: int = 50
    last: int = 5

    def impro(self, **others: Any) -> str:
        """FedImpro as a method."""
        return str(FedImpro(**{"split": self.split, **others}))

    def values(self, **others: Any) -> dict[str, Any]:
        """A comparison's fields."""
        usual = {"dataset": self.datasets[0], "partition": next(iter(SKEWS)), "participation": self.selected[0]}
        return {**self.run, "seed": list(self.seeds), **usual, **others}

    def methods(self, *more: str) -> dict[str, str]:
        """Label → method: the paper's rivals, FedImpro, and what else is asked for."""
        others = {DYN_IMPRO: f"{OTHERS['FedDyn']} + {self.impro()}", CENTRALISED: "centralised"}
        return {**OTHERS, IMPRO: self.impro(), **{label: others[label] for label in more}}

    def part_name(self, name: str, data: str) -> str:
        """A part's name, with that of its dataset if it is not the first."""
        return name if data == self.datasets[0] else f"{name}-{data.partition('(')[0]}"

    def tuning(self, fields: Mapping[str, Any] | None = None) -> Tuning | None:
        """Trials of every method with the milder skew, by the best accuracy; with these fields, too."""
        if not self.trials:
            return None
        usual = {"rounds": self.trial_rounds, "partition": next(iter(SKEWS))}
        return Tuning(self.trials, TUNING_SEED, highest_accuracy, {**usual, **(fields or {})})

    @property
    def where(self) -> str:
        """The setting of all parts but the table of methods."""
        return f"{dataset_name(self.datasets[0])}, {MILD}"


_CIFAR = "cifar-10(examples=10000, test_examples=2000)"
_MANY = {"clients": 100, "participation": 0.1, "partition": "dirichlet(alpha=0.1, min_size=5)"}
"""Over 100 clients Dirichlet(0.1) cannot deal out 10,000 images so that each has 10; 5 it can."""

SCALES = {
    "smoke": FedImproScale(
        {
            "dataset": "digits(examples=400, test_examples=100)",
            "model": "resnet8(width=2, stem='3x3', maxpool=False)",
            "clients": 4,
            "rounds": 2,
            "steps": 2,
            "batch_size": 16,
            "lr": 0.1,
            "optimizer": "sgd(weight_decay=0.0001)",
            "engine": "serial",
            "workers": 1,
        },
        ("digits(examples=400, test_examples=100)",),
        seeds=(0,),
        noises=(0.0, 0.5),
        selected=(2, 4),
        features=30,
        looks=2,
        attack={"images": 4, "noise": [0.0, 0.5], "steps": 10},
        extras={"epochs": {"steps": 3}, "many": {"clients": 8, "participation": 2}},
        last=1,
    ),
    "small": FedImproScale(
        {
            "model": "resnet8(width=16)",
            "clients": 10,
            "rounds": 24,
            "batch_size": 32,
            "lr": 0.1,
            "optimizer": "sgd(weight_decay=0.0001)",
            "eval_every": 2,
        },
        ("cifar-10(examples=4000, test_examples=2000)", "fashion-mnist(examples=4000, test_examples=2000)"),
        seeds=(1, 2, 3),
    ),
    "evidence": FedImproScale(
        {
            "model": "resnet8(width=8)",
            "clients": 10,
            "rounds": 150,
            "batch_size": 64,
            "lr": 0.1,
            "optimizer": "sgd(weight_decay=0.0001)",
            "eval_every": 2,
        },
        ("fashion-mnist(examples=10000, test_examples=2000)", _CIFAR),
        seeds=(1, 2, 3, 4, 5),
        extras={
            "epochs": {"epochs": 5, "rounds": 60},
            "many": {**_MANY, "rounds": 300},
            "vgg9": {"dataset": _CIFAR, "model": "vgg9(width=4, hidden=64)"},
            "cifar-100": {"dataset": "cifar-100(examples=8000, test_examples=2000)", "model": "resnet8(width=16)"},
        },
        apart=True,
        trials=(0.03, 0.1, 0.3),
    ),
    "paper": FedImproScale(
        {
            "model": "resnet18",
            "clients": 10,
            "rounds": 1000,
            "batch_size": 128,
            "lr": 0.1,
            "optimizer": "sgd(weight_decay=0.0001)",
            "device": "cuda",
        },
        ("cifar-10", "fashion-mnist"),
        splits=("layer1", "layer2", "layer3", "layer4"),
        split="layer2",
        own={"SCAFFOLD": {"lr": 0.01}},
        extras={
            "epochs": {"epochs": 5, "rounds": 400},
            "many": {"clients": 100, "participation": 0.1},
            "vgg9": {"dataset": "cifar-10", "model": "vgg9"},
            "cifar-100": {"dataset": "cifar-100", "model": "resnet50"},
        },
    ),
}
