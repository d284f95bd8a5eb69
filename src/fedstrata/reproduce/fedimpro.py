"""FedImpro: against other methods, by cut, noise, clients per round and form; why it works; what can be inverted.

Tang et al., "FedImpro: Measuring and Improving Client Update in Federated Learning", ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstrata.compare import Comparison, ComparisonRow
from fedstrata.compare.runner import read_finished_records
from fedstrata.reproduce import fedimpro_divergence, fedimpro_inversion
from fedstrata.reproduce.claims import GAINS, Check, above, always_above, best, cell, fewest, rounds_text
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    Grid,
    OwnWork,
    Part,
    dataset_name,
    figures_by_label,
    figures_by_seed,
    gain_rows,
    highest_accuracy,
    label_methods,
    unfinished_note,
)
from fedstrata.reproduce.verdicts import Seeds, differences
from fedstrata.runs.records import Record, rounds_to
from fedstrata.techniques.fedimpro import FedImpro

OTHERS = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox(mu=0.01)",
    "SCAFFOLD": "scaffold",
    "FedNova": "fednova",
    "FedDyn": "feddyn(alpha=0.1)",
}
SKEWS = {"dirichlet(alpha=0.1)": "Dirichlet(0.1)", "dirichlet(alpha=0.05)": "Dirichlet(0.05)"}
MILD, SEVERE = SKEWS.values()


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

    def impro(self, **others: Any) -> str:
        """FedImpro as a method."""
        return str(FedImpro(**{"split": self.split, **others}))

    def values(self, **others: Any) -> dict[str, Any]:
        """A comparison's fields."""
        usual = {"dataset": self.datasets[0], "partition": next(iter(SKEWS)), "participation": self.selected[0]}
        return {**self.run, "seed": list(self.seeds), **usual, **others}

    @property
    def where(self) -> str:
        """The setting of all parts but the table of methods."""
        return f"{dataset_name(self.datasets[0])}, {MILD}"


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
        looks=1,
        attack={"images": 4, "noise": [0.0, 0.5], "steps": 10},
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
    ),
}


def parts(scale: str) -> list[Part]:
    """The parts of the reproduction, in the order of the report."""
    chosen = SCALES[scale]
    return [
        _table(chosen),
        _split(chosen),
        _noise(chosen),
        _clients_per_round(chosen),
        _form(chosen),
        _divergence(chosen),
        _inversion(chosen),
    ]


_BEST = "an accuracy is the best of a run, as in the paper; ± is the sample standard deviation over the seeds"


# --- the table of methods --------------------------------------------------------------------------------------------


def _table(scale: FedImproScale) -> Grid:
    methods = label_methods({**OTHERS, "FedImpro": scale.impro()})
    return Grid(
        "table",
        "FedImpro against other methods: best accuracy, and rounds to FedAvg's",
        scale.values(
            method=[{**entry, **scale.own.get(entry["label"], {})} for entry in methods],
            dataset=list(scale.datasets),
            partition=list(SKEWS),
        ),
        lambda comparison: _assess_table(scale, comparison),
    )


def _assess_table(scale: FedImproScale, comparison: Comparison) -> Findings:
    found: dict[str, dict[str, ComparisonRow]] = {
        f"{dataset_name(d)}, {skew}": {} for d in scale.datasets for skew in SKEWS.values()
    }
    for row in comparison.rows:
        found[f"{dataset_name(row.run.config.dataset)}, {SKEWS[row.run.config.partition]}"][row.method] = row
    reached = {
        setting: {m: figures_by_seed(row, highest_accuracy) for m, row in rows.items()}
        for setting, rows in found.items()
    }
    needed = {setting: _rounds_needed(rows, reached[setting]["FedAvg"]) for setting, rows in found.items()}
    labels = [*OTHERS, "FedImpro"]
    accuracy = tuple((label, *(cell(column[label]) for column in reached.values())) for label in labels)
    rounds = tuple((label, *(rounds_text(column[label].values()) for column in needed.values())) for label in labels)
    return Findings(
        (
            FindingsTable("Best accuracy, %", ("method", *found), accuracy),
            FindingsTable("Rounds to FedAvg's best accuracy, seed by seed", ("method", *found), rounds),
        ),
        (*_table_checks(reached, needed), *_gain_checks(scale, reached)),
        (
            _BEST,
            "the target is the best accuracy that FedAvg has in the whole run, with the same seed, so FedAvg's own "
            f"number is that of its best round; – is a run that never has it; evaluated every {_interval_text(scale)}",
            *unfinished_note(comparison),
        ),
    )


Accuracies = Mapping[str, Mapping[str, Seeds]]
"""Setting → method → seed → best accuracy."""


