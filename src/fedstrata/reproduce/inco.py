"""InCo Aggregation: on five methods, by what it is made of, by form, under noise and by batch size; why it works.

Chan, Zhou, Zhao, Jiang and Ngai, "Internal Cross-Layer Gradients for Extending Homogeneity to Heterogeneity in
Federated Learning", ICLR 2024.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstrata.compare import Comparison
from fedstrata.compare.table import stat
from fedstrata.console import plural, spread
from fedstrata.history import Record
from fedstrata.reproduce import similarity
from fedstrata.reproduce.claims import Check, Seeds, above, best
from fedstrata.reproduce.parts import Findings, Grid, Part, Table, Work, by_label, figures, lost
from fedstrata.techniques.inco import InCo
from fedstrata.techniques.perturb import Perturb

BASES = {
    "FedAvg": "",
    "FedProx": "fedprox(mu=0.1)",
    "SCAFFOLD": "scaffold",
    "FedNova": "fednova",
    "MOON": "moon",
}
"""Methods that InCo is put on; the paper's FedProx has μ/2 = 0.05."""
DATASETS = {"cifar-10": "CIFAR-10", "fashion-mnist": "Fashion-MNIST", "digits": "digits"}
SKEW = "dirichlet(alpha=0.5)"

TOLD = {
    "CIFAR-10": {
        "FedAvg": "67.8 against 52.3 %",
        "FedProx": "74.5 against 19.2 %",
        "SCAFFOLD": "67.3 against 54.3 %",
        "FedNova": "62.8 against 10.4 %",
        "MOON": "68.2 against 47.2 %",
    },
    "Fashion-MNIST": {
        "FedAvg": "90.2 against 86.7 %",
        "FedProx": "88.8 against 75.1 %",
        "SCAFFOLD": "88.3 against 87.9 %",
        "FedNova": "86.6 against 12.7 %",
        "MOON": "89.1 against 87.7 %",
    },
}
"""Table 2, ResNets, α = 0.5."""

GROUP, HETERO, INCO = "GroupAvg", "HeteroAvg", "InCo"


@dataclass(frozen=True)
class Scale:
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
        shown: test examples by which models are compared.
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
    shown: int = 512

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
        return {**self.run, "seed": list(self.seeds), **usual, **others}

    @property
    def where(self) -> str:
        """The setting of all parts but the table of methods."""
        return f"{_dataset(self.datasets[0])}, Dirichlet(0.5)"

    @property
    def note(self) -> str:
        """What an accuracy is."""
        over = "" if self.evaluations == 1 else f" and the last {self.evaluations} evaluations"
        end = " at the end of the run" if self.evaluations == 1 else ""
        return (
            f"an accuracy is the mean over the {len(self.depths)} architectures{over}, each judged on the whole test "
            f"set{end}; ± is the sample standard deviation over the seeds"
        )


SCALES = {
    "smoke": Scale(
        {
            "clients": 4,
            "participation": 4,
            "rounds": 2,
            "steps": 2,
            "batch_size": 16,
            "lr": 0.001,
            "optimizer": "adam",
            "buffers": "drop",
            "engine": "serial",
            "workers": 1,
        },
        ("digits",),
        depths=(10, 18),
        shape="width=2",
        seeds=(0,),
        noises=(1.0,),
        batches=(8,),
        shown=64,
    ),
    "small": Scale(
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
    ),
    "paper": Scale(
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
        ("cifar-10", "fashion-mnist"),
        case={"clients": 10, "participation": 1.0, "rounds": 50},
    ),
}


def parts(scale: str) -> list[Part]:
    """The parts of the reproduction, in the order of the report."""
    chosen = SCALES[scale]
    made = (_table, _ablation, _forms, _robust, _groups, _statistics, _similarity)
    return [part(chosen) for part in made]


def joined(*names: str) -> str:
    """A method of several techniques."""
    return " + ".join(filter(None, names))


