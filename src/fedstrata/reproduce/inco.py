"""InCo Aggregation: on five methods, by what it is made of, by form, under noise and by batch size; why it works.

Chan, Zhou, Zhao, Jiang and Ngai, "Internal Cross-Layer Gradients for Extending Homogeneity to Heterogeneity in
Federated Learning", ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fedstrata.compare import Comparison
from fedstrata.config.identity import MODELS_VERSION
from fedstrata.core.text import plural
from fedstrata.reproduce import inco_decisive, inco_gradients, inco_similarity
from fedstrata.reproduce.claims import above, best, cell
from fedstrata.reproduce.inco_settings import (
    GROUP,
    GROUPED,
    HETERO,
    INCO,
    SCALES,
    InCoScale,
    accuracies,
    arch_accuracy,
    arch_curve,
    clients_accuracy,
    join_techniques,
    mean_over,
    round_cost,
)
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    Grid,
    OwnWork,
    Part,
    dataset_name,
    figures_by_seed,
    gain_rows,
    unfinished_note,
)
from fedstrata.reproduce.plots import plot_architectures
from fedstrata.reproduce.verdicts import Seeds, differences
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
HETEROS = {
    "FedAvg": HETERO,
    "FedProx": "HeteroProx",
    "SCAFFOLD": "HeteroSCAFFOLD",
    "FedNova": "HeteroNova",
    "MOON": "HeteroMOON",
}
"""The same over all architectures, without crossed layers: what InCo adds is its gain over these."""

PAPER = {
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


def parts(scale: str) -> list[Part]:
    """The parts of the reproduction, in the order of the report."""
    chosen = SCALES[scale]
    usual = [_ablation(chosen), _forms(chosen), _robust(chosen), _groups(chosen), _statistics(chosen)]
    tables = [_table(chosen, data) for data in chosen.datasets] if chosen.apart else [_table(chosen)]
    if not chosen.partitions:
        return [*tables, *usual, _similarity(chosen)]
    grids = [*tables, *usual, *inco_decisive.transformers(chosen)]
    others: list[Part] = [*(replace(part, round_cost=round_cost) for part in grids), _similarity(chosen)]
    grids = [*inco_decisive.decisive(chosen), inco_decisive.coefficients(chosen)]
    first: list[Part] = [*(replace(part, round_cost=round_cost) for part in grids), _gradients(chosen)]
    return [*first, *(replace(part, headline=scale != "evidence") for part in others)]


# --- the table of methods --------------------------------------------------------------------------------------------


def _table(scale: InCoScale, data: str = "") -> Grid:
    """Of all datasets, or of one."""
    entries = []
    for base, text in BASES.items():
        methods = {
            base: join_techniques(text, GROUPED),
            HETEROS[base]: join_techniques(text, "heteroavg"),
            f"{base} + {INCO}": scale.inco(text),
        }
        entries += [{**entry, **scale.own.get(base, {})} for entry in scale.entries(methods)]
    chosen = (data,) if data else scale.datasets
    return Grid(
        scale.part_name("table", data),
        "five methods inside each group of equal clients, over all of them, and over all with InCo",
        scale.values(method=entries, dataset=data or list(chosen)),
        lambda comparison: _assess_table(scale, chosen, comparison),
        tuning=scale.tuning,
    )


def _assess_table(scale: InCoScale, datasets: Sequence[str], comparison: Comparison) -> Findings:
    whole = arch_accuracy(scale.arch(scale.depths[-1]), scale.evaluations)
    clients: dict[tuple[str, str], Seeds] = {}
    server: dict[tuple[str, str], Seeds] = {}
    for row in comparison.rows:
        at = dataset_name(row.run.config.dataset), row.method
        clients[at], server[at] = figures_by_seed(row, clients_accuracy(scale.evaluations)), figures_by_seed(row, whole)
    names = [dataset_name(data) for data in datasets]
    checks = []
    for data, base in ((data, base) for data in names for base in BASES):
        alone, over, crossed = (clients[data, label] for label in (base, HETEROS[base], f"{base} + {INCO}"))
        paper = PAPER.get(data, {}).get(base, "")
        checks += [
            above(f"InCo improves {base} on {data}", crossed, alone, paper=paper),
            above(f"InCo improves {HETEROS[base]} on {data}", crossed, over),
        ]
    return Findings(
        (
            FindingsTable("Accuracy of the clients' models, %", *_gain_table(names, clients)),
            FindingsTable("Accuracy of the server's model, the deepest, %", *_gain_table(names, server)),
        ),
        tuple(checks),
        (
            scale.note,
            "alone: clients of one architecture share their parameters with nobody else (groupavg), as in the paper's "
            "Table 2; hetero: every layer is averaged over the clients that hold it; InCo: and crossed",
            *unfinished_note(comparison),
        ),
    )


def _gain_table(names: list[str], found: Mapping[tuple[str, str], Seeds]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """For each dataset the accuracy alone, over all architectures and with InCo, and what crossing gains over both."""
    columns = [f"{data}, {kind}" for data in names for kind in ("alone", "hetero", "InCo", "over alone", "over hetero")]
    rows = []
    for base in BASES:
        cells: list[str] = []
        for data in names:
            old, over, new = (found[data, label] for label in (base, HETEROS[base], f"{base} + {INCO}"))
            cells += [cell(old), cell(over), cell(new), cell(differences(new, old)), cell(differences(new, over))]
        rows.append((base, *cells))
    return ("method", *columns), tuple(rows)


# --- what it is made of, and its forms -------------------------------------------------------------------------------


def _ablation(scale: InCoScale) -> Grid:
    methods = {
        GROUP: GROUPED,
        HETERO: "heteroavg",
        "without both": scale.inco(normalise=False, optimise=False),
        "without normalisation": scale.inco(normalise=False),
        "without optimisation": scale.inco(optimise=False),
        INCO: scale.inco(),
    }
    return Grid(
        "ablation",
        "InCo without normalisation, without optimisation, and without cross-layer gradients",
        scale.values(method=scale.entries(methods)),
        lambda comparison: _assess_ablation(scale, comparison),
        tuning=scale.tuning,
    )


def _assess_ablation(scale: InCoScale, comparison: Comparison) -> Findings:
    found = accuracies(scale, comparison)
    checks = [
        above(f"InCo beats {'InCo ' if label.startswith('without') else ''}{label}", found[INCO], seeds)
        for label, seeds in found.items()
        if label != INCO
    ]
    checks.append(above("HeteroAvg beats GroupAvg", found[HETERO], found[GROUP]))
    rows = gain_rows(found, HETERO)
    title = f"Accuracy of the clients' models on {scale.where} by what InCo is made of, %"
    table = FindingsTable(title, ("", "accuracy", "gain over HeteroAvg, points"), rows)
    return Findings((table,), tuple(checks), (scale.note, *unfinished_note(comparison)))


FORMS = {
    "paper": InCo(form="paper", reference="first"),
    "theorem": InCo(form="theorem", reference="first"),
    "theorem, conv2": InCo(form="theorem", reference="conv2"),
    "released": InCo(form="released", reference="first"),
    "released, conv2": InCo(form="released", reference="conv2"),
}
DEFAULT = next(label for label, form in FORMS.items() if form == InCo())


def _forms(scale: InCoScale) -> Grid:
    methods = {HETERO: "heteroavg"} | {label: join_techniques("heteroavg", str(form)) for label, form in FORMS.items()}
    return Grid(
        "forms",
        "the paper's algorithm, its theorem and the released code",
        scale.values(
            method=scale.entries(methods),
            dataset=scale.datasets[0] if scale.apart else list(scale.datasets),
            **scale.trial,
        ),
        lambda comparison: _assess_forms(scale, comparison),
        tuning=scale.tuning,
    )


def _assess_forms(scale: InCoScale, comparison: Comparison) -> Findings:
    found: dict[str, dict[str, Seeds]] = {}
    for row in comparison.rows:
        data = dataset_name(row.run.config.dataset)
        found.setdefault(data, {})[row.method] = figures_by_seed(row, clients_accuracy(scale.evaluations))
    checks = [
        above(f"the form '{label}' beats HeteroAvg on {data}", of[label], of[HETERO])
        for data, of in found.items()
        for label in FORMS
    ]
    over_all = {label: mean_over([of[label] for of in found.values()]) for label in FORMS}
    checks.append(best("the default form is the best over the datasets", [DEFAULT], over_all))
    rows = tuple(
        (
            label,
            *(text for of in found.values() for text in (cell(of[label]), cell(differences(of[label], of[HETERO])))),
        )
        for label in (HETERO, *FORMS)
    )
    columns = ("", *(heading for data in found for heading in (data, "gain over HeteroAvg, points")))
    note = (
        "paper: g_k − θ·g_0, normalised, whatever the sign of θ (Algorithm 1); theorem: only where the two go against "
        "each other (Theorem 3.1); released: + |θ|·g_0 for each kernel, within limits; conv2: g_0 is the first block's "
        f"second convolution, as in the authors' runs with 'released, conv2'; the default is '{DEFAULT}'"
    )
    table = FindingsTable("Accuracy of the clients' models by form, Dirichlet(0.5), %", columns, rows)
    return Findings((table,), tuple(checks), (scale.note, note, *unfinished_note(comparison)))


# --- noise, and batch sizes ------------------------------------------------------------------------------------------


def disturbances(scale: InCoScale) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → (a technique to add, fields to change)."""
    usual = {"as usual": ("", dict[str, Any]())}
    noises = {f"noise {share:g}": (str(Perturb(noise=share)), dict[str, Any]()) for share in scale.noises}
    return usual | noises | {f"batch size {size}": ("", {"batch_size": size}) for size in scale.batches}


