"""FedNLR's settings at four scales, its methods, and the paper's own figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstrata.core.spec import parse_call
from fedstrata.reproduce.parts import Tuning, accuracy_at_end

OTHERS = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox(mu=0.01)",
    "SCAFFOLD": "scaffold",
    "FedNova": "fednova",
    "FedRS": "fedrs(alpha=0.5)",
    "FedLC": "fedlc(tau=1.0)",
    "CCVR": "ccvr",
    "FedDyn": "feddyn(alpha=0.1)",
}
PARTITIONS = ("dirichlet(alpha=0.05)", "dirichlet(alpha=0.5)", "shards(classes=2)")
MANY = {"clients": 100, "participation": 0.1}
MANY_PARTITIONS = ("shards(classes=4)", "shards(classes=8)", "dirichlet(alpha=0.1, min_size=5)", "dirichlet(alpha=1.0)")
"""Of Table 3. Over 100 clients Dirichlet(0.1) cannot deal out 10,000 images so that each has 10 ; 5 it can."""


def skew_name(partition: str) -> str:
    """A kind of label skew as the paper writes it, `Dirichlet(0.05)`, without the number of clients."""
    call = parse_call(partition)
    return f"{call.name.capitalize()}({next(iter(dict(call.kwargs).values())):g})"


@dataclass(frozen=True)
class PaperRow:
    """What the paper has on one kind of skew, in words.

    Args:
        alone: FedNLR and FedAvg.
        together: FedDyn + FedNLR and FedDyn.
        top: the best, and the best of the others.
        loses: True where it has FedNLR on top of FedDyn below FedDyn alone.
    """

    alone: str
    together: str
    top: str
    loses: bool = False


TABLE_1 = {
    "Dirichlet(0.05)": PaperRow(
        "66.11 against 65.42 %", "51.06 against 48.29 %", "FedNLR 66.11, FedAvg 65.42 %", loses=True
    ),
    "Dirichlet(0.5)": PaperRow(
        "81.65 against 80.13 %", "85.82 against 84.70 %", "FedDyn + FedNLR 85.82, FedDyn 84.70 %"
    ),
    "Shards(2)": PaperRow("74.11 against 72.11 %", "73.27 against 68.33 %", "FedNLR 74.11, FedRS 72.13 %"),
}
"""CIFAR-10, 20 clients."""
TABLE_3 = {
    "Shards(4)": PaperRow("73.38 against 72.94 %", "80.42 against 77.51 %", "FedDyn + FedNLR 80.42, FedDyn 77.51 %"),
    "Shards(8)": PaperRow("76.14 against 75.03 %", "85.26 against 83.32 %", "FedDyn + FedNLR 85.26, FedDyn 83.32 %"),
    "Dirichlet(0.1)": PaperRow(
        "63.40 against 63.30 %", "64.16 against 63.98 %", "FedDyn + FedNLR 64.16, FedDyn 63.98 %"
    ),
    "Dirichlet(1)": PaperRow("78.73 against 77.83 %", "86.10 against 85.22 %", "FedDyn + FedNLR 86.10, FedDyn 85.22 %"),
}
"""CIFAR-10, 100 clients, of which 10 take part in a round."""
REFITTED = {"Dirichlet(0.05)": "43.37 against 42.66 %, CINIC", "Shards(2)": "50.88 against 50.59 %, CINIC"}
"""FedAvg and CCVR, Table 2."""

FIXED = (1.75, 2.0, 4.0)
FORMULAS = {
    "formula (0.45, 0.3)": "fednlr(a1=0.45, a2=0.3)",
    "formula (1, 1)": "fednlr",
    "depth only (1, 0)": "fednlr(a2=0.0)",
    "width only (0, 1)": "fednlr(a1=0.0)",
}
LAYERS = (
    *(f"layer{stage}.conv{number}" for stage in (1, 2, 3) for number in (1, 2)),
    "fc1.linear",
    "fc2.linear",
    "head",
)
"""The nine layers of VGG-9."""

TUNING_SEED = 0

DEEP = {
    "partition": "shards(classes=1)",
    "clients": 10,
    "participation": 1.0,
    "rounds": 200,
    "steps": 5,
    "batch_size": 64,
    "lr": 0.05,
    "eval_every": 1,
    "target": 0.7,
    "stop_at_target": True,
}
"""A class for each client, as in Appendix A, and the model of a round in which it is good."""
SHOWN = 2000
"""Test examples that a deep network's neurons are judged on."""
THEORY = {"classes": [1, 2], "images": 200, "hidden": 25, "steps": 300, "lr": 0.1, "draws": 500}
"""The two classes of Appendix A, and as many hidden neurons."""
EQUAL_LOSS = {"within": 1e-4, "most": 40}
"""How far the local losses may be apart, as a share, and how many visits may be made to bring them so near."""


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
        many: fields of the runs with many clients (Table 3), instead of `run`'s.
        many_partitions: their kinds of label skew.
        many_last: their accuracy is the mean of so many last evaluations.
        layer_mus: the ratios μ that single layers are given.
        deep: fields of the runs of the part `depth-drift`, instead of `run`'s.
        theory: settings of the numerical checks of the theory, instead of `THEORY`'s.
        equal_loss: how near local losses are to be brought to each other, instead of `EQUAL_LOSS`'s.
    """

    run: Mapping[str, Any]
    neurons: Mapping[str, Any]
    seeds: tuple[int, ...] = (0, 1, 2)
    neuron_seeds: tuple[int, ...] = ()
    lrs: tuple[float, ...] = (0.01, 0.03, 0.06)
    nlr: str = "fednlr"
    sweep_nlr: str = "fednlr"
    last: int = 3
    partitions: tuple[str, ...] = PARTITIONS
    trials: tuple[float, ...] = ()
    many: Mapping[str, Any] = field(default_factory=lambda: dict(MANY))
    many_partitions: tuple[str, ...] = MANY_PARTITIONS
    many_last: int = 3
    layer_mus: tuple[float, ...] = (2.0,)
    deep: Mapping[str, Any] = field(default_factory=lambda: dict(DEEP))
    theory: Mapping[str, Any] = field(default_factory=dict)
    equal_loss: Mapping[str, Any] = field(default_factory=dict)

    @property
    def watched_seeds(self) -> tuple[int, ...]:
        """Of the runs whose neurons are looked at."""
        return self.neuron_seeds or self.seeds

    @property
    def tuning(self) -> Tuning | None:
        """Trials on all kinds of skew: the rate that is best in the mean over them, and diverges on none."""
        fields = {"partition": list(self.partitions)}
        return Tuning(self.trials, TUNING_SEED, accuracy_at_end(self.last), fields) if self.trials else None

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
        many={"clients": 20, "participation": 4},
        many_partitions=("shards(classes=4)", "dirichlet(alpha=0.1, min_size=1)"),
        many_last=1,
        deep={**DEEP, "rounds": 2, "target": None, "stop_at_target": False},
        equal_loss={"within": 0.1, "most": 8},
        theory={"images": 40, "steps": 50, "draws": 40},
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
        many_partitions=tuple(text.replace("min_size=5", "min_size=1") for text in MANY_PARTITIONS),
        deep={**DEEP, "dataset": "fashion-mnist(examples=4000, test_examples=2000)"},
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
        many={**MANY, "rounds": 200},
        many_last=12,
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
        many_last=30,
        layer_mus=FIXED,
        deep={**DEEP, "rounds": 1000},
    ),
}
