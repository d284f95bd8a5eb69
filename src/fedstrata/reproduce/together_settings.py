"""All five ideas together: which are combined, on what, and with what settings, at three scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedstrata.reproduce.inco_settings import CONV2, clients_accuracy, join_techniques
from fedstrata.reproduce.parts import Tuning, dataset_name, highest_accuracy
from fedstrata.runs.records import Record
from fedstrata.techniques.fedimpro import FedImpro
from fedstrata.techniques.fedpart import FedPart
from fedstrata.techniques.inco import InCo

FEDAVG, HETERO = "FedAvg", "HeteroAvg"
DYN, NLR, IMPRO, PART, INCO = "FedDyn", "FedNLR", "FedImpro", "FedPart", "InCo"
EVERYTHING = (DYN, NLR, IMPRO, PART)
COMBINATIONS: tuple[tuple[str, ...], ...] = (
    (DYN, PART),
    (NLR, PART),
    (IMPRO, PART),
    (DYN, NLR),
    (DYN, IMPRO),
    (NLR, IMPRO),
    (DYN, NLR, IMPRO),
    EVERYTHING,
)
"""Of clients with one model."""
DEEP_COMBINATIONS: tuple[tuple[str, ...], ...] = ((INCO, PART), (INCO, DYN), (INCO, DYN, PART))
"""Of clients with models of different depth."""
PARTITION = "dirichlet(alpha=0.1)"
TUNING_SEED = 0


def combination(parts: Sequence[str]) -> str:
    """The label of several ideas together."""
    return " + ".join(parts)


@dataclass(frozen=True)
class Network:
    """A model, and how FedPart goes through it.

    Args:
        model: as a specification.
        split: where FedImpro cuts it.
        group: strata that FedPart trains at once, so that its cycles are about as long on all models.
    """

    model: str
    split: str = "layer1"
    group: int = 1


@dataclass(frozen=True)
class TogetherScale:
    """The settings of the study.

    Args:
        run: fields that all runs have.
        datasets: each with parts of its own; the first has the shorter names.
        networks: name → model; the first is that of the tables.
        depths: the clients' models of the part on depths, from the shallowest.
        depth_group: strata of the deepest that FedPart trains at once.
        seeds: all of them.
        full: full rounds at the beginning of FedPart's cycle.
        each: rounds per stratum.
        trials: learning rates that every method is tried with; none to leave them all as they are.
        trial_rounds: of each trial.
        network_fields: fields that only the runs on all networks have.
        probed: fields by which all reported runs tell how far clients part.
    """

    run: Mapping[str, Any]
    datasets: tuple[str, ...]
    networks: Mapping[str, Network]
    depths: tuple[str, ...]
    depth_group: int = 1
    seeds: tuple[int, ...] = (0,)
    full: int = 5
    each: int = 2
    trials: tuple[float, ...] = ()
    trial_rounds: int = 0
    network_fields: Mapping[str, Any] = field(default_factory=dict)
    probed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def network(self) -> Network:
        """That of the tables."""
        return next(iter(self.networks.values()))

    def ideas(self, network: Network, group: int | None = None) -> dict[str, str]:
        """Idea → its technique."""
        part = FedPart(full_rounds=self.full, rounds_per_stratum=self.each, group=group or network.group)
        return {
            DYN: "feddyn(alpha=0.1)",
            NLR: "fednlr",
            IMPRO: str(FedImpro(split=network.split)),
            PART: str(part),
            INCO: join_techniques("heteroavg", str(InCo(**CONV2))),
        }

    def method(self, parts: Sequence[str], network: Network) -> str:
        """Several ideas as a method on one model."""
        ideas = self.ideas(network)
        return join_techniques(*(ideas[name] for name in parts))

    def methods(self) -> dict[str, str]:
        """Label → method, of clients with one model: rivals, each idea alone, and combinations."""
        several = [*((name,) for name in EVERYTHING), *COMBINATIONS]
        rivals = {FEDAVG: "fedavg", "FedProx": "fedprox(mu=0.01)", "SCAFFOLD": "scaffold"}
        return rivals | {combination(parts): self.method(parts, self.network) for parts in several}

    def deep_methods(self) -> dict[str, str]:
        """Label → method, of clients with models of different depth."""
        ideas = self.ideas(self.network, self.depth_group)
        several = [(INCO,), (DYN,), (PART,), *DEEP_COMBINATIONS]
        found = {HETERO: "heteroavg"}
        for parts in several:
            base = "" if INCO in parts else "heteroavg"
            found[combination(parts)] = join_techniques(base, *(ideas[name] for name in parts))
        return found

    @property
    def models(self) -> dict[str, Any]:
        """The fields of clients with models of different depth, whose running statistics fit no other's."""
        return {"archs": "; ".join(self.depths), "model": self.depths[-1], "buffers": "drop"}

    def values(self, **others: Any) -> dict[str, Any]:
        """A comparison's fields."""
        usual = {"dataset": self.datasets[0], "partition": PARTITION, "model": self.network.model}
        return {**self.run, "seed": list(self.seeds), **usual, **self.probed, **others}

    def part_name(self, name: str, data: str) -> str:
        """A part's name, with that of its dataset if it is not the first."""
        return name if data == self.datasets[0] else f"{name}-{data.partition('(')[0]}"

    @property
    def tuning(self) -> Tuning | None:
        """As many trials for a combination as for FedAvg, by the best accuracy."""
        if not self.trials:
            return None
        return Tuning(self.trials, TUNING_SEED, best_accuracy, {"rounds": self.trial_rounds})


