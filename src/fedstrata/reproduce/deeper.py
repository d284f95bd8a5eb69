"""Deeper models: what a federation loses against centralised training by depth, and what the paper's guidelines change.

"Unlocking the Potential of Federated Learning for Deeper Models" (anonymous, under review): Fig. 1 and Tables 1 to 6.
CL and FL are the accuracies of centralised and of federated training with the same steps in all, Gap = CL − FL, and
I_div = (CL₁ − FL₁) − (CL₂ − FL₂) is what a change of the model or of the data does to FL beyond what it does to CL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedstrata.compare import Comparison
from fedstrata.reproduce import (
    deeper_accumulation,
    deeper_divergence,
    deeper_maxpool,
    deeper_steps,
    deeper_terms,
)
from fedstrata.reproduce.deeper_figures import SettingFigures, figures_of_setting
from fedstrata.reproduce.deeper_measures import GRADIENTS, MEASURES
from fedstrata.reproduce.deeper_plots import pictures
from fedstrata.reproduce.deeper_report import gaps_table, main_table, notes_on
from fedstrata.reproduce.deeper_settings import CL, FL, SCALES, DeeperScale, watched
from fedstrata.reproduce.deeper_tables import PaperTable, paper_tables, tables_elsewhere
from fedstrata.reproduce.parts import Findings, Grid, OwnWork, Part, unfinished_note


def parts(scale: str) -> list[Part]:
    """The parts of the reproduction, in the order of the report."""
    chosen = SCALES[scale]
    tables = [_grid(chosen, *table) for table in paper_tables(chosen).items()]
    reasons: list[Part] = [deeper_steps.part(chosen), deeper_maxpool.part(chosen)]
    if scale != "evidence":
        return [_accumulation(chosen), _terms(chosen), _rounds(chosen), *tables, *reasons]
    others = [_grid(chosen, *table) for table in tables_elsewhere(chosen).items()]
    found: list[Part] = [_accumulation(chosen), *tables, *reasons, *others, _rounds(chosen), _terms(chosen)]
    return [replace(part, headline=part.name in HEADLINE) for part in found]


HEADLINE = ("accumulation", "depth")
"""What fits three hours at the scale `evidence`."""


def _accumulation(scale: DeeperScale) -> OwnWork:
    given = scale.networks
    run = _network_run(scale, given["models"])
    return OwnWork(
        "accumulation",
        "how far apart gradients are in CNNs, layer by layer, under noise and within a class",
        {**given, "run": run, "measures": [measure.name for measure in GRADIENTS]},
        scale.seeds,
        deeper_accumulation.work,
        deeper_accumulation.assess,
        draws=True,
    )


def _network_run(scale: DeeperScale, models: Mapping[str, str]) -> dict[str, Any]:
    """The fields of the runs that train networks one by one."""
    return {**scale.networks["run"], "partition": "iid", "clients": 1, "model": next(iter(models.values()))}


def _terms(scale: DeeperScale) -> OwnWork:
    return OwnWork(
        "terms",
        "what of a layer's deviation comes back from the next layer, and what from its inputs (Eq. 11, Assumption 1)",
        {**scale.terms, "run": _network_run(scale, scale.terms["models"])},
        scale.seeds,
        deeper_terms.work,
        deeper_terms.assess,
    )


def _rounds(scale: DeeperScale) -> OwnWork:
    run = {**scale.run, "dataset": scale.data(scale.among("tiny-imagenet")[0]), "partition": "iid"}
    return OwnWork(
        "rounds",
        "the clients' divergence, layer by layer and round by round",
        {
            "run": {**run, "model": scale.resnet(scale.deep), "eval_every": run["rounds"]},
            "measures": [measure.name for measure in MEASURES],
        },
        scale.seeds,
        deeper_divergence.measure_rounds,
        deeper_divergence.assess_rounds,
        draws=True,
    )


# --- the tables ------------------------------------------------------------------------------------------------------

ABOUT = {
    "depth": "ResNets of different depth",
    "width": "wider models",
    "stem": "a smaller receptive field: a stem of 3×3 instead of 7×7, or no max-pool",
    "resolution": "images of more pixels",
    "augmentation": "random resized crops (RRC), colour jitter (CJ), and both",
    "transformer": "attention over the whole image, and in windows",
    "residual": "residual links",
    "channels": "channels that grow with depth, are as many in all layers, or shrink",
}


def _grid(scale: DeeperScale, name: str, table: PaperTable) -> Grid:
    places = table.places(scale)
    axes = {"dataset": list(dict.fromkeys(dataset for dataset, _ in places))}
    if table.axis != "dataset":
        axes[table.axis] = list(dict.fromkeys(value for _, value in places))
    fixed = {} if table.model is None else {"model": table.model}
    methods = [{"method": "centralised", "label": CL}, {"method": "fedavg", "label": FL}]
    common = {**scale.run, **watched(scale), "partition": "iid", "seed": list(scale.seeds)}
    values = {**common, "method": methods, **fixed, **axes}
    return Grid(
        name,
        ABOUT[name.partition("-")[0]] + "".join(f", on {data}" for data in table.datasets if data in scale.elsewhere),
        values,
        lambda comparison: _assess(scale, name, table, comparison),
        draws=scale.draws,
        tuning=scale.tuning,
    )


def _assess(scale: DeeperScale, name: str, table: PaperTable, comparison: Comparison) -> Findings:
    places, rows = table.places(scale), {}
    for row in comparison.rows:
        rows[row.run.config.dataset, getattr(row.run.config, table.axis), row.method] = row
    found: dict[str, dict[str, SettingFigures]] = {}
    for (dataset, value), (data, label) in places.items():
        found.setdefault(data, {})[label] = figures_of_setting(rows[dataset, value, CL], rows[dataset, value, FL])
    checks = tuple(check for data, cells in found.items() for check in table.claims(table, cells, data))
    layers = {data: {label: dict(cell.layers) for label, cell in cells.items()} for data, cells in found.items()}
    values = "; ".join(dict.fromkeys(f"{label}: {value}" for (_, value), (_, label) in places.items()))
    return Findings(
        (main_table(found), gaps_table(found)),
        checks,
        (f"{table.axis} {values}", *notes_on(found), *unfinished_note(comparison)),
        pictures(name, found) if scale.draws else {},
        {"layers": layers},
    )
