"""InCo's reproduction: its settings, with clients of different depth, its methods and its measures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedstrata.compare import Comparison, ComparisonRow, Run
from fedstrata.reproduce.parts import Tuning, dataset_name, figures_by_label, label_methods, mean_curve
from fedstrata.reproduce.verdicts import Seeds
from fedstrata.runs.records import Record
from fedstrata.techniques.inco import InCo

SKEW, MILD_SKEW = "dirichlet(alpha=0.5)", "dirichlet(alpha=1.0)"
"""The paper's two; the first is that of all parts but the decisive one."""
CONV2: Mapping[str, Any] = {"form": "released", "reference": "conv2"}
"""InCo's arguments in the authors' own runs."""
TUNING_SEED = 0

GROUP, HETERO, INCO = "GroupAvg", "HeteroAvg", "InCo"


@dataclass(frozen=True)
class InCoScale:
    """The settings of a reproduction.

    Args:
        run: fields that all runs have.
        datasets: of the table of methods; the first is that of all other parts.
        depths: of the ResNets, from the shallowest.
        shape: the ResNets' arguments.
        seeds: all of them.
        noises: standard deviations of the noise on updates, as shares of theirs.
        batches: batch sizes besides the usual one.
        evaluations: last ones over which accuracy is averaged.
        own: method → fields that only it has, in the table of methods.
        case: fields that only the case study's runs have.
        gradients: fields that only the runs have whose gradients are compared between environments.
        window: the first and the last of the rounds in which they are.
        stages: those whose layers are compared.
        trial: fields of only those runs by which the default form was chosen, with seeds of their own.
        shown: test examples by which models are compared.
        mapped: those of them whose features are drawn, for every client.
        partitions: kinds of label skew of the decisive part; none where it is not made.
        crossed: InCo's arguments, where they are not the defaults.
        apart: True if every dataset has parts of its own, with learning rates of its own.
        own_data: dataset → fields that only its runs have, where `apart`.
        trials: learning rates that every method is tried with; none to leave them all as they are.
        probes: fields by which InCo's runs tell what crossing did to each layer.
        transformers: clients' models of the part `transformers`, from the shallowest; none where it is not made.
    """

    run: Mapping[str, Any]
    datasets: tuple[str, ...]
    depths: tuple[int, ...] = (10, 14, 18, 22, 26)
    shape: str = ""
    seeds: tuple[int, ...] = (0, 1, 2)
    noises: tuple[float, ...] = (0.5, 1.0, 2.0)
    batches: tuple[int, ...] = (16, 32, 128)
    evaluations: int = 1
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    case: Mapping[str, Any] = field(default_factory=dict)
    trial: Mapping[str, Any] = field(default_factory=dict)
    shown: int = 512
    mapped: int = 60
    gradients: Mapping[str, Any] = field(default_factory=dict)
    window: tuple[int, int] = (40, 50)
    stages: tuple[str, ...] = ("layer2", "layer3")
    partitions: tuple[str, ...] = ()
    crossed: Mapping[str, Any] = field(default_factory=dict)
    apart: bool = False
    own_data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    trials: tuple[float, ...] = ()
    probes: Mapping[str, Any] = field(default_factory=dict)
    transformers: tuple[str, ...] = ()

    def arch(self, depth: int) -> str:
        """A client's model."""
        return f"resnet{depth}({self.shape})" if self.shape else f"resnet{depth}"

    @property
    def models(self) -> dict[str, Any]:
        """The fields that say who has which model; the server has the deepest."""
        return {"archs": "; ".join(map(self.arch, self.depths)), "model": self.arch(self.depths[-1])}

    def values(self, **others: Any) -> dict[str, Any]:
        """A comparison's fields."""
        usual = {"dataset": self.datasets[0], "partition": SKEW, **self.models}
        chosen = {**self.run, "seed": list(self.seeds), **usual, **others}
        return {**chosen, **(self.own_data.get(chosen["dataset"], {}) if self.apart else {})}

    def inco(self, base: str = "", **others: Any) -> str:
        """InCo over all architectures, on a method, with the scale's arguments and these."""
        return inco_method(base, **{**self.crossed, **others})

    def part_name(self, name: str, data: str) -> str:
        """A part's name, with that of its dataset if there are others and it is not the first."""
        return name if not data or data == self.datasets[0] else f"{name}-{data.partition('(')[0]}"

    def entries(self, methods: Mapping[str, str]) -> list[dict[str, Any]]:
        """A comparison's methods; those that cross layers tell what that does."""
        return [{**entry, **(self.probes if InCo.name in entry["method"] else {})} for entry in label_methods(methods)]

    @property
    def tuning(self) -> Tuning | None:
        """Trials of every method with Dirichlet(0.5), by what its runs are judged by."""
        if not self.trials:
            return None
        return Tuning(self.trials, TUNING_SEED, clients_accuracy(self.evaluations), {"partition": SKEW})

    @property
    def where(self) -> str:
        """The setting of all parts but the table of methods."""
        return f"{dataset_name(self.datasets[0])}, Dirichlet(0.5)"

    @property
    def note(self) -> str:
        """What an accuracy is."""
        over = "" if self.evaluations == 1 else f" and the last {self.evaluations} evaluations"
        end = " at the end of the run" if self.evaluations == 1 else ""
        return (
            f"an accuracy is the mean over the {len(self.depths)} architectures{over}, each judged on the whole test "
            f"set{end}; ± is the sample standard deviation over the seeds"
        )


_CIFAR = "cifar-10(examples=20000, test_examples=2000)"

