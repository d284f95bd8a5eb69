"""FedImpro's tables of methods: Tables 1 and 2, with E = 5 and M = 100, VGG-9, CIFAR-100, momentum and Table 10."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedstrata.compare import Comparison, ComparisonRow, Run
from fedstrata.compare.runner import read_finished_records
from fedstrata.reproduce.claims import GAINS, Check, above, best, cell, fewest, rounds_text
from fedstrata.reproduce.fedimpro_settings import (
    CENTRALISED,
    DYN_IMPRO,
    FEDAVG,
    IMPRO,
    MILD,
    MOMENTUM,
    OTHERS,
    PAPER,
    PAPER_GAINS,
    PAPER_MOMENTUM,
    PAPER_RIVALS,
    SEVERE,
    SKEWS,
    FedImproFigures,
    FedImproScale,
)
from fedstrata.reproduce.fednlr_settings import skew_name
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    Grid,
    accuracy_at_end,
    dataset_name,
    figures_by_label,
    figures_by_seed,
    highest_accuracy,
    label_methods,
    mean_curve,
    unfinished_note,
)
from fedstrata.reproduce.plots import plot_architectures
from fedstrata.reproduce.verdicts import Seeds, differences
from fedstrata.runs.records import rounds_to

BEST = "an accuracy is the best of a run, as in the paper; ± is the sample standard deviation over the seeds"
Named = Callable[[Run], str]
"""A run → the name of its setting."""


def round_cost(run: Run) -> float:
    """What a round costs in the mean, of the first: evaluated less often, and with something to sample from."""
    return 1.6 if "fedimpro" in run.config.method else 0.95


# --- tables 1 and 2 --------------------------------------------------------------------------------------------------


def tables(scale: FedImproScale) -> list[Grid]:
    """The table of all datasets or, where they are apart, of each."""
    several = [(data,) for data in scale.datasets] if scale.apart else [scale.datasets]
    return [_table(scale, datasets) for datasets in several]


def _table(scale: FedImproScale, datasets: tuple[str, ...]) -> Grid:
    methods = scale.methods(*((DYN_IMPRO, CENTRALISED) if scale.extras else ()))
    name = scale.part_name("table", datasets[0])
    entries = [{**entry, **scale.own.get(entry["label"], {})} for entry in label_methods(methods)]
    return Grid(
        name,
        "FedImpro against other methods: best accuracy, and rounds to FedAvg's",
        scale.values(method=entries, dataset=datasets[0] if scale.apart else list(datasets), partition=list(SKEWS)),
        lambda comparison: _assess_table(scale, name, datasets, comparison),
        tuning=scale.tuning(),
        round_cost=round_cost,
        draws=bool(scale.extras),
    )


def _assess_table(scale: FedImproScale, name: str, datasets: tuple[str, ...], comparison: Comparison) -> Findings:
    found = assess_methods(scale, name, comparison, _where)
    reached = _figures(comparison, _where)
    return replace(found, checks=(*found.checks, *_gain_checks(datasets, reached)))


def _where(run: Run, more: str = "") -> str:
    """A setting as the paper writes it."""
    return ", ".join(filter(None, (dataset_name(run.config.dataset), skew_name(run.config.partition), more)))


def _figures(comparison: Comparison, where: Named) -> dict[str, dict[str, Seeds]]:
    """Setting → method → seed → best accuracy."""
    found: dict[str, dict[str, Seeds]] = {}
    for row in comparison.rows:
        found.setdefault(where(row.run), {})[row.method] = figures_by_seed(row, highest_accuracy)
    return found


def assess_methods(scale: FedImproScale, name: str, comparison: Comparison, where: Named) -> Findings:
    """A table of best accuracies and one of rounds, a column for each setting; the claims on each."""
    rows: dict[str, dict[str, ComparisonRow]] = {}
    for row in comparison.rows:
        rows.setdefault(where(row.run), {})[row.method] = row
    reached = _figures(comparison, where)
    needed = {setting: _rounds_needed(of, reached[setting][FEDAVG]) for setting, of in rows.items()}
    labels = list(dict.fromkeys(row.method for row in comparison.rows))
    accuracy = tuple((label, *(cell(column[label]) for column in reached.values())) for label in labels)
    rounds = tuple((label, *(rounds_text(column[label].values()) for column in needed.values())) for label in labels)
    every = comparison.rows[0].run.config.eval_every
    notes = (
        BEST,
        "the target is the best accuracy that FedAvg has in the whole run, with the same seed, so FedAvg's own number "
        "is that of its best round; – is a run that never has it; evaluated every "
        f"{'round' if every == 1 else f'{every} rounds'}",
        *unfinished_note(comparison),
    )
    curves = {setting: {label: mean_curve(row) for label, row in of.items()} for setting, of in rows.items()}
    return Findings(
        (
            FindingsTable("Best accuracy, %", ("method", *reached), accuracy),
            FindingsTable("Rounds to FedAvg's best accuracy, seed by seed", ("method", *reached), rounds),
        ),
        tuple(_table_checks(reached, needed)),
        notes,
        {f"{name}.png": partial(plot_architectures, curves, line="-")} if scale.extras else {},
    )


Accuracies = Mapping[str, Mapping[str, Seeds]]
"""Setting → method → seed → best accuracy."""


def _table_checks(reached: Accuracies, needed: Mapping[str, Mapping[str, Mapping[int, int | None]]]) -> list[Check]:
    """Accuracy and rounds, setting by setting."""
    checks: list[Check] = []
    for setting, column in reached.items():
        paper = PAPER.get(setting, FedImproFigures("", "", ""))
        name = f"FedImpro needs the fewest rounds to FedAvg's best accuracy on {setting}"
        theirs = {label: seeds for label, seeds in column.items() if label in OTHERS or label == IMPRO}
        checks += [
            above(f"FedImpro beats FedAvg on {setting}", column[IMPRO], column[FEDAVG], paper=paper.fedavg),
            best(f"FedImpro is the best on {setting}", [IMPRO], theirs, paper=paper.best),
            fewest(name, IMPRO, {label: needed[setting][label] for label in theirs}, paper=paper.rounds),
        ]
        if DYN_IMPRO in column:
            checks += [
                above(f"{DYN_IMPRO} beats {label} on {setting}", column[DYN_IMPRO], column[label])
                for label in ("FedDyn", IMPRO)
            ]
    return checks


def _gain_checks(datasets: tuple[str, ...], reached: Accuracies) -> list[Check]:
    """Severe against mild skew, dataset by dataset."""
    checks = []
    for data in map(dataset_name, datasets):
        columns = [reached[f"{data}, {skew}"] for skew in (MILD, SEVERE)]
        mild, severe = (differences(column[IMPRO], column[FEDAVG]) for column in columns)
        name = f"FedImpro gains more over FedAvg with {SEVERE} than with {MILD} on {data}"
        checks.append(above(name, severe, mild, unit=GAINS, paper=PAPER_GAINS.get(data, "")))
    return checks


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


# --- the same table under other settings -----------------------------------------------------------------------------

EXTRAS = {
    "epochs": ("five local epochs", "E = 5"),
    "many": ("100 clients, 10 per round", "M = 100"),
    "vgg9": ("VGG-9 (Table 9)", "VGG-9"),
    "cifar-100": ("CIFAR-100", ""),
}
"""Part → what it is about, and what its settings are called beyond dataset and skew."""


def extras(scale: FedImproScale) -> list[Grid]:
    """One table each, with Dirichlet(0.1); those that are not on a dataset of their own on all of the scale's."""
    found = []
    for name, fields in scale.extras.items():
        several = scale.datasets if scale.apart and "dataset" not in fields else scale.datasets[:1]
        found += [_extra(scale, name, {"dataset": data, **fields}, scale.part_name(name, data)) for data in several]
    return found