def _robust(scale: InCoScale) -> Grid:
    entries = [
        {**entry, **fields}
        for name, (more, fields) in disturbances(scale).items()
        for label, text in ((GROUP, GROUPED), (INCO, scale.inco()))
        for entry in scale.entries({f"{label}, {name}": join_techniques(text, more)})
    ]
    return Grid(
        "robust",
        "noise on the updates, and other batch sizes",
        scale.values(method=entries),
        lambda comparison: _assess_robust(scale, comparison),
    )


def _assess_robust(scale: InCoScale, comparison: Comparison) -> Findings:
    found = accuracies(scale, comparison)
    pairs = {name: (found[f"{INCO}, {name}"], found[f"{GROUP}, {name}"]) for name in disturbances(scale)}
    checks = [above(f"InCo beats GroupAvg with {name}", *pair) for name, pair in pairs.items() if name != "as usual"]
    rows = tuple((name, cell(old), cell(new), cell(differences(new, old))) for name, (new, old) in pairs.items())
    title = f"Accuracy of the clients' models on {scale.where}, %"
    table = FindingsTable(title, ("", GROUP, INCO, "gain, points"), rows)
    notes = (
        scale.note,
        "noise is Gaussian, on every client's update before it is sent; its standard deviation is so many times that "
        f"of the update, tensor by tensor; as usual: no noise, batch size {scale.run['batch_size']}",
    )
    return Findings((table,), tuple(checks), (*notes, *unfinished_note(comparison)))