def accuracy_of(record: Record) -> float | None:
    """The model's accuracy or, where clients have models of different depth, the mean over these."""
    return clients_accuracy(1)([record]) if record.arch_accuracy else record.accuracy


def best_accuracy(rounds: list[Record]) -> float | None:
    """The best of a run."""
    if any(record.arch_accuracy for record in rounds):
        return max((value for record in rounds if (value := accuracy_of(record)) is not None), default=None)
    return highest_accuracy(rounds)


def where(data: str) -> str:
    """A setting in words."""
    return f"{dataset_name(data)}, Dirichlet(0.1)"


_RUN: Mapping[str, Any] = {
    "clients": 10,
    "participation": 5,
    "batch_size": 64,
    "lr": 0.1,
    "optimizer": "sgd(weight_decay=0.0001)",
}
_ON, _OFF = "stem='7x7', maxpool=True", "stem='3x3', maxpool=False"
"""The deeper paper's guideline on early receptive fields, which is the one that a model itself decides."""


def _networks(width: int) -> dict[str, Network]:
    return {
        "shallow, guidelines on": Network(f"resnet8(width={width}, {_ON})"),
        "deep, guidelines on": Network(f"resnet18(width={width}, {_ON})", group=2),
        "shallow, guidelines off": Network(f"resnet8(width={width}, {_OFF})"),
        "deep, guidelines off": Network(f"resnet18(width={width}, {_OFF})", group=2),
    }


def _depths(width: int, *depths: int) -> tuple[str, ...]:
    return tuple(f"resnet{depth}(width={width}, {_ON})" for depth in depths)


SCALES = {
    "smoke": TogetherScale(
        {
            **_RUN,
            "clients": 3,
            "participation": 2,
            "rounds": 3,
            "steps": 1,
            "batch_size": 8,
            "eval_every": 1,
            "engine": "serial",
            "workers": 1,
        },
        ("digits(examples=200, test_examples=60)",),
        {
            "shallow, guidelines on": Network(f"resnet8(width=2, {_ON})", group=5),
            "shallow, guidelines off": Network(f"resnet8(width=2, {_OFF})", group=5),
        },
        _depths(2, 10, 14),
        depth_group=6,
        full=1,
        each=1,
        probed={"probe": "weightdiv cosine"},
    ),
    "small": TogetherScale(
        {**_RUN, "rounds": 50, "batch_size": 32, "eval_every": 2},
        ("fashion-mnist(examples=4000, test_examples=2000)",),
        dict(list(_networks(8).items())[:2]),
        _depths(8, 10, 14, 18),
        depth_group=2,
        seeds=(1, 2, 3),
        probed={"probe": "weightdiv cosine", "probe_every": 5},
    ),
    "evidence": TogetherScale(
        {**_RUN, "rounds": 125, "eval_every": 2},
        (
            "fashion-mnist(examples=10000, test_examples=2000)",
            "cifar-10(examples=10000, test_examples=2000)",
        ),
        _networks(8),
        _depths(8, 10, 14, 18),
        depth_group=2,
        seeds=(1, 2, 3, 4, 5),
        trials=(0.03, 0.1, 0.3),
        trial_rounds=50,
        network_fields={"rounds": 75},
        probed={"probe": "weightdiv cosine", "probe_every": 5},
    ),
}