def _table_checks(reached: Accuracies, needed: Mapping[str, Mapping[str, Mapping[int, int | None]]]) -> list[Check]:
    """Accuracy and rounds, setting by setting."""
    checks: list[Check] = []
    for setting, column in reached.items():
        paper = PAPER.get(setting, FedImproFigures("", "", ""))
        name = f"FedImpro needs the fewest rounds to FedAvg's best accuracy on {setting}"
        checks += [
            above(f"FedImpro beats FedAvg on {setting}", column["FedImpro"], column["FedAvg"], paper=paper.fedavg),
            best(f"FedImpro is the best on {setting}", ["FedImpro"], column, paper=paper.best),
            fewest(name, "FedImpro", needed[setting], paper=paper.rounds),
        ]
    return checks


def _gain_checks(scale: FedImproScale, reached: Accuracies) -> list[Check]:
    """Severe against mild skew, dataset by dataset."""
    checks = []
    for data in map(dataset_name, scale.datasets):
        columns = [reached[f"{data}, {skew}"] for skew in (MILD, SEVERE)]
        mild, severe = (differences(column["FedImpro"], column["FedAvg"]) for column in columns)
        name = f"FedImpro gains more over FedAvg with {SEVERE} than with {MILD} on {data}"
        checks.append(above(name, severe, mild, unit=GAINS, paper=PAPER_GAINS.get(data, "")))
    return checks


def _interval_text(scale: FedImproScale) -> str:
    every = scale.run.get("eval_every", 1)
    return "round" if every == 1 else f"{every} rounds"


def _rounds_needed(rows: Mapping[str, ComparisonRow], targets: Seeds) -> dict[str, dict[int, int | None]]:
    """Method → seed → the first round that reaches this seed's target."""
    return {
        method: {
            result.seed: rounds_to(read_finished_records(Path(result.directory)), targets[result.seed])
            for result in row.sound_results
            if result.seed in targets
        }
        for method, row in rows.items()
    }


# --- where the model is cut ------------------------------------------------------------------------------------------


def _split(scale: FedImproScale) -> Grid:
    methods = {"FedAvg": "fedavg"} | {f"after {place}": scale.impro(split=place) for place in scale.splits}
    return Grid(
        "split",
        "where the model is cut, and what the statistics add to the uplink",
        scale.values(method=label_methods(methods)),
        lambda comparison: _assess_split(scale, comparison),
    )


def _assess_split(scale: FedImproScale, comparison: Comparison) -> Findings:
    found = figures_by_label(comparison, highest_accuracy)
    base, *cuts = found
    shares = {row.method: figures_by_seed(row, _statistics_share) for row in comparison.rows}
    rows = tuple(
        (label, cell(seeds), cell(differences(seeds, found[base])), f"{cell(shares[label])} %")
        for label, seeds in found.items()
    )
    checks = (
        best(
            "a low or middle cut beats the last one",
            cuts[:-1],
            {label: found[label] for label in cuts},
            paper="88.45 (87.64 and 87.86) against 84.08 %",
        ),
        always_above(
            "every cut but the last beats FedAvg",
            {label: (found[label], found[base]) for label in cuts[:-1]},
            paper="87.64, 88.45 and 87.86 against 83.65 %",
        ),
    )
    columns = ("cut", "accuracy", "gain over FedAvg, points", "statistics, of the uplink")
    title = f"Best accuracy on {scale.where} by cut, %"
    return Findings((FindingsTable(title, columns, rows),), checks, (_BEST, *unfinished_note(comparison)))


def _statistics_share(rounds: list[Record]) -> float:
    """The share of the bytes up that are statistics of features."""
    sent = sum(record.slots_up.get(FedImpro.name, 0) for record in rounds)
    return sent / max(sum(record.bytes_up for record in rounds), 1)


# --- noise -----------------------------------------------------------------------------------------------------------


def _noise(scale: FedImproScale) -> Grid:
    methods = {"FedAvg": "fedavg"} | {f"σ = {level:g}": scale.impro(noise=level) for level in scale.noises}
    return Grid(
        "noise",
        "noise on the statistics that clients send",
        scale.values(method=label_methods(methods)),
        lambda comparison: _assess_noise(scale, comparison),
    )


def _assess_noise(scale: FedImproScale, comparison: Comparison) -> Findings:
    found = figures_by_label(comparison, highest_accuracy)
    base, *levels = found
    none, most = levels[0], levels[-1]
    rows = gain_rows(found, base)
    name = f"noise of {scale.noises[-1]:g} costs less than a point"
    checks = (
        above(name, found[most], found[none], margin=0.01, paper="88.30 against 88.45 %"),
        always_above(
            "FedImpro beats FedAvg at every level of noise",
            {label: (found[label], found[base]) for label in levels},
            paper="88.07 to 88.45 against 83.65 %",
        ),
    )
    title = f"Best accuracy on {scale.where} by the noise's standard deviation, %"
    table = FindingsTable(title, ("", "accuracy", "gain over FedAvg, points"), rows)
    return Findings((table,), checks, (_BEST, *unfinished_note(comparison)))