def _extra(scale: FedImproScale, name: str, fields: Mapping[str, Any], part: str) -> Grid:
    about, called = EXTRAS[name]
    tuned = {"rounds": max(1, int(fields.get("rounds", scale.run["rounds"])) // 3)}
    if "partition" in fields:
        tuned["partition"] = fields["partition"]
    return Grid(
        part,
        f"FedImpro against other methods: {about}",
        scale.values(method=label_methods(scale.methods()), **fields),
        lambda comparison: assess_methods(scale, part, comparison, partial(_where, more=called)),
        draws=True,
        tuning=scale.tuning(tuned),
        round_cost=round_cost,
    )


# --- momentum (Table 6) ----------------------------------------------------------------------------------------------


def momentum(scale: FedImproScale) -> Grid:
    """Baselines and FedImpro with momentum and without."""
    chosen = {label: text for label, text in scale.methods().items() if label != "FedDyn"}
    entries = label_methods(chosen)
    entries += [{**entry, "label": f"{entry['label']}, momentum", "optimizer": MOMENTUM} for entry in entries]
    return Grid(
        "momentum",
        "methods with a momentum of 0.9 (Table 6) and without",
        scale.values(method=entries),
        lambda comparison: _assess_momentum(scale, list(chosen), comparison),
        tuning=scale.tuning(),
        round_cost=round_cost,
    )


def _assess_momentum(scale: FedImproScale, labels: list[str], comparison: Comparison) -> Findings:
    found = figures_by_label(comparison, highest_accuracy)
    pairs = {label: (found[label], found[f"{label}, momentum"]) for label in labels}
    rows = tuple((label, *map(cell, pair), cell(differences(pair[1], pair[0]))) for label, pair in pairs.items())
    checks = [
        above(f"{label} is better without momentum", *pair, paper=PAPER_MOMENTUM.get(label, ""))
        for label, pair in pairs.items()
    ]
    rivals = {label: seeds for label, seeds in found.items() if "momentum" in label}
    checks.append(best("FedImpro without momentum beats all with it", [IMPRO], {IMPRO: found[IMPRO], **rivals}))
    columns = ("method", "without", "with momentum", "gain, points")
    title = f"Best accuracy on {scale.where}, %"
    return Findings((FindingsTable(title, columns, rows),), tuple(checks), (BEST, *unfinished_note(comparison)))


# --- Table 10's rivals -----------------------------------------------------------------------------------------------


def rivals(scale: FedImproScale) -> Grid:
    """CCVR, FedDF and FedSpeed, by the accuracy at the end: CCVR refits the classifier then."""
    methods = {
        FEDAVG: OTHERS[FEDAVG],
        "FedDyn": OTHERS["FedDyn"],
        "CCVR": "ccvr",
        "FedDF": "feddf(noise=True, steps=20)",
        "FedSpeed": "fedspeed",
        IMPRO: scale.impro(),
    }
    tuning = scale.tuning()
    return Grid(
        "rivals",
        "FedImpro against CCVR, FedDF without data, FedSpeed and FedDyn (Table 10)",
        scale.values(method=label_methods(methods)),
        lambda comparison: _assess_rivals(scale, comparison),
        tuning=None if tuning is None else replace(tuning, score=accuracy_at_end(scale.last)),
        round_cost=round_cost,
    )


def _assess_rivals(scale: FedImproScale, comparison: Comparison) -> Findings:
    found = figures_by_label(comparison, accuracy_at_end(scale.last))
    rows = tuple((label, cell(seeds), cell(differences(found[IMPRO], seeds))) for label, seeds in found.items())
    checks = tuple(
        above(f"FedImpro beats {label} at the end", found[IMPRO], found[label], paper=PAPER_RIVALS.get(label, ""))
        for label in found
        if label != IMPRO
    )
    notes = (
        f"an accuracy is that at the end, in the mean of the last {scale.last} evaluations; CCVR's is that after its "
        "refit; FedDF distils on noise, 20 steps after every round",
        "the paper puts the others' own figures, under other settings, beside its own",
        *unfinished_note(comparison),
    )
    table = FindingsTable(
        f"Accuracy at the end on {scale.where}, %", ("method", "accuracy", "FedImpro's gain over it, points"), rows
    )
    return Findings((table,), checks, notes)