SCALES = {
    "smoke": InCoScale(
        {
            "clients": 4,
            "participation": 4,
            "rounds": 2,
            "steps": 1,
            "batch_size": 16,
            "lr": 0.001,
            "optimizer": "adam",
            "buffers": "drop",
            "engine": "serial",
            "workers": 1,
        },
        ("digits(examples=400, test_examples=100)",),
        depths=(10, 14),
        shape="width=2",
        seeds=(0,),
        noises=(1.0,),
        batches=(8,),
        shown=64,
        mapped=8,
        window=(1, 2),
        stages=("layer3", "layer4"),
        partitions=(SKEW, MILD_SKEW),
        probes={"probe": "crossing"},
    ),
    "small": InCoScale(
        {
            "clients": 10,
            "participation": 5,
            "rounds": 16,
            "steps": 10,
            "batch_size": 64,
            "lr": 0.003,
            "optimizer": "adam",
            "buffers": "drop",
            "eval_every": 4,
        },
        ("cifar-10(examples=4000, test_examples=1000)", "fashion-mnist(examples=4000, test_examples=1000)"),
        shape="width=8, stem='7x7', maxpool=True",
        seeds=(4, 5, 6),
        noises=(1.0, 4.0),
        batches=(16,),
        evaluations=2,
        own={"FedNova": {"steps": None, "epochs": 2}},  # with the same steps for all it is FedAvg
        case={"participation": 1.0, "rounds": 8},
        trial={"rounds": 32, "seed": [7, 8, 9]},
    ),
    "evidence": InCoScale(
        {
            "clients": 20,
            "participation": 5,
            "rounds": 250,
            "steps": 10,
            "batch_size": 64,
            "lr": 0.003,
            "optimizer": "adam",
            "buffers": "drop",
            "eval_every": 10,
        },
        ("fashion-mnist(examples=10000, test_examples=2000)", _CIFAR),
        shape="width=8, stem='7x7', maxpool=True",
        seeds=(1, 2, 3, 4, 5),
        noises=(1.0, 4.0),
        batches=(16,),
        evaluations=3,
        own={"FedNova": {"steps": None, "epochs": 1}},
        case={"dataset": _CIFAR, "clients": 10, "participation": 1.0, "rounds": 50},
        gradients={"dataset": _CIFAR, "clients": 10, "participation": 1.0, "rounds": 50},
        partitions=(SKEW, MILD_SKEW),
        crossed=CONV2,
        apart=True,
        trials=(0.001, 0.003, 0.01),
        probes={"probe": "crossing", "probe_every": 5},
        transformers=tuple(f"vit(patch=7, dim=32, depth={depth}, heads=4, mlp_ratio=2.0)" for depth in range(8, 13)),
    ),
    "paper": InCoScale(
        {
            "clients": 100,
            "participation": 0.1,
            "rounds": 500,
            "epochs": 5,
            "batch_size": 64,
            "lr": 0.001,
            "optimizer": "adam",
            "buffers": "average",
            "eval_every": 10,
            "device": "cuda",
        },
        ("cifar-10", "fashion-mnist(resolution=32)"),
        shape="stem='7x7', maxpool=True",
        case={"clients": 10, "participation": 1.0, "rounds": 50},
        gradients={"clients": 10, "participation": 1.0, "rounds": 50},
        partitions=(SKEW, MILD_SKEW),
        crossed=CONV2,
        apart=True,
        own_data={"cifar-10": {"augment": "crop + flip + cutout(size=16, fill=(0.4914, 0.4822, 0.4465))"}},
        probes={"probe": "crossing", "probe_every": 10},
    ),
}


def round_cost(run: Run) -> float:
    """What a round costs in the mean, of the first one, after which all models are judged: measured at evidence."""
    return 0.6 if run.config.eval_every > 1 else 1.0


def join_techniques(*names: str) -> str:
    """Join techniques to a method; empty names are left out."""
    return " + ".join(filter(None, names))


GROUPED = "fedavg(weight='uniform') + groupavg"
"""The papers' baseline, with the weights that heteroavg has."""


def inco_method(base: str = "", **others: Any) -> str:
    """InCo over all architectures, on a method."""
    return join_techniques(base, "heteroavg", str(InCo(**others)))


def mean_over(several: Sequence[Seeds]) -> Seeds:
    """Seed → the mean over several settings, for the seeds that all of them have."""
    common = [seed for seed in several[0] if all(seed in other for other in several)]
    return {seed: statistics.fmean(other[seed] for other in several) for seed in common}


def clients_accuracy(evaluations: int) -> Callable[[list[Record]], float | None]:
    """The mean over the architectures, and over the last evaluations."""

    def mean(rounds: list[Record]) -> float | None:
        known = [statistics.fmean(r.arch_accuracy.values()) for r in rounds if r.arch_accuracy][-evaluations:]
        return statistics.fmean(known) if known else None

    return mean


def arch_accuracy(arch: str, evaluations: int) -> Callable[[list[Record]], float | None]:
    """One architecture's, in the mean over the last evaluations."""

    def mean(rounds: list[Record]) -> float | None:
        known = [r.arch_accuracy[arch] for r in rounds if arch in r.arch_accuracy][-evaluations:]
        return statistics.fmean(known) if known else None

    return mean


def accuracies(scale: InCoScale, comparison: Comparison) -> dict[str, Seeds]:
    """Method → seed → the clients' accuracy."""
    return figures_by_label(comparison, clients_accuracy(scale.evaluations))


def arch_curve(row: ComparisonRow, arch: str) -> dict[int, float]:
    """Round → one architecture's accuracy, in the mean over the seeds that evaluated it then."""
    return mean_curve(row, lambda record: record.arch_accuracy.get(arch))
