"""FedImpro: against other methods, by cut, noise, clients per round and form; why it works; what can be inverted.

Tang et al., "FedImpro: Measuring and Improving Client Update in Federated Learning", ICLR 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedstrata.compare import Comparison
from fedstrata.reproduce import fedimpro_divergence, fedimpro_inversion, fedimpro_margin, fedimpro_tables
from fedstrata.reproduce.claims import above, always_above, best, cell
from fedstrata.reproduce.fedimpro_settings import FEDAVG, IMPRO, OPTIONS, OTHERS, SCALES, FedImproScale
from fedstrata.reproduce.fedimpro_tables import BEST, round_cost
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    Grid,
    OwnWork,
    Part,
    figures_by_label,
    figures_by_seed,
    gain_rows,
    highest_accuracy,
    label_methods,
    unfinished_note,
)
from fedstrata.reproduce.verdicts import differences
from fedstrata.runs.records import Record
from fedstrata.techniques.fedimpro import FedImpro


def parts(scale: str) -> list[Part]:
    """The parts of the reproduction, in the order of the report; at `evidence` most must be asked for."""
    chosen = SCALES[scale]
    grids = [_split(chosen), _noise(chosen), _clients_per_round(chosen), _form(chosen)]
    usual: list[Part] = [*(replace(part, tuning=chosen.tuning(), round_cost=round_cost) for part in grids)]
    usual += [_divergence(chosen), _inversion(chosen)]
    if not chosen.extras:
        return [*fedimpro_tables.tables(chosen), *usual]
    usual.append(_margin(chosen))
    more = [*fedimpro_tables.extras(chosen), fedimpro_tables.rivals(chosen), fedimpro_tables.momentum(chosen)]
    others = [replace(part, headline=scale != "evidence") for part in [*more, *usual]]
    return [*fedimpro_tables.tables(chosen), _options(chosen), *others]


# --- where paper and code differ -------------------------------------------------------------------------------------


def _options(scale: FedImproScale) -> Grid:
    methods = {FEDAVG: OTHERS[FEDAVG]} | {label: scale.impro(**fields) for label, fields in OPTIONS.items()}
    return Grid(
        "options",
        "what the paper says in two ways, or its code does otherwise: one at a time, and the code's all together",
        scale.values(method=label_methods(methods)),
        lambda comparison: _assess_options(scale, comparison),
        tuning=scale.tuning(),
        round_cost=round_cost,
    )


def _assess_options(scale: FedImproScale, comparison: Comparison) -> Findings:
    found = figures_by_label(comparison, highest_accuracy)
    default, *others = OPTIONS
    rows = tuple(
        (label, cell(seeds), cell(differences(seeds, found[FEDAVG])), cell(differences(seeds, found[default])))
        for label, seeds in found.items()
    )
    checks = [above(f"{label} beats the default", found[label], found[default]) for label in others]
    pairs = {label: (found[label], found[FEDAVG]) for label in OPTIONS}
    checks.append(always_above("FedImpro beats FedAvg with every option", pairs))
    options = {label: found[label] for label in OPTIONS}
    checks.append(best("the default is the best of all options", [default], options))
    columns = ("", "accuracy", "gain over FedAvg, points", "gain over the default, points")
    table = FindingsTable(f"Best accuracy on {scale.where} by option, %", columns, rows)
    return Findings((table,), tuple(checks), (BEST, *unfinished_note(comparison)))


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
    return Findings((FindingsTable(title, columns, rows),), checks, (BEST, *unfinished_note(comparison)))


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
    return Findings((table,), checks, (BEST, *unfinished_note(comparison)))


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
    return Findings((table,), tuple(checks), (BEST, *unfinished_note(comparison)))


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
        BEST,
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
    methods = {name: OTHERS[name] for name in (FEDAVG, "FedProx")} | {IMPRO: scale.impro()}
    if scale.extras:
        methods[fedimpro_divergence.MEAN_IMPRO] = scale.impro(loss="mean")
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


def _margin(scale: FedImproScale) -> OwnWork:
    methods = {FEDAVG: OTHERS[FEDAVG], IMPRO: scale.impro(), fedimpro_divergence.MEAN_IMPRO: scale.impro(loss="mean")}
    settings = {"looks": scale.looks, "examples": scale.features, "fresh": 5 * scale.features}
    return OwnWork(
        "margin",
        "margins of local models on other clients' data (Definition 3.1), and the terms of Theorem 4.1",
        {"run": _run_fields(scale), "methods": methods, **settings},
        scale.seeds,
        fedimpro_margin.work,
        lambda found: fedimpro_margin.assess(found, list(methods), scale.looks),
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