# --- group by group --------------------------------------------------------------------------------------------------


def three_methods(scale: InCoScale) -> dict[str, str]:
    """Inside groups, over all architectures, and over all with crossed layers."""
    return {GROUP: GROUPED, HETERO: "heteroavg", INCO: scale.inco()}


def _groups(scale: InCoScale) -> Grid:
    return Grid(
        "groups",
        "each architecture's own accuracy",
        scale.values(method=scale.entries(three_methods(scale))),
        lambda comparison: _assess_groups(scale, comparison),
        draws=True,
        tuning=scale.tuning,
    )


def _assess_groups(scale: InCoScale, comparison: Comparison) -> Findings:
    archs = {f"ResNet{depth}": scale.arch(depth) for depth in scale.depths}
    found = {
        row.method: {name: figures_by_seed(row, arch_accuracy(arch, scale.evaluations)) for name, arch in archs.items()}
        for row in comparison.rows
    }
    rows = tuple((label, *(cell(seeds) for seeds in columns.values())) for label, columns in found.items())
    checks = [
        above(f"InCo beats {other} on {name}", found[INCO][name], found[other][name])
        for other in (GROUP, HETERO)
        for name in archs
    ]
    table = FindingsTable(f"Accuracy of each architecture on {scale.where}, %", ("", *archs), rows)
    curves = {row.method: {name: arch_curve(row, arch) for name, arch in archs.items()} for row in comparison.rows}
    evaluations = f"the mean of the last {plural(scale.evaluations, 'evaluation')}"
    notes = (f"an accuracy is {evaluations}; curves are means over the seeds", *unfinished_note(comparison))
    return Findings((table,), tuple(checks), notes, {"groups.png": partial(plot_architectures, curves)})


