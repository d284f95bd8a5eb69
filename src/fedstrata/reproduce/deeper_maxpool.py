"""Deeper models: why does a federation lose accuracy here without max-pool, where the paper's gains it?

"Unlocking the Potential of Federated Learning for Deeper Models", Table 2, has "No M.P." 11 to 24 points above the
base; at the scale `small` it is 2 points below, while centralised training gains 2. Each reason that there may be is
taken away by itself, and it is asked how much max-pool still gains the federation:

- running statistics that do not fit the averaged weights: they are estimated again;
- too few rounds for maps of four times the size: FL on a plateau against a quarter of the rounds that lead to it;
- a rate that suits only the base: each model at the best of several rates, seed by seed;
- clients that drift apart on their own data: one local epoch, with as many steps in all;
- nothing of the federation: does centralised training, too, lose without max-pool after as few sequential steps?

And two signs: clients' training loss (is it lost in fitting, or in averaging?), and their relative divergence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.compare import Comparison, ComparisonRow
from fedstrata.compare.runner import read_finished_records
from fedstrata.reproduce.claims import GAINS, PLAIN, Check, above, beyond, cell
from fedstrata.reproduce.deeper_figures import SettingFigures, figures_of_setting
from fedstrata.reproduce.deeper_measures import RELATIVE
from fedstrata.reproduce.deeper_plots import pictures
from fedstrata.reproduce.deeper_report import gaps_table, main_table, notes_on
from fedstrata.reproduce.deeper_settings import CL, FL, DeeperScale, fewer_steps, watched
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    Grid,
    best_until,
    dataset_name,
    figures_by_seed,
    highest_accuracy,
    unfinished_note,
)
from fedstrata.reproduce.verdicts import Seeds, differences
from fedstrata.runs.records import Record

POOLED, BARE = "base", "no max-pool"
FACTORS = (0.5, 2.5)
"""The other rates, over the scale's: at `evidence` these are the ones that all tables are tuned by."""
LEFT = 0.01
"""What max-pool may still gain where the reason for it is said to be found."""
EARLY = 4
"""The share of the rounds to the plateau that is early: one in so many."""


def part(scale: DeeperScale) -> Grid:
    """The deep ResNet with max-pool and without, at several rates, and with the fewest local steps."""
    federated = {"method": "fedavg"}
    one, fields = fewer_steps(scale)[1:]
    methods: list[dict[str, Any]] = [
        {"method": "centralised", "label": CL},
        {"label": FL, **federated},
        *({"label": _rate_label(rate), "lr": rate, **federated} for rate in _rates(scale)),
        {"label": f"{FL}, {one}", **federated, **fields},
    ]
    if scale.plateau is not None:
        methods.append({"label": _long_label(scale), "rounds": scale.plateau, **federated})
    values = {
        **scale.run,
        **watched(scale),
        "dataset": scale.data(scale.among("cifar-10")[0]),
        "model": [scale.resnet(scale.deep), scale.resnet(scale.deep, maxpool=False)],
        "partition": "iid",
        "method": methods,
        "seed": list(scale.seeds),
    }
    about = "why no max-pool costs the federation accuracy: one reason after the other taken away"
    return Grid("maxpool", about, values, lambda comparison: _assess(scale, comparison), draws=scale.draws)


def _rates(scale: DeeperScale) -> list[float]:
    return [round(factor * scale.run["lr"], 6) for factor in FACTORS]


def _rate_label(rate: float) -> str:
    return f"{FL}, lr {rate:g}"


def _long_label(scale: DeeperScale) -> str:
    """The federated run that goes on to the plateau; at some scales every run does."""
    return FL if scale.plateau is None else f"{FL}, {scale.plateau} rounds"


# --- what is read of the runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFigures:
    """One model's accuracies in every way of looking at it, seed by seed.

    Args:
        setting: CL and FL as they are.
        early: FL's best in a quarter of the rounds to the plateau.
        long: FL's best in all of them.
        last: FL's last model.
        tuned: FL's best at the best of all rates.
        short: FL's best with the fewest local steps.
        train_loss: the clients', in FL's last round.
    """

    setting: SettingFigures
    early: Seeds
    long: Seeds
    last: Seeds
    tuned: Seeds
    short: Seeds
    train_loss: Seeds