GROUPED = "fedavg(weight='uniform') + groupavg"
"""The papers' baseline, with the weights that heteroavg has."""


def crossed(base: str = "", **others: Any) -> str:
    """InCo over all architectures, on a method."""
    return joined(base, "heteroavg", str(InCo(**others)))


def _labelled(methods: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"method": text, "label": label} for label, text in methods.items()]


def _dataset(spec: str) -> str:
    return DATASETS[spec.partition("(")[0]]


def _cell(seeds: Seeds) -> str:
    return spread(stat(seeds.values()))


def _gained(one: Seeds, other: Seeds) -> dict[int, float]:
    return {seed: one[seed] - other[seed] for seed in one if seed in other}


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


def _by_label(scale: Scale, comparison: Comparison) -> dict[str, Seeds]:
    return by_label(comparison, clients_accuracy(scale.evaluations))


# --- the table of methods --------------------------------------------------------------------------------------------


def _table(scale: Scale) -> Grid:
    entries = []
    for base, text in BASES.items():
        methods = {base: joined(text, GROUPED), f"{base} + {INCO}": crossed(text)}
        entries += [{**entry, **scale.own.get(base, {})} for entry in _labelled(methods)]
    return Grid(
        "table",
        "five methods inside each group of equal clients, and over all with InCo",
        scale.values(method=entries, dataset=list(scale.datasets)),
        lambda comparison: _judge_table(scale, comparison),
    )


def _judge_table(scale: Scale, comparison: Comparison) -> Findings:
    whole = arch_accuracy(scale.arch(scale.depths[-1]), scale.evaluations)
    clients: dict[tuple[str, str], Seeds] = {}
    server: dict[tuple[str, str], Seeds] = {}
    for row in comparison.rows:
        at = _dataset(row.run.config.dataset), row.method
        clients[at], server[at] = figures(row, clients_accuracy(scale.evaluations)), figures(row, whole)
    names = [_dataset(data) for data in scale.datasets]
    checks = tuple(
        above(
            f"InCo improves {base} on {data}",
            clients[data, f"{base} + {INCO}"],
            clients[data, base],
            paper=TOLD.get(data, {}).get(base, ""),
        )
        for data in names
        for base in BASES
    )
    return Findings(
        (
            Table("Accuracy of the clients' models, %", *_compared(names, clients)),
            Table("Accuracy of the server's model, the deepest, %", *_compared(names, server)),
        ),
        checks,
        (
            scale.note,
            "without InCo, clients of one architecture share their parameters with nobody else (groupavg)",
            *lost(comparison),
        ),
    )