# --- clients per round -----------------------------------------------------------------------------------------------


def _clients_per_round(scale: FedImproScale) -> Grid:
    return Grid(
        "selected",
        "more clients per round",
        scale.values(
            method=label_methods({"FedAvg": "fedavg", "FedImpro": scale.impro()}), participation=list(scale.selected)
        ),
        lambda comparison: _assess_clients_per_round(scale, comparison),
    )


def _assess_clients_per_round(scale: FedImproScale, comparison: Comparison) -> Findings:
    rows = {
        (row.run.config.participation, row.method): figures_by_seed(row, highest_accuracy) for row in comparison.rows
    }
    few, many = scale.selected
    labels = ("FedAvg", "FedImpro")
    papers = {"FedAvg": "86.65 against 83.65 %", "FedImpro": "90.25 against 88.45 %"}
    checks = [
        above(f"more clients per round improve {label}", rows[many, label], rows[few, label], paper=papers[label])
        for label in labels
    ]
    pairs = {f"{count} per round": (rows[count, "FedImpro"], rows[count, "FedAvg"]) for count in scale.selected}
    paper = "88.45 against 83.65 and 90.25 against 86.65 %"
    checks.append(always_above("FedImpro beats FedAvg with few and with many clients per round", pairs, paper=paper))
    cells = tuple((str(count), *(cell(rows[count, label]) for label in labels)) for count in scale.selected)
    table = FindingsTable(
        f"Best accuracy on {scale.where} by clients per round, %", ("clients per round", *labels), cells
    )
    return Findings((table,), tuple(checks), (_BEST, *unfinished_note(comparison)))


# --- the paper's form and the released one ---------------------------------------------------------------------------


def _form(scale: FedImproScale) -> Grid:
    tamed = {"std_cap": 0.1, "weight": "ramp"}
    methods = {
        "FedAvg": "fedavg",
        "paper": scale.impro(),
        "paper, with cap and ramp": scale.impro(**tamed),
        "released, without cap and ramp": scale.impro(form="released"),
        "released": scale.impro(form="released", **tamed),
    }
    return Grid(
        "form",
        "the paper's formulas against the released code's",
        scale.values(method=label_methods(methods)),
        lambda comparison: _assess_form(scale, comparison),
    )


def _assess_form(scale: FedImproScale, comparison: Comparison) -> Findings:
    found = figures_by_label(comparison, highest_accuracy)
    base, *forms = found
    rows = gain_rows(found, base)
    checks = (
        above("the paper's form beats the released one", found["paper"], found["released"]),
        always_above("every form beats FedAvg", {label: (found[label], found[base]) for label in forms}),
    )
    notes = (
        _BEST,
        "released: real and sampled features pass the upper layers together, and a client samples from its own moving "
        "averages, of the standard deviation; cap: none above 0.1 is sampled with; ramp: the weight of sampled ones "
        "rises from 0 to 1 in the first half of the run",
    )
    table = FindingsTable(
        f"Best accuracy on {scale.where} by form, %", ("form", "accuracy", "gain over FedAvg, points"), rows
    )
    return Findings((table,), checks, (*notes, *unfinished_note(comparison)))


# --- how it works, and what it gives away ----------------------------------------------------------------------------


def _run_fields(scale: FedImproScale) -> dict[str, Any]:
    return {name: value for name, value in scale.values().items() if name != "seed"}


def _divergence(scale: FedImproScale) -> OwnWork:
    methods = {name: OTHERS[name] for name in ("FedAvg", "FedProx")} | {"FedImpro": scale.impro()}
    return OwnWork(
        "divergence",
        "how far local models are apart, and what shared features change in gradients and features",
        {
            "run": _run_fields(scale),
            "methods": methods,
            "place": scale.split,
            "features": scale.features,
            "looks": scale.looks,
        },
        scale.seeds,
        fedimpro_divergence.work,
        lambda found: fedimpro_divergence.assess(found, list(methods), scale.looks),
        draws=True,
        needs=fedimpro_divergence.check_transport,
    )


def _inversion(scale: FedImproScale) -> OwnWork:
    return OwnWork(
        "inversion",
        "images rebuilt from raw features and from shared statistics",
        {"run": {**_run_fields(scale), "method": scale.impro()}, "attack": dict(scale.attack)},
        scale.seeds,
        fedimpro_inversion.work,
        fedimpro_inversion.assess,
        draws=True,
    )