def read_model(rows: Mapping[str, ComparisonRow], scale: DeeperScale) -> ModelFigures:
    """Label of a method → its row, of one model."""
    long = rows[_long_label(scale)]
    rates = [figures_by_seed(rows[label], highest_accuracy) for label in (FL, *map(_rate_label, _rates(scale)))]
    ends = {r.seed: read_finished_records(Path(r.directory))[-1] for r in rows[FL].sound_results}
    losses = {seed: record.train_loss for seed, record in ends.items()}
    return ModelFigures(
        figures_of_setting(rows[CL], rows[FL]),
        figures_by_seed(long, best_until(max(long.run.rounds // EARLY, 1))),
        figures_by_seed(long, highest_accuracy),
        figures_by_seed(rows[FL], last_accuracy),
        best_of(rates),
        figures_by_seed(rows[f"{FL}, {fewer_steps(scale)[1]}"], highest_accuracy),
        {seed: loss for seed, loss in losses.items() if loss is not None},
    )


def last_accuracy(rounds: Sequence[Record]) -> float | None:
    """The last model's."""
    return rounds[-1].accuracy


def best_of(several: Sequence[Seeds]) -> dict[int, float]:
    """Seed → the best; a run that diverged is not, and a seed that the first of them lacks is left out."""
    return {seed: max(found[seed] for found in several if seed in found) for seed in several[0]}


@dataclass(frozen=True)
class Way:
    """A way of looking at both models.

    Args:
        label: in the table.
        pooled: seed → accuracy with max-pool.
        bare: without.
    """

    label: str
    pooled: Seeds
    bare: Seeds

    @property
    def gain(self) -> dict[int, float]:
        """What max-pool gains."""
        return differences(self.pooled, self.bare)


def ways(pooled: ModelFigures, bare: ModelFigures, one: str) -> dict[str, Way]:
    """Key → way, in the order of the table."""
    found: dict[str, tuple[str, Callable[[ModelFigures], Seeds]]] = {
        "cl": ("CL, best", lambda m: m.setting.cl),
        "cl early": ("CL at FL's sequential steps", lambda m: m.setting.cl_early),
        "fl": ("FL, best", lambda m: m.setting.fl),
        "early": ("FL, best in a quarter of the rounds to the plateau", lambda m: m.early),
        "long": ("FL, best in all of them", lambda m: m.long),
        "last": ("FL, last model", lambda m: m.last),
        "again": ("FL, last model, statistics estimated again", lambda m: m.setting.fl_again),
        "tuned": ("FL, at the best of the rates", lambda m: m.tuned),
        "short": (f"FL, {one}", lambda m: m.short),
    }
    return {key: Way(label, of(pooled), of(bare)) for key, (label, of) in found.items()}


REASONS = (
    ("running statistics", "last", "again", "once they are estimated again"),
    ("too few rounds", "early", "long", "on the plateau"),
    ("the learning rate", "fl", "tuned", "at each one's best rate"),
    ("local drift", "fl", "short", "with the fewest local steps"),
)
"""(the reason, the way with it, the way without it, how the claim says so)."""


# --- the findings ----------------------------------------------------------------------------------------------------


def _assess(scale: DeeperScale, comparison: Comparison) -> Findings:
    pooled, bare = (
        read_model({row.method: row for row in comparison.rows if row.run.config.model == model}, scale)
        for model in (scale.resnet(scale.deep), scale.resnet(scale.deep, maxpool=False))
    )
    data = dataset_name(comparison.rows[0].run.config.dataset)
    found = {data: {POOLED: pooled.setting, BARE: bare.setting}}
    looked, rates = ways(pooled, bare, fewer_steps(scale)[1]), sorted([scale.run["lr"], *_rates(scale)])
    notes = (
        "max-pool's gain: the accuracy with it − the one without it; a reason is it if the gain is less without it, "
        f"and under {100 * LEFT:g} point is left",
        f"rates: {', '.join(f'{rate:g}' for rate in rates)}; the best one is chosen "
        "for each model and seed by the test accuracy that is reported, for both models alike",
        *notes_on(found),
        *unfinished_note(comparison),
    )
    return Findings(
        (_table(looked, pooled, bare), main_table(found), gaps_table(found)),
        tuple(claims(looked, pooled, bare, data)),
        notes,
        pictures("maxpool", found) if scale.draws else {},
        {"ways": {key: {"base": dict(w.pooled), "no max-pool": dict(w.bare)} for key, w in looked.items()}},
    )


def _table(looked: Mapping[str, Way], pooled: ModelFigures, bare: ModelFigures) -> FindingsTable:
    rows = [(way.label, cell(way.pooled), cell(way.bare), cell(way.gain)) for way in looked.values()]
    return FindingsTable(
        "What max-pool gains, with each reason taken away, %",
        ("accuracy of", POOLED, BARE, "max-pool's gain, points"),
        tuple(rows),
    )


def claims(looked: Mapping[str, Way], pooled: ModelFigures, bare: ModelFigures, data: str) -> Iterator[Check]:
    """What is to be explained; then each reason, by what is left of max-pool's gain without it; then the signs."""
    fl, cl = looked["fl"], looked["cl"]
    yield above(f"max-pool gains FL accuracy on {data}", fl.pooled, fl.bare, paper="61.8 against 72.4 %")
    yield above(f"max-pool costs CL accuracy on {data}", cl.bare, cl.pooled, paper="79.3 against 72.8 %")
    for reason, before, after, how in REASONS:
        name = f"{reason}: max-pool gains FL less {how}, on {data}"
        yield above(name, looked[before].gain, looked[after].gain, unit=GAINS)
        name = f"{reason}: less than a point of max-pool's gain is left {how}, on {data}"
        yield beyond(name, looked[after].gain, LEFT, below=True, unit=GAINS)
    early = looked["cl early"]
    name = f"nothing of the federation: max-pool gains CL accuracy, too, at FL's sequential steps, on {data}"
    yield above(name, early.pooled, early.bare)
    name = f"lost in averaging: clients' training loss is no higher with {BARE} than with {POOLED}, on {data}"
    yield above(name, pooled.train_loss, bare.train_loss, unit=PLAIN)
    name = f"clients diverge more with {BARE} than with {POOLED}, {RELATIVE.claim}, on {data}"
    yield above(name, bare.setting.div(RELATIVE), pooled.setting.div(RELATIVE), unit=RELATIVE.unit)