# --- running statistics ----------------------------------------------------------------------------------------------

POLICIES = {"drop": "each batch's own statistics", "average": "averaged running statistics"}


def _statistics(scale: InCoScale) -> Grid:
    return Grid(
        "statistics",
        "running statistics averaged over architectures, and none",
        scale.values(method=scale.entries(three_methods(scale)), buffers=list(POLICIES)),
        lambda comparison: _assess_statistics(scale, comparison),
    )


def _assess_statistics(scale: InCoScale, comparison: Comparison) -> Findings:
    depths = {"shallowest": scale.depths[0], "deepest": scale.depths[-1]}
    measures = {"all": clients_accuracy(scale.evaluations)}
    measures |= {name: arch_accuracy(scale.arch(depth), scale.evaluations) for name, depth in depths.items()}
    found = {
        (row.run.buffers, row.method): {name: figures_by_seed(row, of) for name, of in measures.items()}
        for row in comparison.rows
    }
    rows = tuple(
        (statistics, label, *(cell(seeds) for seeds in found[policy, label].values()))
        for policy, statistics in POLICIES.items()
        for label in three_methods(scale)
    )
    checks = tuple(
        above(f"InCo beats {other} with {statistics}", found[policy, INCO]["all"], found[policy, other]["all"])
        for policy, statistics in POLICIES.items()
        for other in (GROUP, HETERO)
    )
    table = FindingsTable(
        f"Accuracy on {scale.where} by running statistics, %", ("statistics", "", *measures), rows, left=2
    )
    return Findings((table,), checks, (scale.note, *unfinished_note(comparison)))


# --- how alike the clients' models are -------------------------------------------------------------------------------


def _similarity(scale: InCoScale) -> OwnWork:
    run = {name: value for name, value in scale.values(**scale.case).items() if name != "seed"}
    middle = scale.arch(scale.depths[len(scale.depths) // 2])
    equal = {"archs": None, "model": middle, "method": "fedavg"}
    cases = {
        inco_similarity.IID: {**equal, "partition": "iid"},
        inco_similarity.EQUAL: equal,
        inco_similarity.GROUP: {"method": GROUPED},
        inco_similarity.HETERO: {"method": "heteroavg"},
        inco_similarity.INCO: {"method": scale.inco()},
        inco_similarity.PLAIN_INCO: {"method": scale.inco(optimise=False)},
    }
    return OwnWork(
        "similarity",
        "how alike the clients' models are, stage by stage, and where layers go the same way",
        {
            "run": run,
            "cases": cases,
            "stages": ["layer1", "layer2", "layer3", "layer4"],
            "shown": scale.shown,
            "mapped": scale.mapped,
            "zoo": MODELS_VERSION,
        },
        scale.seeds,
        inco_similarity.work,
        inco_similarity.assess,
        draws=True,
    )


# --- gradients between environments ----------------------------------------------------------------------------------


def _gradients(scale: InCoScale) -> OwnWork:
    """All environments begin with the deepest model's weights, in all clients or in those that have it."""
    run = {name: value for name, value in scale.values(**scale.gradients).items() if name != "seed"}
    equal = {"archs": None, "method": "fedavg(weight='uniform')", "partition": "iid"}
    cases = {
        inco_gradients.IID: equal,
        inco_gradients.GROUP: {"method": GROUPED},
        inco_gradients.HETERO: {"method": "heteroavg"},
    }
    first, last = scale.window
    return OwnWork(
        "gradients",
        "Figs. 2 and 3: gradients of a stage's first layer and of its later ones, in an easy and in a hard environment",
        {"run": run, "cases": cases, "stages": list(scale.stages), "first": first, "last": last, "zoo": MODELS_VERSION},
        scale.seeds,
        inco_gradients.work,
        inco_gradients.assess,
        draws=True,
    )