def _compared(names: list[str], found: Mapping[tuple[str, str], Seeds]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Columns and rows of a table: for each dataset without InCo, with it, and what it gains."""
    columns = [heading for data in names for heading in (data, f"{data}, with InCo", "gain, points")]
    rows = []
    for base in BASES:
        pairs = [(found[data, base], found[data, f"{base} + {INCO}"]) for data in names]
        rows.append((base, *(c for old, new in pairs for c in (_cell(old), _cell(new), _cell(_gained(new, old))))))
    return ("method", *columns), tuple(rows)


# --- what it is made of, and its forms -------------------------------------------------------------------------------


def _ablation(scale: Scale) -> Grid:
    methods = {
        GROUP: GROUPED,
        HETERO: "heteroavg",
        "without both": crossed(normalise=False, optimise=False),
        "without normalisation": crossed(normalise=False),
        "without optimisation": crossed(optimise=False),
        INCO: crossed(),
    }
    return Grid(
        "ablation",
        "InCo without normalisation, without optimisation, and without cross-layer gradients",
        scale.values(method=_labelled(methods)),
        lambda comparison: _judge_ablation(scale, comparison),
    )


def _judge_ablation(scale: Scale, comparison: Comparison) -> Findings:
    found = _by_label(scale, comparison)
    checks = [
        above(f"InCo beats {'InCo ' if label.startswith('without') else ''}{label}", found[INCO], seeds)
        for label, seeds in found.items()
        if label != INCO
    ]
    checks.append(above("HeteroAvg beats GroupAvg", found[HETERO], found[GROUP]))
    return _against(scale, comparison, "by what InCo is made of", checks)


def _forms(scale: Scale) -> Grid:
    methods = {
        HETERO: "heteroavg",
        "paper": crossed(form="paper"),
        "theorem": crossed(form="theorem"),
        "released": crossed(form="released"),
        "released, conv2": crossed(form="released", reference="conv2"),
    }
    return Grid(
        "forms",
        "the paper's algorithm, its theorem and the released code",
        scale.values(method=_labelled(methods)),
        lambda comparison: _judge_forms(scale, comparison),
    )


def _judge_forms(scale: Scale, comparison: Comparison) -> Findings:
    found = _by_label(scale, comparison)
    forms = {label: seeds for label, seeds in found.items() if label != HETERO}
    checks = [above(f"the form '{label}' beats HeteroAvg", seeds, found[HETERO]) for label, seeds in forms.items()]
    checks.append(best("the default form is the best", [InCo().form], forms))
    note = (
        "paper: g_k − θ·g_0, normalised, whatever the sign of θ (Algorithm 1); theorem: only where the two go against "
        "each other (Theorem 3.1); released: + |θ|·g_0 for each kernel, within limits; conv2: g_0 is the first block's "
        "second convolution"
    )
    return _against(scale, comparison, "by form", checks, note)


def _against(scale: Scale, comparison: Comparison, what: str, checks: list[Check], *notes: str) -> Findings:
    """A table of all methods beside HeteroAvg."""
    found = _by_label(scale, comparison)
    rows = tuple((label, _cell(seeds), _cell(_gained(seeds, found[HETERO]))) for label, seeds in found.items())
    title = f"Accuracy of the clients' models on {scale.where} {what}, %"
    table = Table(title, ("", "accuracy", "gain over HeteroAvg, points"), rows)
    return Findings((table,), tuple(checks), (scale.note, *notes, *lost(comparison)))


# --- noise, and batch sizes ------------------------------------------------------------------------------------------


def disturbances(scale: Scale) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → (a technique to add, fields to change)."""
    usual = {"as usual": ("", dict[str, Any]())}
    noises = {f"noise {share:g}": (str(Perturb(noise=share)), dict[str, Any]()) for share in scale.noises}
    return usual | noises | {f"batch size {size}": ("", {"batch_size": size}) for size in scale.batches}


def _robust(scale: Scale) -> Grid:
    entries = [
        {"method": joined(text, more), "label": f"{label}, {name}", **fields}
        for name, (more, fields) in disturbances(scale).items()
        for label, text in ((GROUP, GROUPED), (INCO, crossed()))
    ]
    return Grid(
        "robust",
        "noise on the updates, and other batch sizes",
        scale.values(method=entries),
        lambda comparison: _judge_robust(scale, comparison),
    )


def _judge_robust(scale: Scale, comparison: Comparison) -> Findings:
    found = _by_label(scale, comparison)
    pairs = {name: (found[f"{INCO}, {name}"], found[f"{GROUP}, {name}"]) for name in disturbances(scale)}
    checks = [above(f"InCo beats GroupAvg with {name}", *pair) for name, pair in pairs.items() if name != "as usual"]
    rows = tuple((name, _cell(old), _cell(new), _cell(_gained(new, old))) for name, (new, old) in pairs.items())
    title = f"Accuracy of the clients' models on {scale.where}, %"
    table = Table(title, ("", GROUP, INCO, "gain, points"), rows)
    notes = (
        scale.note,
        "noise is Gaussian, on every client's update before it is sent; its standard deviation is so many times that "
        f"of the update, tensor by tensor; as usual: no noise, batch size {scale.run['batch_size']}",
    )
    return Findings((table,), tuple(checks), (*notes, *lost(comparison)))


# --- group by group --------------------------------------------------------------------------------------------------


THREE = {GROUP: GROUPED, HETERO: "heteroavg", INCO: crossed()}


def _groups(scale: Scale) -> Grid:
    return Grid(
        "groups",
        "each architecture's own accuracy",
        scale.values(method=_labelled(THREE)),
        lambda comparison: _judge_groups(scale, comparison),
    )


def _judge_groups(scale: Scale, comparison: Comparison) -> Findings:
    archs = {f"ResNet{depth}": scale.arch(depth) for depth in scale.depths}
    found = {
        row.method: {name: figures(row, arch_accuracy(arch, scale.evaluations)) for name, arch in archs.items()}
        for row in comparison.rows
    }
    rows = tuple((label, *(_cell(seeds) for seeds in columns.values())) for label, columns in found.items())
    checks = [
        above(f"InCo beats {other} on {name}", found[INCO][name], found[other][name])
        for other in (GROUP, HETERO)
        for name in archs
    ]
    table = Table(f"Accuracy of each architecture on {scale.where}, %", ("", *archs), rows)
    evaluations = f"the mean of the last {plural(scale.evaluations, 'evaluation')}"
    return Findings((table,), tuple(checks), (f"an accuracy is {evaluations}", *lost(comparison)))


# --- running statistics ----------------------------------------------------------------------------------------------

POLICIES = {"drop": "each batch's own statistics", "average": "averaged running statistics"}


def _statistics(scale: Scale) -> Grid:
    return Grid(
        "statistics",
        "running statistics averaged over architectures, and none",
        scale.values(method=_labelled(THREE), buffers=list(POLICIES)),
        lambda comparison: _judge_statistics(scale, comparison),
    )


def _judge_statistics(scale: Scale, comparison: Comparison) -> Findings:
    depths = {"shallowest": scale.depths[0], "deepest": scale.depths[-1]}
    measures = {"all": clients_accuracy(scale.evaluations)}
    measures |= {name: arch_accuracy(scale.arch(depth), scale.evaluations) for name, depth in depths.items()}
    found = {
        (row.run.buffers, row.method): {name: figures(row, of) for name, of in measures.items()}
        for row in comparison.rows
    }
    rows = tuple(
        (told, label, *(_cell(seeds) for seeds in found[policy, label].values()))
        for policy, told in POLICIES.items()
        for label in THREE
    )
    checks = tuple(
        above(f"InCo beats {other} with {told}", found[policy, INCO]["all"], found[policy, other]["all"])
        for policy, told in POLICIES.items()
        for other in (GROUP, HETERO)
    )
    table = Table(f"Accuracy on {scale.where} by running statistics, %", ("statistics", "", *measures), rows, left=2)
    return Findings((table,), checks, (scale.note, *lost(comparison)))


# --- how alike the clients' models are -------------------------------------------------------------------------------


def _similarity(scale: Scale) -> Work:
    run = {name: value for name, value in scale.values(**scale.case).items() if name != "seed"}
    middle = scale.arch(scale.depths[len(scale.depths) // 2])
    equal = {"archs": None, "model": middle, "method": "fedavg"}
    cases = {
        similarity.IID: {**equal, "partition": "iid"},
        similarity.EQUAL: equal,
        similarity.GROUP: {"method": GROUPED},
        similarity.HETERO: {"method": "heteroavg"},
        similarity.INCO: {"method": crossed()},
        similarity.PLAIN_INCO: {"method": crossed(optimise=False)},
    }
    return Work(
        "similarity",
        "how alike the clients' models are, stage by stage, and where layers go the same way",
        {"run": run, "cases": cases, "stages": ["layer1", "layer2", "layer3", "layer4"], "shown": scale.shown},
        scale.seeds,
        similarity.work,
        similarity.judge,
        draws=True,
    )
