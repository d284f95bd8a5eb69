"""Deeper models: does a federation come nearer to centralised training by fewer local steps, or by a smaller rate?

"Unlocking the Potential of Federated Learning for Deeper Models", §1: "One straightforward approach to enhance FL
performance involves making the FL process more similar to CL by reducing the local iteration number or decreasing the
learning rate", because with one local iteration it is CL. All rows take the same steps in all, and are evaluated as
often; a rate's gap is to CL at that rate. No rate is tuned: the rates are what is compared.
"""

from __future__ import annotations

from typing import Any

from fedstrata.compare import Comparison
from fedstrata.reproduce.claims import Check
from fedstrata.reproduce.deeper_figures import SettingFigures, figures_of_setting
from fedstrata.reproduce.deeper_plots import pictures
from fedstrata.reproduce.deeper_report import gaps_table, main_table, notes_on
from fedstrata.reproduce.deeper_settings import CL, FL, DeeperScale, fewer_steps, watched
from fedstrata.reproduce.deeper_tables import FiguresByLabel, PaperTable, better_accuracy, narrower
from fedstrata.reproduce.parts import Findings, Grid, dataset_name, unfinished_note

SHRINK = 4
"""How many times smaller the smaller rate is."""


def part(scale: DeeperScale) -> Grid:
    """The deep ResNet with all local steps and with the fewest, and at the rate and at a quarter of it."""
    values = {
        **scale.run,
        **watched(scale),
        "dataset": scale.data(scale.among("cifar-10")[0]),
        "model": scale.resnet(scale.deep),
        "partition": "iid",
        "method": list({entry["label"]: entry for pair in _ways(scale).values() for entry in pair}.values()),
        "seed": list(scale.seeds),
    }
    about = "fewer local steps and a smaller learning rate: nearer to centralised training?"
    return Grid("steps", about, values, lambda comparison: _assess(scale, comparison), draws=scale.draws)


def _ways(scale: DeeperScale) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Label → (centralised, federated) as the entries of a comparison."""
    many, one, fields = fewer_steps(scale)
    rate = scale.run["lr"] / SHRINK
    slower = {"lr": rate}
    central, federated = {"method": "centralised", "label": CL}, {"method": "fedavg", "label": FL}
    return {
        f"{many}, lr {scale.run['lr']:g}": (central, federated),
        f"{one}, lr {scale.run['lr']:g}": (central, {**federated, "label": f"{FL}, {one}", **fields}),
        f"{many}, lr {rate:g}": (
            {**central, "label": f"{CL}, lr {rate:g}", **slower},
            {**federated, "label": f"{FL}, lr {rate:g}", **slower},
        ),
    }


def _assess(scale: DeeperScale, comparison: Comparison) -> Findings:
    rows = {row.method: row for row in comparison.rows}
    ways = _ways(scale)
    cells: dict[str, SettingFigures] = {
        label: figures_of_setting(*(rows[entry["label"]] for entry in pair)) for label, pair in ways.items()
    }
    data = dataset_name(comparison.rows[0].run.config.dataset)
    found = {data: cells}
    notes = (
        "all rows take as many steps, and are evaluated after as many; CL of the second row is that of the first",
        *notes_on(found),
        *unfinished_note(comparison),
    )
    return Findings(
        (main_table(found), gaps_table(found)),
        tuple(claims(cells, data)),
        notes,
        pictures("steps", found) if scale.draws else {},
        {"layers": {data: {label: dict(cell.layers) for label, cell in cells.items()}}},
    )


def claims(cells: FiguresByLabel, data: str) -> list[Check]:
    """Of each row against the first: FL is better, and the gap to CL is narrower."""
    table = PaperTable("steps", dict.fromkeys(cells), (), lambda *_: [])
    first, *others = cells
    return [
        check
        for other in others
        for check in (
            better_accuracy(table, cells, data, other, first),
            *narrower(table, cells, data, other, first),
        )
    ]
